/* nn/ties.c: parameters that several modules hold (tied weights). In each tree one entry is the
 * parameter's owner: its names, its initial values and what fsdp keeps for it are found there. That
 * is the entry that declared it, or, where that one is in no place of the tree, the first that
 * holds it. A change of the tree chooses anew. */
#include "nn/edit.h"

/* One entry of a tree. */
typedef struct holder {
    kn_module_impl *module;
    kn_param_entry *entry;
} holder;

static bool is_below(const kn_module_impl *m, const kn_module_impl *top)
{
    while (m && m != top)
        m = m->parent;
    return m != NULL;
}

/* That of two entries for one parameter which is rather its owner: one of a unit, one that declared
 * it, the first. */
static bool is_rather(const kn_param_entry *e, const kn_param_entry *than)
{
    if (!than || (e->source != NULL) != (than->source != NULL))
        return !than || e->source;
    return e->declared && !than->declared;
}

/* The next entry of t in the tree, behind that one; the first for { top }. NULL: there is none. */
static bool next_holder(holder *at, kn_module_impl *top, const kn_tensor *t)
{
    int i = at->entry ? (int)(at->entry - at->module->param) + 1 : 0;
    for (; at->module; at->module = kn_impl_next(at->module, top), i = 0)
        for (; i < at->module->params; i++)
            if (at->module->param[i].tensor == t) {
                at->entry = &at->module->param[i];
                return true;
            }
    return false;
}

/* The best owner of t in the tree, without the subtree of leaving. */
static holder best_of(kn_module_impl *top, const kn_tensor *t, const kn_module_impl *leaving)
{
    holder best = { 0 };
    for (holder h = { top, NULL }; next_holder(&h, top, t);)
        if (is_rather(h.entry, best.entry) && !(leaving && is_below(h.module, leaving)))
            best = h;
    return best;
}

/* Every entry of t in the tree knows its initial values, and whether it is the owner. */
static void settle(kn_module_impl *top, const kn_tensor *t)
{
    const kn_param_entry *owner = best_of(top, t, NULL).entry, *like = NULL;
    for (holder h = { top, NULL }; !like && next_holder(&h, top, t);)
        like = h.entry->declared ? h.entry : NULL;
    for (holder h = { top, NULL }; next_holder(&h, top, t);) {
        h.entry->owner = h.entry == owner;
        if (like && !h.entry->declared) {
            h.entry->init = like->init;
            h.entry->has_init = true;
        }
    }
}

void kn_owners_settle(kn_module_impl *m)
{
    kn_module_impl *top = kn_impl_root(m);
    if (!top->root->ties)
        return;
    for (m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->params; i++)
            m->param[i].owner |= m->param[i].declared;
    for (m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->params; i++)
            if (!m->param[i].declared)
                settle(top, m->param[i].tensor);
    kn_params_changed(top);
}

const kn_param_entry *kn_owner_of(const kn_module_impl *m, const kn_param_entry *e,
                                  const kn_module_impl **holds)
{
    holder best = { (kn_module_impl *)m, (kn_param_entry *)e };
    if (!e->owner)
        best = best_of(kn_impl_root((kn_module_impl *)m), e->tensor, NULL);
    *holds = best.module;
    return best.entry;
}

bool kn_stands_in(const kn_module_impl *m, const kn_param_entry *e, const kn_module_impl *root)
{
    const kn_module_impl *holds;
    kn_owner_of(m, e, &holds);
    return e->owner || !is_below(holds, root);
}

/* The next entry, outside of leaving, takes over what e knows, of its unit too. */
static void hand_on(const kn_param_entry *e, kn_module_impl *leaving, kn_module_impl *top)
{
    kn_param_entry *next = best_of(top, e->tensor, leaving).entry;
    if (!next)
        return;
    char *name = next->name;
    const bool declared = next->declared;
    *next = *e;
    next->name = name;
    next->declared = declared;
    next->has_init = e->has_init || e->declared;
}

void kn_owners_leave(kn_module_impl *m)
{
    kn_module_impl *top = kn_impl_root(m);
    if (top == m && top->root) /* nothing stays */
        top->root->ties = false;
    if (!top->root || !top->root->ties)
        return;
    for (kn_module_impl *at = m; at; at = kn_impl_next(at, m))
        for (int i = 0; i < at->params; i++)
            if (at->param[i].owner)
                hand_on(&at->param[i], m, top);
}
