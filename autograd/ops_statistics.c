/* autograd/ops_statistics.c: reductions made of other operations: logsumexp, variance, norms,
 * products, any and all. Each computes narrow floats in f32 and rounds its result once. */
#include "autograd/ops.h"
#include <math.h>
#include <string.h>

/* ---- helpers --------------------------------------------------------------------------------- */

/* x is there, and *dims is the set of the n dims listed (bit d: dim d), or of all for n == 0. */
static bool checked(const char *op, const kn_tensor *x, int n, const int64_t *list, bool floats,
                    uint32_t *dims)
{
    return kn_dims(op, x, n, list, dims) && kn_takes(op, x, floats);
}

/* Ends the scope of a composition: y goes on, in dtype. */
static kn_tensor *ended(kn_scope s, kn_tensor *y, kn_dtype dtype)
{
    return kn_scope_result(s, kn_cast(y, dtype));
}

/* x^exponent for x >= 0, with gradient 0 where x is 0 (torch's choice for norms). */
static kn_tensor *root(kn_tensor *x, double exponent)
{
    kn_tensor *none = kn_eq(x, kn_number_like(x, 0)),
              *safe = kn_where(none, kn_number_like(x, 1), x);
    kn_tensor *y = exponent == 0.5 ? kn_sqrt(safe) : kn_pow(safe, exponent);
    return kn_where(none, kn_number_like(x, exponent < 0 ? INFINITY : 0), y);
}

/* ---- logsumexp ------------------------------------------------------------------------------- */

/* log sum exp(x - m) + m; m, the maximum where that is finite, counts as a constant: its gradient
 * is 0. */
kn_tensor *kn_logsumexp(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    uint32_t set;
    if (!checked("logsumexp", x, n, dims, true, &set))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *wide = kn_wide(x), *y = NULL;
    if (wide && kn_count_of(x->ndim, x->shape, set) == 0) {
        y = kn_log(kn_sum(wide, n, dims, keep));
    } else if (wide) {
        kn_tensor *top = kn_amax(kn_detach(wide), n, dims, true);
        top = kn_where(kn_eq(kn_abs(top), kn_number_like(top, INFINITY)), kn_number_like(top, 0),
                       top);
        y = kn_log(kn_sum(kn_exp(kn_sub(wide, top)), n, dims, keep));
        y = y ? kn_add(y, kn_reshape(top, y->ndim, y->shape)) : NULL;
    }
    return ended(s, y, x->dtype);
}

/* ---- variance -------------------------------------------------------------------------------- */

typedef struct centred_attr {
    int n;
    int64_t dims[KN_MAX_DIMS];
} centred_attr;

static kn_tensor *mean_of(const centred_attr *a, kn_tensor *x)
{
    return kn_mean(x, a->n, a->dims, true);
}

/* x - mean */
static bool centred_forward(kn_op_call *c)
{
    kn_tensor *mean = mean_of(c->attr, c->in[0]), *y = c->out[0];
    return mean && KN_RUN(y, KN_K_BINARY,
                          ((kn_binary_args){ kn_array_of(y), kn_array_of(c->in[0]),
                                             kn_array_expand(kn_array_of(mean), y->ndim, y->shape),
                                             KN_SUB }));
}

/* dy - mean of dy, which is 0 of a variance's: dy = f (x - mean). Not so its derivative. */
static bool centred_backward(kn_op_grad *g)
{
    kn_tensor *dy = g->dout[0];
    g->din[0] = kn_grad_mode() ? kn_sub(dy, mean_of(g->attr, dy)) : dy;
    return g->din[0] != NULL;
}

KN_OP(kn_op_centred, .name = "centred", .makes = true, .attr_size = sizeof(centred_attr),
      .shape = kn_shape_of_input, .forward = centred_forward, .backward = centred_backward,
      .on_tape = centred_backward);

/* sum (x - mean)^2 / (count - correction), widened. */
static kn_tensor *variance(const char *op, kn_tensor *x, int n, const int64_t *dims,
                           const kn_var_options *o)
{
    uint32_t set;
    const double correction = kn_value_or(o->correction, 1);
    if (!checked(op, x, n, dims, true, &set))
        return NULL;
    if (!isfinite(correction))
        return kn_fail_null("%s: correction is %g, should be finite (0: 1; KN_ZERO: 0)", op,
                            correction);
    kn_tensor *wide = kn_wide(x);
    centred_attr a = { .n = n };
    if (n > 0)
        memcpy(a.dims, dims, (size_t)n * sizeof *dims);
    kn_tensor *far = kn_apply1(&kn_op_centred, 1, &wide, 0, &a);
    return kn_scale(kn_sum(kn_mul(far, far), n, dims, o->keep),
                    1 / fmax(0, kn_count_of(x->ndim, x->shape, set) - correction));
}

kn_tensor *kn_var_(kn_tensor *x, int n, const int64_t *dims, kn_var_options o)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *y = variance("var", x, n, dims, &o);
    return ended(s, y, y ? x->dtype : KN_F32);
}

kn_tensor *kn_std_(kn_tensor *x, int n, const int64_t *dims, kn_var_options o)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *y = variance("std", x, n, dims, &o);
    return ended(s, y ? root(y, 0.5) : NULL, y ? x->dtype : KN_F32);
}

/* ---- norms ----------------------------------------------------------------------------------- */

/* 1 where x isn't 0, with the gradient of steps: 0. */
static kn_tensor *counted(kn_tensor *x)
{
    return kn_where(kn_ne(x, kn_number_like(x, 0)), kn_number_like(x, 1), kn_sign(x));
}

