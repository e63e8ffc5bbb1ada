/* kernels/kinds.h: the kinds of unary and binary operations. A kind is one row: its name, its
 * formula and every fact about it. The enums, autograd's operations and functions, what backward
 * saves, the loops of the providers, costs, messages and the lists of the tests are all made from
 * the rows. docs/change.md lists what a new kind touches. */
#ifndef KNAP_KERNELS_KINDS_H
#define KNAP_KERNELS_KINDS_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The values that a derivative reads besides the gradient of the result: bits. Backward saves just
 * these. */
enum {
    KN_READS_NOTHING = 0,
    KN_READS_X = 1, /* y = f(x) */
    KN_READS_Y = 2,
    KN_READS_A = 1, /* out = a op b */
    KN_READS_B = 2,
    KN_READS_OUT = 4,
    KN_READS_AB = KN_READS_A | KN_READS_B,
    KN_READS_B_OUT = KN_READS_B | KN_READS_OUT,
    KN_READS_AB_OUT = KN_READS_AB | KN_READS_OUT,
    KN_READS_NO_GRAD = 8 /* there is no derivative */
};

/* The dtypes for which a kind is defined. */
typedef enum kn_kind_dtypes {
    KN_NO_DTYPES /* of a number that is no kind */,
    KN_FLOATS,
    KN_NUMBERS /* floats and integers */,
    KN_BOOLS
} kn_kind_dtypes;

KN_API bool kn_dtype_is_int(kn_dtype t);        /* i64, i32, u8, bool */
KN_API bool kn_dtype_is_arithmetic(kn_dtype t); /* one of these or a float */

/* How long a kind computes. */
typedef enum kn_kind_work { KN_LIGHT, KN_HEAVY, KN_LONG, KN_LIBM } kn_kind_work;

/* The columns of a unary kind:
 *   function  how autograd/operations.h offers it: PLAIN, kn_<name>(x); PARAMS, functions with p0
 *             and p1, written by hand in autograd/ops_elementwise.c
 *   reads     X, Y or NOTHING: what the derivative reads; NO_GRAD: there is no derivative
 *   dtypes    FLOATS, NUMBERS or BOOLS
 *   domain    where tests draw inputs: LINE, all numbers; POSITIVE; NONZERO, where the last operand
 *             divides; UNIT, from 0 to 1; ABOVE, beyond 1
 *   work      LIGHT; HEAVY: an exponential or the like, so fewer elements are worth another thread;
 *             LONG: many instructions, so a GPU's loop over them stays a loop; LIBM: the same, and
 *             the CPU's vector provider takes it by libmvec, where there is one
 *   formula   y = f(x), with p0 and p1, in words that every provider defines for its numbers
 *             (kernels/formulas.h)
 *   gradient  dx = d f'(x), where d is dy. A slope that is chosen to be 0 lets nothing pass, also
 *             no infinite d */
