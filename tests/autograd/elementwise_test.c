/* tests/autograd/elementwise_test.c: elementwise operations at their special points, operations on
 * masks, and bad options. Gradients of all kinds by differences: ops_test.c. */
#include "autograd/ops.h"
#include "tests/owned.h"

static kn_tensor *vector_of(kn_dtype t, int64_t n, const double *v)
{
    return kn_cast(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(n)), t);
}
#define VECTOR(t, ...)                                                                             \
    vector_of(t, (int64_t)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)),                    \
              (double[]){ __VA_ARGS__ })

static void fetch(kn_tensor *t, double *v)
{
    kn_tensor *d = t ? kn_cast(kn_detach(t), KN_F64) : NULL;
    KN_CHECK(d && kn_to_host(d, v, (size_t)kn_numel(d) * sizeof *v));
}

/* The elements of t are want, NaN where it is. */
static void check_values(const char *what, kn_tensor *t, int64_t n, const double *want)
{
    double got[64];
    KN_CHECK(t && kn_numel(t) == n && n <= 64, "%s: %s", what, kn_error() ? kn_error() : "size");
    fetch(t, got);
    for (int64_t i = 0; i < n; i++)
        KN_CHECK(isnan(want[i]) ? isnan(got[i])
                                : got[i] == want[i] && signbit(got[i]) == signbit(want[i]),
                 "%s[%lld] is %.9g, not %.9g", what, (long long)i, got[i], want[i]);
}
#define CHECK_VALUES(t, ...)                                                                       \
    check_values(#t, t, (int64_t)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)),             \
                 (double[]){ __VA_ARGS__ })

static kn_tensor *gradient(kn_tensor *x, kn_tensor *y)
{
    kn_clear_grad(x);
    kn_backward(y, .grad = y ? kn_ones(y->dtype, KN_CPU, y->ndim, y->shape) : NULL);
    KN_CHECK_OK();
    return kn_grad(x);
}

static const kn_dtype floats[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };

KN_TEST(elementwise, steps_at_the_middle_and_at_the_ends)
{
    for (int i = 0; i < 4; i++) {
        IN_SCOPE;
        kn_tensor *x = VECTOR(floats[i], -2.5, -1.5, -0.25, -0.0, 0.5, 1.5, 2.5, 3, INFINITY, NAN);
        CHECK_VALUES(kn_round(x), -2, -2, -0.0, -0.0, 0, 2, 2, 3, INFINITY, NAN);
        CHECK_VALUES(kn_floor(x), -3, -2, -1, -0.0, 0, 1, 2, 3, INFINITY, NAN);
        CHECK_VALUES(kn_ceil(x), -2, -1, -0.0, -0.0, 1, 2, 3, 3, INFINITY, NAN);
        CHECK_VALUES(kn_square(x), 6.25, 2.25, 0.0625, 0, 0.25, 2.25, 6.25, 9, INFINITY, NAN);
        kn_require_grad(x, true);
        CHECK_VALUES(gradient(x, kn_add(kn_add(kn_round(x), kn_sign(x)), kn_floor(x))), 0, 0, 0, 0,
                     0, 0, 0, 0, 0, 0);
    }
    kn_tensor *big = VECTOR(KN_F32, 8388609, -16777214, 0.49999997, 4194303.5);
    CHECK_VALUES(kn_round(big), 8388609, -16777214, 0, 4194304);
    CHECK_VALUES(kn_floor(big), 8388609, -16777214, 0, 4194303);
    kn_tensor *whole = VECTOR(KN_I64, -3, 0, 7);
    CHECK_VALUES(kn_sign(whole), -1, 0, 1);
    CHECK_VALUES(kn_floor(whole), -3, 0, 7);
    CHECK_VALUES(kn_square(whole), 9, 0, 49);
    KN_CHECK(kn_dtype_of(kn_square(whole)) == KN_I64);
}

