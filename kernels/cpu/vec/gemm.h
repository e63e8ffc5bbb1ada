/* kernels/cpu/vec/gemm.h (private): the inner part of every product of the vector overlay: packing
 * into panels and the register-tiled kernel (Goto and van de Geijn, "Anatomy of High-Performance
 * Matrix Multiplication", 2008).
 *
 *   c[GEMM_MR, GEMM_NR] (+)= sum_k a[k, GEMM_MR] * b[k, GEMM_NR]
 *
 * An element is one chain of v_fma in ascending k, wherever in a matrix it lies: so no cut of M and
 * N, and hence no number of threads, changes a bit. Where the CPU multiplies pairs of bf16, a float
 * of a panel holds two terms of bf16 (v_fma_pairs), the first, which comes first in the chain, in
 * its upper half; so do panels of f32 where their rounding is allowed (kn_set_f32_products). */
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

/* The terms of a chain. With more of them c is written more seldom, but a panel of b comes from the
 * L2 cache instead of L1: tiles of 16 lanes have the time. */
enum { DEPTH = KN_VW == 16 ? 512 : 256 };

enum { LINE = 16 }; /* floats of a cache line */

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
typedef uint32_t gemm_4_bits __attribute__((vector_size(16)));

/* dst[j * ds + i] = src[i][j] for 4 x 4 floats; rows of src lie `apart` bytes from each other. Of
 * pairs the halves change places: memory has the first one below. */
VEC_INLINE void gemm_transpose4(float *dst, int64_t ds, const void *src, int64_t apart, bool pairs)
{
    gemm_4 r[4];
    for (int i = 0; i < 4; i++)
        memcpy(&r[i], (const char *)src + i * apart, sizeof r[i]);
    const gemm_4 a = __builtin_shufflevector(r[0], r[1], 0, 4, 1, 5);
    const gemm_4 b = __builtin_shufflevector(r[2], r[3], 0, 4, 1, 5);
    const gemm_4 c = __builtin_shufflevector(r[0], r[1], 2, 6, 3, 7);
    const gemm_4 d = __builtin_shufflevector(r[2], r[3], 2, 6, 3, 7);
    r[0] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
    r[1] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    r[2] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
    r[3] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
    for (int i = 0; i < 4; i++) {
        if (pairs)
            r[i] = (gemm_4)((gemm_4_bits)r[i] << 16 | (gemm_4_bits)r[i] >> 16);
        memcpy(dst + i * ds, &r[i], sizeof r[i]);
    }
}

/* dst[LINE][width] from n rows of a cache line each, `apart` bytes from each other, and zeros.
 * n is at least 4; where it is no multiple of 4, the last four overlap those before. */
VEC_INLINE void gemm_pack_line(float *dst, const void *src, int64_t apart, int64_t n, int width,
                               bool pairs)
{
    for (int64_t i = 0; i < n; i += 4) {
        const int64_t at = v_min_i64(i, n - 4);
        for (int64_t j = 0; j < LINE; j += 4)
            gemm_transpose4(dst + j * width + at, width, (const char *)src + at * apart + 4 * j,
                            apart, pairs);
    }
    for (int64_t j = 0; j < LINE && n < width; j++)
        memset(dst + j * width + n, 0, (size_t)(width - n) * sizeof *dst);
}

/* One panel: dst[k][width] = src[i * si + k * sk] for i < n <= width, the rest zero. */
VEC_INLINE void gemm_pack_panel(float *dst, const void *src, int64_t si, int64_t sk, int64_t n,
                                int64_t kc, int width, kn_dtype t)
{
    int64_t k = 0;
    if (n == width && si == 1 && t == KN_F32 && width % KN_VW != 0) {
        for (; k < kc; k++)
            for (int i = 0; i < width; i += 4) {
                const int at = i + 4 <= width ? i : width - 4;
                memcpy(dst + k * width + at, (const float *)src + k * sk + at, 4 * sizeof *dst);
            }
    } else if (si == 1) {
        for (; k < kc; k++)
            for (int i = 0; i < width; i += KN_VW) {
                const void *from = gemm_at(src, t, k * sk);
                const vf x = n == width && i + KN_VW <= width
                                 ? v_get(t, from, i)
                                 : v_get_n(t, from, i, v_max_i64(0, n - i));
                v_put_n(KN_F32, dst + k * width, i, x, width - i);
            }
    } else if (n >= 4 && sk == 1 && t == KN_F32) {
        for (; k + LINE <= kc; k += LINE)
            gemm_pack_line(dst + k * width, (const float *)src + k, 4 * si, n, width, false);
    }
    for (; k < kc; k++) {
        for (int64_t i = 0; i < n; i++)
            dst[k * width + i] = gemm_get(src, t, i * si + k * sk);
        for (int64_t i = n; i < width; i++)
            dst[k * width + i] = 0.0f;
    }
}

