/* kernels/formulas.h (private): formulas of kernels/kinds.h that take more than a line. They and
 * the rows are written in words, v_exp(x), v_sel(mask, a, b) and the like, besides + - * /. Each
 * provider defines the words for its numbers before it includes this file: the vector provider for
 * vectors of f32 (cpu/vec/lanes.h, cpu/vec/math.h), the reference for double and CUDA for float and
 * double (kernels/scalar_words.h). v_num is the type, and KN_FORMULA begins a function that returns
 * it. So a provider chooses how a word is computed, and the formula stands once. */
#ifndef KNAP_KERNELS_FORMULAS_H
#define KNAP_KERNELS_FORMULAS_H

/* -1, 0 or 1, 0 also of -0; NaN passes */
KN_FORMULA v_sign(v_num x)
{
    const v_num below = v_sel(v_lt(x, v_zero()), v_set1(-1), v_zero());
    return v_sel(v_ne(x, x), x, v_sel(v_gt(x, v_zero()), v_set1(1), below));
}

/* towards 0 */
KN_FORMULA v_trunc(v_num x)
{
    return v_sel(v_lt(x, v_zero()), v_ceil(x), v_floor(x));
}

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|) */
KN_FORMULA v_softplus(v_num x)
{
    return v_relu(x) + v_log1p(v_exp(-v_abs(x)));
}

/* log(e^a + e^b), from the larger one */
KN_FORMULA v_logaddexp(v_num a, v_num b)
{
    const v_num far = v_maximum(a, b) + v_log1p(v_exp(-v_abs(a - b)));
    return v_sel(v_eq(a, b), a + v_set1(0.69314718055994530942), far);
}

/* above where rest, a remainder by b, isn't 0 and on the other side of it than b; else other */
KN_FORMULA v_across(v_num rest, v_num b, v_num above, v_num other)
{
    const v_num below = v_sel(v_lt(b, v_zero()), other, above);
    const v_num beyond = v_sel(v_lt(b, v_zero()), above, other);
    return v_sel(v_lt(rest, v_zero()), below, v_sel(v_gt(rest, v_zero()), beyond, other));
}

/* fmod(a, b), moved to the side of b */
KN_FORMULA v_remainder(v_num a, v_num b)
{
    const v_num rest = v_fmod(a, b);
    return v_across(rest, b, rest + b, rest);
}

/* The whole number floor(a / b), from an exact dividend, so that rounding doesn't reach the next
 * one. */
KN_FORMULA v_floor_div(v_num a, v_num b)
{
    const v_num rest = v_fmod(a, b), q = v_round((a - rest) / b);
    const v_num whole = v_sel(v_eq(q, v_zero()), v_copysign(v_zero(), a / b), q);
    return v_sel(v_eq(b, v_zero()), a / b, v_across(rest, b, q - v_set1(1), whole));
}

KN_FORMULA v_hardsigmoid(v_num x)
{
    return v_over(v_clamp(x + v_set1(3), v_zero(), v_set1(6)), 6);
}

KN_FORMULA v_hardswish_slope(v_num x)
{
    const v_num upper = v_sel(v_ge(x, v_set1(3)), v_set1(1), v_over(x + v_set1(1.5), 3));
    return v_sel(v_le(x, v_set1(-3)), v_zero(), upper);
}

/* factor where low < x < high, else 0 */
KN_FORMULA v_inside(v_num x, v_num low, v_num high, v_num factor)
{
    return v_sel(v_gt(x, low), v_sel(v_lt(x, high), factor, v_zero()), v_zero());
}

/* above where x > bound, below where x < -bound, else 0; NaN passes */
KN_FORMULA v_outside(v_num x, v_num bound, v_num above, v_num below)
{
    const v_num rest = v_sel(v_ne(x, x), below, v_zero());
    return v_sel(v_gt(x, bound), above, v_sel(v_lt(x, -bound), below, rest));
}

/* The derivative of v_gated(x, x): s + x s (1 - s), s = sigmoid(x). Slopes are 0 or 1 far from 0,
 * where their formulas multiply by x: there v_bounded(x) stands for x, so that no product is of 0
 * and infinity. */
KN_FORMULA v_gated_slope(v_num given)
{
    v_num rest;
    const v_num x = v_bounded(given), s = v_sigmoids(x, &rest);
    return s * v_fma(x, rest, v_set1(1));
}

#endif