/* The bounds themselves: kn_clamp passes the gradient there, kn_hardtanh doesn't. */
KN_TEST(elementwise, gradients_at_the_corners)
{
    for (int i = 0; i < 4; i++) {
        IN_SCOPE;
        kn_tensor *x = kn_require_grad(VECTOR(floats[i], -1, -0.5, 0, 0.5, 1, 2), true);
        CHECK_VALUES(gradient(x, kn_clamp(x, -1, 1)), 1, 1, 1, 1, 1, 0);
        CHECK_VALUES(gradient(x, kn_hardtanh(x)), 0, 1, 1, 1, 0, 0);
        CHECK_VALUES(gradient(x, kn_hardtanh(x, .low = KN_ZERO, .high = 0.3)), 0, 0, 0, 0, 0, 0);
        CHECK_VALUES(gradient(x, kn_relu6(kn_scale(x, 6))), 0, 0, 0, 6, 0, 0);
        CHECK_VALUES(gradient(x, kn_relu_squared(x)), 0, 0, 0, 1, 2, 4);
        CHECK_VALUES(kn_relu_squared(x), 0, 0, 0, 0.25, 1, 4);
        CHECK_VALUES(gradient(x, kn_leaky_relu(x, .slope = 0.25)), 0.25, 0.25, 0.25, 1, 1, 1);
        CHECK_VALUES(gradient(x, kn_leaky_relu(x, .slope = KN_ZERO)), 0, 0, 0, 1, 1, 1);
        CHECK_VALUES(gradient(x, kn_elu(kn_scale(x, 4096), .alpha = 2)), 0, 0, 8192, 4096, 4096,
                     4096);
        CHECK_VALUES(gradient(x, kn_hardswish(kn_scale(x, 3))), 0, 0, 1.5, 3, 3, 3);
        CHECK_VALUES(kn_hardswish(kn_scale(x, 3)), -0.0, -0.375, 0, 1.125, 3, 6);
        CHECK_VALUES(gradient(x, kn_abs(x)), -1, -1, 0, 1, 1, 1);
        kn_tensor *odd = kn_require_grad(VECTOR(floats[i], NAN, INFINITY, -INFINITY), true);
        kn_tensor *slope = gradient(odd, kn_hardswish(odd));
        CHECK_VALUES(kn_isnan(slope), 1, 0, 0);
        CHECK_VALUES(kn_slice(slope, 0, 1, 3), 1, 0);
    }
}

/* t's elements, each beside another one in memory, so that loops of neighbours don't take them. */
static kn_tensor *apart(kn_tensor *t)
{
    kn_tensor *both = kn_stack((kn_tensor *[]){ t, t }, 2, 1);
    return kn_reshape(kn_slice(both, 1, 0, 1), 1, t->shape);
}

/* A bound is rounded to x's dtype: an element that was clamped lies at it, in any memory. */
KN_TEST(elementwise, bounds_are_numbers_of_the_dtype)
{
    for (int i = 0; i < 8; i++) {
        IN_SCOPE;
        kn_tensor *x = VECTOR(floats[i / 2], -0.7, -0.2, 0.2, 0.3, 0.7);
        x = kn_require_grad(i % 2 ? apart(x) : x, true);
        CHECK_VALUES(gradient(x, kn_clamp(x, -0.2, 0.3)), 0, 1, 1, 1, 0);
        CHECK_VALUES(gradient(x, kn_clamp(x, -0.7, 0.2)), 1, 1, 1, 0, 0);
        CHECK_VALUES(gradient(x, kn_hardtanh(x, .low = -0.2, .high = 0.3)), 0, 0, 1, 0, 0);
        CHECK_VALUES(gradient(x, kn_hardtanh(x, .low = -0.7, .high = 0.7)), 0, 1, 1, 1, 0);
        CHECK_VALUES(gradient(x, kn_clamp(x, -INFINITY, 0.2)), 1, 1, 1, 0, 0);
    }
}

static kn_tensor *over_zero(kn_tensor *x)
{
    return kn_maximum(x, kn_full(x->dtype, KN_CPU, 0, KN_SCALAR));
}

