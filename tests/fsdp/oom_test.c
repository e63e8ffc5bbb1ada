/* tests/fsdp/oom_test.c: every allocation of a sharded run fails once: each gives an error that
 * stands, and nothing is left behind. On meta among simulated ranks, so that one process runs the
 * paths of several ranks; and on one rank's CPU. */
#include "kernels/faults.h"
#include "knap.h"
#include "tests/failing.h"
#include "tests/owned.h"

typedef struct setting {
    const char *name;
    int ranks;
    kn_fsdp_wrap_options o;
    bool no_sync, group, lists;
} setting;

static bool one_step(kn_gpt *g)
{
    IN_SCOPE;
    kn_tensor *x = kn_zeros(KN_I64, KN_META, KN_SHAPE(1, 4));
    return kn_backward(kn_gpt_loss(g, x, x));
}

static bool wrap(kn_gpt *g, kn_comm *world, const setting *s)
{
    kn_fsdp_wrap_options o = s->o;
    o._size = sizeof o;
    o.device = KN_META;
    if (!s->group) {
        o.wrap_class = "gpt_block";
        return kn_fsdp_wrap_(&g->base, world, o);
    }
    kn_module *pair[2] = { kn_module_find(g, "transformer.h.0"),
                           kn_module_find(g, "transformer.h.1") };
    return pair[0] && pair[1] && kn_fsdp_wrap_group_(pair, 2, world, o) &&
           kn_fsdp_wrap_(&g->base, world, o);
}

static bool lists(kn_gpt *g, const setting *s)
{
    kn_module *last = s->lists ? kn_module_find(g, "transformer.h.1") : NULL;
    return !s->lists || (last && kn_fsdp_prefetch_forward(g, &last, 1) &&
                         kn_fsdp_prefetch_backward(g, &last, 1));
}

static bool whole_run(void *arg)
{
    const setting *s = arg;
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 2, .heads = 1, .embd = 4, .ctx = 4, .vocab = 5, .dropout = 0.1 };
    kn_optim *opt = NULL;
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(s->ranks, 0, 1e9);
    bool ok = world && kn_gpt_init(&g, c, KN_F32, KN_META) && wrap(&g, world, s) && lists(&g, s) &&
              (opt = kn_adamw(&g, .lr = 1e-2)) != NULL;
    if (s->no_sync)
        ok = ok && kn_fsdp_set_gradient_sync(&g, false, true) && one_step(&g) &&
             kn_fsdp_set_gradient_sync(&g, true, true);
    ok = ok && one_step(&g) && one_step(&g) && kn_step(opt);
    kn_optim_free(opt);
    kn_module_free(&g);
    return ok && kn_ok();
}

#define ATTACK(...)                                                                                \
    do {                                                                                           \
        setting s_ = { __VA_ARGS__ };                                                              \
        KN_CHECK(whole_run(&s_), "%s", s_.name);                                                   \
        each_allocation_fails(whole_run, NULL, &s_, 500);                                          \
    } while (0)

KN_TEST(oom, layouts)
{
    ATTACK(.name = "per parameter", .ranks = 3, .o.layout = KN_LAYOUT_PER_PARAM,
           .o.param_dtype = KN_BF16, .o.reduce_dtype = KN_F32);
    ATTACK(.name = "ragged, small ones whole", .ranks = 4, .o.layout = KN_LAYOUT_RAGGED,
           .o.keep_whole_below = 20, .no_sync = true);
}

KN_TEST(oom, hybrid_mesh)
{
    ATTACK(.name = "hybrid", .ranks = 4, .o.strategy = KN_HYBRID_SHARD, .o.mesh.shards = 2,
           .o.forward_prefetch = true, .no_sync = true);
}

KN_TEST(oom, groups_and_slices)
{
    ATTACK(.name = "group", .ranks = 4, .o.reshard_after_forward = 2, .group = true);
    ATTACK(.name = "lists", .ranks = 2, .o.layout = KN_LAYOUT_PER_PARAM, .lists = true);
}

/* A forward that fails in a gather keeps none of the gathered bytes. */
KN_TEST(oom, a_gather_that_fails_half_way)
{
    kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 2, .heads = 1, .embd = 4, .ctx = 4, .vocab = 5 };
    OWNED_SIMULATED kn_comm *world = kn_comm_simulated(3, 0, 1e9);
    setting s = { .ranks = 3, .o.layout = KN_LAYOUT_PER_PARAM };
    KN_CHECK(world && kn_gpt_init(&g, c, KN_F32, KN_META) && wrap(&g, world, &s));
    bool ok = false, mode = kn_set_grad_mode(false);
    for (int64_t n = 1; !ok; n++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *x = kn_zeros(KN_I64, KN_META, KN_SHAPE(1, 4));
        ok = WITH_FAILING(n, kn_gpt_loss(&g, x, x) != NULL);
        kn_scope_end(scope);
        KN_CHECK(ok || kn_ledger_read().live[KN_MEM_GATHERED] == 0, "allocation %lld: %lld bytes",
                 (long long)n, (long long)kn_ledger_read().live[KN_MEM_GATHERED]);
    }
    kn_set_grad_mode(mode);
    kn_module_free(&g);
}

/* ---- one rank -------------------------------------------------------------------------------- */

static bool train_step(kn_gpt *g, kn_optim *opt)
{
    for (int micro = 0; micro < 4; micro++) {
        IN_SCOPE;
        int64_t ids[24], targets[24];
        for (int i = 0; i < 24; i++) {
            ids[i] = (i * 7 + micro * 5) % 37;
            targets[i] = (ids[i] * 3 + 1) % 37;
        }
        kn_tensor *loss = kn_gpt_loss(g, kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(3, 8)),
                                      kn_from(KN_I64, KN_CPU, targets, KN_SHAPE(3, 8)));
        kn_item(loss);
        kn_backward(loss);
    }
    kn_item(kn_clip_grad_norm(g, 0.5));
    return kn_step(opt);
}

static bool run_on_the_cpu(void)
{
    OWNED_MODULE kn_gpt g = { 0 };
    kn_gpt_config c = { .layers = 1, .heads = 2, .embd = 8, .ctx = 8, .vocab = 37, .dropout = 0.1 };
    OWNED_OPTIM kn_optim *opt = NULL;
    bool ok = kn_gpt_init(&g, c, KN_F32, KN_META) &&
              kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .param_dtype = KN_BF16,
                           .reduce_dtype = KN_F32);
    ok = ok && (opt = kn_adamw(&g, .lr = 1e-2)) != NULL;
    ok = ok && train_step(&g, opt);
    return ok && kn_ok();
}

KN_TEST(oom, one_rank_on_the_cpu)
{
    kn_set_threads(1);
    KN_CHECK(run_on_the_cpu());
    int64_t live = kn_live_tensors();
    int failures = 0;
    for (int64_t n = 1;; n += kn_one_in(3)) {
        kn_scope scope = kn_scope_begin();
        kn_fail_alloc(n);
        bool ok = run_on_the_cpu();
        int64_t made = kn_fail_alloc(0);
        kn_scope_end(scope);
        if (ok) {
            KN_CHECK(made < n || n > 500, "allocation %lld failed without an error", (long long)n);
            break;
        }
        KN_CHECK(!kn_ok(), "allocation %lld: a failure without a sentence", (long long)n);
        kn_clear_error();
        failures++;
        KN_CHECK(kn_live_tensors() == live, "allocation %lld: %lld tensors leak", (long long)n,
                 (long long)(kn_live_tensors() - live));
    }
    KN_CHECK(failures > 500 / kn_one_in(3), "only %d allocations were tried", failures);
}
