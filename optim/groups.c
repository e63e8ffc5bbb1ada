/* optim/groups.c: the learning rate's factor and the weight decay of each parameter, by patterns of
 * names. */
#include "optim/optim_internal.h"
#include <fnmatch.h>
#include <math.h>

static bool negative(double x)
{
    return x != KN_ZERO && !(x >= 0 && isfinite(x));
}

static bool matches(const kn_optim_group *g, const kn_param *p)
{
    int dims = kn_ndim(p->tensor);
    return (!g->pattern || fnmatch(g->pattern, p->name, 0) == 0) && dims >= g->min_ndim &&
           (g->max_ndim == 0 || dims <= g->max_ndim);
}

kn_optim_group kn_optim_group_of(const kn_optim_groups *o, const kn_param *p)
{
    for (int k = 0; k < o->count; k++)
        if (matches(&o->list[k], p))
            return (kn_optim_group){ .lr_mul = kn_value_or(o->list[k].lr_mul, 1),
                                     .weight_decay =
                                         kn_value_or(o->list[k].weight_decay, o->weight_decay),
                                     .muon = o->list[k].muon };
    return (kn_optim_group){ .lr_mul = 1, .weight_decay = o->weight_decay };
}

static bool group_is_good(const kn_optim_group *g, int k, const kn_param *p, int n)
{
    if (negative(g->lr_mul) || negative(g->weight_decay))
        return kn_fail("optimizer: group %d ('%s') has .lr_mul %g and .weight_decay %g; both must "
                       "be at least 0, write KN_ZERO for 0",
                       k, g->pattern ? g->pattern : "*", g->lr_mul, g->weight_decay);
    if (g->muon < KN_MUON_DEFAULT || g->muon > KN_MUON_ADAMW)
        return kn_fail("optimizer: group %d ('%s') has .muon %d; it is one of enum kn_muon_use", k,
                       g->pattern ? g->pattern : "*", (int)g->muon);
    bool any = !g->pattern;
    for (int i = 0; i < n && !any; i++)
        any = fnmatch(g->pattern, p[i].name, 0) == 0;
    return any || kn_fail("optimizer: the group pattern '%s' matches no parameter", g->pattern);
}

bool kn_optim_groups_check(const kn_optim_groups *o, const kn_param *p, int n)
{
    if (o->lr == 0 || negative(o->lr))
        return kn_fail(
            "optimizer: .lr is %g; it is required and must be above 0 (KN_ZERO for none)", o->lr);
    if (negative(o->weight_decay))
        return kn_fail("optimizer: .weight_decay is %g; it must be at least 0 (KN_ZERO for none)",
                       o->weight_decay);
    if (o->count < 0 || (o->count > 0 && !o->list))
        return kn_fail("optimizer: .group_count is %d%s", o->count,
                       o->list ? "; it must be at least 0" : ", but .groups is NULL");
    for (int k = 0; k < o->count; k++)
        if (!group_is_good(&o->list[k], k, p, n))
            return false;
    return true;
}
