/* tests/optim/optim_test.c: optimizers against plain loops in double precision, averaging over
 * micro-batches, clipping, the search for gradients that aren't finite, bad use. */
#include "tests/optim/plain.h"
#include "tests/owned.h"

KN_TEST(optim, adamw_follows_the_formula)
{
    two_layers m;
    build(&m, KN_F32);
    follow(&m, kn_adamw(&m, .lr = 0.01), adam_rule(0.01, 0.01), KN_F32, 1, 2e-6);
    build(&m, KN_F32);
    rule r = adam_rule(0.02, 0);
    r.beta1 = 0.5;
    r.beta2 = 0.9;
    r.eps = 1e-3;
    follow(
        &m,
        kn_adamw(&m, .lr = 0.02, .beta1 = 0.5, .beta2 = 0.9, .eps = 1e-3, .weight_decay = KN_ZERO),
        r, KN_F32, 3, 2e-6);
}

/* L2, and AMSGrad, whose largest square isn't the last one where beta2 is small. */
KN_TEST(optim, adam_and_amsgrad_follow_the_formula)
{
    for (int i = 0; i < 8; i++) {
        two_layers m;
        const bool wide = i >= 4, l2 = i % 4 != 1, amsgrad = i % 4 != 0, maximize = i % 4 == 3;
        rule r = adam_rule(0.02, l2 && !wide ? 0 : 0.25);
        r.beta1 = 0.5, r.beta2 = 0.25, r.l2 = l2, r.amsgrad = amsgrad, r.maximize = maximize;
        build(&m, wide ? KN_F64 : KN_F32);
        kn_optim *o = kn_adamw(&m, .lr = 0.02, .beta1 = 0.5, .beta2 = 0.25, .l2 = l2,
                               .weight_decay = l2 && !wide ? 0 : 0.25, .amsgrad = amsgrad,
                               .maximize = maximize);
        KN_CHECK(o && strcmp(kn_optim_state_name(o, 1), "exp_avg_sq") == 0);
        const char *third = kn_optim_state_name(o, 2);
        KN_CHECK(amsgrad ? third && strcmp(third, "max_exp_avg_sq") == 0 : !third);
        follow(&m, o, r, wide ? KN_F64 : KN_F32, 2, wide ? 1e-14 : 2e-6);
    }
}

/* The factor of the gradients lies with the clipping, with the scaler, or with the optimizer. */
KN_TEST(optim, maximize_steps_along_the_gradient)
{
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    rule r = adam_rule(0.01, 0.01);
    r.maximize = true;
    follow(&m, kn_adamw(&m, .lr = 0.01, .maximize = true), r, KN_F32, 2, 2e-6);
    build(&m, KN_F32);
    r = sgd_rule(0.1, 0.9, 0, false, 0.05);
    r.maximize = true;
    follow(&m, kn_sgd(&m, .lr = 0.1, .momentum = 0.9, .weight_decay = 0.05, .maximize = true), r,
           KN_F32, 2, 2e-6);
    build(&m, KN_F64);
    r = adam_rule(0.01, 0);
    r.lion = r.maximize = true;
    r.beta2 = 0.99;
    follow(&m, kn_lion(&m, .lr = 0.01, .maximize = true), r, KN_F64, 1, 1e-14);
    build(&m, KN_F64);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1, .maximize = true);
    KN_CHECK(o && backward(&m, KN_F64, 1));
    const double norm = kn_item(kn_clip_grad_norm(&m, 0.125));
    KN_CHECK(norm > 0.125);
    step_by(&m, o, -0.125 / (norm + 1e-6), 1e-6);
    kn_optim_free(o);
    o = kn_adagrad(&m, .lr = 1, .maximize = true, .eps = 1e9);
    KN_CHECK(o && backward(&m, KN_F64, 2));
    step_by(&m, o, -1e-9, 1e-15);
    kn_optim_free(o);
    kn_scaler *s = kn_scaler_new(&m, .init_scale = 8);
    o = kn_sgd(&m, .lr = 1, .maximize = true);
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F64, KN_CPU, 5, 9, KN_SHAPE(6, 3));
    KN_CHECK(s && o && kn_backward(kn_scale_loss(s, kn_mean(kn_call(&m, x), 0, NULL, false))));
    kn_scope_end(scope);
    static double before[PARAMS][MOST], after[PARAMS][MOST];
    read_params(&m, false, before);
    KN_CHECK(kn_scaler_step(s, o));
    read_params(&m, false, after);
    KN_CHECK(fabs(after[3][0] - before[3][0] - 0.5) < 1e-12, "out.bias moves by %g",
             after[3][0] - before[3][0]); /* its gradient is 1/2 */
    kn_scaler_free(s);
}

