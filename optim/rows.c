/* optim/rows.c: a step on a table whose gradient stays rows. The rows that have one are copied out,
 * of the parameter and of its states; the method updates the copies as any piece, and they are put
 * back. Other rows stay as they are, with their states: no decay, no momentum (lazy, as
 * torch.optim.SparseAdam). */
#include "autograd/ops.h"
#include "autograd/rows.h"
#include "kernels/memory_internal.h"
#include "optim/optim_internal.h"

/* t, 1-d, as the table's rows. */
static kn_tensor *as_rows(const kn_tensor *t, int64_t rows)
{
    const int64_t width = rows > 0 ? kn_numel(t) / rows : 0;
    return kn_tensor_alias(t, 0, 2, (int64_t[]){ rows, width }, (int64_t[]){ width, 1 });
}

bool kn_rows_take(kn_optim *o, const kn_optim_slot *s, const kn_param *p, kn_tensor *ids,
                  kn_opt_piece *q)
{
    if (!kn_host_grow(&o->taken, &o->taken_room, o->takes + 1, sizeof *o->taken))
        return false;
    kn_tensor *home[] = { p->master, s->state[0], s->state[1], s->state[2] };
    const int64_t rows = kn_numel(p->master) / kn_param_row(p), n = kn_numel(ids);
    kn_taken *t = &o->taken[o->takes];
    *t = (kn_taken){ .param = p, .ids = ids };
    for (int k = 0; k <= KN_OPTIM_STATES; k++) {
        if (!home[k])
            continue;
        t->home[k] = as_rows(home[k], rows);
        t->copy[k] = t->home[k] ? kn_empty(home[k]->dtype, kn_device_of(home[k]), 2,
                                           (int64_t[]){ n, t->home[k]->shape[1] })
                                : NULL;
        if (!t->copy[k] || (n > 0 && !kn_pick(t->copy[k], kn_array_of(t->home[k]), ids)))
            return false;
    }
    o->takes++;
    q->param = kn_data_of(t->copy[0]);
    q->m = kn_data_of(t->copy[1]);
    q->v = kn_data_of(t->copy[2]);
    q->more = kn_data_of(t->copy[3]);
    q->count = kn_numel(t->copy[0]);
    return true;
}

bool kn_rows_put_back(kn_optim *o)
{
    bool ok = true;
    for (int i = 0; ok && i < o->takes; i++)
        for (int k = 0; ok && k <= KN_OPTIM_STATES; k++) {
            kn_tensor *from = o->taken[i].copy[k], *to = o->taken[i].home[k];
            if (!from || kn_numel(from) == 0)
                continue;
            kn_array at = kn_array_of(o->taken[i].ids);
            at = kn_array_make(at.data, at.dtype, 2, from->shape);
            at.stride[0] = 1;
            at.stride[1] = 0;
            ok = KN_RUN(to, KN_K_SCATTER,
                        ((kn_scatter_args){ kn_array_of(to), kn_array_of(from), at, 0, false,
                                            "rows of a step" }));
        }
    o->takes = 0;
    return ok;
}

const kn_taken *kn_rows_taken(const kn_optim *o, const kn_opt_piece *q)
{
    for (int i = 0; i < o->takes; i++)
        if (kn_data_of(o->taken[i].copy[0]) == q->param)
            return &o->taken[i];
    return NULL;
}
