/* fsdp/reduce.c: a unit's gradients become accumulated shards, in one reduction for all its buckets
 * that the same ranks share. When that happens is decided in fsdp/schedule.c, how a reduction runs
 * in fsdp/stages.c. */
#include "fsdp/schedule.h"

/* ---- what backward left in grad -------------------------------------------------------------- */

static bool zero(kn_bucket *b, int64_t from, int64_t to)
{
    return kn_fill_run(kn_bucket_compute_stream(b), kn_storage_at(b->grad, from, b->reduce_dtype),
                       b->reduce_dtype, to - from, 0);
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
        if (filled && (!kn_bucket_note_grad(b, i) || !zero(b, done, l->offset[i])))
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
    if (!KN_LAUNCH(kn_bucket_compute_stream(b), KN_K_BINARY, args))
        return false;
    kn_storage_release(other);
    return true;
}

static bool keep_unsynced(kn_bucket *b)
{
    if (!b->unsynced->released)
        return add_unsynced(b, b->unsynced, b->grad);
    if (!kn_storage_retake(b->unsynced))
        return false;
    swap_bytes(b->unsynced, b->grad);
    kn_storage_release(b->grad);
    return true;
}

/* Gradients of backwards without sync join this one's. */
static bool take_unsynced(kn_bucket *b)
{
    if (b->unsynced->released)
        return true;
    if (!b->grad->released)
        return add_unsynced(b, b->grad, b->unsynced);
    if (!kn_storage_retake(b->grad))
        return false;
    swap_bytes(b->unsynced, b->grad);
    kn_storage_release(b->unsynced);
    return true;
}

/* With one rank the unreduced buffer becomes the accumulated one, or goes to the host as it is: no
 * copy. */
