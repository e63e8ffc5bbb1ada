/* optim/adamw.c: AdamW (Loshchilov and Hutter, arXiv:1711.05101), in one kernel; Adam with L2
 * regularisation and AMSGrad, made of operations. */
#include "optim/optim_internal.h"
#include <math.h>

static bool update(const void *options, const kn_opt_step *step, kn_stream *s)
{
    const kn_adamw_options *a = options;
    return KN_LAUNCH(s, KN_K_ADAMW, ((kn_adamw_args){ *step, a->beta1, a->beta2, a->eps }));
}

static const kn_optim_constant constant[] = {
    { "beta1", offsetof(kn_adamw_options, beta1), KN_OF_REALS, 0, 1, true },
    { "beta2", offsetof(kn_adamw_options, beta2), KN_OF_REALS, 0, 1, true },
    { "eps", offsetof(kn_adamw_options, eps), KN_OF_REALS, 0, INFINITY, true },
    { 0 },
};

static const kn_optim_method adamw = { .state = { "exp_avg", "exp_avg_sq" },
                                       .update = update,
                                       .constant = constant };

typedef struct numbers {
    double beta1, beta2, eps;
    bool l2, amsgrad;
} numbers;

/* m and v average g and g^2; with AMSGrad the largest v so far stands in its place:
 * p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p), where L2 has wd p in g instead. */
static bool update_by_operations(const kn_optim_part *p, void *arg)
{
    const numbers *o = arg;
    kn_tensor *g = p->grad, *m = p->state[0], *v = p->state[1];
    const double wd = p->weight_decay, t = (double)p->step;
    if (o->l2 && wd != 0)
        g = kn_add_scaled(g, p->param, wd);
    if (!kn_copy_(m, kn_lerp(m, g, 1 - o->beta1)) ||
        !kn_copy_(v, kn_lerp(v, kn_mul(g, g), 1 - o->beta2)))
        return false;
    if (o->amsgrad && !kn_copy_(p->state[2], v = kn_maximum(p->state[2], v)))
        return false;
    kn_tensor *size = kn_add_scalar(kn_sqrt(kn_scale(v, 1 / (1 - pow(o->beta2, t)))), o->eps);
    kn_tensor *step = kn_div(kn_scale(m, 1 / (1 - pow(o->beta1, t))), size);
    if (!o->l2 && wd != 0)
        step = kn_add_scaled(step, p->param, wd);
    return kn_copy_(p->param, kn_add_scaled(p->param, step, -p->lr));
}

static kn_optim *by_operations(void *module, const kn_adamw_options *a)
{
    numbers n = { a->beta1, a->beta2, a->eps, a->l2, a->amsgrad };
    kn_own_optim_options own = { .update = update_by_operations,
                                 .arg = &n,
                                 .name = "kn_adamw",
                                 .state = { "exp_avg", "exp_avg_sq",
                                            a->amsgrad ? "max_exp_avg_sq" : NULL } };
    return kn_own_optim_with(module, own, KN_OPTIM_GROUPS(*a, a->l2 ? 0 : 0.01), sizeof n, false);
}

kn_optim *kn_adamw_(void *module, kn_adamw_options a)
{
    a.beta1 = kn_value_or(a.beta1, 0.9);
    a.beta2 = kn_value_or(a.beta2, 0.999);
    a.eps = kn_value_or(a.eps, 1e-8);
    if (!kn_optim_in_ranges(constant, &a, "adamw"))
        return NULL;
    if (a.l2 || a.amsgrad)
        return by_operations(module, &a);
    return kn_optim_new(module, &adamw, &a, sizeof a, KN_OPTIM_GROUPS(a, 0.01));
}
