/* tests/fsdp/collectives_test.c: the number of collectives and messages of a step: one gather and
 * one reduction a unit, for any number of buckets, and none to agree on gradients. The contract
 * numbers the calls, and a back end counts the messages (tests/comm/message_queues.h). */
#include "tests/comm/message_queues.h"
#include "tests/fsdp/net.h"
#include "tests/fsdp/stand_in.h"

enum { WIDE = 8, ROWS = 3, LAYERS = 2, PER_LAYER = 10 };

/* A frozen layer with a trained one of low rank beside it, one in f64, and one that only some
 * micro-batches use: four buckets and more. */
typedef struct adapted {
    kn_module base;
    kn_linear whole, down, up, low, spare;
    bool calls_spare, uses_spare;
} adapted;

typedef struct stack {
    kn_module base;
    adapted layer[LAYERS];
} stack;

static kn_tensor *adapted_forward(kn_module *self, kn_tensor *x) /* (ROWS, WIDE), the same */
{
    adapted *m = (adapted *)self;
    kn_tensor *y = kn_add(kn_call(&m->whole, x), kn_call(&m->up, kn_call(&m->down, x)));
    y = kn_add(y, kn_cast(kn_call(&m->low, kn_cast(x, KN_F64)), KN_F32));
    kn_tensor *z = m->calls_spare ? kn_call(&m->spare, x) : NULL;
    return m->uses_spare ? kn_add(y, z) : y;
}

static kn_tensor *stack_forward(kn_module *self, kn_tensor *x)
{
    stack *m = (stack *)self;
    return kn_call(&m->layer[1], kn_call(&m->layer[0], x));
}

static bool adapted_init(adapted *m, kn_module *parent, const char *name)
{
    return kn_module_init(&m->base, adapted_forward) && kn_module_add(parent, name, &m->base) &&
           kn_linear_init(&m->whole, &m->base, "whole", WIDE, WIDE, .device = KN_META) &&
           kn_linear_init(&m->down, &m->base, "down", WIDE, 3, .device = KN_META) &&
           kn_linear_init(&m->up, &m->base, "up", 3, WIDE, .device = KN_META) &&
           kn_linear_init(&m->low, &m->base, "low", WIDE, WIDE, .device = KN_META,
                          .dtype = KN_F64) &&
           kn_linear_init(&m->spare, &m->base, "spare", WIDE, WIDE, .device = KN_META) &&
           kn_require_grad(kn_module_param(&m->whole, "weight"), false) &&
           kn_require_grad(kn_module_param(&m->whole, "bias"), false);
}

static bool stack_init(stack *m)
{
    memset(m, 0, sizeof *m);
    return kn_module_init(&m->base, stack_forward) &&
           adapted_init(&m->layer[0], &m->base, "first") &&
           adapted_init(&m->layer[1], &m->base, "second");
}

/* True if a micro-batch uses a spare layer. */
typedef enum spare { SPARE_ALL, SPARE_SOME, SPARE_NONE, SPARES } spare;

static bool stack_backward(stack *m, kn_device d, int micro, spare use)
{
    IN_SCOPE;
    for (int i = 0; i < LAYERS; i++) { /* all ranks call layers that may be units */
        m->layer[i].calls_spare = use != SPARE_NONE;
        m->layer[i].uses_spare = use == SPARE_ALL || (use == SPARE_SOME && micro % 2 == 1);
    }
    kn_tensor *x = kn_randn(KN_F32, KN_CPU, 7, (uint64_t)micro, KN_SHAPE(ROWS, WIDE));
    kn_tensor *y = kn_call(m, kn_to_device(x, d));
    return kn_backward(mean_square(y));
}

/* ---- counting -------------------------------------------------------------------------------- */

typedef struct events {
    int gathers, reductions;
} events;

static void hear(const kn_fsdp_event *e, void *arg)
{
    events *n = arg;
    n->gathers += e->kind == KN_FSDP_GATHER;
    n->reductions += e->kind == KN_FSDP_REDUCE;
}

/* Calls that this rank has made on any communicator of w's world. */
static int64_t calls_of(const kn_comm *w)
{
    int64_t calls = 0;
    for (const kn_comm *c = w->world->first; c; c = c->next)
        calls += c->family == c ? (int64_t)c->seq : 0;
    return calls;
}

/* ---- settings -------------------------------------------------------------------------------- */

typedef struct setting {
    const char *what;
    int ranks;
    int gather, reduce; /* collectives of a unit's gather, and of its reduction */
    kn_fsdp_wrap_options o;
    bool other_bits;   /* it adds in another order than one process */
    bool last_reduces; /* two rounds, of which the first adds no replicas */
    message_queues *queues;
} setting;

