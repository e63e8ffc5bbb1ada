/* optim/sgd.c: stochastic gradient descent, with and without momentum. */
#include "optim/optim_internal.h"

static bool update(const void *options, const kn_opt_step *step, kn_stream *s)
{
    const kn_sgd_options *o = options;
    return KN_LAUNCH(s, KN_K_SGD, ((kn_sgd_args){ *step, o->momentum, o->dampening, o->nesterov }));
}

static const kn_optim_method plain = { .update = update };
/* In a state dict, "momentum" is the state. */
static const kn_optim_constant constant[] = {
    { "momentum_factor", offsetof(kn_sgd_options, momentum), KN_OF_REALS, 0, 1, true, "momentum" },
    { "dampening", offsetof(kn_sgd_options, dampening), KN_OF_REALS, 0, 1 },
    { "nesterov", offsetof(kn_sgd_options, nesterov), KN_OF_BOOLS, 0, 1 },
    { 0 },
};
static const kn_optim_method with_momentum = { .state = { "momentum" },
                                               .update = update,
                                               .constant = constant };

kn_optim *kn_sgd_(void *module, kn_sgd_options s)
{
    s.momentum = kn_value_or(s.momentum, 0);
    s.dampening = kn_value_or(s.dampening, 0);
    if (!kn_optim_in_ranges(constant, &s, "sgd"))
        return NULL;
    if (s.dampening != 0 && s.momentum == 0)
        return kn_fail_null(
            "sgd: .dampening %g does nothing without .momentum; leave it out or give both",
            s.dampening);
    if (s.nesterov && (s.momentum == 0 || s.dampening != 0))
        return kn_fail_null("sgd: .nesterov needs .momentum above 0 and no .dampening");
    return kn_optim_new(module, s.momentum > 0 ? &with_momentum : &plain, &s, sizeof s,
                        KN_OPTIM_GROUPS(s, 0));
}
