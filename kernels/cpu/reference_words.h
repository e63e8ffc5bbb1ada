/* kernels/cpu/reference_words.h (private): the words of formulas (kernels/formulas.h) on double. */
#ifndef KNAP_KERNELS_CPU_REFERENCE_WORDS_H
#define KNAP_KERNELS_CPU_REFERENCE_WORDS_H

#include "kernels/integers.h"

#include <math.h>

#define v_num      double
#define KN_FORMULA static inline double

/* two roundings: the same on every machine */
#define v_fma(a, b, c) ((a) * (b) + (c))

/* x sigmoid(u) */
KN_FORMULA v_gated(double x, double u)
{
    return x * (1 / (1 + exp(-u)));
}

KN_FORMULA v_sigmoids(double u, double *rest)
{
    const double s = v_gated(1, u);
    *rest = 1 - s;
    return s;
}

#define v_within(x, bound, of_f32) v_clamp(x, -(bound), bound)

#include "kernels/scalar_words.h"

KN_FORMULA v_gelu_tanh(double x)
{
    return 0.5 * x * (1 + tanh(0.79788456080286535588 * (x + 0.044715 * x * x * x)));
}

#endif
