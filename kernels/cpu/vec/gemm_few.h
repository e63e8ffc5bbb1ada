/* kernels/cpu/vec/gemm_few.h (private): products with few rows (a token at a time): each element of
 * the right operand is used so seldom that reading it is the work. It is read where it lies, either
 * along its rows (columns of c side by side in a vector) or, where it is stored transposed, as dot
 * products along k. */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_FEW_H
#define KNAP_KERNELS_CPU_VEC_GEMM_FEW_H

#include "kernels/cpu/vec/gemm.h"

enum {
    FEW = 4,            /* rows */
    FEW_COLUMNS = 4096, /* of c in a pass: a row of them stays in the L1 cache */
    FEW_DOTS = 256,     /* the same of dot products, whose order in memory is that of columns */
};

/* s[m][j] += sum of `depth` <= 4 terms from k on, for n <= KN_VW columns from j on. M, depth, and
 * whether n is KN_VW, are constants at every call. The next rows are asked for, since a processor
 * guesses only what lies side by side. */
VEC_INLINE void few_terms(float *s, const float *a, int64_t M, int64_t K, int64_t k, const void *b,
                          int64_t bk, int64_t j, int64_t n, int depth, kn_dtype t)
{
    vf r[4];
#pragma GCC unroll 4
    for (int d = 0; d < depth; d++)
        r[d] = n == KN_VW ? v_get(t, b, (k + d) * bk + j) : v_get_n(t, b, (k + d) * bk + j, n);
#pragma GCC unroll 4
    for (int d = 0; d < depth; d++)
        __builtin_prefetch(gemm_at(b, t, (k + depth + d) * bk + j), 0, 2);
#pragma GCC unroll 4
    for (int64_t m = 0; m < M; m++) {
        float *c = s + m * FEW_COLUMNS + j;
        vf x = v_load(c);
#pragma GCC unroll 4
        for (int d = 0; d < depth; d++)
            x = v_fma(v_set1(a[m * K + k + d]), r[d], x);
        v_store(c, x);
    }
}

VEC_INLINE void few_rows(float *s, const float *a, int64_t M, int64_t K, const void *b, int64_t bk,
                         int64_t w, kn_dtype t)
{
    const int64_t whole = w / KN_VW * KN_VW, rest = w - whole;
    int64_t k = 0;
    for (; k + 4 <= K; k += 4) {
        for (int64_t j = 0; j < whole; j += KN_VW)
            few_terms(s, a, M, K, k, b, bk, j, KN_VW, 4, t);
        if (rest)
            few_terms(s, a, M, K, k, b, bk, whole, rest, 4, t);
    }
    for (; k < K; k++) {
        for (int64_t j = 0; j < whole; j += KN_VW)
            few_terms(s, a, M, K, k, b, bk, j, KN_VW, 1, t);
        if (rest)
            few_terms(s, a, M, K, k, b, bk, whole, rest, 1, t);
    }
}

/* s[m][0..w) += sum over K of a[m][k] b[k][0..w), one chain of v_fma an element; a is f32 [M, K],
 * dense, M <= FEW. w is at most FEW_COLUMNS, the stride of rows of s. */
VEC_INLINE void few_along_rows(float *s, const float *a, int64_t M, int64_t K, const void *b,
                               int64_t bk, int64_t w, kn_dtype t)
{
    if (M == 1)
        few_rows(s, a, 1, K, b, bk, w, t);
    else if (M == 2)
        few_rows(s, a, 2, K, b, bk, w, t);
    else if (M == 3)
        few_rows(s, a, 3, K, b, bk, w, t);
    else
        few_rows(s, a, 4, K, b, bk, w, t);
}

/* sum_k a[k] b[k]: four vectors of partial sums, added as ((0 + 1) + (2 + 3)), then over lanes. */
VEC_INLINE float few_dot(const float *a, const void *b, int64_t K, kn_dtype t)
{
    vf s[4] = { v_zero(), v_zero(), v_zero(), v_zero() };
    int64_t k = 0;
    for (; k + 4 * KN_VW <= K; k += 4 * KN_VW)
        for (int d = 0; d < 4; d++)
            s[d] = v_fma(v_load(a + k + d * KN_VW), v_get(t, b, k + d * KN_VW), s[d]);
    for (int d = 0; k < K; k += KN_VW, d++)
        s[d] = v_fma(v_get_n(KN_F32, a, k, K - k), v_get_n(t, b, k, K - k), s[d]);
    return v_hsum((s[0] + s[1]) + (s[2] + s[3]));
}

/* s[m][j] = sum_k a[m][k] b[k][j] for j < w, b stored transposed: element (k, j) at k + j * bn. */
VEC_INLINE void few_dots(float *s, const float *a, int64_t M, int64_t K, const void *b, int64_t bn,
                         int64_t w, kn_dtype t)
{
    for (int64_t j = 0; j < w; j++)
        for (int64_t m = 0; m < M; m++)
            s[m * FEW_COLUMNS + j] = few_dot(a + m * K, gemm_at(b, t, j * bn), K, t);
}

#endif
