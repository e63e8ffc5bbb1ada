/* kernels/kinds.h: the kinds of unary and binary operations. A kind is one row: its name and every
 * fact about it besides its formula. The enums, autograd's operations and functions, what backward
 * saves, costs, messages and the lists of the tests are all made from the rows; the formula stands
 * in each provider. docs/change.md lists what a new kind touches. */
#ifndef KNAP_KERNELS_KINDS_H
#define KNAP_KERNELS_KINDS_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* What a derivative reads besides the gradient of the result: bits. Backward saves just these. */
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
    KN_FLOATS,
    KN_NUMBERS /* floats and integers */,
    KN_BOOLS
} kn_kind_dtypes;

KN_API bool kn_dtype_is_int(kn_dtype t);        /* i64, i32, u8, bool */
KN_API bool kn_dtype_is_arithmetic(kn_dtype t); /* one of these or a float */

/* The columns of a unary kind:
 *   function  how autograd/operations.h offers it: PLAIN, kn_<name>(x); PARAMS, functions with p0
 *             and p1, written by hand in autograd/ops_elementwise.c
 *   reads     X, Y or NOTHING: what the derivative reads; NO_GRAD: there is no derivative
 *   dtypes    FLOATS, NUMBERS or BOOLS
 *   domain    where tests draw inputs: LINE, all numbers; POSITIVE; NONZERO, where the last operand
 *             divides
 *   work      LIGHT; HEAVY: an exponential or the like, so fewer elements are worth another
 *             thread */
