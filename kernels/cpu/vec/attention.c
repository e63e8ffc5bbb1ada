/* kernels/cpu/vec/attention.c: forward of scaled-dot-product attention with memory linear in T; few
 * queries have a way of their own.
 *
 * A block of queries meets one block of keys after the other and keeps, for each row, the maximum m
 * of its scores z so far, l = sum_s exp(z_s - m) and o = sum_s exp(z_s - m) v_s, rescaled when m
 * grows (online softmax: Milakov and Gimelshein, arXiv:1805.02867). At the end o / l, lse = m + log
 * l. Blocks of queries are independent of each other: threads take them in any order. */
#include "kernels/cpu/vec/attention.h"
#include "kernels/cpu/vec/gemm_few.h"

#include <math.h>
#include <stdatomic.h>

#define CHUNK      ((int64_t)1 << 20) /* floats of packed keys and values at a time */
#define KEY_FLOATS (1 << 15) /* of a block of keys: with its values, half of 512 KB of L2 */

/* The packed keys and values of some groups (b, g), and each thread's tiles. */
typedef struct forward {
    attn a;
    const kn_attention_args *x;
    int64_t first, groups;  /* (b, g) as b G + g */
    float *panels, *values; /* values: of a group [width / GEMM_NR, S or S / 2 pairs, GEMM_NR] */
    bool copies;            /* values are in `values`; else they are read where they lie */
} forward;

/* One thread's block of queries. */
typedef struct block {
    int64_t b, h, t; /* first query */
    float *q;        /* [QB, width] */
    float *p;        /* [GEMM_MR, KB]: a panel's scores, then probabilities */
    float *o;        /* [QB, width] */
    float m[QB], l[QB];
    bool met[QB / GEMM_MR]; /* a panel of queries has met keys: o has values */
    attn_drawn *drawn;
} block;

static int64_t block_floats(const attn *a)
{
    return 2 * QB * a->width + GEMM_MR * KB;
}

static void forward_pack(const forward *f, int64_t i)
{
    const attn *a = &f->a;
    const int64_t b = (f->first + i) / a->G, g = (f->first + i) % a->G;
    const kn_array *v = &f->x->v;
    const void *from = attn_row(v, b, g, 0);
    const int64_t floats = attn_floats(a, a->S);
    attn_panels(a, f->panels + i * attn_panels_floats(a), &f->x->k, b, g);
    for (int64_t d = 0; f->copies && d < a->D; d += GEMM_NR) {
        const void *src = gemm_at(from, v->dtype, d);
        const int64_t n = v_min_i64(GEMM_NR, a->D - d);
        float *to = f->values + i * floats * a->width + d * floats;
        if (a->pairs)
            gemm_pack_pairs(to, src, 1, v->stride[2], n, a->S, GEMM_NR, KN_BF16);
        else
            gemm_pack_right(to, src, v->dtype, 1, v->stride[2], n, a->S);
    }
}

static void block_begin(const forward *f, block *c)
{
    const attn *a = &f->a;
    const int64_t n = v_min_i64(QB, a->T - c->t), rows = round_up(n, GEMM_MR);
    attn_load(a, c->q, rows, &f->x->q, c->b, c->h, c->t, n, a->scale);
    for (int64_t i = 0; i < rows; i++) {
        c->m[i] = -INFINITY;
        c->l[i] = 0;
    }
}

/* Whether all n scores are hidden: v_max passes over NaN. */
static bool all_hidden(const float *p, int64_t n)
{
    int64_t j = 0;
    while (j < n && p[j] == -INFINITY)
        j++;
    return j == n;
}

/* The maximum of row r of a panel of queries, from `top` of its `end` scores and of keys before,
 * whose sums o and l shrink where it is new; 0 of a row that has seen no key: its scores are -inf,
 * their exponentials 0. */
static float row_max(const attn *a, block *c, int64_t i, int64_t r, vf top, bool sees, int64_t end)
{
    const float m = v_hmax(top), before = c->m[i + r];
    float *o = c->o + (i + r) * a->width;
    if (m == -INFINITY && (!sees || ((a->mask || a->window) && all_hidden(c->p + r * KB, end))))
        return 0;
    c->m[i + r] = m;
    if (m != before && before > -INFINITY) {
        const vf shrink = v_exp(v_set1(before - m));
        c->l[i + r] *= shrink[0];
        for (int64_t d = 0; d < a->width; d += KN_VW)
            v_store(o + d, v_load(o + d) * shrink);
    }
    return m;
}

