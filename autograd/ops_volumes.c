/* autograd/ops_volumes.c: convolution and pooling of volumes [N,C,D,H,W], made of those of images:
 * a volume is its planes, and windows over planes are windows over rows of an image whose columns
 * are all places of a plane. */
#include "autograd/ops.h"

/* Maxima are also of integers. */
static bool is_volume(const char *op, const kn_tensor *x, bool max)
{
    if (!kn_ok() || !kn_check(x, op))
        return false;
    return ((x->ndim == 5 || x->ndim == 4) && x->dtype != KN_BOOL &&
            (max || kn_dtype_is_float(x->dtype))) ||
           kn_fail("%s: needs a float x[N,C,D,H,W] or x[C,D,H,W], got %s", op, KN_SHOWN(x));
}

/* The numbers of the three dims. */
static void three(int64_t out[3], int64_t both, const int64_t each[3], int64_t otherwise)
{
    const bool given = each[0] || each[1] || each[2];
    for (int d = 0; d < 3; d++)
        out[d] = given ? each[d] : both ? both : otherwise;
}

/* ---- convolution ----------------------------------------------------------------------------- */

typedef struct numbers {
    int64_t stride[3], pad[3], dilation[3], groups;
} numbers;

/* given: x as messages show it. */
static bool volumes_fit(const kn_tensor *x, const kn_tensor *given, const kn_tensor *w,
                        const kn_tensor *b, const numbers *a)
{
    if (!kn_ok() || !kn_check(x, "conv3d") || !kn_check(w, "conv3d") ||
        (b && !kn_check(b, "conv3d")))
        return false;
    const int64_t groups = a->groups, C = x->ndim == 5 ? x->shape[1] : 0;
    if (x->ndim != 5 || w->ndim != 5 || !kn_dtype_is_float(x->dtype) || w->dtype != x->dtype ||
        groups < 1 || C % groups || w->shape[1] != C / groups || w->shape[0] % groups ||
        (b && (b->ndim != 1 || b->shape[0] != w->shape[0] ||
               (b->dtype != x->dtype && b->dtype != KN_F32))))
        return kn_fail("conv3d: needs x[N,C,D,H,W] or x[C,D,H,W] and weight[O,C/groups,K,R,S] of "
                       "one float dtype, and a "
                       "bias[O] of it or f32, or none; x is %s, weight %s, bias %s, groups %lld",
                       KN_SHOWN(given), KN_SHOWN(w), b ? KN_SHOWN(b) : "none", (long long)groups);
    for (int d = 0; d < 3; d++) {
        const int64_t k = w->shape[2 + d], most = INT32_MAX;
        if (k < 1 || a->stride[d] < 1 || a->dilation[d] < 1 || a->pad[d] < 0 || k > most ||
            a->stride[d] > most || a->dilation[d] > most || a->pad[d] > most ||
            a->dilation[d] * (k - 1) >= x->shape[2 + d] + 2 * a->pad[d])
            return kn_fail(
                "conv3d: stride %lld, dilation %lld, pad %lld along dim %d of x %s with weight "
                "%s; stride and dilation must be at least 1, pad at least 0, and the kernel "
                "must fit in",
                (long long)a->stride[d], (long long)a->dilation[d], (long long)a->pad[d],
                given->ndim - 3 + d, KN_SHOWN(given), KN_SHOWN(w));
    }
    return true;
}

/* The planes under each window along D stand side by side as channels, [N P, C K, H, W], so that
 * one convolution of images adds up all of them. A group's channels stay together. */
