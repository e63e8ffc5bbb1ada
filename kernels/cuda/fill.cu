/* kernels/cuda/fill.cu: dst[i] = value + i * step. */
#include "kernels/cuda/cuda.cuh"
#include "kernels/cuda/cuda_internal.h"

template <typename T>
KN_KERNEL void fill_kernel(T *dst, kn_walk<1> w, double value, double step)
{
    typedef typename kn_compute<T>::type A;
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    for (; i < w.count; i += n) {
        int64_t at[1];
        kn_walk_at(w, i, at);
        kn_put(dst + at[0], (A)(value + (double)i * step));
    }
}

extern "C" kn_status kn_cuda_fill(const void *args)
{
    const kn_fill_args *a = (const kn_fill_args *)args;
    const kn_array *const arrays[1] = { &a->dst };
    kn_walk<1> w = kn_walk_make(arrays);
    if (w.count == 0)
        return KN_DONE;
    unsigned grid = kn_blocks(w.count, 256, 4);
#define CASE(T) return KN_RUN_FLAT(fill_kernel<T>, grid, 256, (T *)a->dst.data, w, a->value, a->step)
    KN_FLOATS(a->dst.dtype, CASE);
#undef CASE
}
