/* autograd/ops_scan.c: running products, extrema, logarithms of sums along a dim; differences. */
#include "autograd/function.h"
#include "autograd/losses.h"
#include <math.h>

typedef struct scan {
    int dim;
    kn_join by;
} scan;

/* All of x before and at each element, or from it on, joined. */
static kn_tensor *run_scan(kn_tensor *x, int dim, kn_join by, bool reverse)
{
    kn_tensor *y = x ? kn_empty_like(x) : NULL;
    return y && KN_RUN(y, KN_K_CUMSUM,
                       ((kn_cumsum_args){ kn_array_of(y), kn_array_of(x), dim, reverse, by }))
               ? y
               : NULL;
}

/* x in the dtype that the scan computes in; *dim from 0 on. NULL with an error of op. */
static kn_tensor *checked(const char *op, kn_tensor *x, int *dim, bool floats)
{
    if ((*dim = kn_dim(op, x, *dim)) < 0 || !kn_takes(op, x, floats))
        return NULL;
    return kn_dtype_is_float(x->dtype) ? kn_wide(x) : kn_cast(x, KN_I64);
}

/* ---- products -------------------------------------------------------------------------------- */

static kn_values scan_forward(kn_function_run *run, kn_values in)
{
    const scan *s = run->arg;
    kn_tensor *y = run_scan(in.v[0], s->dim, s->by, false);
    kn_save_for_backward(run, in.v[0], y);
    return KN_VALUES(y);
}

/* dx_i = sum over j >= i of dy_j y_j / x_i. At the first zero, y / x is the product of the others;
 * behind it dx is 0. */
static kn_values product_backward(kn_function_run *run, kn_values dout)
{
    const int dim = ((const scan *)run->arg)->dim;
    kn_tensor *x = run->saved.v[0], *y = run->saved.v[1], *dy = dout.v[0];
    kn_tensor *zero = kn_number_like(x, 0), *one = kn_number_like(x, 1), *is_zero = kn_eq(x, zero);
    kn_tensor *zeros = kn_cumsum(kn_cast(is_zero, x->dtype), dim);
    kn_tensor *first = kn_logical_and(is_zero, kn_eq(zeros, one));
    kn_tensor *others = run_scan(kn_where(first, one, x), dim, KN_JOIN_PRODUCT, false);
    kn_tensor *at = run_scan(kn_mul(dy, others), dim, KN_JOIN_SUM, true);
    kn_tensor *before = run_scan(kn_mul(dy, y), dim, KN_JOIN_SUM, true);
    before = kn_div(before, kn_where(is_zero, one, x));
    return KN_VALUES(kn_where(kn_eq(zeros, zero), before, kn_where(first, at, zero)));
}

kn_tensor *kn_cumprod(kn_tensor *x, int dim)
{
    static const kn_function product = { .name = "cumprod",
                                         .forward = scan_forward,
                                         .backward = product_backward };
    kn_scope s = kn_scope_begin();
    kn_tensor *wide = checked(product.name, x, &dim, false);
    const scan a = { dim, KN_JOIN_PRODUCT };
    kn_tensor *y = kn_function_call_n(&product, KN_VALUES(wide), &a, sizeof a).v[0];
    y = y && kn_dtype_is_float(x->dtype) ? kn_cast(y, x->dtype) : y;
    return kn_scope_result(s, y);
}

/* ---- logarithms of sums ---------------------------------------------------------------------- */

/* e^x times the sum over j >= i of dy_j e^-y_j, of the positive dy */
static kn_tensor *log_sum_part(kn_tensor *x, kn_tensor *y, kn_tensor *dy, int dim)
{
    kn_tensor *logs = kn_sub(kn_log(kn_clamp(dy, 0, INFINITY)), y);
    return kn_exp(kn_add(run_scan(logs, dim, KN_JOIN_LOG_SUM, true), x));
}

