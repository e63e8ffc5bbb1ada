/* optim/optim.c: AdamW and SGD over all parameters in one fused launch, and clipping. */
#include "nn/nn_internal.h"
#include "optim/optim.h"
#include "optim/reduce.h"
#include <fnmatch.h>
#include <math.h>
#include <string.h>

typedef enum method { ADAMW, SGD } method;

/* What the optimizer keeps for one parameter. */
typedef struct slot {
    kn_tensor *m, *v; /* this rank's part; made at the first step that sees a gradient */
    double lr_mul, weight_decay;
} slot;

struct kn_optim {
    method method;
    kn_module_impl *module;
    kn_adamw_options adamw;
    kn_sgd_options sgd;
    slot *slot;
    int slots;
    kn_opt_piece *piece; /* scratch for a launch */
    kn_tensor *scalars;  /* f32[3] in device memory: lr, grad_scale, step */
    double lr;
    int64_t steps;
};

/* Settings that change nothing in a group are written 0; KN_ZERO is a real zero. */
static double chosen(double given, double otherwise)
{
    return given == KN_ZERO ? 0 : given != 0 ? given : otherwise;
}

static void assign_groups(kn_optim *o, const kn_param *p, int n, double decay,
                          const kn_optim_group *g, int groups)
{
    for (int i = 0; i < n; i++) {
        o->slot[i].lr_mul = 1;
        o->slot[i].weight_decay = decay;
        for (int k = 0; k < groups; k++) {
            int dims = kn_ndim(p[i].tensor);
            if ((g[k].pattern && fnmatch(g[k].pattern, p[i].name, 0) != 0) ||
                dims < g[k].min_ndim || (g[k].max_ndim && dims > g[k].max_ndim))
                continue;
            o->slot[i].lr_mul = chosen(g[k].lr_mul, 1);
            o->slot[i].weight_decay = chosen(g[k].weight_decay, decay);
            break;
        }
    }
}

static bool groups_match(const kn_param *p, int n, const kn_optim_group *g, int groups)
{
    for (int k = 0; k < groups; k++) {
        bool any = !g[k].pattern;
        for (int i = 0; i < n && !any; i++)
            any = fnmatch(g[k].pattern, p[i].name, 0) == 0;
        if (!any)
            return kn_fail("optimizer: the group pattern '%s' matches no parameter", g[k].pattern);
    }
    return true;
}

static kn_optim *make(void *module, method how, double lr, double decay, const kn_optim_group *g,
                      int groups)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "optimizer") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (!m)
        return NULL;
    if (n == 0) {
        kn_fail("optimizer: the module has no parameters");
        return NULL;
    }
    if (!(lr >= 0) || !isfinite(lr)) {
        kn_fail("optimizer: .lr is %g; it is required and must be at least 0", lr);
        return NULL;
    }
    kn_optim *o = groups_match(p, n, g, groups) ? kn_calloc(1, sizeof *o) : NULL;
    if (!o)
        return NULL;
    o->method = how;
    o->module = m;
    o->lr = lr;
    o->slots = n;
    o->slot = kn_calloc((size_t)n, sizeof *o->slot);
    o->piece = kn_calloc((size_t)n, sizeof *o->piece);
    int64_t three = 3;
    o->scalars = kn_tensor_new(KN_F32, kn_device_of(p[0].master), NULL, KN_MEM_OPTIM, 1, &three,
                               NULL, false);
    if (!o->slot || !o->piece || !o->scalars) {
        kn_optim_free(o);
        return NULL;
    }
    assign_groups(o, p, n, decay, g, groups);
    return o;
}

kn_optim *kn_adamw_(void *module, kn_adamw_options a)
{
    a.beta1 = chosen(a.beta1, 0.9);
    a.beta2 = chosen(a.beta2, 0.999);
    a.eps = chosen(a.eps, 1e-8);
    if (!(a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1)) {
        kn_fail("adamw: betas are %g and %g; both must lie in [0, 1)", a.beta1, a.beta2);
        return NULL;
    }
    kn_optim *o = make(module, ADAMW, a.lr, chosen(a.weight_decay, 0.01), a.groups, a.group_count);
    if (o)
        o->adamw = a;
    return o;
}

kn_optim *kn_sgd_(void *module, kn_sgd_options s)
{
    if (s.nesterov && (s.momentum <= 0 || s.dampening != 0)) {
        kn_fail("sgd: .nesterov needs .momentum above 0 and no .dampening");
        return NULL;
    }
    kn_optim *o = make(module, SGD, s.lr, chosen(s.weight_decay, 0), s.groups, s.group_count);
    if (o)
        o->sgd = s;
    return o;
}

