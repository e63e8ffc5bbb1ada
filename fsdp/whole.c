/* fsdp/whole.c: the whole parameters of a bucket in bytes of their own, in the masters' dtype, and
 * back (whole.h). They are put together chunk by chunk, where the layout allows it by one
 * collective. */
#include "fsdp/whole.h"
#include <string.h>

/* An offloaded shard was read or written and isn't needed for a while. */
static void done_with(const kn_bucket *b, const kn_storage *shard)
{
    if (b->stored)
        kn_store_done(shard->data, shard->bytes);
}

/* ---- bytes, wherever they lie ---------------------------------------------------------------- */

static kn_stream *stream_of(const kn_whole *w)
{
    return kn_compute_stream(w->place);
}

/* Where the whole lies on the host, everything is there when a function returns. */
static bool move(const kn_whole *w, void *dst, kn_device to, const void *src, kn_device from,
                 size_t bytes)
{
    kn_stream *s = kn_compute_stream(to == KN_CPU ? from : to);
    kn_way way = to == from ? KN_WITHIN : to == KN_CPU ? KN_TO_HOST : KN_TO_DEVICE;
    return kn_transfer(s, dst, src, bytes, way, false) && (w->place != KN_CPU || kn_stream_sync(s));
}

/* ---- chunks: one rank's shard of a bucket ---------------------------------------------------- */

static size_t chunk_bytes(const kn_bucket *b, kn_dtype t)
{
    return (size_t)b->layout.shard * kn_dtype_size(t);
}

static bool send(const kn_whole *w, char *chunk, kn_dtype t, int root)
{
    const kn_unit *u = w->bucket->unit;
    return u->size == 1 || kn_broadcast(u->comm, chunk, (int64_t)chunk_bytes(w->bucket, t), root,
                                        stream_of(w), kn_unit_name(u));
}

/* ---- gathering ------------------------------------------------------------------------------- */

/* full = every shard in its place, where it has bytes; room: for one. Of the ranks that hold shard
 * s, rank s answers. */
static bool gather_chunks(const kn_whole *w, kn_storage *full, const kn_storage *shard, kn_dtype t,
                          char *room)
{
    const kn_bucket *b = w->bucket;
    for (int s = 0; s < b->shards; s++) {
        const bool there = b->layout.zero_copy && !full->released;
        char *chunk = there ? (char *)full->data + (size_t)s * chunk_bytes(b, t) : room;
        if (b->shard == s &&
            !move(w, chunk, w->place, shard->data, shard->device, chunk_bytes(b, t)))
            return false;
        if (b->shards > 1 && !send(w, chunk, t, s))
            return false;
        if (!there && !full->released &&
            !kn_bucket_move_chunk(b, stream_of(w), s, chunk, full->data, t, true))
            return false;
    }
    return true;
}

/* The whole of what the ranks hold in shard; without bytes where the rank isn't to have it. */
static kn_storage *gather(const kn_whole *w, const kn_storage *shard, kn_dtype t)
{
    const kn_bucket *b = w->bucket;
    const kn_unit *u = b->unit;
    kn_memory *pool = kn_device_memory(w->place);
    size_t bytes = (size_t)b->layout.full_numel * kn_dtype_size(t), chunk = chunk_bytes(b, t);
    bool here = !w->rank0_only || u->rank == 0;
    kn_storage *full =
        here ? kn_storage_create(pool, bytes, KN_MEM_GATHERED, kn_unit_name(u))
             : kn_storage_create_released(pool, bytes, KN_MEM_GATHERED, kn_unit_name(u));
    bool ok = full != NULL, straight = b->layout.zero_copy && shard->device == w->place;
    if (ok && straight && !w->rank0_only && b->shards > 1 && b->shards == u->size) {
        ok = kn_all_gather(u->comm, full->data, shard->data, b->layout.shard, t, stream_of(w),
                           kn_unit_name(u));
    } else if (ok) {
        char *room = kn_take(pool, chunk, KN_MEM_GATHERED);
        ok = room && gather_chunks(w, full, shard, t, room);
        if (room)
            kn_give(pool, room, chunk, KN_MEM_GATHERED);
    }
    done_with(b, shard);
    if (ok && kn_ok())
        return full;
    kn_storage_unref(full);
    return NULL;
}

