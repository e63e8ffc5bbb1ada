/* fsdp/bucket.c: what happens to a bucket's bytes: gather, release, reduce. When it happens is decided
 * in fsdp/schedule.c. Everything here is ordered by streams and events; on the CPU without a free core
 * the streams run inline and the same calls happen in the same order. */
#include "fsdp/schedule.h"

static bool gathers(const kn_bucket *b)
{
    return b->full != b->master;
}

static kn_device device_of(const kn_bucket *b)
{
    return b->unit->options.device;
}

static kn_stream *compute_stream(const kn_bucket *b)
{
    return kn_compute_stream(device_of(b));
}

static char *at(const kn_storage *s, int64_t element, kn_dtype t)
{
    return (char *)s->data + (size_t)element * kn_dtype_size(t);
}

static bool copy(kn_stream *s, void *dst, kn_dtype dst_dtype, const void *src, kn_dtype src_dtype,
                 int64_t n)
{
    kn_copy_args args = { kn_array_make(dst, dst_dtype, 1, &n),
                          kn_array_make((void *)src, src_dtype, 1, &n) };
    return n == 0 || KN_LAUNCH(s, KN_K_COPY, args);
}

/* The side stream goes on from where the compute stream is now. */
static bool after_compute(kn_bucket *b, kn_stream *s)
{
    return kn_event_record(b->computed, compute_stream(b)) && kn_event_wait(b->computed, s);
}

/* ---- between the shards and whole parameters ------------------------------------------------------ */

/* Copies every rank's part of every parameter: from stage to full (out), or back (in). */
static bool rearrange(kn_bucket *b, kn_stream *s, void *stage, void *full, kn_dtype t, bool out)
{
    const kn_layout *l = &b->layout;
    size_t size = kn_dtype_size(t);
    for (int i = 0; i < l->params; i++) {
        for (int r = 0; r < l->shards; r++) {
            kn_interval p = kn_layout_part(l, i, r);
            if (p.blocks == 0 || p.count == 0)
                continue;
            int64_t shape[2] = { p.blocks, p.count };
            kn_array part =
                kn_array_make((char *)stage + (size_t)(r * l->shard + p.at) * size, t, 2, shape);
            kn_array whole =
                kn_array_make((char *)full + (size_t)(l->offset[i] + p.start) * size, t, 2, shape);
            whole.stride[0] = p.stride;
            kn_copy_args args = { out ? whole : part, out ? part : whole };
            if (!KN_LAUNCH(s, KN_K_COPY, args))
                return false;
        }
    }
    return true;
}

/* ---- gathering -------------------------------------------------------------------------------------- */

/* From where to where a gather goes; comm is NULL where one rank holds the whole. */
typedef struct gather {
    kn_comm *comm;
    void *dst;
    const void *src;
    int64_t count; /* elements that each rank gives */
} gather;

static bool from_slice(kn_bucket *b, kn_stream *s, gather *g)
{
    int k = b->unit->slice_ranks;
    if (!kn_storage_retake(b->full) || !after_compute(b, s))
        return false;
    *g = (gather){ kn_slice_comm(b->unit->schedule, k), b->full->data, b->slice->data,
                   b->layout.full_numel / k };
    return true;
}

/* This rank's part goes to where the whole comes together, unless the master itself can be sent. */
static bool from_shard(kn_bucket *b, kn_stream *s, gather *g)
{
    const kn_layout *l = &b->layout;
    kn_storage *whole = l->zero_copy ? b->full : b->stage;
    if (kn_memory_is_store(b->home))
        kn_store_ahead(kn_bucket_sent(b)->data, kn_bucket_sent(b)->bytes);
    if (!kn_storage_retake(b->full) || !kn_storage_retake(whole) || !after_compute(b, s))
        return false;
    char *own = at(whole, b->shards > 1 ? b->shard * l->shard : 0, b->param_dtype);
    bool copies = !b->away && (b->param_dtype != b->master_dtype || b->shards == 1);
    if (b->away
            ? !kn_bucket_upload(b, own, s)
            : copies && !copy(s, own, b->param_dtype, b->master->data, b->master_dtype, l->shard))
        return false;
    *g = (gather){ b->shards > 1 ? b->ranks->gather : NULL, whole->data,
                   b->away || copies ? own : b->master->data, l->shard };
    return true;
}

