/* kernels/cuda/kernels/rope.cu: rotary position embedding. The angles of all positions and pairs
 * are computed once, in f64 as the reference does, into a table of T * D/2 cosines and sines
 * (scratch, read from the cache by every batch and head); then x and y move once. */
#include "kernels/cuda/kernels/elements.cuh"
#include "kernels/rope.h"

namespace
{
template <typename A>
KN_KERNEL(128, angles_kernel, A *cosine, A *sine, int64_t count, int64_t half, int64_t start, double base,
                             kn_rope_scaling scaling, bool inverse)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += n) {
        int64_t t = i / half, pair = i - t * half;
        double angle = (double)(start + t) * kn_rope_speed(base, scaling, pair, half);
        double s = sin(angle);
        cosine[i] = (A)cos(angle);
        sine[i] = (A)(inverse ? -s : s);
    }
}

/* arrays: y and x, first halves of the last dim; the table as [1, 1, T, D/2]. */
template <typename T> struct rope_op {
    typedef typename kn_compute<T>::type A;
    T *y;
    const T *x;
    const A *cosine, *sine;
    int64_t y_half, x_half; /* from an element to its partner */

    template <int V> struct in {
        kn_pack<T, V> u, v;
    };
    template <int V> __device__ void load(const int64_t (&at)[3], const bool *repeat, in<V> &r) const
    {
        r.u = kn_load<V>(x + at[1], repeat[1]);
        r.v = kn_load<V>(x + at[1] + x_half, repeat[1]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[3], const in<V> &from, int64_t) const
    {
        A u[V], v[V];
        kn_widen(from.u, u);
        kn_widen(from.v, v);
        kn_pack<A, V> c = kn_load<V>(cosine + at[2], false), s = kn_load<V>(sine + at[2], false);
#pragma unroll
        for (int k = 0; k < V; k++) {
            A first = kn_fma_rn(u[k], c.x[k], -kn_mul_rn(v[k], s.x[k]));
            v[k] = kn_fma_rn(v[k], c.x[k], kn_mul_rn(u[k], s.x[k]));
            u[k] = first;
        }
        kn_save_wide<V>(y + at[0], u);
        kn_save_wide<V>(y + at[0] + y_half, v);
    }
};

template <typename T> kn_status run_rope(const kn_rope_args *a)
{
    typedef typename kn_compute<T>::type A;
    const int V = 16 / sizeof(T);
    int64_t half = a->x.shape[3] / 2, positions = a->x.shape[2], count = positions * half;
    if (kn_array_numel(&a->x) == 0)
        return KN_DONE;
    A *table = (A *)kn_cuda_scratch(2 * (size_t)count * sizeof *table); /* cosines, then sines */
    if (!table || KN_RUN_FLAT(angles_kernel<A>, kn_blocks(count, 128, 1), 128, table, table + count,
                              count, half, a->start, a->base, a->scaling, a->inverse) != KN_DONE)
        return KN_FAILED;
    kn_array y = a->y, x = a->x, angles = kn_array_make(table, a->x.dtype == KN_F64 ? KN_F64 : KN_F32, 4,
                                                    a->x.shape);
    y.shape[3] = x.shape[3] = angles.shape[3] = half;
    angles.stride[0] = angles.stride[1] = 0;
    angles.stride[2] = half;
    int64_t y_half = half * y.stride[3], x_half = half * x.stride[3];
    const kn_array *const arrays[] = { &y, &x, &angles };
    rope_op<T> op = { (T *)y.data, (const T *)x.data, table, table + count, y_half, x_half };
    bool wide = half % V == 0 && (size_t)half * sizeof(T) % 16 == 0;
    return wide ? kn_each<V>(arrays, op, op) : kn_each(arrays, op);
}
} // namespace

extern "C" kn_status kn_cuda_rope(const void *args)
{
    const kn_rope_args *a = (const kn_rope_args *)args;
    if (a->y.dtype != a->x.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->x.dtype, run_rope, a);
}
