/* autograd/ops_select.c: elements picked by their values, whose number the host must know. */
#include "autograd/ops.h"
#include "kernels/graph_internal.h"
#include <math.h>

/* Whether the host may wait for x's values. */
static bool has_values(const char *op, const kn_tensor *x)
{
    if (kn_device_of(x) == KN_META)
        return kn_fail("%s: the size of the result depends on values, which tensors on meta don't "
                       "have",
                       op);
    return !kn_unrecordable(kn_device_of(x), "%s: the host waits for values", op);
}

/* The places of the n elements of here[count] that hold, as [n, ndim] of shape. */
static kn_tensor *places_of(const bool *here, int64_t count, int ndim, const int64_t *shape)
{
    int64_t n = 0;
    for (int64_t i = 0; i < count; i++)
        n += here[i];
    kn_tensor *t = kn_empty(KN_I64, KN_CPU, 2, (int64_t[]){ n, ndim });
    int64_t *at = t ? kn_data(t) : NULL;
    for (int64_t i = 0; i < count && at; i++) {
        int64_t rest = i;
        for (int d = ndim - 1; d >= 0 && here[i]; rest /= shape[d--])
            at[d] = rest % shape[d];
        at += here[i] ? ndim : 0;
    }
    return t;
}

/* Of a bool tensor, on the CPU. */
static kn_tensor *places_that_hold(kn_tensor *mask)
{
    const int64_t count = kn_numel(mask);
    kn_tensor *dense = kn_contiguous(kn_detach(mask));
    bool *here = dense ? kn_host_alloc((size_t)count + 1) : NULL;
    kn_tensor *t = here && kn_to_host(dense, here, (size_t)count)
                       ? places_of(here, count, mask->ndim, mask->shape)
                       : NULL;
    kn_host_free(here);
    return t;
}

kn_tensor *kn_nonzero(kn_tensor *x)
{
    if (!kn_takes("nonzero", x, false) || !has_values("nonzero", x))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *mask = x->dtype == KN_BOOL
                          ? x
                          : kn_ne(kn_detach(x), kn_zeros(x->dtype, kn_device_of(x), KN_SCALAR));
    kn_tensor *t = mask ? places_that_hold(mask) : NULL;
    return kn_scope_result(s, kn_to_device(t, kn_device_of(x)));
}

kn_tensor *kn_masked_select(kn_tensor *x, kn_tensor *mask)
{
    const char *op = "masked_select";
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    if (!kn_ok() || !kn_check(x, op) || !kn_check(mask, op) || !has_values(op, x))
        return NULL;
    if (mask->dtype != KN_BOOL || kn_device_of(mask) != kn_device_of(x) ||
        !kn_broadcast_shape(x->ndim, x->shape, mask->ndim, mask->shape, &ndim, shape))
        return kn_fail_null(
            "%s: x is %s on %s, the mask %s on %s; it must be bool, on x's device, and "
            "broadcast with x",
            op, KN_SHOWN(x), kn_device_name(kn_device_of(x)), KN_SHOWN(mask),
            kn_device_name(kn_device_of(mask)));
    kn_scope s = kn_scope_begin();
    const int64_t all = -1;
    kn_tensor *flat = kn_reshape(kn_expand(mask, ndim, shape), 1, &all), *y = NULL;
    kn_tensor *at = flat ? kn_reshape(places_that_hold(flat), 1, &all) : NULL;
    at = at ? kn_to_device(at, kn_device_of(x)) : NULL;
    if (at)
        y = kn_index_select(kn_reshape(kn_expand(x, ndim, shape), 1, &all), 0, at);
    return kn_scope_result(s, y);
}

/* ---- counts and different values ------------------------------------------------------------- */

kn_tensor *kn_bincount(kn_tensor *x, kn_tensor *weights, int64_t least)
{
    const char *op = "bincount";
    if (!kn_ok() || !kn_check(x, op) || !has_values(op, x) || !kn_indices_are_whole(op, x) ||
        (weights && !kn_check(weights, op)))
        return NULL;
    if (x->ndim != 1 || (weights && !kn_has_shape(weights, 1, x->shape)))
        return kn_fail_null("%s: x is %s, the weights %s; needs x[N], and weights [N] or none", op,
                            KN_SHOWN(x), weights ? KN_SHOWN(weights) : "none");
    kn_scope s = kn_scope_begin();
    int64_t n = x->shape[0] ? (int64_t)kn_item(kn_amax(x, 0, NULL, false)) + 1 : 0;
    n = n > least ? n : least;
    weights = weights ? weights : kn_ones(KN_I64, kn_device_of(x), 1, x->shape);
    kn_tensor *none = weights ? kn_zeros(weights->dtype, kn_device_of(x), 1, &n) : NULL;
    return kn_scope_result(s, kn_index_add(none, 0, x, weights));
}