/* The scores, in p, of the panel of queries from row i on become probabilities relative to the new
 * maxima. Its rows see some of the `seen` keys from s on. */
static void block_rows(const attn *a, block *c, int64_t i, int64_t s, int64_t seen)
{
    const int64_t end = round_up(seen, KN_VW);
    vf top[GEMM_MR], sum[GEMM_MR];
    int64_t visible[GEMM_MR];
    float m[GEMM_MR];
    for (int r = 0; r < GEMM_MR; r++) {
        visible[r] = attn_visible(a, c->t + i + r, s, seen);
        if (visible[r] > 0)
            attn_scores(a, c->p + r * KB, c->b, c->h, c->t + i + r, s, visible[r]);
        for (int64_t j = visible[r]; j < end; j++)
            c->p[r * KB + j] = -INFINITY; /* whose exponential is 0 */
        top[r] = v_set1(c->m[i + r]), sum[r] = v_zero();
    }
    for (int64_t j = 0; j < end; j += KN_VW)
        for (int r = 0; r < GEMM_MR; r++)
            top[r] = v_max(v_load(c->p + r * KB + j), top[r]);
    for (int r = 0; r < GEMM_MR; r++)
        m[r] = row_max(a, c, i, r, top[r], visible[r] > 0, end);
    for (int64_t j = 0; j < end; j += KN_VW)
        for (int r = 0; r < GEMM_MR; r++) {
            const vf e = attn_exp(v_load(c->p + r * KB + j) - v_set1(m[r]));
            v_store(c->p + r * KB + j, e);
            sum[r] = sum[r] + e;
        }
    for (int r = 0; r < GEMM_MR; r++) {
        c->l[i + r] += v_hsum(sum[r]);
        if (a->dropout && visible[r] > 0) {
            const int64_t row = (c->b * a->H + c->h) * a->T + c->t + i + r;
            const float *factor = attn_factors(a, c->drawn, row, s, visible[r]);
            float *p = c->p + r * KB;
            for (int64_t j = 0; j < visible[r]; j += KN_VW)
                v_store(p + j, v_load(p + j) * v_load(factor + j));
        }
        for (int64_t j = 0; a->pairs && j < seen; j += 2 * KN_VW)
            v_store(c->p + r * KB + j / 2, v_pairs_along(c->p + r * KB + j));
    }
}

/* Meets the n <= KB keys from s on. */
static void block_meet(const forward *f, block *c, int64_t s, int64_t n, const float *panels,
                       const float *v, int64_t vs)
{
    const attn *a = &f->a;
    const int64_t W = attn_floats(a, a->width);
    for (int64_t i = 0; i < QB && c->t + i < a->T; i += GEMM_MR) {
        const int64_t begin = s + attn_hidden(a, c->t + i, s, n) / GEMM_NR * GEMM_NR;
        const int64_t seen = attn_panel_visible(a, c->t + i, begin, s + n - begin);
        const int64_t rows = a->T - c->t - i;
        bool *met = c->met + i / GEMM_MR;
        for (int64_t j = 0; j < seen; j += GEMM_NR)
            attn_tile(a, rows, a->D, c->q + i * W, W, 1,
                      panels + (begin + j) * attn_floats(a, a->D), GEMM_NR, c->p + j, KB, false);
        if (seen > 0)
            block_rows(a, c, i, begin, seen);
        for (int64_t d = 0; seen > 0 && d < a->width; d += GEMM_NR)
            attn_tile(a, rows, seen, c->p, KB, 1,
                      v + d * (f->copies ? attn_floats(a, a->S) : 1) + attn_floats(a, begin) * vs,
                      vs, c->o + i * a->width + d, a->width, *met);
        *met |= seen > 0;
    }
}

static void block_end(const forward *f, block *c)
{
    const attn *a = &f->a;
    float *lse = (float *)f->x->lse.data + (c->b * a->H + c->h) * a->T + c->t;
    for (int64_t i = 0; i < QB && c->t + i < a->T; i++) {
        const bool blind = c->m[i] == -INFINITY && c->l[i] == 0;
        float *o = c->o + i * a->width;
        if (blind)
            memset(o, 0, (size_t)a->width * sizeof *o);
        attn_store(a, &f->x->o, c->b, c->h, c->t + i, o, blind ? 0.0f : 1.0f / c->l[i]);
        lse[i] = blind ? -INFINITY : c->m[i] + logf(c->l[i]);
    }
}

