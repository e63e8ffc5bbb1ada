/* kernels/cpu/vec/words.h (private): the words of formulas (kernels/formulas.h) on vectors of f32,
 * beside those of math.h. */
#ifndef KNAP_KERNELS_CPU_VEC_WORDS_H
#define KNAP_KERNELS_CPU_VEC_WORDS_H

#include "kernels/cpu/reference.h"
#include "kernels/cpu/vec/math.h"
#include <math.h>

#define v_num      vf
#define KN_FORMULA VEC_INLINE vf

#define v_ceil(x)        (-v_floor(-(x)))
#define v_div(a, b)      ((a) / (b))
#define v_over(x, c)     ((x)*v_set1(1.0f / (c)))
#define v_ratio(d, a, b) ((d) * (a) / (b))

KN_FORMULA v_relu(vf x)
{
    return v_max(v_zero(), x);
}

KN_FORMULA v_clamp(vf x, vf low, vf high)
{
    return v_min(high, v_max(low, x));
}

KN_FORMULA v_bounded(vf x)
{
    return v_clamp(x, v_set1(-104.0f), v_set1(104.0f));
}

/* x sigmoid(z) */
KN_FORMULA v_gated(vf x, vf z)
{
    return x / (v_set1(1.0f) + v_exp(-z));
}

/* sigmoid(z) and 1 - sigmoid(z), without cancellation: with e = e^-z, s = 1 / (1 + e) and
 * 1 - s = e s. */
KN_FORMULA v_sigmoids(vf z, vf *rest)
{
    const vf e = v_exp(v_min(v_set1(87.0f), -z)); /* stays finite */
    const vf s = v_set1(1.0f) / (v_set1(1.0f) + e);
    *rest = e * s;
    return s;
}

/* Phi(x) + x phi(x), phi the normal density: both by one exponential. */
KN_FORMULA v_gelu_slope(vf given)
{
    const vf x = v_bounded(given), e = v_exp(v_set1(-0.5f) * x * x);
    return v_fma(x, v_set1(0.398942280f) * e, v_normal_of(x, e));
}

/* NaN on either side passes. */
KN_FORMULA v_maximum(vf a, vf b)
{
    return v_sel(v_ne(a, a), a, v_max(a, b));
}

KN_FORMULA v_minimum(vf a, vf b)
{
    return v_sel(v_ne(a, a), a, v_min(a, b));
}

/* From the nearer end; p holds one number. */
KN_FORMULA v_lerp(vf p, vf a, vf b)
{
    if (p[0] < 0.5f)
        return v_fma(p, b - a, a);
    return v_fnma(v_set1(1.0f) - p, b - a, b);
}

static inline float lgamma_of(float x)
{
    int sign;
    return lgammaf_r(x, &sign);
}

/* Of functions of single numbers. */
#define VEC_EACH(name, function)                                                                   \
    KN_FORMULA v_##name(vf x)                                                                      \
    {                                                                                              \
        for (int i = 0; i < KN_VW; i++)                                                            \
            x[i] = (float)function(x[i]);                                                          \
        return x;                                                                                  \
    }
VEC_EACH(lgamma, lgamma_of)
VEC_EACH(digamma, kn_ref_digamma)
VEC_EACH(trigamma, kn_ref_trigamma)

/* a - n b with n = a / b rounded towards 0: exact while n is below 2^23, where the rounded quotient
 * is n or the next one, by instructions that don't round n b; else element by element. */
KN_FORMULA v_fmod(vf a, vf b)
{
#ifdef __FMA__
    const vf n = v_abs(a / b), size = v_abs(b), rest = v_fnma(v_floor(n), size, v_abs(a));
    if (!v_any(v_ge(n, v_set1(0x1p23f)) | v_eq(size, v_set1(__builtin_inff()))))
        return v_copysign(v_sel(v_lt(rest, v_zero()), rest + size, rest), a);
#endif
    for (int i = 0; i < KN_VW; i++)
        a[i] = copysignf(fmodf(a[i], b[i]), a[i]); /* the sign of NaN, too */
    return a;
}

#include "kernels/formulas.h"

/* 2 sqrt(2/pi) (x + 0.044715 x^3) */
KN_FORMULA gelu_inner(vf x)
{
    const vf x2 = x * x;
    return v_set1(2.0f) * (x * v_fma(x2, v_set1(0.79788456f * 0.044715f), v_set1(0.79788456f)));
}

/* (1 + tanh u) / 2 = sigmoid(2u) */
KN_FORMULA v_gelu_tanh(vf x)
{
    return v_gated(x, gelu_inner(x));
}

/* With s = sigmoid(2u): y = x s, y' = s + x s (1 - s) 2u', u' = sqrt(2/pi) (1 + 0.134145 x^2) */
KN_FORMULA v_gelu_tanh_slope(vf given)
{
    vf rest;
    const vf x = v_clamp(given, v_set1(-30.0f), v_set1(30.0f));
    const vf s = v_sigmoids(gelu_inner(x), &rest);
    const vf du = v_fma(x * x, v_set1(1.59576912f * 0.134145f), v_set1(1.59576912f));
    return v_fma(x * (s * rest), du, s);
}

/* tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2) */
KN_FORMULA mish_n(vf e)
{
    return e * (e + v_set1(2.0f));
}

KN_FORMULA v_mish(vf x)
{
    const vf n = mish_n(v_exp(v_min(v_set1(30.0f), x))); /* stays finite */
    return x * (n / (n + v_set1(2.0f)));
}

/* With t = n / (n + 2) and s = sigmoid(x): t + x s (1 - t^2), 1 - t = 2 / (n + 2) */
KN_FORMULA v_mish_slope(vf given)
{
    const vf x = v_bounded(given);
    const vf one = v_set1(1.0f), two = v_set1(2.0f), e = v_exp(v_min(v_set1(30.0f), x));
    const vf n = mish_n(e), t = n / (n + two);
    return v_fma(x * (e / (one + e)), (two / (n + two)) * (one + t), t);
}

#endif
