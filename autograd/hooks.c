/* autograd/hooks.c: the user's functions on gradients: put on tensors, taken off, run.
 *
 * A hook that is taken off while a backward runs may be the one that runs: it only loses its number
 * then. Lists of leaves are swept when the outermost pass ends, those of nodes go with them. */
#include "autograd/hooks.h"
#include "autograd/record.h"
#include <stdarg.h>
#include <stdatomic.h>

kn_hook kn_hook_next(void)
{
    static _Atomic kn_hook last;
    return ++last;
}

void kn_hook_begin(kn_hook_run *h, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(h->text, sizeof h->text, fmt, ap);
    va_end(ap);
    kn_context *c = kn_context_get();
    h->outer = c->hook;
    c->hook = h;
}

void kn_hook_end(kn_hook_run *h)
{
    kn_context_get()->hook = h->outer;
}

/* ---- putting on ------------------------------------------------------------------------------ */

/* Puts on a copy of what, which has functions of one kind; leaf: it is for leaves. */
static kn_hook put_on(kn_tensor *t, const char *by, bool node, bool leaf, kn_hook_entry what)
{
    if (kn_recomputing()) /* the forward did it */
        return kn_hook_next();
    if (!kn_check(t, by))
        return 0;
    if (node && !t->node)
        return kn_fail("%s: no operation on the tape made this tensor", by);
    if (!what.hook && !what.pre && !what.post && !what.accumulated)
        return kn_fail("%s: the hook is NULL", by);
    if (leaf && (t->node || !t->requires_grad))
        return kn_fail("%s: only leaves that require grad accumulate one", by);
    if (!t->requires_grad)
        return kn_fail("%s: the tensor doesn't require grad, so no gradient will come by; call "
                       "kn_require_grad on a leaf before it is used",
                       by);
    kn_leaf *of = t->node ? NULL : kn_leaf_of(t);
    kn_hook_entry *h = t->node || of ? kn_host_calloc(1, sizeof *h) : NULL;
    if (!h)
        return 0;
    kn_hook_entry **at = t->node ? &t->node->hooks : &of->hooks;
    while (*at) /* hooks run in the order in which they were added */
        at = &(*at)->next;
    *h = what;
    h->id = kn_hook_next();
    h->out_index = t->out_index;
    *at = h;
    return h->id;
}

kn_hook kn_on_grad(kn_tensor *t, kn_tensor_hook hook, void *arg)
{
    return put_on(t, "kn_on_grad", false, false, (kn_hook_entry){ .hook = hook, .arg = arg });
}

kn_hook kn_on_node(kn_tensor *t, kn_node_hook pre, kn_node_hook post, void *arg)
{
    return put_on(t, "kn_on_node", true, false,
                  (kn_hook_entry){ .pre = pre, .post = post, .arg = arg });
}

kn_hook kn_on_accumulated(kn_tensor *t, kn_leaf_hook hook, void *arg)
{
    return put_on(t, "kn_on_accumulated", false, true,
                  (kn_hook_entry){ .accumulated = hook, .arg = arg });
}

/* ---- taking off ------------------------------------------------------------------------------ */

void kn_hooks_free(kn_hook_entry *list)
{
    while (list) {
        kn_hook_entry *next = list->next;
        kn_host_free(list);
        list = next;
    }
}

void kn_leaf_sweep(kn_leaf *leaf)
{
    for (kn_hook_entry **at = &leaf->hooks; *at;) {
        kn_hook_entry *h = *at;
        if (h->id) {
            at = &h->next;
            continue;
        }
        *at = h->next;
        kn_host_free(h);
    }
}

static bool take_off(kn_hook_entry *h, kn_hook id)
{
    while (h && h->id != id)
        h = h->next;
    if (h)
        h->id = 0;
    return h;
}

bool kn_off_grad(kn_tensor *t, kn_hook hook)
{
    if (!kn_check(t, "kn_off_grad") || hook == 0)
        return false;
    if (t->node)
        return take_off(t->node->hooks, hook);
    if (!t->leaf)
        return false;
    const bool found = take_off(t->leaf->hooks, hook);
    if (!kn_in_backward())
        kn_leaf_sweep(t->leaf);
    return found;
}

/* ---- running --------------------------------------------------------------------------------- */

bool kn_gradient_fits(const kn_tensor *other, const kn_tensor *g)
{
    if (!kn_check(other, "a hook on a gradient"))
        return false;
    if (other->dtype == g->dtype && kn_has_shape(other, g->ndim, g->shape) &&
        kn_device_of(other) == kn_device_of(g))
        return true;
    return kn_fail("the hook returned a gradient of another shape, dtype or device: %s on %s in "
                   "the place of %s on %s",
                   KN_SHOWN(other), kn_device_name(kn_device_of(other)), KN_SHOWN(g),
                   kn_device_name(kn_device_of(g)));
}

kn_tensor *kn_run_grad_hooks(kn_hook_entry *h, int out_index, kn_tensor *g, const char *of,
                             const char *name)
{
    for (; h && g; h = h->next) {
        if (!h->id || !h->hook || h->out_index != out_index)
            continue;
        const uint32_t version = kn_version_of(g);
        kn_hook_run run;
        kn_hook_begin(&run, "hook on the gradient of %s'%s'", of, name);
        kn_tensor *other = h->hook(g, h->arg);
        if (kn_ok() && kn_version_of(g) != version)
            kn_fail("the hook wrote to the gradient in place, which others may hold; return a "
                    "changed copy");
        bool ok = kn_ok() && (!other || kn_gradient_fits(other, g));
        kn_hook_end(&run);
        if (!ok)
            return NULL;
        g = other ? other : g;
    }
    return g;
}

bool kn_run_leaf_hooks(kn_leaf *leaf)
{
    for (kn_hook_entry *h = leaf->hooks; h; h = h->next) {
        kn_hook_run run;
        const char *name = kn_name(leaf->tensor);
        kn_hook_begin(&run,
                      *name ? "hook after the gradient of '%s'"
                            : "hook after the gradient of a tensor without a name%s",
                      name);
        if (h->id && h->accumulated)
            h->accumulated(leaf->tensor, h->arg);
        kn_hook_end(&run);
    }
    return kn_ok();
}

void kn_run_node_hooks(const kn_node *n, kn_tensor *const *grads, int count, bool after)
{
    for (kn_hook_entry *h = n->hooks; h; h = h->next) {
        kn_node_hook hook = after ? h->post : h->pre;
        kn_hook_run run;
        kn_hook_begin(&run, "hook on the node of '%s'", n->op->name);
        if (hook && h->id)
            hook(grads, count, h->arg);
        kn_hook_end(&run);
    }
}
