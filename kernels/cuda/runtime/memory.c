/* kernels/cuda/runtime/memory.c: GPU memory, a pool for each context and one for each further kind
 * that it uses, and page-locked host memory, one pool for the process (pool.h). Nothing here waits
 * for the GPU except giving segments back to the driver. */
#include "kernels/device.h"
#include "kernels/cuda/runtime/arena.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/graph.h"

#include <stdlib.h>

/* ---- below the pools ----------------------------------------------------------------- */

/* cudaMalloc isn't allowed while this thread records a graph, except in relaxed mode; the new
 * memory is no part of the graph. page_locked: the host's; NULL: the GPU's. */
static void *get(void *page_locked, size_t bytes)
{
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    void *p = NULL;
    if (!kn_cuda_usable())
        return NULL;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaError_t e =
        page_locked ? cudaHostAlloc(&p, bytes, cudaHostAllocPortable) : cudaMalloc(&p, bytes);
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (e == cudaSuccess)
        return p;
    cudaGetLastError();
    if (!page_locked && e != cudaErrorMemoryAllocation)
        kn_cuda_check(e, "taking GPU memory");
    return NULL;
}

/* cudaFree waits for the device, so nothing is running that still uses the bytes. */
static void put(void *page_locked, void *p, size_t bytes)
{
    (void)bytes;
    enum cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    if (page_locked)
        cudaFreeHost(p);
    else
        cudaFree(p);
    cudaThreadExchangeStreamCaptureMode(&mode);
}

/* ---- GPU memory ------------------------------------------------------------------------------ */

static void *take(kn_memory *self, size_t bytes)
{
    kn_gpu_memory *m = self->state;
    pthread_mutex_lock(&m->lock);
    void *p =
        m->recording ? kn_gpu_arena_take(m->recording, bytes) : kn_gpu_pool_take(m->pool, bytes);
    pthread_mutex_unlock(&m->lock);
    return p;
}

void kn_gpu_memory_settle(kn_gpu_memory *m)
{
    if (!m->ended || m->arenas || kn_gpu_pool_read(m->pool).blocks_out > 0)
        return;
    kn_gpu_pool_destroy(m->pool);
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static void give(kn_memory *self, void *p, size_t bytes)
{
    kn_gpu_memory *m = self->state;
    pthread_mutex_lock(&m->lock);
    if (m->arenas)
        kn_gpu_arenas_give(m, p, bytes);
    else
        kn_gpu_pool_give(m->pool, p);
    pthread_mutex_unlock(&m->lock);
    if (m->ended)
        kn_gpu_memory_settle(m);
}

static kn_gpu_memory *begin(const char *name, kn_gpu_pool_source source)
{
    kn_gpu_memory *m = calloc(1, sizeof *m);
    if (!m)
        return kn_fail_null("out of memory: the host has no bytes for a pool; end other programs");
    m->pool = kn_gpu_pool_create(source);
    if (!m->pool) {
        free(m);
        return NULL;
    }
    pthread_mutex_init(&m->lock, NULL);
    m->memory =
        (kn_memory){ .name = name, .device = KN_CUDA, .take = take, .give = give, .state = m };
    return m;
}

kn_gpu_memory *kn_gpu_memory_begin(void)
{
    return begin("cuda memory", (kn_gpu_pool_source){ .get = get, .put = put });
}

/* m's place in its context's list goes to the memory after it. */
static void leave(kn_gpu_memory *m)
{
    if (m->at)
        *m->at = m->more;
    if (m->more)
        m->more->at = m->at;
    m->at = NULL;
    m->more = NULL;
}

void kn_gpu_memory_end(kn_gpu_memory *m)
{
    if (!m)
        return;
    leave(m);
    kn_gpu_pool_trim(m->pool);
    m->ended = true;
    kn_gpu_memory_settle(m);
}

kn_memory *kn_gpu_memory_of(kn_gpu_memory *m)
{
    return &m->memory;
}

/* A worker of the CPU finds its creator's. */
static kn_gpu_stream *compute(bool make)
{
    kn_context *c = kn_context_get();
    kn_stream *s = c->compute[KN_CUDA];
    return (kn_gpu_stream *)(s || !make ? s : kn_compute_stream(KN_CUDA));
}

kn_memory *kn_gpu_device_memory(void)
{
    kn_gpu_stream *s = compute(true);
    return s ? &s->memory->memory : NULL;
}

kn_gpu_memory *kn_gpu_memory_more(const char *name, kn_gpu_pool_source source)
{
    kn_gpu_stream *s = compute(true);
    kn_gpu_memory *m = s ? begin(name, source) : NULL;
    if (!m)
        return NULL;
    m->at = &s->memory->more;
    m->more = *m->at;
    *m->at = m;
    if (m->more)
        m->more->at = &m->more;
    return m;
}

/* ---- page-locked memory ---------------------------------------------------------------------- */

static void *pinned_take(kn_memory *self, size_t bytes)
{
    return kn_gpu_pool_take(self->state, bytes);
}

static void pinned_give(kn_memory *self, void *p, size_t bytes)
{
    (void)bytes;
    kn_gpu_pool_give(self->state, p);
}

static kn_memory pinned = { .name = "page-locked memory",
                            .device = KN_CPU,
                            .take = pinned_take,
                            .give = pinned_give,
                            .pinned = true };
static pthread_mutex_t pinned_lock = PTHREAD_MUTEX_INITIALIZER;

kn_memory *kn_gpu_pinned_memory(void)
{
    if (!kn_cuda_usable())
        return kn_device_memory(KN_CPU);
    pthread_mutex_lock(&pinned_lock);
    if (!pinned.state)
        pinned.state =
            kn_gpu_pool_create((kn_gpu_pool_source){ .get = get, .put = put, .arg = &pinned });
    bool made = pinned.state != NULL;
    pthread_mutex_unlock(&pinned_lock);
    return made ? &pinned : NULL;
}

/* ---- all of it ------------------------------------------------------------------------------- */

void kn_gpu_trim(void)
{
    kn_gpu_stream *s = compute(false);
    if (kn_recording()) /* giving memory back waits for the GPU, which isn't running */
        return;
    for (kn_gpu_memory *m = s ? s->memory->more : NULL; m; m = m->more)
        kn_gpu_pool_trim(m->pool); /* which may become plain memory */
    if (s)
        kn_gpu_pool_trim(s->memory->pool);
    pthread_mutex_lock(&pinned_lock);
    if (pinned.state)
        kn_gpu_pool_trim(pinned.state);
    pthread_mutex_unlock(&pinned_lock);
}

kn_cuda_memory_stats kn_cuda_memory_read(void)
{
    kn_cuda_memory_stats r = { 0 };
    kn_gpu_stream *s = compute(false);
    size_t idle = 0, total = 0;
    if (!s)
        return r;
    for (kn_gpu_memory *m = s->memory; m; m = m->more) {
        kn_gpu_pool_stats p = kn_gpu_pool_read(m->pool);
        r.reserved += p.reserved;
        r.peak_reserved += p.peak_reserved;
        r.live += p.live;
        r.largest_free = p.largest_free > r.largest_free ? p.largest_free : r.largest_free;
        r.segments += p.segments;
        r.blocks_out += p.blocks_out;
        r.blocks_free += p.blocks_free;
    }
    if (cudaMemGetInfo(&idle, &total) == cudaSuccess) {
        r.device_free = (int64_t)idle;
        r.device_total = (int64_t)total;
    }
    return r;
}
