/* tests/fsdp/memory_test.c: memory is a formula. Over a generated set of settings, the ledger's
 * peaks after two steps of a small GPT equal kn_fsdp_predict, and the walk of memory_walk.c, to the
 * byte, by category. Rank functions return a status and never assert. */
#include "tests/fsdp/ranks.h"
#include "knap.h"
#include "tests/fsdp/chain.h"
#include "tests/fsdp/memory_walk.h"
#include "tests/fsdp/stand_in.h"

enum { LAYERS = 5, DIM = 24, VOCAB = 37, LEN = 8, BATCH = 2, MICRO = 2, TEXT = 320 };

typedef struct setting {
    kn_strategy strategy;
    kn_layout_kind layout;
    kn_backward_prefetch backward;
    kn_dtype param, reduce;
    int ranks, shards, reshard;
    int64_t keep_whole_below;
    bool forward_prefetch, low_grads, offload, side, recompute;
    bool pinned, unpinned; /* on the stand-in of a device, offloaded to memory */
    bool norms;            /* parameters of norms compute in f32 */
    int frozen; /* 1: thin ones of all blocks, 2: the first two blocks, 3: the embeddings */
    int max_gathers, max_reductions;
    bool not_last; /* only the last backward of a step waits for its reductions */
    const char *ignore, *wrap;
    bool nested; /* units in units: unreduced is a bound */
} setting;

static void describe(const setting *s, char *text)
{
    snprintf(
        text, TEXT,
        "%d ranks, strategy %d, shards %d, layout %d, reshard %d, backward %d, forward %d, "
        "param %s, reduce %s, low %d, offload %d, pinned %d, side %d, whole below %d, frozen "
        "%d, recompute "
        "%d, gathers %d, reductions %d, not last %d, norms %d, unpinned %d, ignore %s, wrap %s",
        s->ranks, s->strategy, s->shards, s->layout, s->reshard, s->backward, s->forward_prefetch,
        kn_dtype_name(s->param), kn_dtype_name(s->reduce), s->low_grads, s->offload, s->pinned,
        s->side, (int)s->keep_whole_below, s->frozen, s->recompute, s->max_gathers,
        s->max_reductions, s->not_last, s->norms, s->unpinned, s->ignore ? s->ignore : "none",
        s->wrap ? s->wrap : "gpt_block");
}

/* ---- one run --------------------------------------------------------------------------------- */

static void freeze(kn_gpt *g, int how)
{
    const kn_param *p;
    int n = kn_params(g, &p);
    for (int i = 0; i < n; i++) {
        bool block = strstr(p[i].name, ".h.") != NULL, thin = kn_ndim(p[i].tensor) == 1;
        bool early = strstr(p[i].name, ".h.0.") || strstr(p[i].name, ".h.1.");
        bool embedding = strstr(p[i].name, "wte") || strstr(p[i].name, "wpe");
        if ((how == 1 && block && thin) || (how == 2 && early) || (how == 3 && embedding))
            kn_require_grad(p[i].tensor, false);
    }
}

static bool step(kn_gpt *g, kn_optim *opt, int rounds, kn_device device, bool not_last)
{
    for (int a = 0; a < rounds; a++) {
        kn_fsdp_set_is_last_backward(g, !not_last || a == rounds - 1);
        IN_SCOPE;
        int64_t ids[BATCH * LEN];
        for (int i = 0; i < BATCH * LEN; i++)
            ids[i] = (i * 7 + a) % VOCAB;
        kn_tensor *x = kn_from(KN_I64, device, ids, KN_SHAPE(BATCH, LEN));
        kn_backward(kn_gpt_loss(g, x, x));
    }
    return kn_step(opt);
}

/* The rehearsal of the schedule and the independent walk agree. */
static int compare_walk(const setting *s, kn_fsdp_memory want, memory_peaks walk, int rank)
{
    bool bound = s->nested && want.unreduced < walk.unreduced;
    if (want.gathered == walk.gathered && (want.unreduced == walk.unreduced || bound))
        return 0;
    char text[TEXT];
    describe(s, text);
    fprintf(stderr, "rank %d: gathered %lld, walk %lld; unreduced %lld, walk %lld (%s)\n", rank,
            (long long)want.gathered, (long long)walk.gathered, (long long)want.unreduced,
            (long long)walk.unreduced, text);
    return 1;
}

