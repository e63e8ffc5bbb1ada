/* tests/fsdp/narrow_test.c: parameters and states of bf16 and f16: a step computes in f32 and
 * rounds once, to nearest or at random. */
#include "tests/fsdp/optimizers.h"
#include "knap.h"
#include "tests/owned.h"

enum { ROWS = 32, COLS = 32, N = ROWS * COLS };

/* One matrix, whose gradient the test writes. */
typedef struct matrix {
    kn_module base;
    kn_tensor *weight;
} matrix;

static kn_tensor *matrix_forward(kn_module *self, kn_tensor *x)
{
    return kn_sum(kn_mul(((matrix *)self)->weight, x), 0, NULL, false);
}

static void build(matrix *m, kn_dtype t, kn_initializer init)
{
    kn_module_init(&m->base, matrix_forward);
    m->weight = kn_parameter(m, "weight", t, KN_CPU, init, KN_SHAPE(ROWS, COLS));
    kn_materialize(m, KN_CPU, 7);
    KN_CHECK_OK();
}

/* A step with gradient g in each element. */
static void step_with(matrix *m, kn_optim *o, float g)
{
    float values[N];
    for (int i = 0; i < N; i++)
        values[i] = g;
    IN_SCOPE;
    kn_tensor *x =
        kn_cast(kn_from(KN_F32, KN_CPU, values, KN_SHAPE(ROWS, COLS)), kn_dtype_of(m->weight));
    KN_CHECK(kn_backward(kn_cast(kn_call(m, x), KN_F32)) && kn_step(o));
}

static double average_of(const kn_tensor *t, float *values)
{
    double sum = 0;
    kn_scope s = kn_scope_begin();
    KN_CHECK(kn_to_host(kn_cast(kn_detach((kn_tensor *)t), KN_F32), values, N * sizeof *values));
    kn_scope_end(s);
    for (int i = 0; i < N; i++)
        sum += (double)values[i];
    return sum / N;
}

/* Each optimizer with a rate so small that one step is less than half of a weight's last digit. */
static kn_optim *slow(int kind, matrix *m, double lr, bool at_random)
{
    kn_optim *o = optimizer_make(kind, m, at_random);
    KN_CHECK(o != NULL);
    kn_set_lr(o, lr);
    return o;
}

/* 100 steps: rounded to nearest the weights stay where they are, rounded at random their mean goes
 * where f32's does. */
KN_TEST(narrow, small_steps_come_through_at_random_only)
{
    static const kn_dtype narrow[] = { KN_BF16, KN_F16 };
    float values[N];
    for (int k = 0; k < OPTIMIZER_KINDS * 2; k++) {
        kn_dtype t = narrow[k % 2];
        double lr = k / 2 == OPTIMIZER_MUON ? (k % 2 ? 5e-4 : 5e-3) : k % 2 ? 5e-5 : 5e-4, at[3];
        if (k / 2 == OPTIMIZER_OWN) /* its first steps are four times as long */
            lr /= 4;
        if (k / 2 == OPTIMIZER_MOMENTUM || k / 2 == OPTIMIZER_NESTEROV)
            lr /= 10;
        for (int way = 0; way < 3; way++) { /* f32, nearest, at random */
            matrix m;
            build(&m, way == 0 ? KN_F32 : t, KN_ONES_INIT);
            kn_optim *o = slow(k / 2, &m, lr, way == 2);
            for (int i = 0; i < 100; i++)
                step_with(&m, o, 1);
            at[way] = average_of(m.weight, values);
            kn_optim_free(o);
            kn_module_free(&m);
        }
        KN_CHECK(1 - at[0] > 1e-3, "optimizer %d moved f32 by %g", k / 2, 1 - at[0]);
        KN_CHECK(at[1] == 1, "optimizer %d, %s: to nearest %g", k / 2, kn_dtype_name(t), at[1]);
        KN_CHECK(fabs(at[2] - at[0]) < 0.1 * (1 - at[0]), "optimizer %d, %s: %g, not about %g",
                 k / 2, kn_dtype_name(t), at[2], at[0]);
    }
}

typedef struct mlp {
    kn_module base;
    kn_linear a, b;
} mlp;

static kn_tensor *mlp_forward(kn_module *self, kn_tensor *x)
{
    mlp *m = (mlp *)self;
    return kn_call(&m->b, kn_tanh(kn_call(&m->a, x)));
}