static kn_tensor *from_zero(kn_tensor *x)
{
    return kn_clamp(x, 0, INFINITY);
}

/* The root of 0 has an infinite slope; of what was cut off to 0 nothing comes back. */
KN_TEST(elementwise, no_gradient_where_an_operation_chooses_another)
{
    static kn_tensor *(*const cut[])(kn_tensor *) = { kn_relu,  over_zero,      from_zero,
                                                      kn_relu6, kn_hardsigmoid, kn_floor,
                                                      kn_sign,  kn_relu_squared };
    for (int i = 0; i < 64; i++) {
        IN_SCOPE;
        kn_tensor *x = VECTOR(floats[i / 16], -8, -5), *both = i % 2 ? apart(x) : x;
        kn_require_grad(both, true);
        const int k = i / 2 % 8;
        kn_tensor *y = cut[k](both);
        kn_tensor *dy = kn_full_like(y, INFINITY);
        KN_CHECK(kn_backward(y, .grad = dy));
        check_values("cut", kn_grad(both), 2, (double[]){ 0, 0 });
    }
}

/* A NaN was not cut off: the gradient passes, as in PyTorch. */
KN_TEST(elementwise, relu_of_nan_passes_its_gradient)
{
    for (int i = 0; i < 8; i++) {
        IN_SCOPE;
        kn_tensor *x = VECTOR(floats[i / 2], NAN, 1, -1, 0, -NAN), *both = i % 2 ? apart(x) : x;
        kn_require_grad(both, true);
        kn_tensor *y = kn_relu(both);
        KN_CHECK(kn_backward(y, .grad = kn_full_like(y, 3)));
        check_values("relu", kn_grad(both), 5, (double[]){ 3, 3, 0, 0, 3 });
    }
}

KN_TEST(elementwise, slopes_far_from_zero_are_0_and_1)
{
    static kn_tensor *(*const gates[])(kn_tensor *) = { kn_gelu_tanh, kn_gelu, kn_silu, kn_mish };
    for (int i = 0; i < 32; i++) {
        IN_SCOPE;
        const kn_dtype t = floats[i / 8];
        const double far = t == KN_F16 ? 6e4 : 1e36;
        kn_tensor *x = VECTOR(t, -INFINITY, -far, -2000, 2000, far, INFINITY);
        double d[6];
        x = kn_require_grad(i % 2 ? apart(x) : x, true);
        fetch(gradient(x, gates[i / 2 % 4](x)), d);
        for (int k = 0; k < 6; k++)
            KN_CHECK(fabs(d[k] - (k > 2)) < 1e-30, "gate %d of %s: slope %d is %g", i / 2 % 4,
                     kn_dtype_name(t), k, d[k]);
    }
}

KN_TEST(elementwise, softplus_far_from_zero)
{
    kn_tensor *x = kn_require_grad(VECTOR(KN_F32, -1000, -50, 0, 1, 30, 1000), true);
    double y[6];
    fetch(kn_softplus(x), y);
    KN_CHECK(y[0] == 0 && fabs(y[1] / exp(-50) - 1) < 1e-5 && fabs(y[2] - log(2)) < 1e-7 &&
                 fabs(y[3] - log1p(exp(1))) < 1e-6 && y[4] == 30 && y[5] == 1000,
             "%g %g %g %g %g %g", y[0], y[1], y[2], y[3], y[4], y[5]);
    CHECK_VALUES(kn_softplus(VECTOR(KN_F32, 3), .threshold = 2), 3);
    CHECK_VALUES(kn_softplus(VECTOR(KN_F32, 3), .beta = 2, .threshold = 5.5), 3);
    x = kn_require_grad(VECTOR(KN_F32, -1000, 0, 1, 30, 1000), true);
    CHECK_VALUES(gradient(x, kn_softplus(x, .threshold = KN_ZERO)), 0, 0.5, 1, 1, 1);
    CHECK_VALUES(kn_logsigmoid(VECTOR(KN_F32, -1000, 1000, NAN)), -1000, -0.0, NAN);
}