static int compare(const setting *s, kn_fsdp_memory want, int rank)
{
    static const kn_mem_category category[] = { KN_MEM_PARAM,    KN_MEM_GRAD,      KN_MEM_OPTIM,
                                                KN_MEM_GATHERED, KN_MEM_UNREDUCED, KN_MEM_STORE };
    kn_ledger l = kn_ledger_read();
    int64_t wanted[] = { want.param,    want.grad,      want.optim,
                         want.gathered, want.unreduced, want.store };
    int64_t pinned = l.peak_pinned; /* with several ranks also the communicators' staging buffers */
    int bad = s->unpinned && want.pinned != 0;
    bad |= s->pinned && (s->ranks == 1 ? pinned != want.pinned : pinned < want.pinned);
    bad |=
        s->pinned && !s->unpinned && want.pinned != want.param + want.grad + want.optim - KN_ALIGN;
    if (bad)
        fprintf(stderr, "rank %d: pinned: ledger %lld, formula %lld\n", rank, (long long)pinned,
                (long long)want.pinned);
    for (int i = 0; i < 6; i++) {
        int64_t have = l.peak[category[i]];
        bool nested = s->nested && category[i] == KN_MEM_UNREDUCED; /* an upper bound there */
        if (have == wanted[i] || (nested && have < wanted[i] && have > wanted[i] * 9 / 10))
            continue;
        char text[TEXT];
        describe(s, text);
        fprintf(stderr, "rank %d: %s: ledger %lld, formula %lld (%s)\n", rank,
                kn_mem_name(category[i]), (long long)have, (long long)wanted[i], text);
        bad = 1;
    }
    return bad;
}

/* Those of blocks: a bucket of the root's last one alone would leave another to the embedding of
 * positions, whose gradient comes last, and the walk counts a unit's buckets from its first. */
static kn_dtype norms_in_f32(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return strstr(name, ".ln_1.") || strstr(name, ".ln_2.") ? KN_F32 : KN_DTYPE_DEFAULT;
}

static void measure(kn_comm *world, void *arg)
{
    const setting *s = arg;
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = LAYERS, .heads = 4, .embd = DIM, .ctx = LEN, .vocab = VOCAB };
    kn_set_threads(1);
    kn_set_free_cores(s->side ? 2 : 0);
    kn_gpt_init(&g, c, KN_F32, KN_META);
    freeze(&g, s->frozen);
    if (s->ignore) /* parameters outside units need bytes of their own */
        kn_materialize(&g, KN_CPU, 42);
    kn_ledger_reset_peaks();
    kn_fsdp_wrap(&g, world, .strategy = s->strategy, .mesh.shards = s->shards, .layout = s->layout,
                 .reshard_after_forward = s->reshard, .backward_prefetch = s->backward,
                 .forward_prefetch = s->forward_prefetch, .param_dtype = s->param,
                 .param_dtype_of = s->norms ? norms_in_f32 : NULL, .offload_unpinned = s->unpinned,
                 .reduce_dtype = s->reduce, .keep_low_precision_grads = s->low_grads,
                 .device = s->pinned ? STAND_IN : KN_CPU,
                 .offload_dir = s->pinned    ? "memory"
                                : s->offload ? "."
                                             : NULL,
                 .keep_whole_below = s->keep_whole_below, .max_gathers = s->max_gathers,
                 .max_reductions = s->max_reductions, .ignore = s->ignore,
                 .wrap_class = s->wrap ? s->wrap : "gpt_block",
                 .recompute_class = s->recompute ? "gpt_block" : NULL);
    if (s->ignore)
        kn_ledger_reset_peaks();
    kn_optim *opt = kn_adamw(&g, .lr = 1e-3);
    kn_fsdp_set_is_last_backward(&g, !s->not_last);
    kn_fsdp_memory before = kn_fsdp_predict(&g);
    for (int i = 0; i < 2 && kn_ok(); i++)
        step(&g, opt, s->ignore ? 1 : MICRO, s->pinned ? STAND_IN : KN_CPU, s->not_last);
    kn_fsdp_set_is_last_backward(&g, !s->not_last);
    kn_fsdp_memory want = kn_fsdp_predict(&g);
    int bad = !kn_ok();
    if (bad) {
        char text[TEXT];
        describe(s, text);
        fprintf(stderr, "rank %d: %s (%s)\n", kn_rank(world), kn_error(), text);
    } else {
        bad = compare(s, want, kn_rank(world));
        bad |= compare_walk(s, want, memory_walk(&g), kn_rank(world));
    }
    if (memcmp(&before, &want, sizeof want) != 0) {
        fprintf(stderr, "the prediction changed by running\n");
        bad = 1;
    }
    kn_optim_free(opt);
    kn_module_free(&g);
    KN_CHECK(!bad);
}

