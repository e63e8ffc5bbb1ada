/* examples/course/check_5.c: the checker of exercise 5. Each layer and each collective takes SLOW
 * seconds, asleep: two cores are enough, also where others use them. */
#include "course.h"

void begin(unit *u, kn_comm *ranks);
void end_of_backward(void);

#define SLOW 0.03

int main(void)
{
    training t = { .ranks = 2, .steps = 5, .sharded = true };
    t.slow = SLOW, t.prefetch = KN_PREFETCH_PRE, t.begin = begin, t.step = sgd_step,
    t.end_of_backward = end_of_backward;
    const report *one = reference(t), *r = train(t), *own = knaps_own(t);
    double forward = r->seconds[0] / SLOW, backward = r->seconds[1] / SLOW;
    printf("your step: %s\n"
           "A layer and a collective take 1; your forward takes %.1f, your backward %.1f.\n"
           "course-trace.json is its trace.\n",
           r->events, forward, backward);
    at_most(r, KN_MEM_GATHERED, own->ledger.peak[KN_MEM_GATHERED], "gather one unit ahead.");
    at_most(r, KN_MEM_UNREDUCED, own->ledger.peak[KN_MEM_UNREDUCED],
            "finish a reduction before the next one begins.");
    if (r->before.live[KN_MEM_UNREDUCED])
        wrong("the last reduction was never waited for: its memory is still taken.");
    if (forward < UNITS + 1 || backward < UNITS + 1)
        wrong("%d layers and the first gather take %d: you compute before the gather has arrived.",
              UNITS, UNITS + 1);
    same(r->param, one->param, "at the end", "was something read before it came?");
    if (forward > UNITS + 2)
        wrong("nothing is gathered while a layer computes in forward: %d layers and the first "
              "gather take %d. Issue the next gather before you wait for this one.",
              UNITS, UNITS + 1);
    if (backward > UNITS + 3)
        wrong("backward waits too often: %d layers, the first gather and the last reduction take "
              "%d.",
              UNITS, UNITS + 2);
    right("the bits of one process, at most %d bytes gathered (Knap's own: %d).",
          (int)r->ledger.peak[KN_MEM_GATHERED], (int)own->ledger.peak[KN_MEM_GATHERED]);
}
