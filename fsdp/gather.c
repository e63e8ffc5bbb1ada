/* fsdp/gather.c: a unit's shards become whole parameters, and go again: in one collective for all
 * its buckets that the same ranks share. When that happens is decided in fsdp/schedule.c.
 * Everything is ordered by streams and events; on the CPU without a free core the streams run
 * inline and the same calls happen in the same order. */
#include "fsdp/schedule.h"

bool kn_bucket_wait_for_compute(kn_bucket *b, kn_stream *s)
{
    return kn_event_record(b->computed, kn_bucket_compute_stream(b)) &&
           kn_event_wait(b->computed, s);
}

static bool gathers(const kn_bucket *b)
{
    return b->full != b->master && !b->rows;
}

/* From where to where a bucket's gather goes; comm is NULL where one rank holds the whole. */
typedef struct gather {
    kn_bucket *bucket;
    kn_comm *comm;
    kn_comm_piece piece;
} gather;

static gather gather_of(kn_bucket *b, kn_comm *comm, void *dst, const void *src, int64_t count)
{
    return (gather){ b, comm, { dst, NULL, src, count, b->full_dtype, b->full_dtype } };
}

static bool from_slice(kn_bucket *b, kn_stream *s, gather *g)
{
    int k = b->unit->slice_ranks;
    if (!kn_storage_retake(b->full) || !kn_bucket_wait_for_compute(b, s))
        return false;
    *g = gather_of(b, kn_slice_comm(&b->unit->schedule->lanes->groups, k), b->full->data,
                   b->slice->data, b->layout.full_numel / k);
    return true;
}

/* This rank's part goes to where the whole comes together, unless the master itself can be sent. */
static bool from_shard(kn_bucket *b, kn_stream *s, gather *g)
{
    const kn_layout *l = &b->layout;
    kn_storage *whole = l->zero_copy ? b->full : b->gather_stage;
    if (b->stored)
        kn_store_ahead(kn_bucket_gather_source(b)->data, kn_bucket_gather_source(b)->bytes);
    if (!kn_storage_retake(b->full) || !kn_storage_retake(whole) ||
        !kn_bucket_wait_for_compute(b, s))
        return false;
    char *own = kn_storage_at(whole, b->shards > 1 ? b->shard * l->shard : 0, b->full_dtype);
    bool copies = !b->offloaded && (b->full_dtype != b->master_dtype || b->shards == 1);
    if (b->offloaded ? !kn_bucket_upload(b, own, s)
                     : copies && !kn_copy_run(s, own, b->full_dtype, b->master->data,
                                              b->master_dtype, l->shard))
        return false;
    *g = gather_of(b, b->shards > 1 ? b->ranks->gather : NULL, whole->data,
                   b->offloaded || copies ? own : b->master->data, l->shard);
    return true;
}

bool kn_gather_default(const kn_param_gather *g, void *arg)
{
    (void)arg;
    return kn_given(g, "kn_gather_default", "the gather") &&
           kn_all_gather(g->shards, g->dst, g->src, g->count, g->dtype, g->stream, g->unit);
}

static bool run_hook(const gather *from, kn_stream *s)
{
    const kn_unit *u = from->bucket->unit;
    const kn_comm_piece *p = &from->piece;
    kn_param_gather g = { kn_unit_name(u), from->comm, s, p->dst, p->src, p->count, p->dst_dtype };
    return u->set.gather_hook(&g, u->set.gather_hook_arg) ||
           (kn_ok() && kn_fail("fsdp: the gather hook of unit '%s' failed without saying why; call "
                               "kn_fail in it",
                               kn_unit_name(u)));
}

/* One collective for each group of ranks. A hook gathers bucket by bucket. */
static bool issue(const gather *g, int n, kn_stream *s)
{
    const kn_unit *u = g->bucket->unit;
    for (int i = 0; i < n; i++) {
        kn_comm_piece piece[KN_COMM_PIECES];
        int pieces = 0, earlier = 0;
        while (g[earlier].comm != g[i].comm)
            earlier++;
        for (int k = i; k < n; k++)
            if (g[k].comm == g[i].comm)
                piece[pieces++] = g[k].piece;
        if (!g[i].comm || (!u->set.gather_hook && earlier < i))
            continue;
        if (!(u->set.gather_hook
                  ? run_hook(&g[i], s)
                  : kn_all_gather_pieces(g[i].comm, piece, pieces, s, kn_unit_name(u))))
            return false;
    }
    return true;
}

