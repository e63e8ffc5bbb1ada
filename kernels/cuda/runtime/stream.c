/* kernels/cuda/runtime/stream.c: streams of the CUDA device. The compute stream and side streams
 * are CUDA streams that don't wait for the default stream; side streams have the higher priority,
 * so that collectives and copies start as soon as their data is there. Launching never waits for
 * the GPU. */
#include "kernels/trace.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local kn_gpu_stream *current;

kn_gpu_stream *kn_gpu_current(void)
{
    return current;
}

void *kn_cuda_stream(void)
{
    return current ? current->handle : NULL;
}

kn_status kn_cuda_launched(const char *kernel)
{
    cudaError_t e = cudaGetLastError();
    if (e == cudaSuccess)
        return KN_DONE;
    char name[64];
    kn_cuda_check(e, kn_cuda_plain(kernel, name, sizeof name));
    return KN_FAILED;
}

bool kn_gpu_order(cudaStream_t before, cudaStream_t after)
{
    if (before == after)
        return true;
    cudaEvent_t e = kn_gpu_event_take(false);
    if (!e)
        return false;
    bool ok = kn_cuda_check(cudaEventRecord(e, before), "recording an event") &&
              kn_cuda_check(cudaStreamWaitEvent(after, e, 0), "waiting for an event");
    if (kn_cuda_capturing(before)) /* CUDA takes no question about it until it is recorded again */
        cudaEventDestroy(e);
    else
        kn_gpu_event_give(e, false);
    return ok;
}

/* ---- launching ------------------------------------------------------------------------------- */

bool kn_gpu_launch(kn_stream *s, kn_kernel k, const void *args, size_t size)
{
    (void)size; /* kernels take what they need of args by value before this returns */
    if (!kn_cuda_open())
        return false;
    kn_gpu_stream *outer = current;
    current = (kn_gpu_stream *)s;
    bool ok = kn_run_providers(s, k, args);
    current = outer;
    return ok;
}

/* ---- host functions -------------------------------------------------------------------------- */

typedef struct host_job {
    kn_stream *stream;
    kn_host_fn fn;
    char what[96];
    const char *file; /* where the user launched it */
    int line;
    bool stays; /* recorded into a graph: runs again at each replay */
    _Alignas(max_align_t) char arg[];
} host_job;

/* On a thread of CUDA's, which must not call CUDA. Errors go to the stream's creator. */
static void run_host(void *arg)
{
    host_job *job = arg;
    kn_context_adopt(job->stream->context);
    kn_place_set(job->file, job->line);
    if (kn_ok()) {
        double begin = kn_now();
        job->fn(job->arg);
        if (kn_tracing())
            kn_trace_add(job->what, "host", job->stream, begin, kn_now(), 0, 0);
    }
    if (!job->stays)
        free(job);
}

bool kn_gpu_stream_host(kn_stream *stream, const char *what, kn_host_fn fn, const void *arg,
                        size_t size)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    if (!kn_cuda_open())
        return false;
    host_job *job = size > SIZE_MAX / 2 ? NULL : malloc(sizeof *job + size);
    if (!job)
        return kn_fail("%s: no memory for an argument of %zu bytes", what, size);
    *job = (host_job){ .stream = stream, .fn = fn, .stays = kn_gpu_recording(stream) != 0 };
    snprintf(job->what, sizeof job->what, "%s", what);
    kn_place_get(&job->file, &job->line);
    if (size > 0)
        memcpy(job->arg, arg, size);
    if (job->stays && !kn_gpu_keep((kn_gpu_kept){ .host = job })) {
        free(job);
        return false;
    }
    if (kn_cuda_check(cudaLaunchHostFunc(s->handle, run_host, job), what))
        return true;
    if (!job->stays)
        free(job);
    return false;
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Up to so many bytes go through page-locked memory of the stream; of more, CUDA takes them its own
 * way. */
#define SENT ((size_t)1 << 20)

static bool page_locked(const void *p)
{
    struct cudaPointerAttributes a;
    if (cudaPointerGetAttributes(&a, p) == cudaSuccess)
        return a.type == cudaMemoryTypeHost;
    cudaGetLastError();
    return false;
}

/* The host's bytes have been read. */
static bool await_read(kn_gpu_stream *s)
{
    double begin = kn_now();
    bool ok = kn_cuda_check(cudaStreamSynchronize(s->handle), "copying to the GPU");
    if (kn_tracing())
        kn_trace_add("wait for a copy", "host", NULL, begin, kn_now(), 0, 0);
    return ok;
}

/* A replay copies from and to the same host bytes again. */
static bool recordable(const void *host, bool held)
{
    return (held && page_locked(host)) ||
           !kn_unrecordable(KN_CUDA,
                            "a copy between host and device, whose bytes on the host are %s",
                            held ? "not page-locked" : "used for something else afterwards");
}

/* Of memory that isn't page-locked, CUDA takes the bytes before it returns, which may wait for the
 * stream; not so where the GPU reads the host's pages itself. */
bool kn_gpu_transfer(kn_stream *stream, void *dst, const void *src, size_t bytes, kn_way way,
                     bool held)
{
    static const struct {
        const char *what;
        enum cudaMemcpyKind kind;
    } ways[] = { [KN_TO_DEVICE] = { "copy to device", cudaMemcpyHostToDevice },
                 [KN_TO_HOST] = { "copy to host", cudaMemcpyDeviceToHost },
                 [KN_WITHIN] = { "copy within", cudaMemcpyDeviceToDevice } };
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    if (!kn_cuda_open() || (way != KN_WITHIN && !recordable(way == KN_TO_HOST ? dst : src, held)))
        return false;
    bool tracing = kn_tracing();
    if (tracing)
        kn_gpu_trace_begin(stream);
    bool sent = way == KN_TO_DEVICE && !held && bytes <= SENT;
    if (sent ? !kn_gpu_send(s, dst, src, bytes)
             : !kn_cuda_check(cudaMemcpyAsync(dst, src, bytes, ways[way].kind, s->handle),
                              ways[way].what))
        return false;
    if (tracing)
        kn_gpu_trace_end(stream, ways[way].what, "dma", 0, (double)bytes);
    if (way == KN_TO_DEVICE && !held && !sent && (page_locked(src) || kn_cuda_reads_pageable()))
        return await_read(s);
    return true;
}

