/* kernels/cpu/vec/unary.c: unary functions and their derivatives. The loops are f32; bf16 and f16
 * pass through blocks that stay in the first-level cache. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/math.h"

#define BLOCK 512 /* floats of a conversion buffer */

/* ---- unary ---------------------------------------------------------------------------------- */

typedef struct unary_ctx {
    kn_unary kind;
    kn_dtype dtype;
    float p0, p1;
} unary_ctx;

/* sqrt(2/pi) (x + 0.044715 x^3) */
VEC_INLINE vf gelu_inner(vf x)
{
    const vf x2 = x * x;
    return x * v_fma(x2, v_set1(0.79788456f * 0.044715f), v_set1(0.79788456f));
}

/* x sigmoid(z): gelu_tanh has z = 2 gelu_inner(x), since (1 + tanh u) / 2 = sigmoid(2u); silu has
 * z = x */
VEC_INLINE vf x_sigmoid(vf x, vf z)
{
    return x / (v_set1(1.0f) + v_exp(-z));
}

/* The loop over one block for every kind: expr is a function of the vector x. */
#define UNARY_LOOP(expr)                                                                           \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf x = v_load(src + i);                                                          \
            v_store(dst + i, expr);                                                                \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf x = v_load_n(src + i, n - i);                                                 \
            v_store_n(dst + i, expr, n - i);                                                       \
        }                                                                                          \
    } while (0)

#define UNARY_CASE(kind, expr)                                                                     \
    case kind:                                                                                     \
        UNARY_LOOP(expr);                                                                          \
        break

/* NaN passes */
VEC_INLINE vf clamp(vf x, vf low, vf high)
{
    return v_min(high, v_max(low, x));
}

/* 0 at 0; NaN passes */
VEC_INLINE vf sign(vf x)
{
    return v_sel(v_eq(x, v_zero()), v_zero(), v_sel(v_ne(x, x), x, v_copysign(v_set1(1.0f), x)));
}

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|) */
VEC_INLINE vf softplus(vf x)
{
    return v_max(v_zero(), x) + v_log1p(v_exp(-v_abs(x)));
}

/* tanh(log(1 + e^x)) = n / (n + 2) with n = e^x (e^x + 2) */
VEC_INLINE vf mish_n(vf e)
{
    return e * (e + v_set1(2.0f));
}

VEC_INLINE vf mish(vf x)
{
    const vf n = mish_n(v_exp(v_min(v_set1(30.0f), x))); /* stays finite */
    return x * (n / (n + v_set1(2.0f)));
}

VEC_INLINE vf hardsigmoid(vf x)
{
    return clamp(x + v_set1(3.0f), v_zero(), v_set1(6.0f)) * v_set1(1.0f / 6);
}

/* No default: the compiler warns of a kind that is missing, and none is taken unless it is
 * listed. */
static bool unary_known(kn_unary kind, double p0)
{
    switch (kind) {
    case KN_NEG:
    case KN_ABS:
    case KN_SIGN:
    case KN_FLOOR:
    case KN_CEIL:
    case KN_ROUND:
    case KN_SQUARE:
    case KN_EXP:
    case KN_EXPM1:
    case KN_LOG:
    case KN_LOG1P:
    case KN_SQRT:
    case KN_RSQRT:
    case KN_RECIP:
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
    case KN_AFFINE:
    case KN_CLAMP:
    case KN_HARDTANH:
        return true;
    case KN_POW:
        return p0 == 2;
    case KN_LOG2:
    case KN_SIN:
    case KN_COS:
    case KN_TAN:
    case KN_ATAN:
    case KN_NOT:
    case KN_UNARY_COUNT:
        break;
    }
    return false;
}