KN_TEST(optim, adamw_groups)
{
    two_layers m;
    kn_optim_group groups[] = { { .pattern = "out.*", .lr_mul = 0.5, .weight_decay = 0.3 },
                                { .min_ndim = 2, .weight_decay = 0.2 },
                                { .pattern = "*.bias", .weight_decay = KN_ZERO } };
    rule r = adam_rule(0.01, 0.1);
    r.decay[0] = 0.2, r.decay[1] = 0; /* fc.weight, fc.bias */
    r.decay[2] = r.decay[3] = 0.3;    /* out: the first match wins */
    r.lr_mul[2] = r.lr_mul[3] = 0.5;
    for (int wide = 0; wide < 2; wide++) { /* no number of f64 is rounded to f32 */
        build(&m, wide ? KN_F64 : KN_F32);
        kn_optim *o =
            kn_adamw(&m, .lr = 0.01, .weight_decay = 0.1, .groups = groups, .group_count = 3);
        follow(&m, o, r, wide ? KN_F64 : KN_F32, 2, wide ? 1e-14 : 2e-6);
    }
    build(&m, KN_F32);
    kn_optim_group frozen[] = { { .pattern = "fc.*", .lr_mul = KN_ZERO },
                                { .max_ndim = 1, .lr_mul = 3 } };
    r = adam_rule(0.01, 0.01);
    r.lr_mul[0] = r.lr_mul[1] = 0;
    r.lr_mul[3] = 3;
    follow(&m, kn_adamw(&m, .lr = 0.01, .groups = frozen, .group_count = 2), r, KN_F32, 1, 2e-6);
}

KN_TEST(optim, sgd_follows_the_formula)
{
    two_layers m;
    build(&m, KN_F32);
    follow(&m, kn_sgd(&m, .lr = 0.1), sgd_rule(0.1, 0, 0, false, 0), KN_F32, 1, 2e-6);
    build(&m, KN_F32);
    follow(&m, kn_sgd(&m, .lr = 0.1, .momentum = 0.9, .weight_decay = 0.05),
           sgd_rule(0.1, 0.9, 0, false, 0.05), KN_F32, 2, 2e-6);
    build(&m, KN_F32);
    follow(&m, kn_sgd(&m, .lr = 0.1, .momentum = 0.8, .dampening = 0.3),
           sgd_rule(0.1, 0.8, 0.3, false, 0), KN_F32, 1, 2e-6);
    build(&m, KN_F32);
    follow(&m, kn_sgd(&m, .lr = 0.1, .momentum = 0.9, .nesterov = true),
           sgd_rule(0.1, 0.9, 0, true, 0), KN_F32, 1, 2e-6);
}

KN_TEST(optim, lion_follows_the_formula)
{
    two_layers m;
    rule r = adam_rule(0.01, 0);
    r.lion = true;
    r.beta2 = 0.99;
    build(&m, KN_F32);
    follow(&m, kn_lion(&m, .lr = 0.01), r, KN_F32, 1, 2e-6);
    build(&m, KN_F64);
    r = adam_rule(0.02, 0.25);
    r.lion = true;
    r.beta1 = 0.5;
    r.beta2 = 0.75;
    follow(&m, kn_lion(&m, .lr = 0.02, .beta1 = 0.5, .beta2 = 0.75, .weight_decay = 0.25), r,
           KN_F64, 3, 1e-14);
}

