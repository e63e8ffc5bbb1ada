/* optim/newton_schulz.c: the orthogonal factor of a matrix, nearly, by products alone (Jordan et
 * al., "Muon: An optimizer for hidden layers in neural networks", 2024).
 *
 * X of norm 1 becomes, some times, (a I + b A + c A A) X with A = X X': a polynomial that moves
 * each singular value towards 1. Where X is tall, A = X' X stands on the right: the smaller of the
 * two squares. a goes on the diagonal of the square, so that the products are all of the work on
 * matrices of X's size. */
#include "optim/optim_internal.h"
#include <math.h>

double kn_newton_schulz_flops(int64_t rows, int64_t cols)
{
    double few = (double)(rows < cols ? rows : cols), many = (double)(rows < cols ? cols : rows);
    return 4 * few * few * many + 2 * few * few * few;
}

/* 1 / max(|X|, eps) of A = X X', whose diagonal sums to |X|^2; in A's dtype, without dims. */
static kn_tensor *inverse_norm(kn_tensor *gram, double eps)
{
    kn_dtype t = kn_dtype_of(gram);
    kn_tensor *squares = kn_cast(kn_diagonal(gram, 0, 0, 1), t == KN_F64 ? t : KN_F32);
    kn_tensor *norm = kn_clamp(kn_sqrt(kn_sum(squares, 0, NULL, false)), eps, HUGE_VAL);
    return kn_cast(kn_reciprocal(norm), t);
}

/* a I + b A + c A A */
static kn_tensor *polynomial(kn_tensor *gram, const double *ns)
{
    kn_tensor *p = kn_add_scaled(kn_scale(gram, ns[1]), kn_matmul(gram, gram), ns[2]);
    kn_tensor *diagonal = p ? kn_diagonal(p, 0, 0, 1) : NULL;
    return diagonal && kn_copy_(diagonal, kn_add_scalar(diagonal, ns[0])) ? p : NULL;
}

/* The first time X is brought to norm 1 on the way: the squares are divided, so that nothing but
 * the products passes over X. */
static kn_tensor *iterate(kn_tensor *x, const double *ns, bool first, double eps)
{
    bool tall = kn_size(x, 0) > kn_size(x, 1);
    kn_tensor *turned = kn_transpose(x, 0, 1);
    kn_tensor *gram = tall ? kn_matmul(turned, x) : kn_matmul(x, turned);
    kn_tensor *inverse = first ? inverse_norm(gram, eps) : NULL;
    if (first)
        gram = kn_mul(kn_mul(gram, inverse), inverse);
    kn_tensor *p = polynomial(gram, ns);
    if (first)
        p = kn_mul(p, inverse);
    return tall ? kn_matmul(x, p) : kn_matmul(p, x);
}

bool kn_newton_schulz(kn_tensor *x, const double *coefficients, int steps, double eps)
{
    bool mode = kn_set_grad_mode(false);
    kn_scope scope = kn_scope_begin();
    kn_tensor *y = x;
    for (int i = 0; i < steps && y; i++) {
        kn_scope inner = kn_scope_begin();
        y = iterate(y, coefficients, i == 0, eps);
        kn_scope_end_except(inner, &y, y ? 1 : 0);
    }
    bool ok = y && kn_copy_(x, y);
    kn_scope_end(scope);
    kn_set_grad_mode(mode);
    return ok && kn_ok();
}
