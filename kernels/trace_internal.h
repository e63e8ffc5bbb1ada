/* kernels/trace_internal.h (private): what writers of traces share. */
#ifndef KNAP_KERNELS_TRACE_INTERNAL_H
#define KNAP_KERNELS_TRACE_INTERNAL_H

#include "kernels/trace.h"
#include <stdio.h>
#include <string.h>

/* text in quotes, as JSON has it: with escapes of quotes and control characters. */
void kn_json_string(FILE *f, const char *text);

/* This thread's events aren't kept while it reads what is none of the program's work. */
void kn_trace_mute(bool mute);

/* A collective on a stream of the host runs in a function of the host, whose event says no more
 * than the collective's own. */
static inline bool kn_trace_wraps(const kn_trace_event *e)
{
    return e->kind == KN_TRACE_RUN && strcmp(e->provider, "host") == 0 &&
           strcmp(e->what, "collective") == 0;
}

#endif
