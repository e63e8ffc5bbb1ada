/* kernels/cuda/runtime/scratch.c: what kernels need beside their arguments, a set for each stream:
 * scratch memory, tables from the host, the flag. All of it is in the stream's order.
 *
 * Recording into a graph: memory is the graph's as all that is taken then (arena.c); each table
 * gets page-locked and device memory of its own, which every replay copies again. The recording
 * should be preceded by a step that isn't recorded, in which scratch grows. */
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/graph.h"
#include "kernels/memory_internal.h"

#include <stdlib.h>
#include <string.h>

#define GRAIN ((size_t)2 << 20)   /* scratch grows in steps of this */
#define CHUNK ((size_t)256 << 10) /* of the ring of tables, at first */

static bool running(const kn_gpu_stream *s, const char *what)
{
    return s || kn_fail("%s: outside of a launch", what);
}

static kn_gpu_stream *compute_of(kn_gpu_stream *s)
{
    kn_gpu_stream *c = (kn_gpu_stream *)s->base.context->compute[KN_CUDA];
    return c ? c : s;
}

/* Device memory that this stream may use at once. */
static void *take(kn_gpu_stream *s, size_t bytes)
{
    void *p = kn_take(kn_gpu_memory_of(s->memory), bytes, KN_MEM_WORKSPACE);
    if (p && !kn_gpu_order(compute_of(s)->handle, s->handle)) {
        kn_give(kn_gpu_memory_of(s->memory), p, bytes, KN_MEM_WORKSPACE);
        return NULL;
    }
    return p;
}

/* The compute stream may use it again once this stream is past it. */
static void give(kn_gpu_stream *s, void *p, size_t bytes)
{
    if (!p)
        return;
    if (s->handle)
        kn_gpu_order(s->handle, compute_of(s)->handle);
    kn_give(kn_gpu_memory_of(s->memory), p, bytes, KN_MEM_WORKSPACE);
}

/* ---- scratch --------------------------------------------------------------------------------- */

void *kn_cuda_scratch(size_t bytes)
{
    kn_gpu_stream *s = kn_gpu_current();
    if (!running(s, "scratch"))
        return NULL;
    if (bytes <= s->scratch_bytes && s->scratch)
        return s->scratch;
    size_t size = kn_round_up(bytes ? bytes : 1, GRAIN);
    give(s, s->scratch, s->scratch_bytes);
    s->scratch_bytes = 0;
    s->scratch = take(s, size);
    s->scratch_recorded = kn_gpu_recording(&s->base) != 0;
    if (s->scratch)
        s->scratch_bytes = size;
    return s->scratch;
}

void kn_gpu_scratch_recorded(kn_gpu_stream *s)
{
    if (!s->scratch_recorded)
        return;
    give(s, s->scratch, s->scratch_bytes);
    s->scratch = NULL;
    s->scratch_bytes = 0;
    s->scratch_recorded = false;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static void *pinned(size_t bytes)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    void *p = NULL;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t e = cudaHostAlloc(&p, bytes, cudaHostAllocDefault);
    cudaThreadExchangeStreamCaptureMode(&mode);
    return kn_cuda_check(e, "taking page-locked memory for tables") ? p : NULL;
}

static bool send(kn_gpu_stream *s, void *to, const void *from, size_t bytes)
{
    return kn_cuda_check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, s->handle),
                         "copying to the GPU");
}

/* While recording: memory of its own. */
static const void *table_kept(kn_gpu_stream *s, const void *host, size_t bytes)
{
    kn_gpu_kept k = { .pinned = pinned(bytes), .bytes = bytes };
    k.device = k.pinned ? kn_take(kn_gpu_memory_of(s->memory), bytes, KN_MEM_WORKSPACE) : NULL;
    if (!k.device || !kn_gpu_keep(k)) {
        kn_give(kn_gpu_memory_of(s->memory), k.device, bytes, KN_MEM_WORKSPACE);
        cudaFreeHost(k.pinned);
        return NULL;
    }
    memcpy(k.pinned, host, bytes);
    return send(s, k.device, k.pinned, bytes) ? k.device : NULL;
}