void kn_optim_free(kn_optim *o)
{
    if (!o)
        return;
    for (int i = 0; o->slot && i < o->slots; i++) {
        kn_free(o->slot[i].m);
        kn_free(o->slot[i].v);
    }
    kn_free(o->scalars);
    kn_free_host(o->slot);
    kn_free_host(o->piece);
    kn_free_host(o);
}

/* ---- the step --------------------------------------------------------------------------------------- */

static bool make_state(kn_optim *o, const kn_param *p, int i)
{
    slot *s = &o->slot[i];
    bool wants_m = o->method == ADAMW || o->sgd.momentum > 0, wants_v = o->method == ADAMW;
    kn_tensor **which[2] = { wants_m ? &s->m : NULL, wants_v ? &s->v : NULL };
    for (int k = 0; k < 2; k++) {
        if (!which[k] || *which[k])
            continue;
        *which[k] = kn_tensor_new(p->master->dtype, kn_device_of(p->master), NULL, KN_MEM_OPTIM, 1,
                                  p->master->shape, NULL, false);
        if (!*which[k] || !kn_fill_(*which[k], 0))
            return false;
    }
    return true;
}

/* Lists the parameters that have a gradient. */
static int collect(kn_optim *o, const kn_param *p, int n)
{
    int pieces = 0;
    for (int i = 0; i < n; i++) {
        kn_tensor *g = p[i].trainable ? kn_param_grad(&p[i]) : NULL;
        if (!kn_ok())
            return -1;
        if (!g)
            continue;
        if (!make_state(o, &p[i], i))
            return -1;
        kn_opt_piece *q = &o->piece[pieces++];
        *q = (kn_opt_piece){ .param = kn_array_of(p[i].master).data,
                             .grad = kn_array_of(g).data,
                             .count = kn_numel(p[i].master),
                             .lr_mul = (float)o->slot[i].lr_mul,
                             .weight_decay = (float)o->slot[i].weight_decay,
                             .param_dtype = p[i].master->dtype,
                             .grad_dtype = g->dtype };
        q->m = o->slot[i].m ? kn_array_of(o->slot[i].m).data : NULL;
        q->v = o->slot[i].v ? kn_array_of(o->slot[i].v).data : NULL;
        p[i].master->storage->version++;
    }
    return pieces;
}

static bool launch(kn_optim *o, int pieces)
{
    kn_stream *s = kn_compute_stream(kn_device_of(o->scalars));
    float *x = kn_array_of(o->scalars).data;
    kn_module_impl *root = kn_impl_root(o->module);
    double scale = root->clip_coef_set ? root->clip_coef : kn_grad_scale(o->module->self);
    float values[3] = { (float)o->lr, (float)scale, (float)(o->steps + 1) };
    memcpy(x, values, sizeof values);
    if (o->method == ADAMW)
        return KN_LAUNCH(s, KN_K_ADAMW,
                         ((kn_adamw_args){ o->piece, pieces, x, x + 1, x + 2, o->adamw.beta1,
                                           o->adamw.beta2, o->adamw.eps }));
    return KN_LAUNCH(s, KN_K_SGD,
                     ((kn_sgd_args){ o->piece, pieces, x, x + 1, x + 2, o->sgd.momentum,
                                     o->sgd.dampening, o->sgd.nesterov }));
}

bool kn_step(kn_optim *o)
{
    if (!kn_ok() || !o)
        return kn_ok() && kn_fail("kn_step: the optimizer is NULL");
    const kn_param *p;
    int n = kn_params(o->module->self, &p);
    if (n != o->slots)
        return kn_fail("kn_step: the module had %d parameters when the optimizer was made, it has "
                       "%d now; make the "
                       "optimizer after wrapping",
                       o->slots, n);
    kn_scope scope = kn_scope_begin();
    int pieces = collect(o, p, n);
    bool ok = pieces > 0 && launch(o, pieces);
    kn_scope_end(scope);
    if (pieces == 0)
        return kn_fail("kn_step: no parameter has a gradient; call kn_backward first");
    if (!ok)
        return false;
    for (int i = 0; i < n; i++)
        p[i].source->clear(&p[i]);
    kn_rounds_reset(o->module->self);
    kn_impl_root(o->module)->clip_coef_set = false;
    o->steps++;
    kn_set_step(kn_get_step() + 1);
    return true;
}

void kn_set_lr(kn_optim *o, double lr)
{
    if (o)
        o->lr = lr;
}

double kn_lr(const kn_optim *o)
{
    return o ? o->lr : 0;
}

int64_t kn_optim_steps(const kn_optim *o)
{
    return o ? o->steps : 0;
}

void kn_optim_set_steps(kn_optim *o, int64_t steps)
{
    if (o)
        o->steps = steps;
}

