/* autograd/engine.c: the backward pass.
 *
 *   1. Reachability: from the result, every node that some requiring leaf feeds is marked. Nodes
 *      were numbered when they were made, so running them by falling number is a topological order
 *      (reach.c).
 *   2. Counting: how many contributions each leaf, each group (unit of fsdp) and each module call
 *      still has to come. Counts may be zero (reach.c).
 *   3. Running: before the first node of a module call, its pre-backward (outermost call first);
 *      then the node; then everything that became complete: leaves, module calls, groups.
 *   4. The queued callbacks, once, at the end of the outermost pass.
 *
 * The nodes of a call that recomputes have saved nothing. Before the first of them that runs, the
 * call's forward is replayed and fills in what they need (record.h). Groups of units that it uses
 * wait for it. */
#include "autograd/engine.h"
#include "autograd/check.h"
#include "autograd/hooks.h"
#include "autograd/record.h"
#include "autograd/rows.h"
#include "kernels/memory_internal.h"

static _Atomic uint64_t marks; /* each pass marks with a number of its own */
static _Atomic int64_t backwards;

uint64_t kn_backward_pass(void)
{
    const kn_engine *e = kn_engine_outermost(kn_context_get()->engine);
    return e ? e->pass : 0;
}

int64_t kn_backward_number(void)
{
    const kn_engine *e = kn_context_get()->engine;
    return e ? e->number : 0;
}

int64_t kn_newest_backward(void)
{
    return backwards;
}

bool kn_in_grad_of(void)
{
    return kn_in_backward() && kn_engine_catches(kn_context_get()->engine);
}

/* ---- 3. running ------------------------------------------------------------------------------ */

static bool group_event(kn_group *g)
{
    if (!g || !g->active || --g->pending > 0)
        return true;
    g->active = false;
    if (g->complete)
        g->complete(g->arg);
    return kn_ok();
}

static bool leaf_event(kn_tensor *t)
{
    kn_leaf *leaf = t ? t->leaf : NULL;
    if (!leaf)
        return true;
    if (--leaf->pending == 0 && !kn_leaf_complete(leaf))
        return false;
    return group_event(leaf->group);
}

/* Before the first node of f, and of the calls around it. Once a node computes, those of them that
 * recompute have to be replayed. */
static bool begin_calls(kn_engine *e, kn_frame *f, bool computes)
{
    if (!f || f->mark != e->pass || (f->fired && (f->replayed || !computes)))
        return true;
    if (!begin_calls(e, f->parent, computes))
        return false;
    void *module = kn_frame_module(f);
    if (!f->fired && f->pre_backward && module)
        f->pre_backward(module, f);
    f->fired = true;
    f->replayed = computes;
    return kn_ok() && (!computes || !f->record || !kn_record_wants_fill(f->record) ||
                       kn_record_fill(f->record));
}

bool kn_engine_release(kn_frame *f)
{
    const bool held = f->holds;
    f->holds = false;
    for (int64_t i = 0; i < f->insides && held; i++)
        if (!group_event(f->inside[i]))
            return false;
    return true;
}

/* Everything that waited for this node. */
static bool finish_node(kn_engine *e, kn_node *n)
{
    for (int k = 0; k < n->nin; k++)
        if (!leaf_event(n->edge[k].leaf))
            return false;
    e->at++;
    for (kn_frame *f = n->frame; f && f->mark == e->pass; f = f->parent) {
        void *module = --f->pending == 0 && f->fired ? kn_frame_module(f) : NULL;
        if (module && f->post_backward)
            f->post_backward(module, f);
        if (!kn_ok() || (f->pending == 0 && !kn_engine_release(f)) || !group_event(f->group))
            return false;
    }
    return true;
}

/* Whether din[i] is no other gradient of the node as well (add passes its dout on as it is). */
static bool owns(const kn_op_grad *g, int i)
{
    for (int k = 0; k < g->nout; k++)
        if (g->dout[k] == g->din[i])
            return false;
    for (int k = 0; k < g->nin; k++)
        if (k != i && g->din[k] == g->din[i])
            return false;
    return true;
}

/* The replay before the node's call has filled s in, unless a backward inside of this one used it
 * up. */
static bool unpack(const kn_node *n, const kn_saved *s, kn_tensor **out, const char *what, int i)
{
    if (!s->tensor && s->record && !kn_record_fill(s->record))
        return false;
    *out = s->tensor;
    if (!s->tensor || kn_version_of(s->tensor) == s->version)
        return true;
    return kn_fail(
        "backward of '%s': its %s %d was written in place after forward used it (version %u, "
        "saved at %u); write to a copy instead",
        n->op->name, what, i + 1, kn_version_of(s->tensor), s->version);
}

