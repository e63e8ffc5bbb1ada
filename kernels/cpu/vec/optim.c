/* kernels/cpu/vec/optim.c: the fused optimizers, which are bound by memory. Every operation rounds
 * as in the reference, so the bits are those of the reference on every instruction set. */
#include "kernels/cpu/vec/chunks.h"
#include "kernels/philox.h"

#include <math.h>

static int64_t piece_count(const void *list, int i)
{
    return ((const kn_opt_piece *)list)[i].count;
}

/* The updated masters, and their rounded copy if there is one. */
VEC_INLINE void put_param(const kn_opt_piece *o, int64_t i, vf p, int64_t n)
{
    v_put_n(KN_F32, o->param, i, p, n);
    if (!o->out)
        return;
    if (o->out_dtype == KN_BF16)
        v_put_n(KN_BF16, o->out, i, p, n);
    else if (o->out_dtype == KN_F16)
        v_put_n(KN_F16, o->out, i, p, n);
    else
        v_put_n(KN_F32, o->out, i, p, n);
}

/* ---- steps ---------------------------------------------------------------------------------- */

/* What every optimizer's context begins with. */
typedef struct step_ctx {
    const kn_opt_step *step;
    float lr, scale, limit;
} step_ctx;

static step_ctx step_ctx_of(const kn_opt_step *s)
{
    return (step_ctx){ s, (float)*s->lr, (float)*s->grad_scale,
                       s->limit ? (float)*s->limit : INFINITY };
}

/* Gradients, scaled and then clamped; NaN stays. */
VEC_INLINE vf get_grad(const step_ctx *c, const kn_opt_piece *o, int64_t i, int64_t n, kn_dtype t)
{
    const vf g = v_get_n(t, o->grad, i, n) * v_set1(c->scale), most = v_set1(c->limit);
    return v_sel(v_gt(g, most), most, v_sel(v_lt(g, -most), -most, g));
}

static bool pieces_ok(const kn_opt_piece *piece, int pieces)
{
    for (int i = 0; i < pieces; i++)
        if (!vec_float(piece[i].param_dtype) || !vec_float(piece[i].grad_dtype) ||
            (piece[i].out && !vec_float(piece[i].out_dtype)))
            return false;
    return true;
}

/* ---- masters of bf16 and f16: f32 in between ------------------------------------------------- */

#define SPAN 1024 /* elements */

/* The words of the piece's elements [at, at + n) for rounding its tensor number which. */
static void words_of(const kn_opt_step *s, const kn_opt_piece *o, int which, int64_t at, int64_t n,
                     uint32_t *word)
{
    const kn_opt_place *p = &o->place;
    const uint64_t key = kn_step_key(*s->seed, *s->step), stream = p->stream + (uint64_t)which;
    for (int64_t end = at + n; at < end;) {
        const int64_t row = p->run > 0 ? at / p->run : 0, in = at - row * p->run;
        const int64_t some = p->run > 0 ? v_min_i64(end - at, p->run - in) : end - at;
        vec_words(key, stream, (uint64_t)(p->start + row * p->step + in), some, word);
        word += some;
        at += some;
    }
}

/* Rounds x[n] to the piece's tensor number which, from element at. */
static void put_narrow(const kn_opt_step *s, const kn_opt_piece *o, int which, int64_t at,
                       int64_t n, const float *x)
{
    uint16_t *to = (uint16_t *)(which == 0 ? o->param : which == 1 ? o->m : o->v) + at;
    uint32_t word[SPAN];
    if (!s->seed) {
        vec_narrow(o->param_dtype, to, x, n);
        return;
    }
    words_of(s, o, which, at, n, word);
    if (o->param_dtype == KN_BF16)
        for (int64_t i = 0; i < n; i++)
            to[i] = kn_bf16_at_random(x[i], word[i]);
    else
        for (int64_t i = 0; i < n; i++)
            to[i] = kn_f16_at_random(x[i], word[i]);
}

