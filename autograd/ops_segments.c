/* autograd/ops_segments.c: values that go to one place by their index, joined there: sums, means,
 * products, extrema, softmax. */
#include "autograd/function.h"
#include "autograd/losses.h"
#include <math.h>

/* Places along dim: index has an element for each of src or, by slices, one for each slice. */
typedef struct places {
    int dim;
    bool slices, exclude; /* exclude: x counts only where nothing goes */
    kn_join by;
} places;

/* y[places] = src, or joined with src. */
static bool put(const places *p, kn_tensor *y, kn_tensor *index, kn_array src, bool join)
{
    kn_array at = kn_array_of(index);
    at = p->slices ? kn_index_of_elements(&at, &src, p->dim) : at;
    return y && KN_RUN(y, KN_K_SCATTER,
                       ((kn_scatter_args){ kn_array_of(y), src, at, p->dim, join,
                                           p->slices ? "index_reduce" : "scatter_reduce", p->by }));
}

/* What lies at the places. */
static kn_tensor *picked(const places *p, kn_tensor *t, kn_tensor *index)
{
    return p->slices ? kn_index_select(t, p->dim, index) : kn_gather(t, p->dim, index);
}

static kn_tensor *added(const places *p, kn_tensor *into, kn_tensor *index, kn_tensor *src)
{
    return p->slices ? kn_index_add(into, p->dim, index, src)
                     : kn_scatter_add(into, p->dim, index, src);
}

/* ---- products and extrema -------------------------------------------------------------------- */

static kn_values join_forward(kn_function_run *run, kn_values in)
{
    const places *p = run->arg;
    kn_tensor *x = in.v[0], *index = in.v[1], *src = in.v[2], *y = kn_empty_like(x);
    const kn_array from = kn_array_of(src);
    bool ok = y && kn_grad_copy(y, x) && (!p->exclude || put(p, y, index, from, false)) &&
              put(p, y, index, from, true);
    kn_save_for_backward(run, p->exclude ? NULL : x, index, src, y);
    return KN_VALUES(ok ? y : NULL);
}

static kn_tensor *as_number(kn_tensor *holds, kn_dtype t)
{
    return kn_cast(holds, t);
}

/* With P the product of all factors at a place but zeros: a factor v gets dy P / v if no other one
 * is 0. */
static kn_values product_backward(const places *p, kn_values in, kn_tensor *dy)
{
    kn_tensor *x = in.v[0], *index = in.v[1], *src = in.v[2], *zero = kn_number_like(x, 0);
    kn_tensor *one = kn_number_like(x, 1), *none_x = kn_eq(x, zero), *none_s = kn_eq(src, zero);
    kn_tensor *zero_x = as_number(none_x, x->dtype), *zero_s = as_number(none_s, x->dtype);
    kn_tensor *safe_x = kn_where(none_x, one, x), *safe_s = kn_where(none_s, one, src);
    kn_tensor *zeros = added(p, zero_x, index, zero_s), *product = kn_empty_like(x);
    if (!zeros || !safe_s || !product || !kn_grad_copy(product, safe_x) ||
        !put(p, product, index, kn_array_of(safe_s), true))
        return KN_VALUES(NULL, NULL, NULL);
    kn_tensor *all = kn_mul(dy, product);
    kn_tensor *dx = kn_where(kn_eq(zeros, zero_x), kn_div(all, safe_x), zero);
    kn_tensor *ds = kn_where(kn_eq(picked(p, zeros, index), zero_s),
                             kn_div(picked(p, all, index), safe_s), zero);
    return KN_VALUES(dx, NULL, ds);
}

/* Each of the k equal extrema of a place gets dy / k. */
static kn_values join_backward(kn_function_run *run, kn_values dout)
{
    const places *p = run->arg;
    kn_tensor *x = run->saved.v[0], *index = run->saved.v[1], *src = run->saved.v[2];
    kn_tensor *y = run->saved.v[3], *dy = dout.v[0], *dx = NULL, *ds = NULL;
    if (p->by == KN_JOIN_PRODUCT)
        return product_backward(p, run->saved, dy);
    kn_tensor *won_x = x ? as_number(kn_eq(x, y), y->dtype) : kn_zeros_like(y);
    kn_tensor *won_s = as_number(kn_eq(src, picked(p, y, index)), y->dtype);
    kn_tensor *ties = added(p, won_x, index, won_s), *share = kn_div(dy, ties);
    if (run->needs[0] && x)
        dx = kn_mul(won_x, share);
    else if (run->needs[0] && ties)
        dx = kn_where(kn_eq(ties, kn_number_like(ties, 0)), dy, kn_number_like(dy, 0));
    if (run->needs[2])
        ds = kn_mul(won_s, picked(p, share, index));
    return KN_VALUES(dx, NULL, ds);
}

/* ---- sums and means -------------------------------------------------------------------------- */

