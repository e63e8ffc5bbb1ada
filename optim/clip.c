/* optim/clip.c: norms of the gradients over all ranks, and what they are for: clipping, and finding
 * gradients that aren't finite.
 *
 * A norm takes two passes: the largest magnitude M of all ranks, then the sum of (|g| / M)^p in fixed
 * point. Integers add to the same sum in any order, so the norm is the same bits however the gradients
 * are cut over ranks. A part that several ranks hold is counted by one of them (kn_param.elsewhere). */
#include "optim/optim_internal.h"
#include <math.h>

/* Runs of this rank's gradients; counted: only of parts that this rank counts. */
static int grad_runs(const kn_param *p, int n, kn_run *run, bool counted)
{
    int runs = 0;
    for (int i = 0; i < n; i++) {
        if (!p[i].trainable || (counted && p[i].elsewhere))
            continue;
        kn_tensor *g = kn_param_grad(&p[i]);
        if (g && kn_numel(g))
            run[runs++] = (kn_run){ kn_array_of(g).data, kn_numel(g), g->dtype };
    }
    return runs;
}

static kn_stream *stream_of(const kn_param *p)
{
    return kn_compute_stream(kn_device_of(p[0].master));
}

bool kn_grads_absmax(kn_module_impl *root, const kn_param *p, int n, float *absmax)
{
    kn_run *run = kn_calloc((size_t)n, sizeof *run);
    kn_scope scope = kn_scope_begin();
    *absmax = 0;
    bool ok = run && KN_LAUNCH(stream_of(p), KN_K_ABSMAX,
                               ((kn_absmax_args){ run, grad_runs(p, n, run, false), absmax }));
    kn_scope_end(scope);
    kn_free_host(run);
    return ok && kn_reduce_over_ranks(root, NULL, absmax);
}

/* limbs = sum over all ranks of (|g| / M)^p; order 0: 2, in the kernel made for it. */
static bool sum_powers(kn_module_impl *root, const kn_param *p, int n, double order,
                       const float *absmax, int64_t *limbs)
{
    kn_run *run = kn_calloc((size_t)n, sizeof *run);
    if (!run)
        return false;
    kn_scope scope = kn_scope_begin();
    int runs = grad_runs(p, n, run, true);
    bool ok = order == 0 ? KN_LAUNCH(stream_of(p), KN_K_SQSUM,
                                     ((kn_sqsum_args){ run, runs, absmax, limbs }))
                         : KN_LAUNCH(stream_of(p), KN_K_POWSUM,
                                     ((kn_powsum_args){ run, runs, absmax, order, limbs }));
    kn_scope_end(scope);
    kn_free_host(run);
    return ok && kn_reduce_over_ranks(root, limbs, NULL);
}

/* ---- clipping --------------------------------------------------------------------------------- */

static bool clipped(const kn_module_impl *m, int64_t stamp)
{
    return m->clip_stamp == stamp;
}

static int64_t stamp_of(const kn_module_impl *m)
{
    while (m->parent)
        m = m->parent;
    return m->grad_changes + 1;
}

const kn_module_impl *kn_clipped(const kn_module_impl *m)
{
    int64_t stamp = stamp_of(m);
    while (m && !clipped(m, stamp))
        m = m->parent;
    return m;
}

static const kn_module_impl *clipped_below(const kn_module_impl *m, int64_t stamp)
{
    const kn_module_impl *found = NULL;
    for (int i = 0; i < m->children && !found; i++) {
        const kn_module_impl *c = m->child[i]->impl;
        found = clipped(c, stamp) ? c : clipped_below(c, stamp);
    }
    return found;
}

bool kn_clipped_whole(const kn_module_impl *m, const char *what)
{
    const kn_module_impl *part = kn_clipped(m) ? NULL : clipped_below(m, stamp_of(m));
    return !part ||
           kn_fail("%s: only the gradients of '%s' were clipped, but '%s' has others in this "
                   "step; clip the module that the optimizer was made for",
                   what, part->path, *m->path ? m->path : m->class_name);
}

/* The factor goes for all of m, whatever was measured for parts of it before. */
static void set_clipped(kn_module_impl *m, int64_t stamp)
{
    m->clip_stamp = stamp;
    for (int i = 0; i < m->children; i++)
        set_clipped(m->child[i]->impl, 0);
}

float kn_clip_grad_norm_p(void *module, double max_norm, double order)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_clip_grad_norm") : NULL;
    if (m && !(order > 0)) {
        kn_fail("kn_clip_grad_norm: the norm's p is %g; it must be above 0 (HUGE_VAL: the maximum)",
                order);
        return 0;
    }
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (n == 0)
        return 0;
    kn_module_impl *root = kn_impl_root(m);
    float absmax = 0, norm = 0, coef = 1;
    int64_t limbs[KN_SQSUM_LIMBS] = { 0 };
    order = order == 2 ? 0 : order;
    if (!kn_rounds_agree(m, "kn_clip_grad_norm") || !kn_grads_absmax(root, p, n, &absmax) ||
        (isfinite(order) && !sum_powers(root, p, n, order, &absmax, limbs)))
        return 0;
    kn_clip_args args = { limbs, &absmax, kn_grad_scale(module), max_norm, &norm, &coef, order };
    if (!KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_CLIP, args))
        return 0;
    m->clip_coef = coef;
    m->grad_absmax = absmax;
    set_clipped(m, stamp_of(m));
    return norm;
}

float kn_clip_grad_norm(void *module, double max_norm)
{
    return kn_clip_grad_norm_p(module, max_norm, 2);
}

const char *kn_find_nonfinite_grad(void *module)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_find_nonfinite_grad") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    for (int i = 0; i < n; i++) {
        float absmax = 0;
        if (!kn_grads_absmax(kn_impl_root(m), &p[i], 1, &absmax))
            return NULL;
        if (!isfinite(absmax))
            return p[i].name;
    }
    return NULL;
}