static void copy_out(const kn_opt_piece *o, int64_t at, int64_t n)
{
    float x[SPAN];
    vec_widen(o->param_dtype, (const uint16_t *)o->param + at, x, n);
    char *out = (char *)o->out + at * (int64_t)kn_dtype_size(o->out_dtype);
    if (o->out_dtype == KN_F32)
        memcpy(out, x, (size_t)n * sizeof *x);
    else
        vec_narrow(o->out_dtype, out, x, n);
}

/* Calls f32_chunk for the piece as it is, or span by span for an f32 copy of it. */
static void any_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx,
                      chunk_fn f32_chunk)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    const kn_opt_step *s = ((const step_ctx *)ctx)->step;
    if (o->param_dtype == KN_F32) {
        f32_chunk(list, i, begin, end, ctx);
        return;
    }
    float x[3][SPAN];
    void *const from[3] = { o->param, o->m, o->v };
    for (int64_t at = begin; at < end; at += SPAN) {
        const int64_t n = v_min_i64(SPAN, end - at);
        kn_opt_piece wide = *o;
        for (int k = 0; k < 3; k++)
            if (from[k])
                vec_widen(o->param_dtype, (const uint16_t *)from[k] + at, x[k], n);
        wide.param = x[0];
        wide.m = o->m ? x[1] : NULL;
        wide.v = o->v ? x[2] : NULL;
        wide.grad = (const char *)o->grad + at * (int64_t)kn_dtype_size(o->grad_dtype);
        wide.out = NULL;
        f32_chunk(&wide, 0, 0, n, ctx);
        for (int k = 0; k < 3; k++)
            if (from[k])
                put_narrow(s, o, k, at, n, x[k]);
        if (o->out)
            copy_out(o, at, n);
    }
}

/* ---- AdamW ---------------------------------------------------------------------------------- */

typedef struct adamw_ctx {
    step_ctx s;
    float b1, b2, eps, c1, c2; /* b: 1 - beta, c: 1 - beta^t */
} adamw_ctx;

/* m += b1 (g - m);  v += b2 (g^2 - v);  p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p) */
VEC_INLINE void adamw_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end,
                               const adamw_ctx *c, kn_dtype t)
{
    const float *param = o->param;
    float *first = o->m, *second = o->v;
    const vf lr = v_set1(c->s.lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay),
             eps = v_set1(c->eps);
    const vf b1 = v_set1(c->b1), b2 = v_set1(c->b2), c1 = v_set1(c->c1), c2 = v_set1(c->c2);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf g = get_grad(&c->s, o, i, n, t), p = v_get_n(KN_F32, param, i, n);
        vf m = v_get_n(KN_F32, first, i, n), v = v_get_n(KN_F32, second, i, n);
        m = m + b1 * (g - m);
        v = v + b2 * (g * g - v);
        const vf step = (m / c1) / (v_sqrt(v / c2) + eps);
        v_put_n(KN_F32, first, i, m, n);
        v_put_n(KN_F32, second, i, v, n);
        put_param(o, i, p - lr * (step + wd * p), n);
    }
}

static void adamw_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    VEC_BY_DTYPE(o->grad_dtype, adamw_chunk_of, o, begin, end, (const adamw_ctx *)ctx);
}

static void any_adamw_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    any_chunk(list, i, begin, end, ctx, adamw_chunk);
}

kn_status VEC_FN(vec_adamw)(const void *args)
{
    const kn_adamw_args *a = args;
    if (!pieces_ok(a->s.piece, a->s.pieces))
        return KN_DECLINED;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    const double t = *a->s.step;
    adamw_ctx c = { .s = step_ctx_of(&a->s),
                    .b1 = (float)(1 - a->beta1),
                    .b2 = (float)(1 - a->beta2),
                    .eps = (float)a->eps,
                    .c1 = (float)(1 - pow(a->beta1, t)),
                    .c2 = (float)(1 - pow(a->beta2, t)) };
    each_chunk(a->s.piece, a->s.pieces, piece_count, 28, any_adamw_chunk, (char *)&c, 0, INT32_MAX);
    return KN_DONE;
}

