/* examples/course/7_ranks.c: exercise 7, another number of ranks (docs/course/7-ranks.md). */
#include "course.h"
#include <unistd.h>

enum { MICROS = 6 }; /* of a step, over all ranks */

/* ==== your part ==== */
/* As in exercise 4: the gradients of the last micro-batch alone. */
static void whole(unit *u)
{
    reduce(u, NULL);
    release(u);
}
/* ==== end of your part ==== */

void begin(unit *u, kn_comm *ranks)
{
    cut(u, ranks);
    attach(u, (verbs){ gather, release, gather, whole });
}

/* ==== your part ==== */
/* To be the step on the mean over all MICROS micro-batches. */
void step(unit *u)
{
    for (int64_t i = 0; i < u->part; i++)
        u->shard[i] -= LR * (u->grad[i] / (float)kn_comm_size(u->ranks));
}

/* Writes this rank's part of u into the file, where the unit's first element lies at byte number
 * at. False if that failed. */
bool save(unit *u, int file, int64_t at)
{
    (void)u, (void)file, (void)at;
    return false;
}

/* Reads it from there. */
bool load(unit *u, int file, int64_t at)
{
    (void)u, (void)file, (void)at;
    return false;
}
/* ==== end of your part ==== */
