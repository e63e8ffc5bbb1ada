/* optim/clip.c: norms of the gradients over all ranks, clipping by them, and the search for
 * gradients that aren't finite.
 *
 * A norm takes two passes: the largest magnitude M of all ranks, then the sum of (|g| / M)^p in
 * fixed point. Integers add to the same sum in any order, so the norm is the same bits however the
 * gradients are cut over ranks. A part that several ranks hold is counted by one of them
 * (kn_param.elsewhere). */
#include "optim/optim_internal.h"
#include <math.h>

/* Lists this rank's gradients, one run a parameter. A run is empty where there is no gradient and,
 * if counted, where another rank counts the part. */
static bool grad_runs(const kn_param *p, int n, kn_run *run, bool counted)
{
    for (int i = 0; i < n; i++) {
        bool wanted = p[i].trainable && !(counted && p[i].elsewhere);
        kn_tensor *g = wanted ? kn_param_grad(&p[i]) : NULL;
        run[i] = (kn_run){ .dtype = KN_F32 };
        if (g && kn_numel(g))
            run[i] = (kn_run){ kn_array_of(g).data, kn_numel(g), g->dtype };
    }
    return kn_ok();
}

/* ---- where norms lie ------------------------------------------------------------------------- */

kn_device kn_norms_device(const kn_param *p)
{
    kn_device d = kn_device_of(p[0].master);
    return d == KN_META ? KN_CPU : d; /* meta's memory can't be read */
}

/* Kept with a module whose gradients were measured. */
typedef struct clipping {
    kn_module_extra extra;
    kn_tensor *norms; /* kn_norms where the gradients lie; owned */
    int64_t stamp;    /* the gradients are clipped while this is kn_root.grad_changes + 1 */
} clipping;

static clipping *clipping_of(const kn_module_impl *m)
{
    return (clipping *)m->clipping;
}

static void clipping_free(kn_module_extra *self)
{
    kn_tensor_free(((clipping *)self)->norms);
    kn_host_free(self);
}

kn_tensor *kn_norms_tensor(const kn_module_impl *m)
{
    return m->clipping ? clipping_of(m)->norms : NULL;
}

kn_norms *kn_norms_of(const kn_module_impl *m)
{
    kn_tensor *norms = kn_norms_tensor(m);
    return norms ? kn_array_of(norms).data : NULL;
}

static kn_tensor *norms_new(const kn_param *p)
{
    int64_t words = sizeof(kn_norms) / sizeof(int64_t);
    kn_tensor *t =
        kn_tensor_new(KN_I64, kn_norms_device(p), NULL, KN_MEM_WORKSPACE, 1, &words, NULL, false);
    if (t && kn_fill_(t, 0))
        return t;
    kn_tensor_free(t);
    return NULL;
}

/* Allocates m's norms, once. The device hands them from one pass to the next and to the step
 * without the host, and a recorded step needs them at a fixed address. */
static kn_norms *norms_begin(kn_module_impl *m, const kn_param *p)
{
    clipping *c = clipping_of(m);
    if (!c) {
        c = kn_host_calloc(1, sizeof *c);
        if (!c)
            return NULL;
        c->extra.free = clipping_free;
        m->clipping = &c->extra;
    }
    if (!c->norms || kn_device_of(c->norms) != kn_norms_device(p)) {
        kn_tensor_free(c->norms);
        c->norms = norms_new(p);
    }
    return kn_norms_of(m);
}

static kn_stream *stream_of(const kn_param *p)
{
    return kn_compute_stream(kn_device_of(p[0].master));
}

static bool find_absmax(const kn_root *root, const kn_param *p, int n, float *absmax,
                        int64_t *first)
{
    if (!kn_one_place(p, n, "the gradients' norm"))
        return false;
    kn_run *run = kn_host_calloc((size_t)n, sizeof *run);
    kn_scope scope = kn_scope_begin();
    bool ok = run && grad_runs(p, n, run, false) &&
              KN_LAUNCH(stream_of(p), KN_K_ABSMAX, ((kn_absmax_args){ run, n, absmax, first }));
    kn_scope_end(scope);
    kn_host_free(run);
    return ok && kn_reduce_over_ranks(root, NULL, absmax);
}

bool kn_find_absmax(kn_module_impl *m, const kn_param *p, int n)
{
    kn_norms *at = norms_begin(m, p);
    return at && find_absmax(kn_root_of(m), p, n, &at->absmax, &at->first);
}

/* limbs = sum over all ranks of (|g| / M)^p; order 0 means 2, by the kernel for squares. */
static bool sum_powers(const kn_root *root, const kn_param *p, int n, double order, kn_norms *at)
{
    kn_run *run = kn_host_calloc((size_t)n, sizeof *run);
    if (!run)
        return false;
    kn_scope scope = kn_scope_begin();
    bool ok = grad_runs(p, n, run, true);
    ok =
        ok && (order == 0 ? KN_LAUNCH(stream_of(p), KN_K_SQSUM,
                                      ((kn_sqsum_args){ run, n, &at->absmax, at->limbs }))
                          : KN_LAUNCH(stream_of(p), KN_K_POWSUM,
                                      ((kn_powsum_args){ run, n, &at->absmax, order, at->limbs })));
    kn_scope_end(scope);
    kn_host_free(run);
    return ok && kn_reduce_over_ranks(root, at->limbs, NULL);
}

