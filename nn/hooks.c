/* nn/hooks.c: the user's functions around a module's calls and around their backwards.
 *
 * Where a hook looks at gradients, two nodes without computation stand around the call on the tape:
 * one for its inputs, one for its results. The one of the results comes first in backward, so all
 * gradients of the results are there when the call's first node is reached; the one of the inputs
 * is the call's last. It is a node apart (autograd_internal.h), so that looking changes no bit. */
#include "nn/hooks.h"
#include "autograd/hooks.h"
#include "autograd/record.h"
#include "nn/hooks_internal.h"
#include <string.h>

typedef struct kn_hooks_entry {
    kn_module_hooks fn;
    kn_hook id; /* 0: taken off */
} kn_hooks_entry;

typedef void (*hook_fn)(kn_module_event *e, void *arg);

static hook_fn of(const kn_module_hooks *h, kn_module_moment moment)
{
    return moment == KN_PRE_FORWARD    ? h->pre_forward
           : moment == KN_POST_FORWARD ? h->post_forward
           : moment == KN_PRE_BACKWARD ? h->pre_backward
                                       : h->post_backward;
}

static bool any(const kn_module_impl *m, kn_module_moment moment)
{
    bool found = false;
    for (int i = 0; i < m->hooks; i++)
        found = found || (m->hook[i].id && of(&m->hook[i].fn, moment));
    return found;
}

/* ---- putting on, taking off ------------------------------------------------------------------ */

kn_hook kn_module_hook(void *m, kn_module_hooks hooks)
{
    kn_module_impl *i = kn_impl(m, "kn_module_hook");
    kn_hooks_entry *list =
        i ? kn_host_realloc(i->hook, (size_t)(i->hooks + 1) * sizeof *list) : NULL;
    if (!list)
        return 0;
    i->hook = list;
    list[i->hooks] = (kn_hooks_entry){ hooks, kn_hook_next() };
    return list[i->hooks++].id;
}

static void sweep(kn_module_impl *m)
{
    int left = 0;
    for (int i = 0; i < m->hooks; i++)
        if (m->hook[i].id)
            m->hook[left++] = m->hook[i];
    m->hooks = left;
}

int kn_hooks_count(const kn_module_impl *m)
{
    const uint64_t newest = kn_record_hooks();
    int n = 0;
    for (int i = 0; i < m->hooks; i++)
        n += m->hook[i].id && m->hook[i].id <= newest;
    return n;
}

bool kn_module_unhook(void *m, kn_hook hook)
{
    kn_module_impl *i = kn_impl(m, "kn_module_unhook");
    bool found = false;
    for (int k = 0; i && hook && k < i->hooks; k++)
        if (i->hook[k].id == hook) {
            i->hook[k].id = 0;
            found = true;
        }
    if (found && i->hooks_running == 0)
        sweep(i);
    return found;
}

/* ---- what a hook may leave ------------------------------------------------------------------- */

/* An input that wasn't given may stay so. */
static bool good_inputs(const kn_module_impl *m, const kn_module_event *e, const kn_values *was)
{
    if (e->in.n < 0 || e->in.n > KN_MAX_VALUES)
        return kn_fail("'%s' (%s): the hook left %d inputs; at most %d are possible",
                       kn_module_shown(m), m->class_name, e->in.n, KN_MAX_VALUES);
    for (int i = 0; i < e->in.n; i++) {
        const bool was_null = i < was->n && !was->v[i];
        if ((e->in.v[i] || !(m->forward.fn || was_null)) &&
            !kn_check(e->in.v[i], "the hook's input"))
            return false;
    }
    return true;
}

static bool good_results(const kn_module_impl *m, const kn_module_event *e, int n)
{
    if (e->out.n != n)
        return kn_fail("'%s' (%s): the hook left %d results in the place of %d", kn_module_shown(m),
                       m->class_name, e->out.n, n);
    for (int i = 0; i < n; i++)
        if (!e->out.v[i])
            return kn_fail("'%s' (%s): the hook left NULL as result %d although no error stands",
                           kn_module_shown(m), m->class_name, i + 1);
        else if (!kn_check(e->out.v[i], "the hook's result"))
            return false;
    return true;
}

/* now may stand for was, whose versions are given. */
static bool good_gradients(const kn_values *now, const kn_values *was, const uint32_t *version,
                           const char *noun)
{
    if (now->n != was->n)
        return kn_fail("the hook left gradients of %d %ss in the place of %d", now->n, noun,
                       was->n);
    for (int i = 0; i < was->n; i++) {
        if (!now->v[i] != !was->v[i])
            return kn_fail("the hook left %s gradient of %s %d, which had %s",
                           now->v[i] ? "a" : "no", noun, i + 1,
                           now->v[i] ? "none: none came by" : "one; zeros (kn_zeros_like) drop it");
        if (was->v[i] && kn_version_of(was->v[i]) != version[i])
            return kn_fail("the hook wrote in place to the gradient of %s %d, which others may "
                           "hold; put a changed copy in its place",
                           noun, i + 1);
        if (now->v[i] && now->v[i] != was->v[i] && !kn_gradient_fits(now->v[i], was->v[i]))
            return false;
    }
    return true;
}