/* Made where missing, so that a checkpoint can be read into it. */
kn_tensor *kn_optim_state(const kn_optim *o, int i, const char *what)
{
    const kn_param *p;
    int n = o ? kn_params(o->module->self, &p) : 0;
    if (i < 0 || i >= n || n != o->slots)
        return NULL;
    bool adam = o->method == ADAMW;
    bool known =
        adam ? !strcmp(what, "exp_avg") || !strcmp(what, "exp_avg_sq") : !strcmp(what, "momentum");
    if (!known || !p[i].trainable || !make_state((kn_optim *)o, &p[i], i))
        return NULL;
    return adam && !strcmp(what, "exp_avg_sq") ? o->slot[i].v : o->slot[i].m;
}

/* ---- clipping ------------------------------------------------------------------------------------------ */

static int grad_runs(const kn_param *p, int n, kn_run *run, bool replicated)
{
    int runs = 0;
    for (int i = 0; i < n; i++) {
        kn_tensor *g =
            p[i].trainable && p[i].replicated == replicated ? kn_param_grad(&p[i]) : NULL;
        if (g && kn_numel(g))
            run[runs++] = (kn_run){ kn_array_of(g).data, kn_numel(g), g->dtype };
    }
    return runs;
}

/* The norm's two passes: the largest magnitude, then squares in fixed point relative to it. Sharded
 * gradients are added over the ranks as integers, replicated ones counted once. */
static bool measure(kn_module_impl *root, const kn_param *p, int n, float *absmax, int64_t *limbs)
{
    kn_stream *s = kn_compute_stream(KN_CPU);
    kn_run *run = kn_calloc(2 * (size_t)n + 1, sizeof *run);
    if (!run)
        return false;
    int sharded = grad_runs(p, n, run, false), copies = grad_runs(p, n, run + n, true);
    int64_t part[KN_SQSUM_LIMBS] = { 0 };
    float one = 0, other = 0;
    bool ok = KN_LAUNCH(s, KN_K_ABSMAX, ((kn_absmax_args){ run, sharded, &one })) &&
              KN_LAUNCH(s, KN_K_ABSMAX, ((kn_absmax_args){ run + n, copies, &other }));
    *absmax = isnan(one) || isnan(other) ? NAN : fmaxf(one, other);
    ok = ok && kn_reduce_over_ranks(root, NULL, absmax);
    ok = ok && KN_LAUNCH(s, KN_K_SQSUM, ((kn_sqsum_args){ run, sharded, absmax, limbs }));
    ok = ok && kn_reduce_over_ranks(root, limbs, NULL);
    ok = ok && KN_LAUNCH(s, KN_K_SQSUM, ((kn_sqsum_args){ run + n, copies, absmax, part }));
    for (int i = 0; i < KN_SQSUM_LIMBS; i++)
        limbs[i] += part[i];
    kn_free_host(run);
    return ok;
}

float kn_clip_grad_norm(void *module, double max_norm)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_clip_grad_norm") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    if (n == 0)
        return 0;
    kn_module_impl *root = kn_impl_root(m);
    float absmax = 0, norm = 0, coef = 1;
    int64_t limbs[KN_SQSUM_LIMBS] = { 0 };
    kn_scope scope = kn_scope_begin();
    bool ok = measure(root, p, n, &absmax, limbs);
    kn_scope_end(scope);
    kn_clip_args args = { limbs, &absmax, kn_grad_scale(module), max_norm, &norm, &coef };
    if (!ok || !KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_CLIP, args))
        return 0;
    root->clip_coef = coef;
    root->clip_coef_set = true;
    return norm;
}

const char *kn_find_nonfinite_grad(void *module)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_find_nonfinite_grad") : NULL;
    const kn_param *p;
    int n = m ? kn_params(module, &p) : 0;
    const char *found = NULL;
    kn_scope scope = kn_scope_begin();
    for (int i = 0; i < n && kn_ok(); i++) {
        kn_tensor *g = p[i].trainable ? kn_param_grad(&p[i]) : NULL;
        kn_run run = { g && kn_numel(g) ? kn_array_of(g).data : NULL, g ? kn_numel(g) : 0,
                       g ? g->dtype : KN_F32 };
        float absmax = 0;
        if (!KN_LAUNCH(kn_compute_stream(KN_CPU), KN_K_ABSMAX,
                       ((kn_absmax_args){ &run, run.count > 0, &absmax })) ||
            !kn_reduce_over_ranks(kn_impl_root(m), NULL, &absmax))
            break;
        if (!isfinite(absmax) && !found)
            found = p[i].name;
    }
    kn_scope_end(scope);
    return found;
}
