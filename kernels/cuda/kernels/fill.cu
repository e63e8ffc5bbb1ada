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

/* x rounded to dtype t, at p. */
static inline KN_HD void put(void *p, kn_dtype t, double x)
{
#define CASE(T) return kn_store(*(T *)p, x)
    switch (t) {
    case KN_F32: CASE(float);
    case KN_BF16: CASE(kn_bf16);
    case KN_F16: CASE(kn_f16);
    case KN_F64: CASE(double);
    case KN_I64: CASE(int64_t);
    case KN_I32: CASE(int32_t);
    case KN_U8: CASE(uint8_t);
    default: CASE(kn_bool);
    }
#undef CASE
}

struct range_op {
    char *dst;
    kn_dtype dtype;
    int size;
    double value, step;

    template <int V> struct in {};

    template <int V> __device__ void load(const int64_t (&)[1], const bool *, in<V> &) const {}
    template <int V> __device__ void finish(const int64_t (&at)[1], const in<V> &, int64_t i) const
    {
        put(dst + at[0] * size, dtype, kn_add_rn(value, kn_mul_rn((double)i, step)));
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
    double value = a->value + 0.0 * a->step; /* -0 + 0 is 0 */
    if (!kn_dtype_is_float(t) && t != KN_I64 && t != KN_I32 && t != KN_U8 && t != KN_BOOL)
        return KN_DECLINED;
    if (a->step != 0)
        return kn_each(arrays, range_op{ (char *)a->dst.data, t, (int)kn_dtype_size(t), value, a->step });
    alignas(8) unsigned char bits[8];
    put(bits, t, value);
#define CASE(T) return fill<T>(a, bits)
    KN_SIZES(t, CASE);
#undef CASE
}
