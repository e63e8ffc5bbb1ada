/* kernels/cuda/cublaslt/tuned.h (private): the choice of an algorithm for a product as a line of
 * the file of choices (kernels/choices.h): its key says which GPU, which cuBLASLt and which
 * product. */
#ifndef KNAP_KERNELS_CUDA_TUNED_H
#define KNAP_KERNELS_CUDA_TUNED_H

#include "kernels/cuda/cublaslt/gemm.h"

typedef struct kn_tuned {
    bool parts; /* the product and what follows it are faster as kernels of their own: decline */
    unsigned char algorithm[64]; /* cublasLtMatmulAlgo_t, which may be kept as bytes for the same
                                  * version of the library; zeros where parts */
    double first_us, best_us;    /* the heuristics' first choice, and this one, when timed */
} kn_tuned;

/* "algorithm 12ab.., first 40.1 us, best 38.0 us", or "parts, ..". */
void kn_tuned_write(const kn_tuned *t, char value[]);
bool kn_tuned_read(const char *value, kn_tuned *t);
/* What an earlier run, or this one, has timed. */
bool kn_tuned_find(const kn_gemm *g, kn_tuned *t);
void kn_tuned_keep(const kn_gemm *g, const kn_tuned *t);

#endif
