/* tests/autograd/check_test.c: kn_set_check names the first operation that makes a value that isn't
 * finite, and lets masks of -inf and scaled losses pass. */
#include "autograd/autograd_internal.h"
#include "autograd/function.h"
#include "kernels/context.h"
#include "nn/hooks.h"
#include "nn/nn.h"
#include "tests/owned.h"
#include <math.h>

static kn_tensor *row(kn_dtype t, double a, double b)
{
    kn_tensor *x = kn_from(KN_F64, KN_CPU, (double[]){ a, b }, KN_SHAPE(2));
    return kn_require_grad(kn_cast(x, t), true);
}

KN_TEST(check, names_the_forward)
{
    static const kn_dtype dtypes[] = { KN_F32, KN_F64, KN_BF16, KN_F16 };
    for (int i = 0; i < 4; i++) {
        char want[160];
        kn_tensor *x = row(dtypes[i], 0, -1);
        KN_CHECK(kn_log(x) && kn_ok(), "off");
        kn_set_check(true);
        KN_CHECK(kn_checking() && !kn_log(kn_scale(x, 1)));
        snprintf(want, sizeof want,
                 "forward of 'log' made values that aren't finite: its result %s[2] has 1 NaN and "
                 "1 infinite of 2 values; all inputs were finite",
                 kn_dtype_name(dtypes[i]));
        KN_CHECK_ERROR(want);
        kn_set_check(false);
    }
}

KN_TEST(check, names_the_inputs_that_were_bad)
{
    kn_tensor *x = row(KN_F32, 1, 2), *nan = row(KN_F32, NAN, 2), *inf = row(KN_F32, INFINITY, 2);
    kn_set_check(true);
    REFUSED(kn_mul(x, nan), "'mul'");
    REFUSED(kn_mul(x, nan), "its input 2, f32[2] has 1 NaN of 2 values");
    REFUSED(kn_sub(inf, inf), "its input 1, f32[2] has 1 infinite of 2 values");
    KN_CHECK(kn_add(inf, x) && kn_ok(), "an infinity that came in");
    /* a view in another order */
    kn_tensor *m = kn_reshape(row(KN_F32, 0, 1), 2, (int64_t[]){ 1, 2 });
    REFUSED(kn_log(kn_transpose(m, 0, 1)), "f32[2,1] has 1 infinite");
    /* views of which other parts are bad: further on, and between their elements */
    kn_tensor *zero = kn_zeros(KN_F32, KN_CPU, KN_SCALAR);
    REFUSED(kn_div(kn_slice(nan, 0, 1, 2), zero), "all inputs were finite");
    kn_set_check(false);
    kn_tensor *pairs = kn_from(KN_F32, KN_CPU, (float[]){ 1, NAN, 2, NAN }, KN_SHAPE(2, 2));
    kn_tensor *first = kn_slice(pairs, 1, 0, 1), *last = kn_slice(pairs, 1, 1, 2);
    kn_set_check(true);
    REFUSED(kn_div(first, zero), "all inputs were finite");
    REFUSED(kn_div(last, zero), "its input 1, f32[2,1] has 2 NaN of 2 values");
    kn_set_check(false);
}

/* sqrt'(0) is infinite */
KN_TEST(check, names_the_backward)
{
    kn_set_check(true);
    kn_tensor *x = row(KN_F32, 0, 4);
    kn_place place = kn_place_enter("model.c", 12);
    kn_tensor *y = kn_sqrt(x);
    kn_place_leave(&place);
    KN_CHECK(y && !kn_backward(sum_of(y)));
    KN_CHECK_ERROR(
        "check: backward of 'sqrt' (called at model.c:12) made values that aren't finite: "
        "its gradient of input 1, f32[2] has 1 infinite of 2 values");
    y = kn_sqrt(x);
    REFUSED(kn_backward(sum_of(kn_mul(y, y))), "the gradient that came to it was finite");
    kn_tensor *g = kn_from(KN_F32, KN_CPU, (float[]){ INFINITY, 1 }, KN_SHAPE(2));
    REFUSED(kn_backward(kn_scale(x, 2), .grad = g),
            "its gradient 1, f32[2] has 1 infinite of 2 values, as it came");
    KN_CHECK(!kn_grad(x));
    kn_set_check(false);
    KN_CHECK(kn_backward(sum_of(kn_sqrt(x))) && kn_ok());
}

/* ---- masks ----------------------------------------------------------------------------------- */

KN_TEST(check, masks_are_no_anomaly)
{
    kn_set_check(true);
    kn_tensor *q = kn_require_grad(kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(1, 2, 4, 8)), true);
    kn_tensor *seen = kn_tril(kn_ones(KN_F32, KN_CPU, KN_SHAPE(4, 4)), 0);
    kn_tensor *hidden = kn_eq(seen, kn_zeros(KN_F32, KN_CPU, KN_SCALAR));
    kn_tensor *scores = kn_matmul(q, kn_transpose(q, 2, 3));
    kn_tensor *masked = kn_masked_fill(scores, hidden, -INFINITY);
    KN_CHECK(kn_backward(sum_of(kn_mul(kn_softmax(masked, -1), scores))));
    kn_tensor *mask = kn_masked_fill(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 4)), hidden, -INFINITY);
    KN_CHECK(
        kn_backward(sum_of(kn_softmax(kn_add(kn_matmul(q, kn_transpose(q, 2, 3)), mask), -1))));
    kn_tensor *y = kn_scaled_dot_product_attention(q, q, q, .mask = mask);
    KN_CHECK(y && kn_backward(sum_of(kn_mul(y, y))));
    y = kn_pad(q, KN_PAD_CONSTANT, -INFINITY, 2, (int64_t[]){ 1, 1 });
    KN_CHECK(y && kn_backward(sum_of(kn_max_pool2d(y, .kernel = 2))));
    /* a row that sees nothing: the logarithm of its sum is -inf, its result isn't */
    kn_tensor *none = kn_zeros(KN_BOOL, KN_CPU, KN_SHAPE(4, 4));
    y = kn_scaled_dot_product_attention(q, q, q, .mask = none);
    KN_CHECK(y && kn_ok());
    y = kn_scaled_dot_product_attention(q, q, q, .causal = true);
    KN_CHECK(y && kn_backward(sum_of(kn_mul(y, y))));
    kn_set_check(false);
}