static void ring_end(kn_gpu_stream *s)
{
    kn_gpu_ring *r = &s->ring;
    for (int i = 0; i < KN_GPU_CHUNKS; i++)
        kn_gpu_event_give(r->left[i], false);
    give(s, r->device, KN_GPU_CHUNKS * r->chunk);
    cudaFreeHost(r->host);
    *r = (kn_gpu_ring){ 0 };
}

/* Waits for the stream where there is a ring already: once for each size that a program needs. */
static bool ring_begin(kn_gpu_stream *s, size_t chunk)
{
    kn_gpu_ring *r = &s->ring;
    if (r->host && !kn_cuda_check(cudaStreamSynchronize(s->handle), "growing the ring of tables"))
        return false;
    ring_end(s);
    r->chunk = chunk;
    r->host = pinned(KN_GPU_CHUNKS * chunk);
    r->device = r->host ? take(s, KN_GPU_CHUNKS * chunk) : NULL;
    bool ok = r->device != NULL;
    for (int i = 0; ok && i < KN_GPU_CHUNKS; i++)
        ok = (r->left[i] = kn_gpu_event_take(false)) != NULL;
    if (!ok)
        ring_end(s);
    return ok;
}

/* On to the next chunk, whose copies of the last round are long done: the host waits only where it
 * is a whole ring ahead. The device's half needs no waiting: copies come in the order of the
 * kernels. */
static bool ring_next(kn_gpu_stream *s)
{
    kn_gpu_ring *r = &s->ring;
    bool ok = kn_cuda_check(cudaEventRecord(r->left[r->at], s->handle), "recording an event");
    r->at = (r->at + 1) % KN_GPU_CHUNKS;
    r->used = 0;
    return ok && kn_gpu_await(r->left[r->at], "wait for a table's copy");
}

/* Where in the ring's halves so many bytes go next. */
static bool ring_take(kn_gpu_stream *s, size_t bytes, size_t *at)
{
    kn_gpu_ring *r = &s->ring;
    size_t size = kn_round_up(bytes ? bytes : 1, 256);
    if (size > r->chunk && !ring_begin(s, size > CHUNK ? kn_round_up(size, CHUNK) : CHUNK))
        return false;
    if (r->used + size > r->chunk && !ring_next(s))
        return false;
    *at = (size_t)r->at * r->chunk + r->used;
    r->used += size;
    return true;
}

const void *kn_cuda_table(const void *host, size_t bytes)
{
    kn_gpu_stream *s = kn_gpu_current();
    size_t at;
    if (!running(s, "table"))
        return NULL;
    if (kn_gpu_recording(&s->base))
        return table_kept(s, host, bytes);
    if (!ring_take(s, bytes, &at))
        return NULL;
    memcpy(s->ring.host + at, host, bytes);
    return send(s, s->ring.device + at, s->ring.host + at, bytes) ? s->ring.device + at : NULL;
}

bool kn_gpu_send(kn_gpu_stream *s, void *to, const void *host, size_t bytes)
{
    size_t at;
    if (!ring_take(s, bytes, &at))
        return false;
    memcpy(s->ring.host + at, host, bytes);
    return send(s, to, s->ring.host + at, bytes);
}

/* ---- the flag -------------------------------------------------------------------------------- */

kn_cuda_flag *kn_cuda_flags(void)
{
    kn_gpu_stream *s = kn_gpu_current();
    if (!running(s, "flags"))
        return NULL;
    if (s->flag)
        return s->flag;
    s->flag_host = pinned(sizeof(kn_cuda_flag));
    s->flag = s->flag_host ? take(s, sizeof(kn_cuda_flag)) : NULL;
    if (!s->flag)
        return NULL;
    memset(s->flag_host, 0, sizeof(kn_cuda_flag));
    kn_cuda_check(cudaMemsetAsync(s->flag, 0, sizeof(kn_cuda_flag), s->handle),
                  "clearing the flag");
    return s->flag;
}

/* ---- the end --------------------------------------------------------------------------------- */

void kn_gpu_scratch_end(kn_gpu_stream *s)
{
    if (!s->memory)
        return;
    ring_end(s);
    give(s, s->scratch, s->scratch_bytes);
    give(s, s->flag, s->flag ? sizeof(kn_cuda_flag) : 0);
    cudaFreeHost(s->flag_host);
    kn_gpu_event_give(s->flag_read, false);
}
