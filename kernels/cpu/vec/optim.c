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
    if (o->out)
        v_put_n(o->out_dtype, o->out, i, p, n);
}

/* ---- steps ---------------------------------------------------------------------------------- */

/* A step of any optimizer; each sets what it has, and the function for a piece of f32 masters. */
typedef struct optim_ctx {
    void (*chunk)(const kn_opt_piece *o, int64_t begin, int64_t end, const struct optim_ctx *c);
    const kn_opt_step *step;
    float lr, scale, limit;
    kn_average b1, b2;
    float eps, c1, c2;     /* c: 1 - beta^t */
    float momentum, fresh; /* fresh: 1 - dampening */
    bool first, nesterov;
} optim_ctx;

/* Gradients, scaled and then clamped; NaN stays. */
VEC_INLINE vf get_grad(const optim_ctx *c, const kn_opt_piece *o, int64_t i, int64_t n, kn_dtype t)
{
    const vf g = v_get_n(t, o->grad, i, n) * v_set1(c->scale), most = v_set1(c->limit);
    return v_sel(v_gt(g, most), most, v_sel(v_lt(g, -most), -most, g));
}

VEC_INLINE vf mean_of(kn_average a, vf old, vf fresh)
{
    const vf from = a.from_fresh ? fresh : old, to = a.from_fresh ? old : fresh;
    return from + v_set1((float)a.step) * (to - from);
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
        vec_convert(to, o->param_dtype, x, KN_F32, n);
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

/* Computes on the piece as it is, or span by span on an f32 copy of it. */
static void run_chunk(const void *list, int i, int64_t begin, int64_t end, void *ctx)
{
    const kn_opt_piece *o = &((const kn_opt_piece *)list)[i];
    const optim_ctx *c = ctx;
    if (o->param_dtype == KN_F32) {
        c->chunk(o, begin, end, c);
        return;
    }
    float x[3][SPAN];
    void *const from[3] = { o->param, o->m, o->v };
    for (int64_t at = begin; at < end; at += SPAN) {
        const int64_t n = v_min_i64(SPAN, end - at);
        kn_opt_piece wide = *o;
        for (int k = 0; k < 3; k++)
            if (from[k])
                vec_convert(x[k], KN_F32, (const uint16_t *)from[k] + at, o->param_dtype, n);
        wide.param = x[0];
        wide.m = o->m ? x[1] : NULL;
        wide.v = o->v ? x[2] : NULL;
        wide.grad = (const char *)o->grad + at * (int64_t)kn_dtype_size(o->grad_dtype);
        wide.out = NULL;
        c->chunk(&wide, 0, n, c);
        for (int k = 0; k < 3; k++)
            if (from[k])
                put_narrow(c->step, o, k, at, n, x[k]);
        if (o->out) /* rounded once more, from what was kept */
            vec_convert((char *)o->out + at * (int64_t)kn_dtype_size(o->out_dtype), o->out_dtype,
                        (const uint16_t *)o->param + at, o->param_dtype, n);
    }
}

/* bytes: of memory traffic for an element */
static kn_status run(optim_ctx *c, const kn_opt_step *s, int64_t bytes)
{
    if (!pieces_ok(s->piece, s->pieces))
        return KN_DECLINED;
    if (s->pieces == 0 || (s->skip && *s->skip != 0))
        return KN_DONE;
    c->step = s;
    c->lr = (float)*s->lr;
    c->scale = (float)*s->grad_scale;
    c->limit = s->limit ? (float)*s->limit : INFINITY;
    each_chunk(s->piece, s->pieces, piece_count, bytes, run_chunk, (char *)c, 0, INT32_MAX);
    return KN_DONE;
}

/* name_chunk: name_chunk_of for the gradient's dtype, a constant there. */
#define F32_CHUNK(name)                                                                            \
    static void name##_chunk(const kn_opt_piece *o, int64_t begin, int64_t end,                    \
                             const optim_ctx *c)                                                   \
    {                                                                                              \
        VEC_BY_DTYPE(o->grad_dtype, name##_chunk_of, o, begin, end, c);                            \
    }

/* m and v average g and g^2;  p -= lr (m / c1 / (sqrt(v / c2) + eps) + wd p) */
VEC_INLINE void adamw_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end,
                               const optim_ctx *c, kn_dtype t)
{
    const float *param = o->param;
    float *first = o->m, *second = o->v;
    const vf lr = v_set1(c->lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay),
             eps = v_set1(c->eps);
    const vf c1 = v_set1(c->c1), c2 = v_set1(c->c2);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf g = get_grad(c, o, i, n, t), p = v_get_n(KN_F32, param, i, n);
        vf m = v_get_n(KN_F32, first, i, n), v = v_get_n(KN_F32, second, i, n);
        m = mean_of(c->b1, m, g);
        v = mean_of(c->b2, v, g * g);
        const vf step = (m / c1) / (v_sqrt(v / c2) + eps);
        v_put_n(KN_F32, first, i, m, n);
        v_put_n(KN_F32, second, i, v, n);
        put_param(o, i, p - lr * (step + wd * p), n);
    }
}
F32_CHUNK(adamw)

