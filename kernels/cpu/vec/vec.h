/* kernels/cpu/vec/vec.h (private): the vector provider of the CPU. The files of this folder are
 * compiled once an instruction set (-DKN_VEC_NAME=base, avx2, avx512); this header gives each
 * compilation its names, and loads and stores of vectors (lanes.h) by dtype.
 *
 * Body and tail of a loop must compute the same bits: tails load with v_get_n (missing lanes are
 * 0), run the very same operations and store with v_put_n. */
#ifndef KNAP_KERNELS_CPU_VEC_VEC_H
#define KNAP_KERNELS_CPU_VEC_VEC_H

#include "kernels/cpu/vec/lanes.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"

#ifndef KN_VEC_NAME
#define KN_VEC_NAME base
#endif

/* ---- names: each compilation's functions carry its instruction set ------------------------- */

#define VEC_JOIN_(a, b) kn_##a##_##b
#define VEC_JOIN(a, b)  VEC_JOIN_(a, b)
#define VEC_FN(name)    VEC_JOIN(name, KN_VEC_NAME)
#define VEC_STR_(s)     #s
#define VEC_STR(s)      VEC_STR_(s)

#define vec_words VEC_FN(vec_words)

/* Entries of the provider; args points at the entry's struct (kernels.h). */
#define VEC_HAS_VEC(...) __VA_ARGS__
#define VEC_HAS_NO_VEC(...)
#define VEC_DECLARE(entry, name, arrays, vectors, ...)                                             \
    VEC_HAS_##vectors(kn_status VEC_FN(vec_##name)(const void *args);)
KN_KERNELS(VEC_DECLARE)

/* random.c: word[n] = those of elements start .. start + n - 1 (kernels/philox.h). */
void vec_words(uint64_t seed, uint64_t stream, uint64_t start, int64_t n, uint32_t *word);

/* ---- loads and stores by dtype; t should be a constant after inlining ------------------------ */

VEC_INLINE bool vec_float(kn_dtype t)
{
    return t == KN_F32 || t == KN_BF16 || t == KN_F16;
}

/* Bytes an element. */
VEC_INLINE int64_t v_size(kn_dtype t)
{
    return t == KN_F32 ? 4 : 2;
}

/* bool gives 0 or 1. */
VEC_INLINE vf v_get(kn_dtype t, const void *p, int64_t i)
{
    if (t == KN_F32)
        return v_load((const float *)p + i);
    if (t == KN_BOOL)
        return v_from_bool((const uint8_t *)p + i);
    const vh h = v_load_h((const uint16_t *)p + i);
    return t == KN_BF16 ? v_from_bf16(h) : v_from_f16(h);
}

VEC_INLINE void v_put(kn_dtype t, void *p, int64_t i, vf v)
{
    if (t == KN_F32) {
        v_store((float *)p + i, v);
        return;
    }
    const vh h = t == KN_BF16 ? v_to_bf16(v) : v_to_f16(v);
    __builtin_memcpy((uint16_t *)p + i, &h, sizeof h);
}

/* The same for the first n <= KN_VW lanes. */
VEC_INLINE vf v_get_n(kn_dtype t, const void *p, int64_t i, int64_t n)
{
    if (n >= KN_VW)
        return v_get(t, p, i);
    if (t == KN_F32)
        return v_load_n((const float *)p + i, n);
    uint8_t b[KN_VW] = { 0 };
    if (t == KN_BOOL) {
        memcpy(b, (const uint8_t *)p + i, (size_t)n);
        return v_from_bool(b);
    }
#if KN_VW == 16
    const vh h = (vh)_mm256_maskz_loadu_epi16((__mmask16)((1u << n) - 1), (const uint16_t *)p + i);
    return t == KN_BF16 ? v_from_bf16(h) : v_from_f16(h);
#else
    uint16_t h[KN_VW] = { 0 };
    for (int64_t j = 0; j < n; j++)
        h[j] = ((const uint16_t *)p)[i + j];
    return v_get(t, h, 0);
#endif
}

VEC_INLINE void v_put_n(kn_dtype t, void *p, int64_t i, vf v, int64_t n)
{
    if (n >= KN_VW) {
        v_put(t, p, i, v);
        return;
    }
    if (t == KN_F32) {
        v_store_n((float *)p + i, v, n);
        return;
    }
    uint16_t h[KN_VW];
    v_put(t, h, 0, v);
    for (int64_t j = 0; j < n; j++)
        ((uint16_t *)p)[i + j] = h[j];
}

/* The first n lanes of v, then those of rest. */
VEC_INLINE vf v_first_lanes(vf v, vf rest, int64_t n)
{
#if KN_VW == 16
    return (vf)_mm512_mask_blend_ps((__mmask16)((1u << n) - 1), (__m512)rest, (__m512)v);
#elif KN_VW == 8
    return v_sel(v_first(n), v, rest);
#else
    for (int64_t i = n; i < KN_VW; i++)
        v[i] = rest[i];
    return v;
#endif
}

/* One value, broadcast. */
VEC_INLINE vf v_get1(kn_dtype t, const void *p, int64_t i)
{
    return v_set1(v_get_n(t, p, i, 1)[0]);
}

/* dst[0..n) = src[0..n), each rounded once; the dtypes should be constants. */
VEC_INLINE void vec_cast(void *dst, kn_dtype to, const void *src, int64_t n, kn_dtype from)
{
    int64_t i = 0;
    for (; i + KN_VW <= n; i += KN_VW)
        v_put(to, dst, i, v_get(from, src, i));
    if (i < n)
        v_put_n(to, dst, i, v_get_n(from, src, i, n - i), n - i);
}

/* Calls f(..., t) with t a constant, for a dtype that vec_float() has accepted. */
#define VEC_BY_DTYPE(t, f, ...)                                                                    \
    do {                                                                                           \
        if ((t) == KN_F32)                                                                         \
            f(__VA_ARGS__, KN_F32);                                                                \
        else if ((t) == KN_BF16)                                                                   \
            f(__VA_ARGS__, KN_BF16);                                                               \
        else                                                                                       \
            f(__VA_ARGS__, KN_F16);                                                                \
    } while (0)

/* vec_cast for any dtypes. */
static inline void vec_convert(void *dst, kn_dtype to, const void *src, kn_dtype from, int64_t n)
{
    if (to == KN_F32)
        VEC_BY_DTYPE(from, vec_cast, dst, KN_F32, src, n);
    else if (to == KN_BF16)
        VEC_BY_DTYPE(from, vec_cast, dst, KN_BF16, src, n);
    else
        VEC_BY_DTYPE(from, vec_cast, dst, KN_F16, src, n);
}

/* Scratch of a kernel, from the device's pool; NULL with an error if there is none. */
static inline void *vec_scratch(size_t bytes)
{
    return kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE);
}

static inline void vec_scratch_end(void *p, size_t bytes)
{
    if (p)
        kn_give(kn_device_memory(KN_CPU), p, bytes, KN_MEM_WORKSPACE);
}

#endif