static int runs(const setting *s)
{
    if (s->pinned) {
        return on_stand_in((stand_in){ .inline_streams = !s->side }, s->ranks, measure, (void *)s);
    }
    return spawn_processes(s->ranks, measure, (void *)s);
}

static void check(setting s)
{
    static int settings;
    char text[TEXT];
    describe(&s, text);
    KN_CHECK(settings++ % kn_one_in(8) || runs(&s) == 0, "%s", text);
}

/* ---- settings -------------------------------------------------------------------------------- */

static uint64_t state;
static int below(int n)
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (int)((state >> 33) % (uint64_t)n);
}

static setting generate(uint64_t seed, int ranks)
{
    static const kn_dtype dtype[] = { KN_DTYPE_DEFAULT, KN_DTYPE_DEFAULT, KN_F32, KN_BF16, KN_F16 };
    static const int64_t small[] = { 0, 0, 0, 50, 300, 5000 };
    state = seed * 2654435761u + (uint64_t)ranks;
    below(2);
    setting s = { .ranks = ranks };
    s.strategy = (kn_strategy)(KN_FULL_SHARD + below(KN_STRATEGY_COUNT - KN_FULL_SHARD));
    if (s.strategy >= KN_HYBRID_SHARD)
        s.shards = ranks == 4 ? 1 << below(3) : 1 + below(ranks);
    int shards = s.strategy == KN_NO_SHARD ? 1 : s.shards ? s.shards : ranks;
    s.layout = (kn_layout_kind)(KN_LAYOUT_FLAT + below(KN_LAYOUT_COUNT - KN_LAYOUT_FLAT));
    static const int reshard[] = { KN_RESHARD_DEFAULT, KN_RESHARD_DEFAULT, KN_RESHARD_NEVER,
                                   KN_RESHARD_ALWAYS, 2 };
    s.reshard = reshard[below(shards % 2 == 0 ? 5 : 4)];
    s.backward = (kn_backward_prefetch)(KN_PREFETCH_PRE + below(3));
    s.param = dtype[below(5)];
    s.reduce = dtype[below(5)];
    s.low_grads = below(3) == 0;
    s.forward_prefetch = below(2);
    s.offload = below(8) == 0;
    s.side = below(3) == 0;
    s.keep_whole_below = small[below(6)];
    s.frozen = below(8) < 4 ? below(4) : 0;
    s.recompute = below(4) == 0;
    s.max_gathers = below(3);
    s.max_reductions = below(4);
    s.not_last = below(3) == 0;
    s.norms = below(3) == 0;
    return s;
}

static void check_generated(int ranks, uint64_t from, uint64_t to)
{
    int failed = 0;
    for (uint64_t seed = from; seed < to; seed += (uint64_t)kn_one_in(8)) {
        setting s = generate(seed, ranks);
        failed += runs(&s) != 0;
    }
    KN_CHECK(failed == 0, "%d of %d settings", failed, (int)(to - from));
}

/* The recomputed blocks aren't the units: they hold some, beside parameters of the root, or are
 * held themselves. Each unit in such a block is released and reduced when its own backward is
 * done. */
