/* kernels/cpu/vec/attention.h (private): shared by forward and backward of attention. Both walk
 * tiles of QB queries by a block of keys (Dao and others, arXiv:2205.14135); the products inside a
 * tile are gemm_rows', on copies of the operands in f32 with rows of `width` floats, padded by
 * zeros; of bf16, where the CPU multiplies pairs, on pairs of terms (gemm.h), so that weights and
 * the gradients of scores are rounded to bf16, as in PyTorch, but scores and sums are not. */
#ifndef KNAP_KERNELS_CPU_VEC_ATTENTION_H
#define KNAP_KERNELS_CPU_VEC_ATTENTION_H

#include "kernels/cpu/cpu_internal.h"
#include "kernels/cpu/vec/gemm.h"
#include "kernels/cpu/vec/math.h"
#include "kernels/philox.h"
#include <math.h>

enum {
    QB = 48,  /* a multiple of every GEMM_MR */
    KB = 256, /* the most, in forward; a multiple of every GEMM_NR */
};

/* q[B, H, T, D], k and v[B, G, S, D]; head h uses group h / heads. */
typedef struct attn {
    int64_t B, H, G, T, S, D, heads;
    int64_t width;         /* D rounded up to GEMM_NR */
    int64_t block;         /* keys of a block, a multiple of GEMM_NR */
    int64_t queries, keys; /* T and S rounded up to QB and GEMM_NR */
    float scale, kept;     /* kept: the factor of values that survive dropout */
    bool pairs; /* a float of a product's operands holds two terms (gemm.h): then scores are scaled,
                   so that q isn't rounded again, else queries as they are loaded */
    bool causal, dropout;
    int64_t window;       /* 0: none */
    const kn_array *mask; /* [B, H, T, S], or NULL */
    uint32_t threshold;
    uint64_t seed, stream;
} attn;

/* What the arguments of both ways, x, say beside their arrays. */
#define ATTN_OF(x)                                                                                 \
    ((attn){ .scale = (float)(x)->scale,                                                           \
             .causal = (x)->causal,                                                                \
             .window = (x)->window,                                                                \
             .mask = (x)->mask.data ? &(x)->mask : NULL,                                           \
             .dropout = (x)->dropout_p > 0,                                                        \
             .threshold = kn_dropout_threshold((x)->dropout_p),                                    \
             .kept = (float)kn_dropout_scale((x)->dropout_p),                                      \
             .seed = kn_seed_of((x)->seed, (x)->seed_at),                                          \
             .stream = (x)->stream })

/* The floats of n terms of a product. */
static inline int64_t attn_floats(const attn *a, int64_t n)
{
    return a->pairs ? ceil_div(n, 2) : n;
}

/* gemm_some_rows of so many terms, b with rows of bk floats. */
static __attribute__((noinline)) void attn_tile(const attn *a, int64_t rows, int64_t terms,
                                                const float *left, int64_t li, int64_t lk,
                                                const float *b, int64_t bk, float *c, int64_t ldc,
                                                bool add)
{
    const int64_t kc = attn_floats(a, terms);
    if (a->pairs)
        gemm_some_rows(rows, kc, left, li, lk, b, bk, c, ldc, add, NULL, true, NULL);
    else
        gemm_some_rows(rows, kc, left, li, lk, b, bk, c, ldc, add, NULL, false, NULL);
}

/* x has dtype t and is dense in the last dim, or isn't there. */
static inline bool attn_takes(const kn_array *x, kn_dtype t)
{
    return !x->data || (x->dtype == t && x->stride[3] == 1);
}

/* Fills in the sizes; false for cases that this provider leaves to the reference. */
static inline bool attn_make(attn *a, const kn_array *q, const kn_array *k, const kn_array *v,
                             const kn_array *o, const kn_array *lse)
{
    const kn_dtype t = q->dtype;
    if (!vec_float(t) || !attn_takes(q, t) || !attn_takes(k, t) || !attn_takes(v, t) ||
        !attn_takes(o, t) || lse->dtype != KN_F32 || !kn_array_contiguous(lse) ||
        kn_array_numel(q) == 0 || kn_array_numel(k) == 0)
        return false;
    a->B = q->shape[0], a->H = q->shape[1], a->T = q->shape[2], a->D = q->shape[3];
    a->G = k->shape[1], a->S = k->shape[2];
    a->heads = a->H / a->G;
    a->width = round_up(a->D, GEMM_NR);
    a->queries = round_up(a->T, QB);
    a->keys = round_up(a->S, GEMM_NR);
    a->pairs = t == KN_BF16 && kn_cpu_multiplies_pairs();
    return true;
}

/* Cuts the keys into as few blocks of at most `most` as can be, of nearly one size. */
static inline void attn_cut(attn *a, int64_t most)
{
    const int64_t blocks = (a->S + most - 1) / most;
    a->block = round_up((a->S + blocks - 1) / blocks, GEMM_NR);
}

