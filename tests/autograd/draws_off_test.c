/* tests/autograd/draws_off_test.c: draws with grad mode off: they go on over calls, backwards and
 * steps, begin again with their seed, and leave training's alone; draws at a place of the program's
 * own. */
#include "autograd/autograd_internal.h"
#include "nn/layers.h"
#include "tests/autograd/expect.h"
#include "tests/owned.h"

static bool equal(kn_tensor *a, kn_tensor *b)
{
    kn_tensor *differ = sum_of(kn_ne(a, b));
    KN_CHECK(differ);
    return kn_item(differ) == 0;
}

static kn_tensor *noise_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_mul(x, kn_add(kn_randn_like(x), kn_dropout(x, 0.5)));
}

static kn_values noise_of(kn_function_run *run, kn_values in)
{
    (void)run;
    return KN_VALUES(kn_add(in.v[0], kn_randn_like(in.v[0])));
}

/* The draws: all kinds bare, in a call of a module, in a function of one's own, dropout. */
static kn_tensor *drawn_by(int way, kn_module *m)
{
    static const kn_function noise = { .name = "noise", .forward = noise_of };
    kn_tensor *x = kn_ones(KN_F64, KN_CPU, KN_SHAPE(4, 500)), *half = kn_scale(x, 0.5);
    switch (way) {
    case 0:
        return kn_rand_like(x);
    case 1:
        return kn_randn_like(x);
    case 2:
        return kn_randint_like(x, 0, 1 << 20);
    case 3:
        return kn_bernoulli(half);
    case 4:
        return kn_cast(kn_multinomial(x, 500, true), KN_F64);
    case 5:
        return kn_cast(kn_multinomial(x, 500, false), KN_F64);
    case 6:
        return kn_dropout(x, 0.5);
    case 7:
        return kn_function_call(&noise, x);
    default:
        return kn_call(m, x);
    }
}

enum { WAYS = 9 };

/* How many of n draws, one way after another, are equal to one before of the same way. */
static int repeats(kn_module *m, kn_tensor **drawn, int n)
{
    int equals = 0;
    for (int i = 0; i < n; i++) {
        drawn[i] = drawn_by(i % WAYS, m);
        for (int k = i - WAYS; k >= 0; k -= WAYS)
            equals += equal(drawn[i], drawn[k]);
    }
    return equals;
}

/* They go on, over backwards and steps too; the same seed or step begins them again. */
KN_TEST(draws_off, go_on)
{
    OWNED_MODULE kn_module m = { 0 };
    kn_tensor *drawn[8 * WAYS], *again[2 * WAYS];
    KN_CHECK(kn_module_init(&m, noise_forward));
    kn_seed(3);
    kn_set_step(0);
    kn_set_grad_mode(false);
    KN_CHECK(repeats(&m, drawn, 2 * WAYS) == 0, "without a step");
    kn_set_grad_mode(true);
    kn_tensor *w = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(3)), true);
    KN_CHECK(kn_backward(sum_of(w)));
    kn_set_grad_mode(false);
    KN_CHECK(repeats(&m, drawn + 2 * WAYS, 2 * WAYS) == 0, "after a backward");
    int64_t seen = kn_steps_seen();
    kn_step_taken(&seen);
    KN_CHECK(repeats(&m, drawn + 4 * WAYS, 2 * WAYS) == 0, "after a step");
    kn_step_taken(&seen);
    KN_CHECK(repeats(&m, drawn + 6 * WAYS, 2 * WAYS) == 0, "after another");
    for (int i = 0; i < 8 * WAYS; i++)
        for (int k = i % WAYS; k < i; k += WAYS)
            KN_CHECK(!equal(drawn[i], drawn[k]), "draw %d is draw %d", i, k);
    for (int seeds = 0; seeds < 2; seeds++) {
        seeds ? kn_seed(3) : kn_set_step(2);
        repeats(&m, again, 2 * WAYS);
        for (int i = 0; i < 2 * WAYS; i++)
            KN_CHECK(equal(again[i], drawn[6 * WAYS + i]), "%s, draw %d is another",
                     seeds ? "seed" : "step", i);
    }
    kn_set_grad_mode(true);
}

/* The sum of independent draws has their deviations' root, not their sum. */
KN_TEST(draws_off, are_independent)
{
    kn_tensor *x = kn_zeros(KN_F64, KN_CPU, KN_SHAPE(4000));
    kn_set_grad_mode(false);
    for (int i = 0; i < 100; i++)
        x = kn_add(x, kn_randn_like(x));
    const double deviation = sqrt(kn_item(mean_of(kn_square(x))));
    KN_CHECK(deviation > 9.5 && deviation < 10.5, "%g", deviation);
    kn_set_grad_mode(true);
}

static kn_values noise_gradient(kn_function_run *run, kn_values dout)
{
    (void)run;
    return KN_VALUES(kn_mul(dout.v[0], kn_randn_like(dout.v[0])));
}

static kn_tensor *noisy(kn_tensor *g, void *arg)
{
    (void)arg;
    return kn_add(g, kn_randn_like(g));
}

/* The gradient of a step that draws wherever training may: in forward and backward, in calls and
 * outside of them. */
