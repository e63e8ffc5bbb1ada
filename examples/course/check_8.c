/* examples/course/check_8.c: the checker of exercise 8. */
#include "course.h"

void begin(unit *u, kn_comm *ranks);
void train_step(net *n, kn_comm *ranks, int step);

int main(void)
{
    training t = { .ranks = 2, .steps = 3, .micros = 3, .sharded = true };
    t.clip = CLIP, t.begin = begin, t.whole_step = train_step;
    const report *one = reference(t), *r = train(t);
    same(r->first, one->first, "nothing hangs, but after the first step",
         "the gradients are right; the ranks scaled them by different factors.");
    if (r->ledger.live[KN_MEM_GATHERED])
        printf("Between steps a rank holds %d bytes of gathered parameters.\n",
               (int)r->ledger.live[KN_MEM_GATHERED]);
    same(r->param, one->param, "the first step is right, but after the last one",
         "so it is in one process.");
    if (r->ledger.live[KN_MEM_GATHERED])
        wrong("the values are right, and between steps nothing should be gathered.");
    right("three faults mended: 2 ranks have the bits of one process.");
}