/* How many of n keys from s on query t sees. Queries past the end see none. */
static inline int64_t attn_visible(const attn *a, int64_t t, int64_t s, int64_t n)
{
    if (t >= a->T)
        return 0;
    const int64_t end = a->causal ? t + a->S - a->T + 1 : a->S;
    return v_max_i64(0, v_min_i64(n, end - s));
}

/* The same for the panel of GEMM_MR queries from t on: the most that one of them sees. */
static inline int64_t attn_panel_visible(const attn *a, int64_t t, int64_t s, int64_t n)
{
    return attn_visible(a, v_min_i64(t + GEMM_MR, a->T) - 1, s, n);
}

/* How many of n keys from s on lie before the window of query t. */
static inline int64_t attn_hidden(const attn *a, int64_t t, int64_t s, int64_t n)
{
    const int64_t begin = a->window > 0 ? t + a->S - a->T + 1 - a->window : 0;
    return v_max_i64(0, v_min_i64(n, begin - s));
}

static inline void *attn_row(const kn_array *x, int64_t b, int64_t h, int64_t t)
{
    return gemm_at(x->data, x->dtype, b * x->stride[0] + h * x->stride[1] + t * x->stride[2]);
}

VEC_INLINE void attn_load_as(float *dst, const void *src, float scale, int64_t D, int64_t width,
                             kn_dtype t)
{
    for (int64_t d = 0; d < width; d += KN_VW)
        v_store(dst + d, d < D ? v_get_n(t, src, d, D - d) * v_set1(scale) : v_zero());
}

VEC_INLINE void attn_load_pairs(float *dst, const uint16_t *src, int64_t D, int64_t width)
{
    enum { STEP = 2 * KN_VW };
    int64_t d = 0;
    vu both;
    for (; d + STEP <= D; d += STEP) {
        memcpy(&both, src + d, sizeof both);
        v_store(dst + d / 2, (vf)(both << 16 | both >> 16));
    }
    if (d < width) {
        uint16_t rest[STEP] = { 0 };
        memcpy(rest, src + d, (size_t)(D - d) * sizeof *rest);
        memcpy(&both, rest, sizeof both);
        v_store(dst + d / 2, (vf)(both << 16 | both >> 16));
    }
}

/* dst[rows, width] = scale * x[b, h, t .. t + n), in pairs without the scale, rows past n zero: as
 * left operand, whose terms are the rows' elements. */
static inline void attn_load(const attn *a, float *dst, int64_t rows, const kn_array *x, int64_t b,
                             int64_t h, int64_t t, int64_t n, float scale)
{
    const int64_t W = attn_floats(a, a->width);
    for (int64_t i = 0; i < n; i++)
        if (a->pairs)
            attn_load_pairs(dst + i * W, attn_row(x, b, h, t + i), a->D, a->width);
        else
            VEC_BY_DTYPE(x->dtype, attn_load_as, dst + i * W, attn_row(x, b, h, t + i), scale, a->D,
                         W);
    memset(dst + n * W, 0, (size_t)((rows - n) * W) * sizeof *dst);
}

/* dst[n, width] = x[b, h, 0 .. n) as right operand, whose terms are the rows. */
static inline void attn_load_right(const attn *a, float *dst, const kn_array *x, int64_t b,
                                   int64_t h, int64_t n)
{
    if (a->pairs)
        gemm_pack_pairs(dst, attn_row(x, b, h, 0), 1, x->stride[2], a->D, n, (int)a->width,
                        KN_BF16);
    else
        attn_load(a, dst, n, x, b, h, 0, n, 1.0f);
}

VEC_INLINE void attn_store_as(void *dst, const float *src, float scale, int64_t D, kn_dtype t)
{
    for (int64_t d = 0; d < D; d += KN_VW)
        v_put_n(t, dst, d, v_load(src + d) * v_set1(scale), D - d);
}

/* x[b, h, t] = scale * src[D] */
static inline void attn_store(const attn *a, const kn_array *x, int64_t b, int64_t h, int64_t t,
                              const float *src, float scale)
{
    VEC_BY_DTYPE(x->dtype, attn_store_as, attn_row(x, b, h, t), src, scale, a->D);
}

VEC_INLINE void attn_bias_as(float *m, const void *x, int64_t stride, int64_t n, kn_dtype t)
{
    if (stride == 1)
        for (int64_t j = 0; j < n; j += KN_VW)
            v_store(m + j, v_get_n(t, x, j, n - j));
    else
        for (int64_t j = 0; j < n; j++)
            m[j] = v_get_n(t, gemm_at(x, t, j * stride), 0, 1)[0];
}

/* Scales the n scores p of row (b, h, t) and keys from s on, if q wasn't, and adds the mask; hides
 * those before its window. */
