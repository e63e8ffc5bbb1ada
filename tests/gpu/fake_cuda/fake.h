/* tests/gpu/fake_cuda/fake.h: the CUDA runtime's functions over host memory, linked in place of the
 * real ones: device memory is malloc's, a stream runs its work at once, kernels are the emulated
 * ones. So the whole CUDA device except the GPU runs on any machine. Streams can be captured
 * (graph.c): the fake keeps their work with its dependencies, and a launch of the graph runs it in
 * an order that these allow. */
#ifndef KNAP_TESTS_CUDA_FAKE_H
#define KNAP_TESTS_CUDA_FAKE_H

#include <cuda_runtime_api.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The machine's properties, and counts of its use. */
typedef struct cuda_fake {
    int devices;         /* 0: cudaErrorNoDevice, or */
    cudaError_t missing; /* this */
    size_t memory;       /* bytes of one device */
    bool backwards;      /* replays run independent work from the last to the first */
    bool lost;           /* from now on kernels fail */
    bool reads_pageable; /* the device reads host memory itself, later; set before it is opened */
    _Atomic size_t live; /* bytes of cudaMalloc in use */
    int mallocs, frees, events, streams, graphs, launches;
    /* Calls in which the host waits for the device: synchronising, taking and giving memory. */
    int waits;
    int pageable; /* copies from or to memory that isn't page-locked: they may wait */
    int late;     /* an event is done only after this many later records, or after a wait */
    int device;   /* the chosen one */
    int driver;   /* the CUDA version that it is for, as cudaDriverGetVersion gives it */
    int hidden;   /* as many GPUs of the host come before the first that this process sees */
    const char *name;
} cuda_fake;

extern cuda_fake fake;

/* A machine with one device, whose own provider is the emulated one; without cuBLASLt and cuDNN. */
void fake_begin(void);

/* ---- between fake.c and graph.c ---- */

/* A piece of recorded work; its dependencies come before it. */
typedef struct fake_node {
    struct fake_node *next;
    void (*run)(void *arg);
    void (*drop)(void *arg);
    void *arg;
    struct fake_node **after;
    int afters, index;
    bool done;
} fake_node;

typedef struct CUgraph_st fake_graph;

/* Of a stream: its unfinished work; of an event: the work before it. */
enum { FAKE_OPS = 32 };
typedef struct fake_front {
    struct fake_op *op[FAKE_OPS];
    int count;
} fake_front;

struct CUstream_st {
    fake_front front;
    struct CUstream_st *next;
    fake_graph *capture; /* NULL: not recorded */
    fake_node *last;
};

struct CUevent_st {
    fake_front front;
    double time;
    int64_t number; /* of its recording, among all; 0: none, or waited for */
    long captured;  /* the capture in which it was recorded; 0: outside */
    fake_node *node;
};

/* Adds work to the capture of s. */
cudaError_t fake_add(cudaStream_t s, void (*run)(void *), void (*drop)(void *), void *arg);
#define FAKE_SHOWN __attribute__((visibility("default"))) /* fake_cublaslt.c looks for them */
/* emulated_runtime.record */
FAKE_SHOWN bool fake_record(void (*run)(void *), void (*drop)(void *), void *arg);
/* A call that waits or may wait: an error that ends the capture of s (NULL: of this thread). */
cudaError_t fake_waiting(cudaStream_t s);
cudaError_t fake_capture_record(cudaEvent_t e, cudaStream_t s);
cudaError_t fake_capture_wait(cudaStream_t s, cudaEvent_t e);
void fake_stream_begin(cudaStream_t s);
void fake_stream_end(cudaStream_t s);
/* For fake libraries: appends work(arg) to the stream; it runs on another thread after the stream's
 * present work, then drop(arg). In a capture it runs in each launch of the graph, and drop(arg)
 * when the graph goes. */
void fake_launch(void *stream, void (*work)(void *arg), void (*drop)(void *arg), void *arg);
FAKE_SHOWN void fake_wait(void *stream); /* until all its work is done */
/* The device's clock goes on, for events that come later. */
FAKE_SHOWN void fake_pass(double seconds);

#endif
