/* nn/root.c: the record of a whole tree of modules, kept once, at the module on top. */
#include "nn/nn_internal.h"

kn_module_impl *kn_impl_root(kn_module_impl *m)
{
    while (m->parent)
        m = m->parent;
    return m;
}

kn_root *kn_root_of(const kn_module_impl *m)
{
    while (m->parent)
        m = m->parent;
    return m->root;
}

bool kn_root_begin(kn_module_impl *m)
{
    m->root = kn_host_calloc(1, sizeof *m->root);
    return m->root;
}

void kn_root_end(kn_module_impl *m)
{
    if (m->root)
        kn_tensor_free(m->root->loss_scale);
    kn_host_free(m->root);
    m->root = NULL;
}

/* Gradients of both carry one loss scale, and so will those of a loss that was scaled already. */
static bool one_scale(const kn_root *a, bool a_waits, const kn_root *b, bool b_waits)
{
    return a->loss_scale == b->loss_scale || (!a_waits && !a->loss_scale) ||
           (!b_waits && !b->loss_scale);
}

/* The gradients of both are sums over the same backwards. */
static bool one_sum(kn_module_impl *a, kn_module_impl *b)
{
    kn_passes both = { 0 }, of_a = { 0 }, of_b = { 0 };
    bool ok = kn_grads_passes(a->self, &of_a) && kn_grads_passes(b->self, &of_b) &&
              kn_passes_join(&both, &of_a) && kn_passes_join(&both, &of_b);
    int64_t n = kn_passes_count(&both);
    ok = ok && kn_passes_count(&of_a) == n && kn_passes_count(&of_b) == n;
    kn_passes_free(&both);
    kn_passes_free(&of_a);
    kn_passes_free(&of_b);
    return ok;
}

bool kn_root_may_merge(kn_module_impl *to, kn_module_impl *m, const char *what)
{
    kn_module_impl *top = kn_impl_root(to);
    bool waits = kn_grads_wait(m->self), there = kn_grads_wait(top->self);
    if (one_scale(m->root, waits, top->root, there) && (!waits || !there || one_sum(m, top)))
        return kn_ok();
    return kn_ok() && kn_fail("%s: '%s' (%s) and the tree that it comes to hold gradients of "
                              "different backwards or loss scales, which no step could tell apart; "
                              "step or kn_zero_grad one of them before",
                              what, kn_module_shown(m), m->class_name);
}

void kn_root_merge(kn_module_impl *m)
{
    kn_root *root = kn_root_of(m);
    kn_root *below = m->root;
    if (!root->scalar_reduce) {
        root->scalar_reduce = below->scalar_reduce;
        root->first = below->first;
    }
    if (!root->loss_scale)
        kn_set_loss_scale(root, below->loss_scale);
    kn_root_end(m);
}

void kn_set_loss_scale(kn_root *root, kn_tensor *scale)
{
    kn_tensor *before = root->loss_scale;
    root->loss_scale = scale ? kn_keep(scale) : NULL;
    kn_tensor_free(before);
}
