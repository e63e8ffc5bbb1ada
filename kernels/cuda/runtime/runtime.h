/* kernels/cuda/runtime/runtime.h (private): what the C files of the CUDA device share, and what the
 * communicators over NCCL need of it. */
#ifndef KNAP_KERNELS_CUDA_RUNTIME_H
#define KNAP_KERNELS_CUDA_RUNTIME_H

#include "kernels/cuda/runtime/pool.h"
#include "kernels/kernels_internal.h"

#include <cuda_runtime_api.h>
#include <stdatomic.h>

/* ---- the device (runtime.c) ------------------------------------------------------------------ */

/* One GPU a process: KNAP_CUDA_DEVICE, or LOCAL_RANK modulo their number, or 0. false with one
 * sentence where there is no driver, no GPU, or none of that index. */
bool kn_cuda_open(void);
bool kn_cuda_usable(void); /* the same without an error */
int kn_cuda_index(void);
int kn_cuda_arch(void); /* 90 for compute capability 9.0 */
/* The GPU reads host memory that isn't page-locked by itself, in its own time (HMM, ATS). */
bool kn_cuda_reads_pageable(void);
/* true for cudaSuccess; else false with an error: "what: CUDA says ...". */
bool kn_cuda_check(cudaError_t e, const char *what);
/* May this stream's work be recorded into a graph at the moment? */
bool kn_cuda_capturing(cudaStream_t s);

/* ---- streams (stream.c) ---------------------------------------------------------------------- */

#define KN_GPU_CHUNKS 4

/* Host and device halves of tables on their way (kn_cuda_table). */
typedef struct kn_gpu_ring {
    char *host, *device;
    size_t chunk, used; /* bytes a chunk; bytes used of the current one */
    int at;
    cudaEvent_t left[KN_GPU_CHUNKS]; /* the copies out of a chunk are done */
} kn_gpu_ring;

typedef struct kn_gpu_timed {
    cudaEvent_t begin, end;
    char what[96], provider[16], path[96]; /* path, backward: of the call that launched it */
    bool backward;
    double flops, bytes;
} kn_gpu_timed;

typedef struct kn_gpu_memory kn_gpu_memory;

typedef struct kn_gpu_stream {
    kn_stream base;
    cudaStream_t handle;
    bool compute;          /* its context's compute stream, which owns the pool */
    kn_gpu_memory *memory; /* the context's pool */
    void *scratch;
    size_t scratch_bytes;
    bool scratch_recorded; /* lies in the arena of the graph that is being recorded */
    kn_gpu_ring ring;
    void *flag;            /* kn_cuda_flag in device memory */
    void *flag_host;       /* where it is read to: page-locked */
    cudaEvent_t flag_read; /* NULL: nothing was asked for */
    /* tracing */
    cudaEvent_t base_event; /* recorded at base_time; NULL: none yet */
    double base_time;
    kn_gpu_timed *timed; /* KN_GPU_TIMED of them, made at first use */
    int timed_count;
} kn_gpu_stream;

#define KN_GPU_TIMED 8192

kn_stream *kn_gpu_stream_create(const char *name, kn_stream_kind kind);
void kn_gpu_stream_destroy(kn_stream *s);
bool kn_gpu_stream_is_inline(const kn_stream *s);
bool kn_gpu_stream_sync(kn_stream *s);
bool kn_gpu_stream_look(kn_stream *s);
bool kn_gpu_stream_host(kn_stream *s, const char *what, kn_host_fn fn, const void *arg,
                        size_t size);
bool kn_gpu_launch(kn_stream *s, kn_kernel k, const void *args, size_t size);
bool kn_gpu_transfer(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way, bool held);
/* Later work on `after` waits for what was launched on `before`. */
bool kn_gpu_order(cudaStream_t before, cudaStream_t after);
/* Copies bytes of the host to the device, in the stream's order; they may change once this returns.
 * Waits only where the host is far ahead. */
bool kn_gpu_send(kn_gpu_stream *s, void *to, const void *host, size_t bytes);
/* Gives back all that kn_cuda_scratch, kn_cuda_table and kn_cuda_flags took (scratch.c). */
void kn_gpu_scratch_end(kn_gpu_stream *s);
/* The stream of the running kn_launch in this thread, or NULL. */
kn_gpu_stream *kn_gpu_current(void);
/* For work that other files put onto a stream (collectives): times it where the context is
 * tracing. */
void kn_gpu_trace_begin(kn_stream *s);
void kn_gpu_trace_end(kn_stream *s, const char *what, const char *provider, double flops,
                      double bytes);
/* Waits for the stream and enters what was timed into the trace. */
void kn_gpu_trace_flush(kn_stream *s);

/* A way to compute something: run launches it once on the running stream, or declines. */
typedef struct kn_gpu_way {
    kn_status (*run)(void *arg);
    void *arg;
    double us; /* the median of its times; INFINITY where it declines */
} kn_gpu_way;
/* Times ways on the stream of the running launch, which must not be recorded: all of them in turn,
 * several times, each with a cold L2 cache, for which the stream's scratch is overwritten: it grows
 * to the cache's size and stays so. The host waits. False with an error. */
bool kn_gpu_time_ways(kn_gpu_way *way, int count);

/* ---- events (event.c) ------------------------------------------------------------------------ */

