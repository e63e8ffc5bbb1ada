/* nn/means.c: what makes means of the raw sums in gradients.
 *
 * Each gradient carries the backwards that are summed in it (kn_passes). A step divides by the
 * number of backwards that brought any gradient to what its optimizer steps: a parameter that some
 * of them didn't reach has a gradient of zero there. Other optimizers' parameters have numbers of
 * their own, also where one call measures all. Nothing else is counted anywhere, so a call that
 * drops, moves or merges gradients keeps the numbers true. */
#include "autograd/rows.h"
#include "nn/means.h"
#include "nn/edit.h"

/* ---- which gradients there are --------------------------------------------------------------- */

/* Lists no parameters: a tree that is being built asks for each module that is added. */
bool kn_grads_wait(void *module)
{
    const kn_module_impl *top = kn_impl(module, "gradients"), *holds;
    bool any = false;
    for (const kn_module_impl *m = top; m && !any; m = kn_impl_next(m, top))
        for (int i = 0; i < m->params && !any; i++) {
            const kn_param_entry *e = kn_owner_of(m, &m->param[i], &holds);
            const kn_param p = { .tensor = e->tensor, .index = e->unit_index, .source = e->source };
            const kn_leaf *leaf = e->tensor->leaf;
            any = e->source ? e->source->waits(&p) : (leaf && leaf->grad) || kn_rows_any(leaf);
        }
    return any;
}

bool kn_grads_passes(void *module, kn_passes *all)
{
    const kn_param *p;
    int n = kn_params(module, &p);
    for (int i = 0; i < n; i++)
        if (!p[i].source->passes(&p[i], all))
            return false;
    return kn_ok();
}

void kn_zero_grad(void *module)
{
    const kn_param *p;
    int n = kn_params(module, &p);
    for (int i = 0; i < n; i++)
        kn_clear_grad(p[i].tensor);
}

/* ---- their divisors -------------------------------------------------------------------------- */

/* The module whose optimizer steps owner's parameters: the nearest one; NULL: none does. */
static const kn_module_impl *stepped_by(const kn_module_impl *owner)
{
    while (owner && owner->optims == 0)
        owner = owner->parent;
    return owner;
}

/* The number of backwards in p's gradient; 0 also for zeros of what none reached. */
static int64_t brought(const kn_param *p)
{
    kn_passes own = { 0 };
    int64_t count = p->source->passes(p, &own) ? kn_passes_count(&own) : 0;
    kn_passes_free(&own);
    return count;
}

/* Fails where a gradient among these lacks backwards that others have, because a step consumed it
 * in between. */
static bool is_whole(const kn_param *p, const kn_passes *all, const char *what)
{
    const kn_leaf *leaf = p->tensor->leaf;
    if (!leaf || leaf->consumed < all->run[0].first || !p->source->waits(p))
        return true;
    return kn_fail("%s: gradients of '%s' are of %lld micro-batches a rank, others of %lld, "
                   "because another optimizer stepped it in between; give every parameter to one "
                   "optimizer",
                   what, kn_module_shown(p->owner), (long long)brought(p),
                   (long long)kn_passes_count(all));
}

/* What counts together: parameters that one optimizer steps. Ranks agree on the gradients of units
 * only, so those count without the ones outside, of which each rank has its own. */
typedef struct group {
    const kn_module_impl *by; /* stepped_by */
    bool units;
} group;

static bool is_of(const group *g, const kn_param *p)
{
    return stepped_by(p->owner) == g->by && (!g->units || p->source->step_divisor);
}

/* The number of backwards in the gradients of m's parameters that are of the group. */
static bool count(const kn_module_impl *m, const group *g, const char *what, kn_passes *all)
{
    const kn_param *p;
    int n = kn_params((g->by ? g->by : m)->self, &p);
    bool ok = kn_ok();
    kn_passes_clear(all);
    for (int i = 0; ok && i < n; i++)
        ok = !is_of(g, &p[i]) || p[i].source->passes(&p[i], all);
    for (int i = 0; ok && what && all->runs > 0 && i < n; i++)
        ok = !is_of(g, &p[i]) || is_whole(&p[i], all, what);
    return ok;
}

