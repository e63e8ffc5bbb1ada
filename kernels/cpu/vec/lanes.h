/* kernels/cpu/vec/lanes.h (private): a float vector vf of KN_VW lanes, an int vector vi, a mask vm,
 * and the operations on them, for the instruction set of the compilation. Plain + - * / work on vf,
 * and + - & | << >> on vi (GNU C vectors). */
#ifndef KNAP_KERNELS_CPU_VEC_LANES_H
#define KNAP_KERNELS_CPU_VEC_LANES_H

#include "kernels/convert.h"
#include "kernels/cpu/cpu_internal.h"

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__))
#include <immintrin.h>
#endif

/* ---- types and width ------------------------------------------------------------------------ */

#define VEC_INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__)
#define KN_VW 16
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define KN_VW 8
#else
#define KN_VW 4
#endif

typedef float vf __attribute__((vector_size(KN_VW * 4)));
typedef int32_t vi __attribute__((vector_size(KN_VW * 4)));
typedef uint32_t vu __attribute__((vector_size(KN_VW * 4)));
typedef uint16_t vh __attribute__((vector_size(KN_VW * 2))); /* bf16 or f16 bits */
#if KN_VW == 16
typedef __mmask16 vm;
#else
typedef vi vm;
#endif

/* Numbers of lanes are int64_t because they come from loop bounds. */
VEC_INLINE int64_t v_min_i64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

VEC_INLINE int64_t v_max_i64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- constants, loads, stores ------------------------------------------------------------- */

VEC_INLINE vf v_set1(float x)
{
#if KN_VW == 16
    return (vf)_mm512_set1_ps(x);
#elif KN_VW == 8
    return (vf)_mm256_set1_ps(x);
#else
    return (vf){ x, x, x, x };
#endif
}

VEC_INLINE vi v_set1_i(int32_t x)
{
#if KN_VW == 16
    return (vi)_mm512_set1_epi32(x);
#elif KN_VW == 8
    return (vi)_mm256_set1_epi32(x);
#else
    return (vi){ x, x, x, x };
#endif
}

VEC_INLINE vf v_zero(void)
{
    return v_set1(0.0f);
}

/* The builtin, since _FORTIFY_SOURCE makes a call of a memcpy into an array whose size it knows. */
VEC_INLINE vf v_load(const float *p)
{
    vf v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}

VEC_INLINE void v_store(float *p, vf v)
{
    __builtin_memcpy(p, &v, sizeof v);
}

#if KN_VW == 8
/* A mask whose first n lanes are all ones. */
VEC_INLINE vi v_first(int64_t n)
{
    const vi lane = { 0, 1, 2, 3, 4, 5, 6, 7 };
    return lane < v_set1_i((int32_t)n);
}
#endif

/* The first n < KN_VW lanes; the others are 0. */
VEC_INLINE vf v_load_n(const float *p, int64_t n)
{
#if KN_VW == 16
    return (vf)_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p);
#elif KN_VW == 8
    return (vf)_mm256_maskload_ps(p, (__m256i)v_first(n));
#else
    float t[KN_VW] = { 0 };
    for (int64_t i = 0; i < n; i++)
        t[i] = p[i];
    return v_load(t);
#endif
}

VEC_INLINE void v_store_n(float *p, vf v, int64_t n)
{
#if KN_VW == 16
    _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), (__m512)v);
#elif KN_VW == 8
    _mm256_maskstore_ps(p, (__m256i)v_first(n), (__m256)v);
#else
    for (int64_t i = 0; i < n; i++)
        p[i] = v[i];
#endif
}

/* A store that bypasses the cache; p is aligned to a vector. v_fence() orders it. */
VEC_INLINE void v_stream(float *p, vf v)
{
#if KN_VW == 16
    _mm512_stream_ps(p, (__m512)v);
#elif KN_VW == 8
    _mm256_stream_ps(p, (__m256)v);
#else
    v_store(p, v);
#endif
}

VEC_INLINE void v_fence(void)
{
#if KN_VW > 4
    _mm_sfence();
#endif
}

