/* kernels/cuda/runtime/arena.h (private): the GPU memory of a context, and the parts of it that
 * belong to recorded steps. */
#ifndef KNAP_KERNELS_CUDA_ARENA_H
#define KNAP_KERNELS_CUDA_ARENA_H

#include "kernels/cuda/runtime/pool.h"
#include "kernels/cuda/runtime/runtime.h"

#include <pthread.h>

typedef struct kn_gpu_arena kn_gpu_arena;

struct kn_gpu_memory {
    kn_memory memory; /* state points back here */
    kn_gpu_pool *pool;
    bool ended; /* its owner went; the last block that comes back ends the pool */
    pthread_mutex_t lock;
    kn_gpu_arena *arenas;    /* of all graphs, newest first */
    kn_gpu_arena *recording; /* where blocks come from now; NULL: the pool */
    kn_gpu_memory *more;     /* the context's next one */
    kn_gpu_memory **at;      /* what points here as its next; NULL: nothing */
};

/* Ends m's pool if nobody has blocks or arenas of it any more. */
void kn_gpu_memory_settle(kn_gpu_memory *m);

/* From now on the blocks of m, and of those that come after it, are of new arenas. NULL with an
 * error. */
kn_gpu_arena *kn_gpu_arena_begin(kn_gpu_memory *m);
/* The recording is over: blocks come from the pool again. */
void kn_gpu_arena_recorded(kn_gpu_arena *a);
/* The graph is gone. Blocks that are still out of the arena stay valid; the last one ends it. NULL
 * is fine. */
void kn_gpu_arena_free(kn_gpu_arena *a);
/* m->lock is held: */
void *kn_gpu_arena_take(kn_gpu_arena *a, size_t bytes);
void kn_gpu_arenas_give(kn_gpu_memory *m, void *p, size_t bytes);

#endif