static kn_values log_sum_backward(kn_function_run *run, kn_values dout)
{
    const int dim = ((const scan *)run->arg)->dim;
    kn_tensor *x = run->saved.v[0], *y = run->saved.v[1], *dy = dout.v[0];
    return KN_VALUES(kn_sub(log_sum_part(x, y, dy, dim), log_sum_part(x, y, kn_neg(dy), dim)));
}

kn_tensor *kn_logcumsumexp(kn_tensor *x, int dim)
{
    static const kn_function log_sum = { .name = "logcumsumexp",
                                         .forward = scan_forward,
                                         .backward = log_sum_backward };
    kn_scope s = kn_scope_begin();
    kn_tensor *wide = checked(log_sum.name, x, &dim, true);
    const scan a = { dim, KN_JOIN_LOG_SUM };
    kn_tensor *y = kn_function_call_n(&log_sum, KN_VALUES(wide), &a, sizeof a).v[0];
    return kn_scope_result(s, y ? kn_cast(y, x->dtype) : NULL);
}

/* ---- extrema --------------------------------------------------------------------------------- */

/* The extremum, and the last place so far that has it: the largest of those that had it. */
static kn_values extremum_forward(kn_function_run *run, kn_values in)
{
    const scan *s = run->arg;
    kn_tensor *x = in.v[0], *y = run_scan(x, s->dim, s->by, false);
    kn_tensor *place = kn_arange(KN_I64, kn_device_of(x), x->shape[s->dim]);
    kn_tensor *won = kn_logical_or(kn_eq(x, y), kn_isnan(x));
    kn_tensor *at = kn_where(won, kn_along(place, x->ndim, s->dim), kn_number_like(place, 0));
    at = run_scan(at, s->dim, KN_JOIN_MAX, false);
    kn_save_for_backward(run, at);
    return KN_VALUES(y, at);
}

static kn_values extremum_backward(kn_function_run *run, kn_values dout)
{
    const int dim = ((const scan *)run->arg)->dim;
    kn_tensor *none = dout.v[0] ? kn_zeros_like(dout.v[0]) : NULL;
    return KN_VALUES(none ? kn_scatter_add(none, dim, run->saved.v[0], dout.v[0]) : NULL);
}

static kn_tensor *extremum(const char *op, kn_tensor *x, int dim, kn_join by, kn_tensor **indices)
{
    const kn_function f = { .name = op,
                            .forward = extremum_forward,
                            .backward = extremum_backward };
    kn_tensor *out[2] = { NULL, NULL };
    kn_scope s = kn_scope_begin();
    kn_tensor *wide = checked(op, x, &dim, false);
    const scan a = { dim, by };
    if (wide) {
        kn_values y = kn_function_call_n(&f, KN_VALUES(wide), &a, sizeof a);
        out[0] = y.v[0] ? kn_cast(y.v[0], x->dtype) : NULL;
        out[1] = y.v[1];
    }
    kn_scope_end_except(s, out, 2);
    if (indices)
        *indices = out[1];
    return out[0];
}

kn_tensor *kn_cummax(kn_tensor *x, int dim, kn_tensor **indices)
{
    return extremum("cummax", x, dim, KN_JOIN_MAX, indices);
}

kn_tensor *kn_cummin(kn_tensor *x, int dim, kn_tensor **indices)
{
    return extremum("cummin", x, dim, KN_JOIN_MIN, indices);
}

/* ---- differences ----------------------------------------------------------------------------- */

kn_tensor *kn_diff(kn_tensor *x, int n, int dim)
{
    if ((dim = kn_dim("diff", x, dim)) < 0)
        return NULL;
    if (n < 0)
        return kn_fail_null("diff: n is %d, should be at least 0", n);
    kn_scope s = kn_scope_begin();
    for (; n > 0 && x; n--) {
        const int64_t size = x->shape[dim], first = size > 0, last = size - first;
        x = kn_sub(kn_slice(x, dim, first, size), kn_slice(x, dim, 0, last));
    }
    return kn_scope_result(s, x);
}
