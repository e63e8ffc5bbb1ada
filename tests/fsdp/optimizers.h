/* tests/fsdp/optimizers.h: every optimizer of the library, with the options that change its
 * formula, for tests that draw one. */
#ifndef KNAP_TESTS_OPTIMIZERS_H
#define KNAP_TESTS_OPTIMIZERS_H

#include "optim/optim.h"

enum {
    OPTIMIZER_ADAMW,
    OPTIMIZER_SGD,
    OPTIMIZER_MOMENTUM,
    OPTIMIZER_NESTEROV,
    OPTIMIZER_LION,
    OPTIMIZER_OWN,
    OPTIMIZER_MUON,
    OPTIMIZER_AMSGRAD,
    OPTIMIZER_KINDS
};

/* A running mean of |gradient| scales the step. */
static inline bool optimizer_own_rule(const kn_optim_part *p, void *arg)
{
    kn_tensor *mean = kn_add(kn_scale(p->state[0], 0.75), kn_scale(kn_abs(p->grad), 0.25));
    kn_tensor *step = kn_div(p->grad, kn_add_scalar(mean, 1e-3));
    return !arg && kn_copy_(p->state[0], mean) &&
           kn_copy_(p->param, kn_sub(p->param, kn_scale(step, p->lr)));
}

/* at_random: how parameters of bf16 and f16 are rounded. */
static inline kn_optim *optimizer_make(int kind, void *module, bool at_random)
{
    switch (kind) {
    case OPTIMIZER_SGD:
        return kn_sgd(module, .lr = 0.01, .stochastic_rounding = at_random);
    case OPTIMIZER_MOMENTUM:
        return kn_sgd(module, .lr = 0.01, .momentum = 0.9, .dampening = 0.1, .weight_decay = 0.01,
                      .stochastic_rounding = at_random);
    case OPTIMIZER_NESTEROV:
        return kn_sgd(module, .lr = 0.01, .momentum = 0.9, .nesterov = true,
                      .stochastic_rounding = at_random);
    case OPTIMIZER_LION:
        return kn_lion(module, .lr = 1e-3, .weight_decay = 0.1, .stochastic_rounding = at_random);
    case OPTIMIZER_OWN:
        return kn_own_optim(module, .update = optimizer_own_rule, .state = { "mean" }, .lr = 1e-3,
                            .stochastic_rounding = at_random);
    case OPTIMIZER_MUON: /* a window holds a matrix or two */
        return kn_muon(module, .lr = 1e-2, .ns_steps = 3, .window = 64,
                       .stochastic_rounding = at_random);
    case OPTIMIZER_AMSGRAD: /* three states */
        return kn_adamw(module, .lr = 1e-2, .weight_decay = 0.1, .beta2 = 0.5, .l2 = true,
                        .amsgrad = true, .stochastic_rounding = at_random);
    default:
        return kn_adamw(module, .lr = 1e-2, .weight_decay = 0.1, .stochastic_rounding = at_random);
    }
}

#endif