/* ---- waiting --------------------------------------------------------------------------------- */

/* What kernels could not stop for: a bad target or index. The flag has been read to the host. */
static bool read_flag(kn_gpu_stream *s)
{
    kn_cuda_flag flag = *(kn_cuda_flag *)s->flag_host;
    if (flag.what == KN_FLAG_NONE)
        return true;
    cudaMemsetAsync(s->flag, 0, sizeof flag, s->handle);
    if (flag.what == KN_FLAG_TARGET)
        return kn_fail(
            "cross_entropy: target %lld in row %lld is outside the classes and not the ignored "
            "index; check the labels",
            flag.value, flag.where);
    return kn_fail("index_select or index_add: index %lld at position %lld is outside the dim",
                   flag.value, flag.where);
}

static bool ask_flag(kn_gpu_stream *s)
{
    return kn_cuda_check(cudaMemcpyAsync(s->flag_host, s->flag, sizeof(kn_cuda_flag),
                                         cudaMemcpyDeviceToHost, s->handle),
                         "reading the flag of bad values");
}

static void forget_flag(kn_gpu_stream *s)
{
    kn_gpu_event_give(s->flag_read, false);
    s->flag_read = NULL;
}

/* What the last look asked for has arrived by now, or is looked at by the next one. */
bool kn_gpu_stream_look(kn_stream *stream)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    if (!kn_cuda_usable() || !s->flag || kn_gpu_recording(stream))
        return kn_ok();
    if (s->flag_read) {
        if (!kn_gpu_event_over(s->flag_read))
            return kn_ok();
        forget_flag(s);
        if (!kn_ok() || !read_flag(s))
            return false;
    }
    if (!ask_flag(s) || !(s->flag_read = kn_gpu_event_take(false)))
        return false;
    return kn_cuda_check(cudaEventRecord(s->flag_read, s->handle), "recording an event");
}

bool kn_gpu_stream_sync(kn_stream *stream)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    char what[64];
    if (!kn_cuda_open())
        return false;
    snprintf(what, sizeof what, "wait for stream %s", stream->name);
    double begin = kn_now();
    bool ok = (!s->flag || ask_flag(s)) && kn_cuda_check(cudaStreamSynchronize(s->handle), what);
    forget_flag(s);
    if (kn_tracing()) {
        kn_trace_add(what, "host", NULL, begin, kn_now(), 0, 0);
        kn_gpu_trace_flush(stream);
    }
    return ok && (!s->flag || read_flag(s)) && kn_ok();
}

/* ---- life ------------------------------------------------------------------------------------ */

/* The context's pool, which comes and goes with its compute stream. */
static bool find_memory(kn_gpu_stream *s, kn_context *c)
{
    if (s->compute)
        s->memory = kn_gpu_memory_begin();
    else
        s->memory = ((kn_gpu_stream *)c->compute[KN_CUDA])->memory;
    return s->memory != NULL;
}

/* A stream that is made while a step is recorded: its launches are recorded as well. */
static bool join_recording(kn_gpu_stream *s)
{
    return !kn_gpu_recording(&s->base) ||
           kn_gpu_order(((kn_gpu_stream *)s->base.context->compute[KN_CUDA])->handle, s->handle);
}

kn_stream *kn_gpu_stream_create(const char *name, kn_stream_kind kind)
{
    (void)kind; /* the GPU runs all of them beside the host */
    kn_context *c = kn_context_get();
    bool compute = !c->compute[KN_CUDA] && strcmp(name, "compute") == 0;
    int low = 0, high = 0;
    if (!compute && !kn_compute_stream(KN_CUDA))
        return NULL;
    kn_gpu_stream *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->base = (kn_stream){ .table = &kn_cuda_device_table, .device = KN_CUDA, .context = c };
    snprintf(s->base.name, sizeof s->base.name, "%s", name);
    s->compute = compute;
    cudaDeviceGetStreamPriorityRange(&low, &high);
    if (!find_memory(s, c) ||
        !kn_cuda_check(
            cudaStreamCreateWithPriority(&s->handle, cudaStreamNonBlocking, compute ? low : high),
            "making a stream"))
        goto fail;
    kn_gpu_stream *outer =
        current; /* the flag is made now, not in the middle of recording a graph */
    current = s;
    bool ok = kn_cuda_flags() != NULL;
    current = outer;
    if (!ok || !join_recording(s))
        goto fail;
    return &s->base;
fail:
    kn_gpu_stream_destroy(&s->base);
    return NULL;
}

void kn_gpu_stream_destroy(kn_stream *stream)
{
    kn_gpu_stream *s = (kn_gpu_stream *)stream;
    if (!kn_cuda_usable()) /* in a child of a process that used CUDA: nothing here is ours */
        return;
    if (s->handle) {
        cudaStreamSynchronize(s->handle);
        kn_gpu_trace_flush(stream);
    }
    kn_gpu_scratch_end(s);
    if (s->handle)
        cudaStreamDestroy(s->handle);
    if (s->compute)
        kn_gpu_memory_end(s->memory);
    kn_host_free(s->timed);
    kn_host_free(s);
}

bool kn_gpu_stream_is_inline(const kn_stream *s)
{
    (void)s;
    return false;
}
