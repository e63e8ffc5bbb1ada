/* kernels/join.h (private): how two numbers become one (kn_join), in C and on a GPU. */
#ifndef KNAP_KERNELS_JOIN_H
#define KNAP_KERNELS_JOIN_H

#include "kernels/integers.h"
#include "kernels/kernels.h"
#include <math.h>

/* A sum or product of two floats, rounded to float, is the float operation. */
static inline KN_HD double kn_joined(kn_join by, double a, double b)
{
    switch (by) {
    case KN_JOIN_PRODUCT:
        return a * b;
    case KN_JOIN_MAX:
        return a != a || a > b ? a : b;
    case KN_JOIN_MIN:
        return a != a || a < b ? a : b;
    case KN_JOIN_LOG_SUM: {
        const double high = a != a || a > b ? a : b, low = a > b ? b : a;
        return isinf(high) || isnan(high) ? high : high + log1p(exp(low - high));
    }
    default:
        return a + b;
    }
}

static inline KN_HD int64_t kn_joined_int(kn_join by, int64_t a, int64_t b)
{
    switch (by) {
    case KN_JOIN_PRODUCT:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    case KN_JOIN_MAX:
        return kn_int_max(a, b);
    case KN_JOIN_MIN:
        return kn_int_min(a, b);
    default:
        return (int64_t)((uint64_t)a + (uint64_t)b);
    }
}

/* What joins with any x to x. */
static inline double kn_join_neutral(kn_join by)
{
    return by == KN_JOIN_SUM       ? 0
           : by == KN_JOIN_PRODUCT ? 1
           : by == KN_JOIN_MIN     ? INFINITY
                                   : -INFINITY;
}

static inline int64_t kn_join_neutral_int(kn_join by)
{
    return by == KN_JOIN_MAX ? INT64_MIN : by == KN_JOIN_MIN ? INT64_MAX : by == KN_JOIN_PRODUCT;
}

#endif
