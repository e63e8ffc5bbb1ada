/* tests/fsdp/old_graph_test.c: a backward through a graph that is older than a step is an error, in
 * many settings; but one that used no value that the step wrote goes on. */
#include "tests/fsdp/recovery.h"
#include "tests/owned.h"

typedef struct old_graph {
    kn_fsdp_wrap_options o;
    bool plain, recompute;
} old_graph;

static void old_graphs(kn_comm *world, void *arg)
{
    const old_graph *g = arg;
    const setting s = { "old graph", g->o, .plain = g->plain, .recompute = g->recompute };
    OWNED_MODULE model m;
    kn_set_threads(1);
    fault.all = false;
    KN_CHECK(make(&m, world, &s, false));
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1);
    IN_SCOPE;
    kn_tensor *first = loss(&m, 0, device_of(&m)), *second = loss(&m, 1, device_of(&m));
    KN_CHECK(kn_backward(second) && kn_step(o));
    REFUSED(kn_backward(first), "written in place");
}

KN_TEST(old_graph, is_refused_after_a_step)
{
    for (int i = 0; i < 2; i++) {
        old_graph g = { .plain = true, .recompute = i };
        KN_CHECK(spawn_threads(1, old_graphs, &g) == 0, "plain, recompute %d", i);
    }
    stand_in_begin((stand_in){ 0 });
    for (int i = 0; i < 8; i++) {
        old_graph g = { { .device = STAND_IN,
                          .offload_dir = i & 1 ? "memory" : NULL,
                          .param_dtype = i & 2 ? KN_BF16 : KN_DTYPE_DEFAULT,
                          .wrap_class = "part" },
                        .recompute = i & 4 };
        KN_CHECK(spawn_processes(1, old_graphs, &g) == 0, "on a device, %d", i);
    }
    stand_in_end();
    for (int ranks = 1; ranks <= 2; ranks++)
        for (int k = 0; k < 3 * 3 * 2 * 2 * 2; k++) {
            old_graph g = { { .strategy = (kn_strategy)(KN_FULL_SHARD + k % 3),
                              .layout = (kn_layout_kind)(KN_LAYOUT_FLAT + k / 3 % 3),
                              .offload_dir = k / 9 % 2 ? "/tmp" : NULL,
                              .param_dtype = k / 18 % 2 ? KN_BF16 : KN_DTYPE_DEFAULT,
                              .wrap_class = "part" },
                            .recompute = k / 36 };
            KN_CHECK(spawn_threads(ranks, old_graphs, &g) == 0,
                     "%d ranks, strategy %d, layout %d, offload %s, dtype %d, recompute %d", ranks,
                     g.o.strategy, g.o.layout, g.o.offload_dir ? "file" : "none", g.o.param_dtype,
                     g.recompute);
        }
    for (int k = 0; k < 6; k++) {
        old_graph g = { { .strategy = (kn_strategy)(KN_HYBRID_SHARD + k % 2),
                          .mesh.shards = 2,
                          .layout = (kn_layout_kind)(KN_LAYOUT_FLAT + k / 2),
                          .param_dtype = k % 3 ? KN_DTYPE_DEFAULT : KN_BF16,
                          .wrap_class = "part" },
                        .recompute = k == 2 };
        KN_CHECK(spawn_threads(4, old_graphs, &g) == 0, "hybrid, %d", k);
    }
}

/* One element is changed, which lies in one rank's shard: the copies of all ranks are of old. */
RANK_TEST(old_graph, is_refused_after_a_change_by_hand, .threads = "124", .cases = 2)
{
    const setting s = { "summoned", { .param_dtype = KN_BF16, .wrap_class = "part" } };
    OWNED_MODULE model m;
    bool changes = *(int *)arg;
    kn_set_threads(1);
    fault.all = false;
    KN_CHECK(make(&m, world, &s, false));
    const kn_tensor *t = kn_module_param(&m.part[0], "in.weight");
    kn_tensor *l = loss(&m, 0, KN_CPU);
    uint32_t before = kn_version_of(t);
    kn_summon_scope whole = kn_summon(&m.part[0]);
    float *w = kn_data(kn_module_param(&m.part[0], "in.weight"));
    KN_CHECK(w);
    w[0] += changes;
    KN_CHECK(kn_summon_end(whole) && (kn_version_of(t) != before) == changes);
    KN_CHECK(kn_backward(l) == !changes && (!changes || strstr(kn_error(), "written in place")));
    kn_clear_error();
}

/* ---- writes of a neighbour ------------------------------------------------------------------- */

/* Of one unit, a forward may use a or b alone. */
typedef struct either {
    kn_module base;
    kn_linear a, b;
    bool uses_b;
} either;

static kn_tensor *either_forward(kn_module *self, kn_tensor *x)
{
    either *m = (either *)self;
    return m->uses_b ? kn_call(&m->b, x) : kn_call(&m->a, kn_tanh(kn_call(&m->a, x)));
}

