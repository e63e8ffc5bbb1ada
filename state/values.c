/* state/values.c: reads and writes what a list of entries names. */
#include "kernels/graph.h"
#include "kernels/kernels.h"
#include "state/entries.h"
#include "tensor/tensor_internal.h"

#include <string.h>

int64_t kn_entry_numel(const kn_entry *e)
{
    return kn_shape_numel(e->ndim, e->shape);
}

size_t kn_entry_bytes(const kn_entry *e)
{
    return (size_t)kn_entry_numel(e) * kn_dtype_size(e->dtype);
}

size_t kn_entry_part_bytes(const kn_entry *e)
{
    return (size_t)kn_interval_numel(e->part) * kn_dtype_size(e->dtype);
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The host may read the entry's bytes: an offloaded step may still be writing them. */
static bool settle(const kn_entry *e)
{
    return !e->bucket || kn_bucket_sync_transfers(e->bucket);
}

void *kn_entry_data(const kn_entry *e)
{
    if (kn_entry_part_bytes(e) == 0 || kn_device_of(e->tensor) != KN_CPU ||
        !kn_is_contiguous(e->tensor) || !settle(e) || !kn_stream_sync(kn_compute_stream(KN_CPU)))
        return NULL;
    return kn_data(e->tensor);
}

bool kn_entry_read(const kn_entry *e, void *host)
{
    const size_t bytes = kn_entry_part_bytes(e);
    return kn_ok() && (bytes == 0 || (settle(e) && kn_to_host(e->tensor, host, bytes)));
}

bool kn_entry_gather(const kn_entry *e, const kn_entries *all, void *host)
{
    const size_t bytes = kn_entry_bytes(e);
    kn_bucket *b = e->bucket;
    if (b && b->shards > 1)
        return kn_bucket_gather_param(b, e->index, e->row ? e->row : 1, e->tensor, host);
    if (bytes == 0)
        return kn_ok();
    const bool shared = b && (b->unit->size > 1 || e->plain);
    const bool mine = kn_rank(all->comm) == e->rank || shared;
    if (mine && !kn_entry_read(e, host))
        return false;
    return shared || kn_hosts_broadcast(all->comm, host, bytes, e->rank, e->name);
}

/* ---- writing --------------------------------------------------------------------------------- */

bool kn_entries_may_write(const kn_entries *e, const char *what)
{
    if (kn_recording())
        return kn_fail("%s: a step is being recorded; load before it", what);
    for (int i = 0; i < e->count; i++) {
        const kn_entry *at = &e->list[i];
        if (at->bucket && !kn_unit_closed(at->bucket->unit, at->name, what))
            return false;
        const size_t bytes = at->tensor ? kn_entry_part_bytes(at) : 0;
        const bool meta = at->tensor && kn_device_of(at->tensor) == KN_META;
        if (meta && (at->kind == KN_ENTRY_BUFFER || !at->tensor->storage->data))
            return kn_fail("%s: '%s' lies on meta, where nothing has values; kn_materialize or "
                           "kn_fsdp_wrap gives it bytes",
                           what, at->name);
        if (bytes > 0 && !kn_array_of(at->tensor).data) /* takes them, where it has none yet */
            return false;
    }
    return kn_ok();
}

bool kn_entry_write(const kn_entry *e, const void *host)
{
    const bool master = e->bucket && e->tensor->storage == e->bucket->master;
    if (!kn_ok() || (master && !kn_bucket_sync_transfers(e->bucket)))
        return false;
    bool ok = kn_entry_part_bytes(e) == 0 || kn_from_host(e->tensor, host);
    if (ok && kn_entry_part_bytes(e) > 0)
        kn_written(e->tensor);
    if (e->kind == KN_ENTRY_FLAT)
        e->bucket->master->version++; /* which counts for all of its parameters */
    return ok && kn_ok() && (!master || kn_bucket_drop_gathered(e->bucket, e->index));
}

/* ---- buffers that differ --------------------------------------------------------------------- */

static bool compare(kn_entries *all, char *first, char *mine, float *differ)
{
    bool ok = true;
    for (int i = 0; ok && i < all->count; i++) {
        const kn_entry *e = &all->list[i];
        const size_t bytes = kn_entry_bytes(e);
        if (e->kind != KN_ENTRY_BUFFER || e->rank > 0 || bytes == 0)
            continue;
        ok = kn_entry_read(e, mine) && kn_entry_gather(e, all, first);
        differ[i] = ok && memcmp(first, mine, bytes) != 0;
    }
    return ok && kn_hosts_max(all->comm, differ, all->count, "buffers of a state");
}

bool kn_entries_compare_buffers(kn_entries *e)
{
    size_t most = 0;
    for (int i = 0; i < e->count; i++)
        if (e->list[i].kind == KN_ENTRY_BUFFER && kn_entry_bytes(&e->list[i]) > most)
            most = kn_entry_bytes(&e->list[i]);
    if (most == 0 || kn_comm_size(e->comm) < 2)
        return kn_ok();
    char *first = kn_host_alloc(most), *mine = kn_host_alloc(most);
    float *differ = kn_host_calloc((size_t)e->count, sizeof *differ);
    bool ok = first && mine && differ && compare(e, first, mine, differ);
    for (int i = 0; ok && i < e->count; i++)
        e->list[i].differs = differ[i] != 0;
    kn_host_free(first);
    kn_host_free(mine);
    kn_host_free(differ);
    return ok;
}