/* clang-format off */
#define KN_UNARY_KINDS(ROW)                                                                        \
    ROW(NEG, neg, PLAIN, NOTHING, NUMBERS, LINE, LIGHT,                                            \
        -x,                              -d)                                                       \
    ROW(ABS, abs, PLAIN, X, NUMBERS, LINE, LIGHT,                                                  \
        v_abs(x),                        d * v_sign(x))                                            \
    ROW(SIGN, sign, PLAIN, NOTHING, NUMBERS, LINE, LIGHT,                                          \
        v_sign(x),                       v_zero())                                                 \
    ROW(FLOOR, floor, PLAIN, NOTHING, NUMBERS, LINE, LIGHT,                                        \
        v_floor(x),                      v_zero())                                                 \
    ROW(CEIL, ceil, PLAIN, NOTHING, NUMBERS, LINE, LIGHT,                                          \
        v_ceil(x),                       v_zero())                                                 \
    /* to the nearest integer, from the middle to the even one */                                  \
    ROW(ROUND, round, PLAIN, NOTHING, NUMBERS, LINE, LIGHT,                                        \
        v_round(x),                      v_zero())                                                 \
    /* towards 0, and what that leaves */                                                          \
    ROW(TRUNC, trunc, PLAIN, NOTHING, NUMBERS, LINE, LIGHT,                                        \
        v_trunc(x),                      v_zero())                                                 \
    ROW(FRAC, frac, PLAIN, NOTHING, FLOATS, LINE, LIGHT,                                           \
        x - v_trunc(x),                  d)                                                        \
    ROW(SQUARE, square, PLAIN, X, NUMBERS, LINE, LIGHT,                                            \
        x * x,                           d * (x + x))                                              \
    ROW(EXP, exp, PLAIN, Y, FLOATS, LINE, HEAVY,                                                   \
        v_exp(x),                        d * y)                                                    \
    ROW(EXP2, exp2, PLAIN, Y, FLOATS, LINE, LIBM,                                                  \
        v_exp2(x),                       d * (y * v_set1(0.69314718055994530942)))                 \
    /* e^x - 1 */                                                                                  \
    ROW(EXPM1, expm1, PLAIN, Y, FLOATS, LINE, LONG,                                                \
        v_expm1(x),                      d * (y + v_set1(1)))                                      \
    ROW(LOG, log, PLAIN, X, FLOATS, POSITIVE, LONG,                                                \
        v_log(x),                        v_ratio(d, v_set1(1), x))                                 \
    /* log(1 + x) */                                                                               \
    ROW(LOG1P, log1p, PLAIN, X, FLOATS, POSITIVE, LONG,                                            \
        v_log1p(x),                      v_ratio(d, v_set1(1), v_set1(1) + x))                     \
    ROW(LOG2, log2, PLAIN, X, FLOATS, POSITIVE, LIBM,                                              \
        v_log2(x),                       v_ratio(d, v_set1(1.44269504088896340736), x))            \
    ROW(LOG10, log10, PLAIN, X, FLOATS, POSITIVE, LIBM,                                            \
        v_log10(x),                      v_ratio(d, v_set1(0.43429448190325182765), x))            \
    ROW(SQRT, sqrt, PLAIN, Y, FLOATS, POSITIVE, LIGHT,                                             \
        v_sqrt(x),                       v_ratio(d, v_set1(0.5), y))                               \
    ROW(RSQRT, rsqrt, PLAIN, Y, FLOATS, POSITIVE, LIGHT,                                           \
        v_set1(1) / v_sqrt(x),           d * (v_set1(-0.5) * y * y * y))                           \
    ROW(RECIP, reciprocal, PLAIN, Y, FLOATS, NONZERO, LIGHT,                                       \
        v_set1(1) / x,                   d * (-y * y))                                             \
    ROW(SIN, sin, PLAIN, X, FLOATS, LINE, LIBM,                                                    \
        v_sin(x),                        d * v_cos(x))                                             \
    ROW(COS, cos, PLAIN, X, FLOATS, LINE, LIBM,                                                    \
        v_cos(x),                        d * -v_sin(x))                                            \
    ROW(TAN, tan, PLAIN, Y, FLOATS, LINE, LIBM,                                                    \
        v_tan(x),                        d * v_fma(y, y, v_set1(1)))                               \
    ROW(ATAN, atan, PLAIN, X, FLOATS, LINE, LIBM,                                                  \
        v_atan(x),                       v_ratio(d, v_set1(1), v_fma(x, x, v_set1(1))))            \
    ROW(ASIN, asin, PLAIN, X, FLOATS, UNIT, LIBM,                                                  \
        v_asin(x),                       v_ratio(d, v_set1(1), v_sqrt((1 - x) * (1 + x))))         \
    ROW(ACOS, acos, PLAIN, X, FLOATS, UNIT, LIBM,                                                  \
        v_acos(x),                       v_ratio(d, v_set1(-1), v_sqrt((1 - x) * (1 + x))))        \
    ROW(SINH, sinh, PLAIN, X, FLOATS, LINE, LIBM,                                                  \
        v_sinh(x),                       d * v_cosh(x))                                            \
    ROW(COSH, cosh, PLAIN, X, FLOATS, LINE, LIBM,                                                  \
        v_cosh(x),                       d * v_sinh(x))                                            \
    ROW(ASINH, asinh, PLAIN, X, FLOATS, LINE, LIBM,                                                \
        v_asinh(x),                      v_ratio(d, v_set1(1), v_sqrt(v_fma(x, x, v_set1(1)))))    \
    ROW(ACOSH, acosh, PLAIN, X, FLOATS, ABOVE, LIBM,                                               \
        v_acosh(x),                      v_ratio(d, v_set1(1), v_sqrt(x - 1) * v_sqrt(x + 1)))     \
    ROW(ATANH, atanh, PLAIN, X, FLOATS, UNIT, LIBM,                                                \
        v_atanh(x),                      v_ratio(d, v_set1(1), (1 - x) * (1 + x)))                 \
    ROW(ERF, erf, PLAIN, X, FLOATS, LINE, LONG,                                                    \
        v_erf(x),                        d * (v_set1(1.12837916709551257390) * v_exp(-x * x)))     \
    ROW(ERFC, erfc, PLAIN, X, FLOATS, LINE, LIBM,                                                  \
        v_erfc(x),                       d * (v_set1(-1.12837916709551257390) * v_exp(-x * x)))    \
    ROW(ERFINV, erfinv, PLAIN, Y, FLOATS, UNIT, LONG,                                              \
        v_erfinv(x),                     d * (v_set1(0.88622692545275801365) * v_exp(y * y)))      \
    /* log |gamma(x)| and its derivative */                                                        \
    ROW(LGAMMA, lgamma, PLAIN, X, FLOATS, POSITIVE, LONG,                                          \
        v_lgamma(x),                     d * v_digamma(x))                                         \
    ROW(DIGAMMA, digamma, PLAIN, X, FLOATS, POSITIVE, LONG,                                        \
        v_digamma(x),                    d * v_trigamma(x))                                        \
    ROW(TANH, tanh, PLAIN, Y, FLOATS, LINE, HEAVY,                                                 \
        v_tanh(x),                       d * v_fma(-y, y, v_set1(1)))                              \
    ROW(SIGMOID, sigmoid, PLAIN, Y, FLOATS, LINE, HEAVY,                                           \
        v_sigmoid(x),                    d * (y * (v_set1(1) - y)))                                \
    /* log(sigmoid(x)) */                                                                          \
    ROW(LOGSIGMOID, logsigmoid, PLAIN, X, FLOATS, LINE, LONG,                                      \
        -v_softplus(-x),                 d * v_sigmoid(-x))                                        \
    ROW(RELU, relu, PLAIN, Y, NUMBERS, LINE, LIGHT,                                                \
        v_relu(x),                       v_sel(v_le(y, v_zero()), v_zero(), d))                    \
    /* max(x, 0)^2 */                                                                              \
    ROW(RELU_SQUARED, relu_squared, PLAIN, X, FLOATS, LINE, LIGHT,                                 \
        v_relu(x) * v_relu(x),           v_sel(v_le(x, v_zero()), v_zero(), d * (x + x)))          \
    /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */                                          \
    ROW(GELU_TANH, gelu_tanh, PLAIN, X, FLOATS, LINE, HEAVY,                                       \
        v_gelu_tanh(x),                  d * v_gelu_tanh_slope(x))                                 \
    /* 0.5 x (1 + erf(x / sqrt 2)) */                                                              \
    ROW(GELU, gelu, PLAIN, X, FLOATS, LINE, LONG,                                                  \
        x * v_normal_cdf(x),             d * v_gelu_slope(x))                                      \
    /* x sigmoid(x) */                                                                             \
    ROW(SILU, silu, PLAIN, X, FLOATS, LINE, HEAVY,                                                 \
        v_gated(x, x),                   d * v_gated_slope(x))                                     \
    /* x tanh(log(1 + e^x)) */                                                                     \
    ROW(MISH, mish, PLAIN, X, FLOATS, LINE, LONG,                                                  \
        v_mish(x),                       d * v_mish_slope(x))                                      \
    /* min(max(x + 3, 0), 6) / 6 */                                                                \
    ROW(HARDSIGMOID, hardsigmoid, PLAIN, X, FLOATS, LINE, LIGHT,                                   \
        v_hardsigmoid(x),                                                                          \
        v_inside(x, v_set1(-3), v_set1(3), d * v_set1(1.0 / 6)))                                   \
    /* x hardsigmoid(x) */                                                                         \
    ROW(HARDSWISH, hardswish, PLAIN, X, FLOATS, LINE, LIGHT,                                       \
        x * v_hardsigmoid(x),            d * v_hardswish_slope(x))                                 \
    ROW(SELU, selu, PLAIN, X, FLOATS, LINE, LONG,                                                  \
        v_set1(KN_SELU_SCALE) * v_sel(v_gt(x, v_zero()), x, v_set1(KN_SELU_ALPHA) * v_expm1(x)),   \
        d * v_sel(v_gt(x, v_zero()), v_set1(KN_SELU_SCALE),                                        \
                  v_set1(KN_SELU_SCALE * KN_SELU_ALPHA) * v_exp(x)))                               \
    ROW(SOFTSIGN, softsign, PLAIN, X, FLOATS, LINE, LIGHT,                                         \
        x / (v_set1(1) + v_abs(x)),                                                                \
        v_ratio(d, v_set1(1), (v_set1(1) + v_abs(x)) * (v_set1(1) + v_abs(x))))                    \
    ROW(TANHSHRINK, tanhshrink, PLAIN, X, FLOATS, LINE, HEAVY,                                     \
        x - v_tanh(x),                   d * (v_tanh(x) * v_tanh(x)))                              \
    ROW(LEAKY_RELU, leaky_relu, PARAMS, X, FLOATS, LINE, LIGHT,                                    \
        v_sel(v_gt(x, v_zero()), x, p0 * x),                                                       \
        v_sel(v_gt(x, v_zero()), d, d * p0))                                                       \
    ROW(ELU, elu, PARAMS, X, FLOATS, LINE, LONG,                                                   \
        v_sel(v_gt(x, v_zero()), x, p0 * v_expm1(x)),                                              \
        v_sel(v_gt(x, v_zero()), d, d * (p0 * v_exp(x))))                                          \
    ROW(CELU, celu, PARAMS, X, FLOATS, LINE, LONG,                                                 \
        v_sel(v_gt(x, v_zero()), x, p0 * v_expm1(x / p0)),                                         \
        v_sel(v_gt(x, v_zero()), d, d * v_exp(x / p0)))                                            \
    /* x without those from -p0 to p0, and the same moved towards 0 by p0 */                       \
    ROW(HARDSHRINK, hardshrink, PARAMS, X, FLOATS, LINE, LIGHT,                                    \
        v_outside(x, p0, x, x),          v_sel(v_le(v_abs(x), p0), v_zero(), d))                   \
    ROW(SOFTSHRINK, softshrink, PARAMS, X, FLOATS, LINE, LIGHT,                                    \
        v_outside(x, p0, x - p0, x + p0), v_sel(v_le(v_abs(x), p0), v_zero(), d))                  \
    ROW(SOFTPLUS, softplus, PARAMS, X, FLOATS, LINE, LONG,                                         \
        v_sel(v_gt(p0 * x, p1), x, v_softplus(p0 * x) / p0),                                       \
        v_sel(v_gt(p0 * x, p1), d, d * v_sigmoid(p0 * x)))                                         \
    ROW(AFFINE, affine, PARAMS, NOTHING, NUMBERS, LINE, LIGHT,                                     \
        v_fma(p0, x, p1),                d * p0)                                                   \
    /* vector loops take p0 = 2 as SQUARE */                                                       \
    ROW(POW, pow, PARAMS, X, FLOATS, POSITIVE, LIBM,                                               \
        v_pow(x, p0),                                                                              \
        d * v_sel(v_eq(p0, v_zero()), v_zero(), p0 * v_pow(x, p0 - v_set1(1))))                    \
    /* min(max(x, p0), p1) */                                                                      \
    ROW(CLAMP, clamp, PARAMS, X, NUMBERS, LINE, LIGHT,                                             \
        v_clamp(x, p0, p1),                                                                        \
        v_sel(v_ge(x, p0), v_sel(v_le(x, p1), d, v_zero()), v_zero()))                             \
    /* the same, but its derivative is 0 at p0 and p1 */                                           \
    ROW(HARDTANH, hardtanh, PARAMS, X, NUMBERS, LINE, LIGHT,                                       \
        v_clamp(x, p0, p1),              v_inside(x, p0, p1, d))                                   \
    ROW(NOT, logical_not, PARAMS, NO_GRAD, BOOLS, LINE, LONG,                                      \
        !x,                              v_zero())

