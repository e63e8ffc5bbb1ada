/* fsdp/schedule.c: one sharded step, from top to bottom. A step of three units, as the tests print
 * it: g gathers a unit, F and B begin its forward and its backward, s reduces its gradients.
 * .backward_prefetch says when backward gathers the next unit: before this one's gradients (PRE),
 * after this one was released (POST), or not ahead (NONE).
 *
 *   PRE:  g0 F0 g1 F1 g2 F2 g2 g1 B2 s2 g0 B1 s1 B0 s0
 *   POST: g0 F0 g1 F1 g2 F2 g2 B2 g1 s2 B1 g0 s1 B0 s0
 *   NONE: g0 F0 g1 F1 g2 F2 g2 B2 s2 g1 B1 s1 g0 B0 s0
 *
 * The verbs are in verbs.c: unshard issues a unit's gather, wait makes the compute stream wait for
 * it, gather does both; reshard releases the whole parameters, reduce issues the reduction of the
 * gradients. prefetch.c unshards the next unit. Calls of modules run the two hooks of forward
 * (calls.c counts them). Those of backward, kn_pre_backward and kn_post_backward, are turns, which
 * all ranks take in the same order: the forward just run, which is the same on all of them, walked
 * from its end (order.c), whatever branches their backwards take. The engine's news let the turns
 * go on (turns.c).
 *
 * A gather waits for what compute has been given when it is issued: the bytes that it takes are
 * those that earlier kernels gave back. So g1 above begins after F0; a gather that is to run beside
 * F0 is issued before it (.forward_prefetch). */
#include "fsdp/schedule.h"

/* False: the call may not begin. True: post_forward will end it, though an error may stand. */
static bool pre_forward(void *unit, kn_module_impl *m, kn_values *in)
{
    kn_unit *u = unit;
    bool replay = kn_in_backward(); /* a call that recomputes: its unit's turn has come */
    if (!kn_schedule_of(u) || !kn_unit_may_train(u) ||
        !(replay ? kn_turns_come_to(u) : kn_unit_call_begin(u, m)))
        return false;
    if (kn_unit_gather(u, KN_WHY("its forward begins")) && !replay)
        kn_prefetch_forward(u);
    if (kn_ok())
        kn_unit_cast_inputs(u, in);
    return true;
}

static void post_forward(void *unit, kn_values *out)
{
    kn_unit *u = unit;
    if (kn_ok())
        kn_unit_cast_outputs(u, out);
    if (kn_in_backward() ||
        !kn_unit_call_end(u)) /* backward needs the parameters now, or another call does */
        return;
    kn_unit_reshard_after_forward(u, KN_WHY("its forward ended"));
    if (u == u->schedule->outermost)
        kn_forward_end(u->schedule);
}

bool kn_pre_backward(kn_unit *u)
{
    u->state = KN_UNIT_PRE_BACKWARD;
    return kn_unit_unshard_in_backward(u, KN_WHY("its backward begins")) &&
           kn_prefetch_backward(u, KN_PREFETCH_PRE);
}

/* At most .max_reductions run while the next unit computes: memory stays bounded. */
bool kn_post_backward(kn_unit *u)
{
    u->state = KN_UNIT_POST_BACKWARD;
    return kn_unit_reshard_after_backward(u, KN_WHY("its backward ended")) &&
           kn_prefetch_backward(u, KN_PREFETCH_POST) &&
           kn_unit_reduce(u, KN_WHY("its gradients are whole"));
}

/* Gradients that came out of turn, or that were held back for a unit that this backward did not
 * reach, are reduced now; all that was kept is released. */
static bool end_unit(kn_unit *u)
{
    kn_unit_state was = u->state;
    bool reduced = was == KN_UNIT_POST_BACKWARD || (was == KN_UNIT_IDLE && !u->set.sync);
    if (was == KN_UNIT_LATE)
        u->state = KN_UNIT_POST_BACKWARD;
    bool ok = (reduced || kn_unit_reduce(u, KN_WHY("the whole backward ends"))) &&
              (was == KN_UNIT_IDLE || kn_unit_note_backward(u));
    u->state = KN_UNIT_IDLE;
    u->group_calls = 0;
    u->ran = u->ran && !u->set.sync;
    return ok && kn_unit_reshard_after_backward(u, KN_WHY("the whole backward ends"));
}

/* Of an iteration: nothing runs any more, and ranks agree on what came. */
static bool end_iteration(kn_schedule_state *s)
{
    return kn_finish_reductions(s, 0, KN_WHY("the last backward ends")) &&
           kn_unit_end_download(s->downloading) && kn_agree_on_grads(s);
}

void kn_end_of_backward(void *schedule)
{
    kn_schedule_state *s = schedule;
    bool last = s->root->set.is_last_backward;
    if (!kn_order_go_on(&s->order) ||
        (last && !kn_finish_reductions(s, 0, KN_WHY("the last backward ends"))))
        return;
    s->settled = last;
    for (int i = 0; i < s->units; i++)
        if (!end_unit(s->unit[i]))
            return;
    if (last && !end_iteration(s))
        return;
    s->phase = KN_PHASE_OUTSIDE;
}

kn_unit_hooks *kn_unit_hooks_new(kn_unit *u)
{
    kn_unit_hooks *h = kn_host_calloc(1, sizeof *h);
    if (h)
        *h = (kn_unit_hooks){ .pre_forward = pre_forward,
                              .post_forward = post_forward,
                              .converts = kn_unit_converts,
                              .reach = kn_turns_reach,
                              .leave = kn_unit_leave,
                              .group = u->group,
                              .unit = u };
    return h;
}
