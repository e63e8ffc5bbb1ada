/* kernels/philox.h: random numbers as functions of their purpose. The same bits in C and CUDA.
 *
 * Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3, SC 2011)
 * turns a counter of four words and a key of two words into four random words. Here
 *
 *   key = seed,  counter = (i / 4 as two words, stream as two words),  element i takes word i % 4,
 *
 * so element i of (seed, stream) depends on nothing else, and one call serves four elements.
 *
 * No function of libm is used but fmaf and sqrtf, which IEEE 754 rounds correctly everywhere; every
 * multiply-add is an explicit fmaf, so no compiler can choose differently. */
#ifndef KNAP_KERNELS_PHILOX_H
#define KNAP_KERNELS_PHILOX_H

#include "kernels/convert.h"
#include "kernels/types.h"
#include <math.h>

typedef struct kn_philox4 {
    uint32_t word[4];
} kn_philox4;

/* Ten rounds of multiply, swap, xor with the key; the key moves on by Weyl constants. */
static inline KN_HD kn_philox4 kn_philox_rounds(kn_philox4 c, uint32_t key0, uint32_t key1)
{
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xD2511F53u * c.word[0], b = (uint64_t)0xCD9E8D57u * c.word[2];
        c.word[0] = (uint32_t)(b >> 32) ^ c.word[1] ^ key0;
        c.word[1] = (uint32_t)b;
        c.word[2] = (uint32_t)(a >> 32) ^ c.word[3] ^ key1;
        c.word[3] = (uint32_t)a;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return c;
}

