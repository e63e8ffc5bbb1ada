/* fsdp/offload.c: buckets that lie apart from the device that computes: masters, gradient shards
 * and optimizer state are in page-locked host memory (.offload_dir "memory") or, for a GPU, in a
 * file.
 *
 *   upload     a gather takes this rank's part to where the whole parameters come together
 *   download   the reduced gradient goes home, from down or, where there is nothing to add, from
 *              grad itself
 *   the step   runs on the host, bucket by bucket as gradients come to it (kn_param_source.step)
 *
 * Each way has a stream of its own. Nothing here waits on the host but kn_bucket_arrive. */
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

/* Whoever writes a master raises its version; the step that writes low as well raises low's with
 * it. */
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

/* ---- there and back -------------------------------------------------------------------------- */

static bool send(kn_bucket *b, void *dst, const kn_storage *from, kn_stream *then)
{
    kn_stream *s = b->unit->schedule->upload;
    return kn_bucket_after_compute(b, s) && /* bytes are taken and given back in its order */

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

/* ---- the step -------------------------------------------------------------------------------- */

/* Pieces of parameters that lie with the device come first, then buckets in the order in which
 * their gradients come to the host: it waits for one bucket at a time and steps it while the device
 * goes on with the backward of the next ones. */
typedef struct part {
    const kn_opt_piece *piece;
    kn_bucket *bucket; /* NULL: the master lies with the device that computes */
    int64_t turn;
} part;

static kn_bucket *away_bucket(const kn_param *p)
{
    kn_bucket *b = p->source->step == kn_offload_step ? (kn_bucket *)p->source : NULL;
    return b && b->away ? b : NULL;
}

static int by_turn(const void *a, const void *b)
{
    const part *x = a, *y = b;
    if (x->turn != y->turn)
        return x->turn < y->turn ? -1 : 1;
    return x->piece < y->piece ? -1 : x->piece > y->piece;
}

/* The step also writes the master's copy in param_dtype, where that holds what the master does. */
static void add_out(kn_opt_piece *q, const kn_param *p, const kn_bucket *b)
{
    if (!b || !b->low || !is_fresh(b))
        return;
    q->out = (char *)b->low->data + (size_t)p->master->offset * kn_dtype_size(b->param_dtype);
    q->out_dtype = b->param_dtype;
}

/* Returns whether any of what the step touches is in a store. */
static bool sort(const kn_step_pieces *s, part *list, kn_opt_piece *sorted)
{
    bool stored = false;
    for (int i = 0; i < s->count; i++) {
        kn_bucket *b = away_bucket(s->param[i]);
        add_out(&s->piece[i], s->param[i], b);
        list[i] = (part){ &s->piece[i], b, b ? b->turn : 0 };
        stored |= kn_memory_is_store(s->param[i]->home);
    }
    qsort(list, (size_t)s->count, sizeof *list, by_turn);
    for (int i = 0; i < s->count; i++)
        sorted[i] = *list[i].piece;
    return stored;
}

static int arrays_of(const void *pieces, int i, kn_span *span)
{
    const kn_opt_piece *q = (const kn_opt_piece *)pieces + i;
    size_t bytes = (size_t)q->count * kn_dtype_size(q->param_dtype);
    const void *with_master[] = { q->param, q->m, q->v };
    int n = 0;
    span[n++] = (kn_span){ q->grad, (size_t)q->count * kn_dtype_size(q->grad_dtype) };
    for (int k = 0; k < 3; k++)
        if (with_master[k])
            span[n++] = (kn_span){ with_master[k], bytes };
    return n;
}

/* Launches sorted pieces [begin, end), which are ready together: window by window, where they are
 * in a store. */
static bool launch_batch(const kn_step_pieces *s, kn_bucket *b, const kn_opt_piece *sorted,
                         int begin, int end, bool stored)
{
    if (b && !kn_bucket_arrive(b))
        return false;
    kn_stream *stream = b ? kn_bucket_home_stream(b) : NULL;
    bool ok = stored || s->launch(s->arg, sorted + begin, end - begin, stream);
    kn_store_walk w = { arrays_of, sorted, begin, begin, end, s->count };
    while (ok && stored && kn_store_next(&w))
        ok = s->launch(s->arg, sorted + w.begin, w.end - w.begin, stream);
    for (int i = begin; ok && i < end; i++)
        if (sorted[i].out)
            b->low_version++; /* as each parameter's step raises the master's */
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