#define OPTIONS(...)                                                                               \
    (kn_fsdp_wrap_options)                                                                         \
    {                                                                                              \
        ._size = sizeof(kn_fsdp_wrap_options), .wrap_class = "adapted", .seed = NET_SEED,          \
        __VA_ARGS__                                                                                \
    }

/* The number of the spare layers' parameters with a gradient: a use on any rank counts on all. */
static bool spares_are(stack *m, int want)
{
    const kn_param *p;
    int n = kn_params(m, &p), found = 0;
    for (int i = 0; i < n; i++)
        found += strstr(p[i].name, "spare") && p[i].source->grad(&p[i]) != NULL;
    return found == want;
}

/* A round of each rank, and its calls. */
static void counted_round(const setting *s, stack *m, kn_comm *w, int round, spare use, bool first)
{
    events n = { 0 };
    int size = kn_comm_size(w);
    kn_device d = s->o.device ? s->o.device : KN_CPU;
    KN_CHECK(kn_fsdp_on_event(m, hear, &n));
    int64_t before = calls_of(w);
    message_count sent = s->queues ? queues_counted(w) : (message_count){ 0 };
    KN_CHECK(stack_backward(m, d, round * size + kn_rank(w), use));
    int64_t calls = calls_of(w) - before;
    bool partial = s->last_reduces && round % 2 == 0;
    int tells = s->last_reduces && !partial; /* whether the round before brought any rank some */
    int want = n.gathers * s->gather + n.reductions * (partial ? 1 : s->reduce) + tells;
    KN_CHECK(n.reductions == LAYERS && (size == 1 || n.gathers >= s->gather * LAYERS),
             "%s: %d gathers, %d reductions", s->what, n.gathers, n.reductions);
    KN_CHECK(first || size == 1 || calls == want,
             "%s, %d ranks: %d calls for %d gathers, %d reductions and %d", s->what, size,
             (int)calls, n.gathers, n.reductions, tells);
    if (s->queues && !first) /* of a call: its description and its bytes, to each other rank */
        KN_CHECK(queues_counted(w).messages - sent.messages == 2 * calls * (size - 1), "%s",
                 s->what);
    KN_CHECK(kn_fsdp_on_event(m, NULL, NULL));
}

static void run_ranks(const setting *s, stack *m, kn_comm *w)
{
    OWNED_OPTIM kn_optim *opt = kn_sgd(m, .lr = 0.1);
    int size = kn_comm_size(w), rounds = s->last_reduces ? 2 : 1;
    KN_CHECK(opt);
    for (int step = 0; step <= SPARES; step++) { /* communicators are made in the first */
        spare use = (spare)(step % SPARES);
        for (int r = 0; r < rounds; r++) {
            KN_CHECK(!s->last_reduces || kn_fsdp_set_all_reduce(m, r > 0, true));
            counted_round(s, m, w, step * rounds + r, use, step == 0);
        }
        KN_CHECK(spares_are(m, use == SPARE_NONE ? 0 : 2 * LAYERS), "%s, %d ranks, step %d",
                 s->what, size, step);
        KN_CHECK(kn_step(opt));
    }
}

/* One process that runs all micro-batches has the same bits. */
static void same_as_one(const setting *s, stack *m, int size)
{
    stack one;
    KN_CHECK(stack_init(&one) && kn_materialize(&one, KN_CPU, NET_SEED));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&one, .lr = 0.1);
    for (int step = 0; step <= SPARES; step++) {
        for (int i = 0; i < size; i++)
            KN_CHECK(stack_backward(&one, KN_CPU, step * size + i, (spare)(step % SPARES)));
        KN_CHECK(kn_step(opt));
    }
    const kn_param *p;
    KN_CHECK(kn_params(&one, &p) == PER_LAYER * LAYERS && all_read_as(m, &one), "%s, %d ranks",
             s->what, size);
    kn_module_free(&one.base);
}

static void setting_rank(kn_comm *w, void *arg)
{
    const setting *s = arg;
    stack m;
    kn_comm *c = s->queues ? queues_world(s->queues, kn_rank(w), kn_comm_size(w)) : w;
    KN_CHECK(c && stack_init(&m) && kn_fsdp_wrap_(&m, c, s->o), "%s", s->what);
    run_ranks(s, &m, c);
    if (!s->other_bits)
        same_as_one(s, &m, kn_comm_size(w));
    kn_module_free(&m.base);
    if (s->queues)
        queues_free(c);
}

static void check(setting s)
{
    int failed = spawn_threads(s.ranks, setting_rank, &s);
    KN_CHECK_OK();
    KN_CHECK(failed == 0, "%s: %d of %d ranks failed", s.what, failed, s.ranks);
}

/* ---- cases ----------------------------------------------------------------------------------- */

