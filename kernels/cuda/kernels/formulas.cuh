/* kernels/cuda/kernels/formulas.cuh (private): the words of formulas (kernels/formulas.h) on float
 * and double, and loops over V elements for the kinds of kernels/kinds.h. */
#ifndef KNAP_KERNELS_CUDA_FORMULAS_CUH
#define KNAP_KERNELS_CUDA_FORMULAS_CUH

#include "kernels/integers.h"
#include "kernels/cuda/kernels/elements.cuh"
#include "kernels/cuda/kernels/exponentials.cuh"

#define v_num          A
#define KN_FORMULA     template <typename A> static inline __device__ A
#define v_fma(a, b, c) kn_fma_rn(a, b, c)

/* x / (1 + exp(-u)). Of f32 within 1.5e-7 |u| and 6 units in the last place. */
static inline __device__ double v_gated(double x, double u)
{
    return x / kn_add_rn(1.0, exp(-u));
}
static inline __device__ float v_gated(float x, float u)
{
    return kn_mul_rn(x, kn_reciprocal(kn_add_rn(1.0f, kn_exp_term(-u))));
}

/* s = sigmoid(u) and 1 - s, of f32 without the difference, which would lose all places where s is
 * near 1; u is at least -88. */
static inline __device__ double v_sigmoids(double u, double *rest)
{
    double s = v_gated(1.0, u);
    *rest = 1 - s;
    return s;
}
static inline __device__ float v_sigmoids(float u, float *rest)
{
    float e = kn_exp_term(-u), s = kn_reciprocal(kn_add_rn(1.0f, e));
    *rest = kn_mul_rn(e, s);
    return s;
}

/* For sigmoids() f32's bound is nearer: where e^-u is finite. NaN passes. */
KN_FORMULA v_within(A x, A bound, float of_f32)
{
    bound = sizeof(A) == sizeof(float) ? (A)of_f32 : bound;
    return x > bound ? bound : x < -bound ? -bound : x;
}

#include "kernels/scalar_words.h"

/* 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3). */
KN_FORMULA v_gelu_tanh(A x)
{
    const double two_c = 2 * 0.79788456080286535588;
    return v_gated(x, x * v_fma((A)(two_c * 0.044715), x * x, (A)two_c));
}

/* A row's case in a switch over the kinds: the short ones are unrolled, `statement` once for each v
 * below V; LONG and LIBM ones are left to the default. */
#define KN_UNROLLED_LIGHT(kind, statement)                                                         \
    case kind: {                                                                                   \
        _Pragma("unroll") for (int v = 0; v < V; v++)                                              \
        {                                                                                          \
            statement;                                                                             \
        }                                                                                          \
        break;                                                                                     \
    }
#define KN_UNROLLED_HEAVY KN_UNROLLED_LIGHT
#define KN_UNROLLED_LONG(kind, statement)
#define KN_UNROLLED_LIBM KN_UNROLLED_LONG

/* And the long ones' case in the function that the default calls in a loop. */
#define KN_ROLLED_LIGHT(kind, formula)
#define KN_ROLLED_HEAVY(kind, formula)
#define KN_ROLLED_LONG(kind, formula)                                                              \
    case kind:                                                                                     \
        return formula;
#define KN_ROLLED_LIBM KN_ROLLED_LONG

#endif
