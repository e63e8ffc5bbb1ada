/* kernels/cpu/vec/chunks.h (private): lists of pieces, cut into chunks of fixed size that threads
 * share evenly, however uneven the pieces are. */
#ifndef KNAP_KERNELS_CPU_VEC_CHUNKS_H
#define KNAP_KERNELS_CPU_VEC_CHUNKS_H

#include "kernels/cpu/vec/iter.h"

#define CHUNK 65536 /* elements */

typedef int64_t (*count_fn)(const void *list, int i);
/* Elements [begin, end) of list[i]. */
typedef void (*chunk_fn)(const void *list, int i, int64_t begin, int64_t end, void *ctx);

static inline int64_t chunks_of(int64_t count)
{
    return (count + CHUNK - 1) / CHUNK;
}

/* Chunks [first, last) of the list's chunks, counted through. */
static inline void some_chunks(const void *list, int n, count_fn count, int64_t first, int64_t last,
                               chunk_fn fn, void *ctx)
{
    int64_t base = 0;
    for (int i = 0; i < n && base < last; i++) {
        const int64_t size = count(list, i), chunks = chunks_of(size);
        for (int64_t c = v_max_i64(first - base, 0); c < chunks && base + c < last; c++)
            fn(list, i, c * CHUNK, v_min_i64((c + 1) * CHUNK, size), ctx);
        base += chunks;
    }
}

typedef struct chunk_call {
    const void *list;
    int n, threads;
    count_fn count;
    int64_t chunks;
    chunk_fn fn;
    char *ctx;
    size_t step;
} chunk_call;

static inline void chunk_share(const void *ctx, int64_t t)
{
    const chunk_call *c = ctx;
    some_chunks(c->list, c->n, c->count, t * c->chunks / c->threads,
                (t + 1) * c->chunks / c->threads, c->fn, c->ctx + (size_t)t * c->step);
}

/* Calls fn on every chunk; ctx + t * step is thread t's. bytes an element decides on threads.
 * Returns how many threads had a share. */
static inline int each_chunk(const void *list, int n, count_fn count, int64_t bytes, chunk_fn fn,
                             char *ctx, size_t step, int most)
{
    int64_t chunks = 0, elements = 0;
    for (int i = 0; i < n; i++) {
        chunks += chunks_of(count(list, i));
        elements += count(list, i);
    }
    int threads = kn_threads_for(elements * bytes);
    threads = threads < most ? threads : most;
    kn_each_part(threads, chunk_share,
                 &(chunk_call){ list, n, threads, count, chunks, fn, ctx, step });
    return threads;
}

#endif
