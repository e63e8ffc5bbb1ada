/* kernels/cpu/cpu_internal.h (private): shared by the files of the CPU device. */
#ifndef KNAP_KERNELS_CPU_INTERNAL_H
#define KNAP_KERNELS_CPU_INTERNAL_H

#include "kernels/kernels_internal.h"

kn_memory *kn_cpu_memory(void);
void kn_cpu_trim(void);

/* The vector overlay of the instruction set in use. */
const kn_provider *kn_cpu_overlay(void);
/* Whether it multiplies pairs of bf16 by an instruction of the CPU (AVX512_BF16). */
bool kn_cpu_multiplies_pairs(void);
/* The same, once a kernel runs, for a look in an inner loop. */
extern bool kn_cpu_pairs;
/* Whether the CPU has one for matrices of bf16 (AMX), which oneDNN uses. */
bool kn_cpu_multiplies_matrices(void);
/* Whether oneDNN is asked for this product before the overlay (choose.c). */
bool kn_cpu_onednn_first(const kn_matmul_args *x);

/* ---- streams and events (stream.c, event.c) ----------------------------------------------- */

#define KN_JOB_BYTES 4096 /* largest argument struct that a stream copies */
#define KN_JOBS      64   /* jobs that wait in a worker's queue before the launcher has to */

typedef struct kn_cpu_stream kn_cpu_stream;

typedef enum kn_job_kind { KN_JOB_KERNEL, KN_JOB_HOST, KN_JOB_WAIT, KN_JOB_STOP } kn_job_kind;

typedef struct kn_job {
    kn_job_kind kind;
    kn_kernel kernel;
    kn_host_fn fn;
    char what[96];
    kn_cpu_stream *other; /* WAIT: until this stream has done other_seq jobs; a reference */
    uint64_t other_seq;
    const char *file; /* the user's line that launched it */
    int line;
    double issued; /* while tracing: when it entered */
    _Alignas(max_align_t) char args[KN_JOB_BYTES];
} kn_job;

/* Jobs are numbered from 1 in the order they enter. An event is (stream, number): it has happened
 * when the stream has done that many jobs. The lock and the counters outlive the stream until the
 * last event lets go. */
struct kn_cpu_stream {
    kn_stream base;
    _Atomic int refs;
    bool worker, took_core;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t arrived; /* the worker sleeps here */
    pthread_cond_t moved;   /* all threads that wait for the worker sleep here */
    int waiting;            /* how many sleep on moved */
    uint64_t entered, done; /* job numbers */
    kn_job *job;            /* ring of KN_JOBS; NULL on an inline stream */
};

kn_stream *kn_cpu_stream_create(const char *name, kn_stream_kind kind);
void kn_cpu_stream_destroy(kn_stream *s);
bool kn_cpu_stream_is_inline(const kn_stream *s);
bool kn_cpu_stream_sync(kn_stream *s);
bool kn_cpu_stream_host(kn_stream *s, const char *what, kn_host_fn fn, const void *arg,
                        size_t size);
bool kn_cpu_launch(kn_stream *s, kn_kernel k, const void *args, size_t size);

void kn_cpu_stream_hold(kn_cpu_stream *s);
void kn_cpu_stream_release(kn_cpu_stream *s);
/* The number of the last job that entered; on the stream's own worker, of the one that runs. */
uint64_t kn_cpu_stream_seq(kn_cpu_stream *s);
/* The host sleeps until s has done seq jobs: a wait of the trace. */
void kn_cpu_stream_host_waits(kn_cpu_stream *s, uint64_t seq);
bool kn_cpu_stream_past(kn_cpu_stream *s, uint64_t seq);
/* s waits for other: as a job on a worker, at once on the caller for an inline stream. */
void kn_cpu_stream_wait(kn_cpu_stream *s, kn_cpu_stream *other, uint64_t seq);

kn_event *kn_cpu_event_create(void);
void kn_cpu_event_destroy(kn_event *e);
bool kn_cpu_event_record(kn_event *e, kn_stream *s);
bool kn_cpu_event_wait(kn_event *e, kn_stream *s);
bool kn_cpu_event_sync(kn_event *e);
bool kn_cpu_event_done(kn_event *e);

#endif
