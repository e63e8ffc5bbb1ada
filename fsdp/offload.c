/* fsdp/offload.c: buckets that lie apart from the device that computes: masters, gradient shards
 * and optimizer state are in host memory (.offload_dir "memory"), page-locked unless the options
 * decline it, or, for a GPU, in a file.
 *
 *   upload     a gather takes this rank's part to where the whole parameters come together
 *   download   the reduced gradient goes to the host: from grad_transfer or, where there is nothing
 *              to add to, from grad itself
 *   the step   runs on the host, bucket by bucket as gradients come to it (kn_param_source.step)
 *
 * Each way has a stream of its own. Nothing here waits on the host but kn_bucket_sync_transfers. */
#include "fsdp/schedule.h"
#include "kernels/kernels_internal.h"
#include "kernels/store.h"
#include <stdlib.h>
#include <string.h>

/* ---- what lies there ------------------------------------------------------------------------- */

bool kn_offloads_to_memory(const kn_fsdp_wrap_options *o)
{
    return o->offload_dir && strcmp(o->offload_dir, "memory") == 0;
}

bool kn_bucket_choose_memory(kn_bucket *b, kn_memory *shared)
{
    const kn_fsdp_wrap_options *o = &b->unit->options;
    bool host = kn_offloads_to_memory(o), pinned = !o->offload_unpinned || o->device == KN_META;
    b->offloaded = o->offload_dir && (host || o->device != KN_CPU);
    b->memory = host             ? (pinned ? kn_pinned_memory(o->device) : kn_device_memory(KN_CPU))
                : o->offload_dir ? kn_store_open(o->offload_dir)
                                 : shared;
    b->stored = o->offload_dir && !host;
    if (b->memory && b->offloaded) {
        b->away.uploaded = kn_event_create(o->device);
        b->away.downloaded = kn_event_create(o->device);
    }
    return b->memory && (!b->offloaded || (b->away.uploaded && b->away.downloaded));
}

bool kn_bucket_create_cast_master(kn_bucket *b)
{
    if (b->param_dtype == b->master_dtype)
        return true;
    b->away.cast_master =
        kn_storage_create(b->memory, (size_t)b->layout.shard * kn_dtype_size(b->param_dtype),
                          b->master->category, kn_unit_name(b->unit));
    return b->away.cast_master != NULL;
}

const kn_storage *kn_bucket_gather_source(const kn_bucket *b)
{
    return b->away.cast_master && b->full_dtype == b->param_dtype ? b->away.cast_master : b->master;
}

kn_stream *kn_bucket_host_stream(const kn_bucket *b)
{
    kn_stream *host = b->unit->schedule ? b->unit->schedule->lanes->host : NULL;
    return host ? host : kn_compute_stream(b->memory->device);
}

/* Each write of a master raises its version; the step that writes cast_master as well raises its
 * version too. */
static bool is_fresh(const kn_bucket *b)
{
    return b->away.has_cast && b->away.cast_version == b->master->version;
}

static bool cast(kn_bucket *b, int64_t at, int64_t n)
{
    return kn_copy_run(kn_bucket_host_stream(b),
                       kn_storage_at(b->away.cast_master, at, b->param_dtype), b->param_dtype,
                       kn_storage_at(b->master, at, b->master_dtype), b->master_dtype, n);
}

static bool refresh(kn_bucket *b)
{
    if (!b->away.cast_master || is_fresh(b))
        return true;
    if (b->away.has_cast && !kn_bucket_sync_transfers(b)) /* an upload may still read it */
        return false;
    if (!cast(b, 0, b->layout.shard))
        return false;
    b->away.cast_version = b->master->version;
    b->away.has_cast = true;
    return true;
}

/* ---- there and back -------------------------------------------------------------------------- */

static bool send(kn_bucket *b, void *dst, const kn_storage *from, kn_stream *then)
{
    kn_stream *s = b->unit->schedule->lanes->upload;
    return kn_bucket_wait_for_compute(b, s) && /* bytes are taken and given back in its order */

           kn_transfer(s, dst, from->data, from->bytes, KN_TO_DEVICE, true) &&
           kn_event_record(b->away.uploaded, s) && kn_event_wait(b->away.uploaded, then);
}

bool kn_bucket_upload(kn_bucket *b, void *dst, kn_stream *then)
{
    return (b->full_dtype != b->param_dtype || refresh(b)) &&
           send(b, dst, kn_bucket_gather_source(b), then);
}

bool kn_bucket_upload_grad(kn_bucket *b, kn_stream *then)
{
    return kn_storage_retake(b->away.grad_transfer) &&
           (!b->has_grad || (kn_event_wait(b->away.downloaded, b->unit->schedule->lanes->upload) &&
                             send(b, b->away.grad_transfer->data, b->grad_shard, then)));
}

bool kn_bucket_download_grad(kn_bucket *b, const kn_storage *from, kn_event *after)
{
    kn_stream *s = b->unit->schedule->lanes->download;
    b->away.download_at = ++b->unit->schedule->downloads;
    return kn_event_wait(after, s) &&
           kn_transfer(s, b->grad_shard->data, from->data, b->grad_shard->bytes, KN_TO_HOST,
                       true) &&
           kn_event_record(b->away.downloaded, s);
}

