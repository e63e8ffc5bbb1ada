/* nn/recompute.c: activation checkpointing (Chen et al., arXiv:1604.06174). A recomputed call runs
 * its forward without a tape and leaves one node that keeps only the inputs. Its backward runs the
 * forward again, under the same random keys, with a tape, and a nested backward through that.
 *
 * The node lists the parameters below the module (touch), so that the outer pass knows that their
 * gradients are not complete before this node has run forward again; from then on the nested pass
 * knows when each is. Those of a unit of fsdp of which the forward neither made a call nor read a
 * parameter aren't listed, since the replay does the same: the unit's turn in backward comes alike
 * on ranks that reach this node and on those that don't. */
#include "autograd/engine.h"
#include "nn/nn_internal.h"
#include <string.h>

typedef struct replay {
    kn_module_impl *module;
    kn_method method;
    uint64_t key;
    uint32_t *version; /* of what the node touches, as the forward read it */
    bool *trains;      /* the same of whether it requires grad */
    void *arg;         /* a copy */
} replay;

static void free_replay(void *attr)
{
    if (!attr)
        return;
    kn_host_free(((replay *)attr)->version);
    kn_host_free(((replay *)attr)->trains);
    kn_host_free(((replay *)attr)->arg);
}

static bool no_shape(kn_op_call *c)
{
    return kn_fail("%s: is made by calling a module that recomputes", c->op->name);
}

/* Inputs as leaves of the replayed graph. */
static bool fresh_inputs(const kn_op_grad *g, kn_values *in)
{
    in->n = g->nin;
    for (int i = 0; i < g->nin; i++) {
        in->v[i] = g->in[i] ? kn_detach(g->in[i]) : NULL; /* not given */
        if (g->in[i] && !in->v[i])
            return false;
        if (!g->want[i])
            continue;
        if (!kn_require_grad(in->v[i], true) || !kn_leaf_of(in->v[i]))
            return false;
        in->v[i]->leaf->passing = true;
    }
    return true;
}

/* Results that are inputs themselves: their gradients skip the replayed graph. */
static bool pass_through(kn_op_grad *g, const kn_values *in, const kn_values *out)
{
    for (int k = 0; k < out->n; k++)
        for (int i = 0; i < g->nin; i++) {
            if (out->v[k] != in->v[i] || !g->want[i] || !g->dout[k])
                continue;
            g->din[i] = g->din[i] ? kn_add(g->din[i], g->dout[k]) : g->dout[k];
            if (!g->din[i])
                return false;
        }
    return true;
}

/* The replay must read what the forward read. */
static bool unwritten(const kn_node *n, const replay *r)
{
    for (int i = 0; i < n->ntouch; i++)
        if (kn_version_of(n->touch[i]) != r->version[i])
            return kn_fail(
                "backward of a call of '%s' that recomputes: its parameter '%s' was written in "
                "place after forward used it (version %u, then %u); run the forward again",
                kn_module_shown(r->module), kn_name(n->touch[i]), kn_version_of(n->touch[i]),
                r->version[i]);
    return true;
}

/* What the forward found frozen the replay does, whatever was switched since. A second call, back,
 * undoes it; a tensor may be listed twice. */
static void swap_frozen(const kn_node *n, const replay *r, bool back)
{
    for (int k = 0; k < n->ntouch; k++) {
        int i = back ? n->ntouch - 1 - k : k;
        bool now = n->touch[i]->requires_grad;
        n->touch[i]->requires_grad = r->trains[i];
        r->trains[i] = now;
    }
}

static bool replay_backward(kn_op_grad *g)
{
    const replay *r = g->attr;
    kn_context *c = kn_context_get();
    kn_frame *here = c->frame;
    kn_values in;
    if (!unwritten(g->node, r) || !fresh_inputs(g, &in))
        return false;
    c->frame = here ? here->parent : NULL;
    kn_frame *f = kn_frame_reenter(r->module, r->module->path, r->key);
    if (!f) {
        c->frame = here;
        return false;
    }
    f->replay = true;
    bool mode = kn_set_grad_mode(true);
    swap_frozen(g->node, r, false);
    kn_values out = kn_module_run(r->module, r->method, in, r->arg);
    swap_frozen(g->node, r, true);
    kn_set_grad_mode(mode);
    kn_frame_leave(f);
    c->frame = here;
    kn_node *root[KN_MAX_VALUES];
    kn_engine e = { 0 };
    int index[KN_MAX_VALUES], roots = 0;
    kn_tensor *grad[KN_MAX_VALUES];
    for (int i = 0; i < out.n && kn_ok(); i++) {
        if (!out.v[i]->node || !g->dout[i])
            continue;
        root[roots] = out.v[i]->node;
        index[roots] = out.v[i]->out_index;
        grad[roots++] = g->dout[i];
    }
    if (!kn_ok() || (roots && !kn_engine_run(&e, root, index, grad, roots, g->node)))
        return false;
    for (int i = 0; i < g->nin; i++)
        if (g->want[i])
            g->din[i] = kn_grad(in.v[i]);
    return pass_through(g, &in, &out);
}

