/* autograd/ops_fold.c: windows of images as columns, and columns added up into images, by other
 * operations. */
#include "autograd/ops.h"
#include <stdio.h>

/* Windows over an image, by dim. */
typedef struct windows {
    int64_t kernel[2], stride[2], pad[2], dilation[2];
    int64_t padded[2], count[2]; /* the image's size with its pad; number of windows */
} windows;

static bool windows_of(windows *w, const char *op, const char *image, const int64_t size[2],
                       const kn_unfold2d_options *o)
{
    kn_by_dim(w->kernel, 2, o->kernel, o->kernels, 0);
    kn_by_dim(w->stride, 2, o->stride, o->strides, 1);
    kn_by_dim(w->pad, 2, o->pad, o->pads, 0);
    kn_by_dim(w->dilation, 2, o->dilation, o->dilations, 1);
    for (int d = 0; d < 2; d++) {
        const int64_t k = w->kernel[d], most = 1 << 29;
        bool fits = size[d] >= 0 && size[d] <= most && k >= 1 && w->stride[d] >= 1 &&
                    w->dilation[d] >= 1 && w->pad[d] >= 0 && w->pad[d] <= most;
        w->padded[d] = fits ? size[d] + 2 * w->pad[d] : 0;
        if (!fits || k > w->padded[d] || k - 1 > (w->padded[d] - 1) / w->dilation[d])
            return kn_fail("%s: kernel %lld, stride %lld, dilation %lld, pad %lld along the %s of "
                           "%s; kernel, stride and dilation are at least 1, pad at least 0, and a "
                           "window fits into the padded image",
                           op, (long long)k, (long long)w->stride[d], (long long)w->dilation[d],
                           (long long)w->pad[d], d ? "columns" : "rows", image);
        w->count[d] = (w->padded[d] - 1 - w->dilation[d] * (k - 1)) / w->stride[d] + 1;
    }
    return true;
}

kn_tensor *kn_unfold2d_(kn_tensor *x, kn_unfold2d_options o)
{
    const char *op = "unfold2d";
    windows w;
    if (!kn_takes(op, x, false))
        return NULL;
    if (x->ndim != 4)
        return kn_fail_null("unfold2d: needs x[N,C,H,W], got %s", KN_SHOWN(x));
    if (!windows_of(&w, op, KN_SHOWN(x), x->shape + 2, &o))
        return NULL;
    if (w.pad[0] || w.pad[1])
        x = kn_pad(x, KN_PAD_CONSTANT, 0, KN_SHAPE(w.pad[1], w.pad[1], w.pad[0], w.pad[0]));
    for (int d = 0; d < 2; d++)
        x = kn_windows(op, x, 2 + d, w.kernel[d], w.stride[d], w.dilation[d]);
    x = kn_permute(x, 6, (int64_t[]){ 0, 1, 4, 5, 2, 3 }); /* [N,C,R,S,P,Q] */
    if (!x)
        return NULL;
    const int64_t *s = x->shape;
    return kn_reshape(x, KN_SHAPE(s[0], s[1] * s[2] * s[3], s[4] * s[5]));
}

/* Position along dim d of element k of window i, as i64 [K,1,I,1] (rows), [1,K,1,I] (columns). */
static kn_tensor *positions(const windows *w, int d, kn_device device)
{
    kn_tensor *in = kn_scale(kn_arange(KN_I64, device, w->kernel[d]), (double)w->dilation[d]);
    kn_tensor *of = kn_scale(kn_arange(KN_I64, device, w->count[d]), (double)w->stride[d]);
    return kn_add(kn_along(in, 4, d), kn_along(of, 4, 2 + d));
}

kn_tensor *kn_fold2d_(kn_tensor *y, int64_t H, int64_t W, kn_unfold2d_options o)
{
    const char *op = "fold2d";
    const int64_t size[2] = { H, W };
    char image[64];
    windows w;
    snprintf(image, sizeof image, "an image of %lld x %lld", (long long)H, (long long)W);
    if (!kn_takes(op, y, false) || !windows_of(&w, op, image, size, &o))
        return NULL;
    const int64_t window = w.kernel[0] * w.kernel[1], count = w.count[0] * w.count[1];
    int64_t all;
    if (y->ndim != 3 || y->shape[1] % window || y->shape[2] != count ||
        __builtin_mul_overflow(window, count, &all))
        return kn_fail_null("fold2d: y is %s; it needs [N, a multiple of %lld (elements of a "
                            "window), %lld (%lld x %lld windows)]",
                            KN_SHOWN(y), (long long)window, (long long)count, (long long)w.count[0],
                            (long long)w.count[1]);
    const int64_t N = y->shape[0], C = y->shape[1] / window, *padded = w.padded;
    const kn_device device = kn_device_of(y);
    kn_scope s = kn_scope_begin();
    kn_tensor *row = positions(&w, 0, device), *column = positions(&w, 1, device);
    kn_tensor *at = kn_add(kn_scale(row, (double)padded[1]), column);
    kn_tensor *sum = kn_zeros(y->dtype, device, KN_SHAPE(N, C, padded[0] * padded[1]));
    kn_tensor *x =
        kn_index_add(sum, 2, kn_reshape(at, 1, &all), kn_reshape(y, KN_SHAPE(N, C, all)));
    x = kn_reshape(x, KN_SHAPE(N, C, padded[0], padded[1]));
    x = kn_slice(kn_slice(x, 2, w.pad[0], w.pad[0] + H), 3, w.pad[1], w.pad[1] + W);
    return kn_scope_result(s, kn_contiguous(x));
}
