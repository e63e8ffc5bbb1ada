/* kernels/cpu/vec/elementwise.c: unary functions, their derivatives, and binary operations. The
 * loops are f32; bf16 and f16 pass through blocks that stay in the first-level cache. */
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

/* No default: the compiler warns of a kind that is missing, and none is taken unless it is
 * listed. */
static bool unary_known(kn_unary kind, double p0)
{
    switch (kind) {
    case KN_NEG:
    case KN_ABS:
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
    case KN_AFFINE:
    case KN_CLAMP:
        return true;
    case KN_POW:
        return p0 == 2;
    case KN_SIN:
    case KN_COS:
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
    case KN_NEG:
        UNARY_LOOP(-x);
        break;
    case KN_ABS:
        UNARY_LOOP(v_abs(x));
        break;
    case KN_EXP:
        UNARY_LOOP(v_exp(x));
        break;
    case KN_LOG:
        UNARY_LOOP(v_log(x));
        break;
    case KN_SQRT:
        UNARY_LOOP(v_sqrt(x));
        break;
    case KN_RSQRT:
        UNARY_LOOP(one / v_sqrt(x));
        break;
    case KN_RECIP:
        UNARY_LOOP(one / x);
        break;
    case KN_TANH:
        UNARY_LOOP(v_tanh(x));
        break;
    case KN_SIGMOID:
        UNARY_LOOP(v_sigmoid(x));
        break;
    case KN_RELU:
        UNARY_LOOP(v_max(zero, x)); /* NaN passes */
        break;
    case KN_GELU_TANH:
        UNARY_LOOP(x_sigmoid(x, v_set1(2.0f) * gelu_inner(x)));
        break;
    case KN_GELU:
        UNARY_LOOP(x * v_normal_cdf(x));
        break;
    case KN_SILU:
        UNARY_LOOP(x_sigmoid(x, x));
        break;
    case KN_AFFINE:
        UNARY_LOOP(v_fma(p0, x, p1));
        break;
    case KN_POW: /* only the square */
        UNARY_LOOP(x * x);
        break;
    case KN_CLAMP:
        UNARY_LOOP(v_min(p1, v_max(p0, x)));
        break;
    default:
        break;
    }
}

static void unary_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const unary_ctx *u = ctx;
    if (u->dtype == KN_F32) {
        unary_block(u, (float *)p[0], (const float *)p[1], n);
        return;
    }
    float buf[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, n - i);
        vec_widen(u->dtype, p[1] + i * it->size[1], buf, w);
        unary_block(u, buf, buf, w);
        vec_narrow(u->dtype, p[0] + i * it->size[0], buf, w);
    }
}

/* Bytes of memory traffic that take about as long as one element of this kind computes. */
static int64_t unary_weight(kn_unary kind)
{
    return kn_unary_row(kind)->heavy ? 16 : 4;
}

kn_status vec_unary(const void *args)
{
    const kn_unary_args *a = args;
    if (!vec_float(a->dst.dtype) || a->src.dtype != a->dst.dtype || !unary_known(a->kind, a->p0))
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 2, (const kn_array *const[]){ &a->dst, &a->src }))
        return KN_DECLINED;
    if (vec_iter_inner(&it, 0) != 1 || vec_iter_inner(&it, 1) != 1)
        return KN_DECLINED;
    const unary_ctx u = { a->kind, a->dst.dtype, (float)a->p0, (float)a->p1 };
    vec_iter_run(&it, it.total * unary_weight(a->kind) * 2, unary_run, &u);
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

/* With s = sigmoid(2u): y = x s, y' = s + x s (1 - s) 2u', u' = sqrt(2/pi) (1 + 0.134145 x^2) */
VEC_INLINE vf gelu_tanh_slope(vf x)
{
    vf rest;
    const vf s = sigmoid_pair(v_set1(2.0f) * gelu_inner(x), &rest);
    const vf du = v_fma(x * x, v_set1(1.59576912f * 0.134145f), v_set1(1.59576912f));
    return v_fma(x * (s * rest), du, s);
}

/* Phi(x) + x phi(x), phi the normal density */
VEC_INLINE vf gelu_erf_slope(vf x)
{
    const vf density = v_set1(0.39894228f) * v_exp(v_set1(-0.5f) * x * x);
    return v_fma(x, density, v_normal_cdf(x));
}

VEC_INLINE vf silu_slope(vf x)
{
    vf rest;
    const vf s = sigmoid_pair(x, &rest);
    return s * v_fma(x, rest, v_set1(1.0f));
}

