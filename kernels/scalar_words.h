/* kernels/scalar_words.h (private): the words of formulas (kernels/formulas.h) for a v_num that is
 * double in C, float or double in CUDA. Before it the provider defines v_fma(a, b, c), a b + c;
 * v_gated(x, u), x sigmoid(u); v_sigmoids(u, &rest), sigmoid(u) and 1 - sigmoid(u); and
 * v_within(x, bound, f32's), x from -bound to bound. */
#ifndef KNAP_KERNELS_SCALAR_WORDS_H
#define KNAP_KERNELS_SCALAR_WORDS_H

#include <math.h>

#define v_set1(c)        ((v_num)(c))
#define v_zero()         ((v_num)0)
#define v_lt(a, b)       ((a) < (b))
#define v_le(a, b)       ((a) <= (b))
#define v_gt(a, b)       ((a) > (b))
#define v_ge(a, b)       ((a) >= (b))
#define v_eq(a, b)       ((a) == (b))
#define v_ne(a, b)       ((a) != (b))
#define v_sel(m, a, b)   ((m) ? (a) : (b))
#define v_over(x, c)     ((x) / (c)) /* by a constant */
#define v_div(a, b)      ((a) / (b)) /* integers have their own */
#define v_ratio(d, a, b) ((d) * ((a) / (b)))
#define v_abs            fabs
#define v_floor          floor
#define v_ceil           ceil
#define v_round          rint
#define v_exp            exp
#define v_expm1          expm1
#define v_log            log
#define v_log1p          log1p
#define v_log2           log2
#define v_sqrt           sqrt
#define v_sin            sin
#define v_cos            cos
#define v_tan            tan
#define v_atan           atan
#define v_erf            erf
#define v_tanh           tanh
#define v_pow            pow
#define v_sigmoid(x)     v_gated(v_set1(1), x)
#define v_bounded(x)     v_within(x, v_set1(750), 87)

/* max(x, 0); NaN passes, as in all that follow */
KN_FORMULA v_relu(v_num x)
{
    return x > 0 || x != x ? x : v_zero();
}

KN_FORMULA v_clamp(v_num x, v_num low, v_num high)
{
    return x != x ? x : fmin(fmax(x, low), high);
}

KN_FORMULA v_maximum(v_num a, v_num b)
{
    return a != a || a > b ? a : b;
}

KN_FORMULA v_minimum(v_num a, v_num b)
{
    return a != a || a < b ? a : b;
}

/* From the nearer end. */
KN_FORMULA v_lerp(v_num p, v_num a, v_num b)
{
    return p < v_set1(0.5) ? v_fma(p, b - a, a) : v_fma(p - 1, b - a, b);
}

/* The normal distribution Phi(x) */
KN_FORMULA v_normal_cdf(v_num x)
{
    return v_set1(0.5) * erfc(-x * v_set1(0.70710678118654752440));
}

#include "kernels/formulas.h"

/* With s = sigmoid(2u), u = c (x + k x^3): x s, whose derivative is s (1 + x (1 - s) 2u'). */
KN_FORMULA v_gelu_tanh_slope(v_num given)
{
    const double c = 2 * 0.79788456080286535588, k = 0.044715;
    const v_num x = v_within(given, v_set1(30), 10), x2 = x * x;
    v_num rest;
    const v_num s = v_sigmoids(x * v_fma(v_set1(c * k), x2, v_set1(c)), &rest);
    return s * v_fma(x * rest, v_fma(v_set1(3 * c * k), x2, v_set1(c)), v_set1(1));
}

/* x tanh(log(1 + e^x)) */
KN_FORMULA v_mish(v_num x)
{
    return x * tanh(v_softplus(x));
}

/* With t = tanh(log(1 + e^x)) and s = sigmoid(x): t + x s (1 - t^2). */
KN_FORMULA v_mish_slope(v_num given)
{
    const v_num x = v_within(given, v_set1(750), 750), t = tanh(v_softplus(x));
    return v_fma(v_gated(x, x), (1 - t) * (1 + t), t);
}

#endif