KN_TEST(collectives, one_gather_and_one_reduction_a_unit)
{
    for (int n = 1; n <= 4; n *= 2) {
        check((setting){ "full", n, 1, 1, OPTIONS(.layout = KN_LAYOUT_FLAT) });
        check((setting){ "per param", n, 1, 1, OPTIONS(.layout = KN_LAYOUT_PER_PARAM) });
        check((setting){ "ragged", n, 1, 1, OPTIONS(.layout = KN_LAYOUT_RAGGED) });
        check((setting){ "grad_op", n, 1, 1, OPTIONS(.strategy = KN_SHARD_GRAD_OP) });
        check((setting){ "no_shard", n, 0, 1, OPTIONS(.strategy = KN_NO_SHARD) });
        check((setting){ "a store", n, 1, 1, OPTIONS(.offload_dir = "/tmp") });
        check((setting){ "slices", n, 1, 1, OPTIONS(.reshard_after_forward = n) });
    }
}

/* Buckets of other ranks have collectives of their own: all ranks add those held whole. */
KN_TEST(collectives, one_for_each_group_of_ranks)
{
    for (int n = 2; n <= 4; n *= 2)
        check((setting){ "small ones whole", n, 1, 2, OPTIONS(.keep_whole_below = 20) });
    kn_fsdp_wrap_options hybrid =
        OPTIONS(.strategy = KN_HYBRID_SHARD, .mesh = { .replicas = 2, .shards = 2 });
    check((setting){ "hybrid", 4, 1, 2, hybrid, .other_bits = true });
    check((setting){ "last", 4, 1, 2, hybrid, .other_bits = true, .last_reduces = true });
    hybrid.layout = KN_LAYOUT_PER_PARAM;
    hybrid.keep_whole_below = 20;
    check((setting){ "hybrid, small ones whole", 4, 1, 3, hybrid, .other_bits = true });
}

/* Ranks agree on gradients without extra messages, whether their backwards differ or not. */
KN_TEST(collectives, gradients_on_some_ranks_cost_no_message)
{
    static const int ranks[] = { 2, 4, 5, 8 };
    static message_queues queues;
    for (int i = 0; i < 4; i++) {
        queues_open(&queues);
        check((setting){ "messages", ranks[i], 1, 1, OPTIONS(.layout = KN_LAYOUT_FLAT),
                         .queues = &queues });
        queues_close(&queues);
    }
}

/* Ranks agree after the last backward on gradients of earlier ones, even if the last one reduces
 * nothing there; gradients dropped in between are gone on all ranks. */
RANK_TEST(collectives, gradients_of_a_backward_that_was_not_the_last, .threads = "124", .cases = 2)
{
    bool drops = *(int *)arg;
    stack m;
    KN_CHECK(stack_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = NET_SEED));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&m, .lr = 0.1);
    KN_CHECK(opt && kn_fsdp_set_is_last_backward(&m, false));
    KN_CHECK(stack_backward(&m, KN_CPU, kn_rank(world), SPARE_SOME));
    for (int i = 0; i < LAYERS && drops; i++)
        kn_clear_grad(kn_module_param(&m.layer[i].spare, "weight"));
    KN_CHECK(kn_fsdp_set_is_last_backward(&m, true));
    KN_CHECK(stack_backward(&m, KN_CPU, kn_rank(world), SPARE_NONE));
    KN_CHECK(spares_are(&m, kn_comm_size(world) == 1 ? 0
                            : drops                  ? LAYERS
                                                     : 2 * LAYERS) &&
                 kn_step(opt),
             "drops %d", drops);
    kn_module_free(&m.base);
}

/* No element of this rank's part of the spare layers' biases has a gradient of zero. */
static bool spare_biases_have_some(stack *m)
{
    const kn_param *p;
    int n = kn_params(m, &p);
    bool ok = true;
    IN_SCOPE;
    for (int i = 0; i < n && ok; i++) {
        kn_tensor *g = strstr(p[i].name, "spare.bias") ? kn_param_grad(&p[i]) : NULL;
        for (int64_t k = 0; g && k < kn_numel(g); k++)
            ok = ok && ((const float *)kn_data(g))[k] != 0;
    }
    return ok;
}

/* Gradients that only some ranks had before the all-reduce count on all of them after it; one that
 * is dropped in between leaves the bucket's others. */
RANK_TEST(collectives, gradients_of_a_backward_before_the_all_reduce, .threads = "4", .cases = 2)
{
    bool drops = *(int *)arg;
    stack m;
    KN_CHECK(stack_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "linear", .seed = NET_SEED,
                                            .strategy = KN_HYBRID_SHARD, .mesh.shards = 2));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&m, .lr = 0.1);
    KN_CHECK(opt && kn_fsdp_set_all_reduce(&m, false, true));
    KN_CHECK(stack_backward(&m, KN_CPU, kn_rank(world), SPARE_SOME));
    for (int i = 0; i < LAYERS && drops; i++)
        kn_clear_grad(kn_module_param(&m.layer[i].spare, "weight"));
    KN_CHECK(kn_fsdp_set_all_reduce(&m, true, true));
    KN_CHECK(stack_backward(&m, KN_CPU, kn_rank(world), SPARE_NONE));
    KN_CHECK(spares_are(&m, drops ? LAYERS : 2 * LAYERS), "drops %d", drops);
    KN_CHECK(spare_biases_have_some(&m) && kn_step(opt), "drops %d", drops);
    kn_module_free(&m.base);
}

