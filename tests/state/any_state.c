/* tests/state/any_state.c: draws settings of a run on 1 to 4 ranks and of another one, and how its
 * state gets there. The state must arrive with every bit, and the next step be that of one plain
 * process that has the state. Rank functions return a status. */
#include "tests/state/any_state.h"

#include "kernels/philox.h"
#include "tests/fsdp/optimizers.h"
#include "tests/models/temp.h"
#include "tests/state/moving.h"

typedef enum vehicle {
    FULL,     /* on every rank */
    RANK0,    /* dealt out again */
    SHARDED,  /* by the same ranks */
    LOCAL,    /* by the same ranks in the same setting */
    GATHERED, /* parts, made whole in memory */
    SAVED,    /* a file of rank 0's */
    FOLDER,   /* a checkpoint */
    VEHICLES
} vehicle;
static const char *const vehicle_name[] = { "full",     "rank 0", "sharded",   "local",
                                            "gathered", "file",   "checkpoint" };

/* How one side is sharded. */
typedef struct side {
    int ranks;
    bool plain;   /* one rank, not wrapped */
    bool columns; /* per parameter: matrices are cut along them where the ranks divide these */
    kn_fsdp_wrap_options o;
} side;

typedef struct any_case {
    uint64_t seed;
    vehicle by;
    side from, to;
    int optimizer;
    bool ema, frozen;
    char path[256];
} any_case;

/* ---- drawing --------------------------------------------------------------------------------- */

typedef struct dice {
    uint64_t seed, count;
} dice;

static int roll(dice *d, int n)
{
    return (int)(kn_philox_at(d->seed, 77, d->count++) % (uint32_t)n);
}

static int columns(const char *name, int ndim, const int64_t *shape, void *ranks)
{
    (void)name;
    return ndim == 2 && shape[1] % *(int *)ranks == 0 ? 1 : 0;
}

static side draw_side(dice *d)
{
    static const char *const classes[] = { "linear,layer_norm", "linear", NULL };
    side s = { .ranks = 1 + roll(d, 4), .plain = roll(d, 8) == 0 };
    s.ranks = s.plain ? 1 : s.ranks;
    s.o = (kn_fsdp_wrap_options){
        ._size = sizeof s.o,
        .strategy = KN_FULL_SHARD + roll(d, KN_STRATEGY_COUNT - 1),
        .layout = KN_LAYOUT_FLAT + roll(d, KN_LAYOUT_COUNT - 1),
        .wrap_class = classes[roll(d, 3)],
        .keep_whole_below = roll(d, 3) ? 0 : 20,
        .offload_dir = roll(d, 4) ? NULL : "/tmp",
    };
    s.columns = s.o.layout == KN_LAYOUT_PER_PARAM && roll(d, 2);
    if (s.o.strategy >= KN_HYBRID_SHARD)
        s.o.mesh.shards = s.ranks == 4 ? 1 << roll(d, 3) : roll(d, 2) ? s.ranks : 1;
    return s;
}

static any_case draw(uint64_t seed)
{
    dice d = { seed, 0 };
    any_case c = { .seed = seed, .by = roll(&d, VEHICLES), .optimizer = roll(&d, OPTIMIZER_KINDS) };
    c.from = draw_side(&d);
    c.to = draw_side(&d);
    c.ema = roll(&d, 3) == 0 && c.by != LOCAL;
    c.frozen = roll(&d, 3) == 0;
    if (c.by == LOCAL)
        c.from.plain = false;
    if (c.by == LOCAL || c.by == SHARDED)
        c.to.ranks = c.from.ranks;
    if (c.by == LOCAL || (c.by == SHARDED && (c.from.plain || c.to.plain)))
        c.to = c.from;
    if (c.to.o.strategy >= KN_HYBRID_SHARD && c.to.ranks % (c.to.o.mesh.shards | !c.to.ranks))
        c.to.o.mesh.shards = c.to.ranks;
    return c;
}

static void describe_side(char *text, size_t size, const side *s)
{
    if (s->plain)
        snprintf(text, size, "plain");
    else
        snprintf(text, size,
                 "%d ranks, strategy %d, layout %d, shards %d, units %s, whole below %d%s%s",
                 s->ranks, s->o.strategy, s->o.layout, s->o.mesh.shards,
                 s->o.wrap_class ? s->o.wrap_class : "(root)", (int)s->o.keep_whole_below,
                 s->columns ? ", by columns" : "", s->o.offload_dir ? ", offloaded" : "");
}

