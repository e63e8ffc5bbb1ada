/* tests/fsdp/old_graph_test.c: a backward through a graph that is older than a step is an error, in
 * many settings. */
#include "tests/fsdp/recovery.h"

typedef struct old_graph {
    kn_fsdp_wrap_options o;
    bool plain, recompute;
} old_graph;

static int old_graphs(kn_comm *world, void *arg)
{
    const old_graph *g = arg;
    const setting s = { "old graph", g->o, .plain = g->plain, .recompute = g->recompute };
    model m;
    kn_set_threads(1);
    fault.all = false;
    EXPECT(make(&m, world, &s, false));
    kn_optim *o = kn_sgd(&m, .lr = 0.1);
    kn_scope scope = kn_scope_begin();
    kn_tensor *first = loss(&m, 0, device_of(&m)), *second = loss(&m, 1, device_of(&m));
    EXPECT(kn_backward(second) && kn_step(o));
    EXPECT(!kn_backward(first) && strstr(kn_error(), "written in place"));
    kn_clear_error();
    kn_scope_end(scope);
    kn_optim_free(o);
    kn_module_free(&m);
    return 0;
}

KN_TEST(old_graph, is_refused_after_a_step)
{
    for (int i = 0; i < 2; i++) {
        old_graph g = { .plain = true, .recompute = i };
        KN_CHECK(kn_spawn_threads(1, old_graphs, &g) == 0, "plain, recompute %d", i);
    }
    stand_in_begin((stand_in){ 0 });
    for (int i = 0; i < 8; i++) {
        old_graph g = { { .device = STAND_IN,
                          .offload_dir = i & 1 ? "memory" : NULL,
                          .param_dtype = i & 2 ? KN_BF16 : KN_DTYPE_DEFAULT,
                          .wrap_class = "part" },
                        .recompute = i & 4 };
        KN_CHECK(kn_spawn(1, old_graphs, &g) == 0, "on a device, %d", i);
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
            KN_CHECK(kn_spawn_threads(ranks, old_graphs, &g) == 0,
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
        KN_CHECK(kn_spawn_threads(4, old_graphs, &g) == 0, "hybrid, %d", k);
    }
}

/* One element is changed, which lies in one rank's shard: the copies of all ranks are of old. */
static int summoned_between(kn_comm *world, void *arg)
{
    const setting s = { "summoned", { .param_dtype = KN_BF16, .wrap_class = "part" } };
    model m;
    bool changes = *(bool *)arg;
    kn_set_threads(1);
    fault.all = false;
    EXPECT(make(&m, world, &s, false));
    const kn_storage *full = kn_unit_of(m.part[0].base.impl)->bucket[0]->full;
    kn_scope scope = kn_scope_begin();
    kn_tensor *l = loss(&m, 0, KN_CPU);
    uint32_t before = full->version;
    kn_summon_scope whole = kn_summon(&m.part[0]);
    float *w = kn_data(kn_module_param(&m.part[0], "in.weight"));
    EXPECT(w);
    w[0] += changes;
    EXPECT(kn_summon_end(whole) && (full->version != before) == changes);
    EXPECT(kn_backward(l) == !changes && (!changes || strstr(kn_error(), "written in place")));
    kn_clear_error();
    kn_scope_end(scope);
    kn_module_free(&m);
    return 0;
}

KN_TEST(old_graph, is_refused_after_a_change_by_hand)
{
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        for (int changes = 0; changes < 2; changes++)
            KN_CHECK(kn_spawn_threads(ranks, summoned_between, &(bool){ changes }) == 0,
                     "%d ranks, changes %d", ranks, changes);
}