/* Two terms of t in each lane (v_fma_pairs). */
VEC_INLINE vf gemm_pair(vf first, vf second, kn_dtype t)
{
    return t == KN_F32 ? v_pairs(first, second) : (vf)((vu)first | (vu)second >> 16);
}

/* gemm_pack_line of rows of f32, a line of bf16 each. */
VEC_INLINE void gemm_round_line(float *dst, const float *src, int64_t si, int64_t n, int width)
{
    float line[GEMM_NR * LINE] __attribute__((aligned(64)));
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < LINE; k += KN_VW) {
            const float *at = src + i * si + 2 * k;
            v_store(line + i * LINE + k, v_round_two(v_load(at), v_load(at + KN_VW)));
        }
    gemm_pack_line(dst, line, 4 * LINE, n, width, true);
}

/* The same of bf16 in pairs, or of f32 rounded to that: [kc / 2][width], of an odd kc with a zero.
 */
VEC_INLINE void gemm_pack_pairs(float *dst, const void *src, int64_t si, int64_t sk, int64_t n,
                                int64_t kc, int width, kn_dtype t)
{
    int64_t k = 0;
    if (si == 1) {
        for (; k + 2 <= kc; k += 2, dst += width)
            for (int i = 0; i < width; i += KN_VW) {
                const int64_t many = v_max_i64(0, v_min_i64(KN_VW, n - i));
                const vf first = v_get_n(t, gemm_at(src, t, k * sk), i, many);
                const vf second = v_get_n(t, gemm_at(src, t, (k + 1) * sk), i, many);
                v_put_n(KN_F32, dst, i, gemm_pair(first, second, t), width - i);
            }
    } else if (n >= 4 && sk == 1) {
        for (; k + 2 * LINE <= kc; k += 2 * LINE, dst += LINE * width) {
            if (t == KN_F32)
                gemm_round_line(dst, (const float *)src + k, si, n, width);
            else
                gemm_pack_line(dst, gemm_at(src, t, k), 2 * si, n, width, true);
        }
    }
    for (; k < kc; k += 2, dst += width)
        for (int64_t i = 0; i < width; i++) {
            const float first = i < n ? gemm_get(src, t, i * si + k * sk) : 0;
            const float second = i < n && k + 1 < kc ? gemm_get(src, t, i * si + (k + 1) * sk) : 0;
            dst[i] = gemm_pair(v_set1(first), v_set1(second), t)[0];
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

/* ---- lines asked for ahead ------------------------------------------------------------------ */

/* Cache lines that a kernel asks the memory for between its terms, where loads have time to spare:
 * so packing finds the source of the next panel in the cache. A core waits for few lines at a time
 * (24 on Zen 4), and its loads wait behind them: so the lines are spread. */
typedef struct gemm_ahead {
    const char *line;
    int64_t run, left; /* lines of a run of the memory, and those left of this one */
    int64_t skip;      /* bytes from the end of a run to the next */
    int64_t row, runs; /* runs of a row of them, and those left of this one; 0: no rows */
    int64_t further;   /* bytes to skip more at the end of a row */
    int64_t lines;     /* still to ask for */
    int64_t each;      /* of them, before every AHEAD terms */
} gemm_ahead;

enum { AHEAD = KN_VW == 16 ? 8 : 16 }; /* smaller tiles have fewer operations a term */

VEC_INLINE void gemm_ask(gemm_ahead *s)
{
    for (int64_t i = 0; i < s->each && s->lines > 0; i++, s->lines--) {
        __builtin_prefetch(s->line);
        const bool last = --s->left == 0;
        s->line += 64 + (last ? s->skip : 0);
        s->left = last ? s->run : s->left;
        if (last && --s->runs == 0)
            s->line += s->further, s->runs = s->row;
    }
}

/* A row of a tile, to be written. */
VEC_INLINE void gemm_ask_row(const float *c)
{
    __builtin_prefetch(c, 1);
    if (GEMM_NR > LINE)
        __builtin_prefetch(c + LINE, 1);
}

/* ---- the kernel ----------------------------------------------------------------------------- */

/* c[i * ldc + j] = (add ? c[i * ldc + j] : 0) + sum_k a[i * ai + k * ak] * b[k * bk + j]
 * (+ bias[j]) for i < rows, a constant of at most GEMM_MR, and j < GEMM_NR; the tile lives in
 * registers. ahead: NULL, or two runs of lines to ask for meanwhile, beside those of c. */
VEC_INLINE void gemm_rows(int rows, int64_t kc, const float *a, int64_t ai, int64_t ak,
                          const float *b, int64_t bk, float *c, int64_t ldc, bool add,
                          const float *bias, bool pairs, gemm_ahead *ahead)
{
    const bool spread = ahead && kc >= rows * AHEAD;
    vf s[GEMM_MR][2];
    for (int i = 0; i < rows; i++) {
        s[i][0] = s[i][1] = v_zero();
        if (!spread)
            gemm_ask_row(c + i * ldc);
    }
    for (int64_t k = 0; k < kc;) {
        const int64_t end = ahead ? v_min_i64(k + AHEAD, kc) : kc;
        if (ahead) {
            gemm_ask(ahead);
            gemm_ask(ahead + 1);
            if (spread && k < rows * AHEAD)
                gemm_ask_row(c + k / AHEAD * ldc);
        }
        for (; k < end; k++) {
            const vf b0 = v_load(b + k * bk), b1 = v_load(b + k * bk + KN_VW);
#pragma GCC unroll 12
            for (int i = 0; i < rows; i++) {
                const vf x = v_set1(a[i * ai + k * ak]);
                s[i][0] = pairs ? v_fma_pairs(x, b0, s[i][0]) : v_fma(x, b0, s[i][0]);
                s[i][1] = pairs ? v_fma_pairs(x, b1, s[i][1]) : v_fma(x, b1, s[i][1]);
            }
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
    gemm_rows(GEMM_MR, kc, a, ai, ak, b, bk, c, ldc, add, bias, false, NULL);
}

/* gemm_rows of the first m rows, rounded up to thirds of GEMM_MR, at most all of them: a tile of
 * fewer rows takes less time. */
VEC_INLINE void gemm_some_rows(int64_t m, int64_t kc, const float *a, int64_t ai, int64_t ak,
                               const float *b, int64_t bk, float *c, int64_t ldc, bool add,
                               const float *bias, bool pairs, gemm_ahead *ahead)
{
    enum { THIRD = GEMM_MR / 3 };
    if (m > 2 * THIRD)
        gemm_rows(GEMM_MR, kc, a, ai, ak, b, bk, c, ldc, add, bias, pairs, ahead);
    else if (m > THIRD)
        gemm_rows(2 * THIRD, kc, a, ai, ak, b, bk, c, ldc, add, bias, pairs, ahead);
    else
        gemm_rows(THIRD, kc, a, ai, ak, b, bk, c, ldc, add, bias, pairs, ahead);
}

/* The same on packed panels of kc floats a row, for the m x n corner of the tile; c beyond it is
 * not touched. bias has GEMM_NR readable values. */
VEC_INLINE void gemm_micro(int64_t kc, const float *left, const float *right, float *c, int64_t ldc,
                           int64_t m, int64_t n, bool add, const float *bias, bool pairs,
                           gemm_ahead *ahead)
{
    float corner[GEMM_MR * GEMM_NR], *to = c;
    const bool whole = m % (GEMM_MR / 3) == 0 && n == GEMM_NR;
    const int64_t ld = whole ? ldc : GEMM_NR;
    if (!whole) {
        memset(corner, 0, sizeof corner);
        for (int64_t i = 0; add && i < m; i++)
            memcpy(corner + i * GEMM_NR, c + i * ldc, (size_t)n * sizeof *c);
        to = corner;
    }
    gemm_some_rows(m, kc, left, 1, GEMM_MR, right, GEMM_NR, to, ld, add, bias, pairs, ahead);
    for (int64_t i = 0; !whole && i < m; i++)
        memcpy(c + i * ldc, corner + i * GEMM_NR, (size_t)n * sizeof *c);
}

#endif
