/* autograd/ops_select.c: elements picked by their values, whose number the host must know; columns
 * of windows added up into images. */
#include "autograd/ops.h"
#include "kernels/graph_internal.h"

/* ---- by value -------------------------------------------------------------------------------- */

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
    if (!kn_ok() || !kn_check(x, "nonzero") || !has_values("nonzero", x))
        return NULL;
    if (!kn_dtype_is_arithmetic(x->dtype))
        return kn_fail_null("nonzero: needs a dtype with arithmetic, got %s", KN_SHOWN(x));
    kn_scope s = kn_scope_begin();
    kn_tensor *mask = x->dtype == KN_BOOL
                          ? x
                          : kn_ne(kn_detach(x), kn_zeros(x->dtype, kn_device_of(x), KN_SCALAR));
    kn_tensor *t = mask ? places_that_hold(mask) : NULL;
    t = t ? kn_to_device(t, kn_device_of(x)) : NULL;
    kn_scope_end_except(s, &t, 1);
    return t;
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
    kn_scope_end_except(s, &y, 1);
    return y;
}

/* ---- columns of windows back into images ----------------------------------------------------- */

typedef struct fold {
    int64_t kernel[2], stride[2], pad[2], dilation[2];
    int64_t padded[2], count[2]; /* size of the image with its pad; windows */
} fold;

static bool fold_of(fold *f, const kn_tensor *y, const int64_t size[2],
                    const kn_unfold2d_options *o)
{
    kn_by_dim(f->kernel, o->kernel, o->kernels, 0);
    kn_by_dim(f->stride, o->stride, o->strides, 1);
    kn_by_dim(f->pad, o->pad, o->pads, 0);
    kn_by_dim(f->dilation, o->dilation, o->dilations, 1);
    for (int d = 0; d < 2; d++) {
        const int64_t most = 1 << 28;
        bool fits = size[d] >= 1 && size[d] <= most && f->kernel[d] >= 1 && f->stride[d] >= 1 &&
                    f->dilation[d] >= 1 && f->pad[d] >= 0 && f->pad[d] <= most;
        f->padded[d] = fits ? size[d] + 2 * f->pad[d] : 0;
        if (!fits || f->kernel[d] - 1 > (f->padded[d] - 1) / f->dilation[d])
            return kn_fail(
                "fold2d: kernel %lld, stride %lld, dilation %lld, pad %lld along the %s "
                "of an image of %lld; kernel, stride and dilation are at least 1, pad at "
                "least 0, and a window fits into the padded image",
                (long long)f->kernel[d], (long long)f->stride[d], (long long)f->dilation[d],
                (long long)f->pad[d], d ? "columns" : "rows", (long long)size[d]);
        f->count[d] = (f->padded[d] - 1 - f->dilation[d] * (f->kernel[d] - 1)) / f->stride[d] + 1;
    }
    const int64_t window = f->kernel[0] * f->kernel[1], places = f->count[0] * f->count[1];
    int64_t all;
    return (y->ndim == 3 && y->shape[1] % window == 0 && y->shape[2] == places &&
            !__builtin_mul_overflow(window, places, &all)) ||
           kn_fail("fold2d: y is %s; it needs [N, a multiple of %lld (elements of a window), %lld "
                   "(%lld x %lld windows)]",
                   KN_SHOWN(y), (long long)window, (long long)places, (long long)f->count[0],
                   (long long)f->count[1]);
}

/* Position along dim d of element k of window i, as i64 [K,1,I,1] (rows), [1,K,1,I] (columns). */
static kn_tensor *positions(const fold *f, int d, kn_device device)
{
    const int64_t K = f->kernel[d], I = f->count[d];
    kn_tensor *in = kn_scale(kn_arange(KN_I64, device, K), (double)f->dilation[d]);
    kn_tensor *of = kn_scale(kn_arange(KN_I64, device, I), (double)f->stride[d]);
    kn_tensor *k = kn_reshape(in, 4, d ? (int64_t[]){ 1, K, 1, 1 } : (int64_t[]){ K, 1, 1, 1 });
    kn_tensor *i = kn_reshape(of, 4, d ? (int64_t[]){ 1, 1, 1, I } : (int64_t[]){ 1, 1, I, 1 });
    return k && i ? kn_add(k, i) : NULL;
}

kn_tensor *kn_fold2d_(kn_tensor *y, int64_t H, int64_t W, kn_unfold2d_options o)
{
    const char *op = "fold2d";
    fold f;
    if (!kn_ok() || !kn_check(y, op))
        return NULL;
    if (!kn_dtype_is_arithmetic(y->dtype))
        return kn_fail_null("%s: needs a dtype with arithmetic, got %s", op, KN_SHOWN(y));
    if (!fold_of(&f, y, (int64_t[]){ H, W }, &o))
        return NULL;
    const int64_t window = f.kernel[0] * f.kernel[1], places = window * f.count[0] * f.count[1];
    const int64_t N = y->shape[0], C = y->shape[1] / window, rows = f.padded[0],
                  columns = f.padded[1];
    kn_scope s = kn_scope_begin();
    kn_tensor *row = positions(&f, 0, kn_device_of(y)), *column = positions(&f, 1, kn_device_of(y));
    kn_tensor *at = row && column ? kn_add(kn_scale(row, (double)columns), column) : NULL;
    kn_tensor *sum = kn_zeros(y->dtype, kn_device_of(y), KN_SHAPE(N, C, rows * columns));
    kn_tensor *x = at && sum ? kn_index_add(sum, 2, kn_reshape(at, 1, &places),
                                            kn_reshape(y, KN_SHAPE(N, C, places)))
                             : NULL;
    x = x ? kn_reshape(x, KN_SHAPE(N, C, rows, columns)) : NULL;
    x = x ? kn_slice(x, 2, f.pad[0], f.pad[0] + H) : NULL;
    x = x ? kn_slice(x, 3, f.pad[1], f.pad[1] + W) : NULL;
    x = x ? kn_contiguous(x) : NULL;
    kn_scope_end_except(s, &x, 1);
    return x;
}