static void unary_block(const unary_ctx *u, float *dst, const float *src, int64_t n)
{
    const vf one = v_set1(1.0f), zero = v_zero(), p0 = v_set1(u->p0), p1 = v_set1(u->p1);
    switch (u->kind) {
        UNARY_CASE(KN_NEG, -x);
        UNARY_CASE(KN_ABS, v_abs(x));
        UNARY_CASE(KN_SIGN, sign(x));
        UNARY_CASE(KN_FLOOR, v_floor(x));
        UNARY_CASE(KN_CEIL, -v_floor(-x));
        UNARY_CASE(KN_ROUND, v_round(x));
        UNARY_CASE(KN_SQUARE, x * x);
        UNARY_CASE(KN_EXP, v_exp(x));
        UNARY_CASE(KN_EXPM1, v_expm1(x));
        UNARY_CASE(KN_LOG, v_log(x));
        UNARY_CASE(KN_LOG1P, v_log1p(x));
        UNARY_CASE(KN_SQRT, v_sqrt(x));
        UNARY_CASE(KN_RSQRT, one / v_sqrt(x));
        UNARY_CASE(KN_RECIP, one / x);
        UNARY_CASE(KN_ERF, v_erf(x));
        UNARY_CASE(KN_TANH, v_tanh(x));
        UNARY_CASE(KN_SIGMOID, v_sigmoid(x));
        UNARY_CASE(KN_LOGSIGMOID, -softplus(-x));
        UNARY_CASE(KN_RELU, v_max(zero, x)); /* NaN passes */
        UNARY_CASE(KN_GELU_TANH, x_sigmoid(x, v_set1(2.0f) * gelu_inner(x)));
        UNARY_CASE(KN_GELU, x * v_normal_cdf(x));
        UNARY_CASE(KN_SILU, x_sigmoid(x, x));
        UNARY_CASE(KN_MISH, mish(x));
        UNARY_CASE(KN_HARDSIGMOID, hardsigmoid(x));
        UNARY_CASE(KN_HARDSWISH, x * hardsigmoid(x));
        UNARY_CASE(KN_LEAKY_RELU, v_sel(v_gt(x, zero), x, p0 * x));
        UNARY_CASE(KN_ELU, v_sel(v_gt(x, zero), x, p0 * v_expm1(x)));
        UNARY_CASE(KN_SOFTPLUS, v_sel(v_gt(p0 * x, p1), x, softplus(p0 * x) / p0));
        UNARY_CASE(KN_AFFINE, v_fma(p0, x, p1));
        UNARY_CASE(KN_POW, x * x); /* only the square */
        UNARY_CASE(KN_CLAMP, clamp(x, p0, p1));
        UNARY_CASE(KN_HARDTANH, clamp(x, p0, p1));
    default:
        break;
    }
}

static void unary_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const unary_ctx *u = ctx;
    const int64_t step = vec_iter_inner(it, 1);
    if (u->dtype == KN_F32 && step == 1) {
        unary_block(u, (float *)p[0], (const float *)p[1], n);
        return;
    }
    float buf[BLOCK], strided[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, n - i);
        char *dst = p[0] + i * it->size[0];
        const void *src =
            vec_dense_run(p[1] + i * step * it->size[1], step, it->size[1], w, strided);
        if (u->dtype == KN_F32) {
            unary_block(u, (float *)(void *)dst, src, w);
            continue;
        }
        vec_widen(u->dtype, src, buf, w);
        unary_block(u, buf, buf, w);
        vec_narrow(u->dtype, dst, buf, w);
    }
}

/* Bytes of memory traffic that take about as long as one element of this kind computes. */
static int64_t unary_weight(kn_unary kind)
{
    return kn_unary_row(kind)->heavy ? 16 : 4;
}

static void not_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const int64_t step = vec_iter_inner(it, 1);
    (void)ctx;
    for (int64_t i = 0; i < n; i++)
        p[0][i] = !p[1][i * step];
}

kn_status vec_unary(const void *args)
{
    const kn_unary_args *a = args;
    const bool bools = a->kind == KN_NOT && a->dst.dtype == KN_BOOL && a->src.dtype == KN_BOOL;
    const bool floats =
        vec_float(a->dst.dtype) && a->src.dtype == a->dst.dtype && unary_known(a->kind, a->p0);
    if (!bools && !floats)
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 2, (const kn_array *const[]){ &a->dst, &a->src }))
        return KN_DECLINED;
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    const unary_ctx u = { a->kind, a->dst.dtype, (float)a->p0, (float)a->p1 };
    vec_iter_run(&it, it.total * unary_weight(a->kind) * 2, bools ? not_run : unary_run, &u);
    return KN_DONE;
}

/* ---- derivatives ---------------------------------------------------------------------------- */

/* sigmoid(z) and its derivative's factor 1 - sigmoid(z), without cancellation: with e = e^-z,
 * s = 1 / (1 + e) and 1 - s = e s. */