/* ---- arithmetic ----------------------------------------------------------------------------- */

/* a * b + c: one rounding where the hardware has it, two on base (libm's fmaf is slow). */
VEC_INLINE vf v_fma(vf a, vf b, vf c)
{
#if KN_VW == 16
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif KN_VW == 8
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FP_FAST_FMAF)
    return (vf){ __builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
                 __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3]) };
#else
    return a * b + c;
#endif
}

/* Each lane of a and b is two bf16: c + the product of the upper halves + that of the lower ones,
 * each added as v_fma adds it. The instruction (AVX512_BF16) takes subnormal numbers for 0. Like
 * those below, only where kn_cpu_multiplies_pairs: elsewhere they trap. */
VEC_INLINE vf v_fma_pairs(vf a, vf b, vf c)
{
#if KN_VW == 16
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(c) : "v"(a), "v"(b));
#else
    (void)a, (void)b, __builtin_trap();
#endif
    return c;
}

/* c - a * b */
VEC_INLINE vf v_fnma(vf a, vf b, vf c)
{
    return v_fma(-a, b, c);
}

VEC_INLINE vf v_sqrt(vf a)
{
#if KN_VW == 16
    return (vf)_mm512_sqrt_ps((__m512)a);
#elif KN_VW == 8
    return (vf)_mm256_sqrt_ps((__m256)a);
#else
    return (vf){ __builtin_sqrtf(a[0]), __builtin_sqrtf(a[1]), __builtin_sqrtf(a[2]),
                 __builtin_sqrtf(a[3]) };
#endif
}

/* ---- comparisons and choice ----------------------------------------------------------------- */

#if KN_VW == 16
#define VEC_COMPARE(name, imm, op)                                                                 \
    VEC_INLINE vm name(vf a, vf b)                                                                 \
    {                                                                                              \
        return _mm512_cmp_ps_mask((__m512)a, (__m512)b, imm);                                      \
    }
#else
#define VEC_COMPARE(name, imm, op)                                                                 \
    VEC_INLINE vm name(vf a, vf b)                                                                 \
    {                                                                                              \
        return (vm)(a op b);                                                                       \
    }
#endif
VEC_COMPARE(v_lt, _CMP_LT_OQ, <)
VEC_COMPARE(v_le, _CMP_LE_OQ, <=)
VEC_COMPARE(v_gt, _CMP_GT_OQ, >)
VEC_COMPARE(v_ge, _CMP_GE_OQ, >=)
VEC_COMPARE(v_eq, _CMP_EQ_OQ, ==)
VEC_COMPARE(v_ne, _CMP_NEQ_UQ, !=) /* true for NaN */

VEC_INLINE vm v_eq_i(vi a, vi b)
{
#if KN_VW == 16
    return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b);
#else
    return (vm)(a == b);
#endif
}

/* m ? a : b, lane by lane */
VEC_INLINE vf v_sel(vm m, vf a, vf b)
{
#if KN_VW == 16
    return (vf)_mm512_mask_blend_ps(m, (__m512)b, (__m512)a);
#elif KN_VW == 8
    return (vf)_mm256_blendv_ps((__m256)b, (__m256)a, (__m256)m);
#else
    return (vf)((m & (vi)a) | (~m & (vi)b));
#endif
}

VEC_INLINE vi v_sel_i(vm m, vi a, vi b)
{
    return (vi)v_sel(m, (vf)a, (vf)b);
}

/* the larger of two signed lanes */
VEC_INLINE vi v_max_i(vi a, vi b)
{
#if KN_VW == 16
    return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif KN_VW == 8
    return (vi)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return v_sel_i((vm)(a > b), a, b);
#endif
}

VEC_INLINE vi v_min_i(vi a, vi b)
{
#if KN_VW == 16
    return (vi)_mm512_min_epi32((__m512i)a, (__m512i)b);
#elif KN_VW == 8
    return (vi)_mm256_min_epi32((__m256i)a, (__m256i)b);
#else
    return v_sel_i((vm)(a < b), a, b);
#endif
}

