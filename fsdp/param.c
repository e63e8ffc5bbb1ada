/* fsdp/param.c: one parameter of a bucket: how the bucket takes it over, where its gradient goes,
 * and the table behind kn_param (kn_param_source) by which optimizers and clipping see it. */
#include "autograd/rows.h"
#include "fsdp/build.h"
#include "fsdp/matrices.h"
#include "fsdp/schedule.h"
#include <string.h>

/* ---- the gradient as backward writes it ------------------------------------------------------ */

/* kn_leaf.dest */
static kn_tensor *grad_dest(void *bucket, kn_tensor *leaf)
{
    kn_bucket *b = bucket;
    /* of a backward before: it still reads the bytes */
    if (!kn_unit_finish_reduce(b->unit, KN_WHY("new gradients take its bytes")))
        return NULL;
    if (b->grad->released && !kn_storage_retake(b->grad))
        return NULL;
    for (int i = 0; i < b->params; i++)
        if (b->param[i].tensor == leaf)
            return b->param[i].grad;
    return kn_fail_null("fsdp: unit '%s' got a gradient for a parameter that isn't its own",
                        kn_unit_name(b->unit));
}

/* ---- the gradient as a step reads it --------------------------------------------------------- */

static kn_tensor *grad(const kn_param *p)
{
    kn_bucket *b = (kn_bucket *)p->source;
    const kn_bucket_param *own = &b->param[p->index];
    kn_schedule_recover(b->unit->schedule);
    if (!kn_unit_closed(b->unit, kn_unit_name(b->unit), "fsdp: a step or clipping") ||
        !b->has_grad || !kn_passes_any(&own->passes) || b->grad_shard->released ||
        !kn_unit_finish_reduce(b->unit, KN_WHY("its gradients are read")))
        return NULL;
    return own->grad_part;
}

static bool passes(const kn_param *p, kn_passes *all)
{
    const kn_bucket *b = (const kn_bucket *)p->source;
    const kn_bucket_param *own = &b->param[p->index];
    return kn_passes_join(all, &own->passes) && kn_passes_join(all, &own->mine) &&
           (!own->held || kn_passes_join(all, &b->unit->open)); /* any rank's may have come */
}

static double divisor(const kn_param *p)
{
    return kn_unit_divisor(((const kn_bucket *)p->source)->unit);
}

static double step_divisor(const kn_param *p)
{
    const kn_unit *u = ((const kn_bucket *)p->source)->unit;
    const kn_comm *around = kn_ranks_around(kn_impl_root(u->module[0]));
    if (around && around != u->comm) /* other ranks of a norm have units of other sizes */
        return 0;
    return kn_unit_divisor(u->schedule ? u->schedule->root : u);
}

static void written(const kn_param *p)
{
    kn_bucket_written((kn_bucket *)p->source, p->index);
}

static void rows(const kn_param *p, int64_t *run, int64_t *step)
{
    const kn_interval part = ((const kn_bucket *)p->source)->param[p->index].part;
    *run = part.count;
    *step = part.stride;
}

/* A step consumed the gradient, and may have written the master: what is gathered is no longer
 * true. Parameters that another optimizer steps keep their gradients. */
static void clear(const kn_param *p)
{
    kn_bucket *b = (kn_bucket *)p->source;
    kn_bucket_param *own = &b->param[p->index];
    bool left = false;
    own->consumed |= kn_passes_any(&own->passes);
    kn_passes_clear(&own->passes);
    for (int i = 0; i < b->params; i++)
        left |= kn_passes_any(&b->param[i].passes);
    b->has_grad = b->has_grad && left;
    if (b->residency != KN_SHARDED && b->unit->schedule) {
        kn_bucket_reshard(b, 1);
        kn_bucket_drop_slice(b);
    }
}