/* Of self-normalizing networks (arXiv:1706.02515). */
#define KN_SELU_ALPHA 1.6732632423543772848170429916717
#define KN_SELU_SCALE 1.0507009873554804934193349852946

/* The same columns for a binary kind, but for the gradient, which autograd/ops_elementwise.c makes
 * of kernels. */
#define KN_ARITHMETIC_KINDS(ROW)                                                                  \
    ROW(ADD,        add,        PLAIN,  NOTHING, NUMBERS, LINE,     LIGHT, a + b)                 \
    ROW(SUB,        sub,        PLAIN,  NOTHING, NUMBERS, LINE,     LIGHT, a - b)                 \
    ROW(MUL,        mul,        PLAIN,  AB,      NUMBERS, LINE,     LIGHT, a * b)                 \
    /* x / 0 is 0 of integers */                                                                  \
    ROW(DIV,        div,        PLAIN,  B_OUT,   NUMBERS, NONZERO,  LIGHT, v_div(a, b))           \
    /* NaN with anything gives NaN */                                                             \
    ROW(MAXIMUM,    maximum,    PLAIN,  AB,      NUMBERS, LINE,     LIGHT, v_maximum(a, b))       \
    ROW(MINIMUM,    minimum,    PLAIN,  AB,      NUMBERS, LINE,     LIGHT, v_minimum(a, b))       \
    ROW(POWER,      pow_tensor, PLAIN,  AB_OUT,  FLOATS,  POSITIVE, LIBM,  v_pow(a, b))           \
    /* the angle of the point (b, a) */                                                           \
    ROW(ATAN2,      atan2,      PLAIN,  AB,      FLOATS,  LINE,     LIBM,  v_atan2(a, b))         \
    /* log(e^a + e^b) */                                                                          \
    ROW(LOGADDEXP,  logaddexp,  PLAIN,  AB,      FLOATS,  LINE,     LONG,  v_logaddexp(a, b))     \
    /* a / b rounded down, what it leaves, and what a quotient rounded towards 0 leaves */        \
    ROW(FLOOR_DIVIDE, floor_divide, PLAIN, NO_GRAD, NUMBERS, NONZERO, LONG, v_floor_div(a, b))    \
    ROW(REMAINDER,  remainder,  PLAIN,  AB,      NUMBERS, NONZERO,  LONG,  v_remainder(a, b))     \
    ROW(FMOD,       fmod,       PLAIN,  AB,      NUMBERS, NONZERO,  LONG,  v_fmod(a, b))          \
    ROW(ADD_SCALED, add_scaled, PARAMS, NOTHING, FLOATS,  LINE,     LIGHT, v_fma(p0, b, a))       \
    /* a + p0 (b - a), from the nearer end, so that both ends are exact */                        \
    ROW(LERP,       lerp,       PARAMS, NOTHING, FLOATS,  LINE,     LIGHT, v_lerp(p0, a, b))