KN_TEST(memory, equals_the_formula_where_recomputed_blocks_are_no_units)
{
    static const char *const wrap[] = { "self_attention,mlp", "mlp", "linear", "gpt_block,mlp",
                                        "embedding,self_attention" };
    for (int i = 0; i < 5; i++)
        for (int r = KN_RESHARD_NEVER; r <= KN_RESHARD_ALWAYS; r++)
            for (int p = KN_PREFETCH_PRE; p <= KN_PREFETCH_NONE; p++)
                check((setting){ .ranks = r == KN_RESHARD_DEFAULT ? 1 << p % 3 : 2,
                                 .strategy = KN_FULL_SHARD,
                                 .layout = KN_LAYOUT_FLAT,
                                 .recompute = true,
                                 .reshard = r,
                                 .backward = p,
                                 .forward_prefetch = r == KN_RESHARD_ALWAYS,
                                 .wrap = wrap[i],
                                 .side = p == KN_PREFETCH_POST,
                                 .nested = i == 3 });
}

KN_TEST(memory, equals_the_formula_on_one_rank)
{
    check_generated(1, 0, 40);
}

KN_TEST(memory, equals_the_formula_on_two_ranks)
{
    check_generated(2, 0, 60);
}

KN_TEST(memory, equals_the_formula_on_four_ranks)
{
    check_generated(4, 0, 24);
}

/* Masters, gradients, states and the copy in param_dtype lie in page-locked memory of the host; the
 * device holds only temporary copies. */
KN_TEST(memory, equals_the_formula_offloaded_to_memory)
{
    int failed = 0;
    for (uint64_t seed = 100; seed < 130 && !THREADS_ONLY; seed += (uint64_t)kn_one_in(8)) {
        setting s = generate(seed, seed % 3 ? 1 : 2);
        s.pinned = true;
        s.unpinned = seed % 5 == 0;
        s.offload = false;
        failed += runs(&s) != 0;
    }
    KN_CHECK(failed == 0, "%d of 30 settings", failed);
}

/* Every strategy with every prefetch, without other options: the table of docs/fsdp.md. */
KN_TEST(memory, equals_the_formula_by_strategy_and_prefetch)
{
    for (int i = 0; i < 3 * 3 * 3 * 2; i++) /* ranks, strategies, backward and forward prefetch */
        check((setting){ .ranks = 1 << i / 18,
                         .strategy = (kn_strategy)(KN_FULL_SHARD + i / 6 % 3),
                         .backward = (kn_backward_prefetch)(KN_PREFETCH_PRE + i / 2 % 3),
                         .forward_prefetch = i % 2,
                         .side = i % 2 });
}

/* Units inside units, and parameters that no unit holds. */
KN_TEST(memory, equals_the_formula_for_nested_units)
{
    for (int backward = KN_PREFETCH_PRE; backward <= KN_PREFETCH_NONE; backward++)
        for (int forward = 0; forward < 2; forward++) {
            setting s = { .ranks = 2,
                          .backward = (kn_backward_prefetch)backward,
                          .forward_prefetch = forward,
                          .side = forward,
                          .wrap = "gpt_block,mlp,self_attention",
                          .nested = true };
            check(s);
            s.nested = false;
            s.wrap = NULL;
            s.ignore = "*ln_1*,*.wpe.*";
            check(s);
        }
}

/* ---- the worked example of docs/fsdp.md ------------------------------------------------------ */

typedef struct by_hand {
    setting s;
    kn_fsdp_memory want;
} by_hand;

static void predict_by_hand(kn_comm *world, void *arg)
{
    const by_hand *h = arg;
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = LAYERS, .heads = 4, .embd = DIM, .ctx = LEN, .vocab = VOCAB };
    kn_set_free_cores(h->s.side ? 2 : 0);
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, world, .strategy = h->s.strategy, .reshard_after_forward = h->s.reshard,
                 .backward_prefetch = h->s.backward, .param_dtype = h->s.param,
                 .wrap_class = "gpt_block");
    kn_fsdp_memory have = kn_fsdp_predict(&g);
    /* two moments; the padding between parameters has none, and its size differs between ranks */
    int64_t optim = 2 * h->want.param + 64;
    int bad = !kn_ok() || have.optim > optim || have.optim < optim * 99 / 100;
    have.optim = 0;
    bad |= memcmp(&have, &h->want, sizeof have) != 0;
    if (bad)
        fprintf(stderr, "param %lld grad %lld optim %lld gathered %lld unreduced %lld: %s\n",
                (long long)have.param, (long long)have.grad, (long long)have.optim,
                (long long)have.gathered, (long long)have.unreduced, kn_error() ? kn_error() : "");
    kn_module_free(&g);
    KN_CHECK(!bad);
}