typedef enum writer {
    BY_STEP,
    BY_ONE_OPTIMIZER,
    BY_FROZEN_GROUP,
    BY_HAND,
    BY_SUMMON,
    BY_EMA,
    WRITERS
} writer;

typedef struct neighbour {
    kn_fsdp_wrap_options o;
    writer by;
    bool of_a; /* what the held graph used is written */
    bool plain, recompute;
} neighbour;

static bool either_init(either *m, const neighbour *n, kn_comm *world)
{
    memset(m, 0, sizeof *m);
    kn_fsdp_wrap_options o = n->o;
    o._size = sizeof o;
    o.seed = NET_SEED;
    bool ok = kn_module_init(&m->base, either_forward) &&
              kn_linear_init(&m->a, &m->base, "a", 4, 4, .device = KN_META) &&
              kn_linear_init(&m->b, &m->base, "b", 4, 4, .device = KN_META) &&
              kn_recompute(&m->a, n->recompute);
    return ok && (n->plain ? kn_materialize(m, KN_CPU, NET_SEED) : kn_fsdp_wrap_(m, world, o));
}

static kn_tensor *either_loss(either *m, bool uses_b)
{
    m->uses_b = uses_b;
    kn_tensor *y = kn_call(m, kn_randn(KN_F32, KN_CPU, 3, 1, KN_SHAPE(2, 4)));
    return mean_of(kn_square(kn_cast(y, KN_F32)));
}

/* Some of a, or of b alone, is written. */
static bool change(either *m, const neighbour *n)
{
    kn_linear *of = n->of_a ? &m->a : &m->b;
    const kn_param *p;
    float host[16] = { 1, 2, 3 };
    if (n->by == BY_HAND)
        return kn_params(of, &p) == 2 && kn_param_write(of, 0, host);
    if (n->by == BY_SUMMON) {
        kn_summon_scope s = kn_summon(m);
        float *w = s.s ? kn_data(kn_module_param(of, "weight")) : NULL;
        if (w)
            w[0] += 1;
        bool grad = kn_set_grad_mode(false);
        kn_bump_version(kn_module_param(of, "weight"));
        kn_set_grad_mode(grad);
        return w && kn_summon_end(s);
    }
    if (n->by == BY_EMA) {
        OWNED_EMA kn_ema *e = kn_ema_new(of, .decay = 0.5);
        return kn_ema_update(e) && kn_ema_swap(e) && kn_ema_swap(e);
    }
    const kn_optim_group rest = { .pattern = n->of_a ? "b.*" : "a.*", .frozen = true };
    const bool frozen = n->by == BY_FROZEN_GROUP;
    OWNED_OPTIM kn_optim *o = n->by == BY_STEP
                                  ? kn_sgd(of, .lr = 0.1)
                                  : kn_sgd(m, .lr = 0.1, .groups = &rest, .group_count = frozen);
    return o && kn_backward(either_loss(m, !n->of_a)) &&
           (!frozen || kn_backward(either_loss(m, n->of_a))) && kn_step(o);
}

static void beside(kn_comm *world, void *arg)
{
    const neighbour *n = arg;
    OWNED_MODULE either m;
    kn_set_threads(1);
    KN_CHECK(either_init(&m, n, world));
    IN_SCOPE;
    kn_tensor *held = either_loss(&m, false);
    KN_CHECK(change(&m, n));
    KN_CHECK(kn_backward(held) == !n->of_a);
    KN_CHECK(!n->of_a || strstr(kn_error(), "written in place"));
    kn_clear_error();
}

static void in_all_settings(neighbour n)
{
    for (int i = 0; i < 4; i++) {
        n.plain = i < 2;
        n.recompute = i & 1;
        n.o = (kn_fsdp_wrap_options){ 0 };
        for (int k = 0; k < (n.plain ? 1 : 3 * 3 * 3); k++)
            for (int ranks = 1; ranks <= (n.plain ? 1 : 2); ranks++) {
                if (!n.plain)
                    n.o = (kn_fsdp_wrap_options){
                        .strategy = (kn_strategy)(KN_FULL_SHARD + k % 3),
                        .layout = (kn_layout_kind)(KN_LAYOUT_FLAT + k / 3 % 3),
                        .offload_dir = k / 9 == 1 ? "/tmp" : NULL,
                        .param_dtype = k / 9 == 2 ? KN_BF16 : KN_DTYPE_DEFAULT,
                    };
                KN_CHECK(spawn_threads(ranks, beside, &n) == 0,
                         "%d ranks, written by %d, of a %d, plain %d, recompute %d, %d", ranks,
                         n.by, n.of_a, n.plain, n.recompute, k);
            }
    }
}

KN_TEST(old_graph, goes_on_where_only_a_neighbour_was_written)
{
    for (int by = 0; by < WRITERS; by++)
        in_all_settings((neighbour){ .by = (writer)by });
}

KN_TEST(old_graph, is_refused_where_its_own_was_written)
{
    for (int by = 0; by < WRITERS; by++)
        in_all_settings((neighbour){ .by = (writer)by, .of_a = true });
}