static void describe(char *text, size_t size, const any_case *c)
{
    char from[160], to[160];
    describe_side(from, sizeof from, &c->from);
    describe_side(to, sizeof to, &c->to);
    snprintf(text, size, "seed %llu: %s, optimizer %d%s%s; from %s; to %s",
             (unsigned long long)c->seed, vehicle_name[c->by], c->optimizer,
             c->ema ? ", averages" : "", c->frozen ? ", frozen" : "", from, to);
}

/* ---- a training ------------------------------------------------------------------------------ */

typedef struct training {
    net m;
    kn_optim *o;
    kn_ema *ema;
    kn_comm *comm; /* NULL: plain */
} training;

static bool begin(training *t, const any_case *c, const side *s, kn_comm *comm, uint64_t seed)
{
    *t = (training){ .comm = s->plain ? NULL : comm };
    kn_fsdp_wrap_options o = s->o;
    int ranks = s->ranks;
    o.seed = seed;
    o.placement = s->columns ? columns : NULL;
    o.placement_arg = s->columns ? &ranks : NULL;
    bool ok = net_init(&t->m, KN_META) && (!c->frozen || kn_freeze_matching(&t->m, "ln.*", true)) &&
              (s->plain ? kn_materialize(&t->m, KN_CPU, seed) : kn_fsdp_wrap_(&t->m, comm, o)) &&
              kn_fill_(kn_module_buffer(&t->m, "scale"), (double)seed);
    t->o = ok ? optimizer_make(c->optimizer, &t->m, false) : NULL;
    if (t->o)
        kn_set_lr(t->o, 0.001 * (double)seed);
    t->ema = t->o && c->ema ? kn_ema_new(&t->m, .decay = 0.75) : NULL;
    return t->o && (t->ema || !c->ema);
}

static void finish(training *t)
{
    kn_ema_free(t->ema);
    kn_optim_free(t->o);
    kn_module_free(&t->m);
}

enum { ROUND = 12 }; /* micro-batches of a step, for 1 to 4 ranks */

static bool train(training *t, int number)
{
    const int ranks = kn_comm_size(t->comm), rank = kn_rank(t->comm);
    bool ok = true;
    for (int a = 0; ok && a < ROUND; a += ranks)
        ok = net_backward(&t->m, number * ROUND + a + rank);
    return ok && kn_step(t->o) && (!t->ema || kn_ema_update(t->ema));
}

/* Everything, in one dictionary; NULL with an error. */
static kn_state *take_all(training *t, kn_state_kind kind, bool rank0)
{
    kn_state *s = kn_state_dict(&t->m, .kind = kind, .rank0_only = rank0, .prefix = "model."),
             *o = kn_optim_state_dict(t->o, .kind = kind, .rank0_only = rank0, .prefix = "optim."),
             *e = t->ema ? kn_state_dict(&t->m, .kind = kind, .rank0_only = rank0, .prefix = "ema.",
                                         .ema = t->ema)
                         : kn_state_new();
    bool ok = s && o && e && kn_state_merge(s, o) && kn_state_merge(s, e) &&
              (!t->ema || kn_state_put(s, .ema = t->ema, .prefix = "average."));
    if (ok)
        return s;
    kn_state_free(s);
    return NULL;
}

/* numbers: where a dealt state is rank 0's alone, every rank's numbers. */
static bool fill_all(training *t, const kn_state *s, bool dealt, const kn_state *numbers)
{
    const kn_state *mine = dealt && kn_rank(t->comm) > 0 ? NULL : s;
    return kn_load_state_dict(&t->m, mine, .prefix = "model.", .from_rank0 = dealt) &&
           kn_load_optim_state_dict(t->o, mine, .prefix = "optim.", .from_rank0 = dealt) &&
           (!t->ema || (kn_load_state_dict(&t->m, mine, .prefix = "ema.", .ema = t->ema,
                                           .from_rank0 = dealt) &&
                        kn_state_get(numbers, .ema = t->ema, .prefix = "average.")));
}

/* ---- the way of the state -------------------------------------------------------------------- */

/* Takes from's state, as c->by says; from is NULL on ranks that aren't in it. *dealt: rank 0 alone
 * has it. NULL where the folder has it, or with an error. */
