/* tests/autograd/scan_test.c: running products, extrema and logarithms of sums where factors are 0,
 * elements equal, infinite or NaN; integers; errors. Gradients by finite differences are rows of
 * every.h. */
#include "tests/autograd/lists.h"

#define NEAR(t, ...) IS_NEAR(t, 1e-12, __VA_ARGS__)

/* With zeros: none, one, two of them. */
KN_TEST(scan, products_and_their_gradients)
{
    kn_tensor *x = kn_require_grad(REAL(2, 0, 3, 0, 5), true);
    kn_tensor *y = kn_cumprod(x, 0);
    NEAR(y, 2, 0, 0, 0, 0);
    KN_CHECK(kn_backward(y, .grad = REAL(1, 10, 100, 1000, 10000)));
    NEAR(kn_grad(x), 1, 2 * 10 + 6 * 100, 0, 0, 0);
    kn_tensor *one = kn_require_grad(REAL(2, 3, 0, 5), true);
    KN_CHECK(kn_backward(kn_cumprod(one, -1), .grad = REAL(1, 10, 100, 1000)));
    NEAR(kn_grad(one), 31, 20, 6 * 100 + 30 * 1000, 0);
    kn_tensor *whole = kn_cumprod(kn_cast(REAL(2, 3, -1), KN_I32), 0);
    KN_CHECK(kn_dtype_of(whole) == KN_I64);
    NEAR(whole, 2, 6, -6);
}

KN_TEST(scan, extrema_and_their_places)
{
    kn_tensor *at, *x = kn_require_grad(REAL(1, 3, 2, 3, NAN, 7, NAN), true);
    kn_tensor *y = kn_cummax(x, 0, &at);
    NEAR(y, 1, 3, 3, 3, NAN, NAN, NAN);
    NEAR(at, 0, 1, 1, 3, 4, 4, 6);
    KN_CHECK(kn_backward(y, .grad = REAL(1, 2, 4, 8, 16, 32, 64)));
    NEAR(kn_grad(x), 1, 6, 0, 8, 48, 0, 64);
    NEAR(kn_cummin(kn_cast(REAL(3, 1, 1, 2), KN_I32), 0, &at), 3, 1, 1, 1);
    NEAR(at, 0, 1, 2, 2);
}

KN_TEST(scan, logarithms_of_sums)
{
    NEAR(kn_logcumsumexp(REAL(-INFINITY, 0, 0, 1000, INFINITY, -1), 0), -INFINITY, 0, log(2), 1000,
         INFINITY, INFINITY);
    kn_tensor *x = kn_require_grad(REAL(0, 1000, 0), true);
    KN_CHECK(kn_backward(kn_logcumsumexp(x, 0), .grad = REAL(1, -2, 4)));
    NEAR(kn_grad(x), 1, 2, 0);
    NEAR(kn_diff(REAL(1, 4, 9, 16), 2, 0), 2, 2);
    NEAR(kn_diff(kn_cast(REAL(1, 4, 9), KN_I64), 1, 0), 3, 5);
}

KN_TEST(scan, errors_name_the_operation)
{
    kn_tensor *x = kn_ones(KN_F32, KN_CPU, KN_SHAPE(2, 3)), *id = kn_cast(x, KN_I64);
    REFUSED(kn_cumprod(x, 2), "cumprod: dim 2 is out of range for f32[2,3]");
    REFUSED(kn_logcumsumexp(id, 0), "logcumsumexp: needs a float tensor, got i64[2,3]");
    REFUSED(kn_cummax(NULL, 0, NULL), "cummax: a tensor is NULL");
    REFUSED(kn_diff(x, -1, 0), "diff: n is -1");
}
