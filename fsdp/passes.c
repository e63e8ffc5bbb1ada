/* fsdp/passes.c: which backwards are micro-batches: those that brought any rank a gradient. A rank
 * knows its own gradients, and the reduction of a backward says what the others got (agree.c).
 * Where gradients wait for a later backward, of several backwards or of zeros for what is unused,
 * that can't tell whose they are. So such a backward is counted in doubt, until one comes that
 * reduces: there the hosts tell each other, once for all of them. */
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"

void kn_passes_free(kn_passes *p)
{
    kn_host_free(p->id);
    kn_host_free(p->brought);
}

static bool add(kn_passes *p, kn_module_impl *m)
{
    int64_t room = p->room; /* grown when both lists have */
    if (!kn_host_grow(&p->id, &room, p->count + 1, sizeof *p->id) ||
        !kn_host_grow(&p->brought, &p->room, p->count + 1, 1))
        return false;
    p->id[p->count] = kn_backward_pass();
    return kn_module_round_in_doubt(m, &p->brought[p->count++]);
}

/* Gradients of a unit of the tree wait: another backward will reduce them. */
static bool some_wait(const kn_schedule_state *s)
{
    bool any = false;
    for (int i = 0; i < s->units; i++)
        any |= kn_unit_awaits_sync(s->unit[i]) || kn_unit_awaits_last(s->unit[i]);
    return any;
}

/* A unit of the tree has reduced all that it had. */
static bool reduces(const kn_schedule_state *s)
{
    for (int i = 0; i < s->units && s->root->is_last_backward; i++) {
        const kn_unit *u = s->unit[i];
        bool partial = false;
        for (int k = 0; k < u->buckets; k++)
            partial |= u->bucket[k]->has_partial;
        if (u->buckets > 0 && u->sync && !partial)
            return true;
    }
    return false;
}

static bool has_zeros(const kn_schedule_state *s)
{
    bool any = false;
    for (int i = 0; i < s->units; i++)
        any |= s->unit[i]->reduce_unused;
    return any;
}

bool kn_passes_end(kn_schedule_state *s, bool waits, bool came)
{
    kn_passes *p = &s->passes;
    kn_module_impl *m = s->root->module[0];
    if (waits || came)
        kn_module_grads_changed(m, kn_unit_divisor(s->root));
    if (s->root->size == 1) /* its own gradients are all there are */
        return true;
    bool now = reduces(s), earlier = p->some_wait; /* what came may be theirs */
    p->some_wait = some_wait(s);
    if (now && p->count == 0 && !waits && !earlier && !has_zeros(s)) {
        if (came)
            kn_module_round(m, 0);
        return kn_ok();
    }
    if ((waits || came) && !add(p, m))
        return false;
    if (!now)
        return true;
    if (!kn_agree_on_any(s, p->brought, p->count, "which backwards brought gradients"))
        return false;
    for (int i = 0; i < p->count; i++)
        kn_module_round_settle(m, p->id[i], p->brought[i]);
    p->count = 0;
    return true;
}
