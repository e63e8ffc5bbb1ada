/* kernels/cuda/runtime/timing.c: when kernels ran, by the GPU's own clock: an event before and one
 * after each, while tracing, and while several ways to compute the same are compared. Of a trace,
 * times are read when the stream has been waited for, and placed on the host's clock by an event
 * whose host time is known. */
#include "kernels/trace.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#define STALE 10.0 /* seconds: a float of milliseconds since then would be too coarse */
#define TIMES 7    /* of each way; the median isn't that of a clock that just changed */

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
    snprintf(t->path, sizeof t->path, "%s",
             kn_context_is_worker() ? "" : kn_context_path(stream->context));
    t->backward = stream->context->engine != NULL;
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
        kn_trace_put(stream, (kn_trace_event){ .what = t->what,
                                               .provider = t->provider,
                                               .path = t->path,
                                               .backward = t->backward,
                                               .begin = time_of(s, t->begin),
                                               .end = time_of(s, t->end),
                                               .flops = t->flops,
                                               .bytes = t->bytes });
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

/* ---- ways to compute the same ---------------------------------------------------------------- */

/* What lies in the L2 cache is replaced. The host is ahead of the GPU while that is written, so
 * that the time between the events has no launch in it. */
static bool cool(cudaStream_t s)
{
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, kn_cuda_index());
    void *room = kn_cuda_scratch((size_t)bytes);
    return room && kn_cuda_check(cudaMemsetAsync(room, 0, (size_t)bytes, s), "emptying a cache");
}

/* Microseconds; INFINITY: it declines; below 0: an error. */
static double time_once(const kn_gpu_way *w, cudaStream_t s, cudaEvent_t begin, cudaEvent_t end)
{
    float ms = 0;
    if (!cool(s) || !kn_cuda_check(cudaEventRecord(begin, s), "timing"))
        return -1;
    kn_status status = w->run(w->arg);
    if (status != KN_DONE)
        return status == KN_DECLINED ? INFINITY : -1;
    if (!kn_cuda_check(cudaEventRecord(end, s), "timing") ||
        !kn_cuda_check(cudaEventSynchronize(end), "timing") ||
        !kn_cuda_check(cudaEventElapsedTime(&ms, begin, end), "timing"))
        return -1;
    return 1e3 * (double)ms;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

bool kn_gpu_time_ways(kn_gpu_way *way, int count)
{
    cudaStream_t s = (cudaStream_t)kn_cuda_stream();
    cudaEvent_t begin = kn_gpu_event_take(true), end = kn_gpu_event_take(true);
    double(*us)[TIMES] = kn_host_alloc((size_t)count * sizeof *us);
    bool ok = begin && end && us;
    for (int t = -1; ok && t < TIMES; t++) /* once before that counts: kernels are loaded then */
        for (int i = 0; ok && i < count; i++) {
            double took =
                t >= 0 && us[i][0] == INFINITY ? INFINITY : time_once(&way[i], s, begin, end);
            us[i][t < 0 ? 0 : t] = took;
            ok = took >= 0;
        }
    for (int i = 0; ok && i < count; i++) {
        qsort(us[i], TIMES, sizeof *us[i], compare);
        way[i].us = us[i][TIMES / 2];
    }
    kn_host_free(us);
    kn_gpu_event_give(begin, true);
    kn_gpu_event_give(end, true);
    return ok;
}