/* A value begins where a sorted one differs from the one before. */
kn_tensor *kn_unique(kn_tensor *x, kn_tensor **inverse, kn_tensor **counts)
{
    const int64_t all = -1, one = 1;
    kn_tensor *out[3] = { NULL }, *order = NULL;
    if (!kn_ok() || !kn_check(x, "unique") || !has_values("unique", x))
        return NULL;
    const int64_t n = kn_numel(x);
    kn_scope s = kn_scope_begin();
    kn_tensor *v = kn_sort(kn_reshape(kn_detach(x), 1, &all), 0, .indices = &order);
    kn_tensor *begins = n ? kn_ones(KN_BOOL, kn_device_of(x), 1, &one)
                          : kn_zeros(KN_BOOL, kn_device_of(x), KN_SHAPE(0));
    if (n > 1 && v)
        begins = kn_cat(
            (kn_tensor *[]){ begins, kn_ne(kn_slice(v, 0, 1, n), kn_slice(v, 0, 0, n - 1)) }, 2, 0);
    kn_tensor *at = kn_reshape(kn_nonzero(begins), 1, &all);
    if (v && at) {
        kn_tensor *end = kn_full(KN_I64, kn_device_of(x), (double)n, 1, &one);
        kn_tensor *group = kn_add_scalar(kn_cumsum(begins, 0), -1);
        out[0] = kn_index_select(v, 0, at);
        out[1] = inverse ? kn_reshape(kn_scatter(kn_zeros_like(order), 0, order, group), x->ndim,
                                      x->shape)
                         : NULL;
        out[2] = counts ? kn_diff(kn_cat((kn_tensor *[]){ at, end }, 2, 0), 1, 0) : NULL;
    }
    kn_scope_end_except(s, out, 3);
    if (inverse)
        *inverse = out[1];
    if (counts)
        *counts = out[2];
    return out[0];
}

kn_tensor *kn_histc(kn_tensor *x, int64_t bins, double low, double high)
{
    const char *op = "histc";
    const int64_t all = -1;
    const bool found = low == high;
    if (!kn_ok() || !kn_check(x, op) || (found && !has_values(op, x)))
        return NULL;
    if (!kn_dtype_is_float(x->dtype) || bins < 1 || !(low <= high) || isinf(high - low))
        return kn_fail_null(
            "%s: %lld bins from %g to %g of %s; needs a float x, at least one bin, and "
            "finite ends in order",
            op, (long long)bins, low, high, KN_SHOWN(x));
    kn_scope s = kn_scope_begin();
    kn_tensor *v = kn_reshape(kn_cast(kn_detach(x), KN_F64), 1, &all), *y = NULL;
    if (v && found && v->shape[0]) {
        low = kn_item(kn_amin(v, 0, NULL, false));
        high = kn_item(kn_amax(v, 0, NULL, false));
    }
    if (low == high)
        low -= 1, high += 1;
    if (v && isfinite(high - low)) {
        kn_tensor *bin = kn_scale(kn_add_scalar(v, -low), (double)bins);
        bin = kn_div(bin, kn_number_like(v, high - low));
        bin = kn_cast(kn_clamp(kn_floor(bin), 0, (double)(bins - 1)), KN_I64);
        kn_tensor *inside =
            kn_logical_and(kn_ge(v, kn_number_like(v, low)), kn_le(v, kn_number_like(v, high)));
        y = kn_index_add(kn_zeros(KN_F64, kn_device_of(x), 1, &bins), 0, bin,
                         kn_cast(inside, KN_F64));
        y = kn_cast(y, x->dtype);
    } else if (v) {
        kn_fail("%s: the values of %s aren't finite; give low and high", op, KN_SHOWN(x));
    }
    return kn_scope_result(s, y);
}
