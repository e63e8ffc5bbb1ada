/* kernels/cuda/kernels/exponentials.cuh (private): e^x and 1/x of f32 in few instructions, for
 * kernels that would compute longer than they wait for memory: a GPU that reads 2 bytes an element
 * has time for about 13 instructions an element, and a division alone takes as many.
 *
 * e^x is 2^(x log2 e): one product, rounded, and the GPU's unit for powers of 2. Its error is
 * relative, at most 7.3e-8 |x| (the product's rounding, and 1.9e-8 that log2 e lacks) and 2 units
 * in the last place (CUDA's guide, ex2.approx): 1e-6 at x = -10, 7e-6 at -87, where the value is
 * 1e-38. In sums of such terms beside 1 the errors weigh as the terms: at most 3e-7 of one.
 * Infinities, zero (exactly 1), NaN and subnormal results are as of expf; x above 88.72 may give
 * infinity where expf gives the largest numbers. f64 is computed by the library's functions, and
 * so are exp, tanh and the other elementwise functions of f32, exact to 2 units: they wait for
 * memory anyhow. tests/gpu/cuda_exponentials_test.c holds the bounds. */
#ifndef KNAP_KERNELS_CUDA_EXPONENTIALS_CUH
#define KNAP_KERNELS_CUDA_EXPONENTIALS_CUH

#include "kernels/cuda/kernels/cuda.cuh"

#include <float.h>

#define KN_LOG2_E 1.44269504088896340736f

/* e^x. */
static inline __device__ float kn_exp(float x)
{
    float y = x * KN_LOG2_E;
#ifdef __CUDA_ARCH__
    asm("ex2.approx.f32 %0, %1;" : "=f"(y) : "f"(y));
    return y;
#else
    return exp2f(y);
#endif
}
static inline __device__ double kn_exp(double x)
{
    return exp(x);
}

/* e^x as a term beside one that isn't small: 0 where it is below the smallest normal number, 1e-38.
 * That saves three of five instructions. */
static inline __device__ float kn_exp_term(float x)
{
    float y = x * KN_LOG2_E;
#ifdef __CUDA_ARCH__
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(y));
    return y;
#else
    y = exp2f(y);
    return y < FLT_MIN ? 0 : y;
#endif
}
static inline __device__ double kn_exp_term(double x)
{
    return exp(x);
}

/* 1/x for x of at least 1, within 1 unit in the last place; 0 above 2^126. */
static inline __device__ float kn_reciprocal(float x)
{
#ifdef __CUDA_ARCH__
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(x) : "f"(x));
    return x;
#else
    x = 1 / x;
    return x < FLT_MIN ? 0 : x;
#endif
}
static inline __device__ double kn_reciprocal(double x)
{
    return 1 / x;
}

#endif
