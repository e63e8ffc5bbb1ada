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

/* The best owner of t in m's subtree, without the subtree of leaving. */
static void find_best(kn_module_impl *m, const kn_tensor *t, const kn_module_impl *leaving,
                      holder *best)
{
    if (m == leaving)
        return;
    for (int i = 0; i < m->params; i++)
        if (m->param[i].tensor == t && is_rather(&m->param[i], best->entry))
            *best = (holder){ m, &m->param[i] };
    for (int i = 0; i < m->children; i++)
        find_best(m->child[i]->impl, t, leaving, best);
}

/* Every entry of t in m's subtree knows its initial values, and whether it is the owner. */
static void tell(kn_module_impl *m, const kn_tensor *t, const kn_param_entry *owner,
                 const kn_param_entry *like)
{
    for (int i = 0; i < m->params; i++) {
        kn_param_entry *e = &m->param[i];
        if (e->tensor != t)
            continue;
        e->owner = e == owner;
        if (like && !e->declared) {
            e->init = like->init;
            e->has_init = true;
        }
    }
    for (int i = 0; i < m->children; i++)
        tell(m->child[i]->impl, t, owner, like);
}

static const kn_param_entry *declared_in(const kn_module_impl *m, const kn_tensor *t)
{
    const kn_param_entry *found = NULL;
    for (int i = 0; i < m->params && !found; i++)
        found = m->param[i].declared && m->param[i].tensor == t ? &m->param[i] : NULL;
    for (int i = 0; i < m->children && !found; i++)
        found = declared_in(m->child[i]->impl, t);
    return found;
}

static void each_declared_owns(kn_module_impl *m)
{
    for (int i = 0; i < m->params; i++)
        m->param[i].owner = m->param[i].owner || m->param[i].declared;
    for (int i = 0; i < m->children; i++)
        each_declared_owns(m->child[i]->impl);
}

static void settle_shared(kn_module_impl *m, kn_module_impl *top)
{
    for (int i = 0; i < m->params; i++) {
        const kn_tensor *t = m->param[i].tensor;
        holder best = { 0 };
        if (m->param[i].declared)
            continue;
        find_best(top, t, NULL, &best);
        tell(top, t, best.entry, declared_in(top, t));
    }
    for (int i = 0; i < m->children; i++)
        settle_shared(m->child[i]->impl, top);
}

void kn_owners_settle(kn_module_impl *m)
{
    kn_module_impl *top = kn_impl_root(m);
    if (!top->root->ties)
        return;
    each_declared_owns(top);
    settle_shared(top, top);
    kn_params_changed(top);
}

const kn_param_entry *kn_owner_of(const kn_module_impl *m, const kn_param_entry *e,
                                  const kn_module_impl **holds)
{
    holder best = { (kn_module_impl *)m, (kn_param_entry *)e };
    if (!e->owner)
        find_best(kn_impl_root((kn_module_impl *)m), e->tensor, NULL, &best);
    *holds = best.module;
    return best.entry;
}

bool kn_stands_in(const kn_module_impl *m, const kn_param_entry *e, const kn_module_impl *root)
{
    const kn_module_impl *holds;
    kn_owner_of(m, e, &holds);
    return e->owner || !is_below(holds, root);
}

/* The next entry takes over the unit of a freed module's entry. */
static void hand_on(kn_module_impl *m, kn_module_impl *leaving, kn_module_impl *top)
{
    for (int i = 0; i < m->params; i++) {
        kn_param_entry *e = &m->param[i];
        holder next = { 0 };
        if (e->owner)
            find_best(top, e->tensor, leaving, &next);
        if (!next.entry)
            continue;
        char *name = next.entry->name;
        const bool declared = next.entry->declared;
        *next.entry = *e;
        next.entry->name = name;
        next.entry->declared = declared;
        next.entry->has_init = e->has_init || e->declared;
    }
    for (int i = 0; i < m->children; i++)
        hand_on(m->child[i]->impl, leaving, top);
}

void kn_owners_leave(kn_module_impl *m)
{
    kn_module_impl *top = kn_impl_root(m);
    if (top == m && top->root) /* nothing stays */
        top->root->ties = false;
    if (top->root && top->root->ties)
        hand_on(m, m, top);
}
