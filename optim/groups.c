/* optim/groups.c: the learning rate's factor, the weight decay and the rule of each parameter, by
 * patterns of names or by a user's function. */
#include "optim/optim_internal.h"
#include <math.h>
#include <string.h>

static bool negative(double x)
{
    return x != KN_ZERO && !(x >= 0 && isfinite(x));
}

static bool matches(const kn_optim_group *g, const kn_param *p)
{
    int dims = kn_ndim(p->tensor);
    return (!g->pattern || kn_matched(g->pattern, p->name)) && dims >= g->min_ndim &&
           (g->max_ndim == 0 || dims <= g->max_ndim);
}

const kn_module_impl *kn_param_owner(const kn_param *p, const kn_module_impl *m)
{
    const char *name = p->name; /* from the tree's root */
    size_t above = strlen(m->path);
    if (above > 0 && strncmp(name, m->path, above) == 0 && name[above] == '.')
        name += above + 1;
    return kn_module_holding(m->self, &name, "optimizer");
}

/* The number of p's group in *k, -1: none. */
static bool find_group(int *k, const kn_optim_groups *o, const kn_param *p, const kn_module_impl *m)
{
    if (!o->group_of) {
        for (*k = 0; *k < o->group_count && !matches(&o->groups[*k], p);)
            ++*k;
        *k = *k < o->group_count ? *k : -1;
        return true;
    }
    const kn_module_impl *owner = kn_param_owner(p, m);
    *k = owner ? o->group_of(p, owner->self, o->group_arg) : -1;
    if (!kn_ok())
        return false;
    return (*k >= -1 && *k < o->group_count) ||
           kn_fail("optimizer: .group_of returned %d for '%s'; give the number of one of the %d "
                   "groups, or -1 for none",
                   *k, p->name, o->group_count);
}

bool kn_optim_group_of(kn_optim_group *g, const kn_optim_groups *o, const kn_param *p,
                       const kn_module_impl *m)
{
    int k;
    *g = (kn_optim_group){ .lr_mul = 1, .weight_decay = o->weight_decay };
    if (!find_group(&k, o, p, m))
        return false;
    if (k < 0)
        return true;
    g->lr_mul = kn_value_or(o->groups[k].lr_mul, 1);
    g->weight_decay = kn_value_or(o->groups[k].weight_decay, o->weight_decay);
    g->muon = o->groups[k].muon;
    g->frozen = o->groups[k].frozen;
    return true;
}

static bool group_is_good(const kn_optim_group *g, int k, const kn_param *p, int n)
{
    if (negative(g->lr_mul) || negative(g->weight_decay))
        return kn_fail("optimizer: group %d ('%s') has .lr_mul %g and .weight_decay %g; both must "
                       "be at least 0, write KN_ZERO for 0",
                       k, g->pattern ? g->pattern : "*", g->lr_mul, g->weight_decay);
    if (g->min_ndim < 0 || g->max_ndim < 0)
        return kn_fail("optimizer: group %d ('%s') has .min_ndim %d and .max_ndim %d; both must be "
                       "at least 0",
                       k, g->pattern ? g->pattern : "*", g->min_ndim, g->max_ndim);
    if (g->muon < KN_MUON_DEFAULT || g->muon > KN_MUON_ADAMW)
        return kn_fail("optimizer: group %d ('%s') has .muon %d; it is one of enum kn_muon_use", k,
                       g->pattern ? g->pattern : "*", (int)g->muon);
    const char *list = g->pattern, *one;
    size_t length;
    while (kn_ok() && kn_next_name(&list, &one, &length)) { /* one, and what follows it or not */
        char *pattern = kn_host_strdup(one);
        bool any = false;
        if (pattern)
            pattern[length] = 0;
        for (int i = 0; pattern && i < n && !any; i++)
            any = kn_matched(pattern, p[i].name);
        if (kn_ok() && !any)
            kn_fail("optimizer: the group pattern '%s' matches no parameter", pattern);
        kn_host_free(pattern);
    }
    return kn_ok();
}

bool kn_optim_groups_check(const kn_optim_groups *o, const kn_param *p, int n)
{
    if (o->lr == 0 || negative(o->lr))
        return kn_fail(
            "optimizer: .lr is %g; it is required and must be above 0 (KN_ZERO for none)", o->lr);
    if (negative(o->weight_decay))
        return kn_fail("optimizer: .weight_decay is %g; it must be at least 0 (KN_ZERO for none)",
                       o->weight_decay);
    if (o->group_count < 0 || (o->group_count > 0 && !o->groups))
        return kn_fail("optimizer: .group_count is %d%s", o->group_count,
                       o->groups ? "; it must be at least 0" : ", but .groups is NULL");
    if (o->group_of && o->group_count == 0)
        return kn_fail("optimizer: .group_of is given without .groups to choose from");
    if (o->group_arg && !o->group_of)
        return kn_fail("optimizer: .group_arg is given without .group_of, to which it is passed");
    for (int k = 0; o->group_of && k < o->group_count; k++)
        if (o->groups[k].pattern || o->groups[k].min_ndim || o->groups[k].max_ndim)
            return kn_fail("optimizer: group %d has a pattern or dims, but .group_of chooses; give "
                           "one of both",
                           k);
    for (int k = 0; k < o->group_count; k++)
        if (!group_is_good(&o->groups[k], k, p, n))
            return false;
    return true;
}
