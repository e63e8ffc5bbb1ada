/* autograd/give.c: where the gradients of a backward go: results of operations, leaves, and the
 * places of fsdp. */
#include "autograd/engine.h"
#include "autograd/hooks.h"
#include "autograd/rows.h"
#include "kernels/memory_internal.h"
#include <string.h>

static bool grad_add(kn_tensor *sum, const kn_tensor *a, const kn_tensor *b)
{
    kn_binary_args args = { kn_array_of(sum), kn_array_of(a), kn_array_of(b), KN_ADD };
    return KN_LAUNCH(kn_compute_stream(kn_device_of(sum)), KN_K_BINARY, args);
}

bool kn_grad_copy(kn_tensor *dst, const kn_tensor *src)
{
    return kn_array_copy(dst, kn_array_of(dst), kn_array_of(src));
}

bool kn_has_shape(const kn_tensor *t, int ndim, const int64_t *shape)
{
    return t->ndim == ndim && memcmp(t->shape, shape, (size_t)ndim * sizeof *shape) == 0;
}

static bool add_part(kn_node *n, int i, kn_tensor *g)
{
    if (!kn_host_grow(&n->part, &n->part_room, n->parts + 1, sizeof *n->part))
        return false;
    n->part[n->parts++] = (struct kn_part){ kn_tensor_ref(g), i };
    return true;
}

/* Nothing else holds on to g, whose elements lie apart from each other: it may be added into. */
static bool is_free(const kn_tensor *g)
{
    return g->refs == 1 && g->storage->refs == 1 && g->storage->category == KN_MEM_ACTIVATION &&
           (kn_is_contiguous(g) || kn_is_channels_last(g));
}

/* The gradient of node->out[i] grows by g. */
bool kn_give_node(kn_node *n, int i, kn_tensor *g)
{
    kn_tensor *before = n->dout[i];
    n->has_grad = true;
    if (n->apart && !add_part(n, i, g))
        return false;
    if (!before) {
        n->dout[i] = kn_tensor_ref(g);
        return true;
    }
    if (is_free(before))
        return grad_add(before, before, g);
    kn_tensor *sum = kn_tensor_new(g->dtype, kn_device_of(g), NULL, KN_MEM_ACTIVATION, g->ndim,
                                   g->shape, kn_order_of(g), false);
    if (!sum || !grad_add(sum, before, g)) {
        kn_tensor_free(sum);
        return false;
    }
    kn_tensor_free(before);
    n->dout[i] = sum;
    return true;
}

/* A table whose gradient stays rows gets them from kn_embedding alone. */
static bool takes_whole(const kn_tensor *leaf)
{
    return !kn_table_of(leaf) ||
           kn_fail("backward: the gradient of '%s' stays rows (kn_keep_rows, .sparse), and another "
                   "operation than kn_embedding brings a whole one; leave .sparse out, or use a "
                   "table of its own there",
                   kn_name(leaf));
}

/* The gradient of a leaf in this pass grows by g. own: nothing else holds on to g (it is no other
 * gradient of the node too), so the leaf may keep it and add into it. */
bool kn_give_leaf(kn_tensor *t, kn_tensor *g, bool own)
{
    kn_leaf *leaf = t->leaf;
    if (!takes_whole(t))
        return false;
    if (leaf->dest) {
        kn_tensor *dest = leaf->dest(leaf->dest_arg, t);
        if (!dest)
            return false;
        bool first = !leaf->filled;
        leaf->filled = true;
        if (dest == g)
            return true;
        if (first)
            return kn_grad_copy(dest, g);
        if (dest->dtype == g->dtype)
            return grad_add(dest, dest, g);
        kn_tensor *wide = kn_empty_like(dest);
        return wide && kn_grad_copy(wide, g) && grad_add(dest, dest, wide);
    }
    if (leaf->fresh == g && own) /* kn_grad_into gave it out */
        return true;
    if (leaf->fresh)
        return grad_add(leaf->fresh, leaf->fresh, g);
    bool mine = own && g->storage->refs == 1 && g->storage->category == KN_MEM_GRAD &&
                g->refs == 1 && kn_is_contiguous(g) && g->dtype == t->dtype;
    if (mine) {
        leaf->fresh = kn_tensor_ref(g);
        return true;
    }
    leaf->fresh =
        kn_tensor_new(t->dtype, kn_device_of(t), NULL, KN_MEM_GRAD, t->ndim, t->shape, NULL, false);
    return leaf->fresh && kn_grad_copy(leaf->fresh, g);
}

bool kn_give_on_tape(const kn_edge *to, kn_tensor *g)
{
    kn_node *n = to->node;
    kn_tensor **sum = n ? &n->dout[to->out_index] : &to->leaf->leaf->fresh;
    if (n)
        n->has_grad = true;
    if (n && n->apart && !add_part(n, to->out_index, g))
        return false;
    g = n ? g : kn_cast(g, to->leaf->dtype);
    kn_tensor *grown = *sum && g ? kn_add(*sum, g) : g;
    if (!grown)
        return false;
    kn_tensor_ref(grown);
    kn_tensor_free(*sum);
    *sum = grown;
    return true;
}

