/* tests/gpu/emulator/emulate_check.h (private): the interface between the emulator's halves:
 * emulate.cc runs the threads, emulate_check.cc checks their accesses. */
#ifndef KNAP_KERNELS_CUDA_EMULATE_CHECK_H
#define KNAP_KERNELS_CUDA_EMULATE_CHECK_H

#include "tests/gpu/emulator/emulated.h"

/* The running thread and its number of passed barriers. Blocks are numbered through the program. */
struct kn_emulated_thread {
    bool watched; /* the launch's arrays are known */
    bool looks;   /* at the accesses of a thread that runs */
    bool atomic;
    const char *kernel;
    uint32_t launch, block; /* the first block of the launch, and this one; from 1 */
    uint16_t thread, block_round;
    uint32_t warp_round;
    struct {
        const char *begin;
        size_t bytes;
    } stack[2]; /* the fiber's, and the launching thread's */
    size_t dynamic,
        fixed; /* bytes of shared memory: requested, and of KN_SHARED written by this block */
};
extern kn_emulated_thread kn_emulated_now;

/* A launch begins. */
void kn_emulated_begin(void);
/* Memory that kernels may use besides the call's arrays; `unwritten`: it must be written before it
 * is read. The last call for a slot counts. */
enum { KN_EMULATED_SCRATCH = 0, KN_EMULATED_TABLE, KN_EMULATED_FLAG, KN_EMULATED_SLOTS };
void kn_emulated_memory(int slot, const void *p, size_t bytes, bool unwritten);

/* Ends the program with a message about the running kernel. */
[[noreturn]] void kn_emulated_stop(const char *fmt, ...) __attribute__((format(printf, 1, 2)));

#endif
