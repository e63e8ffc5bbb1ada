/* examples/course/check_4.c: the checker of exercise 4. */
#include "course.h"
#include <string.h>

void whole(unit *u);

static void begin(unit *u, kn_comm *ranks)
{
    cut(u, ranks);
    attach(u, (verbs){ gather, release, gather, whole });
}

int main(void)
{
    training t = { .ranks = 2, .steps = 3, .twice = true, .sharded = true };
    t.prefetch = KN_PREFETCH_NONE, t.begin = begin, t.step = sgd_step;
    const report *one = reference(t), *r = train(t), *own = knaps_own(t);
    const int64_t *live = r->before.live;
    const char *expected = "g0 F0 r0 g1 F1 r1 g1 F1 r1 g2 F2 r2 "
                           "g2 B2 s2 r2 g1 B1 B1 s1 r1 g0 B0 s0 r0";
    printf("your step: %s\n", r->events);
    if (!strchr(r->events, 's') && !live[KN_MEM_UNREDUCED])
        wrong("v.whole never ran: it is to run when the gradients of both leaves are complete.");
    at_most(r, KN_MEM_GATHERED, own->ledger.peak[KN_MEM_GATHERED],
            "give each unit back after its forward, and when its gradients are whole.");
    if (live[KN_MEM_GATHERED] || live[KN_MEM_UNREDUCED])
        wrong("after backward a rank holds %d bytes of gathered parameters and %d of whole "
              "gradients: kn_give them back.",
              (int)live[KN_MEM_GATHERED], (int)live[KN_MEM_UNREDUCED]);
    same(r->param, one->param, "at the end", "are the gradients reduced, and in their place?");
    same(r->param, own->param, "at the end", "Knap's own FSDP has that.");
    if (strcmp(r->events, expected))
        wrong("values and bytes are right, but a step should be\n           %s", expected);
    right("the bits of one process and of Knap's own FSDP; at most %d bytes gathered (Knap: %d).",
          (int)r->ledger.peak[KN_MEM_GATHERED], (int)own->ledger.peak[KN_MEM_GATHERED]);
}
