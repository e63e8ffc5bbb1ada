/* tests/optim/own_test.c: optimizers of a user's making against the library's and a formula, what
 * their update sees, and their errors. */
#include "tests/optim/one_layer.h"
#include "tests/owned.h"

static bool backward(net *m, kn_dtype t, int batch, kn_scaler *scaler)
{
    IN_SCOPE;
    kn_tensor *x = kn_randn(t, KN_CPU, 5, (uint64_t)batch, KN_SHAPE(6, 5));
    kn_tensor *loss = mean_of(kn_tanh(kn_call(m, x)));
    return kn_backward(scaler ? kn_scale_loss(scaler, loss) : loss);
}

/* The largest difference between the parameters of two nets. */
static double apart(net *a, net *b)
{
    double most = 0;
    const kn_param *p, *q;
    int n = kn_params(a, &p);
    KN_CHECK(n == 2 && kn_params(b, &q) == n);
    for (int i = 0; i < n; i++) {
        IN_SCOPE;
        kn_tensor *d = kn_abs(kn_sub(kn_detach(p[i].master), kn_detach(q[i].master)));
        most = fmax(most, kn_item(kn_amax(d, 0, NULL, false)));
    }
    KN_CHECK_OK();
    return most;
}

/* kn_lion, in operations. */
static bool lion(const kn_optim_part *p, void *arg)
{
    const double *beta = arg;
    kn_tensor *m = p->state[0], *away = kn_sub(p->grad, m);
    kn_tensor *c = kn_add(m, kn_scale(away, 1 - beta[0])), *zero = kn_zeros_like(c);
    kn_tensor *sign =
        kn_sub(kn_cast(kn_gt(c, zero), kn_dtype_of(c)), kn_cast(kn_lt(c, zero), kn_dtype_of(c)));
    kn_tensor *step = kn_add(sign, kn_scale(p->param, p->weight_decay));
    return kn_copy_(m, kn_add(m, kn_scale(away, 1 - beta[1]))) &&
           kn_copy_(p->param, kn_sub(p->param, kn_scale(step, p->lr)));
}

KN_TEST(own, computes_as_the_library_does)
{
    double beta[] = { 0.9, 0.99 };
    kn_optim_group groups[] = { { .pattern = "*.bias", .lr_mul = 0.5, .weight_decay = KN_ZERO } };
    for (int wide = 0; wide < 2; wide++) {
        kn_dtype t = wide ? KN_F64 : KN_F32;
        OWNED_MODULE net a, b;
        build(&a, t);
        build(&b, t);
        OWNED_OPTIM kn_optim *x =
            kn_own_optim(&a, .update = lion, .arg = beta, .state = { "exp_avg" }, .lr = 0.0625,
                         .weight_decay = 0.5, .groups = groups, .group_count = 1);
        OWNED_OPTIM kn_optim *y =
            kn_lion(&b, .lr = 0.0625, .weight_decay = 0.5, .groups = groups, .group_count = 1);
        for (int step = 0; step < 5; step++) {
            for (int micro = 0; micro < 3; micro++)
                KN_CHECK(backward(&a, t, 3 * step + micro, NULL) &&
                         backward(&b, t, 3 * step + micro, NULL));
            kn_clip_grad_norm(&a, step % 2 ? 0.01 : 0);
            kn_clip_grad_norm(&b, step % 2 ? 0.01 : 0);
            kn_set_lr(x, 0.0625 / (step + 1));
            kn_set_lr(y, 0.0625 / (step + 1));
            KN_CHECK(kn_step(x) && kn_step(y));
            KN_CHECK(apart(&a, &b) < 1e-7, "step %d: %g", step, apart(&a, &b));
        }
        KN_CHECK(strcmp(kn_optim_state_name(x, 0), "exp_avg") == 0 && !kn_optim_state_name(x, 1));
        KN_CHECK(kn_numel(kn_optim_state(x, 0, "exp_avg")) == 15 && kn_optim_steps(x) == 5);
    }
    KN_CHECK_OK();
}

typedef struct seen {
    int64_t steps[4];
    int parts;
    bool taped;
} seen;

static bool look(const kn_optim_part *p, void *arg)
{
    seen *s = arg;
    bool state = p->state[0] && p->state[1] && kn_item(kn_amax(p->state[1], 0, NULL, false)) == 0;
    KN_CHECK(state && kn_ndim(p->param) == 1 && kn_numel(p->grad) == kn_numel(p->param));
    KN_CHECK(!strcmp(p->name, "fc.weight") || !strcmp(p->name, "fc.bias"), "%s", p->name);
    s->taped |= kn_grad_mode();
    s->steps[s->parts++ / 2] = p->step;
    return kn_copy_(p->param, kn_sub(p->param, kn_scale(p->grad, p->lr)));
}

