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
    if (m->root)
        m->root->divisor = 1;
    return m->root;
}

void kn_root_end(kn_module_impl *m)
{
    if (m->root) {
        kn_tensor_free(m->root->loss_scale);
        kn_host_free(m->root->doubt);
    }
    kn_host_free(m->root);
    m->root = NULL;
}

void kn_root_merge(kn_module_impl *m)
{
    kn_root *root = kn_root_of(m);
    kn_root *below = m->root;
    if (!root->scalar_reduce) {
        root->scalar_reduce = below->scalar_reduce;
        root->scalar_reduce_arg = below->scalar_reduce_arg;
        root->not_first = below->not_first;
    }
    if (root->rounds == 0) {
        root->rounds = below->rounds;
        root->divisor = below->divisor;
        root->last_pass = below->last_pass;
        root->brought = below->brought;
        kn_host_free(root->doubt);
        root->doubt = below->doubt;
        root->doubts = below->doubts;
        root->doubt_room = below->doubt_room;
        below->doubt = NULL;
        kn_set_loss_scale(root, below->loss_scale);
    }
    root->grad_changes += below->grad_changes + 1;
    kn_root_end(m);
}

void kn_set_loss_scale(kn_root *root, kn_tensor *scale)
{
    kn_tensor *before = root->loss_scale;
    root->loss_scale = scale ? kn_keep(scale) : NULL;
    kn_tensor_free(before);
}
