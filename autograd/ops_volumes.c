/* autograd/ops_volumes.c: convolution and pooling of volumes [N,C,D,H,W], made of those of images:
 * a volume is its planes, and windows over planes are windows over rows of an image whose columns
 * are all places of a plane. */
#include "autograd/operands.h"
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

/* ---- convolution ----------------------------------------------------------------------------- */

typedef struct numbers {
    int64_t stride[3], pad[3], dilation[3], groups;
} numbers;

/* given: x as messages show it. */
static bool volumes_fit(const kn_tensor *x, const kn_tensor *given, const kn_tensor *w,
                        const kn_tensor *b, const numbers *a)
{
    const int64_t groups = a->groups, C = x->ndim == 5 ? x->shape[1] : 0;
    if (x->ndim != 5 || w->ndim != 5 || !kn_dtype_is_float(x->dtype) || w->dtype != x->dtype ||
        groups < 1 || C % groups || w->shape[1] != C / groups || w->shape[0] % groups)
        return kn_fail("conv3d: needs x[N,C,D,H,W] or x[C,D,H,W] and weight[O,C/groups,K,R,S] of "
                       "one float dtype; x is %s, weight %s, groups %lld",
                       KN_SHOWN(given), KN_SHOWN(w), (long long)groups);
    if (!kn_vector_fits("conv3d", "bias", b, w->shape[0], given))
        return false;
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

kn_tensor *kn_conv3d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv3d_options o)
{
    numbers a = { .groups = o.groups ? o.groups : 1 };
    kn_by_dim(a.stride, 3, o.stride, o.strides, 1);
    kn_by_dim(a.pad, 3, o.pad, o.pads, 0);
    kn_by_dim(a.dilation, 3, o.dilation, o.dilations, 1);
    if (!kn_ok() || !kn_check(x, "conv3d") || !kn_check(w, "conv3d") ||
        (bias && !kn_check(bias, "conv3d")))
        return NULL;
    KN_OPERANDS(x, w, bias);
    kn_scope s = kn_scope_begin();
    kn_tensor *batch = kn_as_batch(x, 5), *y = NULL;
    if (o.same && batch && batch->ndim == 5 && w->ndim == 5)
        batch = kn_pad_same("conv3d", batch, w, 3, a.stride, a.pad, a.dilation);
    if (batch && volumes_fit(batch, x, w, bias, &a))
        y = kn_of_batch(convolve(batch, w, bias, &a), x->ndim == 4);
    return kn_scope_result(s, y);
}

/* ---- pooling --------------------------------------------------------------------------------- */

/* Of planes; along D. */
typedef struct pools {
    bool max, adaptive;
    kn_pool2d_options of[2];
    int64_t count[3]; /* adaptive: of windows */
} pools;

static kn_tensor *pool(kn_tensor *x, const pools *p, int i)
{
    if (!x || !p->adaptive)
        return p->max ? kn_max_pool2d_(x, p->of[i]) : kn_avg_pool2d_(x, p->of[i]);
    const int64_t rows = p->count[i ? 0 : 1], columns = i ? x->shape[3] : p->count[2];
    return (p->max ? kn_adaptive_max_pool2d : kn_adaptive_avg_pool2d)(x, rows, columns);
}

/* Pools planes, then along D; both of a window's sums, counts and first maxima are those of the
 * whole window. */
static kn_tensor *pooled(kn_tensor *x, const pools *p)
{
    kn_scope s = kn_scope_begin();
    const bool alone = x->ndim == 4;
    x = kn_as_batch(x, 5);
    const int64_t C = x ? x->shape[1] : 0, D = x ? x->shape[2] : 0;
    kn_tensor *y = pool(kn_flatten(x, 1, 2), p, 0);
    y = y ? kn_reshape(y, KN_SHAPE(x->shape[0], C, D, y->shape[2], y->shape[3])) : NULL;
    const int64_t P = y ? y->shape[3] : 0, Q = y ? y->shape[4] : 0;
    y = pool(kn_flatten(y, 3, 4), p, 1);
    y = kn_of_batch(kn_unflatten(y, 3, KN_SHAPE(P, Q)), alone);
    return kn_scope_result(s, y);
}

static kn_tensor *pool_volumes(const char *op, kn_tensor *x, const kn_pool3d_options *o, bool max)
{
    int64_t k[3], s[3], p[3], l[3];
    if (!is_volume(op, x, max))
        return NULL;
    kn_by_dim(k, 3, o->kernel, o->kernels, 0);
    kn_by_dim(s, 3, o->stride, o->strides, 0);
    kn_by_dim(p, 3, o->pad, o->pads, 0);
    kn_by_dim(l, 3, o->dilation, o->dilations, 1);
    pools w = { .max = max };
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
    return pooled(x, &w);
}

kn_tensor *kn_max_pool3d_(kn_tensor *x, kn_pool3d_options o)
{
    return pool_volumes("max_pool3d", x, &o, true);
}

kn_tensor *kn_avg_pool3d_(kn_tensor *x, kn_pool3d_options o)
{
    return pool_volumes("avg_pool3d", x, &o, false);
}

static kn_tensor *adapt(const char *op, kn_tensor *x, pools p)
{
    if (!is_volume(op, x, false))
        return NULL;
    for (int d = 0; d < 3; d++)
        if (p.count[d] < 1 || x->shape[x->ndim - 3 + d] < 1)
            return kn_fail_null("%s: %lld x %lld x %lld windows of x %s; sizes must be at least 1",
                                op, (long long)p.count[0], (long long)p.count[1],
                                (long long)p.count[2], KN_SHOWN(x));
    p.adaptive = true;
    return pooled(x, &p);
}

kn_tensor *kn_adaptive_avg_pool3d(kn_tensor *x, int64_t O, int64_t P, int64_t Q)
{
    return adapt("adaptive_avg_pool3d", x, (pools){ .count = { O, P, Q } });
}

kn_tensor *kn_adaptive_max_pool3d(kn_tensor *x, int64_t O, int64_t P, int64_t Q)
{
    return adapt("adaptive_max_pool3d", x, (pools){ .max = true, .count = { O, P, Q } });
}