static bool may_swap(const kn_bucket *b)
{
    const kn_unit *u = b->unit;
    return b->shards == 1 && b->replicas == 1 && !b->has_grad && b->reduce_dtype == b->grad_dtype &&
           (b->offloaded || b->grad->memory == b->grad_shard->memory) &&
           b->grad->bytes == b->grad_shard->bytes && !u->set.hook && !u->set.all_reduce_hook &&
           u->options.predivide_factor == 0;
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

static bool call_hook(const kn_unit *u, kn_comm_hook hook, void *arg, const kn_grad_reduction *r)
{
    return hook(r, arg) ||
           (kn_ok() && kn_fail("fsdp: the communication hook of unit '%s' failed without saying "
                               "why; call kn_fail in it",
                               kn_unit_name(u)));
}

static bool sum_over_ranks(const kn_unit *u, const kn_grad_reduction *r)
{
    return call_hook(u, u->set.hook ? u->set.hook : kn_reduce_default, u->set.hook_arg, r);
}

/* The sum over ranks is complete before it is added to what was accumulated: the hook sees it. */
static bool show_the_sum(const kn_unit *u, const kn_grad_reduction *r)
{
    bool adds = r->acc && r->count > 0;
    kn_grad_reduction sum = *r, seen = { .unit = r->unit,
                                         .stream = r->stream,
                                         .count = r->count,
                                         .dst_dtype = r->dst_dtype,
                                         .src_dtype = r->dst_dtype,
                                         ._bucket = r->_bucket };
    sum.acc = NULL;
    if (adds)
        sum.dst = kn_reduction_scratch(r, (size_t)r->count * kn_dtype_size(r->dst_dtype));
    seen.dst = sum.dst;
    if (!sum.dst || !sum_over_ranks(u, &sum) ||
        !call_hook(u, u->set.all_reduce_hook, u->set.all_reduce_hook_arg, &seen))
        return false;
    seen.dst = r->dst;
    seen.acc = r->acc;
    seen.src = sum.dst;
    return !adds || kn_reduce_default(&seen, NULL);
}

/* *r becomes the reduction of b's gradients, for which buffers are there. */
static bool prepare(kn_bucket *b, kn_stream *s, bool all_reduce, kn_grad_reduction *r)
{
    void *src = b->grad->data;
    if (!b->layout.zero_copy) {
        if (!kn_storage_retake(b->reduce_stage))
            return false;
        src = b->reduce_stage->data;
        int64_t n = b->layout.shard * b->shards; /* the padding takes part in the sums */
        if (!kn_fill_run(s, src, b->reduce_dtype, n, 0) ||
            !kn_bucket_rearrange(b, s, src, b->grad->data, b->reduce_dtype, false))
            return false;
    }
    bool grows = b->partial && !b->partial->released; /* of what waits for the replicas */
    bool staged = b->replicas > 1 && (b->shards > 1 || !all_reduce || grows);
    if (staged && !kn_storage_retake(b->partial))
        return false;
    bool into_shard = b->replicas == 1 || all_reduce;
    if (into_shard && b->grad_shard->released && !kn_storage_retake(b->grad_shard))
        return false;
    kn_storage *shard = b->offloaded ? b->away.grad_transfer : b->grad_shard;
    if (into_shard && b->offloaded && !kn_bucket_upload_grad(b, s))
        return false;
    *r = (kn_grad_reduction){ .unit = kn_unit_name(b->unit),
                              .shards = b->ranks->reduce,
                              .replicas = all_reduce ? b->ranks->replicate : NULL,
                              .stream = s,
                              .dst = into_shard ? shard->data : NULL,
                              .acc =
                                  b->has_grad && (into_shard || !b->offloaded) ? shard->data : NULL,
                              .src = src,
                              .count = b->layout.shard,
                              .dst_dtype = b->grad_dtype,
                              .src_dtype = b->reduce_dtype,
                              .partial = staged ? b->partial->data : NULL,
                              .partial_acc = grows ? b->partial->data : NULL,
                              ._bucket = b };
    return true;
}

/* The reduction was issued. */
static bool note_issued(const kn_grad_reduction *r)
{
    kn_bucket *b = r->_bucket;
    bool into_shard = r->dst != NULL;
    b->has_grad |= into_shard;
    for (int i = 0; i < b->params; i++) {
        kn_bucket_param *p = &b->param[i];
        if (into_shard)
            p->held &= ~(unsigned)KN_HELD_IN_GROUP;
        else if (kn_bucket_param_trains(p))
            p->held |= KN_HELD_IN_GROUP;
    }
    return kn_event_record(b->reduced, r->stream) &&
           (!into_shard || !b->offloaded ||
            kn_bucket_download_grad(b, b->away.grad_transfer, b->reduced));
}

/* Reductions of a unit's buckets, each with that of its flags (agree.c). */
typedef struct reductions {
    kn_grad_reduction of[KN_COMM_PIECES / 2], flags[KN_COMM_PIECES / 2];
    bool flagged[KN_COMM_PIECES / 2];
    int count;
} reductions;

static bool same_ranks(const kn_grad_reduction *a, const kn_grad_reduction *b)
{
    return a->shards == b->shards && a->replicas == b->replicas;
}

/* Those over the ranks of number i, unless an earlier one was. A hook reduces bucket by bucket. */
static bool run_group(reductions *l, int i)
{
    kn_grad_reduction list[KN_COMM_PIECES];
    const kn_unit *u = l->of[i]._bucket->unit;
    bool shows = u->set.all_reduce_hook && l->of[i].dst;
    int n = 0;
    for (int k = 0; k < l->count; k++) {
        if (!same_ranks(&l->of[k], &l->of[i]))
            continue;
        if (k < i)
            return true;
        if (!shows && !u->set.hook)
            list[n++] = l->of[k];
        else if (!(shows ? show_the_sum : sum_over_ranks)(u, &l->of[k]))
            return false;
        if (l->flagged[k])
            list[n++] = l->flags[k];
    }
    return n == 0 || kn_reduce_in_stages(list, n, NULL);
}

static bool run_all(reductions *l)
{
    bool ok = true;
    for (int i = 0; ok && i < l->count; i++)
        ok = run_group(l, i);
    for (int i = 0; ok && i < l->count; i++)
        ok = note_issued(&l->of[i]);
    l->count = 0;
    return ok;
}

static bool add_reduction(reductions *l, kn_bucket *b, kn_stream *s, bool all_reduce)
{
    if (l->count == KN_COMM_PIECES / 2 && !run_all(l))
        return false;
    int i = l->count++;
    if (!prepare(b, s, all_reduce, &l->of[i]))
        return false;
    l->flagged[i] = l->of[i].dst && kn_bucket_has_peers(b);
    return !l->flagged[i] || kn_bucket_send_flags(b, s, &l->flags[i]);
}

bool kn_bucket_holds(const kn_bucket *b, unsigned where)
{
    unsigned all = 0;
    for (int i = 0; i < b->params; i++)
        all |= b->param[i].held;
    return (all & where) != 0;
}

/* A parameter without a gradient has one of zeros where the user asked for it. */
static bool unused_are_zeros(const kn_unit *u)
{
    return u->set.reduce_unused && u->ran;
}

/* Zeros are reduced where b has no gradient: if other ranks may have some, of this backward or of
 * an earlier one without sync (a branch that depends on data), or if unused ones have some. */
static bool zeros_count(const kn_bucket *b)
{
    bool any = kn_bucket_trains(b);
    const kn_unit *u = b->unit;
    return kn_bucket_holds(b, KN_HELD_ON_RANK) || (any && unused_are_zeros(u)) ||
           (any && u->size > 1 && u->state == KN_UNIT_POST_BACKWARD);
}

/* Of a bucket whose gradients or debts change next. */
static kn_accum accum_from(const kn_bucket *b)
{
    if (b->accum != KN_ACCUM_SETTLED)
        return b->accum;
    return b->has_grad || !b->unsynced->released || kn_bucket_holds(b, KN_HELD_ANYWHERE)
               ? KN_ACCUM_GROWN
               : KN_ACCUM_BEGUN;
}

/* A backward leaves p's gradient where its unit's switches say, and with it that of ranks whose
 * backward brought one, as far as this rank can know; with sync what was held on ranks goes on.
 * True where more is held than before. */
static bool hold(kn_bucket *b, kn_bucket_param *p, bool sync)
{
    bool last = b->unit->schedule->root->set.is_last_backward, had = kn_passes_any(&p->mine);
    bool zeros = unused_are_zeros(b->unit);
    unsigned was = p->held;
    p->mine.zeros |= p->tensor->requires_grad && zeros;
    bool leaves = b->unit->size > 1 ? kn_bucket_param_trains(p) : kn_passes_any(&p->mine);
    bool due = leaves && (b->unit->state == KN_UNIT_POST_BACKWARD || zeros);
    if (!last && (due || was & (KN_HELD_ON_RANK | KN_HELD_IN_GROUP)))
        p->held |= KN_HELD_OPEN;
    if (!sync && leaves)
        p->held |= KN_HELD_ON_RANK;
    if (sync && was & KN_HELD_ON_RANK)
        p->held = (p->held & ~(unsigned)KN_HELD_ON_RANK) |
                  (b->replicas > 1 ? KN_HELD_IN_GROUP : 0); /* until it is reduced: note_issued */
    return (p->held & ~was) != 0 || had != kn_passes_any(&p->mine);
}

static void hold_all(kn_bucket *b, bool sync)
{
    bool more = false;
    kn_accum accum = accum_from(b);
    for (int i = 0; i < b->params; i++)
        more |= hold(b, &b->param[i], sync);
    if (more) /* also where no bytes came: if the backward fails, held bytes go */
        b->accum = accum;
}

void kn_bucket_keep_grads(kn_bucket *b)
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
        kn_bucket_param_forget(&b->param[i]);
    b->flags_came = false;
    kn_bucket_drop_grads(b);
}

