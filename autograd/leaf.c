/* autograd/leaf.c: leaves (tensors that collect a gradient), grad mode, detaching, and the hooks
 * through which tensor/ and kernels/ reach up to autograd. */
#include "autograd/autograd_internal.h"

static void leaf_free(kn_leaf *leaf)
{
    while (leaf->hooks) {
        kn_hook_entry *next = leaf->hooks->next;
        kn_host_free(leaf->hooks);
        leaf->hooks = next;
    }
    while (leaf->post) {
        struct kn_leaf_hook_entry *next = leaf->post->next;
        kn_host_free(leaf->post);
        leaf->post = next;
    }
    kn_tensor_free(leaf->grad);
    kn_tensor_free(leaf->fresh);
    kn_passes_free(&leaf->passes);
    kn_host_free(leaf);
}

static void on_tensor_free(kn_tensor *t)
{
    kn_node *n = t->node;
    t->node = NULL;
    kn_node_unref(n);
    if (t->leaf)
        leaf_free(t->leaf);
    t->leaf = NULL;
}

static bool before_write(kn_tensor *t, const char *what)
{
    if (kn_context_get()->no_grad || !t->requires_grad)
        return true;
    return kn_fail(
        "%s: writing in place to a tensor that requires grad would falsify its gradient; "
        "do it with kn_set_grad_mode(false)",
        what);
}

static const char *running_path(const kn_context *c)
{
    return kn_function_path(c, c->frame && c->frame->path ? c->frame->path : "");
}

__attribute__((constructor)) void kn_autograd_setup(void)
{
    kn_tensor_on_free = on_tensor_free;
    kn_tensor_before_write = before_write;
    kn_context_path = running_path;
}

kn_leaf *kn_leaf_of(kn_tensor *t)
{
    if (!t->leaf) {
        t->leaf = kn_host_calloc(1, sizeof *t->leaf);
        if (t->leaf)
            t->leaf->tensor = t;
    }
    return t->leaf;
}

/* One count for all threads: a run sees only that its number is more than those of earlier uses. */
static _Atomic uint64_t runs;

uint64_t kn_run_begin(void)
{
    return ++runs;
}

void kn_group_use(kn_group *g)
{
    if (g)
        g->used = runs;
}

void kn_leaf_use(const kn_tensor *t)
{
    if (t && t->leaf)
        kn_group_use(t->leaf->group);
}

kn_tensor *kn_require_grad(kn_tensor *t, bool on)
{
    if (!kn_check(t, "kn_require_grad"))
        return NULL;
    if (t->node) {
        kn_fail("kn_require_grad: only leaves can be switched; this tensor was made by '%s' "
                "(kn_detach gives a leaf)",
                t->node->op->name);
        return NULL;
    }
    if (on && !kn_dtype_is_float(t->dtype)) {
        kn_fail("kn_require_grad: gradients exist for float tensors only, this one is %s",
                kn_dtype_name(t->dtype));
        return NULL;
    }
    if (on && !kn_leaf_of(t))
        return NULL;
    t->requires_grad = on;
    t->first_order = t->first_order && !on;
    return t;
}

bool kn_requires_grad(const kn_tensor *t)
{
    return t && t->requires_grad;
}

kn_tensor *kn_grad(const kn_tensor *t)
{
    if (t && t->leaf && t->leaf->accum == KN_ACCUM_SPOILED) {
        kn_fail("kn_grad: the gradient of '%s' can't be used: " KN_SPOILED_GRAD, kn_name(t));
        return NULL;
    }
    return t && t->leaf ? t->leaf->grad : NULL;
}

void kn_clear_grad(kn_tensor *t)
{
    kn_leaf *leaf = t ? t->leaf : NULL;
    if (!leaf)
        return;
    bool had = leaf->grad != NULL;
    kn_tensor_free(leaf->grad);
    leaf->grad = NULL;
    kn_passes_clear(&leaf->passes);
    leaf->accum = KN_ACCUM_SETTLED;
    if (leaf->dest && leaf->clear)
        had |= leaf->clear(leaf->dest_arg, t);
    if (had && leaf->on_clear)
        leaf->on_clear(leaf->on_clear_arg);
}

bool kn_set_grad_mode(bool on)
{
    kn_context *c = kn_context_get();
    bool before = !c->no_grad;
    c->no_grad = !on;
    return before;
}

bool kn_grad_mode(void)
{
    return !kn_context_get()->no_grad;
}

kn_tensor *kn_detach(kn_tensor *t)
{
    if (!kn_check(t, "kn_detach"))
        return NULL;
    return kn_tensor_alias(t, 0, t->ndim, t->shape, t->stride);
}