/* How many elements go to each place: in x's shape, or with size 1 in all dims but dim. */
static kn_tensor *counts(const places *p, kn_tensor *x, kn_tensor *index)
{
    const kn_dtype t = kn_numel(index) < 1 << 24 ? KN_F32 : KN_F64; /* exactly */
    const kn_device on = kn_device_of(x);
    kn_tensor *ones = kn_ones(t, on, index->ndim, index->shape);
    if (!p->slices)
        return kn_scatter_add(kn_zeros(t, on, x->ndim, x->shape), p->dim, index, ones);
    kn_tensor *n = kn_index_add(kn_zeros(t, on, 1, &x->shape[p->dim]), 0, index, ones);
    return kn_along(n, x->ndim, p->dim);
}

/* Of integers rounded down. */
static kn_tensor *divided(kn_tensor *sum, kn_tensor *count)
{
    kn_tensor *q = kn_div(sum, count);
    if (!q || kn_dtype_is_float(q->dtype))
        return q;
    return kn_sub(q, as_number(kn_lt(sum, kn_mul(q, count)), q->dtype));
}

/* The narrow floats of a mean are added and divided in f32. */
static kn_tensor *summed(places *p, kn_tensor *x, kn_tensor *index, kn_tensor *src, bool mean)
{
    const kn_dtype t = x->dtype;
    const bool narrow = mean && (t == KN_BF16 || t == KN_F16);
    x = narrow ? kn_cast(x, KN_F32) : x;
    src = narrow ? kn_cast(src, KN_F32) : src;
    kn_tensor *n = x && (mean || p->exclude) ? counts(p, x, index) : NULL;
    if (p->exclude && n)
        x = kn_where(kn_gt(n, kn_number_like(n, 0)), kn_number_like(x, 0), x);
    kn_tensor *y = added(p, x, index, src);
    if (!mean || !y || !n)
        return y;
    n = p->exclude ? kn_clamp(n, 1, INFINITY) : kn_add_scalar(n, 1);
    return kn_cast(divided(y, kn_cast(n, y->dtype)), t);
}

/* ---- any reduction --------------------------------------------------------------------------- */

/* dim from 0 on, or -1 with an error of op. */
static int checked(const char *op, bool slices, kn_tensor *x, int dim, kn_tensor *index,
                   const kn_tensor *src, kn_reduce_by by)
{
    if (!kn_ok() || !kn_check(x, op) || !kn_check(index, op) || !kn_check(src, op))
        return -1;
    bool fits = src->ndim == x->ndim && index->ndim == (slices ? 1 : x->ndim);
    if ((fits && (dim = kn_dim(op, x, dim)) < 0) || !kn_indices_are_whole(op, index) ||
        !kn_loss_same_device(op, x, index) || !kn_loss_same_device(op, x, src))
        return -1;
    for (int d = 0; fits && d < x->ndim; d++)
        fits = slices ? src->shape[d] == (d == dim ? index->shape[0] : x->shape[d])
                      : index->shape[d] <= src->shape[d] &&
                            (d == dim || index->shape[d] <= x->shape[d]);
    if (!fits || src->dtype != x->dtype || !kn_dtype_is_arithmetic(x->dtype))
        return kn_fail("%s: x is %s, the index %s, src %s; x and src have one dtype with "
                       "arithmetic, %s",
                       op, KN_SHOWN(x), KN_SHOWN(index), KN_SHOWN(src),
                       slices ? "the index one dim, src a slice along dim for each of its elements"
                              : "the index as many dims as both, none larger than src's, none but "
                                "dim larger than x's"),
               -1;
    if ((unsigned)by > KN_BY_AMIN)
        return kn_fail("%s: %d is none of KN_BY_SUM, KN_BY_MEAN, KN_BY_PROD, KN_BY_AMAX, "
                       "KN_BY_AMIN",
                       op, (int)by),
               -1;
    return dim;
}

static kn_tensor *reduced(const char *op, places p, kn_tensor *x, kn_tensor *index, kn_tensor *src,
                          kn_reduce_by by)
{
    const kn_function join = { .name = op, .forward = join_forward, .backward = join_backward };
    for (int d = 0; src && d < x->ndim && !p.slices; d++)
        if (src->shape[d] > index->shape[d])
            src = kn_slice(src, d, 0, index->shape[d]);
    if (by == KN_BY_SUM || by == KN_BY_MEAN)
        return summed(&p, x, index, src, by == KN_BY_MEAN);
    p.by = by == KN_BY_PROD ? KN_JOIN_PRODUCT : by == KN_BY_AMAX ? KN_JOIN_MAX : KN_JOIN_MIN;
    if (p.exclude && by == KN_BY_PROD) {
        kn_tensor *n = counts(&p, x, index);
        x = kn_where(kn_gt(n, kn_number_like(n, 0)), kn_number_like(x, 1), x);
        p.exclude = false;
    }
    return kn_function_call_n(&join, KN_VALUES(x, index, src), &p, sizeof p).v[0];
}