/* From a pool of the process; timing events can be subtracted. NULL with an error. */
cudaEvent_t kn_gpu_event_take(bool timing);
void kn_gpu_event_give(cudaEvent_t e, bool timing);
/* The host waits for what was recorded, unless it is done; then the trace says so. */
bool kn_gpu_await(cudaEvent_t e, const char *what);
/* Asks: false where it isn't done. */
bool kn_gpu_event_over(cudaEvent_t e);
kn_event *kn_gpu_event_create(void);
void kn_gpu_event_destroy(kn_event *e);
bool kn_gpu_event_record(kn_event *e, kn_stream *s);
bool kn_gpu_event_wait(kn_event *e, kn_stream *s);
bool kn_gpu_event_sync(kn_event *e);
bool kn_gpu_event_done(kn_event *e);

/* ---- memory (memory.c) ----------------------------------------------------------------------- */

/* A pool of its own for each context: its blocks belong to the order of that context's compute
 * stream. Who uses a block on a side stream lets the side stream wait for the compute stream first,
 * and the compute stream for the side stream's event before the block is given back. */
kn_gpu_memory *kn_gpu_memory_begin(void);
/* The pool's owner ends; the pool itself ends with its last block and the last recorded step. */
void kn_gpu_memory_end(kn_gpu_memory *m);
kn_memory *kn_gpu_memory_of(kn_gpu_memory *m);
kn_memory *kn_gpu_device_memory(void); /* of this thread's context */
void kn_gpu_trim(void);
kn_memory *kn_gpu_pinned_memory(void);
/* GPU memory of this context from another source, in a pool of its own; ended by kn_gpu_memory_end.
 * A recorded step keeps what it uses of it, as it does of the first. NULL with an error. */
kn_gpu_memory *kn_gpu_memory_more(const char *name, kn_gpu_pool_source source);

/* ---- libraries (load.c) ---------------------------------------------------------------------- */

typedef struct kn_cuda_symbol {
    const char *name;
    void *to; /* the function pointer to fill */
    bool optional;
} kn_cuda_symbol;

/* A library that a library opens by itself, once it is used. */
typedef struct kn_cuda_part {
    const char *soname;
    bool of_cuda;  /* soname ends in the number of the CUDA that the library was made for */
    bool optional; /* the library works without it, in part; else it ends the process */
} kn_cuda_part;

/* The text of a macro's number, for a SONAME. */
#define KN_CUDA_NUMBER_AS(x) #x
#define KN_CUDA_NUMBER(x)    KN_CUDA_NUMBER_AS(x)

/* Its SONAME has the number of the headers that this build was made with. A kernel that needs one
 * that isn't there declines, so that the next provider takes it (kn_cuda_lacks says so). */
typedef struct kn_cuda_library {
    const char *name, *soname;
    const char *variable; /* of the environment, with another path; or NULL */
    const char *versions; /* its function that tells its version, as 130100 for 13.1.0; or NULL */
    int least;            /* the oldest version that fits */
    const char *without;  /* what computes without it */
    const char *cuda;     /* its function that tells its CUDA, as 13010 for 13.1; or NULL */
    kn_cuda_part part[4]; /* up to the first without a name, those of_cuda last */
    const kn_cuda_symbol *symbols;
    int count;
    /* known once it was looked for */
    _Atomic bool looked;
    bool there;
    int version;
    char lack[256];    /* why it isn't there */
    char missing[128]; /* why an optional part isn't; empty: all are */
} kn_cuda_library;

extern kn_cuda_library kn_cublaslt_library;
extern kn_cuda_library kn_cudnn_library; /* never there in a build without cuDNN */
#define KN_WITHOUT_CUDNN                                                                           \
    "attention, convolutions and batch norm run on Knap's kernels, without tensor cores"

/* Opens it where the system, CUDA_HOME, CUDA_PATH, CONDA_PREFIX or /usr/local/cuda has it, and its
 * parts there or beside it; all stay open. false without an error where one isn't there, is too old
 * or lacks a function. */
bool kn_cuda_library_open(kn_cuda_library *l);
const char *kn_cuda_version_text(int v, char text[32]); /* "13.1.0" */
/* A line on stderr, of rank 0, where *told isn't set yet: a computation goes on, slower than it
 * should. */
__attribute__((format(printf, 2, 3))) void kn_cuda_tell(_Atomic bool *told, const char *format,
                                                        ...);

/* ---- providers (providers.c) ----------------------------------------------------------------- */

extern const kn_provider kn_cuda_cublaslt, kn_cuda_cudnn;
/* The last provider: kn_cuda_kernels, or the emulated one where a test puts it here. */
extern const kn_provider *kn_cuda_own_provider;
int kn_cuda_providers(const kn_provider *out[KN_MAX_PROVIDERS]);
/* Options of the products and of attention, process-wide. */
kn_products kn_cuda_f32_products(void);
bool kn_cuda_is_deterministic(void);
/* The set of kn_cuda_epilogues. */
enum { KN_EPILOGUE_BGRAD = 1, KN_EPILOGUE_DGELU = 2, KN_EPILOGUES_TIMED = 4 };
unsigned kn_cuda_epilogues_chosen(void);
/* KNAP_CUDA_SM_TARGET: multiprocessors that products are made for, so that collectives beside them
 * have the rest; 0: all. */
int kn_cuda_sm_target(void);

#endif