bool kn_bucket_end_download(kn_bucket *b)
{
    if (!b->away.grad_transfer || b->away.grad_transfer->released)
        return true;
    bool ok = kn_event_wait(b->away.downloaded, kn_compute_stream(b->unit->options.device));
    kn_storage_release(b->away.grad_transfer);
    return ok;
}

bool kn_bucket_sync_transfers(kn_bucket *b)
{
    return !b->offloaded ||
           (kn_event_sync(b->away.downloaded) && kn_event_sync(b->away.uploaded) && kn_ok());
}

/* ---- the step -------------------------------------------------------------------------------- */

/* Pieces of parameters that lie with the device come first, then buckets in the order in which
 * their gradients come to the host: it waits for one bucket at a time and steps it while the device
 * goes on with the backward of the next ones. */
typedef struct part {
    const kn_opt_piece *piece;
    kn_bucket *bucket; /* NULL: the master lies with the device that computes */
    int64_t download_at;
} part;

static kn_bucket *offloaded_bucket(const kn_param *p)
{
    kn_bucket *b = p->source->step == kn_offload_step ? (kn_bucket *)p->source : NULL;
    return b && b->offloaded ? b : NULL;
}

static int by_download(const void *a, const void *b)
{
    const part *x = a, *y = b;
    if (x->download_at != y->download_at)
        return x->download_at < y->download_at ? -1 : 1;
    return x->piece < y->piece ? -1 : x->piece > y->piece;
}

/* The step also writes the master's copy in param_dtype, where that holds what the master does. */
static void add_out(kn_opt_piece *q, const kn_param *p, const kn_bucket *b)
{
    if (!b || !kn_bucket_casts(b))
        return;
    q->out = kn_storage_at(b->away.cast_master, p->master->offset, b->param_dtype);
    q->out_dtype = b->param_dtype;
}

bool kn_bucket_casts(const kn_bucket *b)
{
    return b->away.cast_master && is_fresh(b);
}

bool kn_bucket_cast_part(kn_bucket *b, const kn_param *p)
{
    b->away.cast_version++; /* as the step raises the master's */
    return cast(b, p->master->offset, kn_numel(p->master));
}

/* Returns whether any of what the step touches is in a store. */
static bool sort(const kn_step_pieces *s, part *list, kn_opt_piece *sorted)
{
    bool stored = false;
    for (int i = 0; i < s->count; i++) {
        kn_bucket *b = offloaded_bucket(s->param[i]);
        add_out(&s->piece[i], s->param[i], b);
        list[i] = (part){ &s->piece[i], b, b ? b->away.download_at : 0 };
        stored |= kn_memory_is_store(s->param[i]->state_memory);
    }
    qsort(list, (size_t)s->count, sizeof *list, by_download);
    for (int i = 0; i < s->count; i++)
        sorted[i] = *list[i].piece;
    return stored;
}

static int arrays_of(const void *pieces, int i, kn_span *span)
{
    const kn_opt_piece *q = (const kn_opt_piece *)pieces + i;
    size_t bytes = (size_t)q->count * kn_dtype_size(q->param_dtype);
    const void *with_master[] = { q->param, q->m, q->v, q->more };
    int n = 0;
    span[n++] = (kn_span){ q->grad, (size_t)q->count * kn_dtype_size(q->grad_dtype) };
    for (int k = 0; k < 4; k++)
        if (with_master[k])
            span[n++] = (kn_span){ with_master[k], bytes };
    return n;
}

/* Launches sorted pieces [begin, end), which are ready together: window by window, where they are
 * in a store. */
static bool launch_batch(const kn_step_pieces *s, kn_bucket *b, const kn_opt_piece *sorted,
                         int begin, int end, bool stored)
{
    if (b && !kn_bucket_sync_transfers(b))
        return false;
    kn_stream *stream = b ? kn_bucket_host_stream(b) : NULL;
    bool ok = stored || s->launch(s->arg, sorted + begin, end - begin, stream);
    kn_store_walk w = { arrays_of, sorted, begin, begin, end, s->count };
    while (ok && stored && kn_store_next(&w))
        ok = s->launch(s->arg, sorted + w.begin, w.end - w.begin, stream);
    for (int i = begin; ok && i < end; i++)
        if (sorted[i].out)
            b->away.cast_version++; /* as each parameter's step raises the master's */
    return ok;
}

bool kn_offload_step(const kn_step_pieces *s)
{
    part *list = kn_host_calloc((size_t)s->count, sizeof *list);
    kn_opt_piece *sorted = kn_host_calloc((size_t)s->count, sizeof *sorted);
    bool ok = list && sorted, stored = ok && sort(s, list, sorted);
    for (int begin = 0, end; ok && begin < s->count; begin = end) {
        for (end = begin + 1; end < s->count && list[end].bucket == list[begin].bucket;)
            end++;
        ok = launch_batch(s, list[begin].bucket, sorted, begin, end, stored);
    }
    kn_host_free(list);
    kn_host_free(sorted);
    return ok;
}
