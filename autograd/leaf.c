/* autograd/leaf.c: leaves (tensors that collect a gradient), grad mode, detaching, and the hooks
 * through which tensor/ and kernels/ reach up to autograd. */
#include "autograd/hooks.h"
#include "autograd/record.h"
#include "autograd/rows.h"

static void leaf_free(kn_leaf *leaf)
{
    kn_hooks_free(leaf->hooks);
    kn_tensor_free(leaf->grad);
    kn_tensor_free(leaf->fresh);
    kn_passes_free(&leaf->passes);
    kn_rows_free(leaf);
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
    if (!kn_context_get()->no_grad && t->requires_grad)
        return kn_fail(
            "%s: writing in place to a tensor that requires grad would falsify its gradient; "
            "do it with kn_set_grad_mode(false)",
            what);
    return kn_record_write(t, what);
}

static void before_read(const kn_tensor *t)
{
    kn_record_read(t);
}

static const char *running_path(const kn_context *c)
{
    return kn_function_path(c, c->frame && c->frame->path ? c->frame->path : "");
}

__attribute__((constructor)) void kn_autograd_setup(void)
{
    kn_tensor_on_free = on_tensor_free;
    kn_tensor_before_write = before_write;
    kn_tensor_before_read = before_read;
    kn_context_path = running_path;
}

static _Atomic uint64_t leaves;

kn_leaf *kn_leaf_of(kn_tensor *t)
{
    if (!t->leaf) {
        t->leaf = kn_host_calloc(1, sizeof *t->leaf);
        if (t->leaf) {
            t->leaf->tensor = t;
            t->leaf->id = ++leaves;
        }
    }
    return t->leaf;
}

/* ---- what calls on the tape may outlive ------------------------------------------------------ */

kn_group *kn_group_new(void (*complete)(void *arg), void *arg)
{
    kn_group *g = kn_host_calloc(1, sizeof *g);
    if (g)
        *g = (kn_group){ .refs = 1, .complete = complete, .arg = arg };
    return g;
}

kn_group *kn_group_ref(kn_group *g)
{
    if (g)
        g->refs++;
    return g;
}

void kn_group_unref(kn_group *g)
{
    if (g && --g->refs == 0)
        kn_host_free(g);
}

void kn_group_end(kn_group *g)
{
    if (g)
        g->complete = NULL;
    kn_group_unref(g);
}

kn_life *kn_life_new(void *of)
{
    static _Atomic uint64_t lives;
    kn_life *l = kn_host_calloc(1, sizeof *l);
    if (l)
        *l = (kn_life){ 1, ++lives, of };
    return l;
}

kn_life *kn_life_ref(kn_life *l)
{
    if (l)
        l->refs++;
    return l;
}

void kn_life_unref(kn_life *l)
{
    if (l && --l->refs == 0)
        kn_host_free(l);
}

void kn_life_end(kn_life *l)
{
    if (l)
        l->of = NULL;
    kn_life_unref(l);
}

/* ---- leaves ---------------------------------------------------------------------------------- */

kn_tensor *kn_require_grad(kn_tensor *t, bool on)
{
    if (!kn_check(t, "kn_require_grad"))
        return NULL;
    if (t->node)
        return kn_fail_null(
            "kn_require_grad: only leaves can be switched; this tensor was made by '%s' "
            "(kn_detach gives a leaf)",
            t->node->op->name);
    if (on && !kn_dtype_is_float(t->dtype))
        return kn_fail_null(
            "kn_require_grad: gradients exist for float tensors only, this one is %s",
            kn_dtype_name(t->dtype));
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
    if (t && t->leaf && t->leaf->accum == KN_ACCUM_SPOILED)
        return kn_fail_null("kn_grad: the gradient of '%s' can't be used: " KN_SPOILED_GRAD,
                            kn_name(t));
    if (kn_table_of(t))
        return kn_fail_null("kn_grad: the gradient of '%s' stays rows; read kn_grad_rows and "
                            "kn_grad_values",
                            kn_name(t));
    return t && t->leaf ? t->leaf->grad : NULL;
}

void kn_clear_grad(kn_tensor *t)
{
    kn_leaf *leaf = t ? t->leaf : NULL;
    if (!leaf)
        return;
    kn_tensor_free(leaf->grad);
    leaf->grad = NULL;
    kn_rows_drop(leaf);
    kn_passes_clear(&leaf->passes);
    leaf->accum = KN_ACCUM_SETTLED;
    if (leaf->dest && leaf->clear)
        leaf->clear(leaf->dest_arg, t);
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
