/* examples/course/check_2.c: the checker of exercise 2. */
#include "course.h"

void begin(unit *u, kn_comm *ranks);

static void step(unit *u)
{
    float grad[TOTAL], *p = u->full;
    pack_grads(u, grad);
    for (int64_t k = 0; kn_ok() && k < u->numel; k++)
        p[k] -= LR * grad[k];
}

int main(void)
{
    training t = { .ranks = 2, .steps = 3, .twice = true };
    t.differ = 1, t.begin = begin, t.step = step;
    const report *one = reference(t), *r = train(t);
    same(r[1].value, r[0].value, "on rank 1, at first,",
         "ranks must begin with the same values, so let rank 0's become everyone's.");
    moved_alike(r, one, "the gradient is the mean over ranks, of weight and bias alike.");
    right("2 ranks have the bits of one process on all batches.");
}
