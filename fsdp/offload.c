/* fsdp/offload.c: buckets that lie apart from the device that computes: masters, gradient shards and optimizer
 * state are in page-locked host memory (.offload_dir "memory") or, for a GPU, in a file.
 *
 *   upload     a gather takes this rank's part to where the whole parameters come together
 *   download   the reduced gradient goes home, from down or, where there is nothing to add, from grad itself
 *   the step   runs on the host, bucket by bucket as gradients come home (kn_param_home.turn)
 *
 * Each way has a stream of its own. Nothing here waits on the host but kn_bucket_arrive. */
#include "fsdp/schedule.h"
#include "kernels/kernels_internal.h"
#include <string.h>

/* ---- what lies there --------------------------------------------------------------------------------- */

bool kn_offloads_to_memory(const kn_fsdp_wrap_options *o)
{
    return o->offload_dir && strcmp(o->offload_dir, "memory") == 0;
}

bool kn_bucket_find_home(kn_bucket *b, kn_memory *shared)
{
    const kn_fsdp_wrap_options *o = &b->unit->options;
    bool pinned = kn_offloads_to_memory(o);
    b->away = o->offload_dir && (pinned || o->device != KN_CPU);
    b->home = pinned           ? kn_pinned_memory(o->device)
              : o->offload_dir ? kn_store_open(o->offload_dir)
                               : shared;
    if (b->home && b->away) {
        b->uploaded = kn_event_create(o->device);
        b->landed = kn_event_create(o->device);
    }
    return b->home && (!b->away || (b->uploaded && b->landed));
}

bool kn_bucket_make_low(kn_bucket *b)
{
    if (b->param_dtype == b->master_dtype)
        return true;
    b->low = kn_storage_create(b->home, (size_t)b->layout.shard * kn_dtype_size(b->param_dtype),
                               b->master->category, kn_unit_name(b->unit));
    return b->low != NULL;
}

const kn_storage *kn_bucket_sent(const kn_bucket *b)
{
    return b->low ? b->low : b->master;
}

kn_stream *kn_bucket_home_stream(const kn_bucket *b)
{
    kn_stream *host = b->unit->schedule ? b->unit->schedule->host : NULL;
    return host ? host : kn_compute_stream(b->home->device);
}

/* Whoever writes a master raises its version; the step that writes low as well raises low's with it. */
static bool is_fresh(const kn_bucket *b)
{
    return b->low_made && b->low_version == b->master->version;
}

static bool refresh(kn_bucket *b)
{
    if (!b->low || is_fresh(b))
        return true;
    if (b->low_made && !kn_bucket_arrive(b)) /* an upload may still read it */
        return false;
    int64_t n = b->layout.shard;
    kn_copy_args args = { kn_array_make(b->low->data, b->param_dtype, 1, &n),
                          kn_array_make(b->master->data, b->master_dtype, 1, &n) };
    if (n > 0 && !KN_LAUNCH(kn_bucket_home_stream(b), KN_K_COPY, args))
        return false;
    b->low_version = b->master->version;
    b->low_made = true;
    return true;
}

/* ---- there and back ------------------------------------------------------------------------------------ */

/* Bytes that the device takes and gives back are its compute stream's: s goes on from where that is. */
static bool after_compute(kn_bucket *b, kn_stream *s)
{
    return kn_event_record(b->computed, kn_compute_stream(b->unit->options.device)) &&
           kn_event_wait(b->computed, s);
}

static bool send(kn_bucket *b, void *dst, const kn_storage *from, kn_stream *then)
{
    kn_stream *s = b->unit->schedule->upload;
    return after_compute(b, s) &&
           kn_transfer(s, dst, from->data, from->bytes, KN_TO_DEVICE, true) &&
           kn_event_record(b->uploaded, s) && kn_event_wait(b->uploaded, then);
}

bool kn_bucket_upload(kn_bucket *b, void *dst, kn_stream *then)
{
    return refresh(b) && send(b, dst, kn_bucket_sent(b), then);
}

bool kn_bucket_fetch(kn_bucket *b, kn_stream *then)
{
    return kn_storage_retake(b->down) &&
           (!b->has_grad || (kn_event_wait(b->landed, b->unit->schedule->upload) &&
                             send(b, b->down->data, b->gshard, then)));
}

bool kn_bucket_bring_home(kn_bucket *b, const kn_storage *from, kn_event *after)
{
    kn_stream *s = b->unit->schedule->download;
    b->turn = ++b->unit->schedule->turns;
    return kn_event_wait(after, s) &&
           kn_transfer(s, b->gshard->data, from->data, b->gshard->bytes, KN_TO_HOST, true) &&
           kn_event_record(b->landed, s);
}

bool kn_bucket_land(kn_bucket *b)
{
    if (!b->down || b->down->released)
        return true;
    bool ok = kn_event_wait(b->landed, kn_compute_stream(b->unit->options.device));
    kn_storage_release(b->down);
    return ok;
}

bool kn_bucket_arrive(kn_bucket *b)
{
    return !b->away || (kn_event_sync(b->landed) && kn_event_sync(b->uploaded) && kn_ok());
}

/* ---- the step ------------------------------------------------------------------------------------------ */

bool kn_bucket_home(const kn_param *p, kn_param_home *h)
{
    const kn_bucket *b = (const kn_bucket *)p->source;
    if (!b->away)
        return false;
    *h = (kn_param_home){ .turn = b->turn, .stream = kn_bucket_home_stream(b) };
    if (b->low && is_fresh(b)) {
        int64_t at = b->param[p->index].part.at;
        h->out = (char *)b->low->data + (size_t)at * kn_dtype_size(b->param_dtype);
        h->out_dtype = b->param_dtype;
    }
    return true;
}

bool kn_bucket_arrive_param(const kn_param *p)
{
    return kn_bucket_arrive((kn_bucket *)p->source);
}

/* Each parameter's step raises the master's version by one. */
void kn_bucket_stepped(const kn_param *p)
{
    ((kn_bucket *)p->source)->low_version++;
}
