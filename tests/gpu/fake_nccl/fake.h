/* tests/gpu/fake_nccl/fake.h: a library with NCCL's functions on fake CUDA
 * (tests/gpu/fake_cuda/fake.h): KNAP_NCCL names it, so that Knap opens it instead of libnccl.so.2.
 * Ranks are processes of one machine; they exchange bytes through a file in /dev/shm named after
 * the unique id. Calls return what the chosen version of NCCL returns (returns.c). Calls that NCCL
 * forbids (while another is in progress, after an abort, ...) end the process. */
#ifndef KNAP_TESTS_NCCL_PRETENDED_H
#define KNAP_TESTS_NCCL_PRETENDED_H

#include <stdbool.h>
#include <stddef.h>

typedef struct fake_nccl {
    /* functions of fake_cuda/fake.h, which the library can't link */
    void (*launch)(void *stream, void (*work)(void *arg), void (*drop)(void *arg), void *arg);
    bool (*recording)(void *stream);
    void (*gpu)(char *bus_id, int length); /* where the chosen GPU is */
    int version;                           /* as ncclGetVersion gives it */
    /* faults to inject */
    int polls;         /* a thread of NCCL is in progress for so many looks */
    int busy_us;       /* and for so long */
    int async_error;   /* result of ncclCommGetAsyncError from now on */
    int fail_register; /* ncclCommRegister fails */
    int fail_memory;   /* ncclMemAlloc fails */
    int slow_abort_ms; /* an abort takes this long */
    /* counts of calls */
    int ids, inits, splits, finalizes, destroys, aborts;
    int threads;              /* of NCCL, one for each call that it doesn't do by itself */
    int connected;            /* pairs of ranks that have buffers for sends and receives */
    int enrolled, dismissed;  /* registrations */
    int calls, calls_in_held; /* collectives; those whose buffers were all registered */
    size_t memory;            /* bytes of ncclMemAlloc in use */
} fake_nccl;

#endif
