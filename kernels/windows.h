/* kernels/windows.h (private): which elements the windows of a pool take along one dim; for the CPU
 * and for CUDA. */
#ifndef KNAP_KERNELS_WINDOWS_H
#define KNAP_KERNELS_WINDOWS_H

#include "kernels/convert.h"
#include "kernels/image_args.h"

/* One dim: `size` elements of x, `made` windows. */
typedef struct kn_window_dim {
    int64_t size, made, kernel, stride, pad, dilation;
    bool adaptive, with_pad;
} kn_window_dim;

/* A window: begin, begin + step, ..., before end; divide: how many positions it counts for. */
typedef struct kn_window_span {
    int64_t begin, end, step, divide;
} kn_window_span;

/* x is the image that is read in forward, y the one that is made; d: 0 for rows, 1 for columns. */
static inline kn_window_dim kn_window_dim_of(const kn_window *w, int d, const kn_array *x,
                                             const kn_array *y)
{
    const kn_window_dim r = {
        x->shape[2 + d], y->shape[2 + d], w->kernel[d], w->stride[d],
        w->pad[d],       w->dilation[d],  w->adaptive,  w->count_include_pad
    };
    return r;
}

static inline KN_HD kn_window_span kn_window_span_of(const kn_window_dim *d, int64_t p)
{
    kn_window_span s = { 0, 0, 1, 0 };
    if (d->adaptive) {
        s.begin = p * d->size / d->made;
        s.end = ((p + 1) * d->size + d->made - 1) / d->made;
        s.divide = s.end - s.begin;
        return s;
    }
    s.step = d->dilation;
    s.begin = p * d->stride - d->pad;
    s.end = s.begin + (d->kernel - 1) * s.step + 1;
    s.divide = (s.end < d->size + d->pad ? s.end : d->size + d->pad) - s.begin;
    if (s.begin < 0)
        s.begin += (-s.begin + s.step - 1) / s.step * s.step;
    s.end = s.end < d->size ? s.end : d->size;
    if (!d->with_pad)
        s.divide = s.end > s.begin ? s.end - s.begin : 0;
    return s;
}

/* The windows that may reach element h: from, up to and not including, to. */
static inline KN_HD void kn_windows_of(const kn_window_dim *d, int64_t h, int64_t *from,
                                       int64_t *to)
{
    if (d->adaptive) {
        *from = h * d->made / d->size, *to = ((h + 1) * d->made + d->size - 1) / d->size;
        return;
    }
    const int64_t reach = (d->kernel - 1) * d->dilation, t = h + d->pad;
    *from = t > reach ? (t - reach + d->stride - 1) / d->stride : 0;
    *to = t / d->stride + 1;
    *to = *to < d->made ? *to : d->made;
}

/* How many positions window p counts for if it has h, else 0: of windows without gaps. */
static inline KN_HD int64_t kn_window_share(const kn_window_dim *d, int64_t p, int64_t h)
{
    const kn_window_span s = kn_window_span_of(d, p);
    return h >= s.begin && h < s.end ? s.divide : 0;
}

#endif