const kn_op kn_op_recompute = { .name = "recompute",
                                .shape = no_shape,
                                .backward = replay_backward };

typedef struct touched {
    kn_node *node; /* NULL: they are counted */
    uint64_t run;  /* the forward's number */
    int trainable, count;
} touched;

/* Frozen ones too: backward waits for their units, and must find their values as they were. */
static bool touch(kn_module *m, void *arg)
{
    touched *all = arg;
    for (int i = 0; i < m->impl->params; i++) {
        kn_tensor *t = m->impl->param[i].tensor;
        all->trainable += t->requires_grad;
        if (t->leaf && t->leaf->group && t->leaf->group->used < all->run)
            continue;
        if (all->node && kn_leaf_of(t)) {
            ((replay *)all->node->attr)->version[all->node->ntouch] = kn_version_of(t);
            ((replay *)all->node->attr)->trains[all->node->ntouch] = t->requires_grad;
            all->node->touch[all->node->ntouch++] = kn_tensor_ref(t);
        }
        all->count++;
    }
    return kn_ok();
}

static kn_node *make_node(kn_module_impl *m, kn_method method, kn_frame *frame, kn_values in,
                          int nout, const void *arg, size_t size, touched below)
{
    kn_node *n = kn_node_new(&kn_op_recompute, in.n, nout);
    replay *r = n ? kn_host_calloc(1, sizeof *r) : NULL;
    if (!r)
        goto fail;
    n->attr = r;
    n->free_attr = free_replay;
    r->module = m;
    r->method = method;
    r->key = frame->key;
    r->arg = size ? kn_host_alloc(size) : NULL;
    n->touch = kn_host_calloc((size_t)below.count + 1, sizeof *n->touch);
    r->version = kn_host_calloc((size_t)below.count + 1, sizeof *r->version);
    r->trains = kn_host_calloc((size_t)below.count + 1, sizeof *r->trains);
    if (!n->touch || !r->version || !r->trains || (size && !r->arg))
        goto fail;
    if (size)
        memcpy(r->arg, arg, size);
    below.node = n;
    if (!kn_apply_modules(m->self, touch, &below))
        goto fail;
    for (int i = 0; i < in.n; i++) {
        kn_tensor *t = in.v[i];
        if ((t && !kn_save(&n->saved_in[i], t)) || !kn_node_set_input(n, i, t))
            goto fail;
    }
    return n;
fail:
    kn_node_unref(n);
    return NULL;
}

kn_values kn_recompute_call(kn_module_impl *m, kn_method method, kn_frame *frame, kn_values in,
                            const void *arg, size_t size)
{
    bool mode = kn_set_grad_mode(false);
    frame->recorded = mode;
    touched below = { .run = kn_run_begin() };
    kn_values out = kn_module_run(m, method, in, arg);
    kn_set_grad_mode(mode);
    kn_apply_modules(m->self, touch, &below);
    bool wants = below.trainable > 0;
    for (int i = 0; i < in.n; i++)
        wants = wants || (in.v[i] && in.v[i]->requires_grad);
    if (!kn_ok() || !wants)
        return out;
    kn_node *n = make_node(m, method, frame, in, out.n, arg, size, below);
    if (!n)
        return (kn_values){ 0 };
    for (int i = 0; i < out.n; i++) {
        out.v[i] = kn_detach(out.v[i]); /* it may be an input, a buffer, or another result too */
        if (out.v[i] && kn_dtype_is_float(out.v[i]->dtype))
            kn_node_set_output(n, i, out.v[i]);
    }
    kn_node_unref(n);
    return out;
}