KN_TEST(elementwise, small_arguments_keep_their_digits)
{
    static const double x[] = { 1e-7, -1e-7, 3e-5, -2e-3, 0.4, -0.6, 1.2, 20, 80 };
    for (int i = 0; i < 9; i++) {
        IN_SCOPE;
        const double v = (double)(float)x[i];
        const double e = kn_item(kn_expm1(VECTOR(KN_F32, x[i])));
        const double l = kn_item(kn_log1p(VECTOR(KN_F32, x[i])));
        const double f = kn_item(kn_erf(VECTOR(KN_F32, x[i])));
        KN_CHECK(fabs(e / expm1(v) - 1) < 5e-7, "expm1(%g) is %.9g, not %.9g", v, e, expm1(v));
        KN_CHECK(fabs(l / log1p(v) - 1) < 5e-7, "log1p(%g) is %.9g, not %.9g", v, l, log1p(v));
        KN_CHECK(fabs(f / erf(v) - 1) < 5e-7, "erf(%g) is %.9g, not %.9g", v, f, erf(v));
    }
    CHECK_VALUES(kn_log1p(VECTOR(KN_F32, -1, -2, INFINITY)), -INFINITY, NAN, INFINITY);
    CHECK_VALUES(kn_expm1(VECTOR(KN_F32, -INFINITY, INFINITY, 100)), -1, INFINITY, INFINITY);
}

KN_TEST(elementwise, lerp_is_exact_at_its_ends_and_between_equals)
{
    for (int i = 0; i < 4; i++) {
        IN_SCOPE;
        kn_tensor *a = VECTOR(floats[i], 1e4, -3, 0.1, 7), *b = VECTOR(floats[i], 1, 5, 0.1, 7);
        double from[4], to[4], same[2];
        fetch(a, from);
        fetch(b, to);
        check_values("lerp at 0", kn_lerp(a, b, 0), 4, from);
        check_values("lerp at 1", kn_lerp(a, b, 1), 4, to);
        kn_tensor *y = kn_lerp(a, b, 0.001);
        fetch(kn_slice(y, 0, 2, 4), same);
        KN_CHECK(same[0] == from[2] && same[1] == from[3], "equals give %g and %g", same[0],
                 same[1]);
    }
    kn_tensor *a = kn_require_grad(VECTOR(KN_F32, 1, 2), true), *b = VECTOR(KN_F32, 5, 10);
    CHECK_VALUES(kn_lerp(a, b, 0.25), 2, 4);
    CHECK_VALUES(kn_lerp(a, b, 0.75), 4, 8);
    CHECK_VALUES(gradient(a, kn_lerp(a, b, 0.25)), 0.75, 0.75);
    CHECK_VALUES(kn_add_scaled(b, a, -2), 3, 6);
    CHECK_VALUES(gradient(a, kn_add_scaled(b, a, -2)), -2, -2);
}

KN_TEST(elementwise, gradients_of_a_power_at_zero)
{
    kn_tensor *a = kn_require_grad(VECTOR(KN_F32, 0, 0, 0, 2, -2, -2), true);
    kn_tensor *b = kn_require_grad(VECTOR(KN_F32, 0, 2, 1, 0, 2, 3), true);
    CHECK_VALUES(kn_pow_tensor(a, b), 1, 0, 0, 1, 4, -8);
    CHECK_VALUES(gradient(a, kn_pow_tensor(a, b)), 0, 0, 1, 0, -4, 12);
    double db[6];
    fetch(gradient(b, kn_pow_tensor(a, b)), db);
    KN_CHECK(db[0] == 0 && db[1] == 0 && db[2] == 0 && fabs(db[3] - log(2)) < 1e-6 &&
                 isnan(db[4]) && isnan(db[5]),
             "%g %g %g %g %g %g", db[0], db[1], db[2], db[3], db[4], db[5]);
    kn_tensor *base = kn_full(KN_F32, KN_CPU, 3, KN_SCALAR);
    CHECK_VALUES(kn_pow_tensor(base, kn_detach(b)), 1, 9, 3, 1, 9, 27);
}