static kn_tensor *convolve(kn_tensor *x, kn_tensor *w, kn_tensor *bias, const numbers *a)
{
    const int64_t K = w->shape[2], N = x->shape[0], O = w->shape[0];
    const kn_conv2d_options o = { .strides = { a->stride[1], a->stride[2] },
                                  .pads = { a->pad[1], a->pad[2] },
                                  .dilations = { a->dilation[1], a->dilation[2] },
                                  .groups = a->groups };
    if (a->pad[0])
        x = kn_pad(x, KN_PAD_CONSTANT, 0, 6, (int64_t[]){ 0, 0, 0, 0, a->pad[0], a->pad[0] });
    x = kn_windows("conv3d", x, 2, K, a->stride[0], a->dilation[0]); /* [N,C,P,H,W,K] */
    x = kn_contiguous(kn_permute(x, 6, (int64_t[]){ 0, 2, 1, 5, 3, 4 }));
    if (!x)
        return NULL;
    const int64_t *s = x->shape, P = s[1];
    kn_tensor *y = kn_conv2d_(kn_reshape(x, KN_SHAPE(N * P, s[2] * K, s[4], s[5])),
                              kn_flatten(w, 1, 2), bias, o);
    y = y ? kn_reshape(y, KN_SHAPE(N, P, O, y->shape[2], y->shape[3])) : NULL;
    return kn_contiguous(kn_transpose(y, 1, 2));
}

/* The pad that keeps the size; where it isn't the same on both sides, zeros at the end of x. */
static kn_tensor *padded(kn_tensor *x, const kn_tensor *w, numbers *a)
{
    int64_t more[6] = { 0 };
    for (int d = 0; d < 3; d++) {
        if (a->stride[d] != 1 || a->pad[d] != 0)
            return kn_fail_null("conv3d: .same goes with stride 1, and without a pad; got %lld, "
                                "%lld",
                                (long long)a->stride[d], (long long)a->pad[d]);
        const int64_t room = a->dilation[d] > 0 && a->dilation[d] < INT32_MAX
                                 ? a->dilation[d] * (w->shape[2 + d] - 1)
                                 : 0;
        a->pad[d] = room / 2;
        more[2 * (2 - d) + 1] = room % 2;
    }
    return more[1] || more[3] || more[5] ? kn_pad(x, KN_PAD_CONSTANT, 0, 6, more) : x;
}

kn_tensor *kn_conv3d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv3d_options o)
{
    numbers a = { .groups = o.groups ? o.groups : 1 };
    three(a.stride, o.stride, o.strides, 1);
    three(a.pad, o.pad, o.pads, 0);
    three(a.dilation, o.dilation, o.dilations, 1);
    if (!kn_ok() || !kn_check(x, "conv3d"))
        return NULL;
    kn_scope s = kn_scope_begin();
    kn_tensor *batch = kn_as_batch(x, 5), *y = NULL;
    if (o.same && batch && batch->ndim == 5 && kn_check(w, "conv3d") && w->ndim == 5)
        batch = padded(batch, w, &a);
    if (batch && volumes_fit(batch, x, w, bias, &a))
        y = kn_of_batch(convolve(batch, w, bias, &a), x->ndim == 4);
    return kn_scope_result(s, y);
}

/* ---- pooling --------------------------------------------------------------------------------- */

typedef kn_tensor *(*pool)(kn_tensor *x, const void *with);

/* Pools planes, then along D; both of a window's sums, counts and first maxima are those of the
 * whole window. */
static kn_tensor *pooled(kn_tensor *x, pool planes, pool depth, const void *with)
{
    kn_scope s = kn_scope_begin();
    const bool alone = x->ndim == 4;
    x = kn_as_batch(x, 5);
    const int64_t C = x ? x->shape[1] : 0, D = x ? x->shape[2] : 0;
    kn_tensor *y = x ? planes(kn_flatten(x, 1, 2), with) : NULL;
    y = y ? kn_reshape(y, KN_SHAPE(x->shape[0], C, D, y->shape[2], y->shape[3])) : NULL;
    const int64_t P = y ? y->shape[3] : 0, Q = y ? y->shape[4] : 0;
    y = kn_flatten(y, 3, 4);
    y = y ? depth(y, with) : NULL;
    y = kn_of_batch(kn_unflatten(y, 3, KN_SHAPE(P, Q)), alone);
    return kn_scope_result(s, y);
}

typedef struct windows {
    bool max;
    kn_pool2d_options of[2]; /* of planes; along D */
} windows;

static kn_tensor *pool_by(kn_tensor *x, const windows *w, int i)
{
    return w->max ? kn_max_pool2d_(x, w->of[i]) : kn_avg_pool2d_(x, w->of[i]);
}

