/* tests/gpu/fake_cuda/graph.c: stream capture and graphs of the fake runtime, by CUDA's rules: a
 * stream that joins a capture by an event must join back, a call that waits ends the capture,
 * events of a capture are invalid outside. */
#include "tests/gpu/fake_cuda/fake.h"
#include "kernels/cuda/runtime/runtime.h"

#include <stdlib.h>

struct CUgraph_st {
    long number;
    cudaStream_t origin;
    bool broken;
    fake_node *first, **end;
    int nodes;
};

struct CUgraphExec_st {
    fake_graph *graph;
};

static cudaStream_t streams;
static pthread_mutex_t streams_lock = PTHREAD_MUTEX_INITIALIZER; /* ranks may be threads */
static fake_graph *capturing;                                    /* one at a time in these tests */
static enum cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
static long captures;

void fake_stream_begin(cudaStream_t s)
{
    pthread_mutex_lock(&streams_lock);
    s->next = streams;
    streams = s;
    pthread_mutex_unlock(&streams_lock);
}

void fake_stream_end(cudaStream_t s)
{
    pthread_mutex_lock(&streams_lock);
    cudaStream_t *at = &streams;
    while (*at != s)
        at = &(*at)->next;
    *at = s->next;
    pthread_mutex_unlock(&streams_lock);
}

/* ---- recording ------------------------------------------------------------------------------- */

static fake_node *node_of(fake_graph *g, fake_node *a, fake_node *b)
{
    fake_node *n = calloc(1, sizeof *n);
    n->after = calloc(2, sizeof(fake_node *));
    if (a)
        n->after[n->afters++] = a;
    if (b)
        n->after[n->afters++] = b;
    n->index = g->nodes++;
    *g->end = n;
    g->end = &n->next;
    return n;
}

cudaError_t fake_add(cudaStream_t s, void (*run)(void *), void (*drop)(void *), void *arg)
{
    if (s->capture->broken) {
        drop(arg);
        return cudaErrorStreamCaptureInvalidated;
    }
    fake_node *n = node_of(s->capture, s->last, NULL);
    n->run = run;
    n->drop = drop;
    n->arg = arg;
    s->last = n;
    return cudaSuccess;
}

bool fake_record(void (*run)(void *), void (*drop)(void *), void *arg)
{
    kn_gpu_stream *s = kn_gpu_current();
    if (!s || !s->handle->capture)
        return false;
    if (run)
        fake_add(s->handle, run, drop, arg);
    return true;
}

cudaError_t fake_waiting(cudaStream_t s)
{
    fake_graph *g = s ? s->capture : mode == cudaStreamCaptureModeRelaxed ? NULL : capturing;
    if (!g)
        return cudaSuccess;
    g->broken = true;
    return cudaErrorStreamCaptureUnsupported;
}

cudaError_t fake_capture_record(cudaEvent_t e, cudaStream_t s)
{
    e->captured = s->capture ? s->capture->number : 0;
    e->node = s->last;
    return cudaSuccess;
}

cudaError_t fake_capture_wait(cudaStream_t s, cudaEvent_t e)
{
    if (!e->captured && s->capture && e->time > 0) {
        s->capture->broken = true;
        return cudaErrorStreamCaptureIsolation;
    }
    if (!e->captured)
        return cudaSuccess;
    if (!capturing || e->captured != capturing->number)
        return cudaErrorCapturedEvent;
    s->last = node_of(capturing, s->last, e->node);
    s->capture = capturing;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t s, enum cudaStreamCaptureStatus *status)
{
    *status = s->capture ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *m)
{
    enum cudaStreamCaptureMode before = mode;
    mode = *m;
    *m = before;
    return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t s, enum cudaStreamCaptureMode m)
{
    (void)m;
    if (capturing)
        return cudaErrorIllegalState;
    capturing = s->capture = calloc(1, sizeof *capturing);
    *capturing = (fake_graph){ .number = ++captures, .origin = s, .end = &s->capture->first };
    return cudaSuccess;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void mark(fake_node *n)
{
    while (n && !n->done) {
        n->done = true;
        if (n->afters > 1)
            mark(n->after[1]);
        n = n->afters ? n->after[0] : NULL;
    }
}

/* True if all work precedes the origin stream's last. */
static bool joined(fake_graph *g)
{
    bool all = true;
    mark(g->origin->last);
    for (fake_node *n = g->first; n; n = n->next) {
        all = all && n->done;
        n->done = false;
    }
    return all;
}

cudaError_t cudaGraphDestroy(cudaGraph_t g)
{
    for (fake_node *n = g->first, *next; n; n = next) {
        next = n->next;
        if (n->drop)
            n->drop(n->arg);
        free(n->after);
        free(n);
    }
    free(g);
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t *made)
{
    fake_graph *g = s->capture;
    *made = NULL;
    if (!g || g->origin != s)
        return cudaErrorIllegalState;
    cudaError_t error = g->broken    ? cudaErrorStreamCaptureInvalidated
                        : !joined(g) ? cudaErrorStreamCaptureUnjoined
                                     : cudaSuccess;
    for (cudaStream_t each = streams; each; each = each->next)
        if (each->capture == g) {
            each->capture = NULL;
            each->last = NULL;
        }
    capturing = NULL;
    if (error == cudaSuccess)
        *made = g;
    else
        cudaGraphDestroy(g);
    return error;
}

/* ---- launching ------------------------------------------------------------------------------- */

/* The graph is freed with its executable form: callers destroy the graph itself at once. */
cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t g, unsigned long long flags)
{
    (void)flags;
    if (fake.graphs < 0) /* fails on a test's request */
        return cudaErrorMemoryAllocation;
    fake.graphs++;
    *exec = calloc(1, sizeof **exec);
    (*exec)->graph = calloc(1, sizeof *g);
    *(*exec)->graph = *g;
    g->first = NULL;
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    fake.graphs--;
    cudaGraphDestroy(exec->graph);
    free(exec);
    return cudaSuccess;
}

static bool ready(const fake_node *n)
{
    for (int i = 0; i < n->afters; i++)
        if (!n->after[i]->done)
            return false;
    return !n->done;
}

static void run(fake_node *n)
{
    if (n->run)
        n->run(n->arg);
    n->done = true;
}

/* Of the work that may run, picks the latest: side streams run as early, or as late, as their
 * events allow. */
static void run_backwards(fake_graph *g)
{
    fake_node **all = calloc((size_t)g->nodes + 1, sizeof(fake_node *));
    for (fake_node *n = g->first; n; n = n->next)
        all[n->index] = n;
    for (int left = g->nodes; left > 0; left--) {
        int at = g->nodes - 1;
        while (!ready(all[at]))
            at--;
        run(all[at]);
    }
    free(all);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t s)
{
    if (s->capture)
        return fake_waiting(s);
    fake.launches++;
    for (fake_node *n = exec->graph->first; n; n = n->next)
        n->done = false;
    if (fake.backwards)
        run_backwards(exec->graph);
    for (fake_node *n = exec->graph->first; n && !fake.backwards; n = n->next)
        run(n);
    return cudaSuccess;
}
