/* nn/root.c: the record of a whole tree of modules, kept once, at the module on top. */
#include "nn/edit.h"

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
    kn_host_free(m->root);
    m->root = NULL;
}

/* The gradients of both are sums over the same backwards. */
static bool one_sum(kn_module_impl *a, kn_module_impl *b)
{
    kn_passes both = { 0 }, of_a = { 0 }, of_b = { 0 };
    bool ok = kn_grads_passes(a->self, &of_a) && kn_grads_passes(b->self, &of_b) &&
              kn_passes_join(&both, &of_a) && kn_passes_join(&both, &of_b);
    int64_t n = kn_passes_count(&both);
    ok = ok && !both.mixed && kn_passes_count(&of_a) == n && kn_passes_count(&of_b) == n;
    kn_passes_free(&both);
    kn_passes_free(&of_a);
    kn_passes_free(&of_b);
    return ok;
}

bool kn_root_may_merge(kn_module_impl *to, kn_module_impl *m, const char *what)
{
    kn_module_impl *top = kn_impl_root(to);
    bool waits = kn_grads_wait(m->self), there = kn_grads_wait(top->self);
    if (!waits || !there || one_sum(m, top))
        return kn_ok();
    return kn_ok() && kn_fail("%s: '%s' (%s) and the tree that it comes to hold gradients of "
                              "different backwards, which no step could tell apart; step "
                              " or kn_zero_grad one of them before",
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
    root->ties = root->ties || below->ties;
    kn_root_end(m);
    kn_owners_settle(m);
}