/* With a scaler, an update sees gradients without the scale, and no step that was skipped. */
KN_TEST(own, under_a_scaler)
{
    OWNED_MODULE net a, b;
    seen s = { 0 };
    build(&a, KN_F32);
    build(&b, KN_F32);
    OWNED_OPTIM kn_optim *x =
        kn_own_optim(&a, .update = look, .arg = &s, .state = { "one", "two" }, .lr = 0.5);
    OWNED_OPTIM kn_optim *y = kn_sgd(&b, .lr = 0.5);
    OWNED_SCALER kn_scaler *scaler = kn_scaler_new(&a, .init_scale = 1024);
    for (int step = 0; step < 3; step++) {
        KN_CHECK(backward(&a, KN_F32, step, scaler));
        if (step > 0)
            KN_CHECK(backward(&b, KN_F32, step, NULL) && kn_step(y));
        else
            KN_CHECK(kn_fill_(kn_grad(kn_module_param(&a, "fc.bias")), INFINITY));
        KN_CHECK(kn_scaler_step(scaler, x));
    }
    KN_CHECK(s.parts == 4 && s.steps[0] == 1 && s.steps[1] == 2 && !s.taped);
    KN_CHECK(kn_optim_steps(x) == 2 && apart(&a, &b) < 1e-7);
}

static bool refuses(const kn_optim_part *p, void *arg)
{
    return p && arg && false;
}

static bool steps_again(const kn_optim_part *p, void *arg)
{
    return p && kn_step(*(kn_optim **)arg);
}

KN_TEST(own, bad_use)
{
    OWNED_MODULE net m;
    build(&m, KN_F32);
    REFUSED(kn_own_optim(&m, .lr = 1), ".update is NULL");
    REFUSED(kn_own_optim(&m, .update = lion), ".lr is 0; it is required");
    REFUSED(kn_own_optim(&m, .update = lion, .lr = 1, .state = { "a", "a" }),
            "both states are called 'a'");
    REFUSED(kn_own_optim(&m, .update = lion, .lr = 1, .state = { "a/b" }),
            "'a/b' can't name a state");
    OWNED_OPTIM kn_optim *o = kn_own_optim(&m, .update = refuses, .lr = 1, .name = "stubborn");
    KN_CHECK(o && backward(&m, KN_F32, 1, NULL) && !kn_step(o));
    KN_CHECK_ERROR("stubborn: .update returned false for 'fc.weight'");
    kn_optim_free(o);
    o = kn_own_optim(&m, .update = steps_again, .arg = &o, .lr = 1);
    KN_CHECK(o && !kn_step(o));
    KN_CHECK_ERROR("takes a step of its own optimizer");
}

/* ---- what was freed -------------------------------------------------------------------------- */

KN_TEST(own, calls_after_the_end_are_errors)
{
    kn_linear l = { 0 }, other = { 0 };
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2) && kn_linear_init(&other, NULL, NULL, 2, 2));
    kn_optim *gone = kn_sgd(&l, .lr = 0.1), *alone = kn_sgd(&l, .lr = 0.1);
    kn_optim_free(gone);
    REFUSED(kn_step(gone), "kn_step: the optimizer was freed; make a new optimizer");
    kn_set_lr(gone, 1);
    KN_CHECK_ERROR("kn_set_lr: the optimizer was freed");
    KN_CHECK(kn_lr(gone) == 0 && !kn_ok());
    kn_clear_error();
    kn_optim_free(gone);
    KN_CHECK_ERROR("kn_optim_free: the optimizer was freed already");
    kn_optim *second = kn_sgd(&l, .lr = 0.1), *others = kn_sgd(&other, .lr = 0.1);
    kn_module_free(&l);
    REFUSED(kn_step(alone), "kn_step: the module of the optimizer was freed");
    KN_CHECK(!kn_optim_module(alone) && !kn_ok());
    kn_clear_error();
    KN_CHECK(!kn_optim_module(second) && !kn_ok());
    kn_clear_error();
    KN_CHECK(kn_optim_module(others) == &other.base && kn_ok(), "another module lives");
    kn_optim_free(alone);
    kn_optim_free(second);
    kn_module_free(&other);
    kn_optim_free(others);
    KN_CHECK_OK();
}
