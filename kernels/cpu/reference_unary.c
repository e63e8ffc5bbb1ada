/* kernels/cpu/reference_unary.c: unary functions and their derivatives. */
#include "kernels/cpu/reference.h"
#include <math.h>

#define SQRT_2_OVER_PI  0.79788456080286535588 /* sqrt(2 / pi) */
#define SQRT_1_2        0.70710678118654752440 /* 1 / sqrt 2 */
#define INV_SQRT_2PI    0.39894228040143267794 /* 1 / sqrt(2 pi) */
#define TWO_OVER_SQRTPI 1.12837916709551257390 /* 2 / sqrt pi */
#define LOG2_E          1.44269504088896340736 /* 1 / ln 2 */

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* log(1 + e^x) */
static double softplus(double x)
{
    return isnan(x) ? x : fmax(x, 0) + log1p(exp(-fabs(x)));
}

static double clamp(double x, double low, double high)
{
    return isnan(x) ? x : fmin(fmax(x, low), high);
}

static double sign(double x)
{
    return isnan(x) ? x : (x > 0) - (x < 0);
}

/* sqrt(2/pi) (x + 0.044715 x^3), the argument of gelu_tanh's tanh. */
static double gelu_inner(double x)
{
    return SQRT_2_OVER_PI * (x + 0.044715 * x * x * x);
}

/* f(x). NaN in gives NaN out for every kind. */
static double unary(kn_unary kind, double x, double p0, double p1)
{
    switch (kind) {
    case KN_NEG:
        return -x;
    case KN_ABS:
        return fabs(x);
    case KN_SIGN:
        return sign(x);
    case KN_FLOOR:
        return floor(x);
    case KN_CEIL:
        return ceil(x);
    case KN_ROUND:
        return nearbyint(x);
    case KN_SQUARE:
        return x * x;
    case KN_EXP:
        return exp(x);
    case KN_EXPM1:
        return expm1(x);
    case KN_LOG:
        return log(x);
    case KN_LOG1P:
        return log1p(x);
    case KN_LOG2:
        return log2(x);
    case KN_SQRT:
        return sqrt(x);
    case KN_RSQRT:
        return 1 / sqrt(x);
    case KN_RECIP:
        return 1 / x;
    case KN_SIN:
        return sin(x);
    case KN_COS:
        return cos(x);
    case KN_TAN:
        return tan(x);
    case KN_ATAN:
        return atan(x);
    case KN_ERF:
        return erf(x);
    case KN_TANH:
        return tanh(x);
    case KN_SIGMOID:
        return sigmoid(x);
    case KN_LOGSIGMOID:
        return -softplus(-x);
    case KN_RELU:
        return x > 0 || isnan(x) ? x : 0;
    case KN_GELU_TANH:
        return 0.5 * x * (1 + tanh(gelu_inner(x)));
    case KN_GELU:
        return 0.5 * x * erfc(-x * SQRT_1_2);
    case KN_SILU:
        return x * sigmoid(x);
    case KN_MISH:
        return x * tanh(softplus(x));
    case KN_HARDSIGMOID:
        return clamp(x + 3, 0, 6) / 6;
    case KN_HARDSWISH:
        return x * (clamp(x + 3, 0, 6) / 6);
    case KN_LEAKY_RELU:
        return x > 0 ? x : p0 * x;
    case KN_ELU:
        return x > 0 ? x : p0 * expm1(x);
    case KN_SOFTPLUS:
        return p0 * x > p1 ? x : softplus(p0 * x) / p0;
    case KN_AFFINE:
        return p0 * x + p1;
    case KN_POW:
        return pow(x, p0);
    case KN_CLAMP:
    case KN_HARDTANH:
        return clamp(x, p0, p1);
    default:
        return x;
    }
}

/* The integer kinds; p0 and p1 are truncated to integers. Unsigned arithmetic wraps silently. */
static int64_t unary_int(kn_unary kind, int64_t x, int64_t p0, int64_t p1)
{
    switch (kind) {
    case KN_NEG:
        return (int64_t)(0 - (uint64_t)x);
    case KN_ABS:
        return x < 0 ? (int64_t)(0 - (uint64_t)x) : x;
    case KN_SIGN:
        return (x > 0) - (x < 0);
    case KN_FLOOR:
    case KN_CEIL:
    case KN_ROUND:
        return x;
    case KN_SQUARE:
        return (int64_t)((uint64_t)x * (uint64_t)x);
    case KN_AFFINE:
        return (int64_t)((uint64_t)p0 * (uint64_t)x + (uint64_t)p1);
    case KN_CLAMP:
        x = x > p0 ? x : p0;
        return x < p1 ? x : p1;
    default: /* KN_NOT */
        return !x;
    }
}

