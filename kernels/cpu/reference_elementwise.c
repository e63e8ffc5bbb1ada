/* kernels/cpu/reference_elementwise.c: copy, fill, unary and binary functions, where. */
#include "kernels/cpu/reference.h"
#include <math.h>
#include <string.h>

/* ---- copy, fill, where --------------------------------------------------------------------- */

/* Copies elements of one size without looking inside. */
static void move_element(const kn_array *dst, int64_t to, const kn_array *src, int64_t from)
{
    size_t size = kn_dtype_size(dst->dtype);
    memmove((char *)dst->data + to * (int64_t)size, (const char *)src->data + from * (int64_t)size,
            size);
}

/* An i64 as a double that rounds like it: beyond 2^53 the low bits become one sticky bit, so that
 * the later rounding to f32 or less is the only one. */
static double sticky_double(int64_t x)
{
    if (x > -(1LL << 53) && x < 1LL << 53)
        return (double)x;
    int64_t low = x & 1023;
    return (double)((x - low) | (low ? 1024 : 0));
}

kn_status kn_ref_copy(const void *args)
{
    const kn_copy_args *a = args;
    const kn_array *dst = &a->dst, *src = &a->src;
    bool same = dst->dtype == src->dtype;
    if (!kn_ref_check_same_shape(KN_K_COPY, dst, src))
        return KN_FAILED;
    if (!same && !(kn_dtype_is_arithmetic(dst->dtype) && kn_dtype_is_arithmetic(src->dtype))) {
        kn_fail("copy: %s to %s is not supported; storage-only dtypes copy to the same dtype only",
                kn_dtype_name(src->dtype), kn_dtype_name(dst->dtype));
        return KN_FAILED;
    }
    bool from_int = kn_dtype_is_int(src->dtype), to_int = kn_dtype_is_int(dst->dtype);
    for (kn_ref_walk w = kn_ref_walk_over(dst, src, NULL); w.more; kn_ref_walk_next(&w)) {
        if (same)
            move_element(dst, w.off[0], src, w.off[1]);
        else if (from_int && to_int)
            kn_ref_set_int(dst, w.off[0], kn_ref_get_int(src, w.off[1]));
        else if (src->dtype == KN_I64 && dst->dtype != KN_F64)
            kn_ref_set(dst, w.off[0], sticky_double(kn_ref_get_int(src, w.off[1])));
        else
            kn_ref_set(dst, w.off[0], kn_ref_get(src, w.off[1]));
    }
    return KN_DONE;
}

/* dst[i] = value + i * step in f64, rounded once. */
kn_status kn_ref_fill(const void *args)
{
    const kn_fill_args *a = args;
    if (!kn_ref_check_arithmetic(KN_K_FILL, &a->dst))
        return KN_FAILED;
    for (kn_ref_walk w = kn_ref_walk_over(&a->dst, NULL); w.more; kn_ref_walk_next(&w))
        kn_ref_set(&a->dst, w.off[0], a->value + (double)w.i * a->step);
    return KN_DONE;
}

kn_status kn_ref_where(const void *args)
{
    const kn_where_args *a = args;
    if (!kn_ref_check_same_shape(KN_K_WHERE, &a->dst, &a->cond) ||
        !kn_ref_check_same_shape(KN_K_WHERE, &a->dst, &a->a) ||
        !kn_ref_check_same_shape(KN_K_WHERE, &a->dst, &a->b))
        return KN_FAILED;
    if (a->cond.dtype != KN_BOOL || a->a.dtype != a->dst.dtype || a->b.dtype != a->dst.dtype) {
        kn_fail("where: cond is %s and must be bool; a is %s, b is %s, dst is %s and must agree",
                kn_dtype_name(a->cond.dtype), kn_dtype_name(a->a.dtype), kn_dtype_name(a->b.dtype),
                kn_dtype_name(a->dst.dtype));
        return KN_FAILED;
    }
    kn_ref_walk w = kn_ref_walk_over(&a->dst, &a->cond, &a->a, &a->b, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        if (kn_ref_get_int(&a->cond, w.off[1]))
            move_element(&a->dst, w.off[0], &a->a, w.off[2]);
        else
            move_element(&a->dst, w.off[0], &a->b, w.off[3]);
    }
    return KN_DONE;
}

