/* kernels/cpu/vec/gemm.h (private): the inner part of every product of the vector overlay: packing
 * into panels and the register-tiled kernel (Goto and van de Geijn, "Anatomy of High-Performance
 * Matrix Multiplication", 2008).
 *
 *   c[GEMM_MR, GEMM_NR] (+)= sum_k a[k, GEMM_MR] * b[k, GEMM_NR]
 *
 * An element is one chain of v_fma in ascending k, wherever in a matrix it lies: so no cut of M and
 * N, and hence no number of threads, changes a bit. */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_H
#define KNAP_KERNELS_CPU_VEC_GEMM_H

#include "kernels/convert.h"
#include "kernels/cpu/vec/vec.h"

/* The tile: as many accumulators as there are registers, less two for b and one for a. */
#if KN_VW == 16
#define GEMM_MR 12
#else
#define GEMM_MR 6
#endif
#define GEMM_NR (2 * KN_VW)

enum { DEPTH = 256 }; /* terms of a chain: GEMM_NR x DEPTH floats stay in the L1 cache */

static inline int64_t ceil_div(int64_t a, int64_t b)
{
    return (a + b - 1) / b;
}

static inline int64_t round_up(int64_t n, int64_t to)
{
    return ceil_div(n, to) * to;
}

/* For so many operations, which may be more than an int64_t counts. */
static inline int gemm_threads(double work)
{
    return kn_threads_for(work < 0x1p60 ? (int64_t)work : (int64_t)1 << 60);
}

/* ---- elements as f32 ------------------------------------------------------------------------ */

VEC_INLINE float gemm_get(const void *p, kn_dtype t, int64_t i)
{
    if (t == KN_F32)
        return ((const float *)p)[i];
    const uint16_t h = ((const uint16_t *)p)[i];
    return t == KN_BF16 ? kn_bf16_to_f32(h) : kn_f16_to_f32(h);
}

/* The address of element i. */
VEC_INLINE void *gemm_at(const void *p, kn_dtype t, int64_t i)
{
    return (char *)(uintptr_t)p + i * v_size(t);
}

/* ---- packing -------------------------------------------------------------------------------- */

typedef float gemm_4 __attribute__((vector_size(16)));

/* dst[j * ds + i] = src[i * ss + j] for 4 x 4 floats. */
VEC_INLINE void gemm_transpose4(float *dst, int64_t ds, const float *src, int64_t ss)
{
    gemm_4 r[4];
    for (int i = 0; i < 4; i++)
        memcpy(&r[i], src + i * ss, sizeof r[i]);
    const gemm_4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
    const gemm_4 b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    const gemm_4 c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    const gemm_4 d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
    for (int i = 0; i < 4; i++)
        memcpy(dst + i * ds, &r[i], sizeof r[i]);
}

/* One panel: dst[k][width] = src[i * si + k * sk] for i < n <= width, the rest zero. Where width is
 * no multiple of 4 (it is at least 4), the last group of four overlaps the one before. */
VEC_INLINE void gemm_pack_panel(float *dst, const void *src, int64_t si, int64_t sk, int64_t n,
                                int64_t kc, int width, kn_dtype t)
{
    int64_t k = 0;
    if (n == width && si == 1 && width % KN_VW == 0) {
        for (; k < kc; k++)
            for (int i = 0; i < width; i += KN_VW)
                v_store(dst + k * width + i, v_get(t, gemm_at(src, t, k * sk), i));
    } else if (n == width && si == 1 && t == KN_F32) {
        for (; k < kc; k++)
            for (int i = 0; i < width; i += 4) {
                const int at = i + 4 <= width ? i : width - 4;
                memcpy(dst + k * width + at, (const float *)src + k * sk + at, 4 * sizeof *dst);
            }
    } else if (n == width && sk == 1 && t == KN_F32) {
        for (; k + 4 <= kc; k += 4)
            for (int i = 0; i < width; i += 4) {
                const int at = i + 4 <= width ? i : width - 4;
                gemm_transpose4(dst + k * width + at, width, (const float *)src + at * si + k, si);
            }
    }
    for (; k < kc; k++) {
        for (int64_t i = 0; i < n; i++)
            dst[k * width + i] = gemm_get(src, t, i * si + k * sk);
        for (int64_t i = n; i < width; i++)
            dst[k * width + i] = 0.0f;
    }
}