/* Bytes of 2 ranks: F a block's 7296 elements of f32, F0 the root's 1152; states are half of it
 * all. */
KN_TEST(memory, worked_example_of_the_docs)
{
    enum { F = 29184, F0 = 4608, H = F / 2, ALL = 5 * F + F0 };
    const struct {
        kn_strategy strategy;
        kn_backward_prefetch backward;
        int reshard, side;
        kn_dtype param;
        int64_t gathered, unreduced;
    } row[] = {
        { KN_FULL_SHARD, KN_PREFETCH_NONE, 0, 0, 0, F0 + F, F0 + F },
        { KN_FULL_SHARD, KN_PREFETCH_POST, 0, 0, 0, F0 + F, F0 + F },
        { KN_FULL_SHARD, KN_PREFETCH_PRE, 0, 0, 0, F0 + 2 * F, F0 + F },
        { KN_FULL_SHARD, KN_PREFETCH_PRE, 0, 1, 0, F0 + 2 * F, F0 + 2 * F },
        { KN_FULL_SHARD, KN_PREFETCH_PRE, 0, 0, KN_BF16, F0 / 2 + F, F0 / 2 + F / 2 },
        { KN_FULL_SHARD, KN_PREFETCH_NONE, 2, 0, 0, F0 + 5 * H + F, F0 + F },
        { KN_FULL_SHARD, KN_PREFETCH_PRE, 2, 0, 0, F0 + 4 * H + 2 * F, F0 + F },
        { KN_SHARD_GRAD_OP, KN_PREFETCH_PRE, 0, 0, 0, ALL, F0 + F },
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        by_hand h = { .s = { .strategy = row[i].strategy,
                             .backward = row[i].backward,
                             .reshard = row[i].reshard,
                             .side = row[i].side,
                             .param = row[i].param },
                      .want = { .param = ALL / 2,
                                .grad = ALL / 2,
                                .gathered = row[i].gathered,
                                .unreduced = row[i].unreduced } };
        KN_CHECK(spawn_threads(2, predict_by_hand, &h) == 0, "row %d", (int)i);
    }
}

/* ---- the rehearsal ------------------------------------------------------------------------ */

static int second_dim(const char *name, int ndim, const int64_t *shape, void *arg)
{
    ++*(int *)arg;
    return 1;
}

/* Peaks of the second of two steps of c on meta, beside the prediction made before the first. */
static void check_chain(const char *what, chain *c, void *root)
{
    kn_ledger before = kn_ledger_read();
    kn_trace_start(100);
    kn_fsdp_memory want = kn_fsdp_predict(root);
    kn_trace_event *events = NULL;
    size_t traced = kn_trace_stop(&events);
    kn_host_free(events);
    kn_ledger after = kn_ledger_read();
    KN_CHECK_OK();
    KN_CHECK(traced == 0, "%s: a prediction leaves %d events in the trace", what, (int)traced);
    for (int k = 0; k < KN_MEM_HOST; k++)
        KN_CHECK(before.live[k] == after.live[k] && before.peak[k] == after.peak[k],
                 "%s: a prediction changes the ledger's %s", what, kn_mem_name(k));
    chain_step(c, true);
    chain_trace t = chain_step(c, true);
    memory_peaks walk = memory_walk(root);
    KN_CHECK(want.gathered == t.gathered && want.unreduced == t.unreduced,
             "%s: gathered %lld, predicted %lld; unreduced %lld, predicted %lld", what,
             (long long)t.gathered, (long long)want.gathered, (long long)t.unreduced,
             (long long)want.unreduced);
    KN_CHECK(want.gathered == walk.gathered && want.unreduced == walk.unreduced, "%s: the walk",
             what);
    chain_free(c);
}

