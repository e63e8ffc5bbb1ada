/* fsdp/turns.c: what the engine reports of a backward, as leave for the turns to go on. The engine
 * of each rank reaches the units that this rank's data chose; the turns (order.c) are the same on
 * all ranks, and each is a pre_backward or a post_backward of schedule.c. */
#include "fsdp/schedule.h"

static void backward_failed(void *arg)
{
    kn_schedule_state *s = arg;
    s->phase = KN_PHASE_FAILED; /* an error stands: it can't be mended now */
}

/* Before anything else that a backward wants of the tree. */
static bool begin_backward(kn_schedule_state *s)
{
    if (s->phase == KN_PHASE_BACKWARD)
        return kn_ok();
    kn_schedule_recover(s);
    if (!kn_on_backward(kn_end_of_backward, backward_failed, s))
        return false;
    s->phase = KN_PHASE_BACKWARD;
    for (int i = 0; i < s->units; i++)
        for (int k = 0; k < s->unit[i]->buckets; k++)
            kn_bucket_keep_grads(s->unit[i]->bucket[k]);
    return kn_order_start(s) && kn_order_go_on(&s->order);
}

/* Takes u's turn; without one, or where a second call of the module or a recompute needs it,
 * gathers u where it is. */
bool kn_turns_come_to(kn_unit *u)
{
    if (!begin_backward(u->schedule) || !kn_order_come_to(&u->schedule->order, u))
        return false;
    if (u->state != KN_UNIT_PRE_BACKWARD)
        u->leave_at = -1;
    u->state = KN_UNIT_PRE_BACKWARD;
    return kn_unit_unshard_in_backward(u, KN_WHY("backward came to it"));
}

bool kn_turns_before_collective(void *unit)
{
    kn_schedule_state *s = ((kn_unit *)unit)->schedule;
    return !s || (begin_backward(s) && kn_order_go_on(&s->order));
}

static bool may_come(const kn_unit *u)
{
    if (!u->schedule)
        return kn_fail("fsdp: backward reached unit '%s', which has had no forward since it was "
                       "wrapped; call the wrapped module, then kn_backward on its result",
                       kn_unit_name(u));
    if (!kn_unit_closed(u, kn_unit_name(u), "fsdp: a backward"))
        return false;
    const kn_unit *out = u->schedule->outermost; /* of the forward that runs */
    out = out && out->calls > 0 ? out : u;
    return out->state != KN_UNIT_FORWARD ||
           kn_fail("fsdp: unit '%s' is in forward, so a backward cannot happen now; a backward "
                   "begins when all calls of its units are over",
                   kn_unit_name(out));
}

void kn_turns_reach(void *unit)
{
    kn_unit *u = unit;
    if (u->schedule && !u->summoned)
        kn_forward_close(u->schedule);
    if (may_come(u))
        kn_turns_come_to(u);
}

static bool got_gradients(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (!u->bucket[i]->grad->released)
            return true;
    return false;
}

/* Of a unit that had no turn no gradients may have come: it lies in a call that recomputes, but
 * didn't run. Other ranks may not reach that call at all. */
void kn_turns_complete(void *unit)
{
    kn_unit *u = unit;
    if (!u->schedule) {
        may_come(u);
        return;
    }
    if (!begin_backward(u->schedule))
        return;
    if (u->leave_at < 0 && (u->enter_at >= 0 || got_gradients(u)))
        u->state = KN_UNIT_LATE;
    kn_order_go_on(&u->schedule->order);
}
