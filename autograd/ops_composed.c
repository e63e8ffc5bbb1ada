/* autograd/ops_composed.c: operations that are made of others. */
#include "autograd/function.h"
#include "autograd/losses.h"
#include <float.h>
#include <math.h>

kn_tensor *kn_prelu(kn_tensor *x, kn_tensor *w)
{
    if (!kn_ok() || !kn_check(x, "prelu") || !kn_check(w, "prelu"))
        return NULL;
    const int64_t n = w->ndim == 1 ? w->shape[0] : w->ndim == 0, C = x->ndim > 1 ? x->shape[1] : 1;
    if (!kn_dtype_is_float(x->dtype) || w->dtype != x->dtype || (n != 1 && n != C))
        return kn_fail_null(
            "prelu: needs a float x[N,C,...] and w[C], w[1] or w[] of its dtype; got x "
            "%s, w %s",
            KN_SHOWN(x), KN_SHOWN(w));
    return kn_where(kn_gt(x, kn_number_like(x, 0)), x, kn_mul(kn_along(w, x->ndim, 1), x));
}

kn_tensor *kn_nan_to_num_(kn_tensor *x, kn_nan_to_num_options o)
{
    if (!kn_takes("nan_to_num", x, true))
        return NULL;
    const double most = x->dtype == KN_F64    ? DBL_MAX
                        : x->dtype == KN_F32  ? FLT_MAX
                        : x->dtype == KN_BF16 ? 0x1.fep127
                                              : 65504;
    const double by[2] = { kn_value_or(o.posinf, most), kn_value_or(o.neginf, -most) };
    kn_tensor *y = kn_masked_fill(x, kn_isnan(x), kn_value_or(o.nan, 0));
    for (int i = 0; y && i < 2; i++)
        y = kn_masked_fill(y, kn_eq(x, kn_number_like(x, i ? -INFINITY : INFINITY)), by[i]);
    return y;
}

/* ---- shapes ---------------------------------------------------------------------------------- */

bool kn_meshgrid(kn_tensor *const *x, int n, bool xy, kn_tensor **out)
{
    int64_t shape[KN_MAX_DIMS];
    if (kn_ok() && (!x || !out))
        kn_fail("meshgrid: the tensors or their place are NULL");
    if (kn_ok() && (n < 1 || n > KN_MAX_DIMS || (xy && n < 2)))
        kn_fail("meshgrid: %d tensors; %d to %d are possible", n, xy ? 2 : 1, KN_MAX_DIMS);
    for (int i = 0; kn_ok() && i < n; i++)
        if (kn_check(x[i], "meshgrid") && x[i]->ndim > 1)
            kn_fail("meshgrid: tensor %d of %s to %s is %s; each has one dim", i, KN_SHOWN(x[0]),
                    x[n - 1] ? KN_SHOWN(x[n - 1]) : "none", KN_SHOWN(x[i]));
    for (int i = 0; kn_ok() && i < n; i++)
        shape[xy && i < 2 ? 1 - i : i] = kn_numel(x[i]);
    for (int i = 0; kn_ok() && i < n; i++)
        out[i] = kn_expand(kn_along(x[i], n, xy && i < 2 ? 1 - i : i), n, shape);
    return kn_ok();
}

kn_tensor *kn_diag_embed(kn_tensor *x, int64_t offset, int dim0, int dim1)
{
    if (!kn_ok() || !kn_check(x, "diag_embed"))
        return NULL;
    const int n = x->ndim + 1, first = dim0 < 0 ? dim0 + n : dim0,
              last = dim1 < 0 ? dim1 + n : dim1;
    const int64_t o = offset < 0 ? -offset : offset;
    if (x->ndim < 1 || first < 0 || first >= n || last < 0 || last >= n || first == last)
        return kn_fail_null(
            "diag_embed: x is %s, so dims %d and %d can't be two of the %d dims of the "
            "result",
            KN_SHOWN(x), dim0, dim1, n);
    if (offset > INT32_MAX || offset < -INT32_MAX)
        return kn_fail_null("diag_embed: an offset of %lld is too large", (long long)offset);
    kn_tensor *row =
        kn_pad(x, KN_PAD_CONSTANT, 0, 2, (int64_t[]){ offset < 0 ? o : 0, offset < 0 ? 0 : o });
    kn_tensor *at = row ? kn_arange(KN_I64, kn_device_of(x), row->shape[x->ndim - 1]) : NULL;
    kn_tensor *on = kn_eq(at, kn_unsqueeze(kn_add_scalar(at, (double)offset), -1));
    kn_tensor *y = kn_where(on, kn_unsqueeze(row, -1), kn_number_like(x, 0));
    /* dims n - 2 and n - 1 become first and last; the others keep their order */
    int64_t order[KN_MAX_DIMS + 1];
    for (int d = 0, other = 0; d < n; d++)
        order[d] = d == first ? n - 2 : d == last ? n - 1 : other++;
    return kn_permute(y, n, order);
}