bool kn_bucket_unshard(kn_bucket *b)
{
    if (!kn_ok() || b->residency == KN_UNSHARDED || b->residency == KN_GATHERING)
        return kn_ok();
    if (!gathers(b)) {
        b->residency = KN_UNSHARDED;
        return true;
    }
    kn_stream *s = b->unit->schedule->gather;
    bool sliced = b->residency == KN_SLICED;
    gather g;
    if (!(sliced ? from_slice(b, s, &g) : from_shard(b, s, &g)))
        return false;
    if (g.comm &&
        !kn_all_gather(g.comm, g.dst, g.src, g.count, b->param_dtype, s, kn_unit_name(b->unit)))
        return false;
    if (!sliced && !b->layout.zero_copy &&
        !rearrange(b, s, b->stage->data, b->full->data, b->param_dtype, true))
        return false;
    if (!kn_event_record(b->gathered, s))
        return false;
    b->residency = KN_GATHERING;
    return true;
}

bool kn_bucket_wait(kn_bucket *b)
{
    if (b->residency != KN_GATHERING)
        return kn_ok();
    if (!kn_ok() || !kn_event_wait(b->gathered, compute_stream(b)))
        return false;
    b->residency = KN_UNSHARDED;
    kn_bucket_drop_slice(b);
    if (b->stage)
        kn_storage_release(b->stage);
    if (kn_memory_is_store(b->home))
        kn_store_done(kn_bucket_sent(b)->data, kn_bucket_sent(b)->bytes);
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
             copy(compute_stream(b), b->slice->data, b->param_dtype,
                  at(b->full, b->unit->rank % keep * n, b->param_dtype), b->param_dtype, n);
        b->residency = ok ? KN_SLICED : KN_SHARDED;
    }
    kn_storage_release(b->full);
    return ok;
}

/* ---- gradients --------------------------------------------------------------------------------------- */

kn_tensor *kn_bucket_grad_dest(void *bucket, kn_tensor *leaf)
{
    kn_bucket *b = bucket;
    if (b->grad->released && !kn_storage_retake(b->grad))
        return NULL;
    for (int i = 0; i < b->params; i++)
        if (b->param[i].tensor == leaf)
            return b->param[i].grad;
    kn_fail("fsdp: unit '%s' got a gradient for a parameter that isn't its own",
            kn_unit_name(b->unit));
    return NULL;
}

static bool zero(kn_bucket *b, int64_t from, int64_t to)
{
    int64_t n = to - from;
    kn_fill_args args = { kn_array_make(at(b->grad, from, b->reduce_dtype), b->reduce_dtype, 1, &n),
                          0, 0 };
    return n <= 0 || KN_LAUNCH(compute_stream(b), KN_K_FILL, args);
}

/* Zeroes what no gradient came for: gaps between parameters, unused parameters, the padded end. */
static bool fill_gaps(kn_bucket *b)
{
    const kn_layout *l = &b->layout;
    int64_t done = 0;
    for (int i = 0; i < b->params; i++) { /* offsets rise with i */
        kn_leaf *leaf = b->param[i].tensor->leaf;
        bool filled = leaf && leaf->filled;
        if (leaf)
            leaf->filled = false;
        b->param[i].pending |= filled;
        if (filled && !zero(b, done, l->offset[i]))
            return false;
        done = filled ? l->offset[i] + l->numel[i] : done;
    }
    return zero(b, done, l->full_numel);
}

static void swap_bytes(kn_storage *a, kn_storage *b)
{
    void *p = a->data;
    a->data = b->data;
    b->data = p;
}

