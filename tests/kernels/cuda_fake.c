/* tests/kernels/cuda_fake.c: see cuda_fake.h. */
#include "tests/kernels/cuda_fake.h"
#include "kernels/cuda/runtime.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

cuda_fake fake = { .devices = 1, .memory = (size_t)1 << 30 };

extern const kn_layer kn_emulated_kernels;

void fake_begin(void)
{
    kn_cuda_own_layer = &kn_emulated_kernels;
    kn_layers_only("cuda");
}

/* ---- memory --------------------------------------------------------------------------------------- */

typedef struct header {
    size_t bytes, unused[7]; /* 64 bytes: alignment is kept */
} header;

cudaError_t cudaMalloc(void **p, size_t bytes)
{
    if (fake_waiting(NULL) != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    if (fake.live + bytes > fake.memory)
        return cudaErrorMemoryAllocation;
    header *h = aligned_alloc(512, (bytes + sizeof *h + 1023) / 512 * 512);
    if (!h)
        return cudaErrorMemoryAllocation;
    h->bytes = bytes;
    memset(h + 1, 0xaa, bytes); /* nobody may count on zeros */
    fake.live += bytes;
    fake.mallocs++;
    fake.waits++;
    *p = h + 1;
    return cudaSuccess;
}

cudaError_t cudaFree(void *p)
{
    header *h = p ? (header *)p - 1 : NULL;
    if (h && fake_waiting(NULL) != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    if (h) {
        fake.live -= h->bytes;
        fake.frees++;
        fake.waits++;
    }
    free(h);
    return cudaSuccess;
}

/* Page-locked blocks are remembered, for cudaPointerGetAttributes. */
static struct {
    char *at;
    size_t bytes;
} locked[1024];

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    fake.waits++;
    if (fake_waiting(NULL) != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    *p = aligned_alloc(512, (bytes + 511) / 512 * 512);
    for (int i = 0; *p && i < 1024; i++)
        if (!locked[i].at) {
            locked[i].at = *p;
            locked[i].bytes = bytes;
            break;
        }
    return *p ? cudaSuccess : cudaErrorMemoryAllocation;
}

cudaError_t cudaFreeHost(void *p)
{
    fake.waits += p != NULL;
    if (p && fake_waiting(NULL) != cudaSuccess)
        return cudaErrorStreamCaptureUnsupported;
    for (int i = 0; p && i < 1024; i++)
        if (locked[i].at == p)
            locked[i].at = NULL;
    free(p);
    return cudaSuccess;
}

static bool is_locked(const void *p)
{
    for (int i = 0; i < 1024; i++)
        if (locked[i].at && (const char *)p >= locked[i].at &&
            (const char *)p < locked[i].at + locked[i].bytes)
            return true;
    return false;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *a, const void *p)
{
    memset(a, 0, sizeof *a);
    a->type = is_locked(p) ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
    return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t *idle, size_t *total)
{
    *total = fake.memory;
    *idle = fake.memory - fake.live;
    return cudaSuccess;
}

struct copy {
    void *dst;
    const void *src; /* NULL: value */
    int value;
    size_t bytes;
};

static void run_copy(void *arg)
{
    const struct copy *c = arg;
    if (c->src)
        memmove(c->dst, c->src, c->bytes);
    else
        memset(c->dst, c->value, c->bytes);
}

static cudaError_t do_copy(cudaStream_t s, struct copy c)
{
    if (!s->capture) {
        run_copy(&c);
        return cudaSuccess;
    }
    struct copy *kept = malloc(sizeof *kept);
    *kept = c;
    return fake_add(s, run_copy, free, kept);
}

/* CUDA takes pageable bytes of the host into a capture only by waiting. */
cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    bool pageable = (kind == cudaMemcpyHostToDevice && !is_locked(src)) ||
                    (kind == cudaMemcpyDeviceToHost && !is_locked(dst));
    fake.pageable += pageable;
    return s->capture && pageable ? fake_waiting(s) : do_copy(s, (struct copy){ dst, src, 0, n });
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    return do_copy(s, (struct copy){ p, NULL, value, n });
}

/* ---- devices -------------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *n)
{
    if (fake.devices == 0)
        return cudaErrorNoDevice; /* *n stays as it was, as with the real one */
    *n = fake.devices;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    fake.device = device;
    return device < fake.devices ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr name, int device)
{
    (void)device;
    *value = name == cudaDevAttrComputeCapabilityMajor ? 9
             : name == cudaDevAttrMultiProcessorCount  ? 132
                                                       : 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    memset(p, 0, sizeof *p);
    strcpy(p->name, "Pretended GPU");
    p->totalGlobalMem = fake.memory;
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    return fake.lost ? cudaErrorIllegalAddress : cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorIllegalAddress ? "an illegal memory access was encountered" : "some error";
}

/* ---- streams and events --------------------------------------------------------------------------- */

cudaError_t cudaDeviceGetStreamPriorityRange(int *low, int *high)
{
    *low = 0;
    *high = -5;
    return cudaSuccess;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *s, unsigned flags, int priority)
{
    (void)flags, (void)priority;
    fake.streams++;
    *s = calloc(1, sizeof **s);
    fake_stream_begin(*s);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    if (s->capture)
        return fake_waiting(s);
    fake.streams--;
    fake_stream_end(s);
    free(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    fake.waits++;
    return s->capture ? fake_waiting(s) : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)flags;
    return fake_capture_wait(s, e);
}

struct job {
    cudaHostFn_t fn;
    void *arg;
};

static void *run_job(void *arg)
{
    struct job *job = arg;
    job->fn(job->arg);
    return NULL;
}

/* On a thread of its own, as CUDA does it. */
static void run_host(void *job)
{
    pthread_t thread;
    if (pthread_create(&thread, NULL, run_job, job) != 0)
        abort();
    pthread_join(thread, NULL);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *arg)
{
    struct job job = { fn, arg }, *kept;
    if (!s->capture) {
        run_host(&job);
        return cudaSuccess;
    }
    kept = malloc(sizeof *kept);
    *kept = job;
    return fake_add(s, run_host, free, kept);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What a cudaEvent_t points at. */
static int64_t recordings;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    fake.events++;
    *e = calloc(1, sizeof **e);
    return cudaSuccess;
}

cudaError_t cudaEventDestroy(cudaEvent_t e)
{
    fake.events--;
    free(e);
    return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s)
{
    e->time = now();
    e->number = ++recordings;
    return fake_capture_record(e, s);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    fake.waits++;
    e->number = 0;
    return e->captured ? cudaErrorCapturedEvent : cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (e->captured)
        return cudaErrorCapturedEvent;
    return e->number > 0 && e->number + fake.late > recordings ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    *ms = (float)(1e3 * (end->time - begin->time));
    return cudaSuccess;
}

/* ---- what nvcc's objects ask for: they are linked, but never run ---------------------------------- */

cudaError_t cudaFuncSetAttribute(const void *f, enum cudaFuncAttribute name, int value)
{
    (void)f, (void)name, (void)value;
    return cudaSuccess;
}

#define NOTHING(name)                                                                              \
    void *name(void);                                                                              \
    void *name(void)                                                                               \
    {                                                                                              \
        return NULL;                                                                               \
    }
NOTHING(__cudaGetKernel)
NOTHING(__cudaLaunchKernel)
NOTHING(__cudaPopCallConfiguration)
NOTHING(__cudaPushCallConfiguration)
NOTHING(__cudaRegisterFatBinary)
NOTHING(__cudaRegisterFatBinaryEnd)
NOTHING(__cudaRegisterFunction)
NOTHING(__cudaUnregisterFatBinary)