typedef struct vector {
    kn_module base;
    kn_tensor *w;
} vector;

static kn_tensor *vector_forward(kn_module *self, kn_tensor *x)
{
    return sum_of(kn_mul(((vector *)self)->w, x));
}

/* Gradients that shrink step by step, in f32: an average that forgets must see the small one. */
static void shrinking(kn_optim *(*make)(void *module, double beta), rule r, double beta)
{
    static double p[PARAMS][MOST], g[PARAMS][MOST], m[PARAMS][MOST], v[PARAMS][MOST];
    memset(p, 0, sizeof p), memset(m, 0, sizeof m), memset(v, 0, sizeof v);
    OWNED_MODULE vector net;
    KN_CHECK(kn_module_init(&net.base, vector_forward));
    net.w = kn_parameter(&net.base, "w", KN_F32, KN_CPU, KN_ZEROS_INIT, KN_SHAPE(3));
    KN_CHECK(net.w && kn_materialize(&net, KN_CPU, 1));
    OWNED_OPTIM kn_optim *o = make(&net, beta);
    r.beta1 = r.beta2 = beta;
    double size = 0.5;
    for (int step = 1; step <= 3; step++, size *= 1e-5) {
        IN_SCOPE;
        const float x[3] = { (float)size, -(float)size, (float)size / 3 };
        for (int i = 0; i < 3; i++)
            g[0][i] = x[i];
        KN_CHECK(kn_backward(kn_call(&net, kn_from(KN_F32, KN_CPU, x, KN_SHAPE(3)))) && kn_step(o));
        plain_step(&r, step, 1, p, g, m, v);
        for (int i = 0; i < 3; i++) {
            const double now = ((const float *)kn_data(net.w))[i];
            KN_CHECK(fabs(now - p[0][i]) < 1e-6, "beta %g, step %d: %.9g, should be %.9g", beta,
                     step, now, p[0][i]);
        }
    }
}

static kn_optim *small_adamw(void *module, double beta)
{
    const double b = beta == 0 ? KN_ZERO : beta;
    return kn_adamw(module, .lr = 0.1, .beta1 = b, .beta2 = b, .weight_decay = KN_ZERO);
}

static kn_optim *small_lion(void *module, double beta)
{
    const double b = beta == 0 ? KN_ZERO : beta;
    return kn_lion(module, .lr = 0.1, .beta1 = b, .beta2 = b);
}

KN_TEST(optim, small_betas_forget)
{
    static const double betas[] = { 0, 1e-3, 0.3, 0.6 };
    rule adam = adam_rule(0.1, 0), lion = adam;
    lion.lion = true;
    for (int i = 0; i < 4; i++) {
        shrinking(small_adamw, adam, betas[i]);
        shrinking(small_lion, lion, betas[i]);
    }
    KN_CHECK_OK();
}

KN_TEST(optim, state_by_name)
{
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    kn_optim *o = kn_adamw(&m, .lr = 0.01);
    backward(&m, KN_F32, 1);
    KN_CHECK(kn_step(o));
    kn_tensor *a = kn_optim_state(o, 0, "exp_avg"), *b = kn_optim_state(o, 0, "exp_avg_sq");
    KN_CHECK(a && b && a != b && kn_numel(a) == 12 && kn_ndim(a) == 1);
    KN_CHECK(!kn_optim_state(o, 0, "momentum") && !kn_optim_state(o, 4, "exp_avg"));
    KN_CHECK(kn_ledger_read().live[KN_MEM_OPTIM] > 0);
    kn_optim_free(o);
    KN_CHECK(kn_ledger_read().live[KN_MEM_OPTIM] == 0);
}

/* ---- clipping -------------------------------------------------------------------------------- */

