/* tests/nn/inputs_test.c: inputs of a module that aren't given. */
#include "nn/layers.h"
#include "tests/owned.h"

static kn_values maybe_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)arg;
    kn_tensor *y = kn_mul(in.v[0], kn_module_param(self, "w"));
    return KN_VALUES(in.n > 1 && in.v[1] ? kn_add(y, in.v[1]) : y);
}

KN_TEST(inputs, may_be_missing)
{
    for (int again = 0; again < 2; again++) {
        OWNED_MODULE kn_module m;
        OWNED_MODULE kn_linear one;
        IN_SCOPE;
        KN_CHECK(kn_module_init_n(&m, maybe_forward) &&
                 kn_parameter(&m, "w", KN_F32, KN_CPU, KN_ONES_INIT, 1, (int64_t[]){ 4 }) &&
                 kn_recompute(&m, again) && kn_materialize(&m, KN_CPU, 1));
        kn_tensor *x = kn_require_grad(kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(4)), true);
        kn_values without = kn_call_n(&m, KN_VALUES(x, NULL), NULL, 0);
        kn_values with = kn_call_n(&m, KN_VALUES(x, x), NULL, 0);
        KN_CHECK(without.n == 1 && with.n == 1);
        KN_CHECK(kn_item(sum_of(without.v[0])) == 8 && kn_item(sum_of(with.v[0])) == 16);
        KN_CHECK(kn_backward(sum_of(without.v[0])) && kn_backward(sum_of(with.v[0])));
        KN_CHECK(((float *)kn_data(kn_grad(x)))[3] == 3, "recompute %d", again);
        KN_CHECK(((float *)kn_data(kn_grad(kn_module_param(&m, "w"))))[3] == 4);
        REFUSED(kn_call_n(&m, KN_VALUES(NULL, x), NULL, 0).n,
                "mul: argument 1 is NULL although no error stands");
        KN_CHECK(kn_linear_init(&one, NULL, "", 4, 4));
        REFUSED(kn_call(&one, NULL), "linear");
    }
}

static kn_values twice_forward(kn_module *self, kn_values in, const void *arg)
{
    (void)self, (void)arg;
    return KN_VALUES(in.v[0], in.v[0]);
}

KN_TEST(inputs, one_result_of_several)
{
    OWNED_MODULE kn_module m, two;
    KN_CHECK(kn_module_init_n(&m, maybe_forward) && kn_module_init_n(&two, twice_forward) &&
             kn_parameter(&m, "w", KN_F32, KN_CPU, KN_ONES_INIT, 1, (int64_t[]){ 4 }) &&
             kn_materialize(&m, KN_CPU, 1));
    kn_tensor *x = kn_full(KN_F32, KN_CPU, 2, KN_SHAPE(4));
    kn_tensor *y = kn_call_with(&m, x, x);
    KN_CHECK(y && kn_item(sum_of(y)) == 16);
    y = kn_call_with(&m, x, NULL);
    KN_CHECK(y && kn_item(sum_of(y)) == 8);
    REFUSED(kn_call_with(&two, x), "kn_call: 'twice' returns 2 tensors; use kn_call_n");
    KN_CHECK(!kn_call_with(NULL, x) && !kn_ok());
    kn_clear_error();
}

KN_TEST(inputs, a_forward_before_parameters_have_values)
{
    OWNED_MODULE kn_linear l = { 0 };
    IN_SCOPE;
    KN_CHECK(kn_linear_init(&l, NULL, "l", 4, 4, .device = KN_META));
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 4));
    REFUSED(kn_call(&l, x), "kn_materialize or kn_fsdp_wrap");
    KN_CHECK(kn_materialize(&l, KN_CPU, 1) && kn_call(&l, x));
}