/* 0 at 0, as the derivative of |x| is taken there; NaN passes */
VEC_INLINE vf sign(vf x)
{
    return v_sel(v_eq(x, v_zero()), v_zero(), v_sel(v_ne(x, x), x, v_copysign(v_set1(1.0f), x)));
}

/* expr is a function of dy and v, where v is x or y, whichever the kind reads. */
#define GRAD_LOOP(expr)                                                                            \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf d = v_load(dy + i), v = v_load(in + i);                                       \
            (void)v;                                                                               \
            v_store(dx + i, expr);                                                                 \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf d = v_load_n(dy + i, n - i), v = v_load_n(in + i, n - i);                     \
            (void)v;                                                                               \
            v_store_n(dx + i, expr, n - i);                                                        \
        }                                                                                          \
    } while (0)

static void grad_block(const unary_ctx *u, float *dx, const float *dy, const float *in, int64_t n)
{
    const vf one = v_set1(1.0f), half = v_set1(0.5f), zero = v_zero();
    const vf p0 = v_set1(u->p0), p1 = v_set1(u->p1);
    switch (u->kind) {
    case KN_NEG:
        GRAD_LOOP(-d);
        break;
    case KN_ABS:
        GRAD_LOOP(d * sign(v));
        break;
    case KN_EXP:
        GRAD_LOOP(d * v);
        break;
    case KN_LOG:
        GRAD_LOOP(d / v);
        break;
    case KN_SQRT:
        GRAD_LOOP(d * half / v);
        break;
    case KN_RSQRT:
        GRAD_LOOP(d * (-half * v * v * v));
        break;
    case KN_RECIP:
        GRAD_LOOP(d * (-v * v));
        break;
    case KN_TANH:
        GRAD_LOOP(d * v_fnma(v, v, one));
        break;
    case KN_SIGMOID:
        GRAD_LOOP(d * (v * (one - v)));
        break;
    case KN_RELU:
        GRAD_LOOP(v_sel(v_gt(v, zero), d, zero));
        break;
    case KN_GELU_TANH:
        GRAD_LOOP(d * gelu_tanh_slope(v));
        break;
    case KN_GELU:
        GRAD_LOOP(d * gelu_erf_slope(v));
        break;
    case KN_SILU:
        GRAD_LOOP(d * silu_slope(v));
        break;
    case KN_AFFINE:
        GRAD_LOOP(d * p0);
        break;
    case KN_POW: /* only the square */
        GRAD_LOOP(d * (v + v));
        break;
    case KN_CLAMP:
        GRAD_LOOP(v_sel(v_ge(v, p0), v_sel(v_le(v, p1), d, zero), zero));
        break;
    default:
        break;
    }
}

static void grad_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const unary_ctx *u = ctx;
    if (u->dtype == KN_F32) {
        grad_block(u, (float *)p[0], (const float *)p[1], (const float *)p[2], n);
        return;
    }
    float dy[BLOCK], in[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, n - i), at = i * it->size[0];
        vec_widen(u->dtype, p[1] + at, dy, w);
        vec_widen(u->dtype, p[2] + at, in, w);
        grad_block(u, dy, dy, in, w);
        vec_narrow(u->dtype, p[0] + at, dy, w);
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
    for (int k = 0; k < 3; k++)
        if (vec_iter_inner(&it, k) != 1)
            return KN_DECLINED;
    const unary_ctx u = { a->kind, a->dx.dtype, (float)a->p0, (float)a->p1 };
    vec_iter_run(&it, it.total * unary_weight(a->kind) * 3, grad_run, &u);
    return KN_DONE;
}

/* ---- binary --------------------------------------------------------------------------------- */

/* expr is a function of x and y; a step of 0 repeats the first value. */
#define BINARY_LOOP(expr)                                                                          \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf x = sa ? v_load(a + i) : a0, y = sb ? v_load(b + i) : b0;                     \
            v_store(dst + i, expr);                                                                \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf x = sa ? v_load_n(a + i, n - i) : a0, y = sb ? v_load_n(b + i, n - i) : b0;   \
            v_store_n(dst + i, expr, n - i);                                                       \
        }                                                                                          \
    } while (0)