/* Of the origin, which has no angle, 0 as in PyTorch. */
KN_TEST(elementwise, gradients_of_an_angle)
{
    IN_SCOPE;
    kn_tensor *a = kn_require_grad(VECTOR(KN_F32, 0, -0.0, 1e30, 0), true);
    kn_tensor *b = kn_require_grad(VECTOR(KN_F32, 0, 0, 1e30, 2), true);
    CHECK_VALUES(gradient(a, kn_atan2(a, b)), 0, 0, 0, 0.5);
    CHECK_VALUES(gradient(b, kn_atan2(a, b)), -0.0, 0, -0.0, -0.0);
}

KN_TEST(elementwise, logic_and_masks)
{
    bool p[4] = { true, true, false, false }, q[4] = { true, false, true, false };
    kn_tensor *a = kn_from(KN_BOOL, KN_CPU, p, KN_SHAPE(4));
    kn_tensor *b = kn_from(KN_BOOL, KN_CPU, q, KN_SHAPE(4));
    CHECK_VALUES(kn_logical_and(a, b), 1, 0, 0, 0);
    CHECK_VALUES(kn_logical_or(a, b), 1, 1, 1, 0);
    CHECK_VALUES(kn_logical_xor(a, b), 0, 1, 1, 0);
    CHECK_VALUES(kn_logical_not(a), 0, 0, 1, 1);
    CHECK_VALUES(kn_logical_and(kn_reshape(kn_slice(a, 0, 0, 1), KN_SHAPE(1, 1)), b), 1, 0, 1, 0);
    CHECK_VALUES(kn_logical_not(kn_transpose(kn_reshape(b, KN_SHAPE(2, 2)), 0, 1)), 0, 0, 1, 1);
    for (int i = 0; i < 4; i++) {
        kn_tensor *x = kn_require_grad(VECTOR(floats[i], 1, -INFINITY, NAN, INFINITY, 6e4), true);
        CHECK_VALUES(kn_isnan(x), 0, 0, 1, 0, 0);
        CHECK_VALUES(kn_isinf(x), 0, 1, 0, 1, 0);
        CHECK_VALUES(kn_isfinite(x), 1, 0, 0, 0, 1);
        KN_CHECK(kn_dtype_of(kn_isinf(x)) == KN_BOOL && !kn_requires_grad(kn_isinf(x)) &&
                 kn_grad_mode());
    }
    kn_tensor *whole = VECTOR(KN_I32, 1, -2);
    CHECK_VALUES(kn_isnan(whole), 0, 0);
    CHECK_VALUES(kn_isinf(whole), 0, 0);
    CHECK_VALUES(kn_isfinite(whole), 1, 1);
}

KN_TEST(elementwise, masked_fill_gives_no_gradient_where_it_fills)
{
    bool m[2] = { true, false };
    kn_tensor *mask = kn_from(KN_BOOL, KN_CPU, m, KN_SHAPE(2, 1));
    kn_tensor *x =
        kn_require_grad(kn_reshape(VECTOR(KN_F32, 1, 2, 3, 4, 5, 6), KN_SHAPE(2, 3)), true);
    CHECK_VALUES(kn_masked_fill(x, mask, -INFINITY), -INFINITY, -INFINITY, -INFINITY, 4, 5, 6);
    CHECK_VALUES(gradient(x, kn_masked_fill(x, mask, 9)), 0, 0, 0, 1, 1, 1);
    kn_tensor *whole = VECTOR(KN_I64, 4, 5);
    CHECK_VALUES(kn_masked_fill(whole, kn_reshape(mask, KN_SHAPE(2)), -100), -100, 5);
    REFUSED(kn_masked_fill(whole, kn_reshape(mask, KN_SHAPE(2)), 0.5),
            "masked_fill: x is i64[2], which can't hold 0.5");
    REFUSED(kn_masked_fill(x, x, 0),
            "masked_fill: needs a bool mask whose shape broadcasts with x; x is f32[2,3]");
    REFUSED(kn_masked_fill(x, kn_zeros(KN_BOOL, KN_META, KN_SHAPE(2, 3)), 0),
            "masked_fill: x f32[2,3] is on cpu, mask bool[2,3] on meta");
}