/* unsynced and grad become their sum, in one of them; the other is released. */
static bool add_unsynced(kn_bucket *b, kn_storage *sum, kn_storage *other)
{
    kn_array x = kn_array_make(b->unsynced->data, b->reduce_dtype, 1, &b->layout.full_numel),
             y = kn_array_make(b->grad->data, b->reduce_dtype, 1, &b->layout.full_numel);
    kn_binary_args args = { sum == b->unsynced ? x : y, x, y, KN_ADD };
    if (!KN_LAUNCH(compute_stream(b), KN_K_BINARY, args))
        return false;
    kn_storage_release(other);
    return true;
}

static bool keep_unsynced(kn_bucket *b)
{
    if (b->has_unsynced)
        return add_unsynced(b, b->unsynced, b->grad);
    if (!kn_storage_retake(b->unsynced))
        return false;
    swap_bytes(b->unsynced, b->grad);
    kn_storage_release(b->grad);
    b->has_unsynced = true;
    return true;
}

/* What backwards without sync left joins this one's gradient. */
static bool take_unsynced(kn_bucket *b)
{
    if (!b->has_unsynced)
        return true;
    b->has_unsynced = false;
    if (!b->grad->released)
        return add_unsynced(b, b->grad, b->unsynced);
    if (!kn_storage_retake(b->grad))
        return false;
    swap_bytes(b->unsynced, b->grad);
    kn_storage_release(b->unsynced);
    return true;
}

/* With one rank the unreduced buffer becomes the accumulated one, or goes home as it is: no copy. */
static bool may_swap(const kn_bucket *b)
{
    const kn_unit *u = b->unit;
    return b->shards == 1 && b->replicas == 1 && !b->has_grad && b->reduce_dtype == b->grad_dtype &&
           (b->away || b->grad->memory == b->gshard->memory) &&
           b->grad->bytes == b->gshard->bytes && !u->hook && u->options.predivide_factor == 0;
}

static bool predivide(kn_bucket *b, kn_stream *s)
{
    double f = b->unit->options.predivide_factor;
    if (f == 0 || f == 1)
        return true;
    kn_array g = kn_array_make(b->grad->data, b->reduce_dtype, 1, &b->layout.full_numel);
    kn_unary_args args = { .dst = g, .src = g, .kind = KN_AFFINE, .p0 = 1 / f, .p1 = 0 };
    return KN_LAUNCH(s, KN_K_UNARY, args);
}

static bool run_reduction(kn_bucket *b, kn_stream *s, bool all_reduce)
{
    kn_unit *u = b->unit;
    void *src = b->grad->data;
    if (!b->layout.zero_copy) {
        if (!kn_storage_retake(b->rstage))
            return false;
        src = b->rstage->data;
        int64_t n = b->layout.shard * b->shards; /* the padding takes part in the sums */
        kn_fill_args blank = { kn_array_make(src, b->reduce_dtype, 1, &n), 0, 0 };
        if (!KN_LAUNCH(s, KN_K_FILL, blank) ||
            !rearrange(b, s, src, b->grad->data, b->reduce_dtype, false))
            return false;
    }
    bool staged = b->replicas > 1 && (b->shards > 1 || !all_reduce || b->has_partial);
    if (staged && !kn_storage_retake(b->partial))
        return false;
    bool into_shard = b->replicas == 1 || all_reduce;
    if (into_shard && b->gshard->released && !kn_storage_retake(b->gshard))
        return false;
    kn_storage *shard = b->away ? b->down : b->gshard;
    if (into_shard && b->away && !kn_bucket_fetch(b, s))
        return false;
    kn_grad_reduction r = { .unit = kn_unit_name(u),
                            .shards = b->ranks->reduce,
                            .replicas = all_reduce ? b->ranks->replicate : NULL,
                            .stream = s,
                            .dst = into_shard ? shard->data : NULL,
                            .acc = b->has_grad && (into_shard || !b->away) ? shard->data : NULL,
                            .src = src,
                            .count = b->layout.shard,
                            .dst_dtype = b->grad_dtype,
                            .src_dtype = b->reduce_dtype,
                            .partial = staged ? b->partial->data : NULL,
                            .partial_acc = b->has_partial ? b->partial->data : NULL,
                            ._bucket = b };
    if (!(u->hook ? u->hook(&r, u->hook_arg) : kn_reduce_default(&r, NULL)))
        return kn_ok() ? kn_fail("fsdp: the communication hook of unit '%s' failed without saying "
                                 "why; call kn_fail in it",
                                 kn_unit_name(u))
                       : false;
    b->has_partial = staged && !into_shard;
    b->has_grad |= into_shard;
    return kn_event_record(b->reduced, s) &&
           (!into_shard || !b->away || kn_bucket_bring_home(b, b->down, b->reduced));
}

