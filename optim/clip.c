/* optim/clip.c: norms of the gradients over all ranks, clipping by them and by value, and the
 * search for gradients that aren't finite.
 *
 * A norm takes two passes: the largest magnitude M of all ranks, then the sum of (|g| / M)^p in
 * fixed point. Integers add to the same sum in any order, so the norm is the same bits however the
 * gradients are cut over ranks. The sums go over the ranks of all units of the tree. A part that
 * several ranks of its unit hold is counted by one of them (kn_param.elsewhere); parameters outside
 * units, of which each rank has a gradient of its own, by the first rank. */
#include "autograd/ops.h"
#include "optim/optim_internal.h"
#include <math.h>

/* Gradients of a module, and how they are looked at. */
typedef struct grads {
    kn_module_impl *m;
    const kn_param *p;
    int n;
    const kn_means *means; /* NULL: as they are */
    double value;          /* their means are clamped to it; 0: they aren't */
} grads;

static bool counts(const grads *x, int i)
{
    kn_module_impl *top = kn_impl_root(x->m);
    bool outside = !x->p[i].source->step_divisor;
    return outside ? !top->root->first || top->root->first(top) : !x->p[i].elsewhere;
}

/* The raw sum g, clamped as its mean is. */
static kn_tensor *clamped(const grads *x, kn_tensor *g)
{
    if (!g || x->value == 0)
        return g;
    kn_tensor *scale = x->means->scale;
    kn_tensor *wide = kn_wide(g);
    double most = x->value * x->means->base;
    if (!scale)
        return kn_clamp(wide, -most, most);
    if (kn_device_of(scale) != kn_device_of(g))
        return kn_clamp(wide, -most * kn_item(scale), most * kn_item(scale));
    kn_tensor *limit = kn_cast(kn_scale(scale, most), kn_dtype_of(wide));
    return kn_minimum(kn_maximum(wide, kn_neg(limit)), limit);
}

/* Lists this rank's gradients, one run a parameter. A run is empty where there is no gradient and,
 * if counted, where another rank counts the part. */