static kn_tensor *gradient_of_draws(kn_module *m)
{
    static const kn_function both = { .name = "both",
                                      .forward = noise_of,
                                      .backward = noise_gradient };
    kn_tensor *w = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(64)), true);
    kn_tensor *y = kn_mul(kn_dropout(w, 0.3), kn_call(m, w));
    for (int i = 0; i < 2; i++)
        y = kn_mul(y, kn_function_call(&both, w));
    KN_CHECK(kn_on_grad(w, noisy, NULL) && kn_on_grad(y, noisy, NULL));
    KN_CHECK(kn_backward(sum_of(y)));
    return kn_grad(w);
}

/* An evaluation before a step leaves every draw of training as it is, failed or not. */
KN_TEST(draws_off, leave_training_alone)
{
    kn_tensor *grad[4];
    OWNED_MODULE kn_module m = { 0 };
    KN_CHECK(kn_module_init(&m, noise_forward));
    for (int way = 0; way < 4; way++) {
        kn_tensor *drawn[2 * WAYS];
        kn_set_step(7);
        kn_set_grad_mode(false);
        for (int i = 0; i < way; i++)
            repeats(&m, drawn, i * WAYS);
        if (way == 3) {
            REFUSED(kn_call(&m, kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3))), "i64");
        }
        kn_set_grad_mode(true);
        grad[way] = gradient_of_draws(&m);
        KN_CHECK(equal(grad[way], grad[0]), "way %d", way);
    }
}

/* A call of the library's with grad mode off in training draws other numbers each time. */
KN_TEST(draws_off, in_functions_and_hooks_differ)
{
    kn_tensor *x = kn_require_grad(kn_ones(KN_F64, KN_CPU, KN_SHAPE(64)), true), *y[2];
    static const kn_function noise = { .name = "noise", .forward = noise_of };
    for (int i = 0; i < 2; i++)
        y[i] = kn_function_call(&noise, x);
    KN_CHECK(!equal(y[0], y[1]), "functions");
    kn_tensor *z[] = { kn_scale(x, 1), kn_scale(x, 1) }, *g[2];
    KN_CHECK(kn_on_grad(z[0], noisy, NULL) && kn_on_grad(z[1], noisy, NULL));
    KN_CHECK(kn_grad_of(sum_of(kn_add(z[0], z[1])), z, 2, g));
    KN_CHECK(!equal(g[0], g[1]));
}

/* A call without gradients that fails is made again with its numbers; one that draws nothing
 * doesn't count. */
KN_TEST(draws_off, of_a_call_that_failed_come_again)
{
    kn_tensor *drawn[2], *ones = kn_ones(KN_F64, KN_CPU, KN_SHAPE(64));
    OWNED_MODULE kn_module m = { 0 };
    OWNED_MODULE kn_linear l = { 0 };
    KN_CHECK(kn_module_init(&m, noise_forward) &&
             kn_linear_init(&l, NULL, "l", 64, 2, .dtype = KN_F64));
    kn_set_grad_mode(false);
    for (int fails = 0; fails < 2; fails++) {
        kn_set_step(3);
        if (fails) {
            REFUSED(kn_call(&m, kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3))), "i64");
            KN_CHECK(kn_call(&l, ones));
        }
        drawn[fails] = kn_call(&m, ones);
    }
    KN_CHECK(equal(drawn[0], drawn[1]), "other numbers");
    kn_set_grad_mode(true);
}

/* ---- at a place of the program's own ------------------------------------------------------ */

/* A draw there depends on the number alone, in both modes, and moves nothing on. */
KN_TEST(draws_off, at_a_place_of_their_own)
{
    OWNED_MODULE kn_module m = { 0 };
    kn_tensor *drawn[4][2 * WAYS], *after[2];
    KN_CHECK(kn_module_init(&m, noise_forward));
    for (int way = 0; way < 4; way++) {
        kn_set_step(1);
        kn_set_grad_mode(way & 1);
        if (way & 2)
            kn_randn_like(kn_ones(KN_F64, KN_CPU, KN_SHAPE(3)));
        kn_draws d = kn_draws_begin(5);
        KN_CHECK(repeats(&m, drawn[way], 2 * WAYS) == 0);
        kn_draws_end(d);
        for (int i = 0; i < 2 * WAYS; i++)
            KN_CHECK(equal(drawn[way][i], drawn[0][i]), "way %d, draw %d", way, i);
        d = kn_draws_begin(6);
        KN_CHECK(!equal(drawn_by(1, &m), drawn[0][1]), "another number draws the same");
        kn_draws_end(d);
    }
    for (int with = 0; with < 2; with++) {
        kn_set_step(1);
        kn_draws d = kn_draws_begin(5);
        for (int i = 0; i < with * WAYS; i++)
            drawn_by(i, &m);
        kn_draws_end(d);
        after[with] = drawn_by(1, &m);
    }
    KN_CHECK(equal(after[0], after[1]), "what follows is moved on");
    kn_draws outer = kn_draws_begin(1), inner = kn_draws_begin(2);
    kn_draws_end(outer);
    KN_CHECK_ERROR("kn_draws_end: another place, or a call of a module, began after it");
    kn_draws_end(inner);
    kn_draws_end(outer);
    kn_draws_end((kn_draws){ 0 });
    KN_CHECK_OK();
}