/* The loss of a regression after a number of steps of AdamW in dtype t. */
static double loss_after(int steps, kn_dtype t, bool at_random)
{
    OWNED_MODULE mlp m = { 0 };
    double loss = NAN;
    KN_CHECK(kn_module_init(&m.base, mlp_forward) && kn_module_defaults(&m, .dtype = t) &&
             kn_linear_init(&m.a, &m.base, "a", 8, 32) &&
             kn_linear_init(&m.b, &m.base, "b", 32, 4) && kn_materialize(&m, KN_CPU, 3));
    OWNED_OPTIM kn_optim *o =
        kn_adamw(&m, .lr = 1e-4, .weight_decay = KN_ZERO, .stochastic_rounding = at_random);
    for (int i = 0; i <= steps; i++) {
        IN_SCOPE;
        kn_tensor *x = kn_randn(KN_F32, KN_CPU, 5, (uint64_t)(i % 4), KN_SHAPE(32, 8));
        kn_tensor *y = kn_sin(kn_scale(kn_slice(x, 1, 0, 4), 2));
        kn_tensor *l = kn_mse_loss(kn_cast(kn_call(&m, kn_cast(x, t)), KN_F32), y);
        loss = kn_item(l);
        KN_CHECK(i == steps || (kn_backward(l) && kn_step(o)));
    }
    return loss;
}

/* A training in bf16 comes as far as in f32 where its updates are rounded at random, and stays
 * behind where they are rounded to nearest. */
KN_TEST(narrow, a_training_comes_as_far_as_in_f32_at_random_only)
{
    const double before = loss_after(0, KN_F32, false), full = loss_after(800, KN_F32, false),
                 nearest = loss_after(800, KN_BF16, false), random = loss_after(800, KN_BF16, true);
    KN_CHECK(before - full > 0.1, "f32: from %g to %g", before, full);
    KN_CHECK(before - random > 0.9 * (before - full) && before - nearest < 0.7 * (before - full),
             "from %g to %g in f32, %g to nearest, %g at random", before, full, nearest, random);
}

/* exp_avg_sq moves by 0.001 of what it lacks: less than half of bf16's last digit. */
KN_TEST(narrow, states_are_rounded_at_random_too)
{
    float values[N];
    for (int at_random = 0; at_random < 2; at_random++) {
        OWNED_MODULE matrix m;
        build(&m, KN_BF16, KN_ONES_INIT);
        OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 1e-6, .stochastic_rounding = at_random);
        for (int i = 0; i < 5; i++)
            step_with(&m, o, 1);
        for (int i = 0; i < 1000; i++)
            step_with(&m, o, 0.875f);
        double v = average_of(kn_optim_state(o, 0, "exp_avg_sq"), values);
        double want = 0.875 * 0.875 * (1 - pow(0.999, 1000));
        KN_CHECK((fabs(v - want) < 0.1 * want) == (at_random != 0), "exp_avg_sq %g, not about %g",
                 v, want);
    }
}

/* The bits are a function of seed, step, name and element: a run that is taken up again has them,
 * another seed or step hasn't. */
KN_TEST(narrow, the_bits_repeat)
{
    float got[4][N];
    for (int way = 0; way < 4; way++) { /* as a whole; taken up again; another step; another seed */
        matrix m;
        build(&m, KN_BF16, KN_ONES_INIT);
        kn_seed(way == 3 ? 8 : 7);
        kn_optim *o = kn_adamw(&m, .lr = 1e-4, .stochastic_rounding = true);
        for (int i = 0; i < 6; i++) {
            if (i == 3 && way > 0) {
                kn_state *s = kn_optim_state_dict(o);
                kn_optim_free(o);
                o = kn_adamw(&m, .lr = 1, .stochastic_rounding = true);
                KN_CHECK(s && kn_load_optim_state_dict(o, s));
                kn_state_free(s);
                if (way == 2)
                    kn_optim_set_steps(o, 4);
            }
            step_with(&m, o, 1);
        }
        average_of(m.weight, got[way]);
        kn_optim_free(o);
        kn_module_free(&m);
    }
    KN_CHECK(memcmp(got[0], got[1], sizeof got[0]) == 0, "taken up again");
    KN_CHECK(memcmp(got[0], got[2], sizeof got[0]) != 0, "another step");
    KN_CHECK(memcmp(got[0], got[3], sizeof got[0]) != 0, "another seed");
}

KN_TEST(narrow, wrong_use_is_a_sentence)
{
    OWNED_MODULE matrix m;
    build(&m, KN_F32, KN_ONES_INIT);
    REFUSED(kn_adamw(&m, .lr = 1, .stochastic_rounding = true),
            ".stochastic_rounding is for parameters of bf16 and f16");
}