KN_TEST(optim, clipping_scales_to_the_norm)
{
    static double g[PARAMS][MOST];
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    const double limits[3] = { 0.05, 1e6, 0 };
    for (int c = 0; c < 3; c++) {
        backward(&m, KN_F32, c);
        backward(&m, KN_F32, c + 1);
        read_params(&m, true, g);
        double sum = 0;
        for (int i = 0; i < PARAMS; i++)
            for (int k = 0; k < MOST; k++)
                sum += g[i][k] / 2 * (g[i][k] / 2);
        double norm = sqrt(sum), said = kn_item(kn_clip_grad_norm(&m, limits[c]));
        KN_CHECK(fabs(said - norm) <= 1e-6 * norm, "norm %.9g, should be %.9g", said, norm);
        KN_CHECK(kn_item(kn_clip_grad_norm(&m, limits[c])) == (float)said,
                 "measuring changes nothing");
        double factor = limits[c] > 0 ? fmin(1, limits[c] / (norm + 1e-6)) / 2 : 0.5;
        step_by(&m, o, factor, 1e-6);
    }
}

KN_TEST(optim, clipping_by_any_norm)
{
    static double g[PARAMS][MOST];
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    const double order[] = { 0.5, 1, 2, 3, HUGE_VAL };
    for (int c = 0; c < 5; c++) {
        backward(&m, KN_F32, c);
        backward(&m, KN_F32, c + 1);
        read_params(&m, true, g);
        double sum = 0, most = 0;
        for (int i = 0; i < PARAMS; i++)
            for (int k = 0; k < MOST; k++) {
                sum += isinf(order[c]) ? 0 : pow(fabs(g[i][k]) / 2, order[c]);
                most = fmax(most, fabs(g[i][k]) / 2);
            }
        double norm = isinf(order[c]) ? most : pow(sum, 1 / order[c]);
        double said = kn_item(kn_clip_grad_norm_p(&m, 0.05, order[c]));
        KN_CHECK(fabs(said - norm) <= 1e-6 * norm, "p %g: %.9g, not %.9g", order[c], said, norm);
        KN_CHECK(order[c] != 2 || said == kn_item(kn_clip_grad_norm(&m, 0.05)));
        KN_CHECK(!isinf(order[c]) || said == (float)most, "the maximum is exact");
        step_by(&m, o, 0.05 / norm / 2, 1e-6);
    }
    kn_clip_grad_norm_p(&m, 1, 0);
    KN_CHECK_ERROR("p is 0");
    kn_clip_grad_norm_p(&m, 1, NAN);
    KN_CHECK_ERROR("p is nan");
}

/* A factor doesn't cover gradients that arrive later; a measurement leaves it as it is. */
KN_TEST(optim, a_step_refuses_gradients_that_came_after_clipping)
{
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    OWNED_OPTIM kn_optim *o = kn_sgd(&m, .lr = 1);
    backward(&m, KN_F32, 1);
    KN_CHECK(kn_item(kn_clip_grad_norm(&m, 0.001)) > 0.001);
    backward(&m, KN_F32, 2);
    REFUSED(kn_step(o),
            "gradients of 'two_layers' were clipped, and a later backward added to them");
    KN_CHECK(kn_unclip_grads(&m));
    step_by(&m, o, 0.5, 1e-6);
    backward(&m, KN_F32, 1);
    KN_CHECK(kn_item(kn_clip_grad_norm(&m, 0.001)) > 0.001);
    kn_zero_grad(&m); /* what was clipped is gone */
    backward(&m, KN_F32, 1);
    step_by(&m, o, 1, 1e-6);
}