/* Item i of the chunk: blocks with most keys come first, so that threads end together. */
static void forward_item(const forward *f, int64_t item, float *room, attn_drawn *drawn)
{
    const attn *a = &f->a;
    const int64_t each = f->groups * a->heads, i = item % each / a->heads;
    const int64_t group = f->first + i, g = group % a->G;
    block c = { .b = group / a->G, .h = g * a->heads + item % a->heads, .drawn = drawn };
    c.t = a->queries - QB * (1 + item / each);
    c.q = room;
    c.p = c.q + QB * a->width;
    c.o = c.p + GEMM_MR * KB;
    const float *panels = f->panels + i * attn_panels_floats(a);
    const kn_array *v = &f->x->v;
    const float *values =
        f->copies ? f->values + i * attn_floats(a, a->S) * a->width : attn_row(v, c.b, g, 0);
    block_begin(f, &c);
    const int64_t first = attn_hidden(a, c.t, 0, a->S) / a->block * a->block;
    const int64_t end = attn_visible(a, v_min_i64(c.t + QB, a->T) - 1, 0, a->S);
    for (int64_t s = first; s < end; s += a->block)
        block_meet(f, &c, s, v_min_i64(a->block, a->S - s), panels, values,
                   f->copies ? GEMM_NR : v->stride[2]);
    block_end(f, &c);
}

typedef struct forward_call {
    const forward *f;
    float *rooms;          /* one a part */
    _Atomic int64_t *next; /* the item to take */
    int64_t items;
} forward_call;

static void pack_groups(const void *ctx, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i++)
        forward_pack(ctx, i);
}

static void forward_items(const void *ctx, int64_t part)
{
    const forward_call *c = ctx;
    float *room = c->rooms + part * block_floats(&c->f->a);
    attn_drawn drawn = { 0 };
    for (int64_t i; (i = atomic_fetch_add_explicit(c->next, 1, memory_order_relaxed)) < c->items;)
        forward_item(c->f, i, room, &drawn);
}

static void forward_chunk(const forward *f, int threads, float *rooms)
{
    const int64_t items = f->groups * f->a.heads * (f->a.queries / QB);
    _Atomic int64_t next = 0;
    kn_each_range(threads, f->groups, pack_groups, f);
    kn_each_part(threads, forward_items, &(forward_call){ f, rooms, &next, items });
}

/* ---- few queries ----------------------------------------------------------------------------- */

/* A token at a time, to a cache, reading keys and values is the work. They are read where they lie,
 * and not in tiles: dot products of a query with the keys, then the sum of the values by weights.
 * Keys come in chunks of a fixed number, which threads take in any order; maxima and sums of the
 * chunks are joined in their order. */
enum { FEW_KEYS = 384 }; /* of a chunk */

typedef struct attn_few {
    const attn *a;
    const kn_attention_args *x;
    int64_t chunks, queries; /* queries: of a group's heads, as head T + t */
    float *parts;            /* [B, G, chunks, queries, width + KN_VW]: o, then m and l */
} attn_few;

/* T may be few, for heads whose values fit a pass of few_along_rows, and nothing is dropped. */
static bool attn_few_takes(const attn *a)
{
    return a->T <= FEW && a->D <= FEW_COLUMNS && !a->dropout;
}

static int64_t attn_few_floats(const attn *a)
{
    return a->B * a->H * a->T * ceil_div(a->S, FEW_KEYS) * (a->width + KN_VW);
}

VEC_INLINE void attn_few_dots(float *p, const float *q, int64_t D, const kn_array *k, int64_t b,
                              int64_t g, int64_t s, int64_t n, kn_dtype t)
{
    for (int64_t j = 0; j < n; j++)
        p[j] = few_dot(q, attn_row(k, b, g, s + j), D, t);
}