/* The gradients of n's outputs, after hooks; those that are caught. */
static bool take_dout(const kn_engine *e, kn_node *n, kn_tensor **dout)
{
    for (int i = 0; i < n->nout; i++) {
        if (!n->dout[i])
            continue;
        dout[i] = kn_run_grad_hooks(n->hooks, i, n->dout[i], "the result of ", n->op->name);
        if (!dout[i])
            return false;
        kn_catch *caught = kn_engine_catches(e) ? kn_engine_catch(e, NULL, n, i) : NULL;
        if (caught)
            caught->grad = kn_tensor_ref(dout[i]);
    }
    return true;
}

static bool give(const kn_engine *e, const kn_edge *to, kn_tensor *g, bool own)
{
    if (e->graph)
        return kn_give_on_tape(to, g);
    return to->node ? kn_give_node(to->node, to->out_index, g) : kn_give_leaf(to->leaf, g, own);
}

static bool pass_on(const kn_engine *e, kn_node *n, const kn_op_grad *g)
{
    char want[128];
    for (int i = 0; i < n->nin; i++) {
        if (!g->din[i] || !g->want[i])
            continue;
        if (!kn_has_shape(g->din[i], n->in_spec[i].ndim, n->in_spec[i].shape))
            return kn_fail("backward of '%s': the gradient of input %d is %s, the input was %s",
                           n->op->name, i + 1, KN_SHOWN(g->din[i]),
                           kn_spec_describe(&n->in_spec[i], want, sizeof want));
        if (!give(e, &n->edge[i], g->din[i], owns(g, i)))
            return false;
    }
    return kn_ok();
}

/* Output i of a node apart stands for its input i. */
static bool pass_parts(const kn_engine *e, kn_node *n, const kn_op_grad *g)
{
    bool replaced[KN_MAX_OUT] = { false };
    for (int64_t k = 0; k < n->parts && kn_ok(); k++) {
        const int i = n->part[k].out;
        if (!g->want[i] || replaced[i])
            continue;
        replaced[i] = g->din[i] != n->dout[i];
        if (g->din[i] && !give(e, &n->edge[i], replaced[i] ? g->din[i] : n->part[k].grad, false))
            return false;
    }
    return kn_ok();
}

static bool compute(const kn_engine *e, kn_node *n)
{
    kn_op_grad g = { .node = n,
                     .attr = n->attr,
                     .nin = n->nin,
                     .nout = n->nout,
                     .alone = n->hooks || e->graph || kn_checking(),
                     .in_spec = n->in_spec,
                     .out_spec = n->out_spec };
    if (n->passed && n->hooks) /* it would see the gradient of n's input */
        return kn_fail("backward of '%s': a hook was put on its result after the gradient had gone "
                       "by; put hooks on before the backward",
                       n->op->name);
    if (!take_dout(e, n, g.dout) || !n->leads)
        return kn_ok();
    for (int i = 0; i < n->nout; i++)
        if (!unpack(n, &n->saved_out[i], &g.out[i], "output", i) ||
            (e->graph && !kn_with_graph(&g.out[i], n, i, NULL)))
            return false;
    for (int i = 0; i < n->nin; i++) {
        g.want[i] = kn_engine_wants(e, n, i);
        if (!unpack(n, &n->saved_in[i], &g.in[i], "input", i) ||
            (e->graph &&
             !kn_with_graph(&g.in[i], n->edge[i].node, n->edge[i].out_index, n->edge[i].leaf)))
            return false;
    }
    for (int i = 0; i < KN_MAX_OUT; i++)
        if (!unpack(n, &n->kept[i], &g.kept[i], "saved tensor", i))
            return false;
    kn_run_node_hooks(n, g.dout, g.nout, false);
    const bool check = kn_check_pause(n);
    if (n->passed)
        g.din[0] = g.dout[0];
    const bool ok = n->passed || (e->graph ? n->op->on_tape : n->op->backward)(&g);
    kn_check_resume(check);
    if (!ok)
        return kn_fail("backward of '%s' failed", n->op->name);
    if (check && !kn_check_gradients(n, &g))
        return false;
    kn_run_node_hooks(n, g.din, g.nin, true);
    return n->apart ? pass_parts(e, n, &g) : pass_on(e, n, &g);
}

