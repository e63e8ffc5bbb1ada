/* fsdp/record.h: a recording: the streams of events of all ranks (kernels/trace.h) on one clock,
 * with what the units hold, in one file of JSON lines (docs/recording.md). knap-report makes a
 * page of it, knap-diff compares two. Recording changes no bit and no order. */
#ifndef KNAP_FSDP_RECORD_H
#define KNAP_FSDP_RECORD_H

#include "fsdp/fsdp.h"
#include "kernels/trace.h"

#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_record_options {
    KN_BEGIN_OPTIONS;
    kn_comm *comm;       /* whose ranks are recorded; NULL: kn_world() */
    const char *command; /* for the file's first line; NULL: none */
    /* Also values: of each call's results, and of gradients and parameters where the optimizer
     * takes its step: eight elements and a digest. The host reads each tensor whole, which takes
     * time. */
    bool values;
} kn_record_options;
/* Records from now on what this context does with module, and writes it to path when it ends.
 * Once a context. Collective, as its end. */
KN_API bool kn_record_start_(void *module, const char *path, kn_record_options o);
#define kn_record_start(module, path, ...)                                                         \
    kn_record_start_(module, path, KN_OPTIONS(kn_record_options, __VA_ARGS__))
/* Ends it and writes the file; true without a recording. It ends also where an error stands, which
 * stays; ranks must agree on that. */
KN_API bool kn_record_stop(void);
/* A number of a step for the recording: "loss", "lr", "norm". Nothing without one. */
KN_API void kn_record_number(int64_t step, const char *name, double value);

/* The schedule of a step in one line: of events (kn_trace_stop) that have calls, verbs and kernels.
 * "g0 F0 g1 F1 B1 s1": g gathers a unit, F and B begin its forward and its backward, s reduces its
 * gradients. Units are called by the rest of their path where they differ, the root "root". Into
 * text of size bytes, which it returns. */
KN_API char *kn_explain_line(const kn_trace_event *event, size_t events, char *text, size_t size);
/* The same step as sentences, one an event, with bytes, times and causes; unit: of this one alone
 * (its path); NULL: of all. */
KN_API void kn_explain(FILE *out, const kn_trace_event *event, size_t events, const char *unit);

#ifdef __cplusplus
}
#endif
#endif