bool kn_loss_scale_at(kn_module_impl *m, kn_device d, double *scale, const float **loss_scale)
{
    const kn_tensor *carried = kn_root_of(m)->loss_scale;
    bool there = carried && kn_device_of(carried) == d;
    *loss_scale = there ? kn_array_of(carried).data : NULL;
    *scale = carried && !there ? kn_grad_scale(m->self) : kn_grad_share(m);
    return kn_ok();
}

/* Launches both passes and doesn't wait; *norm: f32 on at's device. */
static bool find_norm(kn_module_impl *m, const kn_param *p, int n, double max_norm, double order,
                      float *norm)
{
    const kn_root *root = kn_root_of(m);
    double scale;
    const float *loss_scale;
    if (!kn_find_absmax(m, p, n))
        return false;
    kn_norms *at = kn_norms_of(m);
    if (isfinite(order) && !sum_powers(root, p, n, order, at))
        return false;
    kn_device d = kn_norms_device(p);
    if (!kn_loss_scale_at(m, d, &scale, &loss_scale))
        return false;
    kn_clip_args args = { at->limbs, &at->absmax, scale, max_norm,
                          norm,      &at->coef,   order, loss_scale };
    return KN_LAUNCH(kn_compute_stream(d), KN_K_CLIP, args);
}

/* ---- clipping -------------------------------------------------------------------------------- */

static bool clipped(const kn_module_impl *m, int64_t stamp)
{
    return m->clipping && clipping_of(m)->stamp == stamp;
}

static int64_t stamp_of(const kn_module_impl *m)
{
    return kn_root_of(m)->grad_changes + 1;
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
                   what, kn_module_shown(part), kn_module_shown(m));
}

/* The factor applies to all of m: factors of modules below it end. */
static void set_clipped(kn_module_impl *m, int64_t stamp)
{
    if (m->clipping)
        clipping_of(m)->stamp = stamp;
    for (int i = 0; i < m->children; i++)
        set_clipped(m->child[i]->impl, 0);
}

kn_tensor *kn_clip_grad_norm_p(void *module, double max_norm, double order)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_clip_grad_norm") : NULL;
    if (m && !(order > 0)) {
        kn_fail("kn_clip_grad_norm: the norm's p is %g; it must be above 0 (HUGE_VAL: the maximum)",
                order);
        return NULL;
    }
    if (m && isnan(max_norm)) {
        kn_fail("kn_clip_grad_norm: max_norm is NaN; a number up to 0 only measures");
        return NULL;
    }
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (n == 0 || !kn_rounds_agree(m, "kn_clip_grad_norm"))
        return m && kn_ok() ? kn_zeros(KN_F32, KN_CPU, KN_SCALAR) : NULL;
    kn_tensor *norm = kn_empty(KN_F32, kn_norms_device(p), KN_SCALAR);
    if (!norm || !find_norm(m, p, n, max_norm, order == 2 ? 0 : order, kn_array_of(norm).data))
        return NULL;
    set_clipped(m, stamp_of(m));
    return norm;
}

kn_tensor *kn_clip_grad_norm(void *module, double max_norm)
{
    return kn_clip_grad_norm_p(module, max_norm, 2);
}

/* ---- gradients that aren't finite ------------------------------------------------------------ */

kn_tensor *kn_first_nonfinite_grad(void *module)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_first_nonfinite_grad") : NULL;
    if (!m)
        return NULL;
    if (!kn_norms_tensor(m)) {
        kn_fail("kn_first_nonfinite_grad: the gradients were never measured; call "
                "kn_clip_grad_norm for the same module first");
        return NULL;
    }
    kn_tensor *first = kn_empty(KN_I64, kn_device_of(kn_norms_tensor(m)), KN_SCALAR);
    int64_t one = 1;
    kn_copy_args args = { .dst = kn_array_make(first ? kn_array_of(first).data : NULL, KN_I64, 1,
                                               &one),
                          .src = kn_array_make(&kn_norms_of(m)->first, KN_I64, 1, &one) };
    bool ok = first && KN_LAUNCH(kn_compute_stream(kn_device_of(first)), KN_K_COPY, args);
    return ok ? first : NULL;
}

/* *first = the lowest number of a parameter whose gradient isn't finite on some rank, -1 if all are
 * finite. The norms that clipping left at the module stay as they are. */
static bool find_first(kn_module_impl *m, const kn_param *p, int n, kn_tensor *room, int64_t *first)
{
    const kn_root *root = kn_root_of(m);
    kn_norms host, *at = kn_array_of(room).data;
    if (!find_absmax(root, p, n, &at->absmax, &at->first) || !kn_to_host(room, &host, sizeof host))
        return false;
    *first = -1;
    if (isfinite(host.absmax)) /* of all ranks */
        return true;
    float mine = host.first < 0 ? -INFINITY : -(float)host.first;
    if (!kn_transfer(stream_of(p), &at->absmax, &mine, sizeof mine, KN_TO_DEVICE, false) ||
        !kn_reduce_over_ranks(root, NULL, &at->absmax) || !kn_to_host(room, &host, sizeof host))
        return false;
    *first = isfinite(host.absmax) ? (int64_t)-host.absmax : -1;
    return true;
}

const char *kn_find_nonfinite_grad(void *module)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_find_nonfinite_grad") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    kn_tensor *room = n > 0 ? norms_new(p) : NULL;
    int64_t first = -1;
    bool ok = room && find_first(m, p, n, room, &first);
    kn_tensor_free(room);
    return ok && first >= 0 ? p[first].name : NULL;
}
