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
} locked[64];

cudaError_t cudaHostAlloc(void **p, size_t bytes, unsigned flags)
{
    (void)flags;
    fake.waits++;
    *p = aligned_alloc(512, (bytes + 511) / 512 * 512);
    for (int i = 0; *p && i < 64; i++)
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
    for (int i = 0; p && i < 64; i++)
        if (locked[i].at == p)
            locked[i].at = NULL;
    free(p);
    return cudaSuccess;
}

static bool is_locked(const void *p)
{
    for (int i = 0; i < 64; i++)
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

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t n, enum cudaMemcpyKind kind,
                            cudaStream_t s)
{
    (void)s;
    fake.pageable += (kind == cudaMemcpyHostToDevice && !is_locked(src)) ||
                     (kind == cudaMemcpyDeviceToHost && !is_locked(dst));
    memmove(dst, src, n);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    (void)s;
    memset(p, value, n);
    return cudaSuccess;
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
    *s = malloc(1);
    return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t s)
{
    fake.streams--;
    free(s);
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t s)
{
    (void)s;
    fake.waits++;
    return cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)s, (void)e, (void)flags;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    (void)s;
    *status = fake.capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    static enum cudaStreamCaptureMode now = cudaStreamCaptureModeGlobal;
    enum cudaStreamCaptureMode before = now;
    now = *mode;
    *mode = before;
    return cudaSuccess;
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
cudaError_t cudaLaunchHostFunc(cudaStream_t s, cudaHostFn_t fn, void *arg)
{
    struct job job = { fn, arg };
    pthread_t thread;
    (void)s;
    if (pthread_create(&thread, NULL, run_job, &job) != 0)
        return cudaErrorUnknown;
    pthread_join(thread, NULL);
    return cudaSuccess;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* What a cudaEvent_t points at. */
struct event {
    double time;
    int64_t number; /* of its recording; 0: never, or waited for */
};
static int64_t recordings;

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *e, unsigned flags)
{
    (void)flags;
    fake.events++;
    *e = calloc(1, sizeof(struct event));
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
    (void)s;
    *(struct event *)(void *)e = (struct event){ now(), ++recordings };
    return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    fake.waits++;
    ((struct event *)(void *)e)->number = 0;
    return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t e)
{
    int64_t number = ((struct event *)(void *)e)->number;
    return number > 0 && number + fake.late > recordings ? cudaErrorNotReady : cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    const struct event *a = (void *)begin, *b = (void *)end;
    *ms = (float)(1e3 * (b->time - a->time));
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