/* ---- functions, modules, no_grad, meta ------------------------------------------------------- */

static kn_values raw_forward(kn_function_run *run, kn_values in)
{
    kn_tensor *y = kn_empty_like(in.v[0]);
    float *p = kn_write_data(y, KN_F32);
    (void)run;
    if (p)
        p[0] = p[1] = in.n > 1 ? 1 : NAN;
    return KN_VALUES(y);
}
static kn_values raw_backward(kn_function_run *run, kn_values dout)
{
    (void)run;
    return KN_VALUES(kn_log(kn_scale(dout.v[0], 0)), NULL);
}

static kn_tensor *log_forward(kn_module *self, kn_tensor *x)
{
    (void)self;
    return kn_log(x);
}

KN_TEST(check, functions_and_modules)
{
    const kn_function raw = { .name = "raw", .forward = raw_forward, .backward = raw_backward };
    kn_set_check(true);
    kn_tensor *x = row(KN_F32, 0, 1);
    REFUSED(kn_function_call(&raw, x),
            "forward of 'raw' made values that aren't finite: its result f32[2] has 2 NaN");
    REFUSED(kn_backward(sum_of(kn_function_call(&raw, x, x))), "backward of 'raw'");
    kn_module root, m;
    kn_module_init(&root, log_forward);
    kn_module_init(&m, log_forward);
    kn_module_add(&root, "part", &m);
    REFUSED(kn_call(&m, x), "forward of 'log'");
    REFUSED(kn_call(&m, x), " in part");
    kn_recompute(&m, true);
    REFUSED(kn_call(&m, x), "forward of 'log'");
    bool mode = kn_set_grad_mode(false);
    REFUSED(kn_log(x), "forward of 'log'");
    kn_set_grad_mode(mode);
    kn_tensor *meta = kn_require_grad(kn_zeros(KN_F32, KN_META, KN_SHAPE(2)), true);
    KN_CHECK(kn_backward(sum_of(kn_log(meta))) && kn_ok(), "no values");
    kn_set_check(false);
    kn_module_free(&root);
}

/* ---- hooks ----------------------------------------------------------------------------------- */

static void spoil(kn_module_event *e, void *arg)
{
    (void)arg;
    e->grad_in.v[0] = kn_log(kn_zeros_like(e->grad_in.v[0]));
}

static kn_tensor *look_at(kn_tensor *g, void *arg)
{
    kn_tensor *d = kn_sub(g, g); /* NaN where g is infinite */
    *(int *)arg += d != NULL;
    return NULL;
}

static void look_around(kn_module_event *e, void *arg)
{
    look_at(e->grad_out.v[0], arg);
}

KN_TEST(check, operations_in_hooks)
{
    OWNED_MODULE kn_module m;
    int looks = 0;
    kn_tensor *x = row(KN_F32, 0, 4), *inf = row(KN_F32, INFINITY, 1);
    kn_module_init(&m, log_forward);
    kn_hook h = kn_module_hook(&m, (kn_module_hooks){ .post_backward = spoil, .name = "spoil" });
    kn_set_check(true);
    REFUSED(kn_backward(sum_of(kn_call(&m, kn_add_scalar(x, 1)))),
            "check: forward of 'log' made values that aren't finite: its result f32[2]");
    REFUSED(kn_backward(sum_of(kn_call(&m, kn_add_scalar(x, 1)))), "post_backward hook 'spoil'");
    kn_module_unhook(&m, h);
    /* gradients of scaled losses aren't judged, so hooks may compute with them */
    kn_module_hook(&m, (kn_module_hooks){ .pre_backward = look_around,
                                          .post_backward = look_around,
                                          .arg = &looks });
    for (int scaled = 1; scaled >= 0; scaled--) {
        kn_tensor *y = kn_call(&m, kn_add_scalar(x, 1));
        if (scaled)
            kn_scaled_by(y, row(KN_F32, 1, 1));
        kn_on_grad(y, look_at, &looks);
        KN_CHECK(kn_backward(y, .grad = inf) == scaled && looks == 3 * scaled);
        KN_CHECK(scaled || strstr(kn_error(), "forward of 'sub'"));
        looks = 0;
        kn_clear_error();
    }
    kn_set_check(false);
}

/* Nor is memory judged that no kernel writes: what was there before is NaN. */
KN_TEST(check, rms_norm_has_no_means)
{
    kn_scope s = kn_scope_begin();
    for (int i = 0; i < 8; i++)
        kn_full(KN_F32, KN_CPU, NAN, KN_SHAPE(4096));
    kn_scope_end(s);
    kn_set_check(true);
    KN_CHECK(kn_rms_norm(kn_ones(KN_F32, KN_CPU, KN_SHAPE(4096, 1)), NULL, 0));
    kn_set_check(false);
}