static void versions(const kn_values *g, uint32_t *version)
{
    for (int i = 0; i < g->n; i++)
        version[i] = g->v[i] ? kn_version_of(g->v[i]) : 0;
}

static void run_one(kn_module_impl *m, int at, kn_module_event *e)
{
    static const char *const name[] = { [KN_PRE_FORWARD] = "pre_forward",
                                        [KN_POST_FORWARD] = "post_forward",
                                        [KN_PRE_BACKWARD] = "pre_backward",
                                        [KN_POST_BACKWARD] = "post_backward" };
    const kn_module_hooks fn = m->hook[at].fn;
    const kn_module_event was = *e;
    const bool ok = kn_ok();
    uint32_t out[KN_MAX_VALUES], in[KN_MAX_VALUES];
    versions(&e->grad_out, out);
    versions(&e->grad_in, in);
    kn_hook_run run;
    if (fn.name)
        kn_hook_begin(&run, "%s hook '%s'", name[e->moment], fn.name);
    else
        kn_hook_begin(&run, "%s hook %d", name[e->moment], at + 1);
    of(&fn, e->moment)(e, fn.arg);
    if (!ok || !kn_ok())
        ; /* nothing of it is used */
    else if (e->moment == KN_PRE_FORWARD)
        good_inputs(m, e, &was.in);
    else if (e->moment == KN_POST_FORWARD)
        good_results(m, e, was.out.n);
    else if (good_gradients(&e->grad_out, &was.grad_out, out, "result"))
        good_gradients(&e->grad_in, &was.grad_in, in, "input");
    kn_hook_end(&run);
}

static void run(kn_module_impl *m, kn_module_event *e)
{
    const bool after = e->moment == KN_POST_FORWARD || e->moment == KN_POST_BACKWARD;
    const int n = m->hooks; /* those that are put on meanwhile wait for the next moment */
    const uint64_t newest = kn_record_hooks();
    e->module = m->self;
    m->hooks_running++;
    for (int i = 0; i < n && (kn_ok() || e->moment == KN_POST_FORWARD); i++) {
        const int at = after ? n - 1 - i : i;
        if (m->hook[at].id && m->hook[at].id <= newest && of(&m->hook[at].fn, e->moment))
            run_one(m, at, e);
    }
    if (--m->hooks_running == 0)
        sweep(m);
}

/* ---- forward --------------------------------------------------------------------------------- */

static void no_tensors(const kn_module_impl *m, int n)
{
    if (kn_ok() && n != 0)
        kn_fail("'%s' (%s): a hook around kn_enter and kn_leave can't pass tensors",
                kn_module_shown(m), m->class_name);
}

void kn_hooks_pre_forward(kn_module_impl *m, kn_values *in)
{
    if (m->hooks == 0 || !kn_ok())
        return;
    kn_module_event e = { .moment = KN_PRE_FORWARD,
                          .again = kn_recomputing(),
                          .in = in ? *in : (kn_values){ 0 } };
    run(m, &e);
    if (in)
        *in = e.in;
    else
        no_tensors(m, e.in.n);
}

