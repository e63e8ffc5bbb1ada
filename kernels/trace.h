/* kernels/trace.h: events of kernels, with provider and time, kept for reading, or for a Chrome
 * trace file. */
#ifndef KNAP_KERNELS_TRACE_H
#define KNAP_KERNELS_TRACE_H

#include "kernels/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_trace_event {
    const char *what;     /* "matmul", "all_gather transformer.h.0", ... */
    const char *provider; /* which kernel provider ran it: "avx2", "onednn", "reference", ... */
    const char *stream;   /* stream name */
    double begin, end;    /* seconds (virtual on meta) */
    double flops, bytes;
} kn_trace_event;

KN_API void kn_trace_start(size_t capacity); /* keeps the last capacity events of this context */
KN_API size_t kn_trace_stop(kn_trace_event **events); /* caller frees with kn_host_free */
KN_API void kn_trace_add(const char *what, const char *provider, const kn_stream *s, double begin,
                         double end, double flops, double bytes);
KN_API bool kn_tracing(void);
KN_API bool kn_trace_write(const char *path); /* Chrome trace JSON of the events kept so far */
KN_API double kn_now(void);                   /* monotonic seconds */

#ifdef __cplusplus
}
#endif
#endif
