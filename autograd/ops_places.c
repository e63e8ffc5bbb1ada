/* autograd/ops_places.c: an image read at any places: kn_grid_sample, and the places that an affine
 * map gives. Both are made of other operations. */
#include "autograd/losses.h"

/* Of the dim of size n: places from coordinates, moved into the image where the padding says so. */
static kn_tensor *places(kn_tensor *g, int64_t n, const kn_grid_sample_options *o)
{
    const double size = (double)n, low = o->align_corners ? 0 : -0.5;
    const double span = o->align_corners ? size - 1 : size;
    kn_tensor *at = kn_add_scalar(kn_scale(kn_add_scalar(g, 1), span / 2), low);
    if (o->padding == KN_GRID_ZEROS)
        return at;
    if (o->padding == KN_GRID_REFLECTION && span > 0) {
        kn_tensor *width = kn_number_like(at, span);
        kn_tensor *off = kn_abs(kn_add_scalar(at, -low)), *rest = kn_fmod(off, width);
        kn_tensor *turns = kn_floor_divide(kn_detach(off), width);
        kn_tensor *odd = kn_gt(kn_remainder(turns, kn_number_like(at, 2)), kn_number_like(at, 0));
        at = kn_add_scalar(kn_where(odd, kn_add_scalar(kn_neg(rest), span), rest), low);
    }
    return kn_hardtanh(at, .low = KN_ZERO, .high = n > 1 ? size - 1 : KN_ZERO);
}

/* Which of these whole places lie in a dim of size n. */
static kn_tensor *inside(kn_tensor *at, int64_t n)
{
    return kn_logical_and(kn_ge(at, kn_number_like(at, 0)),
                          kn_le(at, kn_number_like(at, (double)(n - 1))));
}

/* x[N,C,H W] at whole places rows, columns [N,1,P Q], times factor (or NULL: 1); 0 outside. */
static kn_tensor *picked(kn_tensor *x, kn_tensor *rows, kn_tensor *columns, const int64_t size[2],
                         kn_tensor *factor)
{
    kn_tensor *in = kn_logical_and(inside(rows, size[0]), inside(columns, size[1]));
    kn_tensor *h = kn_cast(kn_clamp(rows, 0, (double)(size[0] - 1)), KN_I64);
    kn_tensor *w = kn_cast(kn_clamp(columns, 0, (double)(size[1] - 1)), KN_I64);
    kn_tensor *index = kn_add(kn_scale(h, (double)size[1]), w);
    kn_tensor *v = kn_gather(x, 2, kn_expand(index, KN_SHAPE(-1, x->shape[1], -1)));
    return kn_where(in, factor ? kn_mul(v, factor) : v, kn_number_like(v, 0));
}

static kn_tensor *between(kn_tensor *x, kn_tensor *at[2], const int64_t size[2])
{
    kn_tensor *first[2], *part[2], *y = NULL;
    for (int d = 0; d < 2; d++) {
        first[d] = kn_floor(kn_detach(at[d]));
        part[d] = kn_sub(at[d], first[d]);
    }
    for (int corner = 0; corner < 4; corner++) {
        kn_tensor *place[2], *share[2];
        for (int d = 0; d < 2; d++) {
            const bool next = d ? corner % 2 : corner / 2;
            place[d] = next ? kn_add_scalar(first[d], 1) : first[d];
            share[d] = next ? part[d] : kn_add_scalar(kn_neg(part[d]), 1);
        }
        kn_tensor *v = picked(x, place[0], place[1], size, kn_mul(share[0], share[1]));
        y = y ? kn_add(y, v) : v;
    }
    return y;
}

kn_tensor *kn_grid_sample_(kn_tensor *x, kn_tensor *grid, kn_grid_sample_options o)
{
    if (!kn_ok() || !kn_check(x, "grid_sample") || !kn_check(grid, "grid_sample"))
        return NULL;
    if (x->ndim != 4 || grid->ndim != 4 || !kn_dtype_is_float(x->dtype) ||
        grid->dtype != x->dtype || grid->shape[0] != x->shape[0] || grid->shape[3] != 2 ||
        x->shape[2] < 1 || x->shape[3] < 1)
        return kn_fail_null("grid_sample: needs x[N,C,H,W] with at least one element a plane and "
                            "grid[N,P,Q,2] of one float dtype; got %s and %s",
                            KN_SHOWN(x), KN_SHOWN(grid));
    if ((int)o.padding < 0 || o.padding > KN_GRID_REFLECTION)
        return kn_fail_null(
            "grid_sample: there is no padding %d; KN_GRID_ZEROS, KN_GRID_BORDER and "
            "KN_GRID_REFLECTION are",
            (int)o.padding);
    const int64_t N = x->shape[0], C = x->shape[1], P = grid->shape[1], Q = grid->shape[2];
    const int64_t size[2] = { x->shape[2], x->shape[3] };
    kn_scope s = kn_scope_begin();
    kn_tensor *flat = kn_wide(kn_reshape(x, KN_SHAPE(N, C, size[0] * size[1]))), *at[2];
    kn_tensor *wide = kn_wide(grid), *y = NULL;
    for (int d = 0; d < 2 && kn_ok(); d++) { /* the grid's first number is the column */
        kn_tensor *g = kn_reshape(kn_slice(wide, 3, !d, !d + 1), KN_SHAPE(N, 1, P * Q));
        at[d] = g ? places(g, size[d], &o) : NULL;
    }
    if (kn_ok())
        y = o.nearest
                ? picked(flat, kn_round(kn_detach(at[0])), kn_round(kn_detach(at[1])), size, NULL)
                : between(flat, at, size);
    y = kn_cast(kn_reshape(y, KN_SHAPE(N, C, P, Q)), x->dtype);
    return kn_scope_result(s, y);
}

kn_tensor *kn_affine_grid(kn_tensor *theta, int64_t H, int64_t W, bool align_corners)
{
    if (!kn_ok() || !kn_check(theta, "affine_grid"))
        return NULL;
    if (theta->ndim != 3 || theta->shape[1] != 2 || theta->shape[2] != 3 ||
        !kn_dtype_is_float(theta->dtype) || H < 1 || W < 1 || H > INT32_MAX || W > INT32_MAX)
        return kn_fail_null(
            "affine_grid: needs a float theta[N,2,3] and sizes of at least 1; got %s, "
            "%lld x %lld",
            KN_SHOWN(theta), (long long)H, (long long)W);
    double *base = kn_host_calloc((size_t)(H * W), 3 * sizeof *base);
    for (int64_t i = 0; base && i < H * W; i++) {
        const int64_t at[2] = { i % W, i / W }, n[2] = { W, H };
        for (int d = 0; d < 2; d++)
            base[3 * i + d] = !align_corners ? (2 * (double)at[d] + 1) / (double)n[d] - 1
                              : n[d] > 1     ? 2 * (double)at[d] / (double)(n[d] - 1) - 1
                                             : 0;
        base[3 * i + 2] = 1;
    }
    kn_tensor *from = kn_of_host(KN_F64, kn_device_of(theta), base, KN_SHAPE(H * W, 3));
    kn_tensor *y = kn_matmul(kn_cast(from, theta->dtype), kn_transpose(theta, 1, 2));
    return kn_reshape(y, KN_SHAPE(theta->shape[0], H, W, 2));
}
