/* examples/course/5_overlap.c: exercise 5, collectives beside the computation
 * (docs/course/5-overlap.md). It works, and waits for each collective. */
#include "course.h"

static kn_stream *gathers, *reductions; /* beside the compute stream */

/* ==== your part ==== */
static void before_forward(unit *u)
{
    gather(u);
}

static void before_backward(unit *u)
{
    gather(u);
}

/* Waits for the reduction that is on its way, if any, and gives its memory back. */
static void finish_reduction(void)
{
}

static void whole(unit *u)
{
    reduce(u, NULL);
    release(u);
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