/* ---- SGD ------------------------------------------------------------------------------------ */

typedef struct sgd_ctx {
    step_ctx s;
    float momentum, fresh; /* fresh: 1 - dampening */
    bool first, nesterov;
} sgd_ctx;

VEC_INLINE void sgd_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end, const sgd_ctx *c,
                             kn_dtype t)
{
    const float *param = o->param;
    float *momentum = o->m;
    const vf lr = v_set1(c->s.lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay);
    const vf mu = v_set1(c->momentum), fresh = v_set1(c->fresh);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf p = v_get_n(KN_F32, param, i, n);
        vf g = get_grad(&c->s, o, i, n, t) + wd * p;
        if (momentum) {
            const vf m = c->first ? g : mu * v_get_n(KN_F32, momentum, i, n) + fresh * g;
            v_put_n(KN_F32, momentum, i, m, n);
            g = c->nesterov ? g + mu * m : m;
        }
        put_param(o, i, p - lr * g, n);
    }
}

static void sgd_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    VEC_BY_DTYPE(o->grad_dtype, sgd_chunk_of, o, begin, end, (const sgd_ctx *)ctx);
}

static void any_sgd_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    any_chunk(list, i, begin, end, ctx, sgd_chunk);
}

kn_status VEC_FN(vec_sgd)(const void *args)
{
    const kn_sgd_args *a = args;
    if (!pieces_ok(a->s.piece, a->s.pieces))
        return KN_DECLINED;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    sgd_ctx c = { .s = step_ctx_of(&a->s),
                  .momentum = (float)a->momentum,
                  .fresh = (float)(1 - a->dampening),
                  .first = *a->s.step == 1,
                  .nesterov = a->nesterov };
    each_chunk(a->s.piece, a->s.pieces, piece_count, 20, any_sgd_chunk, (char *)&c, 0, INT32_MAX);
    return KN_DONE;
}

/* ---- Lion ----------------------------------------------------------------------------------- */

typedef struct lion_ctx {
    step_ctx s;
    float b1, b2; /* b: 1 - beta */
} lion_ctx;

/* c = m + b1 (g - m);  m += b2 (g - m);  p -= lr (sign(c) + wd p); sign(0) and sign(NaN) are c */
VEC_INLINE void lion_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end, const lion_ctx *x,
                              kn_dtype t)
{
    const float *param = o->param;
    float *average = o->m;
    const vf lr = v_set1(x->s.lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay),
             one = v_set1(1);
    const vf b1 = v_set1(x->b1), b2 = v_set1(x->b2);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf p = v_get_n(KN_F32, param, i, n), m = v_get_n(KN_F32, average, i, n);
        const vf apart = get_grad(&x->s, o, i, n, t) - m;
        const vf c = m + b1 * apart;
        const vf sign = v_sel(v_gt(v_abs(c), v_zero()), v_copysign(one, c), c);
        v_put_n(KN_F32, average, i, m + b2 * apart, n);
        put_param(o, i, p - lr * (sign + wd * p), n);
    }
}

static void lion_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    VEC_BY_DTYPE(o->grad_dtype, lion_chunk_of, o, begin, end, (const lion_ctx *)ctx);
}

static void any_lion_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    any_chunk(list, i, begin, end, ctx, lion_chunk);
}

kn_status VEC_FN(vec_lion)(const void *args)
{
    const kn_lion_args *a = args;
    if (!pieces_ok(a->s.piece, a->s.pieces))
        return KN_DECLINED;
    if (a->s.pieces == 0 || (a->s.skip && *a->s.skip != 0))
        return KN_DONE;
    lion_ctx c = { .s = step_ctx_of(&a->s),
                   .b1 = (float)(1 - a->beta1),
                   .b2 = (float)(1 - a->beta2) };
    each_chunk(a->s.piece, a->s.pieces, piece_count, 20, any_lion_chunk, (char *)&c, 0, INT32_MAX);
    return KN_DONE;
}