bool kn_bucket_owes(const kn_bucket *b)
{
    bool any = false;
    for (int i = 0; i < b->params; i++)
        any |= b->param[i].owed;
    return any;
}

/* Other ranks may have gradients for b though this one has none, of this backward or of an earlier one without
 * sync: a branch that depends on data. All then reduce, this rank zeros. */
static bool others_may_have(const kn_bucket *b)
{
    bool any = false;
    for (int i = 0; i < b->params; i++)
        any |= b->param[i].tensor->requires_grad;
    const kn_unit *u = b->unit;
    return u->size > 1 && (kn_bucket_owes(b) || (any && u->state == KN_UNIT_POST_BACKWARD));
}

/* Without sync all ranks owe what any may have; with it the debt is paid. */
static void note_owed(kn_bucket *b, bool sync)
{
    for (int i = 0; i < b->params; i++) {
        kn_bucket_param *p = &b->param[i];
        bool leaves = b->unit->size > 1 ? p->tensor->requires_grad : p->pending;
        p->owed = !sync && (p->owed || leaves);
    }
}

/* What accumulated is about to change. */
static void note_accum(kn_bucket *b)
{
    if (b->accum == KN_ACCUM_SETTLED)
        b->accum =
            b->has_grad || b->has_partial || b->has_unsynced ? KN_ACCUM_GROWN : KN_ACCUM_BEGUN;
}

void kn_bucket_settle(kn_bucket *b)
{
    if (b->accum != KN_ACCUM_SPOILED)
        b->accum = KN_ACCUM_SETTLED;
}

void kn_bucket_recover(kn_bucket *b)
{
    kn_storage_release(b->grad);
    for (int i = 0; i < b->params; i++)
        if (b->param[i].tensor->leaf)
            b->param[i].tensor->leaf->filled = false;
    if (b->accum == KN_ACCUM_GROWN)
        b->accum = KN_ACCUM_SPOILED;
    if (b->accum != KN_ACCUM_BEGUN)
        return;
    for (int i = 0; i < b->params; i++)
        b->param[i].pending = b->param[i].arrived = b->param[i].owed = false;
    kn_storage_release(b->unsynced);
    if (b->partial)
        kn_storage_release(b->partial);
    b->has_grad = b->has_unsynced = b->has_partial = false;
    b->accum = KN_ACCUM_SETTLED;
}

/* The gradient becomes the accumulated shard without a copy on the device. */
static bool pass_on(kn_bucket *b, kn_stream *s)
{
    if (b->gshard->released && !kn_storage_retake(b->gshard))
        return false;
    if (!b->away) {
        swap_bytes(b->grad, b->gshard);
        b->has_grad = kn_bucket_drop_spent(b, s);
        return kn_event_record(b->reduced, s);
    }
    b->whole_way = true;
    b->has_grad = kn_bucket_drop_spent(b, s);
    return kn_event_record(b->computed, compute_stream(b)) &&
           kn_bucket_bring_home(b, b->grad, b->computed);
}