kn_status VEC_FN(vec_adamw)(const void *args)
{
    const kn_adamw_args *a = args;
    const double t = a->s.pieces > 0 ? *a->s.step : 1;
    optim_ctx c = { .chunk = adamw_chunk,
                    .b1 = kn_average_of(a->beta1),
                    .b2 = kn_average_of(a->beta2),
                    .eps = (float)a->eps,
                    .c1 = (float)(1 - pow(a->beta1, t)),
                    .c2 = (float)(1 - pow(a->beta2, t)) };
    return run(&c, &a->s, 28);
}

VEC_INLINE void sgd_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end, const optim_ctx *c,
                             kn_dtype t)
{
    const float *param = o->param;
    float *momentum = o->m;
    const vf lr = v_set1(c->lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay);
    const vf mu = v_set1(c->momentum), fresh = v_set1(c->fresh);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf p = v_get_n(KN_F32, param, i, n);
        vf g = get_grad(c, o, i, n, t) + wd * p;
        if (momentum) {
            const vf m = c->first ? g : mu * v_get_n(KN_F32, momentum, i, n) + fresh * g;
            v_put_n(KN_F32, momentum, i, m, n);
            g = c->nesterov ? g + mu * m : m;
        }
        put_param(o, i, p - lr * g, n);
    }
}
F32_CHUNK(sgd)

kn_status VEC_FN(vec_sgd)(const void *args)
{
    const kn_sgd_args *a = args;
    optim_ctx c = { .chunk = sgd_chunk,
                    .momentum = (float)a->momentum,
                    .fresh = (float)(1 - a->dampening),
                    .first = a->s.pieces > 0 && *a->s.step == 1,
                    .nesterov = a->nesterov };
    return run(&c, &a->s, 20);
}

/* c averages g and the m before, m does so by b2;  p -= lr (sign(c) + wd p); sign(0) and sign(NaN)
 * are c */
VEC_INLINE void lion_chunk_of(const kn_opt_piece *o, int64_t begin, int64_t end, const optim_ctx *x,
                              kn_dtype t)
{
    const float *param = o->param;
    float *average = o->m;
    const vf lr = v_set1(x->lr * (float)o->lr_mul), wd = v_set1((float)o->weight_decay),
             one = v_set1(1);
    for (int64_t i = begin; i < end; i += KN_VW) {
        const int64_t n = end - i;
        const vf p = v_get_n(KN_F32, param, i, n), m = v_get_n(KN_F32, average, i, n);
        const vf g = get_grad(x, o, i, n, t), c = mean_of(x->b1, m, g);
        const vf sign = v_sel(v_gt(v_abs(c), v_zero()), v_copysign(one, c), c);
        v_put_n(KN_F32, average, i, mean_of(x->b2, m, g), n);
        put_param(o, i, p - lr * (sign + wd * p), n);
    }
}
F32_CHUNK(lion)

kn_status VEC_FN(vec_lion)(const void *args)
{
    const kn_lion_args *a = args;
    optim_ctx c = { .chunk = lion_chunk,
                    .b1 = kn_average_of(a->beta1),
                    .b2 = kn_average_of(a->beta2) };
    return run(&c, &a->s, 20);
}
