/* kernels/cpu/vec/gemm_batch.h (private): products of one shape, on all threads one after another,
 * or each by a thread of its own: the same bits. */
#ifndef KNAP_KERNELS_CPU_VEC_GEMM_BATCH_H
#define KNAP_KERNELS_CPU_VEC_GEMM_BATCH_H

#include "kernels/cpu/vec/gemm_blocks.h"

enum { ROOM = 4096 }; /* floats of workspace that a small product has on the stack */

typedef struct batch {
    product p;
    int ndim;
    int64_t count, shape[KN_MAX_DIMS], a[KN_MAX_DIMS], b[KN_MAX_DIMS], c[KN_MAX_DIMS];
} batch;

/* Product i of the batch. */
static product batch_at(const batch *s, int64_t i)
{
    product p = s->p;
    for (int d = s->ndim - 1; d >= 0; d--) {
        const int64_t at = i % s->shape[d];
        i /= s->shape[d];
        p.a = gemm_at(p.a, p.t, at * s->a[d]);
        p.b = gemm_at(p.b, p.t, at * s->b[d]);
        p.c = gemm_at(p.c, p.ct, at * s->c[d]);
    }
    return p;
}

/* All threads on one product after the other. */
static bool batch_shared(const batch *s, int threads)
{
    const int64_t floats = workspace_floats(&s->p, threads);
    float small[ROOM] __attribute__((aligned(64)));
    float *base = small;
    if (floats > ROOM)
        base = vec_scratch((size_t)floats * sizeof *base);
    if (!base)
        return false;
    for (int64_t i = 0; i < s->count; i++) {
        const product p = batch_at(s, i);
        product_run(&p, threads, base);
    }
    if (base != small)
        vec_scratch_end(base, (size_t)floats * sizeof *base);
    return true;
}

typedef struct division {
    const batch *s;
    float *base; /* `floats` a part */
    int64_t floats, parts;
} division;

static void divided_part(const void *ctx, int64_t part)
{
    const division *d = ctx;
    const int64_t count = d->s->count;
    for (int64_t i = count * part / d->parts; i < count * (part + 1) / d->parts; i++) {
        const product p = batch_at(d->s, i);
        product_run(&p, 1, d->base + part * d->floats);
    }
}

/* Every thread computes products of its own. */
static bool batch_divided(const batch *s, int threads)
{
    const int64_t floats = workspace_floats(&s->p, 1);
    const size_t bytes = (size_t)(floats * threads) * sizeof(float);
    float *base = vec_scratch(bytes);
    if (!base)
        return false;
    kn_each_part(threads, divided_part, &(division){ s, base, floats, threads });
    vec_scratch_end(base, bytes);
    return true;
}

#endif
