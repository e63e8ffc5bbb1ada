/* kernels/cpu/vec/math.h (private): elementary functions on vectors, to about 2 units in the last
 * place. Polynomials are fits made for this file at Chebyshev points; coefficients run from the
 * constant term up. Each lane depends on its own input only. */
#ifndef KNAP_KERNELS_CPU_VEC_MATH_H
#define KNAP_KERNELS_CPU_VEC_MATH_H

#include "kernels/cpu/vec/vec.h"

/* c[0] + c[1] x + ... + c[n-1] x^(n-1) */
VEC_INLINE vf v_poly(vf x, const float *c, int n)
{
    vf r = v_set1(c[n - 1]);
    for (int i = n - 2; i >= 0; i--)
        r = v_fma(r, x, v_set1(c[i]));
    return r;
}

/* 2^k for integer-valued k in [-126, 127] */
VEC_INLINE vf v_exp2_int(vi k)
{
    return (vf)((k + v_set1_i(127)) << 23);
}

/* The nearest integer, from the middle the even one; zeros keep their signs; inf and NaN pass. */
VEC_INLINE vf v_round(vf x)
{
    const vf magic = v_set1(0x1p23f), a = v_abs(x);
    return v_sel(v_lt(a, magic), v_copysign((a + magic) - magic, x), x);
}

/* The largest integer that isn't above x. */
VEC_INLINE vf v_floor(vf x)
{
    const vf r = v_round(x);
    return v_copysign(v_sel(v_gt(r, x), r - v_set1(1.0f), r), x);
}

/* e^r - 1 for x = k ln 2 + r with |r| <= ln(2)/2 and an integer k, |x| < 127: r + r^2 q(r) */
VEC_INLINE vf v_exp_rest(vf x, vi *k)
{
    static const float q[] = { 0.5f, 0.1666657667f, 0.04166655421f, 0.008363232884f,
                               0.001392625083f };
    const float magic = 0x1.8p23f; /* adding it rounds to an integer in the low bits */
    const vf t = v_fma(x, v_set1(1.44269504f), v_set1(magic));
    const vf kf = t - v_set1(magic);
    *k = (vi)t - (vi)v_set1(magic);
    vf r = v_fnma(kf, v_set1(0x1.62e4p-1f), x); /* ln 2 in two parts, the first of 15 bits */
    r = v_fnma(kf, v_set1(0x1.7f7d1cp-20f), r);
    return v_fma(r * r, v_poly(r, q, 5), r);
}

/* e^x = 2^k e^r. Gives inf above 88.73, subnormals and then 0 below -87.34. */
VEC_INLINE vf v_exp(vf x)
{
    vi k;
    const vf e = v_exp_rest(v_max(v_set1(-105.0f), v_min(v_set1(89.0f), x)), &k) + v_set1(1.0f);
    const vi half = k >> 1; /* 2^k in two factors: k may lie beyond a float's exponents */
    return e * v_exp2_int(half) * v_exp2_int(k - half);
}

/* The same bits where e^x is a normal number, for x in [-87, 88.3]; inf up to 89; NaN passes. */
VEC_INLINE vf v_exp_normal(vf x)
{
    vi k;
    const vf e = v_exp_rest(x, &k) + v_set1(1.0f);
    return e * v_exp2_int(k);
}

/* e^x - 1 = 2^k (e^r - 1) + (2^k - 1); from 30 on the 1 is lost in e^x */
VEC_INLINE vf v_expm1(vf x)
{
    vi k;
    const vf rest = v_exp_rest(v_max(v_set1(-30.0f), v_min(v_set1(30.0f), x)), &k);
    const vf scale = v_exp2_int(k);
    return v_sel(v_gt(x, v_set1(30.0f)), v_exp(x), v_fma(scale, rest, scale - v_set1(1.0f)));
}

/* log x = k log 2 + log m with m in [sqrt(1/2), sqrt 2); with s = (m-1)/(m+1),
 * log m = 2 atanh s = 2 s + s^3 R(s^2). */
