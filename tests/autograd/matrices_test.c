/* tests/autograd/matrices_test.c: factors give their matrix back, and matrices that don't fit. The
 * gradients: every_linalg.c. */
#include "tests/owned.h"

static kn_tensor *noise(int ndim, const int64_t *shape)
{
    return kn_randn(KN_F64, KN_CPU, 5, 6, ndim, shape);
}

/* LAPACK is there: else its absence is told, and there is nothing to test. */
static bool there(void)
{
    if (kn_inv(kn_eye(KN_F64, KN_CPU, 2, 2)))
        return true;
    KN_CHECK_ERROR("this build has no LAPACK: install liblapack-dev and build anew");
    return false;
}

static void same(const char *what, kn_tensor *a, kn_tensor *b)
{
    kn_tensor *off = kn_norm(kn_sub(a, b), INFINITY, 0, NULL, false);
    KN_CHECK(off && kn_item(off) < 1e-12, "%s: %s", what, kn_error() ? kn_error() : "differs");
}

static kn_tensor *turned(kn_tensor *x)
{
    return kn_transpose(x, -1, -2);
}

KN_TEST(matrices, factors_give_the_matrix_back)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 5, 5 }, { 7, 3 }, { 3, 70 } };
    for (int i = 0; i < 4 && there(); i++) {
        IN_SCOPE;
        const int64_t M = sizes[i][0], N = sizes[i][1];
        kn_tensor *x = noise(KN_SHAPE(3, M, N)), *u, *vt, *r, *v, *sign;
        kn_tensor *s = kn_svd(x, &u, &vt);
        same("svd", kn_matmul(kn_mul(u, kn_unsqueeze(s, -2)), vt), x);
        kn_tensor *q = kn_qr(x, &r);
        same("qr", kn_matmul(q, r), x);
        same("q", kn_matmul(turned(q), q), kn_eye(KN_F64, KN_CPU, kn_size(q, 2), kn_size(q, 2)));
        kn_tensor *square = kn_matmul(x, turned(x));
        kn_tensor *w = kn_eigh(square, &v);
        same("eigh", kn_matmul(kn_mul(v, kn_unsqueeze(w, -2)), turned(v)), square);
        square = kn_add(square, kn_eye(KN_F64, KN_CPU, M, M));
        kn_tensor *l = kn_cholesky(square), *b = noise(KN_SHAPE(3, M, 2));
        same("cholesky", kn_matmul(l, turned(l)), square);
        same("solve", kn_matmul(square, kn_solve(square, b)), b);
        same("inv", kn_matmul(square, kn_inv(square)), kn_eye(KN_F64, KN_CPU, M, M));
        kn_tensor *log = kn_slogdet(square, &sign);
        same("slogdet", log,
             kn_scale(kn_sum(kn_log(kn_diagonal(l, 0, 1, 2)), KN_SHAPE(-1), false), 2));
        KN_CHECK(kn_item(kn_amin(sign, 0, NULL, false)) == 1);
    }
}

/* Values alone have a gradient where they are equal, or 0; vectors have none there. */
KN_TEST(matrices, equal_values_have_a_gradient)
{
    for (int i = 0; i < 4 && there(); i++) {
        IN_SCOPE;
        kn_tensor *unit = kn_eye(KN_F64, KN_CPU, i == 2 ? 3 : 2, i == 3 ? 3 : 2), *g;
        kn_tensor *x = kn_require_grad(i < 2 ? kn_detach(unit) : kn_zeros_like(unit), true);
        kn_tensor *w = i ? kn_svd(x, NULL, NULL) : kn_eigh(x, NULL);
        KN_CHECK(kn_grad_of(kn_sum(w, 0, NULL, false), &x, 1, &g));
        same("gradient", g, unit);
    }
}

KN_TEST(matrices, bad_matrices)
{
    kn_tensor *x = noise(KN_SHAPE(2, 3)), *zero = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 2, 2));
    REFUSED(kn_inv(x), "inv: needs a float x[...,N,N], no dim of which is 0, got f64[2,3]");
    REFUSED(kn_svd(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 3)), NULL, NULL),
            "svd: needs a float x[...,M,N]");
    REFUSED(kn_cholesky(kn_zeros(KN_I64, KN_CPU, KN_SHAPE(2, 2))), "got i64[2,2]");
    REFUSED(kn_solve(zero, x), "solve: needs a[...,N,N] and b[...,N,K]");
    REFUSED(kn_solve(zero, NULL), "solve");
    if (!there())
        return;
    REFUSED(kn_inv(zero), "matrix 0 of x f32[2,2,2] is singular");
    REFUSED(kn_solve(zero, zero), "matrix 0 of x f32[2,2,2] is singular");
    REFUSED(kn_cholesky(zero), "matrix 0 of x f32[2,2,2] is not positive definite");
    KN_CHECK(kn_item(kn_sum(kn_det(zero), 0, NULL, false)) == 0, "of a singular one 0");
    double swapped[4] = { 0, 2, 3, 0 };
    KN_CHECK(fabs(kn_item(kn_det(kn_from(KN_F64, KN_CPU, swapped, KN_SHAPE(2, 2)))) + 6) < 1e-14);
    kn_tensor *wide = kn_require_grad(x, true), *r, *q = kn_qr(wide, &r);
    KN_CHECK(q && !kn_backward(kn_sum(q, 0, NULL, false)));
    KN_CHECK_ERROR("qr: the gradient needs at least as many rows as columns");
}
