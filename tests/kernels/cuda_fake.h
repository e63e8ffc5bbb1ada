/* tests/kernels/cuda_fake.h: the CUDA runtime's functions over host memory, linked in place of the real ones:
 * device memory is malloc's, a stream does everything at once, kernels are the emulated ones. So all of the
 * CUDA device but the GPU runs on any machine. */
#ifndef KNAP_TESTS_CUDA_FAKE_H
#define KNAP_TESTS_CUDA_FAKE_H

#include <stdbool.h>
#include <stddef.h>

/* What the machine has, and what was asked of it. */
typedef struct cuda_fake {
    int devices;    /* 0: cudaErrorNoDevice */
    size_t memory;  /* bytes of one device */
    bool capturing; /* every stream is being recorded */
    bool lost;      /* from now on kernels have failed */
    size_t live;    /* bytes of cudaMalloc that are out */
    int mallocs, frees, events, streams;
    int waits; /* calls in which the host waits for the device: synchronising, taking and giving memory */
    int pageable; /* copies from or to memory that isn't page-locked: they may wait */
    int late; /* an event is done only when so many others were recorded after it, or was waited for */
    int device; /* that was chosen */
} cuda_fake;

extern cuda_fake fake;

/* A machine with one device, whose own layer is the emulated one; cuBLASLt and cuDNN stay out. */
void fake_begin(void);

#endif
