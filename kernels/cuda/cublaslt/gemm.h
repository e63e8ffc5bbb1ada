/* kernels/cuda/cublaslt/gemm.h (private): how a matrix product of kernels.h becomes one of
 * cuBLASLt's. */
#ifndef KNAP_KERNELS_CUDA_GEMM_H
#define KNAP_KERNELS_CUDA_GEMM_H

#include "kernels/kernels.h"

/* What cuBLASLt computes with the product, in its numbering of operands. */
typedef enum kn_gemm_epilogue {
    KN_GEMM_PLAIN = 0,
    KN_GEMM_BIAS,  /* bias[i] is added */
    KN_GEMM_SUM_A, /* bias[i] = sum_l A[i,l], written */
    KN_GEMM_SUM_B, /* bias[j] = sum_l B[l,j], written */
    KN_GEMM_DGELU  /* d *= the derivative of gelu_tanh at x[i + j*ldx] */
} kn_gemm_epilogue;

/* d[i + j*ldd] = sum_l A[i,l] B[l,j] (+ bias[i]) (+ d[i + j*ldd], where add), i < m, j < n, l < k,
 * with A[i,l] at a[i + l*lda] (or a[l + i*lda] where ta) and B[l,j] at b[l + j*ldb] (or b[j +
 * l*ldb] where tb): column-major. A row-major product is this with the operands swapped. Repeated
 * `batch` times, sa, sb, sd elements on, and that for each index of the outer dims.
 * FIELDS are what a plan depends on, and what a kept choice is found by (tuned.h); alignments are
 * bytes, of all matrices: powers of two up to 256; 0: there is none. bias and x have d's dtype. */
/* clang-format off */
#define KN_GEMM_FIELDS(FIELD)                                                                      \
    FIELD(int64_t, m) FIELD(int64_t, n) FIELD(int64_t, k)                                          \
    FIELD(int64_t, lda) FIELD(int64_t, ldb) FIELD(int64_t, ldd)                                    \
    FIELD(int64_t, batch) FIELD(int64_t, sa) FIELD(int64_t, sb) FIELD(int64_t, sd)                 \
    FIELD(int64_t, ldx) FIELD(kn_dtype, in) FIELD(kn_dtype, out)                                   \
    FIELD(bool, ta) FIELD(bool, tb) FIELD(bool, tf32) FIELD(kn_gemm_epilogue, epilogue)            \
    FIELD(int, align_a) FIELD(int, align_b) FIELD(int, align_d) FIELD(int, align_bias)             \
    FIELD(int, align_x)
/* clang-format on */

typedef struct kn_gemm {
#define KN_GEMM_FIELD(type, name) type name;
    KN_GEMM_FIELDS(KN_GEMM_FIELD)
#undef KN_GEMM_FIELD
    /* per call */
    const void *a, *b, *x;
    void *bias, *d;
    bool add;
    int outers;
    int64_t outer[KN_MAX_DIMS], outer_a[KN_MAX_DIMS], outer_b[KN_MAX_DIMS], outer_d[KN_MAX_DIMS];
} kn_gemm;

#define KN_GEMM_KEY offsetof(kn_gemm, a) /* bytes of the fields that a plan depends on */

static inline bool kn_gemm_has_gradient(const kn_gemm *g)
{
    return g->epilogue == KN_GEMM_SUM_A || g->epilogue == KN_GEMM_SUM_B ||
           g->epilogue == KN_GEMM_DGELU;
}

/* false where cuBLASLt has no such product: another provider takes it. Needs no GPU. */
bool kn_gemm_map(const kn_matmul_args *a, kn_gemm *g);
/* Steps through the outer dims: offsets in elements of the index-th repetition. */
int64_t kn_gemm_repeats(const kn_gemm *g);
void kn_gemm_offsets(const kn_gemm *g, int64_t index, int64_t *a, int64_t *b, int64_t *d);

#endif
