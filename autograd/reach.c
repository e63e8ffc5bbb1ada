/* autograd/reach.c: before a backward runs: which nodes it comes to, and how many contributions
 * each leaf, group and module call waits for. */
#include "autograd/engine.h"
#include "kernels/memory_internal.h"
#include <stdlib.h>

kn_engine *kn_engine_outermost(kn_engine *e)
{
    while (e && e->outer)
        e = e->outer;
    return e;
}

/* ---- 1. reachability ------------------------------------------------------------------------- */

static bool reach(kn_engine *e, kn_node *n)
{
    if (!n || n->mark == e->pass)
        return true;
    if (n->freed)
        return kn_fail(
            "backward: the saved tensors of '%s' were freed by an earlier backward through "
            "this graph; run the forward again, or pass .retain_graph = true the first time",
            n->op->name);
    if (!kn_host_grow(&e->node, &e->room, e->nodes + 1, sizeof *e->node))
        return false;
    n->mark = e->pass;
    n->has_grad = n->touched = false;
    n->refs++;
    e->node[e->nodes++] = n;
    return true;
}

static int by_falling_seq(const void *a, const void *b)
{
    uint64_t x = (*(kn_node *const *)a)->seq, y = (*(kn_node *const *)b)->seq;
    return x < y ? 1 : x > y ? -1 : 0;
}

bool kn_engine_reach(kn_engine *e, kn_node *const *root, int roots)
{
    for (int i = 0; i < roots; i++)
        if (!reach(e, root[i]))
            return false;
    for (int64_t i = 0; i < e->nodes; i++) { /* the list is its own queue */
        kn_node *n = e->node[i];
        for (int k = 0; k < n->nin; k++)
            if (!reach(e, n->edge[k].node))
                return false;
    }
    qsort(e->node, e->nodes, sizeof *e->node, by_falling_seq);
    return true;
}

/* ---- 2. counting ----------------------------------------------------------------------------- */

static bool see_group(kn_engine *e, kn_group *g)
{
    if (!g)
        return true;
    if (!g->active) {
        if (!kn_host_grow(&e->group, &e->group_room, e->groups + 1, sizeof *e->group))
            return false;
        e->group[e->groups++] = g;
        g->active = true;
    }
    g->pending++;
    return true;
}

static bool see_leaf(kn_engine *e, kn_tensor *t)
{
    kn_leaf *leaf = t ? t->leaf : NULL;
    if (!leaf)
        return true;
    kn_engine *owner = leaf->passing ? e : kn_engine_outermost(e);
    if (leaf->pending == 0) {
        if (!kn_host_grow(&owner->leaf, &owner->leaf_room, owner->leaves + 1, sizeof *owner->leaf))
            return false;
        owner->leaf[owner->leaves++] = leaf->passing ? t : kn_tensor_ref(t);
    }
    leaf->pending++;
    return see_group(e, leaf->group);
}

/* A nested pass (recompute) must not touch the counts of calls that an outer pass is counting. */
static bool outer_counts(const kn_engine *e, const kn_frame *f)
{
    for (const kn_engine *o = e->outer; o; o = o->outer)
        if (f->mark == o->pass)
            return true;
    return false;
}

bool kn_engine_count(kn_engine *e)
{
    for (int64_t i = 0; i < e->nodes; i++) {
        kn_node *n = e->node[i];
        for (int k = 0; k < n->nin; k++)
            if (!see_leaf(e, n->edge[k].leaf))
                return false;
        for (int k = 0; k < n->ntouch; k++)
            if (!see_leaf(e, n->touch[k]))
                return false;
        for (kn_frame *f = n->frame; f && !outer_counts(e, f); f = f->parent) {
            if (f->mark != e->pass) {
                f->mark = e->pass;
                f->pending = 0;
                f->fired = false;
            }
            f->pending++;
            if (!see_group(e, f->group))
                return false;
        }
    }
    return true;
}
