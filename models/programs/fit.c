/* models/programs/fit.c: --fit: which ways to train fit a rank's memory. Each is rehearsed: two
 * whole steps of one rank among the others on meta, where tensors have no bytes and the ledger
 * counts what they would take. So the figures are those of the ledger in the run itself, whatever
 * the model; scratch of the libraries that compute is not among them. */
#include "comm/comm_internal.h"
#include "fsdp/kinds.h"
#include "kernels/environment.h"
#include "models/options_internal.h"
#include "models/programs/training.h"
#include "state/attempt.h"

/* One way to train, and what it needs. */
typedef struct way {
    int strategy, layout;
    bool recompute, offload;
    kn_ledger of; /* peaks, with --batch */
    int64_t rows; /* the most of a micro-batch that fit; 0: none */
} way;

typedef struct fit {
    training *t;
    bool gpu;
    int64_t room; /* bytes of a rank */
    way *way;
    int ways;
    char error[KN_ATTEMPT_TEXT]; /* of the last way that is refused */
} fit;

#define NAME(id, name, ...) name,
static const char *const layouts[] = { KN_LAYOUTS(NAME) };
enum {
    LAYOUTS = sizeof layouts / sizeof *layouts,
    STRATEGIES = KN_STRATEGY_COUNT - KN_FULL_SHARD,
    MOST_ROWS = 1 << 20 /* of --batch */
};

/* ---- a rehearsal ----------------------------------------------------------------------------- */

static bool two_steps(const fit *f)
{
    training *t = f->t;
    settings *s = t->s;
    if (!kn_fsdp_mesh(&s->mesh, (kn_strategy)(KN_FULL_SHARD + s->strategy), t->world) ||
        !t->of->declare(t))
        return false;
    kn_fsdp_wrap_options o = settings_fsdp(s, t->family->block_class);
    o.device = KN_META;
    o.forward_prefetch |= f->gpu && o.backward_prefetch == KN_PREFETCH_PRE &&
                          !kn_options_given(t->options, "forward-prefetch");
    return training_shard(t, o) && training_make_optim(t) && train_step_on_meta(t) &&
           train_step_on_meta(t);
}

/* The peaks of w's steps with so many rows; false where w is refused, for the reason in error. */
static bool rehearse(const fit *f, const way *w, int64_t rows, kn_ledger *of, char *error)
{
    training *t = f->t;
    const settings given = *t->s;
    kn_attempt attempt;
    kn_attempt_begin(&attempt);
    t->s->strategy = w->strategy;
    t->s->layout = w->layout;
    t->s->recompute = w->recompute;
    t->s->offload = w->offload ? "memory" : NULL;
    t->s->batch = rows;
    t->s->mesh = (kn_mesh){ (int)given.replicas, (int)given.shards };
    const kn_ledger before = kn_ledger_read();
    kn_ledger_reset_peaks();
    const bool ok = two_steps(f);
    *of = kn_ledger_read();
    for (int i = 0; i < KN_MEM_COUNT; i++)
        of->peak[i] -= before.live[i];
    of->peak_total -= before.live_total;
    of->peak_pinned -= before.live_pinned;
    training_free_model(t);
    *t->s = given;
    return kn_attempt_end(&attempt, error) && ok;
}

static bool fits(fit *f, const way *w, int64_t rows)
{
    kn_ledger l;
    char error[KN_ATTEMPT_TEXT];
    return rehearse(f, w, rows, &l, error) && l.peak_total <= f->room;
}

/* Memory grows with the rows. */
static int64_t most_rows(fit *f, const way *w)
{
    int64_t low = 0, high = 1;
    while (low < MOST_ROWS && fits(f, w, high)) {
        low = high;
        high *= 2;
    }
    if (low == MOST_ROWS)
        return low;
    while (high - low > 1) {
        const int64_t middle = low + (high - low) / 2;
        *(fits(f, w, middle) ? &low : &high) = middle;
    }
    return low;
}

/* ---- all of them ----------------------------------------------------------------------------- */

/* All strategies, the one with the least traffic first: small groups, and what stays gathered. */
static void list_strategies(int strategy[STRATEGIES])
{
    int n = 0;
    for (int mesh = KN_MESH_OF_ONE; mesh >= KN_MESH_OF_ALL; mesh--)
        for (int keeps = 1; keeps >= 0; keeps--)
            for (int s = KN_FULL_SHARD; s < KN_STRATEGY_COUNT; s++)
                if ((int)kn_strategies[s].mesh == mesh && kn_strategies[s].keeps == keeps)
                    strategy[n++] = s - KN_FULL_SHARD;
}

/* Options that are given stay; the others take each value, the cheapest in time first: what is
 * computed twice and what travels to the host cost more than what travels between ranks. */
static bool rehearse_all(fit *f)
{
    int by_traffic[STRATEGIES];
    const settings *s = f->t->s;
    const kn_options *o = f->t->options;
    const bool alone = kn_comm_size(f->t->world) == 1;
    const bool cut = kn_options_given(o, "strategy") || alone,
               formed = kn_options_given(o, "layout") || alone;
    list_strategies(by_traffic);
    f->way = kn_host_calloc((size_t)STRATEGIES * LAYOUTS * 4, sizeof *f->way);
    for (int i = 0; f->way && i < 4 * STRATEGIES * LAYOUTS; i++) {
        const int layout = i % LAYOUTS, strategy = i / LAYOUTS % STRATEGIES,
                  rest = i / LAYOUTS / STRATEGIES;
        way w = { .strategy = by_traffic[strategy],
                  .layout = layout,
                  .recompute = rest & 1,
                  .offload = rest >> 1 };
        if ((cut && w.strategy != s->strategy) || (formed && layout != s->layout) ||
            (kn_options_given(o, "recompute") && w.recompute != s->recompute) ||
            (kn_options_given(o, "offload") ? w.offload != (s->offload != NULL)
                                            : w.offload && !f->gpu) ||
            !rehearse(f, &w, s->batch, &w.of, f->error))
            continue;
        w.rows = most_rows(f, &w);
        f->way[f->ways++] = w;
    }
    return f->ways > 0 || (kn_ok() && kn_fail("--fit: no way to train is left: %s", f->error));
}