void kn_hooks_post_forward(kn_module_impl *m, kn_values in, kn_values *out)
{
    if (m->hooks == 0)
        return;
    const bool ok = kn_ok();
    kn_module_event e = { .moment = KN_POST_FORWARD, .again = kn_recomputing() };
    if (ok && out) {
        e.in = in;
        e.out = *out;
    }
    run(m, &e);
    if (ok && out)
        *out = e.out;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* The gradients that wait at a node, if the running pass comes to it. */
static kn_values waiting_at(const kn_node *n, const kn_frame *f, int count)
{
    kn_values g = { .n = count };
    for (int i = 0; n && n->mark == f->mark && i < count; i++)
        g.v[i] = n->dout[i];
    return g;
}

/* Takes references to the gradients of the results, for the hooks after the backward. */
static void hold(kn_call_grads *grads, const kn_values *out)
{
    for (int i = 0; i < KN_MAX_VALUES; i++) {
        kn_tensor *before = grads->out[i], *now = out ? out->v[i] : NULL;
        grads->out[i] = now ? kn_tensor_ref(now) : NULL;
        kn_tensor_free(before);
    }
}

static void run_in(kn_module_impl *m, kn_frame *f, kn_module_event *e)
{
    kn_context *c = kn_context_get();
    kn_frame *before = c->frame;
    c->frame = f;
    run(m, e);
    c->frame = before;
}

void kn_hooks_pre_backward(kn_module_impl *m, kn_frame *f)
{
    if (m->hooks == 0 || !f->hooked || !kn_ok())
        return;
    kn_call_grads *grads = f->grads;
    kn_module_event e = { .moment = KN_PRE_BACKWARD };
    if (grads) {
        grads->ended = false;
        e.grad_out = waiting_at(grads->results, f, grads->nout);
    }
    const kn_values was = e.grad_out;
    kn_scope scope = kn_scope_begin();
    run_in(m, f, &e);
    for (int i = 0; i < was.n && kn_ok(); i++)
        if (e.grad_out.v[i] != was.v[i]) {
            kn_tensor_free(was.v[i]);
            grads->results->dout[i] = kn_tensor_ref(e.grad_out.v[i]);
        }
    if (grads && kn_ok() && any(m, KN_POST_BACKWARD))
        hold(grads, &e.grad_out);
    kn_scope_end(scope);
}

/* After the backward of the call f; in holds the gradients of its inputs. */
static void after_backward(kn_module_impl *m, kn_frame *f, kn_values *in)
{
    kn_call_grads *grads = f->grads;
    kn_module_event e = { .moment = KN_POST_BACKWARD, .grad_in = *in };
    if (grads) {
        e.grad_out.n = grads->nout;
        memcpy(e.grad_out.v, grads->out, sizeof e.grad_out.v);
        grads->ended = true;
    }
    run_in(m, f, &e);
    *in = e.grad_in;
    if (grads)
        hold(grads, NULL);
}

/* Where no gradient goes on to an input, no node of the inputs has run. */
void kn_hooks_post_backward(kn_module_impl *m, kn_frame *f)
{
    if (m->hooks == 0 || !f->hooked || !kn_ok() || (f->grads && f->grads->ended))
        return;
    kn_scope scope = kn_scope_begin();
    kn_values in = { .n = f->grads ? f->grads->nin : 0 };
    after_backward(m, f, &in);
    kn_scope_end(scope);
}

/* ---- the nodes around a call ----------------------------------------------------------------- */

static bool inputs_backward(kn_op_grad *g)
{
    kn_values in = { .n = g->nin };
    memcpy(in.v, g->dout, sizeof in.v);
    kn_frame *f = g->node->frame;
    kn_module_impl *m = kn_frame_module(f);
    if (m && m->hooks > 0)
        after_backward(m, f, &in);
    memcpy(g->din, in.v, sizeof in.v);
    return kn_ok();
}

static bool results_backward(kn_op_grad *g)
{
    for (int i = 0; i < g->nin; i++)
        g->din[i] = g->dout[i];
    return true;
}

static const kn_op inputs_op = { .name = "inputs of a module",
                                 .backward = inputs_backward,
                                 .on_tape = inputs_backward };
static const kn_op results_op = { .name = "results of a module",
                                  .backward = results_backward,
                                  .on_tape = results_backward };

static bool same_before(const kn_values *t, int i)
{
    for (int k = 0; k < i; k++)
        if (t->v[k] == t->v[i])
            return true;
    return false;
}

/* The node of t, which become its outputs; NULL where none requires grad, or with an error. */
static kn_node *stand_for(const kn_op *op, kn_values *t)
{
    bool wants = false;
    bool want[KN_MAX_VALUES] = { false };
    for (int i = 0; i < t->n; i++)
        wants |= want[i] = kn_record_read(t->v[i]);
    kn_node *n = wants ? kn_node_new(op, t->n, t->n) : NULL;
    if (!n)
        return NULL;
    kn_values was = *t;
    n->apart = op == &inputs_op;
    for (int i = 0; i < t->n && kn_ok(); i++) {
        if (!want[i])
            continue;
        if (same_before(&was, i)) {
            for (int k = i - 1; k >= 0; k--)
                if (was.v[k] == was.v[i])
                    t->v[i] = t->v[k];
            continue;
        }
        t->v[i] = kn_detach(was.v[i]);
        if (t->v[i] && kn_node_set_input(n, i, was.v[i]))
            kn_node_set_output(n, i, t->v[i]);
    }
    kn_node_unref(n); /* the outputs hold it now */
    return kn_ok() ? n : NULL;
}

static kn_call_grads *grads_of(kn_frame *f)
{
    if (!f->grads)
        f->grads = kn_host_calloc(1, sizeof *f->grads);
    return f->grads;
}

void kn_hooks_inputs(kn_module_impl *m, kn_frame *f, kn_values *in)
{
    if (m->hooks == 0 || !kn_grad_mode() || !any(m, KN_POST_BACKWARD))
        return;
    kn_call_grads *grads = grads_of(f);
    if (!grads)
        return;
    stand_for(&inputs_op, in);
    grads->nin = in->n;
}

void kn_hooks_results(kn_module_impl *m, kn_frame *f, kn_values *out)
{
    if (m->hooks == 0 || !kn_grad_mode() || !kn_ok() ||
        (!any(m, KN_PRE_BACKWARD) && !any(m, KN_POST_BACKWARD)))
        return;
    kn_call_grads *grads = grads_of(f);
    if (!grads)
        return;
    grads->results = stand_for(&results_op, out);
    grads->nout = out->n;
}
