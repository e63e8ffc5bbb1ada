/* tests/fsdp/param_dtype_test.c: a dtype a parameter (.param_dtype_of), and units of more buckets
 * than a collective takes. Rank functions return a status and never assert. */
#include "tests/fsdp/net.h"

static kn_dtype norms_in_f32(const char *name, int ndim, const int64_t *shape, void *arg)
{
    *(int *)arg += ndim;
    return strncmp(name, "ln.", 3) == 0 ? KN_F32 : KN_DTYPE_DEFAULT;
}

static kn_dtype always(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return (kn_dtype) * (int *)arg;
}

/* bf16, and a norm in f32 inside its unit: losses as in one process, gradients of f32 unrounded. */
static void by_parameter(kn_comm *world, void *arg)
{
    int dims = 0;
    const way *w = arg;
    NET(m);
    NET(alone);
    KN_CHECK(kn_fsdp_wrap(&m, world, WAY_OPTIONS(w), .wrap_class = "linear", .param_dtype = KN_BF16,
                          .seed = NET_SEED, .param_dtype_of = norms_in_f32,
                          .param_dtype_of_arg = &dims));
    KN_CHECK(dims == 2 + 3 + 3 + 2, "asked for parameters of %d dims in all", dims);
    KN_CHECK(kn_fsdp_wrap(&alone, kn_comm_self(), .param_dtype = KN_BF16, .seed = NET_SEED,
                          .param_dtype_of = norms_in_f32, .param_dtype_of_arg = &dims),
             "one rank");
    KN_CHECK(kn_dtype_of(kn_module_param(&m, "ln.weight")) == KN_F32 &&
                 kn_dtype_of(kn_module_param(&m, "ln.bias")) == KN_F32 &&
                 kn_dtype_of(kn_module_param(&m, "wte.weight")) == KN_BF16 &&
                 kn_dtype_of(kn_module_param(&m, "fc1.bias")) == KN_BF16,
             "dtypes");
    kn_unit *u = kn_unit_of(m.base.impl);
    for (int i = 0; i < u->buckets; i++)
        KN_CHECK(u->bucket[i]->reduce_dtype == u->bucket[i]->param_dtype, "reductions");
    kn_scope scope = kn_scope_begin();
    kn_tensor *a = net_loss(&m, 2), *b = net_loss(&alone, 2);
    KN_CHECK(a && b && kn_item(a) == kn_item(b), "losses");
    KN_CHECK(kn_backward(a));
    kn_scope_end(scope);
    kn_fsdp_memory mem = kn_fsdp_predict(&m);
    KN_CHECK(mem.gathered >= 0 && kn_ok(), "predict");
}

KN_TEST(param_dtype, of_single_parameters)
{
    in_all_ways(by_parameter);
    int i64 = KN_I64;
    NET(m);
    REFUSED(kn_fsdp_wrap(&m, NULL, .param_dtype_of = always, .param_dtype_of_arg = &i64),
            ".param_dtype_of chose i64 for 'wte.weight'");
}

/* ---- a bucket of every kind ------------------------------------------------------------------ */

enum { MASTERS = 3, COMPUTES = 4, KINDS = MASTERS * COMPUTES * 2 * 2, WHOLE_BELOW = 20 };

static const kn_dtype dtypes[COMPUTES] = { KN_F32, KN_BF16, KN_F16, KN_F64 };

/* Each parameter has another combination of its masters' dtype, the dtype that it computes in,
 * whether it trains, and whether it is held whole. */
static kn_dtype computes_in(const char *name, int ndim, const int64_t *shape, void *arg)
{
    return dtypes[atoi(name + 1) / MASTERS % COMPUTES];
}

/* The sum of all elements, exact in f32. */
static kn_tensor *kinds_forward(kn_module *self, kn_tensor *x)
{
    for (int i = 0; i < KINDS; i++)
        x = kn_add(x, sum_of(kn_cast(self->impl->param[i].tensor, KN_F32)));
    return x;
}

static bool trains(int i)
{
    return i / MASTERS / COMPUTES % 2 == 0;
}

static int64_t elements(int i)
{
    return i / MASTERS / COMPUTES / 2 ? WHOLE_BELOW - 1 : WHOLE_BELOW + i;
}

static bool kinds_init(kn_module *m)
{
    bool ok = kn_module_init(m, kinds_forward);
    for (int i = 0; i < KINDS && ok; i++) {
        char name[8];
        snprintf(name, sizeof name, "p%d", i);
        ok = kn_parameter(m, name, dtypes[i % MASTERS], KN_META, KN_CONSTANT_INIT(i + 1), 1,
                          (int64_t[]){ elements(i) }) &&
             kn_require_grad(kn_module_param(m, name), trains(i));
    }
    return ok;
}

/* This rank's part of the gradient of parameter i is `want` everywhere, or there is none. */
static bool grad_is(const kn_param *p, int i, float want)
{
    float have[WHOLE_BELOW + KINDS];
    IN_SCOPE;
    kn_tensor *g = kn_param_grad(p);
    bool ok = trains(i) == (g != NULL);
    if (g && kn_numel(g) > 0)
        ok = kn_to_host(kn_cast(g, KN_F32), have, (size_t)kn_numel(g) * sizeof *have);
    for (int64_t k = 0; g && ok && k < kn_numel(g); k++)
        ok = have[k] == want;
    return ok;
}

/* Of a unit with more buckets than fit into a collective none is left out. */
RANK_TEST(param_dtype, a_unit_of_more_buckets_than_a_collective_takes, .threads = "124")
{
    int n = kn_comm_size(world);
    double sum = 0;
    OWNED_MODULE kn_module m = { 0 };
    const kn_param *p;
    KN_CHECK(kinds_init(&m) &&
             kn_fsdp_wrap(&m, world, .reduce_dtype = KN_F32, .param_dtype_of = computes_in,
                          .keep_whole_below = WHOLE_BELOW));
    KN_CHECK(kn_unit_of(m.impl)->buckets == KINDS && kn_params(&m, &p) == KINDS);
    for (int i = 0; i < KINDS; i++)
        sum += (double)elements(i) * (i + 1);
    for (int micro = 1; micro <= 2; micro++) {
        kn_scope scope = kn_scope_begin();
        kn_tensor *y = kn_call(&m, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1)));
        KN_CHECK(y && kn_item(y) == sum, "%g is gathered, not %g", kn_item(y), sum);
        KN_CHECK(kn_backward(sum_of(kn_scale(y, kn_rank(world) + 1))));
        kn_scope_end(scope);
        for (int i = 0; i < KINDS; i++)
            KN_CHECK(grad_is(&p[i], i, (float)(micro * n * (n + 1)) / 2), "'%s'", p[i].name);
    }
}
