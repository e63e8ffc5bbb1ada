/* kernels/cuda/kernels/conv.cuh (private): where the elements of a convolution lie, for it and its
 * gradients.
 *
 * Taps are the terms of a sum over the weights, in the order r, s, channel; pixels are positions
 * (n, h, w). A pixel of the image that is made and a tap meet the image that is read at (pixel *
 * mul + add + r * step) / div along each dim, if that divides and lies inside: so a convolution
 * (div 1) and its gradient by x (div the stride) are one thing. */
#ifndef KNAP_KERNELS_CUDA_CONV_CUH
#define KNAP_KERNELS_CUDA_CONV_CUH

#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/images.cuh"

/* ---- on the device --------------------------------------------------------------------------- */

struct conv_dim {
    int made, read, weights; /* sizes */
    int mul, add, step, div;
};

struct conv_pixel {
    int64_t n;
    int h, w;
};

static inline __device__ conv_pixel conv_pixel_at(const conv_dim (&d)[2], int64_t i)
{
    conv_pixel p;
    int64_t row = i / d[1].made;
    p.w = (int)(i - row * d[1].made);
    p.n = row / d[0].made;
    p.h = (int)(row - p.n * d[0].made);
    return p;
}

struct conv_tap {
    int64_t c;
    int r, s;
};

static inline __device__ conv_tap conv_tap_at(const conv_dim (&d)[2], int64_t channels, int64_t k)
{
    conv_tap t;
    int64_t rs = k / channels;
    t.c = k - rs * channels;
    t.r = (int)(rs / d[1].weights);
    t.s = (int)(rs - (int64_t)t.r * d[1].weights);
    return t;
}

/* at = pixel * mul + add + r * step of a dim; false: outside. */
static inline __device__ bool conv_meet(const conv_dim &d, int at, int &where)
{
    where = at;
    if (d.div > 1) {
        where = at / d.div;
        if (where * d.div != at)
            return false;
    }
    return where >= 0 && where < d.read;
}

/* The element of the image in, with strides s, at which a pixel and a tap meet; 0 outside of it. */
template <typename T>
static inline __device__ typename kn_compute<T>::type
conv_read(const conv_dim (&d)[2], const kn_image &s, const T *in, int h, int w)
{
    int y, x;
    if (!conv_meet(d[0], h, y) || !conv_meet(d[1], w, x))
        return 0;
    return kn_get(in + y * s.h + x * s.w);
}

/* ---- tiles ----------------------------------------------------------------------------------- */

#define TILE 64 /* rows and columns of a block's results */
#define DEEP 16 /* terms that pass through shared memory at once */
#define EACH 4  /* rows and columns of a thread's results */
#define FEW  8  /* channels of a group below which tiles don't pay */

/* Adds one slice to a thread's results; only the first `wide` in a row count. */
template <typename A>
static __device__ inline void conv_multiply(const A (*left)[TILE + 1], const A (*right)[TILE + 1],
                                            int tx, int ty, int wide, A (&sum)[EACH][EACH])
{
#pragma unroll
    for (int k = 0; k < DEEP; k++) {
        A x[EACH];
#pragma unroll
        for (int i = 0; i < EACH; i++)
            x[i] = left[k][ty + i * (TILE / EACH)];
#pragma unroll
        for (int j = 0; j < EACH; j++) {
            if (j >= wide)
                continue;
            A y = right[k][tx + j * (TILE / EACH)];
#pragma unroll
            for (int i = 0; i < EACH; i++)
                sum[i][j] = kn_fma_rn(x[i], y, sum[i][j]);
        }
    }
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* A convolution whichever of its arrays is the result. */
struct conv_case {
    const kn_array *y, *x, *w;
    const int64_t *stride, *pad, *dilation;
    int64_t groups;
};

/* Positions are counted in 32 bits; false with an error beyond. */
static inline bool conv_small(kn_kernel k, const conv_case &v)
{
    bool small = true;
    for (int d = 0; d < 2; d++) {
        double reach = (double)v.y->shape[2 + d] * (double)v.stride[d] +
                       (double)v.w->shape[2 + d] * (double)v.dilation[d];
        small = small && reach + fabs((double)v.pad[d]) + (double)v.x->shape[2 + d] < 1e9;
    }
    return small || kn_fail("%s: an image or window of more than 10^9 positions along a dim; these "
                            "are not supported on cuda",
                            kn_kernel_name(k));
}

/* Dim d where y is made from x; or x from y. */
static inline conv_dim conv_dim_forward(const conv_case &v, int d)
{
    return { (int)v.y->shape[2 + d],
             (int)v.x->shape[2 + d],
             (int)v.w->shape[2 + d],
             (int)v.stride[d],
             (int)-v.pad[d],
             (int)v.dilation[d],
             1 };
}

static inline conv_dim conv_dim_backward(const conv_case &v, int d)
{
    return { (int)v.x->shape[2 + d], (int)v.y->shape[2 + d], (int)v.w->shape[2 + d], 1,
             (int)v.pad[d],          (int)-v.dilation[d],    (int)v.stride[d] };
}

#endif