bool kn_whole_gather(kn_whole *w, bool with_grads)
{
    kn_bucket *b = w->bucket;
    w->values = gather(w, b->master, b->master_dtype);
    if (!w->values || !with_grads || !b->has_grad)
        return w->values != NULL;
    w->grads = kn_bucket_sync_transfers(b) ? gather(w, b->grad_shard, b->grad_dtype) : NULL;
    return w->grads != NULL;
}

/* ---- back ------------------------------------------------------------------------------------ */

/* p, which lies on device d, or a copy of it on the host; *room is what to free. */
static const void *on_host(const void *p, kn_device d, size_t bytes, void **room)
{
    *room = NULL;
    if (d == KN_CPU)
        return p;
    kn_stream *s = kn_compute_stream(d);
    *room = kn_host_alloc(bytes + 1);
    bool ok = *room && kn_transfer(s, *room, p, bytes, KN_TO_HOST, true) && kn_stream_sync(s);
    return ok ? *room : NULL;
}

/* Whole tensors, and the shards that they become: of parameters, or of their gradients. */
typedef struct sides {
    const kn_storage *full;
    kn_storage *shard;
    kn_dtype dtype;
    bool grads;
} sides;

/* This rank's shard becomes chunk, parameter by parameter; changed[i] where the part of number i
 * was something else. Gradients that were dropped since stay so. */
static bool take_chunk(const kn_whole *w, const sides *s, char *chunk, float *changed)
{
    kn_bucket *b = w->bucket;
    size_t bytes = chunk_bytes(b, s->dtype), size = kn_dtype_size(s->dtype);
    kn_device device = s->shard->device;
    void *room[2];
    const char *now = on_host(chunk, w->place, bytes, &room[0]);
    const char *was = on_host(s->shard->data, device, bytes, &room[1]);
    bool ok = now && was;
    for (int i = 0; ok && i < b->params; i++) {
        kn_interval part = kn_layout_part(&b->layout, i, b->shard);
        size_t at = (size_t)part.at * size, n = (size_t)kn_interval_numel(part) * size;
        if ((s->grads && !kn_passes_any(&b->param[i].passes)) || memcmp(was + at, now + at, n) == 0)
            continue;
        ok = kn_bucket_sync_transfers(b) &&
             move(w, (char *)s->shard->data + at, device, chunk + at, w->place, n) &&
             (device == w->place || kn_stream_sync(stream_of(w)));
        changed[i] = 1;
    }
    kn_host_free(room[0]);
    kn_host_free(room[1]);
    return ok;
}

/* Chunk by chunk, by way of room for one: of all shards where rank 0 has them. */
static bool write_side(const kn_whole *w, sides p, float *changed)
{
    const kn_bucket *b = w->bucket;
    kn_memory *pool = kn_device_memory(w->place);
    size_t bytes = chunk_bytes(b, p.dtype);
    char *room = kn_take(pool, bytes, KN_MEM_GATHERED);
    bool ok = room != NULL;
    for (int s = 0; ok && s < b->shards; s++) {
        const bool mine = b->shard == s;
        if (!mine && !w->rank0_only)
            continue;
        ok = (p.full->released ||
              kn_bucket_move_chunk(b, stream_of(w), s, room, p.full->data, p.dtype, false)) &&
             (!w->rank0_only || send(w, room, p.dtype, 0)) &&
             (!mine || take_chunk(w, &p, room, changed));
    }
    if (room)
        kn_give(pool, room, bytes, KN_MEM_GATHERED);
    done_with(b, p.shard);
    return ok && kn_ok();
}

/* A gathered copy that a graph has saved is out of date on every rank if a shard of any changed. */
bool kn_whole_write_back(const kn_whole *w)
{
    kn_bucket *b = w->bucket;
    float *changed = kn_host_calloc((size_t)b->params + 1, sizeof *changed);
    bool ok = changed &&
              (!w->grads ||
               write_side(w, (sides){ w->grads, b->grad_shard, b->grad_dtype, true }, changed)) &&
              memset(changed, 0, (size_t)b->params * sizeof *changed) &&
              write_side(w, (sides){ w->values, b->master, b->master_dtype, false }, changed);
    ok = ok && kn_hosts_max(b->unit->comm, changed, b->params, kn_unit_name(b->unit));
    for (int i = 0; ok && i < b->params; i++)
        if (changed[i] > 0)
            kn_bucket_written(b, i);
    kn_host_free(changed);
    return ok && kn_ok();
}
