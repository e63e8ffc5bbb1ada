/* autograd/linalg.h: matrices' inverses, equations and factors, by LAPACK, with gradients. They
 * keep to the rules of autograd/functional.h. Matrices are the last two dims of x, each for itself.
 * All is computed in f64 on the CPU: on a GPU the host waits, and copies there and back. A build
 * without LAPACK (liblapack-dev) refuses, but for tensors on meta. A matrix that doesn't fit,
 * singular or not positive, is an error that names it. */
#ifndef KNAP_AUTOGRAD_LINALG_H
#define KNAP_AUTOGRAD_LINALG_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

KN_API kn_tensor *kn_inv(kn_tensor *x); /* of x[..., N, N] */
/* The y[..., N, K] with a y = b, of a[..., N, N] and b[..., N, K] with the same leading dims. */
KN_API kn_tensor *kn_solve(kn_tensor *a, kn_tensor *b);
/* The lower triangular l with l l^T = x, of which the lower triangle is read. */
KN_API kn_tensor *kn_cholesky(kn_tensor *x);
/* The determinant of x[..., N, N] (of one that is 0 the gradient is an error); its logarithm, whose
 * *sign, -1, 0 or 1, has no gradient (sign NULL: not wanted). */
KN_API kn_tensor *kn_det(kn_tensor *x);
KN_API kn_tensor *kn_slogdet(kn_tensor *x, kn_tensor **sign);
/* The eigenvalues [..., N] of symmetric matrices in ascending order, of which the lower triangle is
 * read, and in *vectors the eigenvectors, as columns. The gradient of the vectors is infinite where
 * eigenvalues are equal. */
KN_API kn_tensor *kn_eigh(kn_tensor *x, kn_tensor **vectors);
/* x[..., M, N] = q r, with K = min(M, N) orthonormal columns q[..., M, K] and upper triangular
 * *r [..., K, N]. The gradient needs M >= N. */
KN_API kn_tensor *kn_qr(kn_tensor *x, kn_tensor **r);
/* x[..., M, N] = u diag(s) vt: the singular values s[..., K] in descending order, K = min(M, N),
 * and the vectors *u [..., M, K] and *vt [..., K, N]. Their gradients are infinite where singular
 * values are equal, or 0. */
KN_API kn_tensor *kn_svd(kn_tensor *x, kn_tensor **u, kn_tensor **vt);

#ifdef __cplusplus
}
#endif
#endif