VEC_INLINE bool v_any(vm m)
{
#if KN_VW == 16
    return m != 0;
#elif KN_VW == 8
    return _mm256_movemask_ps((__m256)m) != 0;
#else
    return (m[0] | m[1] | m[2] | m[3]) != 0;
#endif
}

/* a < b ? a : b: gives b where either is NaN. */
VEC_INLINE vf v_min(vf a, vf b)
{
#if KN_VW == 16
    return (vf)_mm512_min_ps((__m512)a, (__m512)b);
#elif KN_VW == 8
    return (vf)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return v_sel(v_lt(a, b), a, b);
#endif
}

/* a > b ? a : b: gives b where either is NaN. */
VEC_INLINE vf v_max(vf a, vf b)
{
#if KN_VW == 16
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif KN_VW == 8
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return v_sel(v_gt(a, b), a, b);
#endif
}

VEC_INLINE vf v_abs(vf a)
{
    return (vf)((vi)a & v_set1_i(0x7fffffff));
}

/* |a| with b's sign */
VEC_INLINE vf v_copysign(vf a, vf b)
{
    const vi sign = v_set1_i((int32_t)0x80000000u);
    return (vf)(((vi)a & ~sign) | ((vi)b & sign));
}

/* ---- 64-bit lanes ---------------------------------------------------------------------------- */

typedef uint64_t vq __attribute__((vector_size(KN_VW * 4)));

VEC_INLINE vq vq_set1(uint64_t x)
{
    vq v = { 0 };
    for (int i = 0; i < KN_VW / 2; i++)
        v[i] = x;
    return v;
}

/* Products of the low 32 bits. */
VEC_INLINE vq vq_mul_low(vq a, vq b)
{
#if KN_VW == 16
    return (vq)_mm512_mul_epu32((__m512i)a, (__m512i)b);
#elif KN_VW == 8
    return (vq)_mm256_mul_epu32((__m256i)a, (__m256i)b);
#else
    return (a & vq_set1(0xffffffffu)) * (b & vq_set1(0xffffffffu));
#endif
}

/* ---- sums over the lanes of a vector, always in the same tree order ------------------------- */

typedef float vec_four __attribute__((vector_size(16)));
typedef int32_t vec_four_i __attribute__((vector_size(16)));

/* m ? a : b */
VEC_INLINE vec_four vec_sel_four(vec_four_i m, vec_four a, vec_four b)
{
    return (vec_four)((m & (vec_four_i)a) | (~m & (vec_four_i)b));
}

/* Folds the upper half onto the lower one, and so on. */
#define VEC_FOLD(name, op)                                                                         \
    VEC_INLINE float name(vf v)                                                                    \
    {                                                                                              \
        vec_four part[KN_VW / 4];                                                                  \
        memcpy(part, &v, sizeof v);                                                                \
        for (int w = KN_VW / 8; w > 0; w /= 2)                                                     \
            for (int i = 0; i < w; i++)                                                            \
                part[i] = op(part[i], part[i + w]);                                                \
        const vec_four a = part[0], b = { a[2], a[3], a[2], a[3] }, c = op(a, b);                  \
        const vec_four d = { c[1], c[1], c[1], c[1] }, e = op(c, d);                               \
        return e[0];                                                                               \
    }
#define VEC_ADD_(a, b)     ((a) + (b))
#define VEC_MAX_(a, b)     ((a) > (b) || (a) != (a) ? (a) : (b)) /* keeps NaN */
#define VEC_MIN_(a, b)     ((a) < (b) || (a) != (a) ? (a) : (b))
#define VEC_MAX_FOUR(a, b) vec_sel_four(((a) > (b)) | ((a) != (a)), a, b)
#define VEC_MIN_FOUR(a, b) vec_sel_four(((a) < (b)) | ((a) != (a)), a, b)
VEC_FOLD(v_hsum, VEC_ADD_)
VEC_FOLD(v_hmax, VEC_MAX_FOUR)
VEC_FOLD(v_hmin, VEC_MIN_FOUR)