kn_tensor *kn_grad_into(kn_op_grad *g, int i, bool *fresh)
{
    kn_tensor *t = g->want[i] ? g->node->edge[i].leaf : NULL;
    const kn_spec *s = &g->in_spec[i];
    *fresh = true;
    if (t && !takes_whole(t))
        return NULL;
    for (int k = 0; t && k < i; k++) /* the same leaf twice: one of them writes to its place */
        if (g->node->edge[k].leaf == t)
            return kn_empty(s->dtype, kn_device_of(t), s->ndim, s->shape);
    if (t && t->leaf->dest) {
        *fresh = !t->leaf->filled;
        return t->leaf->dest(t->leaf->dest_arg, t);
    }
    if (t && t->leaf->fresh) {
        *fresh = false;
        return t->leaf->fresh;
    }
    if (t) /* will become leaf->fresh in give_leaf */
        return kn_tensor_new(s->dtype, kn_device_of(t), NULL, KN_MEM_GRAD, s->ndim, s->shape, NULL,
                             true);
    return kn_empty(s->dtype, s->device, s->ndim, s->shape);
}

kn_tensor *kn_grad_out(kn_op_grad *g, int i)
{
    bool fresh;
    kn_tensor *t = kn_grad_into(g, i, &fresh);
    return g->din[i] = fresh || !t ? t : kn_empty_like(t);
}

/* ---- a leaf whose gradient is complete ------------------------------------------------------- */

static kn_tensor *copy_of(const kn_tensor *t)
{
    kn_tensor *copy =
        kn_tensor_new(t->dtype, kn_device_of(t), NULL, KN_MEM_GRAD, t->ndim, t->shape, NULL, false);
    if (copy && kn_grad_copy(copy, t))
        return copy;
    kn_tensor_free(copy);
    return NULL;
}

/* The whole gradient that this pass brought, seen and perhaps replaced by hooks. A hook may keep
 * it: later gradients are added elsewhere. */
static bool run_leaf_hooks(const kn_engine *e, kn_leaf *leaf)
{
    kn_tensor *whole =
        leaf->dest && leaf->filled ? leaf->dest(leaf->dest_arg, leaf->tensor) : leaf->fresh;
    const kn_hook_entry *first = leaf->hooks;
    while (first && !first->hook)
        first = first->next;
    if (!first || !whole)
        return true;
    if (e->graph) {
        kn_tensor *on_tape = kn_run_grad_hooks(leaf->hooks, 0, whole, "", kn_name(leaf->tensor));
        leaf->fresh = on_tape ? kn_tensor_ref(on_tape) : NULL;
        kn_tensor_free(whole);
        return on_tape;
    }
    kn_tensor *seen = leaf->dest ? copy_of(whole) : kn_tensor_ref(whole), *own = NULL;
    kn_tensor *g = seen ? kn_run_grad_hooks(leaf->hooks, 0, seen, "", kn_name(leaf->tensor)) : NULL;
    bool ok = g && (g == seen || kn_grad_copy(whole, g));
    if (ok && !leaf->dest && (whole->refs > 2 || whole->storage->refs > 1)) {
        ok = (own = copy_of(whole)) != NULL;
        kn_tensor_free(ok ? whole : NULL);
        leaf->fresh = ok ? own : whole;
    }
    kn_tensor_free(seen);
    return ok;
}

bool kn_leaf_complete(kn_leaf *leaf)
{
    kn_tensor *t = leaf->tensor;
    const kn_engine *e = kn_context_get()->engine;
    const bool catches = kn_engine_catches(e);
    kn_catch *caught = catches ? kn_engine_catch(e, t, NULL, 0) : NULL;
    bool any = false;
    if (catches && !caught) /* counted, but nothing came */
        return true;
    if (leaf->rows && !caught && !kn_rows_complete(leaf, &any))
        return false;
    if (leaf->rows && !any)
        return true;
    if (!any && !run_leaf_hooks(e, leaf))
        return false;
    if (caught) {
        caught->grad = leaf->fresh;
        leaf->fresh = NULL;
        return true;
    }
    if (leaf->fresh && leaf->accum == KN_ACCUM_SETTLED)
        leaf->accum = leaf->grad ? KN_ACCUM_GROWN : KN_ACCUM_BEGUN;
    if (leaf->fresh && !leaf->grad) {
        leaf->grad = leaf->fresh;
        leaf->fresh = NULL;
    } else if (leaf->fresh) {
        bool ok = grad_add(leaf->grad, leaf->grad, leaf->fresh);
        kn_tensor_free(leaf->fresh);
        leaf->fresh = NULL;
        if (!ok)
            return false;
    } else if (!leaf->filled && !any) {
        return true; /* nothing came: a branch without gradient */
    }
    int64_t number = kn_backward_number();
    return ((leaf->dest && !any) ||
            kn_passes_add(&leaf->passes, number, number, kn_backward_scale())) &&
           kn_run_leaf_hooks(leaf);
}