/* A parameter of an integer kind; CLAMP's bounds may be infinite. */
static int64_t int_param(double p)
{
    return p <= -0x1p63 ? INT64_MIN : p >= 0x1p63 ? INT64_MAX : (int64_t)p;
}

/* No default: the compiler warns of a kind that is missing, and none is taken unless it is
 * listed. */
static bool unary_takes(kn_unary kind, kn_dtype t)
{
    switch (kind) {
    case KN_NEG:
    case KN_ABS:
    case KN_SIGN:
    case KN_FLOOR:
    case KN_CEIL:
    case KN_ROUND:
    case KN_SQUARE:
    case KN_AFFINE:
    case KN_CLAMP:
        return kn_dtype_is_arithmetic(t);
    case KN_EXP:
    case KN_EXPM1:
    case KN_LOG:
    case KN_LOG1P:
    case KN_LOG2:
    case KN_SQRT:
    case KN_RSQRT:
    case KN_RECIP:
    case KN_SIN:
    case KN_COS:
    case KN_TAN:
    case KN_ATAN:
    case KN_ERF:
    case KN_TANH:
    case KN_SIGMOID:
    case KN_LOGSIGMOID:
    case KN_RELU:
    case KN_GELU_TANH:
    case KN_GELU:
    case KN_SILU:
    case KN_MISH:
    case KN_HARDSIGMOID:
    case KN_HARDSWISH:
    case KN_LEAKY_RELU:
    case KN_ELU:
    case KN_SOFTPLUS:
    case KN_POW:
    case KN_HARDTANH:
        return kn_dtype_is_float(t);
    case KN_NOT:
        return t == KN_BOOL;
    case KN_UNARY_COUNT:
        break;
    }
    return false;
}

kn_status kn_ref_unary(const void *args)
{
    const kn_unary_args *a = args;
    const kn_array *dst = &a->dst, *src = &a->src;
    if (!kn_ref_check_same_shape(KN_K_UNARY, dst, src))
        return KN_FAILED;
    if (!unary_takes(a->kind, src->dtype) || dst->dtype != src->dtype) {
        kn_fail(
            "unary: %s from %s to %s is not supported; kernels/kinds.h lists the dtypes of each "
            "kind, and the result has the dtype of its input",
            kn_unary_row(a->kind)->name, kn_dtype_name(src->dtype), kn_dtype_name(dst->dtype));
        return KN_FAILED;
    }
    bool ints = kn_dtype_is_int(src->dtype);
    int64_t i0 = ints ? int_param(a->p0) : 0, i1 = ints ? int_param(a->p1) : 0;
    for (kn_ref_walk w = kn_ref_walk_over(dst, src, NULL); w.more; kn_ref_walk_next(&w)) {
        if (ints)
            kn_ref_set_int(dst, w.off[0],
                           unary_int(a->kind, kn_ref_get_int(src, w.off[1]), i0, i1));
        else
            kn_ref_set_computed(dst, w.off[0],
                                unary(a->kind, kn_ref_get(src, w.off[1]), a->p0, a->p1));
    }
    return KN_DONE;
}

/* The slopes of x times a step, which are 0 or 1 far from 0: no product is of 0 and infinity. */
static double gated_slope(kn_unary kind, double given)
{
    const double x = clamp(given, -750, 750), s = sigmoid(x), u = gelu_inner(x);
    double t;
    switch (kind) {
    case KN_GELU_TANH: /* (1 + tanh u) / 2 + x (1 - tanh^2 u) u' / 2 */
        t = tanh(u);
        return 0.5 * (1 + t) +
               0.5 * x * (1 - t * t) * (SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x));
    case KN_GELU: /* Phi(x) + x phi(x) */
        return 0.5 * erfc(-x * SQRT_1_2) + x * INV_SQRT_2PI * exp(-0.5 * x * x);
    case KN_SILU: /* s + x s (1 - s) */
        return s * (1 + x * (1 - s));
    default: /* KN_MISH, t = tanh(log(1 + e^x)): t + x s (1 - t^2) */
        t = tanh(softplus(x));
        return t + x * s * (1 - t * t);
    }
}

