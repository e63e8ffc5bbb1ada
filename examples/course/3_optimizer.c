/* examples/course/3_optimizer.c: exercise 3, a sharded optimizer (docs/course/3-optimizer.md). */
#include "course.h"

void begin(unit *u, kn_comm *ranks)
{
    /* ==== your part ==== */
    /* Set u->ranks and u->part, the elements of a shard. Take u->grad and u->momentum, one shard
     * each, with take_zeros. */
    (void)u, (void)ranks;
    /* ==== end of your part ==== */
}

void step(unit *u)
{
    /* ==== your part ==== */
    /* 1. All gradients of u, with padding, into u->grad_room; their sum's shard into u->grad.
     * 2. momentum = MOMENTUM momentum + mean gradient;  value -= LR momentum: of your part of full.
     * 3. The parts of all ranks into full. */
    (void)u;
    /* ==== end of your part ==== */
}
