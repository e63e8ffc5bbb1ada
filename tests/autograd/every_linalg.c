/* tests/autograd/every_linalg.c: the rows of autograd/linalg.h (every.h). Without LAPACK:
 * every_without_lapack.c. */
#include "tests/autograd/every.h"

/* Far from singular, whose eigenvalues and singular values lie apart. */
static kn_tensor *apart(kn_tensor *x)
{
    const int64_t M = kn_size(x, -2), N = kn_size(x, -1);
    kn_tensor *steps = kn_add_scalar(kn_arange(x->dtype, kn_device_of(x), N), 1);
    return kn_add(kn_scale(x, 0.25), kn_mul(kn_eye(x->dtype, kn_device_of(x), M, N), steps));
}

static kn_tensor *symmetric(kn_tensor *x)
{
    return x ? kn_add(x, kn_transpose(x, -1, -2)) : NULL;
}

/* All results of a factoring in one, whatever the vectors' signs. */
static kn_tensor *eigen(kn_tensor *x)
{
    kn_tensor *v, *w = kn_eigh(x, &v);
    return w ? kn_add(kn_square(v), kn_unsqueeze(w, -1)) : NULL;
}

static kn_tensor *orthogonal(kn_tensor *x)
{
    kn_tensor *r, *q = kn_qr(x, &r);
    return q ? kn_matmul(kn_square(q), kn_square(r)) : NULL;
}

static kn_tensor *singular(kn_tensor *x)
{
    kn_tensor *u, *vt, *s = kn_svd(x, &u, &vt);
    return s ? kn_matmul(kn_mul(kn_square(u), kn_unsqueeze(s, -2)), kn_square(vt)) : NULL;
}

EVERY(kn_inv, "3 3 | 2 2 3 3t", kn_inv(kn_ndim(x) < 2 ? x : apart(x)));
EVERY(kn_solve, "3 3; 3 2 | 2 3 3t; 2 3 1", kn_solve(kn_ndim(x) < 2 ? x : apart(x), y));
EVERY(kn_cholesky, "3 3 | 2 3 3t", kn_cholesky(kn_ndim(x) < 2 ? x : symmetric(apart(x))));
EVERY(kn_det, "3 3 | 2 2 2t", kn_det(kn_ndim(x) < 2 ? x : apart(x)));
EVERY(kn_slogdet, "3 3 | 2 2 2t", kn_slogdet(kn_ndim(x) < 2 ? x : apart(x), NULL));
EVERY(kn_eigh, "3 3 | 2 3 3t", eigen(kn_ndim(x) < 2 ? x : symmetric(apart(x))));
EVERY(kn_qr, "4 3 | 2 3 3t", orthogonal(kn_ndim(x) < 2 ? x : apart(x)));
EVERY(kn_svd, "4 3 | 2 3 3t | 3 4", singular(kn_ndim(x) < 2 ? x : apart(x)));