VEC_INLINE vf v_log(vf x)
{
    static const float c[] = { 0.6666666655f, 0.4000012221f, 0.2855077863f, 0.2331161447f };
    const vm tiny = v_lt(x, v_set1(0x1p-126f));
    const vf y = v_sel(tiny, x * v_set1(0x1p23f), x);
    const vi base = v_set1_i(0x3f3504f3); /* sqrt(1/2) */
    const vi up = (vi)((vu)y - (vu)base); /* wraps where x is negative */
    const vf k = v_to_float(up >> 23) - v_sel(tiny, v_set1(23.0f), v_zero());
    const vf f = (vf)((up & v_set1_i(0x7fffff)) + base) - v_set1(1.0f);
    const vf s = f / (f + v_set1(2.0f));
    const vf z = s * s;
    /* f - s f = 2 s keeps the bits of small f */
    const vf low = v_fma(k, v_set1(0x1.7f7d1cp-20f), s * (z * v_poly(z, c, 4) - f));
    vf r = v_fma(k, v_set1(0x1.62e4p-1f), f + low);
    r = v_sel(v_eq(x, v_zero()), v_set1(-__builtin_inff()), r);
    r = v_sel(v_lt(x, v_zero()), v_set1(__builtin_nanf("")), r);
    /* inf and NaN pass through */
    return v_sel(v_lt(x, v_set1(__builtin_inff())), r, x);
}

/* log(1 + x) = log u + (x - (u - 1)) / u with u = 1 + x rounded: the second term was lost. */
VEC_INLINE vf v_log1p(vf x)
{
    const vf one = v_set1(1.0f), u = one + x, l = v_log(u);
    const vm finite = v_lt(v_abs(l), v_set1(__builtin_inff()));
    return l + v_sel(finite, (x - (u - one)) / u, v_zero());
}

/* 1 / (1 + e^-x) */
VEC_INLINE vf v_sigmoid(vf x)
{
    const vf one = v_set1(1.0f);
    return one / (one + v_exp(-x));
}

/* x + x^3 P(x^2) near 0, else sign(x) (1 - 2 / (e^(2|x|) + 1)) */
VEC_INLINE vf v_tanh(vf x)
{
    static const float p[] = { -0.3333332702f, 0.1333258371f, -0.05382375887f, 0.02087346058f,
                               -0.005923726206f };
    const vf z = x * x, a = v_abs(x), one = v_set1(1.0f);
    const vf near = v_fma(x * z, v_poly(z, p, 5), x);
    const vf far = one - v_set1(2.0f) / (v_exp(a + a) + one);
    return v_copysign(v_sel(v_lt(a, v_set1(0.625f)), near, far), x);
}

/* erfinv(x) / x is a polynomial of w = -log(1 - x^2) below 5, and of sqrt w beyond. */
VEC_INLINE vf v_erfinv(vf x)
{
    static const float near[] = { 1.501409411f,     0.2466407269f,    -0.004177707713f,
                                  -0.0012537078f,   0.0002186019701f, -4.396707482e-06f,
                                  -3.52879897e-06f, 3.437202736e-07f, 2.85297439e-08f };
    static const float far[] = { 3.001526594f,    1.004294991f,      0.006409479305f,
                                 -0.00465971604f, 0.00324557256f,    -0.002347250702f,
                                 0.001262883889f, -0.0001322441822f, -0.0001597161463f };
    const vf one = v_set1(1.0f), w = -v_log((one - x) * (one + x));
    const vf beyond = v_poly(v_sqrt(w) - v_set1(3.1680340f), far, 9);
    const vf slope = v_sel(v_lt(w, v_set1(5.0f)), v_poly(w - v_set1(2.5f), near, 9), beyond);
    return x * v_sel(v_eq(v_abs(x), one), v_set1(__builtin_inff()), slope);
}

/* ---- words of LIBM kinds (kernels/kinds.h): glibc's libmvec ---------------------------------- */