/* (sum |x|^p)^(1/p). Where p < 1, zeros are kept out of the power: its slope there is infinite. */
static kn_tensor *norm_of_power(kn_tensor *x, double p, int n, const int64_t *dims, bool keep)
{
    kn_tensor *a = kn_abs(x), *none = NULL;
    if (p < 1) {
        none = kn_eq(a, kn_number_like(a, 0));
        a = kn_where(none, kn_number_like(a, 1), a);
    }
    a = kn_pow(a, p);
    if (p < 1)
        a = kn_where(none, kn_number_like(a, p < 0 ? INFINITY : 0), a);
    return root(kn_sum(a, n, dims, keep), 1 / p);
}

kn_tensor *kn_norm(kn_tensor *x, double p, int n, const int64_t *dims, bool keep)
{
    uint32_t set;
    if (!checked("norm", x, n, dims, true, &set))
        return NULL;
    if (isnan(p))
        return kn_fail_null("norm: p is NaN; use 2, 1, INFINITY or another number");
    if ((p < 0 || isinf(p)) && kn_count_of(x->ndim, x->shape, set) == 0)
        return kn_fail_null(
            "norm: there are no elements to reduce, so the norm for p = %g has no value", p);
    kn_scope s = kn_scope_begin();
    kn_tensor *wide = kn_wide(x), *y;
    if (p == 2)
        y = root(kn_sum(kn_mul(wide, wide), n, dims, keep), 0.5);
    else if (p == 1)
        y = kn_sum(kn_abs(wide), n, dims, keep);
    else if (isinf(p))
        y = (p > 0 ? kn_amax : kn_amin)(kn_abs(wide), n, dims, keep);
    else if (p == 0)
        y = kn_sum(counted(wide), n, dims, keep);
    else
        y = norm_of_power(wide, p, n, dims, keep);
    return ended(s, y, x->dtype);
}

/* ---- products -------------------------------------------------------------------------------- */

/* The product over dim d, which stays with size 1: halves are multiplied with each other until one
 * slice is left; the slices that had no partner come last. */
static kn_tensor *halved(kn_tensor *x, int d)
{
    kn_tensor *rest = NULL;
    while (x && x->shape[d] > 1) {
        int64_t half = x->shape[d] / 2;
        if (x->shape[d] % 2) {
            kn_tensor *last = kn_slice(x, d, 2 * half, 2 * half + 1);
            rest = rest ? kn_mul(rest, last) : last;
        }
        x = kn_mul(kn_slice(x, d, 0, half), kn_slice(x, d, half, 2 * half));
    }
    return x && rest ? kn_mul(x, rest) : x;
}

kn_tensor *kn_prod(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    uint32_t set;
    if (!checked("prod", x, n, dims, false, &set))
        return NULL;
    const bool floats = kn_dtype_is_float(x->dtype);
    int64_t left[KN_MAX_DIMS];
    int ndim = 0;
    for (int d = 0; d < x->ndim; d++)
        if (keep || !(set >> d & 1))
            left[ndim++] = set >> d & 1 ? 1 : x->shape[d];
    kn_scope s = kn_scope_begin();
    kn_tensor *y = floats ? kn_wide(x) : kn_cast(x, KN_I64);
    if (y && kn_count_of(x->ndim, x->shape, set) == 0) {
        y = kn_add_scalar(kn_sum(y, n, dims, keep), 1);
    } else if (y) {
        for (int d = 0; d < x->ndim; d++)
            y = set >> d & 1 ? halved(y, d) : y;
        y = kn_reshape(y, ndim, left);
    }
    return ended(s, y, floats ? x->dtype : KN_I64);
}

/* ---- any, all, argmin ------------------------------------------------------------------------ */

/* Compares the number of elements that hold, or that don't, with 0: compare is kn_ne, or kn_eq. */
static kn_tensor *counted_as(const char *op, kn_tensor *x, int n, const int64_t *dims, bool keep,
                             kn_tensor *(*compare)(kn_tensor *, kn_tensor *))
{
    uint32_t set;
    if (!checked(op, x, n, dims, false, &set))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *counts = x->dtype != KN_BOOL ? compare(x, kn_number_like(x, 0))
                        : compare == kn_ne  ? x
                                            : kn_logical_not(x);
    kn_tensor *count = kn_sum(counts, n, dims, keep);
    return ended(s, compare(count, kn_number_like(count, 0)), KN_BOOL);
}

kn_tensor *kn_any(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    return counted_as("any", x, n, dims, keep, kn_ne);
}

kn_tensor *kn_all(kn_tensor *x, int n, const int64_t *dims, bool keep)
{
    return counted_as("all", x, n, dims, keep, kn_eq);
}

/* Of integers, whose smallest has no negative: the first that equals the minimum. */
kn_tensor *kn_argmin(kn_tensor *x, int dim)
{
    uint32_t set;
    if (!checked("argmin", x, 1, (int64_t[]){ dim }, false, &set))
        return NULL;
    dim = kn_dim("argmin", x, dim);
    if (x->shape[dim] == 0)
        return kn_fail_null("argmin: dim %d has size 0, so it has no extremum", dim);
    kn_scope s = kn_scope_begin();
    x = kn_detach(x);
    kn_tensor *won =
        x && kn_dtype_is_float(x->dtype) ? kn_neg(x) : kn_eq(x, kn_amin(x, KN_SHAPE(dim), true));
    return ended(s, kn_argmax(won, dim), KN_I64);
}
