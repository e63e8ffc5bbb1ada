/* fsdp/unit.c: units in lists and in trees of modules, and facts about one. */
#include "fsdp/kinds.h"
#include "fsdp/unit.h"
#include "kernels/memory_internal.h"

bool kn_units_add(kn_unit_list *l, kn_unit *u)
{
    if (!kn_host_grow(&l->list, &l->room, l->count + 1, sizeof(kn_unit *)))
        return false;
    l->list[l->count++] = u;
    return true;
}

void kn_units_remove(kn_unit_list *l, const kn_unit *u)
{
    int left = 0;
    for (int i = 0; i < l->count; i++)
        if (l->list[i] != u)
            l->list[left++] = l->list[i];
    l->count = left;
}

bool kn_module_inside(const kn_module_impl *m, kn_module_impl *const *module, int modules)
{
    for (; m; m = m->parent)
        for (int i = 0; i < modules; i++)
            if (m == module[i])
                return true;
    return false;
}

kn_unit *kn_unit_around(const kn_module_impl *m)
{
    while (m && !m->unit)
        m = m->parent;
    return kn_unit_of(m);
}

/* A group is met once for each of its modules. */
static bool is_first_below(const kn_unit *u, const kn_module_impl *m, kn_module_impl *root)
{
    int i = 0;
    while (u->module[i] != m && !kn_module_inside(u->module[i], &root, 1))
        i++;
    return u->module[i] == m;
}

bool kn_apply_units(void *root, bool (*fn)(kn_unit *u, void *arg), void *arg, const char *what)
{
    kn_module_impl *top = kn_impl(root, what ? what : "fsdp");
    bool any = false, ok = top != NULL;
    for (kn_module_impl *m = kn_impl_lowest(top); ok && m; m = kn_impl_next_up(m, top)) {
        kn_unit *u = kn_unit_of(m);
        any |= u != NULL;
        ok = !u || !is_first_below(u, m, top) || fn(u, arg);
    }
    return ok && (any || !what ||
                  kn_fail("%s: there is no unit of fsdp at or below '%s' (%s); wrap it first", what,
                          kn_module_shown(top), top->class_name));
}

bool kn_unit_holds(const kn_unit *u, unsigned where)
{
    bool any = false;
    for (int i = 0; i < u->buckets; i++)
        any |= kn_bucket_holds(u->bucket[i], where);
    return any;
}

bool kn_unit_keeps(const kn_unit *u)
{
    return kn_strategies[u->options.strategy].keeps;
}

kn_unit *kn_unit_outermost(kn_unit *u)
{
    for (kn_module_impl *m = u->module[0]->parent; m; m = m->parent)
        if (m->unit)
            u = m->unit->unit;
    return u;
}

double kn_unit_divisor(const kn_unit *u)
{
    const kn_fsdp_wrap_options *o = &u->options;
    double all = o->divide_factor > 0            ? o->divide_factor
                 : o->reduce_op == KN_REDUCE_SUM ? 1
                                                 : u->size;
    return o->predivide_factor > 0 ? all / o->predivide_factor : all;
}
