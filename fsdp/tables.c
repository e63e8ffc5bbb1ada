/* fsdp/tables.c: the bucket of a table whose gradient stays rows: what its leaf has to know, how
 * optimizers and clipping see it (kn_param_source). Rows travel in autograd/rows_ranks.c. */
#include "autograd/rows.h"
#include "fsdp/build.h"
#include "fsdp/schedule.h"
#include "nn/means.h"

static kn_tensor *grad(const kn_param *p)
{
    const kn_unit *u = ((const kn_bucket *)p->source)->unit;
    return kn_unit_closed(u, kn_unit_name(u), "fsdp: a step or clipping") ? kn_table_grad(p) : NULL;
}

static const char *held_back(const kn_param *p)
{
    const kn_bucket *b = (const kn_bucket *)p->source;
    kn_schedule_recover(b->unit->schedule);
    return b->param[0].tensor->leaf->accum == KN_ACCUM_SPOILED ? KN_SPOILED_GRAD : NULL;
}

static bool waits(const kn_param *p)
{
    return kn_rows_any(p->tensor->leaf);
}

static bool passes(const kn_param *p, kn_passes *all)
{
    return kn_passes_join(all, &p->tensor->leaf->passes);
}

/* Rows aren't divided before they are added. */
static double divisor(const kn_param *p)
{
    const kn_unit *u = ((const kn_bucket *)p->source)->unit;
    const double before = u->options.predivide_factor;
    return kn_unit_divisor(u) * (before > 0 ? before : 1);
}

static void clear(const kn_param *p)
{
    kn_clear_grad(p->tensor);
}

void kn_bucket_take_table(kn_bucket *b)
{
    const kn_bucket_param *p = &b->param[0];
    kn_rows *r = kn_table_of(p->tensor);
    r->shard = kn_tensor_ref(p->master);
    r->ranks = b->shards;
    r->each = (p->shape[0] + b->shards - 1) / b->shards;
    r->first = r->each * b->shard;
    r->all = p->shape[0];
    b->source = (kn_param_source){ .grad = grad,
                                   .clear = clear,
                                   .held_back = held_back,
                                   .waits = waits,
                                   .passes = passes,
                                   .divisor = divisor,
                                   .step_divisor = b->source.step_divisor,
                                   .row_ids = kn_table_row_ids,
                                   .written = b->source.written };
}

void kn_bucket_leave_table(const kn_bucket_param *p)
{
    kn_rows *r = kn_table_of(p->tensor);
    if (!r)
        return;
    kn_tensor_free(r->shard);
    r->shard = NULL;
    r->comm = NULL;
    r->ranks = 0;
}

void kn_bucket_give_ranks(kn_bucket *b, kn_comm *comm)
{
    for (int i = 0; b->rows && i < b->params; i++)
        if (kn_table_of(b->param[i].tensor))
            kn_table_of(b->param[i].tensor)->comm = comm;
}