/* f'(x), of the input x or the output y = f(x), whichever the kind's row says that it reads. */
static double derivative(kn_unary kind, double x, double y, double p0, double p1)
{
    switch (kind) {
    case KN_NEG:
        return -1;
    case KN_ABS:
        return sign(x);
    case KN_SQUARE:
        return 2 * x;
    case KN_EXP:
        return y;
    case KN_EXPM1:
        return y + 1;
    case KN_LOG:
        return 1 / x;
    case KN_LOG1P:
        return 1 / (1 + x);
    case KN_LOG2:
        return LOG2_E / x;
    case KN_SQRT:
        return 0.5 / y;
    case KN_RSQRT:
        return -0.5 * y * y * y;
    case KN_RECIP:
        return -y * y;
    case KN_SIN:
        return cos(x);
    case KN_COS:
        return -sin(x);
    case KN_TAN:
        return 1 + y * y;
    case KN_ATAN:
        return 1 / (1 + x * x);
    case KN_ERF:
        return TWO_OVER_SQRTPI * exp(-x * x);
    case KN_TANH:
        return 1 - y * y;
    case KN_SIGMOID:
        return y * (1 - y);
    case KN_LOGSIGMOID:
        return sigmoid(-x);
    case KN_RELU:
        return y <= 0 ? 0 : 1; /* NaN passes, as in PyTorch */
    case KN_GELU_TANH:
    case KN_GELU:
    case KN_SILU:
    case KN_MISH:
        return gated_slope(kind, x);
    case KN_HARDSIGMOID:
        return x > -3 && x < 3 ? 1.0 / 6 : 0;
    case KN_HARDSWISH:
        return x <= -3 ? 0 : x >= 3 ? 1 : (x + 1.5) / 3;
    case KN_LEAKY_RELU:
        return x > 0 ? 1 : p0;
    case KN_ELU:
        return x > 0 ? 1 : p0 * exp(x);
    case KN_SOFTPLUS:
        return p0 * x > p1 ? 1 : sigmoid(p0 * x);
    case KN_AFFINE:
        return p0;
    case KN_POW:
        return p0 == 0 ? 0 : p0 * pow(x, p0 - 1);
    case KN_CLAMP:
        return x >= p0 && x <= p1 ? 1 : 0;
    case KN_HARDTANH:
        return x > p0 && x < p1 ? 1 : 0;
    default: /* KN_SIGN, KN_FLOOR, KN_CEIL, KN_ROUND */
        return 0;
    }
}

/* Slopes that are chosen: where one is 0 nothing passes, also no infinite gradient. */
static bool chooses(kn_unary kind)
{
    switch (kind) {
    case KN_RELU:
    case KN_CLAMP:
    case KN_HARDTANH:
    case KN_HARDSIGMOID:
    case KN_SIGN:
    case KN_FLOOR:
    case KN_CEIL:
    case KN_ROUND:
        return true;
    default:
        return false;
    }
}

kn_status kn_ref_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = args;
    const int reads = kn_unary_row(a->kind)->reads;
    const kn_array *x = reads & KN_READS_X ? &a->x : &a->dy,
                   *y = reads & KN_READS_Y ? &a->y : &a->dy;
    if (!unary_takes(a->kind, KN_F32) || !kn_ref_check_float(KN_K_UNARY_GRAD, &a->dx)) {
        kn_fail("unary_grad: %s of %s has no derivative", kn_unary_row(a->kind)->name,
                kn_dtype_name(a->dx.dtype));
        return KN_FAILED;
    }
    if (!kn_ref_check_same_shape(KN_K_UNARY_GRAD, &a->dx, &a->dy) ||
        !kn_ref_check_same_shape(KN_K_UNARY_GRAD, &a->dx, x) ||
        !kn_ref_check_same_shape(KN_K_UNARY_GRAD, &a->dx, y))
        return KN_FAILED;
    kn_ref_walk w = kn_ref_walk_over(&a->dx, &a->dy, x, y, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        double d =
            derivative(a->kind, kn_ref_get(x, w.off[2]), kn_ref_get(y, w.off[3]), a->p0, a->p1);
        bool none = d == 0 && chooses(a->kind);
        kn_ref_set_computed(&a->dx, w.off[0], none ? 0 : kn_ref_get(&a->dy, w.off[1]) * d);
    }
    return KN_DONE;
}
