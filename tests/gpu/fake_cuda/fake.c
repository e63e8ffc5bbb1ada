/* tests/gpu/fake_cuda/fake.c: see fake.h. */
#include "tests/gpu/fake_cuda/fake.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/emulator/emulated.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

cuda_fake fake = {
    .devices = 1, .memory = (size_t)1 << 30, .driver = 13000, .name = "Pretended GPU"
};

static _Thread_local cudaError_t last_error;

void fake_begin(void)
{
    static const emulated_runtime runtime = {
        kn_cuda_stream, kn_cuda_launched, kn_cuda_multiprocessors, kn_cuda_scratch, kn_cuda_table,
        kn_cuda_flags,  fake_record
    };
    emulated_use(&runtime);
    kn_cuda_own_provider = &kn_emulated_kernels;
    kn_providers_only("cuda");
}

/* ---- work that is on its way ----------------------------------------------------------------- */

typedef struct fake_op {
    void (*work)(void *arg);
    void (*drop)(void *arg);
    void *arg;
    fake_front before; /* the work before it */
    bool done;
} op;

typedef fake_front front;
enum { OPS = FAKE_OPS };

static pthread_mutex_t ops_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t ops_done = PTHREAD_COND_INITIALIZER;

/* Removes finished work; the lock is held. */
static int front_tidy(front *f)
{
    int n = 0;
    for (int i = 0; i < f->count; i++)
        if (!f->op[i]->done)
            f->op[n++] = f->op[i];
    return f->count = n;
}

static void front_add(front *f, op *o)
{
    front_tidy(f);
    for (int i = 0; i < f->count; i++)
        if (f->op[i] == o)
            return;
    if (f->count < OPS)
        f->op[f->count++] = o;
}

static void front_wait(front *f)
{
    pthread_mutex_lock(&ops_lock);
    while (f && front_tidy(f) > 0)
        pthread_cond_wait(&ops_done, &ops_lock);
    pthread_mutex_unlock(&ops_lock);
}

void fake_wait(void *stream)
{
    front_wait(&((cudaStream_t)stream)->front);
}

static void *op_main(void *arg)
{
    op *o = arg;
    front_wait(&o->before);
    o->work(o->arg);
    o->drop(o->arg);
    pthread_mutex_lock(&ops_lock);
    o->done = true; /* never freed: events may refer to it */
    pthread_cond_broadcast(&ops_done);
    pthread_mutex_unlock(&ops_lock);
    return NULL;
}

void fake_launch(void *stream, void (*work)(void *arg), void (*drop)(void *arg), void *arg)
{
    if (((cudaStream_t)stream)->capture) {
        fake_add(stream, work, drop, arg);
        return;
    }
    front *f = &((cudaStream_t)stream)->front;
    op *o = calloc(1, sizeof *o);
    pthread_t thread;
    o->work = work;
    o->drop = drop;
    o->arg = arg;
    pthread_mutex_lock(&ops_lock);
    front_tidy(f);
    o->before = *f;
    f->op[0] = o;
    f->count = 1;
    pthread_mutex_unlock(&ops_lock);
    if (pthread_create(&thread, NULL, op_main, o) == 0)
        pthread_detach(thread);
}

/* ---- memory ---------------------------------------------------------------------------------- */

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
    memset(h + 1, 0xaa, bytes); /* so that no code relies on zeros */
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
    front_wait(&s->front);
    fake.pageable += pageable;
    return s->capture && pageable ? fake_waiting(s) : do_copy(s, (struct copy){ dst, src, 0, n });
}

cudaError_t cudaMemsetAsync(void *p, int value, size_t n, cudaStream_t s)
{
    front_wait(&s->front);
    return do_copy(s, (struct copy){ p, NULL, value, n });
}

/* ---- devices --------------------------------------------------------------------------------- */

cudaError_t cudaGetDeviceCount(int *n)
{
    if (fake.devices == 0)
        return fake.missing ? fake.missing
                            : cudaErrorNoDevice; /* *n stays unchanged, as with real CUDA */
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
             : name == cudaDevAttrL2CacheSize          ? 1 << 16
             : name == cudaDevAttrPageableMemoryAccess ? fake.reads_pageable
                                                       : 0;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device)
{
    (void)device;
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "%s", fake.name);
    p->multiProcessorCount = 132;
    p->totalGlobalMem = fake.memory;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device)
{
    snprintf(text, (size_t)length, "0000:%02x:00.0", fake.hidden + device + 0x10);
    return device < fake.devices ? cudaSuccess : cudaErrorInvalidDevice;
}

cudaError_t cudaDriverGetVersion(int *v)
{
    *v = fake.driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *v)
{
    *v = 13000;
    return cudaSuccess;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t e = last_error;
    last_error = cudaSuccess;
    return fake.lost ? cudaErrorIllegalAddress : e;
}

const char *cudaGetErrorString(cudaError_t e)
{
    return e == cudaErrorIllegalAddress ? "an illegal memory access was encountered" : "some error";
}

/* ---- streams and events ---------------------------------------------------------------------- */

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
    front_wait(&s->front);
    return s->capture ? fake_waiting(s) : cudaSuccess;
}

cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned flags)
{
    (void)flags;
    pthread_mutex_lock(&ops_lock);
    front_tidy(&e->front);
    for (int i = 0; i < e->front.count; i++)
        front_add(&s->front, e->front.op[i]);
    pthread_mutex_unlock(&ops_lock);
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

/* On another thread, as in CUDA. */
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
    front_wait(&s->front);
    if (!s->capture) {
        run_host(&job);
        return cudaSuccess;
    }
    kept = malloc(sizeof *kept);
    *kept = job;
    return fake_add(s, run_host, free, kept);
}

static double passed; /* of the device's clock alone */

void fake_pass(double seconds)
{
    passed += seconds;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return passed + (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

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
    pthread_mutex_lock(&ops_lock);
    if (s) {
        front_tidy(&s->front);
        e->front = s->front;
    }
    e->time = now();
    e->number = ++recordings;
    pthread_mutex_unlock(&ops_lock);
    return fake_capture_record(e, s);
}

cudaError_t cudaEventSynchronize(cudaEvent_t e)
{
    fake.waits++;
    e->number = 0;
    front_wait(&e->front);
    return e->captured ? cudaErrorCapturedEvent : cudaSuccess;
}

/* As in CUDA, "not ready" becomes the thread's last error. */
cudaError_t cudaEventQuery(cudaEvent_t e)
{
    if (e->captured)
        return cudaErrorCapturedEvent;
    pthread_mutex_lock(&ops_lock);
    bool done =
        front_tidy(&e->front) == 0 && !(e->number > 0 && e->number + fake.late > recordings);
    pthread_mutex_unlock(&ops_lock);
    last_error = done ? last_error : cudaErrorNotReady;
    return done ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaDeviceSynchronize(void)
{
    return cudaSuccess;
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end)
{
    *ms = (float)(1e3 * (end->time - begin->time));
    return cudaSuccess;
}

/* ---- symbols of nvcc's objects: they are linked, but never run ----------------------------- */

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
