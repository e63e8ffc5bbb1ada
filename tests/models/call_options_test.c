/* tests/models/call_options_test.c: options in the calls of all folders: 0 is the default, KN_ZERO
 * a real zero, invalid values are errors. */
#include "knap.h"
#include "tests/kn_test.h"

static kn_tensor *two_rows(void)
{
    return kn_from(KN_F32, KN_CPU, (float[]){ 1, 2, 4, 3, 9, 5 }, KN_SHAPE(2, 3));
}

static bool same(kn_tensor *a, kn_tensor *b)
{
    float x[8], y[8];
    size_t bytes = (size_t)kn_numel(a) * sizeof *x;
    return kn_numel(a) == kn_numel(b) && kn_to_host(a, x, bytes) && kn_to_host(b, y, bytes) &&
           memcmp(x, y, bytes) == 0;
}

KN_TEST(call_options, a_real_zero_can_be_said)
{
    kn_tensor *x = two_rows(), *row = kn_slice(x, 0, 1, 2);
    kn_tensor *to = kn_from(KN_I64, KN_CPU, (int64_t[]){ 0, 2 }, KN_SHAPE(2));
    kn_tensor *only = kn_cross_entropy(row, kn_slice(to, 0, 1, 2));
    KN_CHECK(same(kn_cross_entropy(x, to, .ignore_index = KN_ZERO), only), "0 is ignored");
    KN_CHECK(!same(kn_cross_entropy(x, to), only) && kn_ok(), "nothing is ignored");
    kn_tensor *flat = kn_full(KN_F32, KN_CPU, 1e-4, KN_SHAPE(1, 3));
    KN_CHECK(fabs(kn_item(kn_amax(kn_rms_norm(flat, NULL, KN_ZERO), 0, NULL, false)) - 1) < 1e-6);
    KN_CHECK(kn_item(kn_amax(kn_rms_norm(flat, NULL, 0), 0, NULL, false)) < 0.1);
    kn_tensor *mean = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3)),
              *var = kn_ones(KN_F32, KN_CPU, KN_SHAPE(3));
    KN_CHECK(kn_batch_norm(x, NULL, NULL, mean, var, .training = true, .momentum = KN_ZERO));
    KN_CHECK(same(mean, kn_zeros_like(mean)), "the statistics stay");
    kn_tensor *q = kn_randn(KN_F32, KN_CPU, 1, 1, KN_SHAPE(1, 1, 2, 2)),
              *v = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 1, 2, 2));
    v = kn_mul(v, kn_reshape(kn_arange(KN_F32, KN_CPU, 4), KN_SHAPE(1, 1, 2, 2)));
    kn_tensor *y = kn_scaled_dot_product_attention(q, q, v, .scale = KN_ZERO);
    KN_CHECK(kn_item(kn_slice(kn_reshape(y, KN_SHAPE(4)), 0, 0, 1)) == 1, "the mean of 0 and 2");
}

KN_TEST(call_options, a_seed_of_zero)
{
    kn_linear zero = { 0 }, other = { 0 }, want = { 0 };
    KN_CHECK(kn_linear_init(&zero, NULL, NULL, 2, 3) && kn_linear_init(&other, NULL, NULL, 2, 3));
    KN_CHECK(kn_linear_init(&want, NULL, NULL, 2, 3) && kn_materialize(&want, KN_CPU, 0));
    KN_CHECK(kn_fsdp_wrap(&zero, NULL, .seed = KN_ZERO) && kn_fsdp_wrap(&other, NULL));
    kn_tensor *w = kn_module_param(&want, "weight");
    KN_CHECK(same(kn_module_param(&zero, "weight"), w) &&
             !same(kn_module_param(&other, "weight"), w));
    kn_module_free(&zero);
    kn_module_free(&other);
    kn_module_free(&want);
}

#define REFUSES(call)                                                                              \
    do {                                                                                           \
        (void)(call);                                                                              \
        KN_CHECK(!kn_ok(), "%s: nothing was said", #call);                                         \
        kn_clear_error();                                                                          \
    } while (0)

/* Numbers that are arguments; numbers_test.c has those of options. */
KN_TEST(call_options, what_makes_no_sense_is_refused)
{
    kn_linear l = { 0 };
    kn_self_attention a = { 0 };
    kn_dropout d = { 0 };
    kn_tensor *x = two_rows(), *q = kn_ones(KN_F32, KN_CPU, KN_SHAPE(1, 1, 2, 2));
    const double bad[] = { NAN, INFINITY, -INFINITY, -1 };
    KN_CHECK(kn_linear_init(&l, NULL, NULL, 2, 2));
    kn_optim *o = kn_sgd(&l, .lr = 1);
    for (int i = 0; i < 4; i++) {
        REFUSES(kn_layer_norm(x, NULL, NULL, bad[i]));
        REFUSES(kn_rms_norm(x, NULL, bad[i]));
        REFUSES(kn_dropout(x, bad[i]));
        REFUSES(kn_rope(q, bad[i], 0));
        REFUSES(kn_dropout_init(&d, NULL, NULL, bad[i]));
        REFUSES(kn_set_lr(o, bad[i]));
    }
    kn_optim_free(o);
    kn_module_free(&l);
    REFUSES(kn_self_attention_init(&a, NULL, NULL, 4, 2, .rope_base = 10)); /* without .rope */
    REFUSES(kn_linear_init(&l, NULL, NULL, 2, 2, .weight = KN_UNIFORM_INIT(1, -1)));
    kn_module_free(&l);
}