/* Puts the gathered values in their places. */
static bool arrive(kn_bucket *b, kn_stream *s)
{
    if (b->residency != KN_SLICED && !b->layout.zero_copy &&
        !kn_bucket_rearrange(b, s, b->gather_stage->data, b->full->data, b->full_dtype, true))
        return false;
    if (!kn_event_record(b->gathered, s))
        return false;
    b->residency = KN_GATHERING;
    return true;
}

/* The gathers of those that are away, up to KN_COMM_PIECES. */
static bool prepare(kn_bucket *const *bucket, int n, kn_stream *s, gather *g, int *count)
{
    for (int i = 0; i < n && kn_ok() && *count < KN_COMM_PIECES; i++) {
        kn_bucket *b = bucket[i];
        if (b->residency == KN_UNSHARDED || b->residency == KN_GATHERING)
            continue;
        if (!gathers(b))
            b->residency = KN_UNSHARDED;
        else if (!(b->residency == KN_SLICED ? from_slice(b, s, &g[*count])
                                             : from_shard(b, s, &g[*count])))
            return false;
        else
            ++*count;
    }
    return kn_ok();
}

/* Of a gather that failed, the buckets that it didn't reach hold no bytes of it. */
static void give_back(kn_bucket *const *bucket, int n, kn_stream *s)
{
    kn_stream_sync(s); /* copies into them may run */
    for (int i = 0; i < n; i++) {
        kn_bucket *b = bucket[i];
        if (!gathers(b) || b->residency == KN_UNSHARDED || b->residency == KN_GATHERING)
            continue;
        kn_storage_release(b->full);
        if (b->gather_stage)
            kn_storage_release(b->gather_stage);
    }
}

bool kn_buckets_unshard(kn_bucket *const *bucket, int n)
{
    gather g[KN_COMM_PIECES];
    kn_stream *s = n > 0 ? bucket[0]->unit->schedule->lanes->gather : NULL;
    int count = 0;
    if (!kn_ok())
        return false;
    bool ok = prepare(bucket, n, s, g, &count) && (count == 0 || issue(g, count, s));
    for (int i = 0; i < count && ok; i++)
        ok = arrive(g[i].bucket, s);
    if (!ok)
        give_back(bucket, n, s);
    return ok && (count < KN_COMM_PIECES || kn_buckets_unshard(bucket, n));
}

bool kn_bucket_wait(kn_bucket *b)
{
    if (b->residency != KN_GATHERING)
        return kn_ok();
    if (!kn_event_wait(b->gathered, kn_bucket_compute_stream(b))) /* works after errors, too */
        return false;
    b->residency = KN_UNSHARDED;
    kn_bucket_drop_slice(b);
    if (b->gather_stage)
        kn_storage_release(b->gather_stage);
    if (b->stored)
        kn_store_done(kn_bucket_gather_source(b)->data, kn_bucket_gather_source(b)->bytes);
    return kn_ok();
}

void kn_bucket_drop_slice(kn_bucket *b)
{
    if (b->slice)
        kn_storage_release(b->slice);
    if (b->residency == KN_SLICED)
        b->residency = KN_SHARDED;
}

bool kn_bucket_reshard(kn_bucket *b, int keep)
{
    /* gathered for nothing: let it arrive, then drop it */
    if (b->residency == KN_GATHERING && !kn_bucket_wait(b))
        return false;
    if (b->residency != KN_UNSHARDED)
        return true;
    b->residency = KN_SHARDED;
    if (!gathers(b))
        return true;
    bool ok = true;
    if (keep > 1 && b->slice) {
        int64_t n = b->layout.full_numel / keep;
        ok = kn_storage_retake(b->slice) &&
             kn_copy_run(kn_bucket_compute_stream(b), b->slice->data, b->full_dtype,
                         kn_storage_at(b->full, b->unit->rank % keep * n, b->full_dtype),
                         b->full_dtype, n);
        b->residency = ok ? KN_SLICED : KN_SHARDED;
    }
    kn_storage_release(b->full);
    return ok;
}
