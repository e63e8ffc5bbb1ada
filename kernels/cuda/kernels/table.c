/* kernels/cuda/kernels/table.c: the provider table of Knap's own CUDA kernels. They take every case
 * that the reference takes, so they come last; cuBLASLt and cuDNN come before them. */
#include "kernels/cuda/kernels/cuda_internal.h"

#define ENTRY(entry, name, ...) [KN_K_##entry] = kn_cuda_##name,
const kn_provider kn_cuda_kernels = { .name = "cuda", .run = { KN_KERNELS(ENTRY) } };
