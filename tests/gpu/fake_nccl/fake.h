/* tests/gpu/fake_nccl/fake.h: a library with NCCL's functions on fake CUDA
 * (tests/gpu/fake_cuda/fake.h): named in KNAP_NCCL, it is opened in the place of libnccl.so.2.
 * Ranks are processes of one machine; they move bytes through a file in /dev/shm that is named
 * after the unique id. Every call returns before it is done. Calls that NCCL forbids (while another
 * is in progress, after an abort, ...) end the process. */
#ifndef KNAP_TESTS_NCCL_PRETENDED_H
#define KNAP_TESTS_NCCL_PRETENDED_H

#include <stddef.h>

typedef struct fake_nccl {
    /* of fake_cuda/fake.h: the library doesn't see the program's */
    void (*launch)(void *stream, void (*work)(void *arg), void *arg);
    /* what to do wrong */
    int polls;         /* ncclInProgress this often, after each call */
    int async_error;   /* what ncclCommGetAsyncError reports from now on */
    int fail_register; /* ncclCommRegister fails */
    int fail_memory;   /* ncclMemAlloc fails */
    int slow_abort_ms; /* an abort takes this long */
    /* what it was asked for */
    int ids, inits, splits, finalizes, destroys, aborts;
    int enrolled, dismissed;  /* registrations */
    int calls, calls_in_held; /* collectives; those whose buffers were all registered */
    size_t memory;            /* bytes of ncclMemAlloc that are out */
} fake_nccl;

#endif
