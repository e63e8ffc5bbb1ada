/* tests/tensor/update_test.c: arithmetic in place: values in each dtype, views that overlap, what
 * autograd notices, errors. */
#include "autograd/autograd.h"
#include "tests/kn_test.h"

static void check_values(const kn_tensor *t, int n, const double *want)
{
    double got[16];
    kn_tensor *d = kn_zeros(KN_F64, KN_CPU, kn_ndim(t), kn_shape(t));
    KN_CHECK(kn_numel(t) == n && kn_copy_(d, t) && kn_to_host(d, got, (size_t)n * sizeof *got),
             "%s", kn_error() ? kn_error() : "size");
    for (int i = 0; i < n; i++)
        KN_CHECK(got[i] == want[i], "[%d] is %.9g, not %.9g", i, got[i], want[i]);
}
#define CHECK_VALUES(t, ...)                                                                       \
    check_values(t, (int)(sizeof((double[]){ __VA_ARGS__ }) / sizeof(double)),                     \
                 (double[]){ __VA_ARGS__ })

/* 0, 1, ... in the shape [rows, 3] */
static kn_tensor *counting(kn_dtype t, int64_t rows)
{
    return kn_reshape(kn_arange(t, KN_CPU, rows * 3), KN_SHAPE(rows, 3));
}

KN_TEST(update, computes_in_every_dtype)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16, KN_F64, KN_I64, KN_I32 };
    for (int i = 0; i < 6; i++) {
        kn_tensor *t = counting(types[i], 2), *row = kn_arange(types[i], KN_CPU, 3);
        KN_CHECK(kn_add_(t, row, 1));
        CHECK_VALUES(t, 0, 2, 4, 3, 5, 7);
        KN_CHECK(kn_mul_(t, row) && kn_scale_(t, -2));
        CHECK_VALUES(t, 0, -4, -16, 0, -10, -28);
        if (i >= 4)
            continue;
        KN_CHECK(kn_add_(t, row, 0.5) && kn_add_(t, t, 1));
        CHECK_VALUES(t, 0, -7, -30, 0, -19, -54);
        KN_CHECK(kn_lerp_(t, row, 0.5));
        CHECK_VALUES(t, 0, -3, -14, 0, -9, -26);
        KN_CHECK(kn_lerp_(t, row, 1));
        CHECK_VALUES(t, 0, 1, 2, 0, 1, 2);
    }
}

/* x is read whole before t is written, and converted to t's dtype. */
KN_TEST(update, of_other_views_and_dtypes)
{
    kn_tensor *t = kn_arange(KN_F32, KN_CPU, 6);
    KN_CHECK(kn_add_(kn_slice(t, 0, 1, 6), kn_slice(t, 0, 0, 5), 1));
    CHECK_VALUES(t, 0, 1, 3, 5, 7, 9);
    kn_tensor *square = kn_slice(counting(KN_F32, 3), 0, 0, 3);
    KN_CHECK(kn_add_(square, kn_transpose(square, 0, 1), 1));
    CHECK_VALUES(square, 0, 4, 8, 4, 8, 12, 8, 12, 16);
    KN_CHECK(kn_mul_(kn_transpose(square, 0, 1), kn_arange(KN_I32, KN_CPU, 3)));
    CHECK_VALUES(square, 0, 0, 0, 4, 8, 12, 16, 24, 32);
    KN_CHECK(kn_add_(kn_slice(square, 1, 0, 1), kn_full(KN_BF16, KN_CPU, 0.5, KN_SCALAR), 4));
    CHECK_VALUES(square, 2, 0, 0, 6, 8, 12, 18, 24, 32);
    kn_tensor *none = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3));
    KN_CHECK(kn_add_(none, kn_arange(KN_F32, KN_CPU, 3), 2) && kn_scale_(none, 2));
    kn_tensor *meta = kn_zeros(KN_F32, KN_META, KN_SHAPE(2, 3));
    KN_CHECK(kn_lerp_(meta, meta, 0.1) && kn_add_(meta, kn_slice(meta, 0, 0, 1), 2));
}

/* A mean over time of equal values stays where it is: nothing drifts. */
KN_TEST(update, a_mean_of_equals_does_not_drift)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16, KN_F16 };
    for (int i = 0; i < 3; i++) {
        kn_tensor *x = kn_full(types[i], KN_CPU, 0.1, KN_SHAPE(5)), *mean = kn_zeros_like(x);
        KN_CHECK(kn_copy_(mean, x));
        for (int k = 0; k < 1000; k++)
            KN_CHECK(kn_lerp_(mean, x, 0.001));
        const double want = kn_item(kn_slice(x, 0, 0, 1));
        CHECK_VALUES(mean, want, want, want, want, want);
    }
}

KN_TEST(update, autograd_notices)
{
    kn_tensor *x = kn_require_grad(kn_ones(KN_F32, KN_CPU, KN_SHAPE(3)), true);
    REFUSED(kn_add_(x, x, 1), "add_: writing in place to a tensor that requires grad");
    REFUSED(kn_scale_(x, 2), "scale_: writing in place");
    kn_tensor *factor = kn_full(KN_F32, KN_CPU, 3, KN_SHAPE(3));
    kn_tensor *y = kn_sum(kn_mul(x, factor), 0, NULL, false);
    KN_CHECK(kn_mul_(factor, factor));
    REFUSED(kn_backward(y), "written in place after forward used it");
    y = kn_sum(kn_mul(x, factor), 0, NULL, false);
    KN_CHECK(kn_backward(y) && kn_item(kn_slice(kn_grad(x), 0, 0, 1)) == 9);
    const bool mode = kn_set_grad_mode(false); /* a step by hand */
    KN_CHECK(kn_add_(x, kn_grad(x), -0.5));
    kn_set_grad_mode(mode);
    CHECK_VALUES(kn_detach(x), -3.5, -3.5, -3.5);
}

KN_TEST(update, refuses)
{
    kn_tensor *t = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 3)),
              *i = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(3));
    REFUSED(kn_add_(i, t, 1), "add_: f32[2,3] does not expand to i64[3]");
    REFUSED(kn_add_(i, kn_ones(KN_F32, KN_CPU, KN_SHAPE(3)), 1),
            "add_: i64[3] can't hold a result of it and f32[3]");
    REFUSED(kn_add_(i, i, 0.5), "add_: the factor of integers should be 1, not 0.5");
    REFUSED(kn_scale_(i, 0.5), "scale_: the factor of integers should be whole, not 0.5");
    REFUSED(kn_lerp_(i, i, 0.5), "lerp_: needs a float tensor, got i64");
    REFUSED(kn_lerp_(t, t, INFINITY), "lerp_: the factor inf should be finite");
    REFUSED(kn_mul_(t, kn_zeros(KN_F32, KN_META, KN_SHAPE(3))),
            "mul_: f32[2,3] on cpu and f32[3] on meta: both must be on one device");
    REFUSED(kn_add_(kn_expand(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 3)), KN_SHAPE(2, 3)), t, 1),
            "its elements share bytes");
    REFUSED(kn_mul_(t, kn_empty(KN_U16, KN_CPU, KN_SHAPE(3))), "can't hold a result");
    REFUSED(kn_add_(NULL, t, 1), "add_");
}
