/* kernels/cuda/runtime/pool.h (private): a caching allocator over memory that is slow to get (a
 * GPU's, page-locked host memory). It never reads or writes the memory it hands out, so tests run
 * it over plain numbers.
 *
 * Segments come from a source and are cut into blocks, which are handed out by best fit, split, and
 * merged with free neighbours when they come back. Requests up to 1 MiB share segments of 2 MiB;
 * larger ones segments of 20 MiB; from 10 MiB on a request gets a segment of its own size, rounded
 * up to 2 MiB. The place of a block depends only on the calls before it: the same calls give the
 * same peak. */
#ifndef KNAP_KERNELS_CUDA_POOL_H
#define KNAP_KERNELS_CUDA_POOL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* get gives NULL where there is none left; bytes of put are those of get. */
typedef struct kn_gpu_pool_source {
    void *(*get)(void *arg, size_t bytes);
    void (*put)(void *arg, void *p, size_t bytes);
    void *arg;
    void (*end)(void *arg); /* the pool is gone; may be NULL */
} kn_gpu_pool_source;

typedef struct kn_gpu_pool kn_gpu_pool;

typedef struct kn_gpu_pool_stats {
    int64_t reserved, peak_reserved; /* bytes of segments */
    int64_t live;                    /* bytes of blocks that are out, rounding included */
    int64_t largest_free;            /* bytes of the largest free block */
    int64_t segments, blocks_out, blocks_free;
} kn_gpu_pool_stats;

kn_gpu_pool *kn_gpu_pool_create(kn_gpu_pool_source source); /* NULL with an error */
/* Gives all segments back. Blocks that are out are lost. */
void kn_gpu_pool_destroy(kn_gpu_pool *p);
/* A multiple of 512 bytes from the segment's start on. NULL where the source has none, without an
 * error. */
void *kn_gpu_pool_take(kn_gpu_pool *p, size_t bytes);
void kn_gpu_pool_give(kn_gpu_pool *p, void *block);
/* The how-manieth take of the pool handed out the block that begins there; -1 where none is out. */
int64_t kn_gpu_pool_taken(kn_gpu_pool *p, const void *block);
int64_t kn_gpu_pool_takes(kn_gpu_pool *p); /* so far */
/* Gives segments without a block that is out back to the source. */
void kn_gpu_pool_trim(kn_gpu_pool *p);
kn_gpu_pool_stats kn_gpu_pool_read(kn_gpu_pool *p);
/* Tests: every rule that must hold between calls; false with an error that names the broken one. */
bool kn_gpu_pool_check(kn_gpu_pool *p);

#endif
