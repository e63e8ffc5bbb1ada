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

bool kn_root_may_merge(kn_module_impl *to, kn_module_impl *m, const char *what)
{
    kn_module_impl *top = kn_impl_root(to);
    kn_passes both = { 0 }, one = { 0 };
    if (!kn_grads_wait(m->self) || !kn_grads_wait(top->self))
        return true;
    bool ok = kn_grads_passes(m->self, &one) && kn_grads_passes(m->self, &both) &&
              kn_grads_passes(top->self, &both);
    bool same = both.runs == one.runs && kn_passes_count(&both) == kn_passes_count(&one);
    kn_passes_clear(&one);
    ok = ok && kn_grads_passes(top->self, &one);
    same = same && kn_passes_count(&both) == kn_passes_count(&one) &&
           top->root->loss_scale == m->root->loss_scale;
    kn_passes_free(&both);
    kn_passes_free(&one);
    return ok && (same || kn_fail("%s: '%s' (%s) and the tree that it comes to hold gradients of "
                                  "different backwards, which no step could tell apart; step or "
                                  "kn_zero_grad one of them before",
                                  what, kn_module_shown(m), m->class_name));
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
