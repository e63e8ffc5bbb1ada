/* kernels/cuda/runtime/graph.h (private): recorded steps on CUDA (graph.c), for the files whose
 * work on a stream is another while it is recorded. */
#ifndef KNAP_CUDA_GRAPH_H
#define KNAP_CUDA_GRAPH_H

#include "kernels/cuda/runtime/runtime.h"
#include "kernels/graph_internal.h"

extern const kn_graph_table kn_gpu_graphs;
/* The number of the recording that s takes part in, never used before; 0: none. */
int64_t kn_gpu_recording(const kn_stream *s);
/* Memory that stays as long as its graph. */
typedef struct kn_gpu_kept {
    struct kn_gpu_kept *next;
    void *host;   /* of malloc */
    void *pinned; /* of cudaHostAlloc */
    void *device; /* of the context's pool: the graph's arena */
    size_t bytes; /* of device */
} kn_gpu_kept;
/* Keeps memory as long as the graph that is being recorded; false with an error. */
bool kn_gpu_keep(kn_gpu_kept what);
/* A recording ends: scratch that came from its arena goes back there (scratch.c). */
void kn_gpu_scratch_recorded(kn_gpu_stream *s);

#endif
