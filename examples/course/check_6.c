/* examples/course/check_6.c: the checker of exercise 6. */
#include "course.h"
#include <string.h>

void begin(unit *u, kn_comm *ranks);

/* A forward changes no master. */
static void ended(net *n, report *r)
{
    float before[HIDDEN * (HIDDEN + 1)];
    const unit *u = &n->unit[1];
    size_t bytes = (size_t)u->part * sizeof *before;
    memcpy(before, u->shard, bytes);
    kn_set_grad_mode(false);
    net_loss(n, 0);
    if (memcmp(before, u->shard, bytes))
        lacking(r, "a forward rounds the shards, and small steps are lost: masters stay f32.");
}

int main(void)
{
    training t = { .ranks = 2, .steps = 6, .sharded = true };
    t.dtype = KN_BF16, t.prefetch = KN_PREFETCH_NONE, t.begin = begin, t.step = sgd_step,
    t.ended = ended;
    const report *r = train(t), *own = knaps_own(t);
    printf("your step: %s\n", r->events);
    at_most(r, KN_MEM_UNREDUCED, own->ledger.peak[KN_MEM_UNREDUCED], "they are bf16 already.");
    same(r->param, own->param, "at the end",
         "so it is in Knap's own FSDP in bf16. Gradients travel in bf16, and their sum is f32.");
    right("the bits of Knap's own FSDP in bf16, with at most %d bytes gathered (f32: %d).",
          (int)r->ledger.peak[KN_MEM_GATHERED], HIDDEN * (HIDDEN + 1) * 4);
}
