/* tests/optim/f64_test.c: masters in f64 get steps in f64. */
#include "tests/optim/plain.h"
#include "tests/owned.h"

/* No number of a step of f64 masters is an f32: rates, factors of groups, decay, 1/3 of a sum. */
KN_TEST(f64, steps)
{
    two_layers m;
    kn_optim_group groups[] = { { .pattern = "out.*", .lr_mul = 0.3, .weight_decay = 0.7 } };
    for (int kind = 0; kind < 3; kind++) {
        rule r = kind == 1 ? sgd_rule(0.1, 0.9, 0, true, 0.05) : adam_rule(0.01, 0.05);
        r.lion = kind == 2;
        r.beta2 = kind == 2 ? 0.99 : r.beta2;
        r.lr_mul[2] = r.lr_mul[3] = 0.3;
        r.decay[2] = r.decay[3] = 0.7;
        build(&m, KN_F64);
        kn_optim *o =
            kind == 0
                ? kn_adamw(&m, .lr = 0.01, .weight_decay = 0.05, .groups = groups, .group_count = 1)
            : kind == 1
                ? kn_sgd(&m, .lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.05,
                         .groups = groups, .group_count = 1)
                : kn_lion(&m, .lr = 0.01, .weight_decay = 0.05, .groups = groups, .group_count = 1);
        follow(&m, o, r, KN_F64, 3, 1e-14);
    }
}

/* So is the factor of clipped gradients. */
KN_TEST(f64, clipping)
{
    static double g[PARAMS][MOST];
    OWNED_MODULE two_layers m;
    build(&m, KN_F64);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 0.1);
    backward(&m, KN_F64, 1);
    read_params(&m, true, g);
    double sum = 0;
    for (int i = 0; i < PARAMS; i++)
        for (int k = 0; k < MOST; k++)
            sum += g[i][k] * g[i][k];
    KN_CHECK(kn_clip_grad_norm(&m, 0.05));
    step_by(&m, o, 0.1 * 0.05 / (sqrt(sum) + 1e-6), 1e-15);
}