/* o[width], m and l of one query over the n visible keys from s on. */
static void attn_few_query(const attn_few *f, float *part, int64_t b, int64_t g, int64_t h,
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
    for (int64_t j = 0; j < n; j += KB)
        attn_scores(a, p + j, b, h, t, s + j, v_min_i64(KB, n - j));
    for (int64_t j = n; j < round_up(n, KN_VW); j++)
        p[j] = -INFINITY; /* whose exponential is 0 */
    vf top = v_set1(-INFINITY), sum = v_zero();
    for (int64_t j = 0; j < n; j += KN_VW)
        top = v_max(v_load(p + j), top);
    *m = v_hmax(top);
    if (*m == -INFINITY && all_hidden(p, n))
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
static void attn_few_items(const void *ctx, int64_t begin, int64_t end)
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
static void attn_few_join(const attn_few *f, int64_t group, int64_t j)
{
    const attn *a = f->a;
    const int64_t b = group / a->G, h = group % a->G * a->heads + j / a->T, t = j % a->T;
    const int64_t step = f->queries * (a->width + KN_VW);
    float *o = f->parts + group * f->chunks * step + j * (a->width + KN_VW);
    float m = -INFINITY, l = 0;
    bool blind = true;
    for (int64_t c = 0; c < f->chunks; c++) {
        m = fmaxf(m, o[c * step + a->width]);
        blind = blind && o[c * step + a->width + 1] == 0;
    }
    for (int64_t c = 0; c < f->chunks && !blind; c++) {
        const float *part = o + c * step;
        const float w = v_exp(v_set1(part[a->width] - m))[0];
        l += part[a->width + 1] * w;
        for (int64_t d = 0; d < a->width; d += KN_VW) {
            const vf x = v_load(part + d) * v_set1(w);
            v_store(o + d, c ? v_load(o + d) + x : x);
        }
    }
    attn_store(a, &f->x->o, b, h, t, o, blind ? 0.0f : 1.0f / l);
    ((float *)f->x->lse.data)[(b * a->H + h) * a->T + t] = blind ? m : m + logf(l);
}

static kn_status attn_few_run(const attn *a, const kn_attention_args *x)
{
    attn_few f = { a, x, ceil_div(a->S, FEW_KEYS), .queries = a->heads * a->T };
    const size_t bytes = (size_t)attn_few_floats(a) * sizeof(float);
    if (!(f.parts = vec_scratch(bytes)))
        return KN_FAILED;
    const int64_t each = v_min_i64(a->S * a->D, 1 << 20);
    kn_each_range(kn_threads_for(8 * a->B * a->G * each), a->B * a->G * f.chunks, attn_few_items,
                  &f);
    for (int64_t group = 0; group < a->B * a->G; group++)
        for (int64_t j = 0; j < f.queries; j++)
            attn_few_join(&f, group, j);
    vec_scratch_end(f.parts, bytes);
    return KN_DONE;
}

/* ---- the entry ------------------------------------------------------------------------------- */

kn_status VEC_FN(vec_attention)(const void *args)
{
    const kn_attention_args *x = args;
    forward f = { .a = ATTN_OF(x), .x = x };
    attn *a = &f.a;
    if (!attn_make(a, &x->q, &x->k, &x->v, &x->o, &x->lse))
        return KN_DECLINED;
    if (attn_few_takes(a)) {
        a->pairs = false;
        return attn_few_run(a, x);
    }
    attn_cut(a, v_max_i64(QB, v_min_i64(KB, KEY_FLOATS / a->width)) / GEMM_NR * GEMM_NR);
    f.copies = x->v.dtype != KN_F32 || a->D != a->width || a->heads * a->T > 2 * QB;
    const int64_t keys = attn_panels_floats(a),
                  values = f.copies ? attn_floats(a, a->S) * a->width : 0;
    const int64_t all = a->B * a->G;
    const int64_t groups = v_min_i64(all, v_max_i64(1, CHUNK / (keys + values)));
    const int threads = kn_threads_for(a->B * a->H * a->T * v_min_i64(a->S * a->D, 1 << 20) / 8);
    const int64_t floats = groups * (keys + values) + threads * block_floats(a);
    const size_t bytes = (size_t)floats * sizeof(float);
    f.panels = vec_scratch(bytes);
    if (!f.panels)
        return KN_FAILED;
    f.values = f.panels + groups * keys;
    for (; f.first < all; f.first += groups) {
        f.groups = v_min_i64(groups, all - f.first);
        forward_chunk(&f, threads, f.panels + groups * (keys + values));
    }
    vec_scratch_end(f.panels, bytes);
    return KN_DONE;
}
