/* optim/lion.c: Lion (Chen et al., arXiv:2302.06675). */
#include "optim/optim_internal.h"

static bool update(const void *options, const kn_opt_step *step, kn_stream *s)
{
    const kn_lion_options *o = options;
    return KN_LAUNCH(s, KN_K_LION, ((kn_lion_args){ *step, o->beta1, o->beta2 }));
}

static const kn_optim_constant constant[] = {
    { "beta1", offsetof(kn_lion_options, beta1), KN_OF_REALS, 0, 1, true },
    { "beta2", offsetof(kn_lion_options, beta2), KN_OF_REALS, 0, 1, true },
    { 0 },
};

static const kn_optim_method lion = { .state = { "exp_avg" },
                                      .update = update,
                                      .constant = constant };

kn_optim *kn_lion_(void *module, kn_lion_options o)
{
    o.beta1 = kn_value_or(o.beta1, 0.9);
    o.beta2 = kn_value_or(o.beta2, 0.99);
    return kn_optim_in_ranges(constant, &o, "lion")
               ? kn_optim_new(module, &lion, &o, sizeof o, KN_OPTIM_GROUPS(o, 0))
               : NULL;
}
