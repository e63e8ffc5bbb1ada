/* kernels/cpu/vec/attention_few.h (private): attention of few queries to many keys (a token at a
 * time, to a cache): reading keys and values is the work. They are read where they lie, once for
 * all heads of their group and not in tiles: dot products of a query with the keys, then the sum of
 * the values by weights. Keys come in chunks of a fixed number, which threads take in any order;
 * maxima and sums of the chunks are joined in their order, as in attention.c. */
#ifndef KNAP_KERNELS_CPU_VEC_ATTENTION_FEW_H
#define KNAP_KERNELS_CPU_VEC_ATTENTION_FEW_H

#include "kernels/cpu/vec/attention.h"
#include "kernels/cpu/vec/gemm_few.h"

enum { FEW_KEYS = 4 * SB }; /* of a chunk */

typedef struct attn_few {
    const attn *a;
    const kn_attention_args *x;
    int64_t chunks, queries; /* queries: of a group's heads, as head T + t */
    float *parts;            /* [B, G, chunks, queries, width + KN_VW]: o, then m and l */
} attn_few;

/* T may be few, for heads whose values fit a pass of few_along_rows, and nothing is dropped. */
static inline bool attn_few_takes(const attn *a)
{
    return a->T <= FEW && a->D <= FEW_COLUMNS && !a->dropout;
}

static inline int64_t attn_few_floats(const attn *a)
{
    return a->B * a->H * a->T * ((a->S + FEW_KEYS - 1) / FEW_KEYS) * (a->width + KN_VW);
}

VEC_INLINE void attn_few_dots(float *p, const float *q, int64_t D, const kn_array *k, int64_t b,
                              int64_t g, int64_t s, int64_t n, kn_dtype t)
{
    for (int64_t j = 0; j < n; j++)
        p[j] = few_dot(q, attn_row(k, b, g, s + j), D, t);
}

/* o[width], m and l of one query over the n visible keys from s on. */
static inline void attn_few_query(const attn_few *f, float *part, int64_t b, int64_t g, int64_t h,
                                  int64_t t, int64_t s, int64_t n)
{
    const attn *a = f->a;
    const kn_array *k = &f->x->k, *v = &f->x->v;
    float q[FEW_COLUMNS + GEMM_NR], p[FEW_KEYS + KN_VW], *m = part + a->width, *l = m + 1;
    *m = -INFINITY, *l = 0;
    memset(part, 0, (size_t)a->width * sizeof *part);
    if (n <= 0)
        return;
    attn_load(a, q, 1, &f->x->q, b, h, t, 1, a->scale);
    VEC_BY_DTYPE(k->dtype, attn_few_dots, p, q, a->D, k, b, g, s, n);
    for (int64_t j = 0; j < n; j += SB)
        attn_scores(a, p + j, b, h, t, s + j, v_min_i64(SB, n - j));
    for (int64_t j = n; j < attn_round_up(n, KN_VW); j++)
        p[j] = -INFINITY; /* whose exponential is 0 */
    vf top = v_set1(-INFINITY), sum = v_zero();
    for (int64_t j = 0; j < n; j += KN_VW)
        top = v_max(v_load(p + j), top);
    *m = v_hmax(top);
    if (*m == -INFINITY) /* all are hidden */
        return;
    for (int64_t j = 0; j < n; j += KN_VW) {
        const vf e = attn_exp(v_load(p + j) - v_set1(*m));
        v_store(p + j, e);
        sum = sum + e;
    }
    *l = v_hsum(sum);
    VEC_BY_DTYPE(v->dtype, few_along_rows, part, p, 1, n, attn_row(v, b, g, s), v->stride[2], a->D);
}

/* Items are (b, g, chunk). */
static inline void attn_few_items(const void *ctx, int64_t begin, int64_t end)
{
    const attn_few *f = ctx;
    const attn *a = f->a;
    for (int64_t i = begin; i < end; i++) {
        const int64_t group = i / f->chunks, s = i % f->chunks * FEW_KEYS;
        const int64_t b = group / a->G, g = group % a->G;
        float *part = f->parts + i * f->queries * (a->width + KN_VW);
        for (int64_t j = 0; j < f->queries; j++, part += a->width + KN_VW)
            attn_few_query(f, part, b, g, g * a->heads + j / a->T, j % a->T, s,
                           attn_visible(a, j % a->T, s, v_min_i64(FEW_KEYS, a->S - s)));
    }
}

/* Joins the chunks of query j of a group into its first one, and stores o / l. */
static inline void attn_few_join(const attn_few *f, int64_t group, int64_t j)
{
    const attn *a = f->a;
    const int64_t b = group / a->G, h = group % a->G * a->heads + j / a->T, t = j % a->T;
    const int64_t step = f->queries * (a->width + KN_VW);
    float *o = f->parts + group * f->chunks * step + j * (a->width + KN_VW);
    float m = -INFINITY, l = 0;
    for (int64_t c = 0; c < f->chunks; c++)
        m = fmaxf(m, o[c * step + a->width]);
    for (int64_t c = 0; c < f->chunks && m > -INFINITY; c++) {
        const float *part = o + c * step;
        const float w = v_exp(v_set1(part[a->width] - m))[0];
        l += part[a->width + 1] * w;
        for (int64_t d = 0; d < a->width; d += KN_VW) {
            const vf x = v_load(part + d) * v_set1(w);
            v_store(o + d, c ? v_load(o + d) + x : x);
        }
    }
    attn_store(a, &f->x->o, b, h, t, o, m > -INFINITY ? 1.0f / l : 0.0f);
    ((float *)f->x->lse.data)[(b * a->H + h) * a->T + t] = m > -INFINITY ? m + logf(l) : m;
}

static inline kn_status attn_few_run(const attn *a, const kn_attention_args *x)
{
    attn_few f = { .a = a, .x = x, .chunks = (a->S + FEW_KEYS - 1) / FEW_KEYS };
    f.queries = a->heads * a->T;
    const size_t bytes = (size_t)attn_few_floats(a) * sizeof(float);
    if (!(f.parts = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_WORKSPACE)))
        return KN_FAILED;
    const int64_t each = v_min_i64(a->S * a->D, 1 << 20);
    kn_each_range(kn_threads_for(8 * a->B * a->G * each), a->B * a->G * f.chunks, attn_few_items,
                  &f);
    for (int64_t group = 0; group < a->B * a->G; group++)
        for (int64_t j = 0; j < f.queries; j++)
            attn_few_join(&f, group, j);
    kn_give(kn_device_memory(KN_CPU), f.parts, bytes, KN_MEM_WORKSPACE);
    return KN_DONE;
}

#endif