static const char *held_back(const kn_param *p)
{
    const kn_bucket *b = (const kn_bucket *)p->source;
    kn_schedule_recover(b->unit->schedule);
    if (b->accum == KN_ACCUM_SPOILED)
        return KN_SPOILED_GRAD;
    if (!b->unsynced->released || kn_bucket_holds(b, KN_HELD_ON_RANK))
        return "a part is held back on its rank; run the last backward before a step with "
               "kn_fsdp_set_gradient_sync on, or call kn_fsdp_reduce_grads";
    if (kn_bucket_holds(b, KN_HELD_OPEN))
        return "a part may still be on its way; run the last backward before a step with "
               "kn_fsdp_set_is_last_backward on, or call kn_fsdp_reduce_grads";
    if (kn_bucket_holds(b, KN_HELD_IN_GROUP))
        return "a part is held back in its shard group; run the last backward before a step with "
               "kn_fsdp_set_all_reduce on, or call kn_fsdp_reduce_grads";
    return NULL;
}

/* The same on all ranks, which count micro-batches by it. */
static bool waits(const kn_param *p)
{
    const kn_bucket *b = (const kn_bucket *)p->source;
    const kn_bucket_param *own = &b->param[p->index];
    kn_schedule_recover(b->unit->schedule);
    return (b->has_grad && kn_passes_any(&own->passes)) || kn_bucket_holds(b, KN_HELD_IN_GROUP) ||
           own->held & (KN_HELD_ON_RANK | KN_HELD_OPEN);
}

static bool sync_host(const kn_param *p)
{
    return kn_bucket_sync_transfers((kn_bucket *)p->source);
}

/* ---- gradients that go without a step -------------------------------------------------------- */

void kn_bucket_drop_grads(kn_bucket *b)
{
    b->has_grad = false;
    b->accum = KN_ACCUM_SETTLED;
    kn_storage_release(b->unsynced);
    if (b->partial)
        kn_storage_release(b->partial);
}

static bool blank(kn_storage *s, int64_t at, kn_dtype t, int64_t n)
{
    return !s || s->released ||
           kn_fill_run(kn_compute_stream(s->device), kn_storage_at(s, at, t), t, n, 0);
}

static bool has_any(const kn_bucket_param *p)
{
    return p->held || kn_passes_any(&p->mine) || kn_passes_any(&p->passes);
}

/* kn_leaf.clear: one parameter's gradient goes from wherever backwards left it: the bucket's others
 * stay. */
static bool clear_grad(void *bucket, kn_tensor *leaf)
{
    kn_bucket *b = bucket;
    bool others = false, had = false;
    kn_schedule_recover(b->unit->schedule);
    if ((b->unit->schedule &&
         !kn_unit_finish_reduce(b->unit, KN_WHY("its gradients are cleared"))) ||
        !kn_bucket_sync_transfers(b))
        return false;
    for (int i = 0; i < b->params; i++) {
        kn_bucket_param *p = &b->param[i];
        if (p->tensor != leaf) {
            others = others || has_any(p) || b->flags_came; /* another rank may have one */
            continue;
        }
        int64_t part = kn_interval_numel(p->part);
        had = has_any(p);
        kn_bucket_param_forget(p);
        if ((b->flags && !blank(b->flags, kn_bucket_flag_at(b, i), KN_F32, 1)) ||
            !blank(b->grad_shard, p->part.at, b->grad_dtype, part) ||
            !blank(b->partial, p->part.at, b->grad_dtype, part) ||
            !blank(b->unsynced, b->layout.offset[i], b->reduce_dtype, b->layout.numel[i]))
            return false;
    }
    if (!others)
        kn_bucket_drop_grads(b);
    return had;
}

bool kn_bucket_zero_consumed(kn_bucket *b, kn_stream *s)
{
    bool ok = true;
    for (int i = 0; i < b->params; i++) {
        kn_bucket_param *p = &b->param[i];
        if (p->consumed && b->has_grad && kn_numel(p->grad_part) > 0)
            ok = ok && kn_bucket_sync_transfers(b) &&
                 KN_LAUNCH(s, KN_K_FILL, ((kn_fill_args){ kn_array_of(p->grad_part), 0, 0 }));
        p->consumed = false;
    }
    return ok;
}

