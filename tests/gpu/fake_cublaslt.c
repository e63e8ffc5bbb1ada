/* tests/gpu/fake_cublaslt.c: a cuBLASLt that makes nothing and computes nothing, for
 * cuda_gemm_test.c. Its heuristics answer with the numbers in FAKE_HEURISTIC: their status, the
 * algorithm's, and how many they found. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))
#define SUCCEEDS(name)                                                                             \
    API int name(void);                                                                            \
    int name(void)                                                                                 \
    {                                                                                              \
        return 0;                                                                                  \
    }
SUCCEEDS(cublasLtMatmulDescCreate)
SUCCEEDS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
SUCCEEDS(cublasLtMatrixLayoutCreate)
SUCCEEDS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
SUCCEEDS(cublasLtMatmulPreferenceCreate)
SUCCEEDS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)

API int cublasLtCreate(void **handle);
int cublasLtCreate(void **handle)
{
    static int one;
    *handle = &one;
    return 0;
}

API int cublasLtMatmul(void);
int cublasLtMatmul(void) /* nothing that was declined is computed */
{
    abort();
}

API const char *cublasLtGetStatusString(int status);
const char *cublasLtGetStatusString(int status)
{
    return status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : "another status";
}

/* cublasLtMatmulHeuristicResult_t */
typedef struct answer {
    uint64_t algorithm[8];
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} answer;

API int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                       void *preference, int asked, answer *result, int *found);
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                   void *preference, int asked, answer *result, int *found)
{
    const char *numbers = getenv("FAKE_HEURISTIC");
    int status = 0;
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)asked;
    if (!numbers || sscanf(numbers, "%d %d %d", &status, &result->state, found) != 3)
        abort();
    return status;
}