VEC_INLINE vf sigmoid_pair(vf z, vf *rest)
{
    const vf e = v_exp(v_min(v_set1(87.0f), -z)); /* stays finite */
    const vf s = v_set1(1.0f) / (v_set1(1.0f) + e);
    *rest = e * s;
    return s;
}

/* Slopes are 0 or 1 in f32 far from 0, where their formulas multiply by x: there x counts as this
 * bound, so that no product is of 0 and infinity. */
VEC_INLINE vf within(vf x, float bound)
{
    return clamp(x, v_set1(-bound), v_set1(bound));
}

/* With s = sigmoid(2u): y = x s, y' = s + x s (1 - s) 2u', u' = sqrt(2/pi) (1 + 0.134145 x^2) */
VEC_INLINE vf gelu_tanh_slope(vf given)
{
    vf rest;
    const vf x = within(given, 30.0f);
    const vf s = sigmoid_pair(v_set1(2.0f) * gelu_inner(x), &rest);
    const vf du = v_fma(x * x, v_set1(1.59576912f * 0.134145f), v_set1(1.59576912f));
    return v_fma(x * (s * rest), du, s);
}

/* Phi(x) + x phi(x), phi the normal density */
VEC_INLINE vf gelu_erf_slope(vf given)
{
    const vf x = within(given, 30.0f);
    const vf density = v_set1(0.39894228f) * v_exp(v_set1(-0.5f) * x * x);
    return v_fma(x, density, v_normal_cdf(x));
}

VEC_INLINE vf silu_slope(vf given)
{
    vf rest;
    const vf x = within(given, 104.0f), s = sigmoid_pair(x, &rest);
    return s * v_fma(x, rest, v_set1(1.0f));
}

/* With t = n / (n + 2) and s = sigmoid(x): t + x s (1 - t^2), 1 - t = 2 / (n + 2) */
VEC_INLINE vf mish_slope(vf given)
{
    const vf x = within(given, 104.0f);
    const vf one = v_set1(1.0f), two = v_set1(2.0f), e = v_exp(v_min(v_set1(30.0f), x));
    const vf n = mish_n(e), t = n / (n + two);
    return v_fma(x * (e / (one + e)), (two / (n + two)) * (one + t), t);
}

VEC_INLINE vf hardswish_slope(vf x)
{
    const vf three = v_set1(3.0f), inner = (x + v_set1(1.5f)) * v_set1(1.0f / 3);
    return v_sel(v_le(x, -three), v_zero(), v_sel(v_ge(x, three), v_set1(1.0f), inner));
}

/* factor where low < x < high, else 0 */
VEC_INLINE vf between(vf x, vf low, vf high, vf factor)
{
    return v_sel(v_gt(x, low), v_sel(v_lt(x, high), factor, v_zero()), v_zero());
}

/* expr is a function of d, which is dy, and v, where v is x or y, whichever the kind reads. */
#define GRAD_LOOP(expr)                                                                            \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf d = v_load(dy + i), v = v_load(in + i);                                       \
            (void)v, (void)d;                                                                      \
            v_store(dx + i, expr);                                                                 \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf d = v_load_n(dy + i, n - i), v = v_load_n(in + i, n - i);                     \
            (void)v, (void)d;                                                                      \
            v_store_n(dx + i, expr, n - i);                                                        \
        }                                                                                          \
    } while (0)

#define GRAD_CASE(kind, expr)                                                                      \
    case kind:                                                                                     \
        GRAD_LOOP(expr);                                                                           \
        break

