/* kernels/cpu/vec/gemm_small.h (private): products of which many make a batch: packing their operands
 * would take longer than they do. An element is one chain of v_fma over k, as in packed ones. */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_SMALL_H
#define KNAP_KERNELS_CPU_VEC_GEMM_SMALL_H

#include "kernels/cpu/vec/vec.h"

enum { SMALL = 32 * 32 /* elements of the right operand */, SMALL_ROWS = 4 /* of c at once */ };

/* Rows of c, whose number is a constant at every call, and w columns; b's rows are dense. */
VEC_INLINE void small_tile(float *c, int64_t cm, const float *a, int64_t am, int64_t ak,
                           const float *b, int64_t bk, int64_t K, int64_t w, int rows, bool add)
{
    vf sum[SMALL_ROWS];
    for (int m = 0; m < rows; m++)
        sum[m] = v_zero();
    for (int64_t k = 0; k < K; k++) {
        const vf r = w == KN_VW ? v_load(b + k * bk) : v_load_n(b + k * bk, w);
        for (int m = 0; m < rows; m++)
            sum[m] = v_fma(v_set1(a[m * am + k * ak]), r, sum[m]);
    }
    for (int m = 0; m < rows; m++) {
        float *to = c + m * cm;
        v_put_n(KN_F32, to, 0, add ? v_get_n(KN_F32, to, 0, w) + sum[m] : sum[m], w);
    }
}

VEC_INLINE void small_columns(float *c, int64_t cm, const float *a, int64_t am, int64_t ak,
                              const float *b, int64_t bk, int64_t M, int64_t K, int64_t w, bool add)
{
    int64_t m = 0;
    for (; m + SMALL_ROWS <= M; m += SMALL_ROWS)
        small_tile(c + m * cm, cm, a + m * am, am, ak, b, bk, K, w, SMALL_ROWS, add);
    for (; m < M; m++)
        small_tile(c + m * cm, cm, a + m * am, am, ak, b, bk, K, w, 1, add);
}

/* c[M, N] = a[M, K] b[K, N], or c += that, of f32; c's rows are dense, K N <= SMALL. */
static inline void small_product(float *c, int64_t cm, const float *a, int64_t am, int64_t ak,
                                 const float *b, int64_t bk, int64_t bn, int64_t M, int64_t N,
                                 int64_t K, bool add)
{
    float dense[SMALL];
    if (bn != 1) {
        for (int64_t n = 0; n < N; n++)
            for (int64_t k = 0; k < K; k++)
                dense[k * N + n] = b[k * bk + n * bn];
        b = dense, bk = N;
    }
    for (int64_t n = 0; n < N; n += KN_VW) {
        if (n + KN_VW <= N)
            small_columns(c + n, cm, a, am, ak, b + n, bk, M, K, KN_VW, add);
        else
            small_columns(c + n, cm, a, am, ak, b + n, bk, M, K, N - n, add);
    }
}

#endif