KN_TEST(optim, gradients_that_are_not_finite_are_found)
{
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    backward(&m, KN_F32, 1);
    KN_CHECK(kn_find_nonfinite_grad(&m) == NULL && kn_ok());
    const kn_param *p;
    kn_params(&m, &p);
    ((float *)kn_data(kn_grad(p[2].tensor)))[5] = NAN;
    const char *name = kn_find_nonfinite_grad(&m);
    KN_CHECK(name && strcmp(name, "out.weight") == 0, "found '%s'", name ? name : "nothing");
    REFUSED(kn_first_nonfinite_grad(&m), "kn_clip_grad_norm for the same module first");
    KN_CHECK(!isfinite(kn_item(kn_clip_grad_norm(&m, 1))));
    ((float *)kn_data(kn_grad(p[1].tensor)))[0] = INFINITY;
    KN_CHECK(kn_item(kn_first_nonfinite_grad(&m)) == 2, "as they were measured");
    KN_CHECK(strcmp(kn_find_nonfinite_grad(&m), "fc.bias") == 0);
    KN_CHECK(kn_item(kn_first_nonfinite_grad(&m)) == 2, "looking measures for itself");
    kn_clip_grad_norm(&m, 1);
    KN_CHECK(kn_item(kn_first_nonfinite_grad(&m)) == 1);
}

/* ---- bad use --------------------------------------------------------------------------------- */

KN_TEST(optim, bad_use)
{
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    REFUSED(kn_adamw(&m, .lr = -2), ".lr is -2");
    REFUSED(kn_adamw(&m), ".lr is 0; it is required");
    REFUSED(kn_sgd(&m, .momentum = 0.9), ".lr is 0; it is required");
    REFUSED(kn_adamw(&m, .lr = 1, .eps = -1e-8), ".eps is -1e-08");
    REFUSED(kn_adamw(&m, .lr = 1, .weight_decay = -0.5), ".weight_decay is -0.5");
    REFUSED(kn_sgd(&m, .lr = 1, .momentum = -0.5), ".momentum is -0.5");
    REFUSED(kn_sgd(&m, .lr = 1, .momentum = 1), ".momentum is 1");
    REFUSED(kn_sgd(&m, .lr = 1, .momentum = 0.9, .dampening = 2),
            ".dampening is 2; it must lie in [0, 1]");
    REFUSED(kn_sgd(&m, .lr = 1, .dampening = 0.5), "does nothing without .momentum");
    REFUSED(kn_sgd(&m, .lr = 1, .momentum = 0.9, .dampening = 0.1, .nesterov = true),
            ".nesterov needs .momentum");
    kn_optim_group bad = { .pattern = "fc.*", .lr_mul = -3 };
    REFUSED(kn_adamw(&m, .lr = 1, .groups = &bad, .group_count = 1), "('fc.*') has .lr_mul -3");
    REFUSED(kn_adamw(&m, .lr = NAN), ".lr is nan");
    REFUSED(kn_adamw(&m, .lr = 1, .beta1 = 1), ".beta1 is 1; it must lie in [0, 1)");
    REFUSED(kn_sgd(&m, .lr = 1, .nesterov = true), ".nesterov needs .momentum");
    kn_optim_group g = { .pattern = "decoder.*" };
    REFUSED(kn_adamw(&m, .lr = 1, .groups = &g, .group_count = 1),
            "'decoder.*' matches no parameter");
    REFUSED(kn_adamw(&m, .lr = 1, .group_count = 1), ".group_count is 1, but .groups is NULL");
    REFUSED(kn_adamw(&m, .lr = 1, .groups = &g, .group_count = -1),
            ".group_count is -1; it must be at least 0");
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
    REFUSED(kn_step(o), "no parameter has a gradient");
    OWNED_MODULE kn_module empty;
    kn_module_init(&empty, two_layers_forward);
    REFUSED(kn_adamw(&empty, .lr = 1), "no parameters");
    REFUSED(kn_step(NULL), "optimizer is NULL");
    backward(&m, KN_F32, 1);
    kn_fail("stop");
    KN_CHECK(!kn_step(o) && kn_optim_steps(o) == 0, "no step while an error stands");
    kn_clear_error();
    kn_set_lr(o, 0.25);
    KN_CHECK(kn_lr(o) == 0.25 && kn_step(o));
    kn_optim_free(o);
    o = kn_adamw(&m, .lr = KN_ZERO);
    KN_CHECK(o && kn_lr(o) == 0);
}

