/* kernels/stream.h: streams, events, copies, threads. */
#ifndef KNAP_KERNELS_STREAM_H
#define KNAP_KERNELS_STREAM_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- streams --------------------------------------------------------------------------------- */

/* A stream runs its launches in order. CPU: the compute stream runs inline on the caller; a side
 * stream is a worker thread if a core is free, else inline. Meta: a virtual clock. Kernels launched
 * on a worker copy their argument structs, not the bytes they point at. */
typedef struct kn_stream kn_stream;
typedef struct kn_event kn_event;

typedef enum kn_stream_kind {
    KN_STREAM_AUTO = 0, /* worker if this rank has a core left over, else inline */
    KN_STREAM_INLINE,
    KN_STREAM_WORKER,
    KN_STREAM_HOST /* the host's own computation; on meta its time is the host's */
} kn_stream_kind;

KN_API kn_stream *kn_compute_stream(kn_device d); /* of this thread's context; borrowed */
KN_API kn_stream *kn_stream_create(kn_device d, const char *name, kn_stream_kind kind);
KN_API void kn_stream_destroy(kn_stream *s); /* waits for all launches */
KN_API kn_device kn_stream_device(const kn_stream *s);
KN_API bool kn_stream_is_inline(const kn_stream *s);
KN_API const char *kn_stream_name(const kn_stream *s);
KN_API bool kn_stream_sync(kn_stream *s); /* blocks; false if an error stands afterwards */
/* Some kernels can't stop for an error in their inputs (a bad index, a bad target): the device
 * notes it, and kn_stream_sync reports it. This function reports the errors of the context's
 * compute streams known so far, requests the rest, and doesn't block; kn_step calls it. False if an
 * error stands afterwards. */
KN_API bool kn_streams_look(void);
/* Runs fn(copy of arg) on the stream, in order. fn reports errors with kn_fail. */
typedef void (*kn_host_fn)(void *arg);
KN_API bool kn_stream_host(kn_stream *s, const char *what, kn_host_fn fn, const void *arg,
                           size_t size);

/* Copies bytes on stream s, in its order: from the host to the stream's device, back, or within the
 * device. held: the caller keeps the host's bytes as they are until the stream is past the copy, so
 * nothing waits (memory of kn_pinned_memory; from other memory copies to the host are waited for).
 * Not held: host bytes that are read may change once this returns. Host bytes that are written are
 * there when the stream is past the copy. */
typedef enum kn_way { KN_TO_DEVICE = 0, KN_TO_HOST, KN_WITHIN } kn_way;
KN_API bool kn_transfer(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way,
                        bool held);

KN_API kn_event *kn_event_create(kn_device d);
KN_API void kn_event_destroy(kn_event *e);
KN_API bool kn_event_record(kn_event *e, kn_stream *s); /* re-recording replaces */
KN_API bool kn_event_wait(kn_event *e, kn_stream *s); /* s waits; never blocks a worker's caller */
KN_API bool kn_event_sync(kn_event *e); /* the caller waits; never-recorded: at once */
KN_API bool kn_event_done(kn_event *e);

/* ---- threads --------------------------------------------------------------------------------- */

/* Threads that share a kernel's work, this thread among them: 1 to 4096; 0: 1. An error otherwise.
 * Stream workers share nothing: on them it does nothing, and kn_threads gives 1. */
KN_API void kn_set_threads(int n);
KN_API int kn_threads(void);
KN_API void kn_set_free_cores(int n); /* cores left over for stream workers (set by kn_init) */

#ifdef __cplusplus
}
#endif
#endif
