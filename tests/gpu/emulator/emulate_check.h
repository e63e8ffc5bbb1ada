/* tests/gpu/emulator/emulate_check.h (private): what the emulator's two halves know of each other:
 * emulate.cc runs the threads, emulate_check.cc sees what they access. */
#ifndef KNAP_KERNELS_CUDA_EMULATE_CHECK_H
#define KNAP_KERNELS_CUDA_EMULATE_CHECK_H

#include "tests/gpu/emulator/emulated.h"

/* Who runs, and after how many barriers. Blocks are numbered through the program. */
struct kn_emulated_thread {
    bool runs, atomic, watched; /* watched: the launch's arrays are known */
    const char *kernel;
    uint32_t launch, block; /* the first block of the launch, and this one; from 1 */
    uint16_t thread, block_round;
    uint32_t warp_round;
    struct {
        const char *begin, *end;
    } stack[2]; /* its own, and the one of who launched */
    size_t dynamic,
        fixed; /* bytes of shared memory: asked for, and of KN_SHARED written by this block */
};
extern kn_emulated_thread kn_emulated_now;

/* A launch begins. */
void kn_emulated_begin(void);
/* Memory that kernels may use beside the call's arrays; `unwritten`: nobody may read it before it
 * is written. Of each slot the last one counts. */
enum { KN_EMULATED_SCRATCH = 0, KN_EMULATED_TABLE, KN_EMULATED_FLAG, KN_EMULATED_SLOTS };
void kn_emulated_memory(int slot, const void *p, size_t bytes, bool unwritten);

/* Ends the program with a sentence about the running kernel. */
[[noreturn]] void kn_emulated_stop(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
