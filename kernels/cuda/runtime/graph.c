/* kernels/cuda/runtime/graph.c: recorded steps on CUDA: stream capture. All streams of the context
 * take part, from the beginning (they fork off the compute stream) to the end (they join it again),
 * so that it doesn't matter how the schedule orders them in between. A launch comes after
 * everything that was launched before on any of them, and before everything that follows: an event
 * from before a recording is over in its replays. */
#include "kernels/trace.h"
#include "kernels/cuda/runtime/arena.h"
#include "kernels/cuda/runtime/graph.h"

#include <stdlib.h>

typedef struct gpu_graph {
    kn_graph base;
    int64_t number;
    kn_gpu_stream *compute;
    kn_gpu_arena *arena;
    kn_gpu_kept *kept;
    bool capturing;
    cudaGraphExec_t exec;
} gpu_graph;

int64_t kn_gpu_recording(const kn_stream *s)
{
    const kn_graph *g = s->context->graph.recording;
    return g && g->device == KN_CUDA ? ((const gpu_graph *)g)->number : 0;
}

bool kn_gpu_keep(kn_gpu_kept what)
{
    gpu_graph *g = (gpu_graph *)kn_graph_recording();
    kn_gpu_kept *k = g ? kn_host_alloc(sizeof *k) : NULL;
    if (!k)
        return kn_ok() && kn_fail("no step is being recorded by this thread");
    *k = what;
    k->next = g->kept;
    g->kept = k;
    return true;
}

static void drop_kept(gpu_graph *g)
{
    while (g->kept) {
        kn_gpu_kept *k = g->kept;
        g->kept = k->next;
        free(k->host);
        cudaFreeHost(k->pinned);
        if (k->device)
            kn_give(kn_gpu_memory_of(g->compute->memory), k->device, k->bytes, KN_MEM_WORKSPACE);
        kn_host_free(k);
    }
}

/* ---- the other streams ----------------------------------------------------------------------- */

/* They wait for the compute stream (fork), or it waits for them (join). */
static bool order_all(const gpu_graph *g, bool fork)
{
    bool ok = true;
    cudaStream_t compute = g->compute->handle;
    for (kn_stream *s = g->compute->base.context->streams; s && ok; s = s->next) {
        if (s->table != g->compute->base.table)
            continue;
        cudaStream_t side = ((kn_gpu_stream *)s)->handle;
        ok = fork ? kn_gpu_order(compute, side) : kn_gpu_order(side, compute);
    }
    return ok;
}

static void return_scratch(const gpu_graph *g)
{
    for (kn_stream *s = g->compute->base.context->streams; s; s = s->next)
        if (s->table == g->compute->base.table)
            kn_gpu_scratch_recorded((kn_gpu_stream *)s);
}

/* ---- recording ------------------------------------------------------------------------------- */

static void graph_drop(kn_graph *graph);

static kn_graph *graph_begin(void)
{
    static _Atomic int64_t numbers;
    gpu_graph *g = kn_host_calloc(1, sizeof *g);
    if (!g)
        return NULL;
    g->number = ++numbers;
    g->compute = (kn_gpu_stream *)kn_compute_stream(KN_CUDA);
    g->arena = order_all(g, false) ? kn_gpu_arena_begin(g->compute->memory) : NULL;
    g->capturing =
        g->arena &&
        kn_cuda_check(cudaStreamBeginCapture(g->compute->handle, cudaStreamCaptureModeThreadLocal),
                      "recording a step");
    if (g->capturing && order_all(g, true))
        return &g->base;
    graph_drop(&g->base);
    kn_host_free(g);
    return NULL;
}

static cudaGraph_t end_capture(gpu_graph *g, cudaError_t *error)
{
    cudaGraph_t recorded = NULL;
    return_scratch(g);
    *error = cudaStreamEndCapture(g->compute->handle, &recorded);
    g->capturing = false;
    kn_gpu_arena_recorded(g->arena);
    return recorded;
}

static bool graph_end(kn_graph *graph)
{
    gpu_graph *g = (gpu_graph *)graph;
    cudaError_t error;
    bool joined = order_all(g, false);
    cudaGraph_t recorded = end_capture(g, &error);
    if (error == cudaErrorStreamCaptureUnjoined) {
        cudaGetLastError();
        kn_fail("recording a step: a stream that isn't Knap's waited for work of the step, and the "
                "step "
                "didn't wait for that stream again; let the compute stream wait for it at the end");
    }
    bool ok =
        joined && kn_cuda_check(error, "recording a step") &&
        kn_cuda_check(cudaGraphInstantiate(&g->exec, recorded, 0), "making a graph of a step");
    if (recorded)
        cudaGraphDestroy(recorded);
    return ok && kn_ok();
}

static bool graph_launch(kn_graph *graph)
{
    gpu_graph *g = (gpu_graph *)graph;
    bool tracing = kn_tracing();
    if (!kn_cuda_open() || !order_all(g, false))
        return false;
    if (tracing)
        kn_gpu_trace_begin(&g->compute->base);
    bool ok =
        kn_cuda_check(cudaGraphLaunch(g->exec, g->compute->handle), "replaying a recorded step");
    if (tracing)
        kn_gpu_trace_end(&g->compute->base, "recorded step", "graph", 0, 0);
    return order_all(g, true) && ok;
}

static void graph_drop(kn_graph *graph)
{
    gpu_graph *g = (gpu_graph *)graph;
    cudaError_t error;
    if (g->capturing) {
        cudaGraph_t half = end_capture(g, &error);
        if (half)
            cudaGraphDestroy(half);
        cudaGetLastError();
    }
    if (g->exec) {
        cudaStreamSynchronize(g->compute->handle);
        cudaGraphExecDestroy(g->exec);
    }
    drop_kept(g);
    kn_gpu_arena_free(g->arena);
}

const kn_graph_table kn_gpu_graphs = { graph_begin, graph_end, graph_launch, graph_drop };