static kn_state *leave(const any_case *c, training *from, kn_comm *world, bool *dealt)
{
    kn_state *s = NULL, *whole;
    const bool first = kn_rank(world) == 0;
    *dealt = c->by == RANK0 || c->by == GATHERED || (c->by == FULL && c->to.ranks > c->from.ranks);
    if (from && c->by == FOLDER) {
        kn_checkpoint_save(c->path, &from->m, .comm = from->comm ? from->comm : kn_comm_self(),
                           .step = 1, .optim = from->o, .ema = from->ema);
        return NULL;
    }
    if (from)
        s = take_all(from,
                     c->by == LOCAL                          ? KN_STATE_LOCAL
                     : c->by == SHARDED || c->by == GATHERED ? KN_STATE_SHARDED
                                                             : KN_STATE_FULL,
                     c->by == RANK0 || c->by == SAVED);
    if (c->by == GATHERED) {
        whole = kn_state_gather(s, .comm = world, .rank0_only = true);
        kn_state_free(s);
        return whole;
    }
    if (c->by == SAVED) {
        if (first && s)
            kn_state_save(s, c->path);
        kn_state_free(s);
        s = NULL;
        kn_barrier(world, kn_compute_stream(KN_CPU), "saved");
        s = kn_ok() ? kn_state_open(c->path) : NULL;
    }
    return s;
}

static bool arrive(const any_case *c, training *to, const kn_state *s, bool dealt,
                   const kn_state *want)
{
    if (c->by != FOLDER)
        return fill_all(to, s, dealt, want);
    kn_checkpoint *p = kn_checkpoint_open(c->path, to->comm ? to->comm : kn_comm_self());
    bool ok = p && kn_checkpoint_load(p, &to->m, .optim = to->o, .ema = to->ema);
    kn_checkpoint_free(p);
    kn_set_lr(to->o, 0.001 * NET_SEED);
    return ok;
}

/* to has the state of a plain process, and its next step. */
static int goes_on(const any_case *c, training *to, const kn_state *want)
{
    training ref;
    const side plain = { .ranks = 1, .plain = true };
    const bool order = c->to.o.strategy < KN_HYBRID_SHARD || c->to.plain; /* of its sums */
    kn_state *got = take_all(to, KN_STATE_FULL, false);
    EXPECT(got && same_states(got, want), "%s", kn_error());
    EXPECT(begin(&ref, c, &plain, NULL, 5) && fill_all(&ref, want, false, want), "%s", kn_error());
    EXPECT(train(&ref, 2) && train(to, 2), "%s", kn_error());
    kn_state *a = take_all(&ref, KN_STATE_FULL, false), *b = take_all(to, KN_STATE_FULL, false);
    EXPECT(a && b && (!order || same_states(b, a)), "the next step: %s", kn_error());
    kn_state_free(got), kn_state_free(a), kn_state_free(b);
    finish(&ref);
    return 0;
}

/* Ranks [0, n) of world; NULL on the others. Collective. */
static kn_comm *first_ranks(kn_comm *world, int n)
{
    const bool in = kn_rank(world) < n;
    kn_comm *c = kn_comm_split(world, in ? 0 : 1, 0, "first ranks");
    return in ? c : NULL;
}

static int run(kn_comm *world, void *arg)
{
    const any_case *c = arg;
    kn_comm *a = first_ranks(world, c->from.ranks), *b = first_ranks(world, c->to.ranks);
    training from, to;
    bool dealt = false;
    kn_set_threads(1);
    if (a)
        EXPECT(begin(&from, c, &c->from, a, NET_SEED) && train(&from, 0) && train(&from, 1), "%s",
               kn_error());
    if (b)
        EXPECT(begin(&to, c, &c->to, b, 5) && train(&to, 7), "%s", kn_error());
    kn_state *s = leave(c, a ? &from : NULL, world, &dealt);
    EXPECT(kn_ok(), "%s", kn_error());
    kn_state *mine = a ? take_all(&from, KN_STATE_FULL, true) : NULL;
    kn_state *want = kn_state_gather(mine, .comm = world); /* every rank gets rank 0's */
    EXPECT(want, "%s", kn_error());
    if (b) {
        EXPECT(arrive(c, &to, s, dealt, want), "%s", kn_error());
        if (goes_on(c, &to, want))
            return 1;
        finish(&to);
    }
    if (a)
        finish(&from);
    kn_state_free(s), kn_state_free(mine), kn_state_free(want);
    return !kn_ok();
}

void any_check(uint64_t first, int count)
{
    for (int i = 0; i < count; i++) {
        any_case c = draw(first + (uint64_t)i);
        char text[500];
        describe(text, sizeof text, &c);
        snprintf(c.path, sizeof c.path, "%s", temp_path("state"));
        const int ranks = c.from.ranks > c.to.ranks ? c.from.ranks : c.to.ranks;
        int failed = kn_spawn_threads(ranks, run, &c);
        KN_CHECK_OK();
        KN_CHECK(failed == 0, "%s", text);
        remove_temp();
    }
}
