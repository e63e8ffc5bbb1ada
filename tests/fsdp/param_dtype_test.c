/* tests/fsdp/param_dtype_test.c: a dtype a parameter (.param_dtype_of). Rank functions return a
 * status and never assert. */
#include "tests/fsdp/net.h"

static kn_dtype norms_in_f32(const char *name, int ndim, const int64_t *shape, void *arg)
{
    (void)shape;
    *(int *)arg += ndim;
    return strncmp(name, "ln.", 3) == 0 ? KN_F32 : KN_DTYPE_DEFAULT;
}

static kn_dtype always(const char *name, int ndim, const int64_t *shape, void *arg)
{
    (void)name, (void)ndim, (void)shape;
    return (kn_dtype) * (int *)arg;
}

/* bf16, and a norm in f32 inside its unit: losses as in one process, gradients of f32 unrounded. */
static int by_parameter(kn_comm *world, void *arg)
{
    net m, alone;
    int dims = 0;
    const way *w = arg;
    EXPECT(net_init(&m, KN_META) && net_init(&alone, KN_META), "init");
    EXPECT(kn_fsdp_wrap(&m, world, .strategy = w->strategy, .layout = w->layout, .mesh = w->mesh,
                        .keep_whole_below = w->keep_whole_below, .offload_dir = w->offload_dir,
                        .wrap_class = "linear", .param_dtype = KN_BF16, .seed = NET_SEED,
                        .param_dtype_of = norms_in_f32, .param_dtype_of_arg = &dims),
           "wrap");
    EXPECT(dims == 2 + 3 + 3 + 2, "asked for parameters of %d dims in all", dims);
    EXPECT(kn_fsdp_wrap(&alone, kn_comm_self(), .param_dtype = KN_BF16, .seed = NET_SEED,
                        .param_dtype_of = norms_in_f32, .param_dtype_of_arg = &dims),
           "one rank");
    EXPECT(kn_dtype_of(kn_module_param(&m, "ln.weight")) == KN_F32 &&
               kn_dtype_of(kn_module_param(&m, "ln.bias")) == KN_F32 &&
               kn_dtype_of(kn_module_param(&m, "wte.weight")) == KN_BF16 &&
               kn_dtype_of(kn_module_param(&m, "fc1.bias")) == KN_BF16,
           "dtypes");
    kn_unit *u = kn_unit_of(m.base.impl);
    for (int i = 0; i < u->buckets; i++)
        EXPECT(u->bucket[i]->reduce_dtype == u->bucket[i]->param_dtype, "reductions");
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = net_loss(&m, 2), *b = net_loss(&alone, 2);
    EXPECT(a && b && kn_item(a) == kn_item(b), "losses");
    EXPECT(kn_backward(a), "backward");
    kn_scope_end(scope);
    kn_fsdp_memory mem = kn_fsdp_predict(&m);
    EXPECT(mem.gathered >= 0 && kn_ok(), "predict");
    kn_module_free(&m);
    kn_module_free(&alone);
    return !kn_ok();
}

KN_TEST(param_dtype, of_single_parameters)
{
    in_all_ways(by_parameter);
    net m;
    int i64 = KN_I64;
    KN_CHECK(net_init(&m, KN_META), "%s", kn_error());
    KN_CHECK(!kn_fsdp_wrap(&m, NULL, .param_dtype_of = always, .param_dtype_of_arg = &i64));
    KN_CHECK_ERROR(".param_dtype_of chose i64 for 'wte.weight'");
    kn_module_free(&m);
}
