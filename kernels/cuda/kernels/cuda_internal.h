/* kernels/cuda/kernels/cuda_internal.h (private): the CUDA kernels as entries of the table, by
 * name. */
#ifndef KNAP_KERNELS_CUDA_INTERNAL_H
#define KNAP_KERNELS_CUDA_INTERNAL_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each takes its entry's struct (kernels.h) and works on kn_cuda_stream(). */
#define KN_CUDA_ENTRY(entry, name, ...) kn_status kn_cuda_##name(const void *args);
KN_KERNELS(KN_CUDA_ENTRY)

/* For a generator of another library: *to, a function of the draw (seed, stream) alone, and an
 * offset of 0, both in device memory. seed_at as in kn_random_args. */
kn_status kn_cuda_draw_key(uint64_t *to, uint64_t *offset, uint64_t seed, const uint64_t *seed_at,
                           uint64_t stream);

/* All of them: the last provider of the device (table.c). Shown to programs where it is the
 * emulator's. */
#ifdef KN_EMULATED_TABLE
KN_API
#endif
extern const kn_provider kn_cuda_kernels;

#ifdef __cplusplus
}
#endif
#endif