/* All gradients so far carry means->scale; those of all carry theirs. */
static bool add_scale(kn_means *means, const kn_passes *all, bool first, const kn_param *p,
                      const char *what)
{
    const char *advice =
        "scale every loss of a step by one scaler, or kn_zero_grad what is left of "
        "others";
    what = what ? what : "the mean of gradients";
    if (all->mixed)
        return kn_fail(
            "%s: the gradients of '%s' are sums over losses of different loss scales, or "
            "of some that went through kn_scale_loss and some that didn't; %s",
            what, kn_module_shown(p->owner), advice);
    if (first)
        means->scale = all->scale ? kn_tensor_ref(all->scale) : NULL;
    return means->scale == all->scale ||
           kn_fail("%s: the gradients of '%s' carry another loss scale than those before it; %s",
                   what, kn_module_shown(p->owner), advice);
}

static double times(int64_t passes, const kn_param *p, double (*divisor)(const kn_param *))
{
    return passes == 0 ? 1 : (double)passes * (divisor ? divisor(p) : 1);
}

bool kn_means_begin(kn_means *means, kn_module_impl *m, const char *what)
{
    const kn_param *p;
    int n = kn_params(m->self, &p), base = 0;
    group last = { 0 };
    kn_passes all = { 0 };
    bool any = false;
    *means = (kn_means){ .base = 1, .by = kn_host_calloc((size_t)n + 1, sizeof *means->by) };
    bool ok = means->by != NULL;
    while (base < n && !p[base].source->step_divisor)
        base++;
    base = base < n ? base : 0;
    for (int i = 0; ok && i < n; i++) {
        group now = { stepped_by(p[i].owner), p[i].source->step_divisor != NULL };
        bool same = i > 0 && now.by == last.by && now.units == last.units;
        ok = same || count(m, &now, what, &all);
        if (ok && !same && all.runs > 0) {
            ok = add_scale(means, &all, !any, &p[i], what);
            any = true;
        }
        last = now;
        means->by[i] = times(kn_passes_count(&all), &p[i], p[i].source->divisor);
        if (i == base)
            means->base = times(kn_passes_count(&all), &p[i], p[i].source->step_divisor);
        means->base = means->base > 0 ? means->base : 1;
    }
    kn_passes_free(&all);
    return ok;
}

void kn_means_end(kn_means *means)
{
    kn_host_free(means->by);
    means->by = NULL;
    kn_tensor_free(means->scale);
    means->scale = NULL;
}

kn_tensor *kn_grad_by_mean(kn_tensor *g, const kn_means *means, int i)
{
    double factor = means ? means->base / means->by[i] : 1;
    if (factor == 1 || !g)
        return g;
    bool narrow = g->dtype == KN_F16 || g->dtype == KN_BF16;
    return kn_scale(narrow ? kn_cast(g, KN_F32) : g, factor);
}

bool kn_scale_waits(kn_module_impl *m, const kn_tensor *scale)
{
    const kn_param *p;
    int n = kn_params(kn_impl_root(m)->self, &p);
    bool found = false;
    for (int i = 0; i < n && !found; i++) {
        kn_passes own = { 0 };
        found = stepped_by(p[i].owner) && p[i].source->passes(&p[i], &own) && own.runs > 0 &&
                own.scale == scale;
        kn_passes_free(&own);
    }
    return found;
}

/* Writes to *by the one number that divides all gradients that wait in m; 0: none does. */
static bool one_divisor(kn_module_impl *m, double *by)
{
    const kn_param *p;
    int n = kn_params(m->self, &p), first = -1;
    kn_means means;
    bool ok = kn_means_begin(&means, m, NULL);
    *by = 0;
    for (int i = 0; ok && i < n; i++) {
        if (!p[i].source->waits(&p[i]) || brought(&p[i]) == 0)
            continue;
        first = first < 0 ? i : first;
        *by = means.by[first];
        if (means.by[i] != *by)
            ok = kn_fail("kn_grad_scale: the gradient of '%s' is the sum of %g terms, that of '%s' "
                         "of %g; ask for each part of '%s'",
                         p[first].name, *by, p[i].name, means.by[i], kn_module_shown(m));
    }
    *by *= ok && *by != 0 && means.scale ? kn_item(means.scale) : 1;
    kn_means_end(&means);
    return ok;
}

double kn_grad_scale(void *module)
{
    kn_module_impl *m = kn_impl(module, "kn_grad_scale");
    double by;
    if (!m || !one_divisor(m, &by) || by == 0)
        return 1;
    return 1 / by;
}