/* Shapes, order of memory and dtype without values, and of nothing. */
KN_TEST(elementwise, on_meta_and_of_nothing)
{
    static const kn_device devices[] = { KN_META, KN_CPU };
    for (int i = 0; i < 2; i++) {
        kn_tensor *x = kn_zeros(KN_BF16, devices[i], KN_SHAPE(i ? 0 : 2, 3, 4, 5));
        kn_tensor *m = kn_isfinite(x), *last = kn_channels_last(x);
        kn_tensor *all[] = { kn_mish(last), kn_softplus(last), kn_masked_fill(last, m, 1),
                             kn_pow_tensor(last, last), kn_lerp(last, last, 0.5) };
        KN_CHECK(kn_ok() && m->dtype == KN_BOOL);
        for (int k = 0; k < 5; k++)
            KN_CHECK(all[k] && all[k]->dtype == KN_BF16 && kn_numel(all[k]) == (i ? 0 : 120) &&
                         (i || kn_is_channels_last(all[k])),
                     "operation %d", k);
        KN_CHECK(kn_logical_not(m)->dtype == KN_BOOL && kn_logical_xor(m, m)->ndim == 4);
    }
}

KN_TEST(elementwise, not_a_number_becomes_one)
{
    static const double most[] = { 0x1.fffffep127, 0x1.fep127, 65504, 0x1.fffffffffffffp1023 };
    for (int i = 0; i < 4; i++) {
        IN_SCOPE;
        kn_tensor *x = VECTOR(floats[i], NAN, INFINITY, -INFINITY, 2);
        CHECK_VALUES(kn_nan_to_num(x), 0, most[i], -most[i], 2);
        kn_require_grad(x, true);
        kn_tensor *y = kn_nan_to_num(x, .nan = -1, .posinf = KN_ZERO, .neginf = 3);
        CHECK_VALUES(y, -1, 0, 3, 2);
        CHECK_VALUES(gradient(x, y), 0, 0, 0, 1);
    }
}

KN_TEST(elementwise, bends_and_slopes_of_channels)
{
    IN_SCOPE;
    kn_tensor *x = VECTOR(KN_F32, -2, -0.5, 0, 0.5, 2, NAN), *w = VECTOR(KN_F32, 0.25);
    kn_require_grad(x, true);
    kn_require_grad(w, true);
    CHECK_VALUES(kn_hardshrink(x), -2, 0, 0, 0, 2, NAN);
    CHECK_VALUES(kn_softshrink(x, .lambda = KN_ZERO), -2, -0.5, 0, 0.5, 2, NAN);
    CHECK_VALUES(gradient(x, kn_softshrink(x)), 1, 0, 0, 0, 1, 1);
    CHECK_VALUES(gradient(x, kn_prelu(x, w)), 0.25, 0.25, 0.25, 1, 1, 0.25);
    kn_tensor *one = VECTOR(KN_F64, 1);
    kn_require_grad(one, true);
    KN_CHECK(fabs(kn_item(gradient(one, kn_digamma(one))) - 1.6449340668482264) < 4e-15, "pi^2/6");
    CHECK_VALUES(kn_frac(VECTOR(KN_F64, -1.5, 2, 2.25)), -0.5, 0, 0.25);
    CHECK_VALUES(kn_floor_divide(VECTOR(KN_F64, -7, 7, 1, -1, 0), VECTOR(KN_F64, 2, -2, 0, 0, -1)),
                 -4, -4, INFINITY, -INFINITY, -0.0);
    CHECK_VALUES(kn_remainder(VECTOR(KN_U8, 7, 200, 7), VECTOR(KN_U8, 2, 150, 0)), 1, 50, 0);
}