/* ---- conversions ---------------------------------------------------------------------------- */

VEC_INLINE vf v_to_float(vi a)
{
    return __builtin_convertvector(a, vf);
}

/* Of bytes: 0, or 1 where one isn't 0. */
VEC_INLINE vf v_from_bool(const uint8_t *p)
{
    typedef uint8_t bytes __attribute__((vector_size(KN_VW)));
    bytes b;
    __builtin_memcpy(&b, p, sizeof b);
    return v_sel(v_ne(v_to_float(__builtin_convertvector(b, vi)), v_zero()), v_set1(1), v_zero());
}

VEC_INLINE vh v_load_h(const uint16_t *p)
{
    vh h;
    __builtin_memcpy(&h, p, sizeof h);
    return h;
}

VEC_INLINE vf v_from_bf16(vh h)
{
#if KN_VW == 16
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif KN_VW == 8
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
    return (vf)(__builtin_convertvector(h, vu) << 16);
#endif
}

/* Round to nearest even; a NaN stays one (quiet, upper bits kept). The instruction (AVX512_BF16)
 * does the same, but that it takes subnormal numbers for 0. */
VEC_INLINE vh v_to_bf16(vf x)
{
#if KN_VW == 16
    enum { SUBNORMAL = 0x20 };
    if (kn_cpu_pairs && !_mm512_fpclass_ps_mask((__m512)x, SUBNORMAL)) {
        vh h;
        __asm__("vcvtneps2bf16 %1, %0" : "=v"(h) : "v"(x));
        return h;
    }
#endif
    const vu u = (vu)x;
    const vu even = (u >> 16) & (vu)v_set1_i(1);
    const vi rounded = (vi)((u + (vu)v_set1_i(0x7fff) + even) >> 16);
    const vi quiet = (vi)((u >> 16) | (vu)v_set1_i(0x40));
    const vi r = v_sel_i(v_ne(x, x), quiet, rounded);
#if KN_VW == 16
    return (vh)_mm512_cvtepi32_epi16((__m512i)r);
#elif KN_VW == 8
    const __m256i packed = _mm256_packus_epi32((__m256i)r, (__m256i)r);
    return (vh)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
    return __builtin_convertvector((vu)r, vh);
#endif
}

/* a's lanes, then b's, as bf16. The instruction (AVX512_BF16) takes subnormal numbers for 0. */
VEC_INLINE vf v_round_two(vf a, vf b)
{
    vf r;
#if KN_VW == 16
    __asm__("vcvtne2ps2bf16 %1, %2, %0" : "=v"(r) : "v"(a), "v"(b));
#else
    (void)a, (void)b, __builtin_trap();
#endif
    return r;
}

/* Lanes of two bf16 for v_fma_pairs: first's, rounded, in the upper halves, second's below. */
VEC_INLINE vf v_pairs(vf first, vf second)
{
    vf both = v_round_two(second, first);
#if KN_VW == 16
    const vu lane = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    both = (vf)_mm512_permutexvar_epi16((__m512i)(lane | (lane + 16) << 16), (__m512i)both);
#endif
    return both;
}

/* The same of neighbours among the 2 KN_VW numbers from p on. */
VEC_INLINE vf v_pairs_along(const float *p)
{
    const vu both = (vu)v_round_two(v_load(p), v_load(p + KN_VW));
    return (vf)(both << 16 | both >> 16);
}

VEC_INLINE vf v_from_f16(vh h)
{
#if KN_VW == 16
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif KN_VW == 8
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    return (vf){ kn_f16_to_f32(h[0]), kn_f16_to_f32(h[1]), kn_f16_to_f32(h[2]),
                 kn_f16_to_f32(h[3]) };
#endif
}

VEC_INLINE vh v_to_f16(vf x)
{
#if KN_VW == 16
    return (vh)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif KN_VW == 8
    return (vh)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    return (vh){ kn_f32_to_f16(x[0]), kn_f32_to_f16(x[1]), kn_f32_to_f16(x[2]),
                 kn_f32_to_f16(x[3]) };
#endif
}

#endif
