/* kernels/integers.h (private): the kinds of kernels/kinds.h on integers and bool, which every
 * provider computes in 64 bits. Sums and products wrap around (so they are unsigned), parameters
 * are truncated. */
#ifndef KNAP_KERNELS_INTEGERS_H
#define KNAP_KERNELS_INTEGERS_H

#include "kernels/convert.h"
#include "kernels/kinds.h"

/* A parameter of a kind; CLAMP's bounds may be infinite. */
static inline int64_t kn_int_param(double p)
{
    return p <= -0x1p63 ? INT64_MIN : p >= 0x1p63 ? INT64_MAX : (int64_t)p;
}

static inline KN_HD int64_t kn_int_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline KN_HD int64_t kn_int_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* 0 of x / 0; INT64_MIN / -1 would overflow */
static inline KN_HD int64_t kn_int_div(int64_t a, int64_t b)
{
    return b == -1 ? (int64_t)(0 - (uint64_t)a) : b == 0 ? 0 : a / b;
}

/* What kn_int_div leaves, and the same of a quotient that is rounded down, whose sign is b's */
static inline KN_HD int64_t kn_int_fmod(int64_t a, int64_t b)
{
    return b == -1 || b == 0 ? 0 : a % b;
}

static inline KN_HD int64_t kn_int_remainder(int64_t a, int64_t b)
{
    const int64_t rest = kn_int_fmod(a, b);
    return rest && (rest < 0) != (b < 0) ? rest + b : rest;
}

static inline KN_HD int64_t kn_int_floor_div(int64_t a, int64_t b)
{
    const int64_t rest = kn_int_fmod(a, b);
    return kn_int_div(a, b) - (rest && (rest < 0) != (b < 0));
}

/* The words of the rows that integers take; undefined below. */
#define v_abs(x)          ((int64_t)(x) < 0 ? 0 - (x) : (x))
#define v_sign(x)         (((int64_t)(x) > 0) - ((int64_t)(x) < 0))
#define v_floor(x)        (x)
#define v_ceil(x)         (x)
#define v_round(x)        (x)
#define v_trunc(x)        (x)
#define v_relu(x)         kn_int_max((int64_t)(x), 0)
#define v_fma(a, b, c)    ((a) * (b) + (c))
#define v_clamp(x, l, h)  kn_int_min(kn_int_max((int64_t)(x), (int64_t)(l)), (int64_t)(h))
#define v_div(a, b)       kn_int_div((int64_t)(a), (int64_t)(b))
#define v_floor_div(a, b) kn_int_floor_div((int64_t)(a), (int64_t)(b))
#define v_remainder(a, b) kn_int_remainder((int64_t)(a), (int64_t)(b))
#define v_fmod(a, b)      kn_int_fmod((int64_t)(a), (int64_t)(b))
#define v_maximum(a, b)   kn_int_max((int64_t)(a), (int64_t)(b))
#define v_minimum(a, b)   kn_int_min((int64_t)(a), (int64_t)(b))

#define KN_INT_FLOATS(kind, formula)
#define KN_INT_NUMBERS(kind, formula)                                                              \
    case KN_##kind:                                                                                \
        return (int64_t)(formula);
#define KN_INT_BOOLS KN_INT_NUMBERS
#define KN_INT_CASE(kind, name, function, reads, dtypes, domain, work, formula, ...)               \
    KN_INT_##dtypes(kind, formula)

static inline KN_HD int64_t kn_int_unary(kn_unary kind, int64_t of, int64_t low, int64_t high)
{
    const uint64_t x = (uint64_t)of, p0 = (uint64_t)low, p1 = (uint64_t)high;
    switch (kind) {
        KN_UNARY_KINDS(KN_INT_CASE)
    default:
        return of;
    }
}

static inline KN_HD int64_t kn_int_arithmetic(kn_binary kind, int64_t first, int64_t second)
{
    const uint64_t a = (uint64_t)first, b = (uint64_t)second;
    switch (kind) {
        KN_ARITHMETIC_KINDS(KN_INT_CASE)
    default:
        return first;
    }
}

#undef v_abs
#undef v_sign
#undef v_floor
#undef v_ceil
#undef v_round
#undef v_relu
#undef v_trunc
#undef v_fma
#undef v_clamp
#undef v_div
#undef v_floor_div
#undef v_remainder
#undef v_fmod
#undef v_maximum
#undef v_minimum

#endif