static inline void attn_scores(const attn *a, float *p, int64_t b, int64_t h, int64_t t, int64_t s,
                               int64_t n)
{
    const int64_t hidden = attn_hidden(a, t, s, n);
    const kn_array *x = a->mask;
    for (int64_t j = 0; a->pairs && j < n; j += KN_VW)
        v_store(p + j, v_load(p + j) * v_set1(a->scale));
    for (int64_t j = 0; j < hidden; j++)
        p[j] = -INFINITY;
    if (!x)
        return;
    const int64_t step = x->stride[3];
    const int64_t at = b * x->stride[0] + h * x->stride[1] + t * x->stride[2] + s * step;
    if (x->dtype == KN_BOOL) {
        const uint8_t *seen = (const uint8_t *)x->data + at;
        for (int64_t j = hidden; j < n; j++)
            p[j] = seen[j * step] ? p[j] : -INFINITY;
        return;
    }
    float m[KB];
    VEC_BY_DTYPE(x->dtype, attn_bias_as, m, gemm_at(x->data, x->dtype, at), step, n);
    for (int64_t j = hidden; j < n; j++)
        p[j] += m[j];
}

/* e^x as a weight of a key, at most about 1: 0 where it would be subnormal, which changes no sum
 * and makes products a hundred times as slow. */
VEC_INLINE vf attn_exp(vf x)
{
    const vf low = v_set1(-87.0f), high = v_set1(89.0f);
    return v_sel(v_lt(x, low), v_zero(), v_exp_normal(v_min(high, x)));
}

/* The floats of a head's keys as right operand of q k^T. */
static inline int64_t attn_panels_floats(const attn *a)
{
    return a->keys * attn_floats(a, a->D);
}

/* dst[D, GEMM_NR] = the transpose of n rows of bf16 or f16 from src on. */
VEC_INLINE void attn_panel_as(float *dst, const kn_array *x, const char *src, int64_t n, int64_t D,
                              kn_dtype t)
{
    enum { STEP = 64 };
    float wide[GEMM_NR * STEP];
    for (int64_t d = 0; d < D; d += STEP) {
        const int64_t w = v_min_i64(STEP, D - d);
        for (int64_t i = 0; i < n; i++)
            vec_cast(wide + i * STEP, KN_F32, gemm_at(src, t, i * x->stride[2] + d), w, t);
        gemm_pack_right(dst + d * GEMM_NR, wide, KN_F32, STEP, 1, n, w);
    }
}

/* dst = the panels of x[b, g]^T: panel j holds [D, GEMM_NR] of keys j GEMM_NR and on. bf16 and f16
 * are widened before they are turned, if not in pairs. */
static inline void attn_panels(const attn *a, float *dst, const kn_array *x, int64_t b, int64_t g)
{
    for (int64_t s = 0; s < a->S; s += GEMM_NR) {
        const int64_t n = v_min_i64(GEMM_NR, a->S - s), D = a->D;
        const void *src = attn_row(x, b, g, s);
        float *to = dst + s * attn_floats(a, D);
        if (a->pairs)
            gemm_pack_pairs(to, src, x->stride[2], 1, n, D, GEMM_NR, KN_BF16);
        else if (x->dtype == KN_F32)
            gemm_pack_right(to, src, KN_F32, x->stride[2], 1, n, D);
        else
            VEC_BY_DTYPE(x->dtype, attn_panel_as, to, x, src, n, D);
    }
}

/* Factors of dropout that are drawn: of elements [begin, end) of the call, row (b H + h) T + t and
 * key s being element row S + s; zeros at first. */
enum { DRAWN = 64 }; /* vec_words makes so many at a time, or a divisor */
typedef struct attn_drawn {
    int64_t begin, end;
    float f[KB + DRAWN];
} attn_drawn;

/* The factors, 0 or kept, of n <= KB keys from s on; those that fill a vector follow. Short rows
 * are drawn several at a time. */
static inline const float *attn_factors(const attn *a, attn_drawn *d, int64_t row, int64_t s,
                                        int64_t n)
{
    const vf threshold = v_set1((float)a->threshold), kept = v_set1(a->kept);
    const int64_t begin = row * a->S + s, end = begin + round_up(n, KN_VW);
    if (begin >= d->begin && end <= d->end)
        return d->f + (begin - d->begin);
    uint32_t word[KB + DRAWN];
    d->begin = begin / DRAWN * DRAWN;
    d->end = round_up(end, DRAWN);
    vec_words(a->seed, a->stream, (uint64_t)d->begin, d->end - d->begin, word);
    for (int64_t j = 0; j < d->end - d->begin; j += KN_VW) {
        vi w;
        memcpy(&w, word + j, sizeof w);
        const vf drawn = v_to_float((vi)((vu)w >> 8)); /* exact, as the threshold is */
        v_store(d->f + j, v_sel(v_ge(drawn, threshold), kept, v_zero()));
    }
    return d->f + (begin - d->begin);
}

#endif