kn_tensor *kn_channel_shuffle(kn_tensor *x, int64_t groups)
{
    if (!kn_ok() || !kn_check(x, "channel_shuffle"))
        return NULL;
    const int64_t C = x->ndim > 2 ? x->shape[1] : 0;
    if (x->ndim < 3 || groups < 1 || C % groups)
        return kn_fail_null(
            "channel_shuffle: needs x[N,C,...] whose channels divide by %lld groups; "
            "got %s",
            (long long)groups, KN_SHOWN(x));
    kn_tensor *y = kn_unflatten(x, 1, KN_SHAPE(groups, C / groups));
    return kn_flatten(kn_contiguous(kn_transpose(y, 1, 2)), 1, 2);
}

/* ---- distances ------------------------------------------------------------------------------- */

/* |a - b| of rows by a product: sqrt(a^2 + b^2 - 2 a b^T) */
static kn_values far_forward(kn_function_run *run, kn_values in)
{
    const int64_t last = -1;
    kn_tensor *a = kn_wide(in.v[0]), *b = kn_wide(in.v[1]);
    kn_tensor *aa = kn_sum(kn_square(a), 1, &last, true),
              *bb = kn_sum(kn_square(b), 1, &last, true);
    kn_tensor *ab = kn_scale(kn_matmul(a, kn_transpose(b, -1, -2)), -2);
    kn_tensor *y = kn_add(kn_add(ab, aa), kn_transpose(bb, -1, -2));
    y = kn_sqrt(kn_clamp(y, 0, INFINITY));
    kn_save_for_backward(run, in.v[0], in.v[1], y);
    return KN_VALUES(kn_cast(y, in.v[0]->dtype));
}

/* With g = dy / y, 0 where y is: da_i = sum_j g_ij (a_i - b_j), db_j = sum_i g_ij (b_j - a_i). */
static kn_values far_backward(kn_function_run *run, kn_values dout)
{
    kn_tensor *y = run->saved.v[2], *zero = kn_number_like(y, 0), *dx[2];
    kn_tensor *in[2] = { kn_wide(run->saved.v[0]), kn_wide(run->saved.v[1]) };
    kn_tensor *g = kn_where(kn_eq(y, zero), zero, kn_div(kn_wide(dout.v[0]), y));
    for (int i = 0; i < 2; i++) {
        const int64_t last = -1;
        kn_tensor *own = kn_mul(in[i], kn_sum(g, 1, &last, true));
        kn_tensor *d = run->needs[i] ? kn_sub(own, kn_matmul(g, in[1 - i])) : NULL;
        dx[i] = d ? kn_cast(d, run->dtype[i]) : NULL;
        g = kn_transpose(g, -1, -2);
    }
    return KN_VALUES(dx[0], dx[1]);
}

kn_tensor *kn_cdist_(kn_tensor *a, kn_tensor *b, kn_cdist_options o)
{
    static const kn_function far = { .name = "cdist",
                                     .forward = far_forward,
                                     .backward = far_backward };
    const double p = kn_value_or(o.p, 2);
    if (!kn_ok() || !kn_check(a, far.name) || !kn_check(b, far.name))
        return NULL;
    const int n = a->ndim;
    bool fits = n >= 2 && b->ndim == n && a->dtype == b->dtype && kn_dtype_is_float(a->dtype) &&
                a->shape[n - 1] == b->shape[n - 1];
    for (int d = 0; fits && d < n - 2; d++)
        fits = a->shape[d] == b->shape[d];
    if (!fits || !(p >= 0))
        return kn_fail_null(
            "cdist: needs a[...,P,M] and b[...,R,M] of one float dtype and .p at least "
            "0; got %s and %s, .p %g",
            KN_SHOWN(a), KN_SHOWN(b), p);
    if (p == 2 && (a->shape[n - 2] > 25 || b->shape[n - 2] > 25))
        return kn_function_call(&far, a, b);
    const int64_t last = -1;
    kn_tensor *d = n == KN_MAX_DIMS ? kn_fail_null("cdist: at most %d dims", KN_MAX_DIMS - 1)
                                    : kn_sub(kn_unsqueeze(a, -2), kn_unsqueeze(b, n - 2));
    return kn_norm(d, p, 1, &last, false);
}

kn_tensor *kn_pairwise_distance_(kn_tensor *a, kn_tensor *b, kn_pairwise_distance_options o)
{
    const double eps = kn_value_or(o.eps, 1e-6), p = kn_value_or(o.p, 2);
    const int64_t last = -1;
    if (!kn_ok() || !kn_loss_number("pairwise_distance", "eps", eps, 0) ||
        !kn_loss_number("pairwise_distance", "p", p < INFINITY ? p : 0, 0))
        return NULL;
    kn_tensor *d = kn_sub(a, b);
    if (d && d->ndim < 1)
        return kn_fail_null(
            "pairwise_distance: its tensors have no dim; it goes over the last one");
    return kn_norm(eps == 0 ? d : kn_add_scalar(d, eps), p, 1, &last, o.keep);
}
