/* tests/gpu/emulator/emulated.h (private): the emulator's interface for tests. */
#ifndef KNAP_TESTS_EMULATED_H
#define KNAP_TESTS_EMULATED_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All CUDA kernels, run on the host. */
extern const kn_provider kn_emulated_kernels;

/* Until the next emulated_allow_all, kernels may access only memory that was allowed since then
 * (and scratch, tables and shared memory). */
KN_API void emulated_allow(const void *p, size_t bytes);
KN_API void emulated_allow_all(void);

/* The GPU has n multiprocessors from now on; 2 at the start. For the emulator's own runtime. */
KN_API void emulated_multiprocessors(int n);

/* kn_cuda_draw_key, which is no kernel of the table, run on the host. */
KN_API kn_status emulated_draw_key(uint64_t *to, uint64_t *offset, uint64_t seed,
                                   const uint64_t *seed_at, uint64_t stream);

/* The runtime that gives kernels streams and memory; kernels/cuda/kernels/cuda.cuh describes its
 * functions. record: true if the running launch's stream is being recorded; run(arg) then becomes a
 * part of the recording and drop(arg) ends it (run NULL: only the answer). The emulator's default
 * runtime has no streams. */
struct kn_cuda_flag;
typedef struct emulated_runtime {
    void *(*stream)(void);
    kn_status (*launched)(const char *kernel);
    int (*multiprocessors)(void);
    void *(*scratch)(size_t bytes);
    const void *(*table)(const void *host, size_t bytes);
    struct kn_cuda_flag *(*flags)(void);
    bool (*record)(void (*run)(void *), void (*drop)(void *), void *arg);
} emulated_runtime;
KN_API void emulated_use(const emulated_runtime *r);

#ifdef __cplusplus
}
#endif
#endif
