/* autograd/gradgradcheck.c: gradients of gradients against central differences (gradcheck.h). */
#include "autograd/autograd_internal.h"
#include "autograd/gradcheck.h"

/* fn, whose inputs come before the weights of its results. */
typedef struct inner {
    kn_gradcheck_fn fn;
    void *arg;
    int inputs;
} inner;

/* The sum over results of weight times result. */
static kn_tensor *weighted(kn_values out, kn_tensor *const *weight)
{
    kn_tensor *sum = NULL;
    for (int k = 0; k < out.n; k++) {
        if (!weight[k] || !kn_requires_grad(out.v[k]))
            continue;
        kn_tensor *wide = kn_cast(out.v[k], KN_F64);
        kn_tensor *term = kn_sum(kn_mul(wide, weight[k]), 0, NULL, false);
        sum = sum ? kn_add(sum, term) : term;
    }
    return sum;
}

/* The gradients of all inputs that require grad. */
static kn_values gradients(kn_values in, void *arg)
{
    const inner *f = arg;
    kn_values given = in, out = { 0 };
    kn_tensor *x[KN_MAX_VALUES], *g[KN_MAX_VALUES];
    given.n = f->inputs;
    for (int i = 0; i < given.n; i++)
        if (given.v[i] && given.v[i]->requires_grad)
            x[out.n++] = given.v[i];
    kn_tensor *sum = weighted(f->fn(given, f->arg), in.v + f->inputs);
    if (!sum && kn_ok())
        kn_fail("gradgradcheck: no result requires grad");
    if (!kn_grad_of(sum, x, out.n, g, .create_graph = true))
        return (kn_values){ 0 };
    for (int i = 0; i < out.n; i++)
        out.v[i] = g[i] ? g[i] : kn_zeros_like(x[i]);
    return out;
}

/* A leaf of random values like each float result. */
static bool add_weights(const inner *f, kn_values *in, uint64_t seed)
{
    kn_context *ctx = kn_context_get();
    const kn_rng_key rng = ctx->rng;
    kn_values given = *in;
    kn_values out = f->fn(given, f->arg);
    ctx->rng = rng;
    if (kn_ok() && (out.n < 1 || in->n + out.n > KN_MAX_VALUES))
        return kn_fail("gradgradcheck: %d inputs and %d results; at least one of each, together at "
                       "most %d",
                       in->n, out.n, KN_MAX_VALUES);
    for (int k = 0; k < out.n && kn_ok(); k++) {
        const kn_tensor *y = out.v[k];
        if (!kn_check(y, "gradgradcheck: a result"))
            return false;
        kn_tensor *w = kn_dtype_is_float(y->dtype)
                           ? kn_randn(KN_F64, kn_device_of(y), seed, (uint64_t)k, y->ndim, y->shape)
                           : NULL;
        in->v[in->n++] = w ? kn_require_grad(w, true) : NULL;
    }
    return kn_ok();
}

bool kn_gradgradcheck_(kn_gradcheck_fn fn, kn_values in, kn_gradcheck_options o)
{
    inner f = { fn, o.arg, in.n };
    bool any = false;
    if (!kn_ok())
        return false;
    if (!fn || in.n < 1 || in.n >= KN_MAX_VALUES)
        return kn_fail("gradgradcheck: needs a function and 1 to %d inputs, got %d",
                       KN_MAX_VALUES - 1, in.n);
    for (int i = 0; i < in.n; i++)
        any |= kn_requires_grad(in.v[i]);
    if (!any)
        return kn_fail("gradgradcheck: no input requires grad (kn_require_grad)");
    const bool mode = kn_set_grad_mode(true);
    kn_scope scope = kn_scope_begin();
    o.arg = &f;
    const bool ok = add_weights(&f, &in, o.seed) && kn_gradcheck_(gradients, in, o);
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    return ok;
}
