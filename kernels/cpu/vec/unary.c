/* kernels/cpu/vec/unary.c: unary functions and their derivatives. The loops are f32; bf16 and f16
 * pass through blocks that stay in the first-level cache. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/cpu/vec/words.h"

#define BLOCK 512 /* floats of a conversion buffer */

/* ---- unary ---------------------------------------------------------------------------------- */

typedef struct unary_ctx {
    kn_unary kind;
    kn_dtype dtype;
    float p0, p1;
    bool gradient;
} unary_ctx;

#ifdef KN_HAVE_MVEC
/* x^p; p holds one number. Roots of -0 and -inf are those of pow. */
KN_FORMULA v_power(vf x, vf p)
{
    const vf one = v_set1(1.0f), inf = v_set1(__builtin_inff());
    const float e = p[0];
    if (e == 0 || e == 1)
        return e == 0 ? one : x;
    if (e == 2 || e == -2)
        return e == 2 ? x * x : one / (x * x);
    if (e == 3 || e == -1)
        return e == 3 ? x * x * x : one / x;
    if (e == 0.5f || e == -0.5f) {
        const vf root = v_sqrt(v_sel(v_eq(x, -inf), inf, x + v_zero()));
        return e == 0.5f ? root : one / root;
    }
    return v_pow(x, p);
}
#define v_pow v_power
#endif

/* The loop over one block: expr is a function of the vector x. */
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

/* A case for each kind but the rare ones. */
#define LOOP_LIGHT(kind, LOOP, expr)                                                               \
    case kind:                                                                                     \
        LOOP(expr);                                                                                \
        break;
#define LOOP_HEAVY LOOP_LIGHT
#define LOOP_LONG  LOOP_LIGHT
#define LOOP_RARE(kind, LOOP, expr)
#define UNARY_CASE(kind, name, function, reads, dtypes, domain, work, formula, gradient)           \
    LOOP_##work(KN_##kind, UNARY_LOOP, formula)

static void unary_block(const unary_ctx *u, float *dst, const float *src, int64_t n)
{
    const vf p0 = v_set1(u->p0), p1 = v_set1(u->p1);
    switch (u->kind) {
        KN_UNARY_KINDS(UNARY_CASE)
    default:
        break;
    }
}

/* expr is a function of d, which is dy, and of x or y, whichever the kind reads. */
#define GRAD_LOOP(expr)                                                                            \
    do {                                                                                           \
        int64_t i = 0;                                                                             \
        for (; i + KN_VW <= n; i += KN_VW) {                                                       \
            const vf d = v_load(dy + i), x = v_load(in + i), y = x;                                \
            (void)y, (void)d;                                                                      \
            v_store(dx + i, expr);                                                                 \
        }                                                                                          \
        if (i < n) {                                                                               \
            const vf d = v_load_n(dy + i, n - i), x = v_load_n(in + i, n - i), y = x;              \
            (void)y, (void)d;                                                                      \
            v_store_n(dx + i, expr, n - i);                                                        \
        }                                                                                          \
    } while (0)

#define GRAD_CASE(kind, name, function, reads, dtypes, domain, work, formula, gradient)            \
    LOOP_##work(KN_##kind, GRAD_LOOP, gradient)

static void grad_block(const unary_ctx *u, float *dx, const float *dy, const float *in, int64_t n)
{
    const vf p0 = v_set1(u->p0), p1 = v_set1(u->p1);
    switch (u->kind) {
        KN_UNARY_KINDS(GRAD_CASE)
    default:
        break;
    }
}

