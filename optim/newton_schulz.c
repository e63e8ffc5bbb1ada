/* optim/newton_schulz.c: the orthogonal factor of a matrix, nearly, by products alone (Jordan et
 * al., "Muon: An optimizer for hidden layers in neural networks", 2024).
 *
 * X of norm 1 becomes, some times, a X + (b A + c A A) X with A = X X': a polynomial that moves
 * each singular value towards 1. Where X is tall, A = X' X stands on the right: the smaller of the
 * two squares. Products take their operands in X's dtype; sums between products are f32 (f64 for
 * f64), and each operand is rounded once. A is symmetric, so A A' is its square too: half the work
 * where a provider sees that both operands are one matrix. */
#include "autograd/ops.h"
#include "optim/optim_internal.h"
#include <math.h>

double kn_newton_schulz_flops(int64_t rows, int64_t cols)
{
    double few = (double)(rows < cols ? rows : cols), many = (double)(rows < cols ? cols : rows);
    return 4 * few * few * many + 2 * few * few * few;
}

/* sum + a b in the wide dtype, written over sum; sum NULL: a b. */
static kn_tensor *product(kn_tensor *sum, kn_tensor *a, kn_tensor *b)
{
    if (!a || !b)
        return NULL;
    kn_tensor *out = sum ? sum
                         : kn_empty(kn_wide_dtype(a->dtype), kn_device_of(a),
                                    KN_SHAPE(a->shape[0], b->shape[1]));
    const kn_matmul_args p = { .dst = out ? kn_array_of(out) : (kn_array){ 0 },
                               .a = kn_array_of(a),
                               .b = kn_array_of(b),
                               .add = sum != NULL };
    return out && KN_LAUNCH(kn_compute_stream(kn_device_of(a)), KN_K_MATMUL, p) ? out : NULL;
}

/* 1 / max(|X|, eps) of A = X X', whose diagonal sums to |X|^2; without dims. */
static kn_tensor *inverse_norm(kn_tensor *gram, double eps)
{
    kn_tensor *diagonal = kn_contiguous(kn_diagonal(gram, 0, 0, 1));
    kn_tensor *norm = kn_sqrt(kn_sum(diagonal, 0, NULL, false));
    return kn_reciprocal(kn_clamp(norm, eps, HUGE_VAL));
}

/* The first time X is brought to norm 1 on the way: the squares are divided, and the result. */
static kn_tensor *iterate(kn_tensor *x, const double *ns, bool first, double eps)
{
    const kn_dtype t = kn_dtype_of(x);
    const bool tall = kn_size(x, 0) > kn_size(x, 1);
    kn_tensor *turned = kn_transpose(x, 0, 1);
    kn_tensor *gram = tall ? product(NULL, turned, x) : product(NULL, x, turned);
    kn_tensor *inverse = first ? inverse_norm(gram, eps) : NULL;
    if (first)
        gram = kn_mul(kn_mul(gram, inverse), inverse);
    gram = kn_cast(gram, t); /* for both terms: b and c have two signs, its rounding cancels */
    kn_tensor *p = kn_scale(kn_wide(gram), ns[1]);
    p = kn_add_scaled(p, product(NULL, gram, kn_transpose(gram, 0, 1)), ns[2]);
    kn_tensor *sum = kn_scale(kn_wide(x), ns[0]);
    if (first) {
        p = kn_mul(p, inverse);
        sum = kn_mul(sum, inverse);
    }
    p = kn_cast(p, t);
    return kn_cast(tall ? product(sum, x, p) : product(sum, p, x), t);
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