/* ---- taking a parameter over ----------------------------------------------------------------- */

/* The module's handle now looks into the gathered buffer. */
static void redirect(kn_bucket *b, int i, kn_tensor *t)
{
    kn_location whole = { kn_storage_ref(b->full), b->layout.offset[i], b->full_dtype };
    kn_storage_unref(kn_turn_to(t, whole).storage);
    kn_row_major(t->ndim, t->shape, t->stride);
    t->leaf->dest = grad_dest;
    t->leaf->dest_arg = b;
    t->leaf->clear = clear_grad;
    t->leaf->group = b->unit->group;
}

bool kn_bucket_prepare_param(kn_bucket *b, int i, const kn_param_entry *e)
{
    kn_bucket_param *p = &b->param[i];
    kn_tensor *t = e->tensor;
    if (t->leaf && (t->leaf->grad || kn_rows_any(t->leaf)))
        return kn_fail("fsdp: '%s' holds a gradient of before it is sharded, which no rank's step "
                       "could count; step or kn_zero_grad before kn_fsdp_wrap",
                       p->name);
    p->part = kn_layout_part(&b->layout, i, b->shard);
    p->ndim = t->ndim;
    memcpy(p->shape, t->shape, sizeof p->shape);
    int64_t n = kn_interval_numel(p->part);
    p->master = kn_tensor_on(b->master, p->part.at, b->master_dtype, 1, &n, NULL, false);
    p->grad_part = kn_tensor_on(b->grad_shard, p->part.at, b->grad_dtype, 1, &n, NULL, false);
    p->grad =
        kn_tensor_on(b->grad, b->layout.offset[i], b->reduce_dtype, t->ndim, t->shape, NULL, false);
    if (!p->master || !p->grad_part || !p->grad || !kn_leaf_of(t))
        return false;
    kn_set_name(t, p->name);
    return kn_ok();
}

void kn_bucket_take_param(kn_bucket *b, int i, kn_param_entry *e)
{
    kn_bucket_param *p = &b->param[i];
    p->tensor = kn_tensor_ref(e->tensor);
    redirect(b, i, e->tensor);
    bool offloads = b->unit->options.offload_dir != NULL;
    b->source = (kn_param_source){ .grad = grad,
                                   .clear = clear,
                                   .held_back = held_back,
                                   .waits = waits,
                                   .passes = passes,
                                   .divisor = divisor,
                                   .step_divisor = step_divisor,
                                   .sync_host = offloads ? sync_host : NULL,
                                   .step = offloads ? kn_offload_step : NULL,
                                   .matrices = kn_step_matrices,
                                   .written = written,
                                   .rows = rows };
    if (b->rows)
        kn_bucket_take_table(b);
    e->source = &b->source;
    e->unit = b;
    e->unit_index = i;
    e->master = p->master;
    e->start = p->part.start;
    e->elsewhere = b->unit->rank / b->shards != 0;
    e->state_memory = b->unit->options.offload_dir ? b->memory : NULL;
}

kn_bucket *kn_bucket_of(const kn_param *p)
{
    const kn_leaf *leaf = p->tensor->leaf;
    return leaf && leaf->dest == grad_dest ? leaf->dest_arg : NULL;
}

void kn_bucket_param_forget(kn_bucket_param *p)
{
    p->held = 0;
    kn_passes_clear(&p->mine);
    kn_passes_clear(&p->passes);
}

void kn_bucket_free_param(kn_bucket_param *p)
{
    kn_bucket_leave_table(p);
    if (p->tensor && p->tensor->leaf) {
        p->tensor->leaf->dest = NULL;
        p->tensor->leaf->group = NULL;
    }
    kn_passes_free(&p->mine);
    kn_passes_free(&p->passes);
    kn_tensor_free(p->master);
    kn_tensor_free(p->grad_part);
    kn_tensor_free(p->grad);
    kn_tensor_free(p->tensor);
    kn_host_free(p->name);
}
