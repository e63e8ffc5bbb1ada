/* tests/autograd/every_without_lapack.c: what stands for the rows of every_linalg.c in a build
 * without LAPACK: shapes on meta, where nothing is computed. */
#include "tests/autograd/every.h"

static kn_tensor *shape_of(kn_tensor *x, kn_tensor *(*f)(kn_tensor *x))
{
    return kn_device_of(x) == KN_META ? f(x) : kn_scale(x, 1);
}
static kn_tensor *solved(kn_tensor *x)
{
    return kn_solve(x, x);
}
static kn_tensor *singular(kn_tensor *x)
{
    kn_tensor *u, *vt, *s = kn_svd(x, &u, &vt);
    return s ? kn_matmul(u, vt) : NULL;
}
static kn_tensor *triangular(kn_tensor *x)
{
    kn_tensor *r;
    return kn_qr(x, &r) ? r : NULL;
}
static kn_tensor *eigen(kn_tensor *x)
{
    kn_tensor *v;
    return kn_eigh(x, &v) ? v : NULL;
}
static kn_tensor *whole(kn_tensor *x)
{
    kn_tensor *log = kn_slogdet(x, NULL);
    return log ? kn_mul(x, log) : NULL;
}
static kn_tensor *scaled(kn_tensor *x)
{
    kn_tensor *d = kn_det(x);
    return d ? kn_mul(x, d) : NULL;
}

EVERY_FLAT(kn_inv, "2 2", shape_of(x, kn_inv));
EVERY_FLAT(kn_solve, "2 2", shape_of(x, solved));
EVERY_FLAT(kn_cholesky, "2 2", shape_of(x, kn_cholesky));
EVERY_FLAT(kn_det, "2 2", shape_of(x, scaled));
EVERY_FLAT(kn_slogdet, "2 2", shape_of(x, whole));
EVERY_FLAT(kn_eigh, "2 2", shape_of(x, eigen));
EVERY_FLAT(kn_qr, "2 2", shape_of(x, triangular));
EVERY_FLAT(kn_svd, "2 2", shape_of(x, singular));
