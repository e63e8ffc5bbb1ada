/* fsdp/stages.c: how reductions run, and the memory of hooks that replace them.
 *
 * A reduction has two stages, of which either may be missing:
 *   shards    reduce-scatter: each rank of a shard group gets the sum of one chunk
 *   replicas  all-reduce of that chunk over the ranks that hold the same one
 * Between them, where there are both, lies kn_grad_reduction.partial. With neither (one rank) the
 * sum is src alone. Every stage adds in rank order, starting from what was accumulated before.
 * Several reductions over the same ranks make one collective of each stage. */
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"

/* ---- scratch --------------------------------------------------------------------------------- */

kn_memory *kn_bucket_comm_memory(const kn_bucket *b)
{
    const kn_unit *u = b->unit;
    return u->size > 1 ? kn_comm_memory_on(u->comm, u->options.device)
                       : kn_device_memory(u->options.device);
}

void *kn_reduction_scratch(const kn_grad_reduction *r, size_t bytes)
{
    if (!kn_given(r, "kn_reduction_scratch", "the reduction"))
        return NULL;
    kn_bucket *b = r->_bucket;
    kn_scratch *s = &b->scratch;
    void *p = kn_host_grow(&s->list, &s->room, s->count + 1, sizeof *s->list)
                  ? kn_take(kn_bucket_comm_memory(b), bytes, KN_MEM_COMM)
                  : NULL;
    if (p)
        s->list[s->count++] = (kn_scratch_bytes){ p, bytes };
    return p;
}

void kn_reduction_free_scratch(kn_bucket *b)
{
    for (int i = 0; i < b->scratch.count; i++)
        kn_give(kn_bucket_comm_memory(b), b->scratch.list[i].data, b->scratch.list[i].bytes,
                KN_MEM_COMM);
    kn_host_free(b->scratch.list);
    b->scratch = (kn_scratch){ 0 };
}

/* *src and *dtype become what stage sends. */
static bool prepare(const kn_grad_reduction *r, const void **src, kn_dtype *dtype, int64_t count,
                    const kn_sending *how, int stage)
{
    if (!how || *dtype == how->dtype || count == 0)
        return true;
    void *room = kn_reduction_scratch(r, (size_t)count * kn_dtype_size(how->dtype));
    if (!room || !how->convert(r, room, *src, count, *dtype, how, stage))
        return false;
    *src = room;
    *dtype = how->dtype;
    return true;
}

/* ---- the two stages -------------------------------------------------------------------------- */

static bool add_alone(const kn_grad_reduction *r, void *dst, const void *acc, const void *src,
                      kn_dtype src_dtype)
{
    kn_sum_n_args a = { .dst = dst,
                        .acc = acc,
                        .src = { src },
                        .n = 1,
                        .count = r->count,
                        .dst_dtype = r->dst_dtype,
                        .src_dtype = src_dtype };
    return r->count == 0 || KN_LAUNCH(r->stream, KN_K_SUM_N, a);
}

/* The inputs of a stage of one reduction. */
typedef struct way {
    const void *src;
    kn_dtype dtype;
    void *partial;
    int stage;
} way;

/* The first stage, where there is one: a piece of the reduce-scatter, or this rank's own sum. */
static bool first_stage(const kn_grad_reduction *r, const kn_sending *how, way *w,
                        kn_comm_piece *piece, int *pieces)
{
    *w = (way){ r->src, r->src_dtype, r->partial, 1 };
    if (r->shards && r->replicas && !w->partial) {
        w->partial = kn_reduction_scratch(r, (size_t)r->count * kn_dtype_size(r->dst_dtype));
        if (!w->partial)
            return false;
    }
    if (!r->shards && !w->partial && r->replicas)
        return true;
    int64_t all = r->shards ? r->count * kn_comm_size(r->shards) : r->count;
    void *to = w->partial ? w->partial : r->dst;
    const void *acc = w->partial ? r->partial_acc : r->acc;
    if (!prepare(r, &w->src, &w->dtype, all, how, w->stage++))
        return false;
    if (r->shards)
        piece[(*pieces)++] = (kn_comm_piece){ to, acc, w->src, r->count, r->dst_dtype, w->dtype };
    else if (!add_alone(r, to, acc, w->src, w->dtype))
        return false;
    w->src = w->partial;
    w->dtype = r->dst_dtype;
    return true;
}

bool kn_reduce_in_stages(const kn_grad_reduction *r, int n, const kn_sending *how)
{
    kn_comm_piece piece[KN_COMM_PIECES];
    way w[KN_COMM_PIECES];
    int pieces = 0;
    for (int i = 0; i < n; i++)
        if (!first_stage(&r[i], how, &w[i], piece, &pieces))
            return false;
    if (pieces > 0 && !kn_reduce_scatter_pieces(r->shards, piece, pieces, r->stream, r->unit))
        return false;
    if (!r->replicas)
        return true;
    for (int i = 0; i < n; i++) {
        if (!prepare(&r[i], &w[i].src, &w[i].dtype, r[i].count, how, w[i].stage))
            return false;
        piece[i] =
            (kn_comm_piece){ r[i].dst, r[i].acc, w[i].src, r[i].count, r[i].dst_dtype, w[i].dtype };
    }
    return kn_all_reduce_pieces(r->replicas, piece, n, r->stream, r->unit);
}

bool kn_reduce_default(const kn_grad_reduction *r, void *arg)
{
    if (!kn_given(r, "kn_reduce_default", "the reduction"))
        return false;
    (void)arg;
    return kn_reduce_in_stages(r, 1, NULL);
}