/* ---- unary --------------------------------------------------------------------------------- */

#define SQRT_2_OVER_PI 0.79788456080286535588 /* sqrt(2 / pi) */
#define SQRT_1_2       0.70710678118654752440 /* 1 / sqrt 2 */
#define INV_SQRT_2PI   0.39894228040143267794 /* 1 / sqrt(2 pi) */

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
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
    case KN_EXP:
        return exp(x);
    case KN_LOG:
        return log(x);
    case KN_SQRT:
        return sqrt(x);
    case KN_RSQRT:
        return 1 / sqrt(x);
    case KN_RECIP:
        return 1 / x;
    case KN_TANH:
        return tanh(x);
    case KN_SIGMOID:
        return sigmoid(x);
    case KN_RELU:
        return x > 0 || isnan(x) ? x : 0;
    case KN_GELU_TANH:
        return 0.5 * x * (1 + tanh(gelu_inner(x)));
    case KN_GELU:
        return 0.5 * x * erfc(-x * SQRT_1_2);
    case KN_SILU:
        return x * sigmoid(x);
    case KN_SIN:
        return sin(x);
    case KN_COS:
        return cos(x);
    case KN_AFFINE:
        return p0 * x + p1;
    case KN_POW:
        return pow(x, p0);
    case KN_CLAMP:
        return isnan(x) ? x : fmin(fmax(x, p0), p1);
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
    case KN_AFFINE:
    case KN_CLAMP:
        return kn_dtype_is_arithmetic(t);
    case KN_EXP:
    case KN_LOG:
    case KN_SQRT:
    case KN_RSQRT:
    case KN_RECIP:
    case KN_TANH:
    case KN_SIGMOID:
    case KN_RELU:
    case KN_GELU_TANH:
    case KN_GELU:
    case KN_SILU:
    case KN_SIN:
    case KN_COS:
    case KN_POW:
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
        kn_fail("unary: %s from %s to %s is not supported; floats take every kind but NOT, "
                "integers NEG, ABS, AFFINE and CLAMP, bool NOT, all into their own dtype",
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

/* f'(x), of the input x or the output y = f(x), whichever the kind's row says that it reads. */
static double derivative(kn_unary kind, double x, double y, double p0, double p1)
{
    switch (kind) {
    case KN_NEG:
        return -1;
    case KN_ABS:
        return isnan(x) ? x : (x > 0) - (x < 0);
    case KN_EXP:
        return y;
    case KN_LOG:
        return 1 / x;
    case KN_SQRT:
        return 0.5 / y;
    case KN_RSQRT:
        return -0.5 * y * y * y;
    case KN_RECIP:
        return -y * y;
    case KN_TANH:
        return 1 - y * y;
    case KN_SIGMOID:
        return y * (1 - y);
    case KN_RELU:
        return y > 0 ? 1 : 0;
    case KN_GELU_TANH: { /* u = gelu_inner(x): (1 + tanh u) / 2 + x (1 - tanh^2 u) u' / 2 */
        double t = tanh(gelu_inner(x)), du = SQRT_2_OVER_PI * (1 + 3 * 0.044715 * x * x);
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * du;
    }
    case KN_GELU: /* Phi(x) + x phi(x) */
        return 0.5 * erfc(-x * SQRT_1_2) + x * INV_SQRT_2PI * exp(-0.5 * x * x);
    case KN_SILU: { /* s + x s (1 - s) */
        double s = sigmoid(x);
        return s * (1 + x * (1 - s));
    }
    case KN_SIN:
        return cos(x);
    case KN_COS:
        return -sin(x);
    case KN_AFFINE:
        return p0;
    case KN_POW:
        return p0 == 0 ? 0 : p0 * pow(x, p0 - 1);
    case KN_CLAMP:
        return x >= p0 && x <= p1 ? 1 : 0;
    default:
        return 0;
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
        kn_ref_set_computed(&a->dx, w.off[0], kn_ref_get(&a->dy, w.off[1]) * d);
    }
    return KN_DONE;
}

/* ---- binary -------------------------------------------------------------------------------- */

/* MAXIMUM and MINIMUM of anything with NaN are NaN. */
static double binary(kn_binary kind, double a, double b)
{
    switch (kind) {
    case KN_ADD:
        return a + b;
    case KN_SUB:
        return a - b;
    case KN_MUL:
        return a * b;
    case KN_DIV:
        return a / b;
    case KN_MAXIMUM:
        return isnan(a) || a > b ? a : b;
    case KN_MINIMUM:
        return isnan(a) || a < b ? a : b;
    case KN_POWER:
        return pow(a, b);
    case KN_EQ:
        return a == b;
    case KN_NE:
        return a != b;
    case KN_LT:
        return a < b;
    case KN_LE:
        return a <= b;
    case KN_GT:
        return a > b;
    case KN_GE:
        return a >= b;
    case KN_AND:
        return a != 0 && b != 0;
    default: /* KN_OR */
        return a != 0 || b != 0;
    }
}

/* The same on integers: overflow wraps, x / 0 is 0. */
static int64_t binary_int(kn_binary kind, int64_t a, int64_t b)
{
    switch (kind) {
    case KN_ADD:
        return (int64_t)((uint64_t)a + (uint64_t)b);
    case KN_SUB:
        return (int64_t)((uint64_t)a - (uint64_t)b);
    case KN_MUL:
        return (int64_t)((uint64_t)a * (uint64_t)b);
    case KN_DIV:
        if (b == -1) /* INT64_MIN / -1 overflows */
            return (int64_t)(0 - (uint64_t)a);
        return b == 0 ? 0 : a / b;
    case KN_MAXIMUM:
        return a > b ? a : b;
    case KN_MINIMUM:
        return a < b ? a : b;
    case KN_EQ:
        return a == b;
    case KN_NE:
        return a != b;
    case KN_LT:
        return a < b;
    case KN_LE:
        return a <= b;
    case KN_GT:
        return a > b;
    case KN_GE:
        return a >= b;
    case KN_AND:
        return a && b;
    default: /* KN_OR */
        return a || b;
    }
}

static bool binary_takes(kn_binary kind, kn_dtype t, kn_dtype dst)
{
    switch (kind) {
    case KN_ADD:
    case KN_SUB:
    case KN_MUL:
    case KN_DIV:
    case KN_MAXIMUM:
    case KN_MINIMUM:
        return dst == t && kn_dtype_is_arithmetic(t);
    case KN_POWER:
        return dst == t && kn_dtype_is_float(t);
    case KN_EQ:
    case KN_NE:
    case KN_LT:
    case KN_LE:
    case KN_GT:
    case KN_GE:
        return dst == KN_BOOL && kn_dtype_is_arithmetic(t);
    case KN_AND:
    case KN_OR:
        return dst == KN_BOOL && t == KN_BOOL;
    case KN_BINARY_COUNT:
        break;
    }
    return false;
}

kn_status kn_ref_binary(const void *args)
{
    const kn_binary_args *p = args;
    const kn_array *dst = &p->dst, *a = &p->a, *b = &p->b;
    if (!kn_ref_check_same_shape(KN_K_BINARY, dst, a) ||
        !kn_ref_check_same_shape(KN_K_BINARY, dst, b))
        return KN_FAILED;
    if (a->dtype != b->dtype || !binary_takes(p->kind, a->dtype, dst->dtype)) {
        kn_fail("binary: %s of %s and %s into %s is not supported; a and b have one dtype, "
                "dst too or, for comparisons and logic, bool",
                kn_binary_row(p->kind)->name, kn_dtype_name(a->dtype), kn_dtype_name(b->dtype),
                kn_dtype_name(dst->dtype));
        return KN_FAILED;
    }
    bool ints = kn_dtype_is_int(a->dtype);
    for (kn_ref_walk w = kn_ref_walk_over(dst, a, b, NULL); w.more; kn_ref_walk_next(&w)) {
        if (ints)
            kn_ref_set_int(
                dst, w.off[0],
                binary_int(p->kind, kn_ref_get_int(a, w.off[1]), kn_ref_get_int(b, w.off[2])));
        else
            kn_ref_set_computed(dst, w.off[0],
                                binary(p->kind, kn_ref_get(a, w.off[1]), kn_ref_get(b, w.off[2])));
    }
    return KN_DONE;
}
