/* autograd/lend.c: nodes that a backward borrows from the one around it.
 *
 * A hook may run a backward through nodes that the pass around it is not done with. Each of the two
 * passes computes what came to a node in it, and the leaves add both. */
#include "autograd/engine.h"
#include "kernels/memory_internal.h"
#include <stddef.h>
#include <string.h>

/* A node of this pass, with its state in the pass around it: the members from mark on. */
typedef struct kn_lent {
    kn_node *node;
    unsigned char state[sizeof(kn_node) - offsetof(kn_node, mark)];
} kn_lent;

bool kn_engine_lend(kn_engine *e, kn_node *n)
{
    const kn_engine *o = e->outer;
    while (o && n->mark != o->pass)
        o = o->outer;
    if (!o)
        return true;
    if (!kn_host_grow(&e->lent, &e->lent_room, e->lents + 1, sizeof *e->lent))
        return false;
    kn_lent *l = &e->lent[e->lents++];
    l->node = n;
    memcpy(l->state, &n->mark, sizeof l->state);
    memset(&n->mark, 0, sizeof l->state);
    n->lent = true;
    return true;
}

void kn_engine_give_back(kn_engine *e)
{
    while (e->lents > 0) {
        const kn_lent *l = &e->lent[--e->lents];
        memcpy(&l->node->mark, l->state, sizeof l->state);
    }
    kn_host_free(e->lent);
}

/* ---- calls around a pass --------------------------------------------------------------------- */

bool kn_engine_call_runs(const kn_engine *e, const kn_frame *f)
{
    const kn_frame *r = e->running;
    while (r && r != f)
        r = r->parent;
    return r != NULL;
}
