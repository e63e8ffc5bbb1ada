/* kernels/cpu/vec/recurrent.h (private): what both ways through the steps of a recurrent layer
 * share. The weight is packed into panels once for all steps. Rows go in tiles of GEMM_MR; a tile's
 * units, or columns of a product, go in blocks of GEMM_NR.
 *
 * Floor: the products, 2 T N G H operations each way; the panels come from the L2 cache, or, of
 * more than it holds, from the L3, once for all rows of a step. */
#ifndef KNAP_KERNELS_CPU_VEC_RECURRENT_H
#define KNAP_KERNELS_CPU_VEC_RECURRENT_H

#include "kernels/cpu/vec/gemm.h"
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/math.h"

#define v_num      vf
#define KN_FORMULA VEC_INLINE vf

KN_FORMULA v_relu(vf x)
{
    return v_max(v_zero(), x);
}

#include "kernels/cells.h"

enum { RECURRENT_GATES = 4, /* at most */ RECURRENT_L2 = 1 << 18 /* bytes of it for a panel */ };

typedef struct recurrent_size {
    int64_t T, N, H, G, gates, tiles, blocks;
} recurrent_size;

static inline recurrent_size recurrent_size_of(const kn_array *y, const kn_array *w)
{
    recurrent_size z = { y->shape[0], y->shape[1], y->shape[2], w->shape[0], 0, 0, 0 };
    z.gates = z.H > 0 ? z.G / z.H : 0;
    z.tiles = ceil_div(z.N, GEMM_MR);
    z.blocks = ceil_div(z.H, GEMM_NR);
    return z;
}

/* c[i, GEMM_NR] = sum_k a[i lda + k] b[k, GEMM_NR] (+ bias) for a tile's first rows; it may compute
 * more, which a has. */
static inline void recurrent_tile(int64_t rows, int64_t K, const float *a, int64_t lda,
                                  const float *b, float *c, const float *bias)
{
    if (rows == 1)
        gemm_rows(1, K, a, lda, 1, b, GEMM_NR, c, GEMM_NR, false, bias, false, NULL);
    else if (rows == 2)
        gemm_rows(2, K, a, lda, 1, b, GEMM_NR, c, GEMM_NR, false, bias, false, NULL);
    else if (rows <= 4)
        gemm_rows(4, K, a, lda, 1, b, GEMM_NR, c, GEMM_NR, false, bias, false, NULL);
    else
        gemm_tile(K, a, lda, 1, b, GEMM_NR, c, GEMM_NR, false, bias);
}

/* Steps of a range of tiles and blocks, one of which is all there are. */
typedef struct recurrent_range {
    int64_t tile, tiles, block, blocks; /* from, until */
} recurrent_range;

/* Whether threads share a step's blocks, and so the weight, rather than take rows for all steps:
 * they must meet at each step, but a weight that one's cache doesn't hold may fit into two. */
static inline bool recurrent_by_blocks(const recurrent_size *z, int threads)
{
    return threads > 1 && z->blocks > 1 &&
           (z->tiles < threads || z->G * z->H * (int64_t)sizeof(float) > RECURRENT_L2);
}

static inline int recurrent_threads(const recurrent_size *z)
{
    return gemm_threads((double)z->T * (double)z->N * (double)z->G * ((double)z->H / 8 + 8));
}

#endif
