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

/* The scalars of a norm lie where the gradients do, so that the device goes on by itself from one pass to
 * the next; the host reads them once, when all is launched. */
typedef struct scalars {
    float absmax, norm, coef, unused;
    int64_t limbs[KN_SQSUM_LIMBS];
} scalars;

typedef struct room {
    kn_device device;
    scalars *at; /* in the device's memory; &host where the host's will do */
    scalars host;
} room;

static bool room_begin(room *r, const kn_param *p)
{
    *r = (room){ .device = kn_device_of(p[0].master), .host = { .coef = 1 } };
    r->at = &r->host;
    if (r->device == KN_CPU || r->device == KN_META)
        return true;
    r->at = kn_take(kn_device_memory(r->device), sizeof *r->at, KN_MEM_WORKSPACE);
    return r->at && kn_transfer(kn_compute_stream(r->device), r->at, &r->host, sizeof r->host,
                                KN_TO_DEVICE, false);
}

/* Waits for what was launched and fetches it: the one time in a step that clipping stops the host. */
static bool room_end(room *r, bool ok)
{
    if (r->at && r->at != &r->host) {
        kn_stream *s = kn_compute_stream(r->device);
        ok = ok && kn_transfer(s, &r->host, r->at, sizeof r->host, KN_TO_HOST, true) &&
             kn_stream_sync(s);
        kn_give(kn_device_memory(r->device), r->at, sizeof *r->at, KN_MEM_WORKSPACE);
    }
    return ok && kn_ok();
}

static kn_stream *stream_of(const kn_param *p)
{
    return kn_compute_stream(kn_device_of(p[0].master));
}

static bool find_absmax(kn_module_impl *root, const kn_param *p, int n, float *absmax)
{
    kn_run *run = kn_calloc((size_t)n, sizeof *run);
    kn_scope scope = kn_scope_begin();
    bool ok = run && KN_LAUNCH(stream_of(p), KN_K_ABSMAX,
                               ((kn_absmax_args){ run, grad_runs(p, n, run, false), absmax }));
    kn_scope_end(scope);
    kn_free_host(run);
    return ok && kn_reduce_over_ranks(root, NULL, absmax);
}

bool kn_grads_absmax(kn_module_impl *root, const kn_param *p, int n, float *absmax)
{
    room r;
    *absmax = 0;
    bool ok = room_begin(&r, p) && find_absmax(root, p, n, &r.at->absmax);
    ok = room_end(&r, ok);
    *absmax = ok ? r.host.absmax : 0;
    return ok;
}

/* limbs = sum over all ranks of (|g| / M)^p; order 0: 2, in the kernel made for it. */
static bool sum_powers(kn_module_impl *root, const kn_param *p, int n, double order, scalars *at)
{
    kn_run *run = kn_calloc((size_t)n, sizeof *run);
    if (!run)
        return false;
    kn_scope scope = kn_scope_begin();
    int runs = grad_runs(p, n, run, true);
    bool ok = order == 0
                  ? KN_LAUNCH(stream_of(p), KN_K_SQSUM,
                              ((kn_sqsum_args){ run, runs, &at->absmax, at->limbs }))
                  : KN_LAUNCH(stream_of(p), KN_K_POWSUM,
                              ((kn_powsum_args){ run, runs, &at->absmax, order, at->limbs }));
    kn_scope_end(scope);
    kn_free_host(run);
    return ok && kn_reduce_over_ranks(root, at->limbs, NULL);
}

static bool find_norm(kn_module_impl *m, const kn_param *p, int n, double max_norm, double order,
                      room *r)
{
    kn_module_impl *root = kn_impl_root(m);
    scalars *at = r->at;
    if (!find_absmax(root, p, n, &at->absmax) ||
        (isfinite(order) && !sum_powers(root, p, n, order, at)))
        return false;
    kn_clip_args args = { at->limbs, &at->absmax, kn_grad_scale(m->self), max_norm, &at->norm,
                          &at->coef, order };
    return KN_LAUNCH(kn_compute_stream(at == &r->host ? KN_CPU : r->device), KN_K_CLIP, args);
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
    room r;
    if (!kn_rounds_agree(m, "kn_clip_grad_norm"))
        return 0;
    bool ok = room_begin(&r, p) && find_norm(m, p, n, max_norm, order == 2 ? 0 : order, &r);
    if (!room_end(&r, ok))
        return 0;
    m->clip_coef = r.host.coef;
    m->grad_absmax = r.host.absmax;
    set_clipped(m, stamp_of(m));
    return r.host.norm;
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
