/* kernels/cuda/runtime/event.c: events of the CUDA device. CUDA's own are kept in a pool of the
 * process: they cost more to make than to record. */
#include "kernels/trace.h"
#include "kernels/cuda/runtime/graph.h"

#include <pthread.h>

#define POOLED 4096

static struct {
    pthread_mutex_t lock;
    cudaEvent_t event[2][POOLED]; /* without and with timing */
    int count[2];
} pool = { .lock = PTHREAD_MUTEX_INITIALIZER };

cudaEvent_t kn_gpu_event_take(bool timing)
{
    cudaEvent_t e = NULL;
    pthread_mutex_lock(&pool.lock);
    if (pool.count[timing] > 0)
        e = pool.event[timing][--pool.count[timing]];
    pthread_mutex_unlock(&pool.lock);
    if (e)
        return e;
    cudaError_t error =
        cudaEventCreateWithFlags(&e, timing ? cudaEventDefault : cudaEventDisableTiming);
    return kn_cuda_check(error, "making an event") ? e : NULL;
}

/* An earlier record keeps its meaning for waits that were issued already. */
void kn_gpu_event_give(cudaEvent_t e, bool timing)
{
    if (!e)
        return;
    pthread_mutex_lock(&pool.lock);
    bool room = pool.count[timing] < POOLED;
    if (room)
        pool.event[timing][pool.count[timing]++] = e;
    pthread_mutex_unlock(&pool.lock);
    if (!room)
        cudaEventDestroy(e);
}

typedef struct gpu_event {
    kn_event base;
    cudaEvent_t handle;
    bool recorded;
    int64_t recording;      /* in which it was recorded; 0: outside */
    kn_gpu_stream *compute; /* of the stream where it was */
} gpu_event;

kn_event *kn_gpu_event_create(void)
{
    gpu_event *e = kn_host_calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->base.table = &kn_cuda_device_table;
    e->handle = kn_gpu_event_take(false);
    if (!e->handle) {
        kn_host_free(e);
        return NULL;
    }
    return &e->base;
}

void kn_gpu_event_destroy(kn_event *event)
{
    gpu_event *e = (gpu_event *)event;
    if (e->recording) /* CUDA takes no question about it until it is recorded again */
        cudaEventDestroy(e->handle);
    else
        kn_gpu_event_give(e->handle, false);
    kn_host_free(e);
}

bool kn_gpu_event_record(kn_event *event, kn_stream *s)
{
    gpu_event *e = (gpu_event *)event;
    e->recorded = true;
    e->recording = kn_gpu_recording(s);
    e->compute = (kn_gpu_stream *)s->context->compute[KN_CUDA];
    return kn_cuda_check(cudaEventRecord(e->handle, ((kn_gpu_stream *)s)->handle),
                         "recording an event");
}

/* CUDA takes no question about an event that was last recorded into a graph. It is over when the
 * compute stream is: launches are in its order. */
static bool outside(gpu_event *e)
{
    if (e->recording == 0)
        return true;
    e->recording = 0;
    return kn_cuda_check(cudaEventRecord(e->handle, e->compute->handle), "recording an event");
}

bool kn_gpu_event_wait(kn_event *event, kn_stream *s)
{
    gpu_event *e = (gpu_event *)event;
    if (!e->recorded || (kn_gpu_recording(s) && e->recording != kn_gpu_recording(s)))
        return true; /* what was before a recording is over when its graph is launched */
    if (!kn_gpu_recording(s) && !outside(e))
        return false;
    return kn_cuda_check(cudaStreamWaitEvent(((kn_gpu_stream *)s)->handle, e->handle, 0),
                         "waiting for an event");
}

bool kn_gpu_event_over(cudaEvent_t e)
{
    cudaError_t error = cudaEventQuery(e);
    if (error == cudaErrorNotReady) {
        cudaGetLastError(); /* it counts as an error there */
        return false;
    }
    kn_cuda_check(error, "asking for an event");
    return true; /* failed work won't happen any more */
}

/* The host's waits are in the trace: a step should have none. */
bool kn_gpu_await(cudaEvent_t e, const char *what)
{
    if (kn_gpu_event_over(e))
        return kn_ok();
    double begin = kn_now();
    cudaError_t error = cudaEventSynchronize(e);
    if (kn_tracing())
        kn_trace_add(what, "host", NULL, begin, kn_now(), 0, 0);
    return kn_cuda_check(error, what);
}

bool kn_gpu_event_sync(kn_event *event)
{
    gpu_event *e = (gpu_event *)event;
    return !e->recorded || (outside(e) && kn_gpu_await(e->handle, "wait for an event"));
}

bool kn_gpu_event_done(kn_event *event)
{
    gpu_event *e = (gpu_event *)event;
    return !e->recorded || !outside(e) || kn_gpu_event_over(e->handle);
}