static kn_tensor *pool_planes(kn_tensor *x, const void *w)
{
    return pool_by(x, w, 0);
}

static kn_tensor *pool_depth(kn_tensor *x, const void *w)
{
    return pool_by(x, w, 1);
}

static kn_tensor *pool_volumes(const char *op, kn_tensor *x, const kn_pool3d_options *o, bool max)
{
    int64_t k[3], s[3], p[3], l[3];
    if (!is_volume(op, x, max))
        return NULL;
    three(k, o->kernel, o->kernels, 0);
    three(s, o->stride, o->strides, 0);
    three(p, o->pad, o->pads, 0);
    three(l, o->dilation, o->dilations, 1);
    windows w = { .max = max };
    for (int d = 0; d < 3; d++) {
        s[d] = s[d] ? s[d] : k[d];
        if (k[d] < 1 || s[d] < 1 || l[d] < 1 || p[d] < 0 || p[d] > k[d] / 2 || k[d] > INT32_MAX ||
            s[d] > INT32_MAX || l[d] > INT32_MAX || (!max && l[d] != 1) ||
            l[d] * (k[d] - 1) >= x->shape[x->ndim - 3 + d] + 2 * p[d])
            return kn_fail_null(
                "%s: kernel %lld, stride %lld, dilation %lld, pad %lld along dim %d of x "
                "%s; kernel, stride and dilation must be at least 1 (averages have no "
                "dilation), pad at most half of kernel, and the window must fit in",
                op, (long long)k[d], (long long)s[d], (long long)l[d], (long long)p[d],
                x->ndim - 3 + d, KN_SHOWN(x));
    }
    for (int i = 0; i < 2; i++)
        w.of[i] = (kn_pool2d_options){ .kernels = { k[!i], i ? 1 : k[2] },
                                       .strides = { s[!i], i ? 1 : s[2] },
                                       .pads = { p[!i], i ? 0 : p[2] },
                                       .dilations = { l[!i], i ? 1 : l[2] },
                                       .ceil_mode = o->ceil_mode,
                                       .exclude_pad = o->exclude_pad };
    return pooled(x, pool_planes, pool_depth, &w);
}

kn_tensor *kn_max_pool3d_(kn_tensor *x, kn_pool3d_options o)
{
    return pool_volumes("max_pool3d", x, &o, true);
}

kn_tensor *kn_avg_pool3d_(kn_tensor *x, kn_pool3d_options o)
{
    return pool_volumes("avg_pool3d", x, &o, false);
}

typedef struct counts {
    bool max;
    int64_t of[3];
} counts;

static kn_tensor *adapt_planes(kn_tensor *x, const void *with)
{
    const counts *n = with;
    return (n->max ? kn_adaptive_max_pool2d : kn_adaptive_avg_pool2d)(x, n->of[1], n->of[2]);
}

static kn_tensor *adapt_depth(kn_tensor *x, const void *with)
{
    const counts *n = with;
    return (n->max ? kn_adaptive_max_pool2d : kn_adaptive_avg_pool2d)(x, n->of[0], x->shape[3]);
}

static kn_tensor *adapt(const char *op, kn_tensor *x, const counts *n)
{
    if (!is_volume(op, x, false))
        return NULL;
    for (int d = 0; d < 3; d++)
        if (n->of[d] < 1 || x->shape[x->ndim - 3 + d] < 1)
            return kn_fail_null("%s: %lld x %lld x %lld windows of x %s; sizes must be at least 1",
                                op, (long long)n->of[0], (long long)n->of[1], (long long)n->of[2],
                                KN_SHOWN(x));
    return pooled(x, adapt_planes, adapt_depth, n);
}

kn_tensor *kn_adaptive_avg_pool3d(kn_tensor *x, int64_t O, int64_t P, int64_t Q)
{
    return adapt("adaptive_avg_pool3d", x, &(counts){ false, { O, P, Q } });
}

kn_tensor *kn_adaptive_max_pool3d(kn_tensor *x, int64_t O, int64_t P, int64_t Q)
{
    return adapt("adaptive_max_pool3d", x, &(counts){ true, { O, P, Q } });
}
