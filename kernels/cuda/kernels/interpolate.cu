/* kernels/cuda/kernels/interpolate.cu: images of another size, and their gradient.
 *
 * Floor: x (dy) read once, y (dx) written once. A thread makes one output; neighbours in memory are
 * made by neighbouring threads, and elements that several of them read meet in the cache. The
 * gradient adds the positions of an element in their order: no atomics. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/images.cuh"
#include "kernels/grid.h"

#include <float.h>

template <typename T> struct grid_call {
    T *out;
    const T *in;
    kn_image so, si; /* of out, in */
    kn_grid_dim d[2];
    int64_t count, channels, H, W; /* of out */
    bool last;                     /* its channels come before positions */
};

/* Between two neighbours of a row. */
template <typename T>
static __device__ inline typename kn_compute<T>::type
grid_along(const grid_call<T> &c, const T *row, const kn_grid_place &w)
{
    typedef typename kn_compute<T>::type A;
    A left = kn_get(row + w.first * c.si.w), part = (A)w.part;
    return w.part == 0 ? left : (1 - part) * left + part * kn_get(row + (w.first + 1) * c.si.w);
}

template <typename T> KN_KERNEL(256, interpolate_kernel, grid_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < c.count;
         i += (int64_t)gridDim.x * blockDim.x) {
        kn_image p = kn_image_place(i, c.channels, c.H, c.W, c.last, false);
        kn_grid_place h = kn_grid_at(&c.d[0], p.h), w = kn_grid_at(&c.d[1], p.w);
        const T *row = c.in + p.n * c.si.n + p.c * c.si.c + h.first * c.si.h;
        A v = grid_along(c, row, w), part = (A)h.part;
        if (h.part != 0)
            v = (1 - part) * v + part * grid_along(c, row + c.si.h, w);
        kn_put(c.out + p.n * c.so.n + p.c * c.so.c + p.h * c.so.h + p.w * c.so.w, v);
    }
}

template <typename T> KN_KERNEL(256, interpolate_grad_kernel, grid_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < c.count;
         i += (int64_t)gridDim.x * blockDim.x) {
        kn_image at = kn_image_place(i, c.channels, c.H, c.W, c.last, false);
        int64_t p0 = kn_grid_from(&c.d[0], at.h), p1 = kn_grid_to(&c.d[0], at.h);
        int64_t q0 = kn_grid_from(&c.d[1], at.w), q1 = kn_grid_to(&c.d[1], at.w);
        const T *plane = c.in + at.n * c.si.n + at.c * c.si.c;
        A sum = 0;
        for (int64_t p = p0; p < p1; p++) {
            A share = (A)kn_grid_share(&c.d[0], p, at.h);
            for (int64_t q = q0; q < q1 && share != 0; q++) {
                A by = share * (A)kn_grid_share(&c.d[1], q, at.w);
                if (by != 0)
                    sum += by * kn_get(plane + p * c.si.h + q * c.si.w);
            }
        }
        kn_put(c.out + at.n * c.so.n + at.c * c.so.c + at.h * c.so.h + at.w * c.so.w, sum);
    }
}

/* x is the image that is read in forward, y the one that is made. */
template <typename T>
static grid_call<T> grid_call_of(const kn_array *x, const kn_array *y, const kn_array *out,
                                 const kn_array *in, const kn_grid *g, bool linear)
{
    grid_call<T> c = {};
    c.out = (T *)out->data;
    c.in = (const T *)in->data;
    c.so = kn_image_of(out);
    c.si = kn_image_of(in);
    for (int d = 0; d < 2; d++)
        c.d[d] = kn_grid_dim_of(g, linear, d, x, y);
    c.count = kn_array_numel(out);
    c.channels = out->shape[1];
    c.H = out->shape[2];
    c.W = out->shape[3];
    c.last = out->stride[1] == 1;
    return c;
}

template <typename T> static kn_status interpolate_run(const kn_interpolate_args *a)
{
    grid_call<T> c = grid_call_of<T>(&a->x, &a->y, &a->y, &a->x, &a->grid, a->linear);
    if (c.count == 0)
        return KN_DONE;
    return KN_RUN_FLAT(interpolate_kernel<T>, kn_blocks(c.count, 256, 1), 256, c);
}

template <typename T> static kn_status interpolate_grad_run(const kn_interpolate_grad_args *a)
{
    grid_call<T> c = grid_call_of<T>(&a->dx, &a->dy, &a->dx, &a->dy, &a->grid, a->linear);
    if (c.count == 0)
        return KN_DONE;
    return KN_RUN_FLAT(interpolate_grad_kernel<T>, kn_blocks(c.count, 256, 1), 256, c);
}

extern "C" kn_status kn_cuda_interpolate(const void *args)
{
    const kn_interpolate_args *a = (const kn_interpolate_args *)args;
    if (a->y.dtype != a->x.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->x.dtype, interpolate_run, a);
}

extern "C" kn_status kn_cuda_interpolate_grad(const void *args)
{
    const kn_interpolate_grad_args *a = (const kn_interpolate_grad_args *)args;
    if (a->dx.dtype != a->dy.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->dx.dtype, interpolate_grad_run, a);
}