/* clang-format off */
#define KN_UNARY_KINDS(ROW)                                                     \
    /*  kind         name         function  reads    dtypes   domain    work */ \
    ROW(NEG,         neg,         PLAIN,    NOTHING, NUMBERS, LINE,     LIGHT)  \
    ROW(ABS,         abs,         PLAIN,    X,       NUMBERS, LINE,     LIGHT)  \
    ROW(SIGN,        sign,        PLAIN,    NOTHING, NUMBERS, LINE,     LIGHT)  \
    ROW(FLOOR,       floor,       PLAIN,    NOTHING, NUMBERS, LINE,     LIGHT)  \
    ROW(CEIL,        ceil,        PLAIN,    NOTHING, NUMBERS, LINE,     LIGHT)  \
    /* to the nearest integer, from the middle to the even one */               \
    ROW(ROUND,       round,       PLAIN,    NOTHING, NUMBERS, LINE,     LIGHT)  \
    ROW(SQUARE,      square,      PLAIN,    X,       NUMBERS, LINE,     LIGHT)  \
    ROW(EXP,         exp,         PLAIN,    Y,       FLOATS,  LINE,     HEAVY)  \
    /* e^x - 1 */                                                               \
    ROW(EXPM1,       expm1,       PLAIN,    Y,       FLOATS,  LINE,     HEAVY)  \
    ROW(LOG,         log,         PLAIN,    X,       FLOATS,  POSITIVE, HEAVY)  \
    /* log(1 + x) */                                                            \
    ROW(LOG1P,       log1p,       PLAIN,    X,       FLOATS,  POSITIVE, HEAVY)  \
    ROW(LOG2,        log2,        PLAIN,    X,       FLOATS,  POSITIVE, HEAVY)  \
    ROW(SQRT,        sqrt,        PLAIN,    Y,       FLOATS,  POSITIVE, LIGHT)  \
    ROW(RSQRT,       rsqrt,       PLAIN,    Y,       FLOATS,  POSITIVE, LIGHT)  \
    ROW(RECIP,       reciprocal,  PLAIN,    Y,       FLOATS,  NONZERO,  LIGHT)  \
    ROW(SIN,         sin,         PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    ROW(COS,         cos,         PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    ROW(TAN,         tan,         PLAIN,    Y,       FLOATS,  LINE,     HEAVY)  \
    ROW(ATAN,        atan,        PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    ROW(ERF,         erf,         PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    ROW(TANH,        tanh,        PLAIN,    Y,       FLOATS,  LINE,     HEAVY)  \
    ROW(SIGMOID,     sigmoid,     PLAIN,    Y,       FLOATS,  LINE,     HEAVY)  \
    /* log(sigmoid(x)) */                                                       \
    ROW(LOGSIGMOID,  logsigmoid,  PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    ROW(RELU,        relu,        PLAIN,    Y,       FLOATS,  LINE,     LIGHT)  \
    /* 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))) */                       \
    ROW(GELU_TANH,   gelu_tanh,   PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    /* 0.5 x (1 + erf(x / sqrt 2)) */                                           \
    ROW(GELU,        gelu,        PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    /* x sigmoid(x) */                                                          \
    ROW(SILU,        silu,        PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    /* x tanh(log(1 + e^x)) */                                                  \
    ROW(MISH,        mish,        PLAIN,    X,       FLOATS,  LINE,     HEAVY)  \
    /* min(max(x + 3, 0), 6) / 6 */                                             \
    ROW(HARDSIGMOID, hardsigmoid, PLAIN,    X,       FLOATS,  LINE,     LIGHT)  \
    /* x hardsigmoid(x) */                                                      \
    ROW(HARDSWISH,   hardswish,   PLAIN,    X,       FLOATS,  LINE,     LIGHT)  \
    /* x > 0 ? x : p0 x */                                                      \
    ROW(LEAKY_RELU,  leaky_relu,  PARAMS,   X,       FLOATS,  LINE,     LIGHT)  \
    /* x > 0 ? x : p0 (e^x - 1) */                                              \
    ROW(ELU,         elu,         PARAMS,   X,       FLOATS,  LINE,     HEAVY)  \
    /* p0 x > p1 ? x : log(1 + e^(p0 x)) / p0 */                                \
    ROW(SOFTPLUS,    softplus,    PARAMS,   X,       FLOATS,  LINE,     HEAVY)  \
    /* p0 x + p1 */                                                             \
    ROW(AFFINE,      affine,      PARAMS,   NOTHING, NUMBERS, LINE,     LIGHT)  \
    /* x^p0; vector loops compute only the square, so its work is LIGHT */      \
    ROW(POW,         pow,         PARAMS,   X,       FLOATS,  POSITIVE, LIGHT)  \
    /* min(max(x, p0), p1) */                                                   \
    ROW(CLAMP,       clamp,       PARAMS,   X,       NUMBERS, LINE,     LIGHT)  \
    /* the same, but its derivative is 0 at p0 and p1 */                        \
    ROW(HARDTANH,    hardtanh,    PARAMS,   X,       FLOATS,  LINE,     LIGHT)  \
    ROW(NOT,         logical_not, PLAIN,    NO_GRAD, BOOLS,   LINE,     LIGHT)

/* The same columns for a binary kind, whose vector loops all weigh alike. From EQ on the result is
 * bool. */
#define KN_BINARY_KINDS(ROW)                                            \
    /*  kind        name         function  reads    dtypes   domain */  \
    ROW(ADD,        add,         PLAIN,    NOTHING, NUMBERS, LINE)      \
    ROW(SUB,        sub,         PLAIN,    NOTHING, NUMBERS, LINE)      \
    ROW(MUL,        mul,         PLAIN,    AB,      NUMBERS, LINE)      \
    ROW(DIV,        div,         PLAIN,    B_OUT,   NUMBERS, NONZERO)   \
    ROW(MAXIMUM,    maximum,     PLAIN,    AB,      NUMBERS, LINE)      \
    ROW(MINIMUM,    minimum,     PLAIN,    AB,      NUMBERS, LINE)      \
    ROW(POWER,      pow_tensor,  PLAIN,    AB_OUT,  FLOATS,  POSITIVE)  \
    /* a + p0 b */                                                      \
    ROW(ADD_SCALED, add_scaled,  PARAMS,   NOTHING, FLOATS,  LINE)      \
    /* a + p0 (b - a) */                                                \
    ROW(LERP,       lerp,        PARAMS,   NOTHING, FLOATS,  LINE)      \
    ROW(EQ,         eq,          PLAIN,    NO_GRAD, NUMBERS, LINE)      \
    ROW(NE,         ne,          PLAIN,    NO_GRAD, NUMBERS, LINE)      \
    ROW(LT,         lt,          PLAIN,    NO_GRAD, NUMBERS, LINE)      \
    ROW(LE,         le,          PLAIN,    NO_GRAD, NUMBERS, LINE)      \
    ROW(GT,         gt,          PLAIN,    NO_GRAD, NUMBERS, LINE)      \
    ROW(GE,         ge,          PLAIN,    NO_GRAD, NUMBERS, LINE)      \
    ROW(AND,        logical_and, PLAIN,    NO_GRAD, BOOLS,   LINE)      \
    ROW(OR,         logical_or,  PLAIN,    NO_GRAD, BOOLS,   LINE)      \
    ROW(XOR,        logical_xor, PLAIN,    NO_GRAD, BOOLS,   LINE)
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
    bool heavy;
} kn_kind_row;

/* The row of a kind; for a number that is no kind, a row named "unknown" that reads nothing. */
KN_API const kn_kind_row *kn_unary_row(kn_unary kind);
KN_API const kn_kind_row *kn_binary_row(kn_binary kind);

#ifdef __cplusplus
}
#endif
#endif
