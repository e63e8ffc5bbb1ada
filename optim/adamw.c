/* optim/adamw.c: AdamW (Loshchilov and Hutter, arXiv:1711.05101). */
#include "optim/optim_internal.h"
#include <math.h>

static bool update(const void *options, const kn_opt_step *step, kn_stream *s)
{
    const kn_adamw_options *a = options;
    return KN_LAUNCH(s, KN_K_ADAMW, ((kn_adamw_args){ *step, a->beta1, a->beta2, a->eps }));
}

static const kn_optim_constant constant[] = {
    { "beta1", offsetof(kn_adamw_options, beta1), KN_OF_REALS, 0, 1 },
    { "beta2", offsetof(kn_adamw_options, beta2), KN_OF_REALS, 0, 1 },
    { "eps", offsetof(kn_adamw_options, eps), KN_OF_REALS, 0, INFINITY },
    { 0 },
};

static const kn_optim_method adamw = { .state = { "exp_avg", "exp_avg_sq" },
                                       .update = update,
                                       .constant = constant };

kn_optim *kn_adamw_(void *module, kn_adamw_options a)
{
    a.beta1 = kn_value_or(a.beta1, 0.9);
    a.beta2 = kn_value_or(a.beta2, 0.999);
    a.eps = kn_value_or(a.eps, 1e-8);
    if (!(a.eps >= 0) || !isfinite(a.eps))
        return kn_fail_null("adamw: .eps is %g; it must be at least 0 (KN_ZERO for none)", a.eps);
    if (!(a.beta1 >= 0 && a.beta1 < 1 && a.beta2 >= 0 && a.beta2 < 1))
        return kn_fail_null("adamw: betas are %g and %g; both must lie in [0, 1)", a.beta1,
                            a.beta2);
    return kn_optim_new(module, &adamw, &a, sizeof a, KN_OPTIM_GROUPS(a, 0.01));
}
