/* kernels/convert.h: bf16 and f16 to and from f32 and f64, in portable C.
 *
 *   f32   1 sign,  8 exponent, 23 fraction bits
 *   bf16  1 sign,  8 exponent,  7 fraction bits: the upper half of an f32
 *   f16   1 sign,  5 exponent, 10 fraction bits: largest 65504, smallest normal 2^-14
 *
 * Narrowing rounds to nearest, ties to even; overflow gives infinity; NaN stays NaN. GPUs have
 * instructions for the same but for the bits of NaN: integer arithmetic would hold back kernels
 * that move bf16. */
#ifndef KNAP_KERNELS_CONVERT_H
#define KNAP_KERNELS_CONVERT_H

#include <stdint.h>

#ifdef __CUDACC__
#define KN_HD __host__ __device__
#else
#define KN_HD
#endif

/* A union, since an address that is taken costs AddressSanitizer a frame for each conversion. */
typedef union kn_f32_and_bits {
    float x;
    uint32_t u;
} kn_f32_and_bits;

static inline KN_HD uint32_t kn_f32_bits(float x)
{
    kn_f32_and_bits both;
    both.x = x;
    return both.u;
}

static inline KN_HD float kn_f32_from_bits(uint32_t u)
{
    kn_f32_and_bits both;
    both.u = u;
    return both.x;
}

static inline KN_HD float kn_bf16_to_f32(uint16_t h)
{
    return kn_f32_from_bits((uint32_t)h << 16);
}

/* Adding 0x7fff, plus 1 where the kept part is odd, carries into it exactly when nearest-even
 * rounds up. A NaN could carry into infinity, so it is cut and made quiet instead. */
static inline KN_HD uint16_t kn_f32_to_bf16(float x)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    uint16_t h;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    uint32_t u = kn_f32_bits(x);
    uint32_t rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
    uint32_t nan = (u >> 16) | 0x40;
    return (uint16_t)((u & 0x7fffffff) > 0x7f800000 ? nan : rounded);
#endif
}

static inline KN_HD float kn_f16_to_f32(uint16_t h)
{
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
    return x;
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, magnitude = h & 0x7fff;
    if (magnitude >= 0x7c00) /* infinity and NaN */
        return kn_f32_from_bits(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);
    if (magnitude >= 0x0400) /* normal: exponent bias 15 becomes 127 */
        return kn_f32_from_bits(sign | ((magnitude << 13) + (112u << 23)));
    float tiny = (float)magnitude * 0x1p-24f; /* subnormal: fraction * 2^-24, exact */
    return kn_f32_from_bits(sign | kn_f32_bits(tiny));
#endif
}

static inline KN_HD uint16_t kn_f32_to_f16(float x)
{
#ifdef __CUDA_ARCH__
    uint16_t h;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
    return h;
#else
    uint32_t u = kn_f32_bits(x), sign = (u >> 16) & 0x8000, magnitude = u & 0x7fffffff;
    if (magnitude > 0x7f800000) /* NaN, made quiet */
        return (uint16_t)(sign | 0x7e00 | ((magnitude >> 13) & 0x3ff));
    if (magnitude >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (magnitude >= 0x38800000) /* normal in f16: 2^-14 and above; rounds as bf16 does */
        return (uint16_t)(sign |
                          ((magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13));
    /* Subnormal: 0.5 + |x| has its last bit at 2^-24, so the addition itself rounds. */
    uint32_t shifted = kn_f32_bits(kn_f32_from_bits(magnitude) + 0.5f);
    return (uint16_t)(sign | (shifted - 0x3f000000));
#endif
}

/* f64 to f32 rounded to odd: the neighbour whose last bit is 1 where x is between two floats. A
 * second rounding to fewer bits then gives what rounding x once would have given. */
static inline KN_HD float kn_f64_to_f32_odd(double x)
{
    float near = (float)x;
    if (near != near || (double)near == x)
        return near;
    uint32_t u = kn_f32_bits(near);
    int too_far = x < 0 ? (double)near < x : (double)near > x;
    return kn_f32_from_bits((too_far ? u - 1 : u) | 1); /* toward zero, then odd */
}

/* i64 to a double that rounds like it to f32 or less: beyond 2^53 the low bits become one sticky
 * bit, so that the later rounding is the only one. */
static inline KN_HD double kn_i64_to_f64_sticky(int64_t x)
{
    if (x > -(1LL << 53) && x < 1LL << 53)
        return (double)x;
    const int64_t low = x & 1023;
    return (double)((x - low) | (low ? 1024 : 0));
}

static inline KN_HD uint16_t kn_f64_to_bf16(double x)
{
    return kn_f32_to_bf16(kn_f64_to_f32_odd(x));
}

static inline KN_HD uint16_t kn_f64_to_f16(double x)
{
    return kn_f32_to_f16(kn_f64_to_f32_odd(x));
}

#endif