/* ---- printing -------------------------------------------------------------------------------- */

static void print_size(int64_t bytes)
{
    char text[32];
    printf(" %9s", bytes ? report_bytes((double)bytes, text, sizeof text) : "-");
}

static void print_ways(const fit *f)
{
    static const kn_mem_category shown[] = { KN_MEM_PARAM,    KN_MEM_GRAD,      KN_MEM_OPTIM,
                                             KN_MEM_GATHERED, KN_MEM_UNREDUCED, KN_MEM_ACTIVATION };
    printf("%-21s %-9s %-9s %-7s %9s %9s %9s %9s %9s %9s %9s %9s %9s\n", "strategy", "layout",
           "recompute", "offload", "params", "grads", "optimizer", "gathered", "unreduced",
           "computed", "all", "offloaded", "most rows");
    for (int i = 0; i < f->ways; i++) {
        const way *w = &f->way[i];
        printf("%-21s %-9s %-9s %-7s", kn_strategies[KN_FULL_SHARD + w->strategy].name,
               layouts[w->layout], w->recompute ? "yes" : "-", w->offload ? "yes" : "-");
        for (size_t k = 0; k < sizeof shown / sizeof *shown; k++)
            print_size(w->of.peak[shown[k]]);
        print_size(w->of.peak_total);
        print_size(w->of.peak_pinned);
        printf(" %9lld%s\n", (long long)w->rows, w->rows >= f->t->s->batch ? " *" : "");
    }
}

/* The first way that fits with --batch; else the one that fits the most rows; NULL: none does. */
static const way *best_of(const fit *f)
{
    const way *best = NULL;
    for (int i = 0; i < f->ways; i++) {
        if (f->way[i].rows >= f->t->s->batch)
            return &f->way[i];
        if (f->way[i].rows > (best ? best->rows : 0))
            best = &f->way[i];
    }
    return best;
}

static bool print_command(const fit *f, const way *w)
{
    kn_options *o = f->t->options;
    char rows[24];
    snprintf(rows, sizeof rows, "%lld", (long long)w->rows);
    if (!kn_options_set(o, "strategy", kn_strategies[KN_FULL_SHARD + w->strategy].name) ||
        !kn_options_set(o, "layout", layouts[w->layout]) ||
        (w->recompute && !kn_options_set(o, "recompute", "true")) ||
        (w->offload && !f->t->s->offload && !kn_options_set(o, "offload", "memory")) ||
        (w->rows < f->t->s->batch && !kn_options_set(o, "batch", rows)))
        return false;
    char *words = kn_options_words(o, ~(1u << KN_OF_ONCE));
    if (words)
        printf("\n%s%s\n", f->t->program, words);
    kn_host_free(words);
    return words != NULL;
}

static bool print_all(const fit *f)
{
    const settings *s = f->t->s;
    const way *best = best_of(f), *least = f->way;
    char a[32], b[32];
    printf("a rank of %d with micro-batches of %lld and %s of memory; *: it fits\n\n",
           kn_comm_size(f->t->world), (long long)s->batch,
           report_bytes((double)f->room, a, sizeof a));
    print_ways(f);
    if (best && best->rows < s->batch)
        printf("\nnothing fits with --batch %lld; with %lld:\n", (long long)s->batch,
               (long long)best->rows);
    if (best)
        return print_command(f, best) &&
               (fflush(stdout) == 0 || kn_fail_system("cannot write to standard output: %m"));
    for (int i = 1; i < f->ways; i++)
        if (f->way[i].of.peak_total < least->of.peak_total)
            least = &f->way[i];
    fflush(stdout);
    return kn_fail("--fit %s: not even one row fits %s; with --batch %lld the least is %s, by "
                   "--strategy %s%s: give more --ranks or a smaller model",
                   s->fit, a, (long long)s->batch,
                   report_bytes((double)least->of.peak_total, b, sizeof b),
                   kn_strategies[KN_FULL_SHARD + least->strategy].name,
                   least->recompute ? " --recompute" : "");
}

/* ---- the option ------------------------------------------------------------------------------ */

bool training_fit(training *t)
{
    settings *s = t->s;
    fit f = { .t = t, .gpu = settings_device(s) == KN_CUDA };
    kn_comm *real = t->world;
    if (!kn_parse_size(s->fit, &f.room) || f.room == 0)
        return kn_fail("--fit takes the memory of a rank, such as 24GiB or 900M, not '%s'", s->fit);
    if (!(t->world = kn_comm_simulated((int)s->ranks, 0, 0))) {
        t->world = real;
        return false;
    }
    const settings given = *s;
    s->device = 0; /* no GPU is needed, and no folder is made */
    s->deterministic = s->cuda_graph = false;
    s->out = NULL;
    bool ok = training_place(t) && t->of->open(t);
    s->device = given.device;
    s->out = given.out;
    t->device = KN_META;
    kn_module_free(&t->model);
    ok = ok && (t->over || (rehearse_all(&f) && print_all(&f)));
    kn_host_free(f.way);
    kn_comm_simulated_free(t->world);
    t->world = real;
    return ok;
}