KN_TEST(memory, rehearsal_of_lists_groups_and_placement)
{
    enum { WIDE = 16 };
    chain c;
    chain_init(&c, 4, WIDE, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.max_gathers = 3));
    kn_module *l[4];
    for (int i = 0; i < 4; i++)
        l[i] = &c.layer[i].base;
    kn_fsdp_prefetch_forward(l[0], (kn_module *[]){ l[2], l[3] }, 2);
    kn_fsdp_prefetch_backward(l[3], (kn_module *[]){ l[1], l[2], l[0] }, 3);
    check_chain("lists", &c, &c);

    chain_init(&c, 2, WIDE, 4);
    chain_wrap(&c, 2, 1e6, CHAIN_OPTIONS(.max_gathers = 3));
    KN_CHECK(kn_fsdp_set_unshard_in_backward(&c.layer[0], false, false));
    KN_CHECK(kn_fsdp_predict(&c).gathered == WIDE * WIDE * 4, "one layer at a time");
    check_chain("a layer that backward doesn't need", &c, &c);

    for (int last = 0; last < 2;
         last++) { /* the first unit's beside the gradient of the last one */
        chain_init(&c, 5, WIDE, 4);
        c.world = kn_comm_simulated(2, 0, 1e6);
        kn_module *ends[4] = { &c.layer[0].base, &c.layer[1].base, &c.layer[3].base,
                               &c.layer[4].base };
        KN_CHECK(kn_fsdp_wrap_group(ends, 2, c.world, .device = KN_META) &&
                 kn_fsdp_wrap(&c.layer[2], c.world, .device = KN_META) &&
                 kn_fsdp_wrap_group(ends + 2, 2, c.world, .device = KN_META) &&
                 kn_fsdp_wrap(&c, c.world, .device = KN_META) &&
                 kn_fsdp_set_is_last_backward(&c, last));
        int64_t layers = kn_fsdp_predict(&c).unreduced / (WIDE * WIDE * 4);
        KN_CHECK(layers == (last ? 3 : 4), "last %d: gradients of %d layers", last, (int)layers);
        check_chain("the last backward or not", &c, &c);
    }

    chain_init(&c, 3, WIDE, 4);
    int asked = 0;
    chain_wrap(&c, 2, 1e6,
               CHAIN_OPTIONS(.layout = KN_LAYOUT_PER_PARAM, .placement = second_dim,
                             .placement_arg = &asked));
    KN_CHECK(asked == 3, "asked %d times", asked);
    check_chain("placement", &c, &c);
    KN_CHECK(asked == 3, "a prediction asks again"); /* its argument may be gone */

    chain_init(&c, 3, WIDE, 4);
    c.world = kn_comm_simulated(2, 0, 1e6);
    kn_module *pair[2] = { &c.layer[0].base, &c.layer[1].base };
    kn_fsdp_wrap_group(pair, 2, c.world, .device = KN_META);
    kn_fsdp_wrap(&c.layer[2], c.world, .device = KN_META);
    kn_fsdp_wrap(&c, c.world, .device = KN_META);
    check_chain("a group", &c, &c);

    chain_init(&c, 3, WIDE, 4);
    c.world = kn_comm_simulated(2, 0, 1e6);
    kn_module *all[3] = { &c.layer[0].base, &c.layer[1].base, &c.layer[2].base };
    kn_fsdp_wrap_group(all, 3, c.world, .device = KN_META);
    kn_fsdp_memory m = kn_fsdp_predict(&c.layer[0]);
    int64_t units = 3 * WIDE * WIDE * 4;
    KN_CHECK(m.gathered == units && m.unreduced == units && m.param == units / 2,
             "a group as the root: %lld gathered, %lld unreduced, %lld of parameters",
             (long long)m.gathered, (long long)m.unreduced, (long long)m.param);
    KN_CHECK_OK();
    chain_free(&c);
}