/* p: the result; the input, or dy and the array that the derivative reads. */
static void unary_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const unary_ctx *u = ctx;
    const int inputs = u->gradient ? 2 : 1;
    const int64_t step[2] = { vec_iter_inner(it, 1), u->gradient ? vec_iter_inner(it, 2) : 1 };
    const bool f32 = u->dtype == KN_F32;
    float wide[2][BLOCK], strided[2][BLOCK];
    for (int64_t i = 0, w; i < n; i += w) {
        w = f32 && step[0] == 1 && step[1] == 1 ? n : v_min_i64(BLOCK, n - i);
        char *dst = p[0] + i * it->size[0];
        const float *in[2] = { NULL, NULL };
        for (int k = 0; k < inputs; k++) {
            const int64_t size = it->size[1 + k];
            const void *from =
                vec_dense_run(p[1 + k] + i * step[k] * size, step[k], size, w, strided[k]);
            if (!f32)
                vec_widen(u->dtype, from, wide[k], w);
            in[k] = f32 ? from : wide[k];
        }
        float *to = f32 ? (float *)(void *)dst : wide[0];
        if (u->gradient)
            grad_block(u, to, in[0], in[1], w);
        else
            unary_block(u, to, in[0], w);
        if (!f32)
            vec_narrow(u->dtype, dst, wide[0], w);
    }
}

/* The kind whose loop computes a kind. */
static kn_unary loop_of(kn_unary kind, double p0)
{
    return kind == KN_POW && p0 == 2 ? KN_SQUARE : kind;
}

static bool has_loop(kn_unary kind)
{
    const kn_kind_row *row = kn_unary_row(kind);
    return kn_kind_takes(row, KN_F32) && row->work < VEC_RARE;
}

/* Bytes of memory traffic that take about as long as one element of this kind computes. */
static int64_t unary_weight(kn_unary kind)
{
    return kn_unary_row(kind)->work != KN_LIGHT ? 16 : 4;
}

static void not_run(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n, const void *ctx)
{
    const int64_t step = vec_iter_inner(it, 1);
    char room[BLOCK], *y = p[0];
    (void)ctx;
    for (int64_t i = 0, w; i < n; i += w) {
        w = v_min_i64(BLOCK, n - i);
        const char *x = vec_dense_run(p[1] + i * step, step, 1, w, room);
        for (int64_t j = 0; j < w; j++)
            y[i + j] = x[j] == 0;
    }
}

kn_status VEC_FN(vec_unary)(const void *args)
{
    const kn_unary_args *a = args;
    const bool bools = a->kind == KN_NOT && a->dst.dtype == KN_BOOL && a->src.dtype == KN_BOOL;
    const kn_unary kind = loop_of(a->kind, a->p0);
    const bool floats = vec_float(a->dst.dtype) && a->src.dtype == a->dst.dtype && has_loop(kind);
    if (!bools && !floats)
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 2, (const kn_array *const[]){ &a->dst, &a->src }))
        return KN_DECLINED;
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    const unary_ctx u = { kind, a->dst.dtype, (float)a->p0, (float)a->p1, false };
    vec_iter_run(&it, it.total * unary_weight(kind) * 2, bools ? not_run : unary_run, &u);
    return KN_DONE;
}

/* ---- derivatives ---------------------------------------------------------------------------- */

kn_status VEC_FN(vec_unary_grad)(const void *args)
{
    const kn_unary_grad_args *a = args;
    const kn_unary kind = loop_of(a->kind, a->p0);
    if (!vec_float(a->dx.dtype) || a->dy.dtype != a->dx.dtype || !has_loop(kind))
        return KN_DECLINED;
    if (kn_array_numel(&a->dx) == 0)
        return KN_DONE;
    const kn_array *in = kn_unary_grad_input(a);
    if (!in->data || in->dtype != a->dx.dtype)
        return KN_DECLINED;
    vec_iter it;
    if (!vec_iter_make(&it, 3, (const kn_array *const[]){ &a->dx, &a->dy, in }))
        return KN_DECLINED;
    if (vec_iter_inner(&it, 0) != 1)
        return KN_DECLINED;
    const unary_ctx u = { kind, a->dx.dtype, (float)a->p0, (float)a->p1, true };
    vec_iter_run(&it, it.total * unary_weight(kind) * 3, unary_run, &u);
    return KN_DONE;
}