/* A panel of GEMM_MR rows of the left operand, or of GEMM_NR columns of the right one. */
static inline void gemm_pack_left(float *dst, const void *src, kn_dtype t, int64_t si, int64_t sk,
                                  int64_t n, int64_t kc)
{
    VEC_BY_DTYPE(t, gemm_pack_panel, dst, src, si, sk, n, kc, GEMM_MR);
}

static inline void gemm_pack_right(float *dst, const void *src, kn_dtype t, int64_t si, int64_t sk,
                                   int64_t n, int64_t kc)
{
    VEC_BY_DTYPE(t, gemm_pack_panel, dst, src, si, sk, n, kc, GEMM_NR);
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* c[i * ldc + j] = (add ? c[i * ldc + j] : 0) + sum_k a[i * ai + k * ak] * b[k * bk + j]
 * (+ bias[j]) for i < rows, a constant of at most GEMM_MR, and j < GEMM_NR; the tile lives in
 * registers. */
VEC_INLINE void gemm_rows(int rows, int64_t kc, const float *a, int64_t ai, int64_t ak,
                          const float *b, int64_t bk, float *c, int64_t ldc, bool add,
                          const float *bias)
{
    vf s[GEMM_MR][2];
    for (int i = 0; i < rows; i++) {
        __builtin_prefetch(c + i * ldc, 1);
        s[i][0] = s[i][1] = v_zero();
    }
    for (int64_t k = 0; k < kc; k++) {
        const vf b0 = v_load(b + k * bk), b1 = v_load(b + k * bk + KN_VW);
#pragma GCC unroll 12
        for (int i = 0; i < rows; i++) {
            const vf x = v_set1(a[i * ai + k * ak]);
            s[i][0] = v_fma(x, b0, s[i][0]);
            s[i][1] = v_fma(x, b1, s[i][1]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < rows; i++) {
        float *row = c + i * ldc;
        if (add) {
            s[i][0] = v_load(row) + s[i][0];
            s[i][1] = v_load(row + KN_VW) + s[i][1];
        }
        if (bias) {
            s[i][0] = s[i][0] + v_load(bias);
            s[i][1] = s[i][1] + v_load(bias + KN_VW);
        }
        v_store(row, s[i][0]);
        v_store(row + KN_VW, s[i][1]);
    }
}

VEC_INLINE void gemm_tile(int64_t kc, const float *a, int64_t ai, int64_t ak, const float *b,
                          int64_t bk, float *c, int64_t ldc, bool add, const float *bias)
{
    gemm_rows(GEMM_MR, kc, a, ai, ak, b, bk, c, ldc, add, bias);
}

/* The same on packed panels, for the m x n corner of the tile; c beyond it is not touched. bias has
 * GEMM_NR readable values. */
static inline void gemm_micro(int64_t kc, const float *left, const float *right, float *c,
                              int64_t ldc, int64_t m, int64_t n, bool add, const float *bias)
{
    if (m == GEMM_MR && n == GEMM_NR) {
        gemm_tile(kc, left, 1, GEMM_MR, right, GEMM_NR, c, ldc, add, bias);
        return;
    }
    float corner[GEMM_MR * GEMM_NR] = { 0 };
    for (int64_t i = 0; add && i < m; i++)
        memcpy(corner + i * GEMM_NR, c + i * ldc, (size_t)n * sizeof *c);
    gemm_tile(kc, left, 1, GEMM_MR, right, GEMM_NR, corner, GEMM_NR, add, bias);
    for (int64_t i = 0; i < m; i++)
        memcpy(c + i * ldc, corner + i * GEMM_NR, (size_t)n * sizeof *c);
}

#endif