/* The words of elements 4 block .. 4 block + 3. */
static inline KN_HD kn_philox4 kn_philox(uint64_t seed, uint64_t stream, uint64_t block)
{
    kn_philox4 counter = { { (uint32_t)block, (uint32_t)(block >> 32), (uint32_t)stream,
                             (uint32_t)(stream >> 32) } };
    return kn_philox_rounds(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
}

/* The word of element i. */
static inline KN_HD uint32_t kn_philox_at(uint64_t seed, uint64_t stream, uint64_t i)
{
    return kn_philox(seed, stream, i / 4).word[i % 4];
}

/* The word of element i, one of a block's; without an index into registers. */
static inline KN_HD uint32_t kn_philox_word(kn_philox4 w, int64_t i)
{
    const uint32_t low = i & 1 ? w.word[1] : w.word[0], high = i & 1 ? w.word[3] : w.word[2];
    return i & 2 ? high : low;
}

/* The seed of a call that was given a value, or its address in device memory. */
static inline KN_HD uint64_t kn_seed_of(uint64_t seed, const uint64_t *at)
{
    return at ? *at : seed;
}

/* ---- uniform ------------------------------------------------------------------------------- */

/* A multiple of 2^-24 in [0, 1). The conversion is exact (and signed: cheap in vectors). */
static inline KN_HD float kn_uniform01(uint32_t word)
{
    return (float)(int32_t)(word >> 8) * 0x1p-24f;
}

/* u moved to [lo, hi); the rare result that rounds up to hi becomes lo. */
static inline KN_HD float kn_uniform_between(float u, float lo, float hi)
{
    float x = fmaf(hi - lo, u, lo);
    return x < hi ? x : lo;
}

/* ---- dropout ------------------------------------------------------------------------------- */

/* keep(word) = uniform >= p, as integers: word >> 8 >= kn_dropout_threshold(p). In f32 and below,
 * a kept x becomes x * (float)kn_dropout_scale(p); in f64 x * kn_dropout_scale(p). */
static inline KN_HD uint32_t kn_dropout_threshold(double p)
{
    return p <= 0 ? 0 : p >= 1 ? 1u << 24 : (uint32_t)ceil(p * 0x1p24);
}

static inline KN_HD double kn_dropout_scale(double p)
{
    return p >= 1 ? 0.0 : 1.0 / (1.0 - p);
}

static inline KN_HD int kn_dropout_keeps(uint32_t word, uint32_t threshold)
{
    return (word >> 8) >= threshold;
}

/* ---- normal -------------------------------------------------------------------------------- */

/* log a for finite normal a > 0: a = 2^e m with m in [sqrt 1/2, sqrt 2), f = m - 1,
 * log a = e log 2 + f + f^2 R(f). Relative error of the second part at most 1.5e-7. */
static inline KN_HD float kn_log_poly(float a)
{
    uint32_t shifted = kn_f32_bits(a) - 0x3f3504f3u; /* bits of sqrt 1/2 */
    int32_t e = (int32_t)shifted >> 23;
    float f = kn_f32_from_bits((shifted & 0x7fffff) + 0x3f3504f3u) - 1.0f;
    float r = 0.0878726549f;
    r = fmaf(r, f, -0.141596470f);
    r = fmaf(r, f, 0.148347868f);
    r = fmaf(r, f, -0.165884885f);
    r = fmaf(r, f, 0.199720497f);
    r = fmaf(r, f, -0.250011477f);
    r = fmaf(r, f, 0.333336706f);
    r = fmaf(r, f, -0.499999971f);
    return fmaf((float)e, 0.693147181f, fmaf(r, f * f, f));
}

/* A standard normal from 32 random bits by the inverse of its distribution function: bit 0 is the
 * sign, the others a probability p = (k + 1/2) 2^-32 in (0, 1/2) with tail(z) = p. With
 *   x = 1 - 2p,  w = -log(1 - x^2) = -log(4 p (1 - p)):   z = x P(w)        where w < 6,
 *                                                         z = x Q(sqrt w)   beyond,
 * polynomials of degree 7 fitted to z / x at Chebyshev points. |z| <= 6.34; the error is below
 * 1e-6 times max(1, |z|) (tests/kernels/philox_test.c). */
static inline KN_HD float kn_normal(uint32_t word)
{
    float p = fmaf((float)(int32_t)(word >> 1), 0x1p-32f, 0x1p-33f);
    float x = fmaf(-2.0f, p, 1.0f);
    float w = -kn_log_poly(4.0f * p * (1.0f - p));
    int tail = w >= 6.0f;
    float t = tail ? sqrtf(w) - 3.5f : w - 3.0f;
    float r = tail ? -2.71971684e-4f : 4.94714431e-7f;
    r = fmaf(r, t, tail ? 7.86738042e-4f : -2.78144695e-6f);
    r = fmaf(r, t, tail ? -1.02580131e-3f : -1.71877718e-5f);
    r = fmaf(r, t, tail ? 1.43355507e-3f : 2.77131779e-4f);
    r = fmaf(r, t, tail ? -2.89203111e-3f : -1.18397014e-3f);
    r = fmaf(r, t, tail ? 4.65961074e-3f : -8.11692086e-3f);
    r = fmaf(r, t, tail ? 1.42463207f : 0.341717397f);
    r = fmaf(r, t, tail ? 4.71708818f : 2.29603566f);
    float z = x * r;
    return word & 1 ? -z : z;
}

/* ---- rounding at random ---------------------------------------------------------------------- */

/* x between two neighbours a < b of bf16 becomes b with probability (x - a) / (b - a): adding 16
 * random bits below the kept ones carries exactly that often. */
static inline KN_HD uint16_t kn_bf16_at_random(float x, uint32_t word)
{
    uint32_t u = kn_f32_bits(x);
    if ((u & 0x7fffffff) >= 0x7f800000) /* infinity and NaN */
        return kn_f32_to_bf16(x);
    return (uint16_t)((u + (word >> 16)) >> 16);
}

/* The same to f16, whose steps are 2^13 of f32's, and 2^-24 below 2^-14. */
static inline KN_HD uint16_t kn_f16_at_random(float x, uint32_t word)
{
    uint32_t u = kn_f32_bits(x), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
    if (size >= 0x7f800000)
        return kn_f32_to_f16(x);
    if (size >= 0x38800000) { /* 2^-14 */
        uint32_t r = (size - 0x38000000 + (word >> 19)) >> 13;
        return (uint16_t)(sign | (r < 0x7c00 ? r : 0x7c00));
    }
    return (uint16_t)(sign | ((uint32_t)(kn_f32_from_bits(size) * 0x1p37f) + (word >> 19)) >> 13);
}

/* x rounded at random to t; in other dtypes than bf16 and f16 x itself. */
static inline KN_HD float kn_rounded_at_random(kn_dtype t, float x, uint32_t word)
{
    return t == KN_BF16  ? kn_bf16_to_f32(kn_bf16_at_random(x, word))
           : t == KN_F16 ? kn_f16_to_f32(kn_f16_at_random(x, word))
                         : x;
}

/* The key of a step's roundings. */
static inline KN_HD uint64_t kn_step_key(uint64_t seed, double step)
{
    return seed + (uint64_t)step * 0x9E3779B97F4A7C15u;
}

#endif
