/* tests/course/5_overlap.c: a solution of exercise 5. */
#include "course.h"

static kn_stream *gathers, *reductions; /* beside the compute stream */

/* ==== your part ==== */
static unit *reducing; /* its reduction is on its way, or NULL */

static void issue(unit *u)
{
    if (u->gathered || !kn_take(&u->room, bytes_of(u), KN_MEM_GATHERED))
        return;
    u->gathered = true;
    kn_event_record(u->computed, kn_compute_stream(KN_CPU));
    kn_event_wait(u->computed, gathers); /* the memory may be in use until then */
    kn_all_gather(u->ranks, u->full, u->shard, u->part, KN_F32, gathers, u->name);
    kn_event_record(u->arrived, gathers);
}

static void before_forward(unit *u)
{
    issue(u);
    if (u->index < UNITS - 1)
        issue(u + 1);
    kn_event_wait(u->arrived, kn_compute_stream(KN_CPU));
}

static void before_backward(unit *u)
{
    issue(u);
    if (u->index > 0)
        issue(u - 1);
    kn_event_wait(u->arrived, kn_compute_stream(KN_CPU));
}

static void finish_reduction(void)
{
    unit *u = reducing;
    reducing = NULL;
    if (u && kn_event_sync(u->reduced))
        kn_give(&u->grad_room, u->sum, bytes_of(u), KN_MEM_UNREDUCED);
}

static void whole(unit *u)
{
    release(u);
    finish_reduction();
    u->sum = kn_take(&u->grad_room, bytes_of(u), KN_MEM_UNREDUCED);
    pack_grads(u, u->sum);
    kn_event_record(u->computed, kn_compute_stream(KN_CPU));
    kn_event_wait(u->computed, reductions);
    kn_reduce_scatter(u->reducers, u->grad, NULL, u->sum, u->part, KN_F32, KN_F32, reductions,
                      u->name);
    kn_event_record(u->reduced, reductions);
    reducing = u;
}
/* ==== end of your part ==== */

void begin(unit *u, kn_comm *ranks)
{
    static kn_comm *reducers;
    if (u->index == 0) {
        gathers = kn_stream_create(KN_CPU, "gathers", KN_STREAM_WORKER);
        reductions = kn_stream_create(KN_CPU, "reductions", KN_STREAM_WORKER);
        reducers = kn_comm_dup(ranks, "reductions");
    }
    cut(u, ranks);
    u->reducers = reducers;
    attach(u, (verbs){ before_forward, release, before_backward, whole });
}

void end_of_backward(void)
{
    finish_reduction();
}

/* Answers.
 * 1. The memory of the gradients is given back. The reduction was issued right after r2.
 * 2. All collectives one after another, then the last layer. Gathering ahead by two does not
 *    help: with one ahead the stream of gathers is never idle.
 * 3. A rank would gather another unit than the others: out of step. Knap records the order of
 *    the forward, which all ranks have agreed on, and walks it from its end. */