#ifdef KN_HAVE_MVEC
#if KN_VW == 16
#define VEC_LIBM(name, args) _ZGVeN16##args##_##name##f
typedef __m512 vec_libm;
#elif KN_VW == 8
#define VEC_LIBM(name, args) _ZGVdN8##args##_##name##f
typedef __m256 vec_libm;
#else
#define VEC_LIBM(name, args) _ZGVbN4##args##_##name##f
typedef vf vec_libm;
#endif
#define VEC_LIBM_WORD(name)                                                                        \
    vec_libm VEC_LIBM(name, v)(vec_libm);                                                          \
    VEC_INLINE vf v_##name(vf x)                                                                   \
    {                                                                                              \
        return (vf)VEC_LIBM(name, v)((vec_libm)x);                                                 \
    }
VEC_LIBM_WORD(exp2)
VEC_LIBM_WORD(log2)
VEC_LIBM_WORD(log10)
VEC_LIBM_WORD(sin)
VEC_LIBM_WORD(cos)
VEC_LIBM_WORD(tan)
VEC_LIBM_WORD(asin)
VEC_LIBM_WORD(acos)
VEC_LIBM_WORD(atan)
VEC_LIBM_WORD(sinh)
VEC_LIBM_WORD(cosh)
VEC_LIBM_WORD(asinh)
VEC_LIBM_WORD(acosh)
VEC_LIBM_WORD(atanh)
VEC_LIBM_WORD(erfc)

#define VEC_LIBM_WORD_OF_TWO(name)                                                                 \
    vec_libm VEC_LIBM(name, vv)(vec_libm, vec_libm);                                               \
    VEC_INLINE vf v_##name(vf x, vf y)                                                             \
    {                                                                                              \
        return (vf)VEC_LIBM(name, vv)((vec_libm)x, (vec_libm)y);                                   \
    }
VEC_LIBM_WORD_OF_TWO(pow)
VEC_LIBM_WORD_OF_TWO(atan2)
VEC_LIBM_WORD(erf)
#endif

/* erfc(t) / e^(-t^2) = R(1 / (1 + 0.4 t)) for t >= 0.98; any smaller t gives garbage. */
VEC_INLINE vf v_erfc_scaled(vf t)
{
    static const float c[] = { 3.127363594e-6f, 0.2255660124f,    0.2271871204f, 0.1966223705f,
                               0.2185432241f,   0.0001247118718f, 0.2501158067f, -0.1184326194f };
    const vf one = v_set1(1.0f), u = one / v_fma(t, v_set1(0.4f), one);
    return v_poly(u, c, 8);
}

/* erf(x) / x for |x| <= 1, z = x^2 */
VEC_INLINE vf v_erf_near(vf z)
{
    static const float c[] = { 1.1283791658f,   -0.3761262667f,    0.1128359472f,  -0.02685421201f,
                               0.005189087423f, -0.0008016864287f, 7.875875063e-5f };
    return v_poly(z, c, 7);
}

#ifndef KN_HAVE_MVEC
VEC_INLINE vf v_erf(vf x)
{
    const vf a = v_abs(x), one = v_set1(1.0f);
    const vf far = v_copysign(one - v_exp(-(a * a)) * v_erfc_scaled(a), x);
    return v_sel(v_lt(a, one), x * v_erf_near(x * x), far);
}
#endif

/* The normal distribution Phi(x) = (1 + erf(x / sqrt 2)) / 2, by e = e^(-x^2 / 2), which the
 * density is a multiple of. */
VEC_INLINE vf v_normal_of(vf x, vf e)
{
    const vf z = x * v_set1(0.70710678f), a = v_abs(z), one = v_set1(1.0f), half = v_set1(0.5f);
    const vf tail = half * e * v_erfc_scaled(a);
    const vf far = v_sel(v_lt(x, v_zero()), tail, one - tail);
    const vf near = v_fma(half * z, v_erf_near(z * z), half);
    return v_sel(v_lt(a, one), near, far);
}

VEC_INLINE vf v_normal_cdf(vf x)
{
    return v_normal_of(x, v_exp(v_set1(-0.5f) * x * x));
}

#endif