/* In a scope of its own. */
static kn_tensor *reduce(const char *op, bool slices, kn_tensor *x, int dim, kn_tensor *index,
                         kn_tensor *src, kn_reduce_by by, bool exclude)
{
    dim = checked(op, slices, x, dim, index, src, by);
    if (dim < 0)
        return NULL;
    kn_scope s = kn_scope_begin();
    const places p = { dim, slices, exclude, KN_JOIN_SUM };
    return kn_scope_result(s, reduced(op, p, x, index, src, by));
}

kn_tensor *kn_scatter_reduce_(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src,
                              kn_reduce_by by, kn_scatter_reduce_options o)
{
    return reduce("scatter_reduce", false, x, dim, index, src, by, o.exclude_self);
}

kn_tensor *kn_index_reduce_(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src,
                            kn_reduce_by by, kn_scatter_reduce_options o)
{
    return reduce("index_reduce", true, x, dim, index, src, by, o.exclude_self);
}

/* ---- segments: rows with one index ----------------------------------------------------------- */

/* x [E, ...] has a row for each element of the index; the shape of n rows. */
static bool segments(const char *op, const kn_tensor *x, const kn_tensor *index, int64_t n,
                     int64_t shape[KN_MAX_DIMS])
{
    if (!kn_ok() || !kn_check(x, op) || !kn_check(index, op))
        return false;
    if (x->ndim < 1 || index->ndim != 1 || index->shape[0] != x->shape[0] || n < 0)
        return kn_fail("%s: x is %s, the index %s, for %lld segments; needs x[E, ...], an index "
                       "[E] and at least 0 segments",
                       op, KN_SHOWN(x), KN_SHOWN(index), (long long)n);
    for (int d = 0; d < x->ndim; d++)
        shape[d] = d ? x->shape[d] : n;
    return kn_indices_are_whole(op, index) && kn_loss_same_device(op, x, index);
}

kn_tensor *kn_segment_reduce(kn_tensor *x, kn_tensor *index, int64_t n, kn_reduce_by by)
{
    const char *op = "segment_reduce";
    int64_t shape[KN_MAX_DIMS];
    if (!segments(op, x, index, n, shape))
        return NULL;
    kn_scope s = kn_scope_begin();
    const bool whole = by == KN_BY_SUM || by == KN_BY_PROD;
    kn_tensor *none = kn_full(x->dtype, kn_device_of(x), by == KN_BY_PROD, x->ndim, shape);
    return kn_scope_result(s, none ? reduce(op, true, none, 0, index, x, by, !whole) : NULL);
}

static kn_values softmax_forward(kn_function_run *run, kn_values in)
{
    const int64_t n = *(const int64_t *)run->arg;
    kn_tensor *x = in.v[0], *index = in.v[1];
    const places p = { .slices = true, .by = KN_JOIN_MAX };
    int64_t shape[KN_MAX_DIMS];
    for (int d = 0; d < x->ndim; d++)
        shape[d] = d ? x->shape[d] : n;
    kn_tensor *top = kn_full(x->dtype, kn_device_of(x), -INFINITY, x->ndim, shape);
    kn_tensor *none = kn_zeros(x->dtype, kn_device_of(x), x->ndim, shape), *y = NULL;
    if (none && put(&p, top, index, kn_array_of(x), true)) {
        kn_tensor *e = kn_exp(kn_sub(x, picked(&p, top, index)));
        y = kn_div(e, picked(&p, added(&p, none, index, e), index));
    }
    kn_save_for_backward(run, y, index);
    return KN_VALUES(y);
}

/* dx = y (dy - sum of y dy over the segment) */
static kn_values softmax_backward(kn_function_run *run, kn_values dout)
{
    const int64_t n = *(const int64_t *)run->arg;
    kn_tensor *y = run->saved.v[0], *index = run->saved.v[1], *t = kn_mul(y, dout.v[0]);
    kn_tensor *sum = kn_segment_reduce(t, index, n, KN_BY_SUM);
    return KN_VALUES(kn_sub(t, kn_mul(y, kn_index_select(sum, 0, index))), NULL);
}

kn_tensor *kn_segment_softmax(kn_tensor *x, kn_tensor *index, int64_t n)
{
    static const kn_function softmax = { .name = "segment_softmax",
                                         .forward = softmax_forward,
                                         .backward = softmax_backward };
    int64_t shape[KN_MAX_DIMS];
    if (!segments(softmax.name, x, index, n, shape))
        return NULL;
    if (!kn_dtype_is_float(x->dtype))
        return kn_fail_null("%s: needs a float x, got %s; kn_cast it first", softmax.name,
                            KN_SHOWN(x));
    kn_scope s = kn_scope_begin();
    kn_tensor *wide = kn_wide(x);
    kn_tensor *y =
        wide ? kn_function_call_n(&softmax, KN_VALUES(wide, index), &n, sizeof n).v[0] : NULL;
    return kn_scope_result(s, kn_cast(y, x->dtype));
}
