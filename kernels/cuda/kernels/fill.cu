/* kernels/cuda/kernels/fill.cu: dst[i] = value + i * step, in f64, rounded once. */
#include "kernels/cuda/kernels/elements.cuh"

#include <string.h>

namespace
{
/* One value, as the bits it has in dst. */
template <typename T> struct fill_op {
    T *dst, bits;

    template <int V> struct in {};

    template <int V> __device__ void load(const int64_t (&)[1], const bool *, in<V> &) const {}
    template <int V> __device__ void finish(const int64_t (&at)[1], const in<V> &, int64_t) const
    {
        kn_pack<T, V> r;
#pragma unroll
        for (int v = 0; v < V; v++)
            r.x[v] = bits;
        kn_save<V>(dst + at[0], r);
    }
};

struct range_op {
    void *dst;
    kn_dtype dtype;
    double value, step;

    template <int V> struct in {};

    template <int V> __device__ void load(const int64_t (&)[1], const bool *, in<V> &) const {}
    template <int V> __device__ void finish(const int64_t (&at)[1], const in<V> &, int64_t i) const
    {
        kn_store_as(dst, dtype, at[0], kn_add_rn(value, kn_mul_rn((double)i, step)));
    }
};

template <typename T> kn_status fill(const kn_fill_args *a, const unsigned char *bits)
{
    const kn_array *const arrays[] = { &a->dst };
    fill_op<T> op = { (T *)a->dst.data, 0 };
    memcpy(&op.bits, bits, sizeof op.bits);
    return kn_each<16 / sizeof(T)>(arrays, op, op);
}
} // namespace

extern "C" kn_status kn_cuda_fill(const void *args)
{
    const kn_fill_args *a = (const kn_fill_args *)args;
    const kn_array *const arrays[] = { &a->dst };
    kn_dtype t = a->dst.dtype;
    if (!kn_dtype_is_arithmetic(t))
        return KN_DECLINED;
    if (a->step != 0)
        return kn_each(arrays, range_op{ a->dst.data, t, a->value, a->step });
    alignas(8) unsigned char bits[8];
    kn_store_as(bits, t, 0, a->value);
    KN_SIZES(t, fill, a, bits);
}