static bool run_node(kn_engine *e, kn_node *n)
{
    if (!kn_engine_settle(n) || (n->leads && !begin_calls(e, n->frame, n->has_grad)))
        return false;
    if (n->has_grad) {
        /* errors of backward name the call that made the node */
        kn_context *c = kn_context_get();
        kn_frame *before = c->frame;
        c->frame = n->frame;
        kn_scope scope = kn_scope_begin();
        bool ok = compute(e, n);
        kn_scope_end(scope);
        c->frame = before;
        if (!ok)
            return false;
    }
    for (int i = 0; i < n->nout; i++) {
        kn_tensor_free(n->dout[i]);
        n->dout[i] = NULL;
    }
    kn_node_drop_parts(n);
    kn_node_drop_places(n);
    if (!e->retain && n->leads && !n->lent)
        kn_node_free_saved(n);
    if (!n->lent)
        kn_node_free_again(n);
    return finish_node(e, n);
}

/* ---- 4. the pass ----------------------------------------------------------------------------- */

/* After an error half-made gradients must not stay: those of the failed pass go. */
static void clean_leaf(kn_leaf *leaf, bool ok)
{
    if (ok) {
        leaf->accum = leaf->accum == KN_ACCUM_SPOILED ? KN_ACCUM_SPOILED : KN_ACCUM_SETTLED;
        return;
    }
    leaf->pending = 0;
    kn_tensor_free(leaf->fresh);
    leaf->fresh = NULL;
    kn_rows_failed(leaf);
    if (leaf->accum == KN_ACCUM_BEGUN) {
        kn_tensor_free(leaf->grad);
        leaf->grad = NULL;
        kn_passes_clear(&leaf->passes);
    }
    leaf->accum = leaf->accum >= KN_ACCUM_GROWN ? KN_ACCUM_SPOILED : KN_ACCUM_SETTLED;
}

/* After an error counts and half-made gradients must not leak into a later pass. */
static void clean(kn_engine *e, bool ok)
{
    for (int64_t i = 0; i < e->nodes; i++) {
        kn_node *n = e->node[i];
        for (int k = 0; k < n->nout && !ok; k++) {
            kn_tensor_free(n->dout[k]);
            n->dout[k] = NULL;
        }
        kn_node_drop_parts(n);
        kn_node_drop_places(n);
    }
    for (int64_t i = 0; i < e->groups && !ok; i++) {
        e->group[i]->pending = 0;
        e->group[i]->active = false;
    }
    for (int64_t i = 0; i < e->leaves; i++) {
        kn_tensor *t = e->leaf[i];
        clean_leaf(t->leaf, ok);
        if (!e->outer)
            kn_leaf_sweep(t->leaf);
        kn_tensor_free(t);
    }
    for (int64_t i = 0; i < e->records; i++) {
        kn_record_empty(e->record[i]);
        kn_record_unref(e->record[i]);
    }
    kn_engine_give_back(e);
    for (int64_t i = 0; i < e->nodes; i++)
        kn_node_unref(e->node[i]);
    kn_host_free(e->node);
    kn_host_free(e->group);
    kn_host_free(e->leaf);
    kn_host_free(e->record);
}

bool kn_engine_fills(struct kn_record *r)
{
    kn_engine *e = kn_engine_outermost(kn_context_get()->engine);
    for (int64_t i = e->records - 1; i >= 0; i--)
        if (e->record[i] == r)
            return true;
    if (!kn_host_grow(&e->record, &e->record_room, e->records + 1, sizeof *e->record))
        return false;
    e->record[e->records++] = kn_record_ref(r);
    return true;
}

bool kn_engine_run(kn_engine *e, kn_node *const *root, const int *out_index, kn_tensor *const *grad,
                   int roots)
{
    kn_context *c = kn_context_get();
    bool mode = kn_set_grad_mode(e->graph), ok = kn_ok();
    e->outer = c->engine;
    e->pass = ++marks;
    if (e->outer && e->outer->number)
        e->number = e->outer->number;
    else if (!e->caught)
        e->number = ++backwards;
    c->engine = e;
    e->running = e->caught && !e->outer ? c->frame : NULL;
    ok = ok && kn_engine_reach(e, root, roots) && kn_engine_count(e);
    for (int i = 0; i < roots && ok; i++)
        ok = root[i]->mark != e->pass ||
             give(e, &(kn_edge){ .node = root[i], .out_index = out_index[i] }, grad[i], false);
    while (ok && e->at < e->nodes)
        ok = run_node(e, e->node[e->at]);
    if (!e->outer) {
        kn_engine_call_back(e);
        ok = ok && kn_ok();
    }
    clean(e, ok);
    kn_tensor_free(e->scale);
    c->engine = e->outer;
    if (!e->outer && !e->caught) { /* the next micro-batch begins, or the same one again */
        c->rng.micro += !ok ? 0 : c->world > 1 ? c->world : 1;
        c->rng.calls = 0;
        c->rng.quiet_before = ok ? c->rng.quiet : c->rng.quiet_before;
    }
    kn_set_grad_mode(mode);
    return ok;
}