/* A dropped one doesn't come back with those of the next backward. */
RANK_TEST(collectives, a_gradient_dropped_before_the_all_reduce, .threads = "4")
{
    stack m[2]; /* the second one runs the second backward alone */
    const kn_param *p[2];
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < 2; i++) {
        KN_CHECK(stack_init(&m[i]) &&
                 kn_fsdp_wrap(&m[i], world, .wrap_class = "linear", .seed = NET_SEED,
                              .strategy = KN_HYBRID_SHARD, .mesh.shards = 2));
        KN_CHECK(kn_fsdp_set_all_reduce(&m[i], false, true));
        KN_CHECK(i > 0 || stack_backward(&m[i], KN_CPU, kn_rank(world), SPARE_ALL));
        kn_clear_grad(kn_module_param(&m[i].layer[0].spare, "weight"));
        KN_CHECK(kn_fsdp_set_all_reduce(&m[i], true, true));
        KN_CHECK(stack_backward(&m[i], KN_CPU, kn_rank(world), SPARE_ALL));
    }
    int n = kn_params(&m[0], &p[0]), checked = 0;
    kn_params(&m[1], &p[1]);
    for (int i = 0; i < n; i++) {
        if (!strstr(p[0][i].name, "first.spare.weight"))
            continue;
        kn_tensor *a = kn_param_grad(&p[0][i]), *b = kn_param_grad(&p[1][i]);
        KN_CHECK(a && b && same_bytes(a, b), "'%s'", p[0][i].name);
        checked++;
    }
    kn_scope_end(scope);
    KN_CHECK(checked == 1);
    kn_module_free(&m[0].base);
    kn_module_free(&m[1].base);
}

/* A backward without sync costs the ranks one agreement, and steps after that one none. */
RANK_TEST(collectives, a_backward_without_sync_costs_one, .threads = "24")
{
    enum { WARM, BEFORE, HELD_BACK, AFTER, TURNS };
    int64_t calls[TURNS];
    stack m;
    KN_CHECK(stack_init(&m) && kn_fsdp_wrap(&m, world, .wrap_class = "adapted", .seed = NET_SEED));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&m, .lr = 0.1);
    for (int i = WARM; i < TURNS; i++) {
        bool held = i == HELD_BACK;
        KN_CHECK(!held || (kn_fsdp_set_gradient_sync(&m, false, true) &&
                           stack_backward(&m, KN_CPU, kn_rank(world), SPARE_ALL) &&
                           kn_fsdp_set_gradient_sync(&m, true, true)));
        calls[i] = -calls_of(world);
        KN_CHECK(stack_backward(&m, KN_CPU, kn_rank(world), SPARE_ALL));
        calls[i] += calls_of(world);
        KN_CHECK(kn_step(opt));
    }
    KN_CHECK(calls[HELD_BACK] == calls[BEFORE] + 1 && calls[AFTER] == calls[BEFORE],
             "%d calls, then %d, then %d", (int)calls[BEFORE], (int)calls[HELD_BACK],
             (int)calls[AFTER]);
    kn_module_free(&m.base);
}

/* A hook reduces bucket by bucket; the agreement on gradients is then one more collective. */
static bool as_usual(const kn_grad_reduction *r, void *arg)
{
    return kn_reduce_default(r, arg);
}

RANK_TEST(collectives, a_hook_takes_its_own, .threads = "24")
{
    setting s = { "a hook", kn_comm_size(world), 1, 3, OPTIONS(.layout = KN_LAYOUT_FLAT) };
    stack m;
    KN_CHECK(stack_init(&m) && kn_fsdp_wrap_(&m, world, s.o) &&
             kn_fsdp_set_comm_hook(&m, as_usual, NULL, true));
    run_ranks(&s, &m, world);
    same_as_one(&s, &m, kn_comm_size(world));
    kn_module_free(&m.base);
}

/* On another device the flags reach the host of a rank whose backward left out a parameter. */
static void device_rank(kn_comm *world, void *arg)
{
    setting s = { "a device", kn_comm_size(world), 1, 1, OPTIONS(.device = STAND_IN) };
    stand_in_begin((stand_in){ 0 });
    setting_rank(world, &s);
}

KN_TEST(collectives, on_a_device_apart)
{
    if (THREADS_ONLY)
        KN_SKIP("needs processes: each has a device");
    by_processes("124", device_rank, NULL);
}
