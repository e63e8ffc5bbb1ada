/* examples/course/check_3.c: the checker of exercise 3. */
#include "course.h"

void begin(unit *u, kn_comm *ranks);
void step(unit *u);

enum { RANKS = 2 };

static void begun(net *n, report *r)
{
    int64_t bytes = 0, live = kn_ledger_read().live[KN_MEM_OPTIM];
    for (int i = 0; i < UNITS; i++) {
        const unit *u = &n->unit[i];
        int numel = (int)u->numel, part = (numel + RANKS - 1) / RANKS;
        bytes += (part * 4 + KN_ALIGN - 1) / KN_ALIGN * KN_ALIGN;
        if (!u->ranks || !u->part || !u->momentum || !u->grad)
            lacking(r, "begin() must set ranks and part, and take momentum and grad.");
        else if (u->part != part)
            lacking(r, "%d elements over %d ranks make shards of %d, rounded up; yours have %d.",
                    numel, RANKS, part, (int)u->part);
    }
    if (!r->lacks[0] && live != bytes)
        lacking(r, "a rank keeps %d bytes of momentum, and its shards take %d.", (int)live,
                (int)bytes);
}

int main(void)
{
    training t = { .ranks = RANKS, .steps = 3, .twice = true };
    t.begin = begin, t.begun = begun, t.step = step, t.momentum = MOMENTUM;
    const report *one = reference(t), *r = train(t);
    same(r[1].first, r[0].first, "after the first step, on rank 1,",
         "each rank updates its own part, and must then get the parts of the others.");
    moved_alike(r, one, "is it the mean gradient, of these elements, added to half the momentum?");
    if (r->ledger.live[KN_MEM_UNREDUCED])
        wrong("%d bytes of whole gradients are still there after the step: kn_give them back.",
              (int)r->ledger.live[KN_MEM_UNREDUCED]);
    right("the bits of one process, with %d bytes of momentum a rank instead of %d.",
          (int)r->ledger.live[KN_MEM_OPTIM], TOTAL * 4);
}