static bool grad_runs(const grads *x, kn_run *run, bool counted)
{
    const kn_param *p = x->p;
    for (int i = 0; i < x->n; i++) {
        bool wanted = p[i].trainable && (!counted || counts(x, i));
        kn_tensor *g = wanted ? kn_grad_by_mean(kn_param_grad(&p[i]), x->means, i) : NULL;
        g = clamped(x, g);
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

static kn_clipping *clipping_of(const kn_module_impl *m)
{
    return (kn_clipping *)m->clipping;
}

static void clipping_free(kn_module_extra *self)
{
    kn_clipping *c = (kn_clipping *)self;
    kn_tensor_free(c->norms[0]);
    kn_tensor_free(c->norms[1]);
    kn_means_end(&c->means);
    kn_host_free(c);
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
static kn_norms *norms_begin(kn_module_impl *m, const kn_param *p, bool clipped)
{
    kn_clipping *c = clipping_of(m);
    if (!c) {
        c = kn_host_calloc(1, sizeof *c);
        if (!c)
            return NULL;
        c->extra.free = clipping_free;
        m->clipping = &c->extra;
    }
    kn_tensor **norms = &c->norms[clipped];
    if (!*norms || kn_device_of(*norms) != kn_norms_device(p)) {
        kn_tensor_free(*norms);
        *norms = norms_new(p);
    }
    c->clipped_last = clipped;
    return kn_norms_of(c, clipped);
}

static kn_stream *stream_of(const kn_param *p)
{
    return kn_compute_stream(kn_device_of(p[0].master));
}

static bool find_absmax(const grads *x, float *absmax, int64_t *first)
{
    if (!kn_one_place(x->p, x->n, "the gradients' norm"))
        return false;
    kn_run *run = kn_host_calloc((size_t)x->n, sizeof *run);
    kn_scope scope = kn_scope_begin();
    bool ok =
        run && grad_runs(x, run, false) &&
        KN_LAUNCH(stream_of(x->p), KN_K_ABSMAX, ((kn_absmax_args){ run, x->n, absmax, first }));
    kn_scope_end(scope);
    kn_host_free(run);
    return ok && kn_reduce_over_ranks(x->m, x->p, NULL, absmax);
}

bool kn_find_absmax(kn_module_impl *m, const kn_param *p, int n, const float **at)
{
    kn_norms *norms = norms_begin(m, p, false);
    *at = norms ? &norms->absmax : NULL;
    return norms && find_absmax(&(grads){ m, p, n, NULL, 0 }, &norms->absmax, &norms->first);
}

/* limbs = sum over all ranks of (|g| / M)^p; order 0 means 2, by the kernel for squares. */
static bool sum_powers(const grads *x, double order, kn_norms *at)
{
    kn_run *run = kn_host_calloc((size_t)x->n, sizeof *run);
    if (!run)
        return false;
    kn_stream *s = stream_of(x->p);
    kn_scope scope = kn_scope_begin();
    bool ok = grad_runs(x, run, true);
    ok = ok &&
         (order == 0
              ? KN_LAUNCH(s, KN_K_SQSUM, ((kn_sqsum_args){ run, x->n, &at->absmax, at->limbs }))
              : KN_LAUNCH(s, KN_K_POWSUM,
                          ((kn_powsum_args){ run, x->n, &at->absmax, order, at->limbs })));
    kn_scope_end(scope);
    kn_host_free(run);
    return ok && kn_reduce_over_ranks(x->m, x->p, at->limbs, NULL);
}

bool kn_loss_scale_at(const kn_means *means, kn_device d, double *scale, const float **loss_scale)
{
    const kn_tensor *carried = means->scale;
    bool there = carried && kn_device_of(carried) == d;
    *loss_scale = there ? kn_array_of(carried).data : NULL;
    *scale = 1 / (means->base * (carried && !there ? kn_item(carried) : 1));
    return kn_ok();
}

/* The next step's factor and limit, of what lies in at; *norm: f32 on at's device. */
static bool set_factor(const grads *x, double max_norm, double order, kn_norms *at, float *norm)
{
    double scale;
    const float *loss_scale;
    kn_device d = kn_norms_device(x->p);
    if (!kn_loss_scale_at(x->means, d, &scale, &loss_scale))
        return false;
    kn_clip_args args = { at->limbs, &at->absmax, scale,      max_norm, norm,
                          &at->coef, order,       loss_scale, x->value, &at->limit };
    return KN_LAUNCH(kn_compute_stream(d), KN_K_CLIP, args);
}

/* Launches both passes and doesn't wait. */
static bool find_norm(const grads *x, double max_norm, double order, kn_norms *at, float *norm)
{
    return at && find_absmax(x, &at->absmax, &at->first) &&
           (!isfinite(order) || sum_powers(x, order, at)) &&
           set_factor(x, max_norm, order, at, norm);
}

/* ---- clipping -------------------------------------------------------------------------------- */

/* The gradients that at was clipped by, or those left of them, have the divisors of then. */
static bool same_means(kn_module_impl *at)
{
    const kn_clipping *c = clipping_of(at);
    const kn_param *p;
    int n = kn_params(at->self, &p);
    kn_means now;
    bool ok = kn_means_begin(&now, at, NULL), same = n == c->params;
    for (int i = 0; ok && same && i < n; i++)
        same = now.by[i] == c->means.by[i] || !p[i].source->waits(&p[i]);
    kn_means_end(&now);
    return ok && same;
}

/* at's factor holds for gradients of backwards up to then. *yes: for all of m's that there are.
 * False with an error: for some. */
static bool holds(const kn_module_impl *at, const kn_module_impl *m, bool *yes)
{
    int64_t newest = at->clipping ? clipping_of(at)->at : 0;
    kn_passes all = { 0 };
    *yes = false;
    if (newest == 0)
        return true;
    bool ok = kn_grads_passes(m->self, &all), mixed = false;
    if (all.runs > 0 && all.run[0].first <= newest) {
        *yes = all.run[all.runs - 1].last <= newest && same_means((kn_module_impl *)at);
        mixed = !*yes;
    }
    kn_passes_free(&all);
    if (mixed && kn_ok())
        kn_fail("gradients of '%s' were clipped, and a later backward added to them, or they are "
                "divided by other numbers now; clip right before the step, or call "
                "kn_unclip_grads('%s') for a step without",
                kn_module_shown(at), kn_module_shown(at));
    return ok && !mixed;
}

bool kn_clipped(const kn_module_impl *m, const kn_clipping **by)
{
    const kn_module_impl *at = m;
    bool yes = false;
    while (at && holds(at, m, &yes) && !yes)
        at = at->parent;
    *by = yes ? clipping_of(at) : NULL;
    return kn_ok();
}

bool kn_clipped_whole(const kn_module_impl *m, const char *what)
{
    const kn_module_impl *part = kn_impl_next(m, m);
    const kn_clipping *whole;
    bool yes = false;
    if (!kn_clipped(m, &whole) || whole)
        return kn_ok();
    while (part && holds(part, part, &yes) && !yes)
        part = kn_impl_next(part, m);
    return kn_ok() &&
           (!part ||
            kn_fail("%s: only the gradients of '%s' were clipped, but '%s' has others in this "
                    "step; clip the module that the optimizer was made for",
                    what, kn_module_shown(part), kn_module_shown(m)));
}

/* Factors of top and of modules below it end. */
static void unclip(kn_module_impl *top)
{
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        if (m->clipping)
            clipping_of(m)->at = 0;
}

/* No module above m was clipped with it; else an error of what. */
static bool clipped_alone(const kn_module_impl *m, const char *what)
{
    bool above = false;
    for (const kn_module_impl *up = m->parent; up && !above; up = up->parent)
        if (!holds(up, m, &above) || above)
            return kn_ok() && kn_fail("%s: '%s' was clipped with all of '%s'; name that one", what,
                                      kn_module_shown(m), kn_module_shown(up));
    return true;
}

bool kn_unclip_grads(void *module)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_unclip_grads") : NULL;
    if (!m || !clipped_alone(m, "kn_unclip_grads"))
        return false;
    unclip(m);
    return true;
}

/* m's gradients, as they are now, are clipped by what lies in its norms; means goes over to it. */
static void clipped_now(kn_module_impl *m, int n, kn_means *means, double value)
{
    kn_clipping *c = clipping_of(m);
    unclip(m);
    kn_means before = c->means;
    c->at = kn_newest_backward();
    c->params = n;
    c->value = value;
    c->means = *means; /* without the scale: the factor has it */
    c->means.scale = NULL;
    before.scale = means->scale;
    *means = before;
}

/* The value that m's gradients are clamped to before they are measured; 0: none. */
static bool clamps(const kn_module_impl *m, double *value)
{
    bool yes = false;
    *value = 0;
    for (const kn_module_impl *at = m; at && !yes; at = at->parent) {
        const kn_clipping *c = clipping_of(at);
        if (c && c->at > 0 && c->value > 0 && !holds(at, m, &yes))
            return false;
        *value = yes ? c->value : 0;
    }
    return true;
}

/* The norm of m's gradients goes to *norm; the next step clips by it where max_norm is above 0. */
static bool clip(kn_module_impl *m, const kn_param *p, int n, double max_norm, double order,
                 float *norm)
{
    kn_means means = { 0 };
    grads x = { m, p, n, &means, 0 };
    bool clips = max_norm > 0, mode = kn_set_grad_mode(false);
    bool ok = (!clips || kn_grads_there(p, n, "kn_clip_grad_norm")) && clamps(m, &x.value) &&
              kn_means_begin(&means, m, "kn_clip_grad_norm");
    ok = ok && find_norm(&x, max_norm, order, norms_begin(m, p, clips), norm);
    if (ok && clips)
        clipped_now(m, n, &means, x.value);
    kn_means_end(&means);
    kn_set_grad_mode(mode);
    return ok;
}

/* The factor makes means, and they are clamped. */
static bool clamp_means(kn_module_impl *m, const kn_param *p, int n, double value)
{
    kn_means means = { 0 };
    kn_scope scope = kn_scope_begin();
    kn_tensor *norm = kn_empty(KN_F32, kn_norms_device(p), KN_SCALAR);
    kn_norms *at = norm ? norms_begin(m, p, true) : NULL;
    bool ok = at && kn_fill_(clipping_of(m)->norms[true], 0) &&
              kn_means_begin(&means, m, "kn_clip_grad_value") &&
              set_factor(&(grads){ m, p, n, &means, value }, 0, 0, at, kn_array_of(norm).data);
    if (ok)
        clipped_now(m, n, &means, value);
    kn_means_end(&means);
    kn_scope_end(scope);
    return ok;
}

/* The factor that clipped m stays, and elements are clamped after it. */
static bool clamp_clipped(kn_module_impl *m, double value)
{
    kn_clipping *c = clipping_of(m);
    kn_array limit = kn_array_make(&kn_norms_of(c, true)->limit, KN_F64, 0, NULL);
    bool ok = c->value > 0 ? KN_RUN(c->norms[true], KN_K_UNARY,
                                    ((kn_unary_args){ limit, limit, KN_CLAMP, -INFINITY, value }))
                           : kn_array_fill(c->norms[true], limit, value, 0);
    if (ok)
        c->value = c->value > 0 ? fmin(c->value, value) : value;
    return ok;
}

bool kn_clip_grad_value(void *module, double value)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_clip_grad_value") : NULL;
    if (m && !(value > 0))
        return kn_fail("kn_clip_grad_value: the value is %g; it must be above 0 (kn_unclip_grads: "
                       "a step without clipping)",
                       value);
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (n == 0)
        return m && kn_ok();
    bool clipped = false;
    return kn_grads_there(p, n, "kn_clip_grad_value") && kn_one_place(p, n, "kn_clip_grad_value") &&
           clipped_alone(m, "kn_clip_grad_value") && holds(m, m, &clipped) &&
           (clipped ? clamp_clipped(m, value) : clamp_means(m, p, n, value));
}

kn_tensor *kn_clip_grad_norm_p(void *module, double max_norm, double order)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_clip_grad_norm") : NULL;
    if (m && !(order > 0))
        return kn_fail_null(
            "kn_clip_grad_norm: the norm's p is %g; it must be above 0 (HUGE_VAL: the maximum)",
            order);
    if (m && isnan(max_norm))
        return kn_fail_null("kn_clip_grad_norm: max_norm is NaN; a number up to 0 only measures");
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (n == 0)
        return m && kn_ok() ? kn_zeros(KN_F32, KN_CPU, KN_SCALAR) : NULL;
    kn_tensor *norm = kn_empty(KN_F32, kn_norms_device(p), KN_SCALAR);
    bool ok = norm && clip(m, p, n, max_norm, order == 2 ? 0 : order, kn_array_of(norm).data);
    return ok ? norm : NULL;
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
    if (!m->clipping)
        return kn_fail_null("kn_first_nonfinite_grad: the gradients were never measured; call "
                            "kn_clip_grad_norm for the same module first");
    const kn_clipping *c = clipping_of(m);
    kn_tensor *first = kn_empty(KN_I64, kn_device_of(c->norms[c->clipped_last]), KN_SCALAR);
    if (!first)
        return NULL;
    const kn_array from = kn_array_make(&kn_norms_of(c, c->clipped_last)->first, KN_I64, 0, NULL);
    return kn_array_copy(first, kn_array_of(first), from) ? first : NULL;
}

/* *first = the lowest number of a parameter whose gradient isn't finite on some rank, -1 if all are
 * finite. The norms that clipping left at the module stay as they are. */
static bool find_first(kn_module_impl *m, const kn_param *p, int n, kn_tensor *room, int64_t *first)
{
    kn_norms host, *at = kn_array_of(room).data;
    if (!find_absmax(&(grads){ m, p, n, NULL, 0 }, &at->absmax, &at->first) ||
        !kn_to_host(room, &host, sizeof host))
        return false;
    *first = -1;
    if (isfinite(host.absmax)) /* of all ranks */
        return true;
    float mine = host.first < 0 ? -INFINITY : -(float)host.first;
    if (!kn_transfer(stream_of(p), &at->absmax, &mine, sizeof mine, KN_TO_DEVICE, false) ||
        !kn_reduce_over_ranks(m, p, NULL, &at->absmax) || !kn_to_host(room, &host, sizeof host))
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
