/* autograd/parts.c: gradients of parts, written where the gradient of the whole has them.
 *
 * A model cuts one projection into queries, keys and values (kn_chunk, kn_slice), and turns each
 * with views. The backward of the cut would copy the gradients of all parts into that of the whole.
 * Instead an operation whose kernel takes strides asks for the place of a gradient (kn_grad_part):
 * the gradient of the whole is made then, and the place is the view of it that the input was of the
 * whole. The backwards of the views find it in its place and pass the whole on.
 *
 * An output of a view is given a place only if it has one user in the pass and no hook: then
 * nothing is added to what lies there, and nothing else keeps it that may be overwritten. Slices of
 * a tensor share a whole if they are all its users, and together its elements, each once. The whole
 * is the gradient of an operation's result, never a leaf's: that has a place of its own
 * (kn_grad_out). */
#include "autograd/engine.h"
#include "autograd/ops.h"
#include <stdlib.h>
#include <string.h>

/* Output o of the view n, seen in t, which has the shape of n's input; NULL: t has no such view. */
static kn_tensor *view_of(const kn_node *n, int o, kn_tensor *t)
{
    kn_op_call c = { .op = n->op, .nin = 1, .nout = n->nout, .in = { t }, .attr = n->attr };
    const kn_spec *s = &c.spec[o];
    kn_tensor *v =
        n->op->part(&c) ? kn_tensor_alias(t, s->offset, s->ndim, s->shape, s->stride) : NULL;
    return v ? kn_tensor_ref(v) : NULL;
}

/* The place of the gradient of n's input: n is a view. */
static kn_tensor *whole_of(kn_engine *e, kn_node *n);

/* The place for the gradient of n's output o, if nothing came yet and none was given before. */
static kn_tensor *reserve(kn_engine *e, kn_node *n, int o)
{
    struct kn_home *h = &n->home[o];
    if (n->mark != e->pass || n->dout[o] || h->place)
        return NULL;
    if (!n->op->part) {
        const kn_spec *s = &n->out_spec[o];
        h->place = kn_tensor_new(s->dtype, s->device, NULL, KN_MEM_ACTIVATION, s->ndim, s->shape,
                                 NULL, false);
    } else if (!n->hooks) {
        kn_tensor *whole = whole_of(e, n);
        h->place = whole ? view_of(n, o, whole) : NULL;
    }
    return h->place;
}

/* ---- slices ---------------------------------------------------------------------------------- */

void kn_engine_uses(kn_node *n, struct kn_home *h)
{
    h->users++;
    if (n->op->slice) {
        n->next_cut = h->cut;
        h->cut = n;
    }
}

static int by_begin(const void *a, const void *b)
{
    const kn_slice_attr *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return (x->end > y->end) - (x->end < y->end);
}

/* Whether the cuts, all of one dim, are each element of it once. */
static bool covers(kn_slice_attr *cut, int n, int64_t size)
{
    int64_t at = 0;
    qsort(cut, (size_t)n, sizeof *cut, by_begin);
    for (int i = 0; i < n; i++) {
        if (cut[i].begin != at)
            return false;
        at = cut[i].end;
    }
    return at == size;
}

static bool is_cut(const kn_node *n, int o)
{
    const struct kn_home *h = &n->home[o];
    kn_slice_attr *cut = h->cut ? kn_host_alloc((size_t)h->users * sizeof *cut) : NULL;
    int found = 0;
    for (const kn_node *u = h->cut; cut && u; u = u->next_cut) {
        cut[found] = *(const kn_slice_attr *)u->attr;
        if (u->hooks || cut[found].dim != cut[0].dim)
            break;
        found++;
    }
    const bool cuts =
        cut && found == h->users && covers(cut, found, n->out_spec[o].shape[cut[0].dim]);
    kn_host_free(cut);
    return cuts;
}

/* The place that the slices of n's output o share. */
static kn_tensor *shared(kn_engine *e, kn_node *n, int o)
{
    struct kn_home *h = &n->home[o];
    if (h->sliced || h->uncut)
        return h->sliced ? h->place : NULL;
    h->sliced = n->mark == e->pass && is_cut(n, o) && reserve(e, n, o);
    h->uncut = !h->sliced;
    return h->sliced ? h->place : NULL;
}

void kn_grad_came(kn_op_grad *g)
{
    const kn_edge *to = &g->node->edge[0];
    to->node->home[to->out_index].came++;
    to->node->has_grad = true;
}

/* Zeros for the slices of an output to which no gradient came. */
static bool fill_others(const struct kn_home *h)
{
    for (const kn_node *u = h->cut; u; u = u->next_cut) {
        const kn_slice_attr *cut = u->attr;
        const kn_array part = kn_part(h->place, cut->dim, cut->begin, cut->end - cut->begin);
        if (!u->has_grad && !kn_array_fill(h->place, part, 0, 0))
            return false;
    }
    return true;
}

bool kn_engine_settle(kn_node *n)
{
    for (int o = 0; o < n->nout; o++) {
        struct kn_home *h = &n->home[o];
        if (h->came == 0)
            continue;
        if ((h->came < h->users && !fill_others(h)) || !kn_give_node(n, o, h->place))
            return false;
    }
    return true;
}

/* ---- views ----------------------------------------------------------------------------------- */

static kn_tensor *whole_of(kn_engine *e, kn_node *n)
{
    const kn_edge *to = &n->edge[0];
    if (!n->whole && to->node && kn_engine_wants(e, n, 0)) {
        kn_tensor *place = NULL;
        if (n->op->slice)
            place = shared(e, to->node, to->out_index);
        else if (!to->node->op->part || to->node->home[to->out_index].users == 1)
            place = reserve(e, to->node, to->out_index);
        n->whole = place ? kn_tensor_ref(place) : NULL;
    }
    return n->whole;
}

/* Whether one of the views that output o of n comes through leaves elements out. */
static bool in_larger(const kn_node *n, int o)
{
    for (; n && n->op->part; o = n->edge[0].out_index, n = n->edge[0].node) {
        const kn_spec *x = &n->in_spec[0], *y = &n->out_spec[o];
        int64_t before = 1, after = 1;
        for (int d = 0; d < x->ndim; d++)
            before *= x->shape[d];
        for (int d = 0; d < y->ndim; d++)
            after *= y->shape[d];
        if (after < before)
            return true;
    }
    return false;
}

kn_tensor *kn_grad_part(kn_op_grad *g, int i)
{
    const kn_edge *to = &g->node->edge[i];
    if (!g->want[i] || !in_larger(to->node, to->out_index) ||
        to->node->home[to->out_index].users != 1)
        return NULL;
    return reserve(kn_context_get()->engine, to->node, to->out_index);
}

kn_tensor *kn_grad_whole(kn_op_grad *g)
{
    return g->node->whole || !g->node->op->slice ? g->node->whole
                                                 : whole_of(kn_context_get()->engine, g->node);
}

bool kn_grad_in_place(const kn_op_grad *g, int i)
{
    const kn_tensor *d = g->dout[i], *p = g->node->home[i].place;
    bool same = d && p && d->storage == p->storage && d->offset == p->offset &&
                d->dtype == p->dtype && kn_has_shape(d, p->ndim, p->shape);
    for (int k = 0; same && k < d->ndim; k++)
        same = d->shape[k] == 1 || d->stride[k] == p->stride[k];
    return same;
}

void kn_node_drop_places(kn_node *n)
{
    for (int o = 0; o < n->nout; o++)
        kn_tensor_free(n->home[o].place);
    memset(n->home, 0, sizeof n->home);
    kn_tensor_free(n->whole);
    n->whole = NULL;
}