/* The kinds whose result is bool. Their formulas read single numbers, also in vector loops. */
#define KN_COMPARISON_KINDS(ROW)                                                                  \
    ROW(EQ,         eq,          PLAIN, NO_GRAD, NUMBERS, LINE,     LIGHT, a == b)                \
    ROW(NE,         ne,          PLAIN, NO_GRAD, NUMBERS, LINE,     LIGHT, a != b)                \
    ROW(LT,         lt,          PLAIN, NO_GRAD, NUMBERS, LINE,     LIGHT, a < b)                 \
    ROW(LE,         le,          PLAIN, NO_GRAD, NUMBERS, LINE,     LIGHT, a <= b)                \
    ROW(GT,         gt,          PLAIN, NO_GRAD, NUMBERS, LINE,     LIGHT, a > b)                 \
    ROW(GE,         ge,          PLAIN, NO_GRAD, NUMBERS, LINE,     LIGHT, a >= b)                \
    ROW(AND,        logical_and, PARAMS, NO_GRAD, BOOLS,  LINE,     LIGHT, (a != 0) & (b != 0))  \
    ROW(OR,         logical_or,  PARAMS, NO_GRAD, BOOLS,  LINE,     LIGHT, (a != 0) | (b != 0))  \
    ROW(XOR,        logical_xor, PARAMS, NO_GRAD, BOOLS,  LINE,     LIGHT, (a != 0) ^ (b != 0))

#define KN_BINARY_KINDS(ROW) KN_ARITHMETIC_KINDS(ROW) KN_COMPARISON_KINDS(ROW)
/* clang-format on */

#define KN_KIND(kind, ...) KN_##kind,
typedef enum kn_unary { KN_UNARY_KINDS(KN_KIND) KN_UNARY_COUNT } kn_unary;
typedef enum kn_binary { KN_BINARY_KINDS(KN_KIND) KN_BINARY_COUNT } kn_binary;
#undef KN_KIND

typedef struct kn_kind_row {
    const char *name;
    int reads;
    kn_kind_dtypes dtypes;
    bool positive; /* defined for inputs > 0 only */
    kn_kind_work work;
} kn_kind_row;

/* The row of a kind; for a number that is no kind, a row named "unknown" that reads nothing. */
KN_API const kn_kind_row *kn_unary_row(kn_unary kind);
KN_API const kn_kind_row *kn_binary_row(kn_binary kind);
KN_API bool kn_kind_takes(const kn_kind_row *row, kn_dtype t);

/* Operands of dtype t give a result of dtype to. */
KN_API bool kn_binary_takes(kn_binary kind, kn_dtype t, kn_dtype to);

#ifdef __cplusplus
}
#endif
#endif
