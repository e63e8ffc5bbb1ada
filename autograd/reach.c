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
    if (!kn_host_grow(&e->node, &e->room, e->nodes + 1, sizeof *e->node) || !kn_engine_lend(e, n))
        return false;
    n->mark = e->pass;
    n->has_grad = n->passed = false;
    kn_node_drop_places(n);
    n->leads = true;
    n->refs++;
    e->node[e->nodes++] = n;
    return true;
}

static int by_falling_seq(const void *a, const void *b)
{
    uint64_t x = (*(kn_node *const *)a)->seq, y = (*(kn_node *const *)b)->seq;
    return x < y ? 1 : x > y ? -1 : 0;
}

bool kn_engine_catches(const kn_engine *e)
{
    return e->caught != NULL;
}

kn_catch *kn_engine_catch(const kn_engine *e, const kn_tensor *leaf, const kn_node *n, int out)
{
    for (int i = 0; i < e->catches; i++) {
        const kn_tensor *t = e->caught[i].input;
        if (t && (leaf ? t == leaf : n && t->node == n && t->out_index == out))
            return &e->caught[i];
    }
    return NULL;
}

bool kn_engine_wants(const kn_engine *e, const kn_node *n, int i)
{
    const kn_edge *edge = &n->edge[i];
    if (!kn_engine_catches(e))
        return edge->node || edge->leaf;
    if (edge->leaf)
        return kn_engine_catch(e, edge->leaf, NULL, 0);
    return edge->node && ((edge->node->mark == e->pass && edge->node->leads) ||
                          kn_engine_catch(e, NULL, edge->node, edge->out_index));
}

static bool leads(const kn_engine *e, const kn_node *n)
{
    for (int k = 0; k < n->nin; k++)
        if (kn_engine_wants(e, n, k))
            return true;
    return false;
}

static bool is_caught(const kn_engine *e, const kn_node *n)
{
    for (int k = 0; k < n->nout; k++)
        if (kn_engine_catch(e, NULL, n, k))
            return true;
    return false;
}

/* Drops the nodes behind which nothing is caught. They come after what they lead to here, so each
 * is decided when all its inputs are. */
static void prune(kn_engine *e)
{
    int64_t left = 0;
    for (int64_t i = e->nodes - 1; i >= 0; i--)
        e->node[i]->leads = leads(e, e->node[i]);
    for (int64_t i = 0; i < e->nodes; i++) {
        kn_node *n = e->node[i];
        if (n->leads || is_caught(e, n)) {
            e->node[left++] = n;
            continue;
        }
        n->mark = 0;
        kn_node_unref(n);
    }
    e->nodes = left;
}

bool kn_engine_reach(kn_engine *e, kn_node *const *root, int roots)
{
    for (int i = 0; i < roots; i++)
        if (!reach(e, root[i]))
            return false;
    for (int64_t i = 0; i < e->nodes; i++) { /* the list is its own queue */
        kn_node *n = e->node[i];
        for (int k = 0; k < n->nin && n->seq > e->after; k++)
            if (!reach(e, n->edge[k].node))
                return false;
    }
    qsort(e->node, e->nodes, sizeof *e->node, by_falling_seq);
    if (kn_engine_catches(e))
        prune(e);
    for (int64_t i = 0; i < e->nodes; i++)
        if (e->node[i]->freed && e->node[i]->leads)
            return kn_fail(
                "backward: the saved tensors of '%s' were freed by an earlier backward through "
                "this graph; run the forward again, or pass .retain_graph = true the first time",
                e->node[i]->op->name);
    return (!e->graph || kn_engine_has_graphs(e)) && kn_engine_find_scale(e, root, roots);
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
    kn_engine *owner = kn_engine_outermost(e);
    if (leaf->pending == 0) {
        if (!kn_host_grow(&owner->leaf, &owner->leaf_room, owner->leaves + 1, sizeof *owner->leaf))
            return false;
        owner->leaf[owner->leaves++] = kn_tensor_ref(t);
    }
    leaf->pending++;
    return see_group(e, leaf->group);
}

/* A nested pass (of a hook) must not touch the counts of calls that an outer pass is counting. */
static bool outer_counts(const kn_engine *e, const kn_frame *f)
{
    for (const kn_engine *o = e->outer; o; o = o->outer)
        if (f->mark == o->pass)
            return true;
    return false;
}

/* The groups inside of a call that recomputes wait for its replay, which uses them. */
static bool begin_frame(kn_engine *e, kn_frame *f)
{
    f->mark = e->pass;
    f->pending = 0;
    f->fired = f->replayed = false;
    f->holds = f->insides > 0;
    for (int64_t i = 0; i < f->insides; i++)
        if (!see_group(e, f->inside[i]))
            return false;
    return true;
}

bool kn_engine_count(kn_engine *e)
{
    for (int64_t i = 0; i < e->nodes; i++) {
        kn_node *n = e->node[i];
        for (int k = 0; k < n->nin; k++) {
            const kn_edge *to = &n->edge[k];
            if (to->node)
                kn_engine_uses(n, &to->node->home[to->out_index]);
            if (!see_leaf(e, to->leaf))
                return false;
        }
        for (kn_frame *f = n->frame; f && !outer_counts(e, f) && !kn_engine_call_runs(e, f);
             f = f->parent) {
            if (f->mark != e->pass && !begin_frame(e, f))
                return false;
            f->pending++;
            if (!see_group(e, f->group))
                return false;
        }
    }
    return true;
}