bool kn_bucket_reduce(kn_bucket *b, bool sync, bool all_reduce)
{
    bool held = b->has_unsynced || (all_reduce && b->has_partial); /* from earlier backwards */
    bool nothing = b->grad->released, zeros = sync && (held || others_may_have(b));
    if (nothing && !zeros) {
        note_owed(b, sync);
        return true;
    }
    note_accum(b);
    bool filled = nothing || fill_gaps(b);
    note_owed(b, sync);
    if (!filled)
        return false;
    if (!sync)
        return keep_unsynced(b);
    if (!take_unsynced(b))
        return false;
    if (b->grad->released) {
        if (!kn_storage_retake(b->grad) || !zero(b, 0, b->layout.full_numel))
            return false;
    }
    kn_stream *s = b->unit->schedule->reduce;
    if (may_swap(b))
        return pass_on(b, s);
    return after_compute(b, s) && kn_bucket_drop_spent(b, b->away ? kn_bucket_home_stream(b) : s) &&
           predivide(b, s) && run_reduction(b, s, all_reduce);
}

bool kn_bucket_finish_reduce(kn_bucket *b)
{
    if (b->grad->released && b->scratches == 0)
        return true;
    /* bytes that are given back are taken again in the compute stream's order */
    bool ok = kn_event_wait(b->whole_way ? b->landed : b->reduced, compute_stream(b));
    b->whole_way = false;
    kn_storage_release(b->grad);
    if (b->rstage)
        kn_storage_release(b->rstage);
    if (b->partial && !b->has_partial)
        kn_storage_release(b->partial);
    kn_reduction_free_scratch(b);
    if (kn_memory_is_store(b->home) && !b->gshard->released)
        kn_store_done(b->gshard->data, b->gshard->bytes);
    return ok && kn_ok();
}

/* ---- the rest ----------------------------------------------------------------------------------------- */

int64_t kn_bucket_gathered_bytes(const kn_bucket *b)
{
    return gathers(b) ? (int64_t)b->full->bytes : 0;
}

int64_t kn_bucket_bytes(int64_t numel, kn_dtype t)
{
    int64_t bytes = numel * (int64_t)kn_dtype_size(t);
    return (bytes + KN_ALIGN - 1) / KN_ALIGN * KN_ALIGN;
}

kn_bucket *kn_bucket_of(const kn_param *p)
{
    const kn_leaf *leaf = p->tensor->leaf;
    return leaf && leaf->dest == kn_bucket_grad_dest ? leaf->dest_arg : NULL;
}

static void free_param(kn_bucket_param *p)
{
    if (p->tensor && p->tensor->leaf) {
        p->tensor->leaf->dest = NULL;
        p->tensor->leaf->group = NULL;
        p->tensor->leaf->on_round = NULL;
    }
    kn_tensor_free(p->master);
    kn_tensor_free(p->gpart);
    kn_tensor_free(p->grad);
    kn_tensor_free(p->tensor);
    kn_host_free(p->name);
}

void kn_bucket_free(kn_bucket *b)
{
    if (!b)
        return;
    for (int i = 0; b->param && i < b->params; i++)
        free_param(&b->param[i]);
    kn_reduction_free_scratch(b);
    if (b->full != b->master)
        kn_storage_unref(b->full);
    kn_storage *rest[] = { b->master, b->stage,   b->slice,  b->grad, b->unsynced,
                           b->rstage, b->partial, b->gshard, b->low,  b->down };
    for (size_t i = 0; i < sizeof rest / sizeof rest[0]; i++)
        kn_storage_unref(rest[i]);
    kn_event_destroy(b->gathered);
    kn_event_destroy(b->computed);
    kn_event_destroy(b->reduced);
    kn_event_destroy(b->uploaded);
    kn_event_destroy(b->landed);
    kn_layout_free(&b->layout);
    if (b->home && kn_memory_is_store(b->home))
        kn_store_close(b->home);
    kn_host_free(b->param);
    kn_host_free(b);
}
