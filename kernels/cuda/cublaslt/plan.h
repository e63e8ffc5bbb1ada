/* kernels/cuda/cublaslt/plan.h (private): cuBLASLt's functions and a kept product, for the files of
 * the provider. */
#ifndef KNAP_KERNELS_CUDA_PLAN_H
#define KNAP_KERNELS_CUDA_PLAN_H

#include "kernels/cuda/cublaslt/gemm.h"
#include "kernels/kernels_internal.h"

#include <cublasLt.h>

#define KN_BLAS_WORKSPACE ((size_t)32 << 20) /* what Hopper's algorithms can use */

/* The library's functions, found when first needed. */
extern struct kn_blas_functions {
    cublasStatus_t (*create)(cublasLtHandle_t *);
    cublasStatus_t (*matmul)(cublasLtHandle_t, cublasLtMatmulDesc_t, const void *, const void *,
                             cublasLtMatrixLayout_t, const void *, cublasLtMatrixLayout_t,
                             const void *, const void *, cublasLtMatrixLayout_t, void *,
                             cublasLtMatrixLayout_t, const cublasLtMatmulAlgo_t *, void *, size_t,
                             cudaStream_t);
    cublasStatus_t (*desc_create)(cublasLtMatmulDesc_t *, cublasComputeType_t, cudaDataType_t);
    cublasStatus_t (*desc_destroy)(cublasLtMatmulDesc_t);
    cublasStatus_t (*desc_set)(cublasLtMatmulDesc_t, cublasLtMatmulDescAttributes_t, const void *,
                               size_t);
    cublasStatus_t (*layout_create)(cublasLtMatrixLayout_t *, cudaDataType, uint64_t, uint64_t,
                                    int64_t);
    cublasStatus_t (*layout_destroy)(cublasLtMatrixLayout_t);
    cublasStatus_t (*layout_set)(cublasLtMatrixLayout_t, cublasLtMatrixLayoutAttribute_t,
                                 const void *, size_t);
    cublasStatus_t (*pref_create)(cublasLtMatmulPreference_t *);
    cublasStatus_t (*pref_destroy)(cublasLtMatmulPreference_t);
    cublasStatus_t (*pref_set)(cublasLtMatmulPreference_t, cublasLtMatmulPreferenceAttributes_t,
                               const void *, size_t);
    cublasStatus_t (*heuristic)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                cublasLtMatrixLayout_t, cublasLtMatmulPreference_t, int,
                                cublasLtMatmulHeuristicResult_t *, int *);
    cublasStatus_t (*fits)(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                           cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                           const cublasLtMatmulAlgo_t *, cublasLtMatmulHeuristicResult_t *);
    cublasStatus_t (*config_get)(const cublasLtMatmulAlgo_t *, cublasLtMatmulAlgoConfigAttributes_t,
                                 void *, size_t, size_t *);
    const char *(*status)(cublasStatus_t);
} kn_blas;
extern cublasLtHandle_t kn_blas_handle; /* NULL before the first product */
/* False, with an error, for any status but success. */
bool kn_blas_check(cublasStatus_t e, const char *what);

/* A kept product. */
typedef struct kn_blas_plan {
    kn_gemm key; /* the fields before the pointers */
    bool used;
    bool declined; /* the library has no algorithm for it */
    bool slower;   /* than its parts, or that isn't known: where no one asked for the epilogue */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t a, b, d;
    cublasLtMatmulAlgo_t algo;
    size_t workspace;
} kn_blas_plan;

/* The same as a product with a gradient in its epilogue, in two kernels. */
typedef struct kn_blas_parts {
    kn_blas_plan *product;
    kn_gemm g;
    kn_kernel after;
    kn_epilogue_args args;
} kn_blas_parts;

/* Launches g on the running stream with p's algorithm. */
cublasStatus_t kn_blas_multiply(const kn_blas_plan *p, const kn_gemm *g, void *workspace);
/* Finds p's algorithm for g, or declines; p has its descriptors (choose.c). parts, or NULL: where
 * algorithms are timed, these are, too. */
bool kn_blas_choose(kn_blas_plan *p, const kn_gemm *g, kn_blas_parts *parts);
/* What g asks of an algorithm. all: also of those that are taken only where they were timed. */
bool kn_blas_preference(cublasLtMatmulPreference_t *pref, const kn_gemm *g, bool all);

/* Tests: makes cuBLASLt's descriptors of g and destroys them. Needs the library, but no GPU. */
bool kn_blas_try(const kn_gemm *g);

#endif
