/* kernels/cuda/runtime/timing.c: when kernels ran, by the GPU's own clock: an event before and one
 * after each while tracing. Their times are read when the stream has been waited for, and placed on
 * the host's clock by an event whose host time is known. */
#include "kernels/trace.h"
#include "kernels/cuda/runtime/runtime.h"

#include <stdio.h>

#define STALE 10.0 /* seconds: a float of milliseconds since then would be too coarse */

/* Ties the two clocks together; waits for the stream. */
static bool tie(kn_gpu_stream *s)
{
    if (!s->base_event)
        s->base_event = kn_gpu_event_take(true);
    if (!s->base_event || cudaEventRecord(s->base_event, s->handle) != cudaSuccess ||
        cudaEventSynchronize(s->base_event) != cudaSuccess)
        return false;
    s->base_time = kn_now();
    return true;
}

static double time_of(const kn_gpu_stream *s, cudaEvent_t e)
{
    float ms = 0;
    cudaEventElapsedTime(&ms, s->base_event, e);
    return s->base_time + 1e-3 * ms;
}

void kn_gpu_trace_begin(kn_stream *stream)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    if (kn_cuda_capturing(s->handle))
        return;
    if (s->timed_count == KN_GPU_TIMED)
        kn_gpu_trace_flush(stream);
    if (!s->timed)
        s->timed = kn_host_calloc(KN_GPU_TIMED, sizeof *s->timed);
    if (!s->timed)
        return;
    if (s->timed_count == 0 && (!s->base_event || kn_now() - s->base_time > STALE) && !tie(s))
        return;
    kn_gpu_timed *t = &s->timed[s->timed_count];
    if (!t->begin)
        t->begin = kn_gpu_event_take(true);
    if (!t->end)
        t->end = kn_gpu_event_take(true);
    if (t->begin && t->end)
        cudaEventRecord(t->begin, s->handle);
}

void kn_gpu_trace_end(kn_stream *stream, const char *what, const char *provider, double flops,
                      double bytes)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    kn_gpu_timed *t = s->timed && s->timed_count < KN_GPU_TIMED ? &s->timed[s->timed_count] : NULL;
    if (!t || !t->begin || !t->end ||
        kn_cuda_capturing(s->handle)) { /* the host's time is better than none */
        double now = kn_now();
        kn_trace_add(what, provider, stream, now, now, flops, bytes);
        return;
    }
    cudaEventRecord(t->end, s->handle);
    snprintf(t->what, sizeof t->what, "%s", what);
    snprintf(t->provider, sizeof t->provider, "%s", provider);
    t->flops = flops;
    t->bytes = bytes;
    s->timed_count++;
}

void kn_gpu_trace_flush(kn_stream *stream)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    if (!s->timed || !kn_cuda_usable() || kn_cuda_capturing(s->handle))
        return;
    if (s->timed_count > 0)
        cudaEventSynchronize(s->timed[s->timed_count - 1].end);
    for (int i = 0; i < s->timed_count; i++) {
        kn_gpu_timed *t = &s->timed[i];
        kn_trace_add(t->what, t->provider, stream, time_of(s, t->begin), time_of(s, t->end),
                     t->flops, t->bytes);
    }
    for (int i = 0; i < KN_GPU_TIMED && s->timed[i].begin; i++) {
        kn_gpu_event_give(s->timed[i].begin, true);
        kn_gpu_event_give(s->timed[i].end, true);
        s->timed[i].begin = s->timed[i].end = NULL;
    }
    s->timed_count = 0;
    kn_gpu_event_give(s->base_event, true);
    s->base_event = NULL;
}
