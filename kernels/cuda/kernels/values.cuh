/* kernels/cuda/kernels/values.cuh (private): single values of every dtype on the device: the type
 * that a dtype computes in, reading, writing, rounding, and arithmetic that isn't contracted. */
#ifndef KNAP_KERNELS_CUDA_VALUES_CUH
#define KNAP_KERNELS_CUDA_VALUES_CUH

#include "kernels/cuda/kernels/cuda.cuh"

/* ---- arithmetic that a compiler must not contract -------------------------------------------- */

#ifdef __CUDA_ARCH__
static inline __device__ float kn_mul_rn(float a, float b)
{
    return __fmul_rn(a, b);
}
static inline __device__ float kn_add_rn(float a, float b)
{
    return __fadd_rn(a, b);
}
static inline __device__ double kn_mul_rn(double a, double b)
{
    return __dmul_rn(a, b);
}
static inline __device__ double kn_add_rn(double a, double b)
{
    return __dadd_rn(a, b);
}
#else
static inline KN_HD float kn_mul_rn(float a, float b)
{
    return a * b;
}
static inline KN_HD float kn_add_rn(float a, float b)
{
    return a + b;
}
static inline KN_HD double kn_mul_rn(double a, double b)
{
    return a * b;
}
static inline KN_HD double kn_add_rn(double a, double b)
{
    return a + b;
}
#endif

/* ---- element types --------------------------------------------------------------------------- */

struct kn_bool {
    uint8_t bits;
};

/* The type that a dtype computes in: float or double as in cuda.cuh, integers and bool in i64. */
template <typename T> struct kn_wide {
    typedef typename kn_compute<T>::type type;
};
template <> struct kn_wide<int64_t> {
    typedef int64_t type;
};
template <> struct kn_wide<int32_t> {
    typedef int64_t type;
};
template <> struct kn_wide<uint8_t> {
    typedef int64_t type;
};
template <> struct kn_wide<kn_bool> {
    typedef int64_t type;
};

template <typename T> static inline KN_HD typename kn_wide<T>::type kn_read(const T &x)
{
    return kn_get(&x);
}
template <> inline KN_HD int64_t kn_read<kn_bool>(const kn_bool &x)
{
    return x.bits != 0;
}
/* Integers keep the low bits. */
template <typename T> static inline KN_HD void kn_write(T &to, typename kn_wide<T>::type x)
{
    kn_put(&to, (typename kn_compute<T>::type)x);
}
template <> inline KN_HD void kn_write<kn_bool>(kn_bool &to, int64_t x)
{
    to.bits = x != 0;
}

/* Truncates toward zero into [lo, hi]; NaN gives 0. */
static inline KN_HD int64_t kn_saturate(double x, int64_t lo, int64_t hi)
{
    if (x != x)
        return 0;
    if (x <= (double)lo)
        return lo;
    return x >= (double)hi ? hi : (int64_t)x;
}

/* Stores a double rounded once, saturating: what conversions and fills do. */
static inline KN_HD void kn_store(float &to, double x)
{
    to = (float)x;
}
static inline KN_HD void kn_store(double &to, double x)
{
    to = x;
}
static inline KN_HD void kn_store(kn_bf16 &to, double x)
{
    to.bits = kn_f64_to_bf16(x);
}
static inline KN_HD void kn_store(kn_f16 &to, double x)
{
    to.bits = kn_f64_to_f16(x);
}
static inline KN_HD void kn_store(int64_t &to, double x)
{
    to = kn_saturate(x, INT64_MIN, INT64_MAX);
}
static inline KN_HD void kn_store(int32_t &to, double x)
{
    to = (int32_t)kn_saturate(x, INT32_MIN, INT32_MAX);
}
static inline KN_HD void kn_store(uint8_t &to, double x)
{
    to = (uint8_t)kn_saturate(x, 0, UINT8_MAX);
}
static inline KN_HD void kn_store(kn_bool &to, double x)
{
    to.bits = x != 0;
}

/* The same for moves that don't look inside: a type of the dtype's size. */
#define KN_SIZES(dtype, f, ...)                                                                    \
    do {                                                                                           \
        switch (kn_dtype_size(dtype)) {                                                            \
        case 1: return f<uint8_t>(__VA_ARGS__);                                                    \
        case 2: return f<uint16_t>(__VA_ARGS__);                                                   \
        case 4: return f<uint32_t>(__VA_ARGS__);                                                   \
        case 8: return f<uint64_t>(__VA_ARGS__);                                                   \
        default: return KN_DECLINED;                                                               \
        }                                                                                          \
    } while (0)

/* Element at of p, of dtype t, = x rounded once. */
static inline KN_HD void kn_store_as(void *p, kn_dtype t, int64_t at, double x)
{
    switch (t) {
    case KN_F32: return kn_store(((float *)p)[at], x);
    case KN_BF16: return kn_store(((kn_bf16 *)p)[at], x);
    case KN_F16: return kn_store(((kn_f16 *)p)[at], x);
    case KN_F64: return kn_store(((double *)p)[at], x);
    case KN_I64: return kn_store(((int64_t *)p)[at], x);
    case KN_I32: return kn_store(((int32_t *)p)[at], x);
    case KN_U8: return kn_store(((uint8_t *)p)[at], x);
    default: return kn_store(((kn_bool *)p)[at], x);
    }
}

#endif
