/* kernels/trace.h: what a context did, as one stream of events: kernels, waits, calls of
 * modules, the verbs of a schedule, bytes that come and go. It is kept for reading
 * (kn_trace_stop), for a Chrome trace file (kn_trace_write), and for a recording of all ranks
 * (fsdp/record.h). Watching changes no bit and no order. */
#ifndef KNAP_KERNELS_TRACE_H
#define KNAP_KERNELS_TRACE_H

#include "kernels/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kn_trace_kind {
    KN_TRACE_RUN = 0, /* ran on a stream: a kernel, a copy, a collective, a function of the host */
    KN_TRACE_WAIT,    /* a stream, or the host, waited for another */
    KN_TRACE_CALL,    /* a module's forward or backward begins or ends */
    KN_TRACE_VERB,    /* the schedule of fsdp gathers, releases or reduces a unit */
    KN_TRACE_TAKE,    /* bytes of tensors were taken */
    KN_TRACE_GIVE,    /* they were given back */
    KN_TRACE_VALUE,   /* a tensor's values */
    KN_TRACE_STEP,    /* the optimizer took a step */
    KN_TRACE_NUMBER,  /* a number of the program's: its loss */
    KN_TRACE_KINDS
} kn_trace_kind;
/* "run", "wait", "call", "verb", "take", "give", "value", "step", "number". */
KN_API const char *kn_trace_kind_name(kn_trace_kind kind);

/* Words are never NULL; "" where there are none. */
typedef struct kn_trace_event {
    const char *what;     /* "matmul", "all_gather transformer.h.0", "gather", ... */
    const char *provider; /* which kernel provider ran it: "avx2", "onednn", "reference", ... */
    const char *stream;   /* its name; "host" */
    double begin, end;    /* seconds (virtual on meta) */
    double flops, bytes;
    kn_trace_kind kind;
    const char
        *path; /* of the module call that launched it; a verb's unit; of bytes: their owner */
    const char *detail; /* shapes and dtypes; a verb's cause; the ledger's category of bytes */
    const char *source; /* a verb's: the line that asked for it, "fsdp/schedule.c:52" */
    double issued;      /* a worker's job: when it was put into the queue; 0: at once */
    double number;      /* bytes: all that live after it; a step's: its number; a number */
    bool backward;      /* a backward ran */
} kn_trace_event;

/* Keeps the last capacity events of KN_TRACE_RUN of this context. */
KN_API void kn_trace_start(size_t capacity);
/* Keeps all events of these kinds, a sum of 1 << kind, until kn_trace_stop. clock: the device on
 * whose clock events are that ran on no stream: on KN_META the virtual one. */
KN_API void kn_trace_watch(unsigned kinds, kn_device clock);
KN_API size_t kn_trace_stop(kn_trace_event **events); /* caller frees with kn_host_free */
KN_API void kn_trace_add(const char *what, const char *provider, const kn_stream *s, double begin,
                         double end, double flops, double bytes);
/* Whether events of the kind are kept. */
KN_API bool kn_trace_sees(kn_trace_kind kind);
/* An event of any kind, if its kind is kept. Words are copied. s: where it ran; NULL: the host.
 * Where its time is left out, it is now; where its path is, that and backward are the running
 * call's. */
KN_API void kn_trace_put(const kn_stream *s, kn_trace_event e);
KN_API bool kn_tracing(void);                 /* events of KN_TRACE_RUN are kept */
KN_API bool kn_trace_write(const char *path); /* Chrome trace JSON of the events kept so far */
KN_API double kn_now(void);                   /* monotonic seconds */

#ifdef __cplusplus
}
#endif
#endif