static kn_tensor *no_grad_here(const kn_param *p)
{
    return NULL;
}

static void clear_nothing(const kn_param *p)
{
}

/* Changes a parameter as kn_fsdp_wrap does, for the optimizer's check (tests/fsdp has the rest). */
KN_TEST(optim, made_before_sharding_is_refused)
{
    static const kn_param_source elsewhere = { no_grad_here, clear_nothing };
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1), *sub = kn_adamw(&m.fc, .lr = 0.1);
    KN_CHECK(o && sub && backward(&m, KN_F32, 1));
    const kn_param *p;
    kn_params(&m, &p);
    kn_param_entry *e = &m.fc.base.impl->param[0];
    e->source = &elsewhere;
    e->master = p[1].master;
    kn_params_changed(m.base.impl);
    REFUSED(kn_step(o), "make the optimizer after kn_fsdp_wrap");
    REFUSED(kn_optim_state(o, 1, "exp_avg"), "kn_optim_state: 'fc.weight' was sharded");
    KN_CHECK(!kn_step(sub), "the lists of modules below are new as well");
    KN_CHECK_ERROR("make the optimizer after kn_fsdp_wrap");
    e->source = NULL;
    kn_params_changed(m.base.impl);
    KN_CHECK(kn_step(o));
    kn_parameter(&m, "extra", KN_F32, KN_CPU, KN_ZEROS_INIT, KN_SHAPE(2));
    backward(&m, KN_F32, 1);
    REFUSED(kn_step(o), "had 4 parameters when the optimizer was made, it has 5 now");
}

KN_TEST(optim, frozen_parameters_stay)
{
    static double p[PARAMS][MOST], got[PARAMS][MOST];
    OWNED_MODULE two_layers m;
    build(&m, KN_F32);
    kn_freeze(&m.fc, true);
    OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 0.1);
    read_params(&m, false, p);
    KN_CHECK(backward(&m, KN_F32, 1) && kn_step(o));
    read_params(&m, false, got);
    KN_CHECK(memcmp(p[0], got[0], sizeof p[0]) == 0 && memcmp(p[1], got[1], sizeof p[1]) == 0);
    KN_CHECK(memcmp(p[2], got[2], 8 * sizeof(double)) != 0);
}

/* ---- the step that is counted ---------------------------------------------------------------- */

static bool linear_backward(kn_linear *l)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 2));
    return kn_backward(sum_of(kn_call(l, x)));
}

KN_TEST(optim, optimizers_that_step_in_turn_count_one_step)
{
    OWNED_MODULE kn_linear a = { 0 }, b = { 0 };
    KN_CHECK(kn_linear_init(&a, NULL, NULL, 2, 2) && kn_linear_init(&b, NULL, NULL, 2, 2));
    OWNED_OPTIM kn_optim *x = kn_sgd(&a, .lr = 0.1), *y = kn_sgd(&b, .lr = 0.1);
    const int64_t bad[] = { -4, INT64_MIN, INT64_MAX };
    for (int i = 0; i < 3; i++) {
        kn_set_step(bad[i]);
        KN_CHECK_ERROR("steps count from 0");
        KN_CHECK(kn_get_step() >= 0);
    }
    kn_set_step(10); /* resumed */
    for (int i = 1; i <= 3; i++) {
        KN_CHECK(linear_backward(&a) && kn_step(x) && kn_get_step() == 10 + i, "step %lld",
                 (long long)kn_get_step());
        KN_CHECK(linear_backward(&b) && kn_step(y) && kn_get_step() == 10 + i, "step %lld",
                 (long long)kn_get_step());
    }
    for (int i = 1; i <= 3; i++) /* one of them alone */
        KN_CHECK(linear_backward(&a) && kn_step(x) && kn_get_step() == 13 + i);
    KN_CHECK(linear_backward(&b) && kn_step(y) && kn_get_step() == 16);
}
