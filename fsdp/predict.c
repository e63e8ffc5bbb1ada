/* fsdp/predict.c: memory as a formula (docs/fsdp.md, "Memory"). Bytes that are always there are a
 * sum over buckets; a rehearsal of the schedule (rehearse.c) finds those that come and go. */
#include "fsdp/rehearse.h"
#include "fsdp/schedule.h"
#include "optim/optim_internal.h"

/* Whether the reduce stream is, or would be, a worker: the schedule makes the gather stream
 * first. */
static bool overlaps(const kn_unit *root)
{
    if (root->schedule)
        return !root->schedule->inline_reduce;
    kn_stream_kind kind = root->size > 1 ? KN_STREAM_AUTO : KN_STREAM_INLINE;
    kn_stream *gather = kn_stream_create(root->options.device, "gather", kind);
    kn_stream *reduce = kn_stream_create(root->options.device, "reduce", kind);
    bool worker = reduce && !kn_stream_is_inline(reduce);
    if (reduce)
        kn_stream_destroy(reduce);
    if (gather)
        kn_stream_destroy(gather);
    return worker;
}

static void add_bucket(kn_fsdp_memory *sum, const kn_bucket *b)
{
    int64_t param = kn_bucket_bytes(b->layout.shard, b->master_dtype), grad = 0;
    if (b->away.cast_master)
        param += kn_bucket_bytes(b->layout.shard, b->param_dtype);
    if (kn_bucket_trains(b) && !b->rows)
        grad = kn_bucket_bytes(b->layout.shard, b->grad_dtype);
    *(b->stored ? &sum->store : &sum->param) += param;
    *(b->stored ? &sum->store : &sum->grad) += grad;
    if (b->memory->pinned)
        sum->pinned += param + grad;
}

/* Parameters that no unit holds: whole on every rank. */
static void add_outside(kn_fsdp_memory *sum, kn_module_impl *root)
{
    const kn_param *p;
    int n = kn_params(root->self, &p);
    for (int i = 0; i < n; i++) {
        int64_t bytes = kn_bucket_of(&p[i]) ? 0 : kn_bucket_bytes(p[i].numel, p[i].tensor->dtype);
        sum->param += bytes;
        sum->grad += p[i].trainable && !kn_param_row(&p[i]) ? bytes : 0;
    }
}

static int states_of(const kn_optim *o, int param)
{
    int n = 0;
    while (kn_optim_state_name_of(o, param, n))
        n++;
    return n;
}

/* A parameter needs gradients, or its bucket was wrapped so and it was frozen since: it may get
 * some again. */
static bool gets_state(const kn_param *p)
{
    const kn_bucket *b = kn_bucket_of(p);
    return (b && b->trainable) || p->trainable;
}

static void add_optim(kn_fsdp_memory *sum, kn_module_impl *root, const kn_optim *o)
{
    const kn_param *p;
    int n = kn_params(root->self, &p);
    for (int i = 0; i < n; i++) {
        const int64_t row = o ? kn_optim_state_row(o, &p[i]) : 0;
        int64_t bytes =
            kn_bucket_bytes(kn_numel(p[i].master) / (row ? row : 1), p[i].master->dtype);
        bytes *= !gets_state(&p[i]) ? 0 : o ? states_of(o, i) : 2;
        *(kn_memory_is_store(p[i].state_memory) ? &sum->store : &sum->optim) += bytes;
        if (p[i].state_memory && p[i].state_memory->pinned)
            sum->pinned += bytes;
    }
}

static void add_units(kn_fsdp_memory *sum, const kn_module_impl *top)
{
    for (const kn_module_impl *m = top; m; m = kn_impl_next(m, top)) {
        const kn_unit *u = kn_unit_of(m);
        for (int i = 0; u && u->module[0] == m && i < u->buckets; i++)
            add_bucket(sum, u->bucket[i]);
    }
}

static kn_fsdp_memory predict(void *root, const kn_optim *o)
{
    kn_fsdp_memory sum = { 0 };
    kn_module_impl *m = kn_impl(root, "kn_fsdp_predict");
    kn_unit *u = kn_unit_of(m);
    kn_module *below;
    if (m && !u && kn_fsdp_units(root, &below, 1) == 0)
        kn_fail("kn_fsdp_predict: '%s' and what is below it are no units; wrap them first",
                m->class_name);
    kn_module_impl *const *module = u ? u->module : &m;
    int n = u ? u->modules : 1;
    kn_step_peaks peaks;
    if (!m || !kn_ok() ||
        !kn_rehearse_step(module, n, overlaps(u ? u : kn_unit_of(below->impl)), &peaks))
        return sum;
    for (int i = 0; i < n; i++) {
        add_units(&sum, module[i]);
        add_outside(&sum, module[i]);
        if (!o || module[i] == m)
            add_optim(&sum, module[i], o);
    }
    sum.optim += kn_bucket_bytes(sizeof(kn_step_scalars) / sizeof(double), KN_F64);
    sum.gathered = peaks.gathered;
    sum.unreduced = peaks.unreduced;
    return sum;
}

kn_fsdp_memory kn_fsdp_predict(void *root)
{
    return predict(root, NULL);
}

kn_fsdp_memory kn_fsdp_predict_optim(const kn_optim *o)
{
    if (!o && kn_ok())
        kn_fail("kn_fsdp_predict_optim: the optimizer is NULL");
    return o ? predict(kn_optim_module(o), o) : (kn_fsdp_memory){ 0 };
}