KN_TEST(elementwise, bad_options_and_dtypes)
{
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2)),
              *i = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2));
    REFUSED(kn_softplus(x, .beta = -1), "softplus: .beta is -1 and should be above 0");
    REFUSED(kn_softplus(x, .beta = NAN), "softplus: .beta");
    REFUSED(kn_leaky_relu(x, .slope = INFINITY), "leaky_relu: .slope is inf; it should be finite");
    REFUSED(kn_hardtanh(x, .low = 2), "hardtanh: .low 2 is above .high 1");
    REFUSED(kn_celu(x, .alpha = KN_ZERO), "celu: .alpha is 0, but x is divided by it");
    REFUSED(kn_hardshrink(x, .lambda = -1), "hardshrink: .lambda is -1 and should be at least 0");
    REFUSED(kn_remainder(kn_ne(x, x), kn_ne(x, x)), "remainder: bool[2] holds bools, no numbers");
    REFUSED(kn_prelu(x, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2))),
            "prelu: needs a float x[N,C,...] and w[C], w[1] or w[] of its dtype; got x f32[2], w "
            "f32[2]");
    REFUSED(kn_prelu(x, NULL), "prelu");
    REFUSED(kn_nan_to_num(i), "nan_to_num: needs a float tensor, got i64");
    REFUSED(kn_nan_to_num(NULL), "nan_to_num");
    REFUSED(kn_lerp(x, x, NAN), "lerp: the weight nan should be finite");
    REFUSED(kn_add_scaled(i, i, 0.5), "whose integers can't be computed with 0.5");
    REFUSED(kn_gt_scalar(i, 0.5),
            "gt_scalar: x is i64[2], whose integers can't be computed with 0.5");
    REFUSED(kn_eq_scalar(NULL, 0), "eq_scalar");
    REFUSED(kn_pow_tensor(i, i), "pow_tensor: needs a float tensor, got i64");
    REFUSED(kn_logical_and(i, NULL), "logical_and");
    REFUSED(kn_logical_not(NULL), "logical_not");
    REFUSED(kn_isnan(NULL), "isnan");
    REFUSED(kn_hardtanh(i, .low = 0.5), "hardtanh: x is i64[2], whose integers");
    REFUSED(kn_relu6(NULL), "relu6");
    REFUSED(kn_scale(NULL, 2), "scale");
    REFUSED(kn_add_scalar(NULL, 2), "add_scalar");
    REFUSED(kn_clamp(x, NAN, 1), "clamp: the bounds are nan and 1; NaN is none");
}

KN_TEST(elementwise, integers_take_whole_numbers)
{
    kn_tensor *x = VECTOR(KN_I64, -3, 0, 7);
    CHECK_VALUES(kn_scale(x, -2), 6, 0, -14);
    CHECK_VALUES(kn_add_scalar(x, 1), -2, 1, 8);
    CHECK_VALUES(kn_clamp(x, -INFINITY, 1), -3, 0, 1);
    REFUSED(kn_scale(x, 0.5),
            "scale: x is i64[3], whose integers can't be computed with 0.5; kn_cast it");
    REFUSED(kn_scale(x, 1e19), "scale: x is i64[3], whose integers can't be computed with 1e+19");
    REFUSED(kn_add_scalar(x, NAN),
            "add_scalar: x is i64[3], whose integers can't be computed with nan");
    REFUSED(kn_add_scalar(x, INFINITY),
            "add_scalar: x is i64[3], whose integers can't be computed with inf");
    REFUSED(kn_clamp(kn_ne(x, x), 0.5, 1),
            "clamp: x is bool[3], whose integers can't be computed with 0.5");
    REFUSED(kn_scale_(x, 1e19), "scale_: the factor of integers is 1e+19, which no i64 can be");
}