static void grad_block(const unary_ctx *u, float *dx, const float *dy, const float *in, int64_t n)
{
    const vf one = v_set1(1.0f), half = v_set1(0.5f), zero = v_zero();
    const vf p0 = v_set1(u->p0), p1 = v_set1(u->p1);
    switch (u->kind) {
        GRAD_CASE(KN_NEG, -d);
        GRAD_CASE(KN_ABS, d * sign(v));
        GRAD_CASE(KN_SIGN, zero);
        GRAD_CASE(KN_FLOOR, zero);
        GRAD_CASE(KN_CEIL, zero);
        GRAD_CASE(KN_ROUND, zero);
        GRAD_CASE(KN_SQUARE, d * (v + v));
        GRAD_CASE(KN_EXP, d * v);
        GRAD_CASE(KN_EXPM1, d * (v + one));
        GRAD_CASE(KN_LOG, d / v);
        GRAD_CASE(KN_LOG1P, d / (one + v));
        GRAD_CASE(KN_SQRT, d * half / v);
        GRAD_CASE(KN_RSQRT, d * (-half * v * v * v));
        GRAD_CASE(KN_RECIP, d * (-v * v));
        GRAD_CASE(KN_ERF, d * (v_set1(1.12837917f) * v_exp(-(v * v))));
        GRAD_CASE(KN_TANH, d * v_fnma(v, v, one));
        GRAD_CASE(KN_SIGMOID, d * (v * (one - v)));
        GRAD_CASE(KN_LOGSIGMOID, d * v_sigmoid(-v));
        GRAD_CASE(KN_RELU, v_sel(v_le(v, zero), zero, d)); /* NaN passes */
        GRAD_CASE(KN_GELU_TANH, d * gelu_tanh_slope(v));
        GRAD_CASE(KN_GELU, d * gelu_erf_slope(v));
        GRAD_CASE(KN_SILU, d * silu_slope(v));
        GRAD_CASE(KN_MISH, d * mish_slope(v));
        GRAD_CASE(KN_HARDSIGMOID, between(v, v_set1(-3.0f), v_set1(3.0f), d * v_set1(1.0f / 6)));
        GRAD_CASE(KN_HARDSWISH, d * hardswish_slope(v));
        GRAD_CASE(KN_LEAKY_RELU, v_sel(v_gt(v, zero), d, d * p0));
        GRAD_CASE(KN_ELU, v_sel(v_gt(v, zero), d, d * (p0 * v_exp(v))));
        GRAD_CASE(KN_SOFTPLUS, v_sel(v_gt(p0 * v, p1), d, d * v_sigmoid(p0 * v)));
        GRAD_CASE(KN_AFFINE, d * p0);
        GRAD_CASE(KN_POW, d * (v + v)); /* only the square */
        GRAD_CASE(KN_CLAMP, v_sel(v_ge(v, p0), v_sel(v_le(v, p1), d, zero), zero));
        GRAD_CASE(KN_HARDTANH, between(v, p0, p1, d));
    default:
        break;
    }
}

static void grad_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const unary_ctx *u = ctx;
    const int64_t step1 = vec_iter_inner(it, 1), step2 = vec_iter_inner(it, 2), size = it->size[0];
    if (u->dtype == KN_F32 && step1 == 1 && step2 == 1) {
        grad_block(u, (float *)p[0], (const float *)p[1], (const float *)p[2], n);
        return;
    }
    float dy[BLOCK], in[BLOCK], strided[2][BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, n - i);
        char *dst = p[0] + i * size;
        const void *a = vec_dense_run(p[1] + i * step1 * size, step1, size, w, strided[0]);
        const void *b = vec_dense_run(p[2] + i * step2 * size, step2, size, w, strided[1]);
        if (u->dtype == KN_F32) {
            grad_block(u, (float *)(void *)dst, a, b, w);
            continue;
        }
        vec_widen(u->dtype, a, dy, w);
        vec_widen(u->dtype, b, in, w);
        grad_block(u, dy, dy, in, w);
        vec_narrow(u->dtype, dst, dy, w);
    }
}

/* The array that the derivative reads, NULL where the caller didn't give it. Kinds that read
 * neither x nor y get dy, which is there anyway. */
static const kn_array *grad_input(const kn_unary_grad_args *a)
{
    const int reads = kn_unary_row(a->kind)->reads;
    const kn_array *in = reads & KN_READS_X ? &a->x : reads & KN_READS_Y ? &a->y : &a->dy;
    return in->data ? in : NULL;
}

kn_status vec_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = args;
    if (!vec_float(a->dx.dtype) || a->dy.dtype != a->dx.dtype || !unary_known(a->kind, a->p0))
        return KN_DECLINED;
    if (kn_array_numel(&a->dx) == 0)
        return KN_DONE;
    const kn_array *in = grad_input(a);
    if (!in || in->dtype != a->dx.dtype)
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 3, (const kn_array *const[]){ &a->dx, &a->dy, in }))
        return KN_DECLINED;
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    const unary_ctx u = { a->kind, a->dx.dtype, (float)a->p0, (float)a->p1 };
    vec_iter_run(&it, it.total * unary_weight(a->kind) * 3, grad_run, &u);
    return KN_DONE;
}
