/* examples/course/4_gather.c: exercise 4, parameters that are there only while they are used
 * (docs/course/4-gather.md). The later exercises use what you write here. */
#include "course.h"

/* ==== your part ==== */
/* Makes full whole, unless it is: takes its memory from room, and gathers the shards into it. */
void gather(unit *u)
{
    (void)u;
}

/* Gives the memory of full back, if it was taken. */
void release(unit *u)
{
    (void)u;
}

/* grad = acc (or 0 where it is NULL) + this rank's shard of the sum over ranks of u's gradients. */
void reduce(unit *u, const float *acc)
{
    (void)u, (void)acc;
}

/* All gradients of u are complete. */
void whole(unit *u)
{
    (void)u;
}

/* Lets v's functions run: before and after each forward of u, before its backward, and once the
 * gradients of both leaves are complete. */
void attach(unit *u, verbs v)
{
    (void)u, (void)v;
}
/* ==== end of your part ==== */