static void binary_block(kn_binary kind, float *dst, const float *a, int64_t sa, const float *b,
                         int64_t sb, int64_t n)
{
    const vf a0 = v_set1(a[0]), b0 = v_set1(b[0]);
    switch (kind) {
    case KN_ADD:
        BINARY_LOOP(x + y);
        break;
    case KN_SUB:
        BINARY_LOOP(x - y);
        break;
    case KN_MUL:
        BINARY_LOOP(x * y);
        break;
    case KN_DIV:
        BINARY_LOOP(x / y);
        break;
    case KN_MAXIMUM: /* NaN on either side passes */
        BINARY_LOOP(v_sel(v_ne(x, x), x, v_max(x, y)));
        break;
    case KN_MINIMUM:
        BINARY_LOOP(v_sel(v_ne(x, x), x, v_min(x, y)));
        break;
    default:
        break;
    }
}

#define COMPARE_LOOP(op)                                                                           \
    for (int64_t i = 0; i < n; i++)                                                                \
    dst[i] = a[i * sa] op b[i * sb]

static void compare_block(kn_binary kind, uint8_t *dst, const float *a, int64_t sa, const float *b,
                          int64_t sb, int64_t n)
{
    switch (kind) {
    case KN_EQ:
        COMPARE_LOOP(==);
        break;
    case KN_NE:
        COMPARE_LOOP(!=);
        break;
    case KN_LT:
        COMPARE_LOOP(<);
        break;
    case KN_LE:
        COMPARE_LOOP(<=);
        break;
    case KN_GT:
        COMPARE_LOOP(>);
        break;
    case KN_GE:
        COMPARE_LOOP(>=);
        break;
    default:
        break;
    }
}

typedef struct binary_ctx {
    kn_binary kind;
    kn_dtype dtype; /* of a and b */
} binary_ctx;

static void binary_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const binary_ctx *c = ctx;
    const int64_t sa = vec_iter_inner(it, 1), sb = vec_iter_inner(it, 2);
    float x[BLOCK], y[BLOCK];
    for (int64_t i = 0; i < n; i += BLOCK) {
        const int64_t w = v_min_i64(BLOCK, n - i);
        char *dst = p[0] + i * it->size[0];
        const void *pa = p[1] + sa * i * it->size[1], *pb = p[2] + sb * i * it->size[2];
        const float *a = pa, *b = pb;
        if (c->dtype != KN_F32) {
            vec_widen(c->dtype, pa, x, sa ? w : 1);
            vec_widen(c->dtype, pb, y, sb ? w : 1);
            a = x;
            b = y;
        }
        if (c->kind >= KN_EQ) {
            compare_block(c->kind, (uint8_t *)dst, a, sa, b, sb, w);
        } else if (c->dtype == KN_F32) {
            binary_block(c->kind, (float *)dst, a, sa, b, sb, w);
        } else { /* the result may replace a's buffer, but not its broadcast first value */
            float *r = sa ? x : y;
            float scalar[2] = { a[0], b[0] };
            if (!sa && !sb)
                binary_block(c->kind, x, &scalar[0], 0, &scalar[1], 0, w), r = x;
            else
                binary_block(c->kind, r, sa ? x : &scalar[0], sa, sb ? y : &scalar[1], sb, w);
            vec_narrow(c->dtype, dst, r, w);
        }
    }
}

static bool binary_known(kn_binary kind)
{
    switch (kind) {
    case KN_ADD:
    case KN_SUB:
    case KN_MUL:
    case KN_DIV:
    case KN_MAXIMUM:
    case KN_MINIMUM:
    case KN_EQ:
    case KN_NE:
    case KN_LT:
    case KN_LE:
    case KN_GT:
    case KN_GE:
        return true;
    case KN_POWER:
    case KN_AND:
    case KN_OR:
    case KN_BINARY_COUNT:
        break;
    }
    return false;
}

kn_status vec_binary(const void *args)
{
    const kn_binary_args *a = args;
    if (!binary_known(a->kind) || a->a.dtype != a->b.dtype || !vec_float(a->a.dtype))
        return KN_DECLINED;
    if (a->dst.dtype != (a->kind >= KN_EQ ? KN_BOOL : a->a.dtype))
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 3, (const kn_array *const[]){ &a->dst, &a->a, &a->b }))
        return KN_DECLINED;
    if (!vec_iter_dense(&it))
        return KN_DECLINED;
    vec_iter_run(&it, it.total * (it.size[0] + 2 * it.size[1]), binary_run,
                 &(binary_ctx){ a->kind, a->a.dtype });
    return KN_DONE;
}