/* The gradient becomes the accumulated shard without a copy on the device. */
static bool pass_on(kn_bucket *b, kn_stream *s)
{
    if (b->grad_shard->released && !kn_storage_retake(b->grad_shard))
        return false;
    if (!b->offloaded) {
        swap_bytes(b->grad, b->grad_shard);
        b->has_grad = kn_bucket_zero_consumed(b, s);
        return kn_event_record(b->reduced, s);
    }
    b->away.downloads_grad = true;
    b->has_grad = kn_bucket_zero_consumed(b, s);
    return kn_event_record(b->computed, kn_bucket_compute_stream(b)) &&
           kn_bucket_download_grad(b, b->grad, b->computed);
}

bool kn_bucket_has_to_reduce(const kn_bucket *b, bool all_reduce)
{
    if (b->rows) /* its gradient has come to the owners */
        return false;
    return !b->grad->released || !b->unsynced->released ||
           (all_reduce && kn_bucket_holds(b, KN_HELD_IN_GROUP)) || zeros_count(b);
}

/* The waiting reductions of b join l. */
static bool reduce(kn_bucket *b, bool sync, bool all_reduce, reductions *l)
{
    if (b->rows)
        return true;
    bool nothing = b->grad->released, zeros = sync && kn_bucket_has_to_reduce(b, all_reduce);
    if (nothing && !zeros) {
        hold_all(b, sync);
        return true;
    }
    b->accum = accum_from(b);
    bool filled = nothing || fill_gaps(b);
    hold_all(b, sync);
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
    kn_stream *s = b->unit->schedule->lanes->reduce;
    if (may_swap(b))
        return pass_on(b, s);
    return kn_bucket_wait_for_compute(b, s) &&
           kn_bucket_zero_consumed(b, b->offloaded ? kn_bucket_host_stream(b) : s) &&
           predivide(b, s) && add_reduction(l, b, s, all_reduce);
}

bool kn_buckets_reduce(kn_bucket *const *bucket, int n, bool sync, bool all_reduce)
{
    reductions l;
    l.count = 0;
    for (int i = 0; i < n; i++)
        if (!reduce(bucket[i], sync, all_reduce, &l))
            return false;
    return run_all(&l);
}

bool kn_bucket_finish_reduce(kn_bucket *b)
{
    if (b->grad->released && b->scratch.count == 0)
        return true;
    /* bytes that are given back are taken again in the compute stream's order */
    bool ok = kn_event_wait(b->away.downloads_grad ? b->away.downloaded : b->reduced,
                            kn_bucket_compute_stream(b));
    b->away.downloads_grad = false;
    kn_storage_release(b->grad);
    if (b->reduce_stage)
        kn_storage_release(b->reduce_stage);
    if (b->partial && !kn_bucket_holds(b, KN_HELD_IN_GROUP))
        kn_storage_release(b->partial);
    kn_reduction_free_scratch(b);
    if (b->stored && !b->grad_shard->released)
        kn_store_done(b->grad_shard->data, b->grad_shard->bytes);
    return ok && kn_ok();
}
