/* kernels/cpu/vec/attention_grad.c: backward of scaled-dot-product attention. With the factors f of
 * dropout and P = exp(z - lse) computed again tile by tile:
 *
 *   dv_s = sum_t f P_ts dout_t        dP = f (dout v^T)        delta_t = dout_t . o_t
 *   dz = P (dP - delta)               dq = scale dz k          dk = scale dz^T q
 *
 * Where a key has more than half of a row's weight, dP - delta is a small difference of large
 * numbers, whose errors small norms of q and k would magnify: its dz is minus the sum of the
 * others', for a row of dz has the sum 0.
 *
 * Pairs of bf16 (attention.h) round P and dz before they are multiplied; dz stays f32 until then.
 *
 * One thread does a group of heads (b, g) with its keys and values from first to last, so no sum
 * has two writers and its order is that of the shape: heads, blocks of keys, blocks of queries. */
#include "kernels/cpu/vec/attention.h"
#include "kernels/lse.h"

#include <stdatomic.h>

enum {
    SIDE = 8,    /* rows whose delta is computed side by side */
    SB = 128,    /* the most keys of a block; a multiple of every GEMM_NR */
    P = SB + 16, /* floats from row to row of a tile; GEMM_MR behind the keys may be 0, too */
};

/* One thread's work; rows of all but the tiles have `width` floats. */
typedef struct backward {
    const attn *a;
    const kn_attention_grad_args *x;
    int64_t b, h, g;
    float *kt, *vt;              /* panels of k^T and v^T */
    float *k, *dk, *dv;          /* [keys, width] */
    float *q, *dout, *dq;        /* [queries, width] of head h */
    float *q_right, *dout_right; /* as right operands: in pairs copies of their own */
    float *delta, *share;        /* [queries]; share: what weights are multiplied by (row_share) */
    float *rest;                 /* [queries, KN_VW]: sums of a row's dz but the heavy key's */
    float *rounded;              /* the same of dz in pairs, rounded as they are multiplied */
    int64_t *heavy; /* [queries]: the key with more than half of a row's weight, or -1 */
    float *p, *dz;  /* tiles [QB, P] */
    attn_drawn *drawn;
} backward;

static int64_t backward_floats(const attn *a)
{
    return 2 * attn_panels_floats(a) + 3 * (a->keys + GEMM_MR + a->queries) * a->width +
           (2 + 2 * KN_VW + 2) * a->queries + 2 * QB * P;
}

static void backward_place(backward *w, float *room)
{
    const attn *a = w->a;
    w->kt = room;
    w->vt = w->kt + attn_panels_floats(a);
    w->k = w->vt + attn_panels_floats(a);
    w->dk = w->k + (a->keys + GEMM_MR) * a->width;
    w->dv = w->dk + (a->keys + GEMM_MR) * a->width;
    w->q = w->dv + (a->keys + GEMM_MR) * a->width;
    w->dout = w->q + a->queries * a->width;
    w->dq = w->dout + a->queries * a->width;
    w->delta = w->dq + a->queries * a->width;
    w->share = w->delta + a->queries;
    w->rest = w->share + a->queries;
    w->rounded = w->rest + KN_VW * a->queries;
    w->heavy = (int64_t *)(w->rounded + KN_VW * a->queries);
    w->q_right = a->pairs ? w->q + a->queries * a->width / 2 : w->q;
    w->dout_right = a->pairs ? w->dout + a->queries * a->width / 2 : w->dout;
    w->p = (float *)(w->heavy + a->queries);
    w->dz = w->p + QB * P;
}

/* delta of all rows from those of o, `step` floats from each other: each one chain of v_fma (or
 * v_fma_pairs) in ascending d, as dP is, so that dP - delta is 0 where all values that a query sees
 * are the same. */
static void head_delta(const backward *w, const float *o, int64_t step)
{
    const attn *a = w->a;
    for (int64_t t = 0; t < a->T; t += SIDE) {
        const float *x[SIDE], *y[SIDE];
        vf sum[SIDE] = { v_zero() };
        for (int i = 0; i < SIDE; i++) {
            const int64_t row = v_min_i64(t + i, a->T - 1); /* the last again at the end */
            x[i] = w->dout + row * attn_floats(a, a->width);
            y[i] = o + row * step;
        }
        for (int64_t d = 0; d < attn_floats(a, a->D); d++)
            for (int i = 0; i < SIDE; i++) {
                const vf dout = v_set1(x[i][d]), out = v_set1(y[i][d]);
                sum[i] = a->pairs ? v_fma_pairs(dout, out, sum[i]) : v_fma(dout, out, sum[i]);
            }
        for (int i = 0; i < SIDE && t + i < a->T; i++)
            w->delta[t + i] = sum[i][0];
    }
}

static void head_begin(backward *w)
{
    const attn *a = w->a;
    const kn_attention_grad_args *x = w->x;
    const int64_t rows = round_up(a->T, GEMM_MR); /* that panels hold */
    attn_load(a, w->q, rows, &x->q, w->b, w->h, 0, a->T, a->scale);
    attn_load(a, w->dout, rows, &x->dout, w->b, w->h, 0, a->T, 1.0f);
    if (x->o.dtype == KN_F32) {
        head_delta(w, attn_row(&x->o, w->b, w->h, 0), x->o.stride[2]);
    } else {
        attn_load(a, w->dq, a->T, &x->o, w->b, w->h, 0, a->T, 1.0f); /* dq's room is still free */
        head_delta(w, w->dq, attn_floats(a, a->width));
    }
    if (a->pairs) {
        attn_load_right(a, w->q_right, &x->q, w->b, w->h, a->T);
        attn_load_right(a, w->dout_right, &x->dout, w->b, w->h, a->T);
    }
    memset(w->dq, 0, (size_t)(rows * a->width) * sizeof *w->dq);
    for (int64_t t = 0; t < a->T; t++) {
        w->heavy[t] = -1;
        v_store(w->rest + t * KN_VW, v_zero());
        v_store(w->rounded + t * KN_VW, v_zero());
    }
}

/* dmask[b, h, t, s ...] = dz[n] */
static void put_dmask(const backward *w, int64_t t, int64_t s, const float *dz, int64_t n)
{
    const kn_array *x = &w->x->dmask;
    void *to = gemm_at(attn_row(x, w->b, w->h, t), x->dtype, s);
    VEC_BY_DTYPE(x->dtype, attn_store_as, to, dz, 1.0f, n);
}

/* Notes the key of row t that has more than half of its weight, if it is one of the n from s on,
 * with weights e; its dz waits for the sum of the others'. */
static void note_heavy(const backward *w, int64_t t, int64_t s, int64_t n, const float *e,
                       float *dz)
{
    for (int64_t j = 0; j < n && w->heavy[t] < 0; j++) {
        if (e[j] > 0.5f) {
            w->heavy[t] = s + j;
            dz[j] = 0;
        }
    }
}

/* From the scores p and dp = dout v^T of row t, which sees some of the `seen` keys from s on: f P
 * and dz, in the same places, with zeros beside them as far as a panel of keys reaches; `before` of
 * these lie before. */
static void row_grads(const backward *w, int64_t t, int64_t s, int64_t seen, int64_t before,
                      float *p, float *dz)
{
    const attn *a = w->a;
    const int64_t row = (w->b * a->H + w->h) * a->T + t;
    const bool blind = ((const float *)w->x->lse.data)[row] == -INFINITY && (a->mask || a->window);
    const int64_t n = blind ? 0 : attn_visible(a, t, s, seen), end = round_up(n, KN_VW);
    const vf lse = v_set1(blind ? 0 : ((const float *)w->x->lse.data)[row]);
    const vf delta = v_set1(w->delta[t]), share = v_set1(w->share[t]);
    const float *factor = NULL;
    float weight[SB], *sum = w->rest + t * KN_VW;
    if (n > 0)
        attn_scores(a, p, w->b, w->h, t, s, n);
    if (n > 0 && a->dropout)
        factor = attn_factors(a, w->drawn, row, s, n);
    for (int64_t j = n; j < end; j++)
        p[j] = -INFINITY; /* whose exponential is 0 */
    vf top = v_zero(), rest = v_zero();
    for (int64_t j = 0; j < end; j += KN_VW) {
        const vf e = attn_exp(v_load(p + j) - lse) * share, dp = v_load(dz + j);
        const vf f = a->dropout ? v_load(factor + j) : v_set1(1.0f);
        v_store(p + j, f * e);
        v_store(dz + j, e * (f * dp - delta));
        if (a->dropout)
            v_store(weight + j, e);
        top = v_max(e, top);
    }
    if (v_any(v_gt(top, v_set1(0.5f))))
        note_heavy(w, t, s, n, a->dropout ? weight : p, dz);
    for (int64_t j = 0; j < end; j += KN_VW)
        rest = rest + v_load(dz + j);
    v_store(sum, v_load(sum) + rest);
    if (w->x->dmask.data && n > 0)
        put_dmask(w, t, s, dz, n);
    for (int64_t j = -before; j < 0; j++)
        p[j] = dz[j] = 0;
    for (int64_t j = end; j < seen + GEMM_MR; j++)
        p[j] = dz[j] = 0;
}

/* 1, or of a row whose lse is coarse one over the sum of its weights, from the scores that
 * tile_pair makes of it. */
static float row_share(const backward *w, int64_t t)
{
    const attn *a = w->a;
    const float lse = ((const float *)w->x->lse.data)[(w->b * a->H + w->h) * a->T + t];
    const int64_t i = t / GEMM_MR * GEMM_MR; /* its panel of queries */
    const int64_t W = attn_floats(a, a->width);
    float *p = w->p + (t - i) * P, sum = 0;
    if (!kn_lse_is_coarse(lse))
        return 1;
    for (int64_t s = 0; s < a->S; s += a->block) {
        const int64_t n = attn_visible(a, t, s, v_min_i64(a->block, a->S - s));
        for (int64_t j = 0; j < n; j += GEMM_NR)
            attn_tile(a, GEMM_MR, a->D, w->q + i * W, W, 1, w->kt + (s + j) * attn_floats(a, a->D),
                      GEMM_NR, w->p + j, P, false);
        if (n > 0)
            attn_scores(a, p, w->b, w->h, t, s, n);
        for (int64_t j = n; j < round_up(n, KN_VW); j++)
            p[j] = -INFINITY;
        for (int64_t j = 0; j < n; j += KN_VW)
            sum += v_hsum(attn_exp(v_load(p + j) - v_set1(lse)));
    }
    return 1 / sum;
}

/* Makes pairs of the panel of queries from t on, whose keys [begin, seen) of a block are computed:
 * in `along` pairs of dz's keys, [GEMM_MR, SB / 2]; in p and dz of queries, those of rows r and
 * r + 1 in the place of r. */
static void panel_pairs(const backward *w, int64_t t, int64_t begin, int64_t seen, float *p,
                        float *dz, float *along)
{
    const vf ones = v_pairs(v_set1(1.0f), v_set1(1.0f));
    const int64_t rows = v_min_i64(GEMM_MR, w->a->T - t);
    const int64_t first = v_max_i64(0, begin - round_up(GEMM_MR, KN_VW)), end = seen + GEMM_MR;
    for (int64_t r = 0; r < rows; r++) {
        float *sum = w->rounded + (t + r) * KN_VW;
        vf rest = v_load(sum);
        for (int64_t j = begin; j < seen; j += 2 * KN_VW) {
            for (int64_t k = v_max_i64(j, end); k < j + 2 * KN_VW; k++)
                dz[r * P + k] = 0;
            const vf x = v_pairs_along(dz + r * P + j);
            v_store(along + r * SB / 2 + j / 2, x);
            rest = v_fma_pairs(x, ones, rest);
        }
        v_store(sum, rest);
    }
    for (int64_t r = 0; r < rows; r += 2)
        for (int64_t j = first; j < end; j += KN_VW) {
            float *x = p + r * P + j, *y = dz + r * P + j;
            const bool last = r + 1 == rows;
            v_store(x, v_pairs(v_load(x), last ? v_zero() : v_load(x + P)));
            v_store(y, v_pairs(v_load(y), last ? v_zero() : v_load(y + P)));
        }
}

/* Keys [s, s + n) against queries [t, t + QB). */
static void tile_pair(const backward *w, int64_t s, int64_t n, int64_t t)
{
    const attn *a = w->a;
    const int64_t W = a->width, L = attn_floats(a, W), rows = v_min_i64(QB, a->T - t);
    const int64_t step = a->pairs ? 2 : 1;
    float along[GEMM_MR * SB / 2] = { 0 }; /* pairs of keys of a panel's dz */
    for (int64_t i = 0; i < rows; i += GEMM_MR) {
        const int64_t begin = attn_hidden(a, t + i, s, n) / GEMM_NR * GEMM_NR;
        const int64_t seen = attn_panel_visible(a, t + i, s, n);
        const float *q = w->q + (t + i) * L, *dout = w->dout + (t + i) * L;
        float *p = w->p + i * P, *dz = w->dz + i * P;
        if (begin >= seen)
            continue;
        for (int64_t j = begin; j < seen; j += GEMM_NR) {
            const int64_t at = (s + j) * attn_floats(a, a->D);
            attn_tile(a, rows - i, a->D, q, L, 1, w->kt + at, GEMM_NR, p + j, P, false);
            attn_tile(a, rows - i, a->D, dout, L, 1, w->vt + at, GEMM_NR, dz + j, P, false);
        }
        for (int64_t r = 0; r < GEMM_MR && t + i + r < a->T; r++)
            row_grads(w, t + i + r, s + begin, seen - begin, v_min_i64(begin, GEMM_MR),
                      p + r * P + begin, dz + r * P + begin);
        if (a->pairs)
            panel_pairs(w, t + i, begin, seen, p, dz, along);
        for (int64_t d = 0; d < a->width; d += GEMM_NR)
            attn_tile(a, rows - i, seen - begin, a->pairs ? along + begin / 2 : dz + begin,
                      a->pairs ? SB / 2 : P, 1, w->k + attn_floats(a, s + begin) * W + d, W,
                      w->dq + (t + i) * W + d, W, true);
    }
    for (int64_t c = 0; c < n; c += GEMM_MR) {
        /* the queries that see one of the keys [s + c, s + c + GEMM_MR) */
        const int64_t before = a->S - a->T + t, end = s + v_min_i64(n, c + GEMM_MR);
        int64_t first = a->causal ? v_max_i64(0, s + c - before) : 0;
        int64_t last = a->window ? v_min_i64(rows, end - 1 + a->window - before) : rows;
        first = first / step * step;
        for (int64_t d = 0; first < last && d < a->width; d += GEMM_NR) {
            const int64_t at = (t + first) / step * W + d, to = (s + c) * W + d;
            attn_tile(a, n - c, last - first, w->p + first * P + c, 1, step * P, w->dout_right + at,
                      W, w->dv + to, W, true);
            attn_tile(a, n - c, last - first, w->dz + first * P + c, 1, step * P, w->q_right + at,
                      W, w->dk + to, W, true);
        }
    }
}

VEC_INLINE void add_row(float *sum, const void *x, float scale, vf dz, int64_t D, kn_dtype t)
{
    for (int64_t d = 0; d < D; d += KN_VW)
        v_store(sum + d, v_fma(dz, v_get_n(t, x, d, D - d) * v_set1(scale), v_load(sum + d)));
}

/* Adds what the heavy keys of head h give. */
static void head_heavy(const backward *w)
{
    const attn *a = w->a;
    for (int64_t t = 0; t < a->T; t++) {
        const int64_t s = w->heavy[t];
        if (s < 0)
            continue;
        const vf exact = v_set1(-v_hsum(v_load(w->rest + t * KN_VW)));
        const vf dz = a->pairs ? v_set1(-v_hsum(v_load(w->rounded + t * KN_VW))) : exact;
        VEC_BY_DTYPE(w->x->k.dtype, add_row, w->dq + t * a->width,
                     attn_row(&w->x->k, w->b, w->g, s), 1.0f, dz, a->D);
        VEC_BY_DTYPE(w->x->q.dtype, add_row, w->dk + s * a->width,
                     attn_row(&w->x->q, w->b, w->h, t), a->pairs ? 1 : a->scale, dz, a->D);
        if (w->x->dmask.data)
            put_dmask(w, t, s, (const float *)&exact, 1);
    }
}

static void backward_group(backward *w)
{
    const attn *a = w->a;
    const kn_attention_grad_args *x = w->x;
    attn_panels(a, w->kt, &x->k, w->b, w->g);
    attn_panels(a, w->vt, &x->v, w->b, w->g);
    attn_load_right(a, w->k, &x->k, w->b, w->g, a->S);
    const size_t sums = (size_t)((a->keys + GEMM_MR) * a->width) * sizeof *w->dk;
    memset(w->dk, 0, sums);
    memset(w->dv, 0, sums);
    for (w->h = w->g * a->heads; w->h < (w->g + 1) * a->heads; w->h++) {
        head_begin(w);
        for (int64_t t = 0; t < a->T; t++)
            w->share[t] = row_share(w, t);
        for (int64_t s = 0; s < a->S; s += a->block)
            for (int64_t t = 0; t < a->T; t += QB)
                tile_pair(w, s, v_min_i64(a->block, a->S - s), t);
        head_heavy(w);
        for (int64_t t = 0; t < a->T; t++)
            attn_store(a, &x->dq, w->b, w->h, t, w->dq + t * a->width, a->scale);
    }
    for (int64_t s = 0; s < a->S; s++) {
        attn_store(a, &x->dk, w->b, w->g, s, w->dk + s * a->width, a->pairs ? a->scale : 1);
        attn_store(a, &x->dv, w->b, w->g, s, w->dv + s * a->width, 1.0f);
    }
}

typedef struct backward_call {
    const attn *a;
    const kn_attention_grad_args *x;
    float *rooms; /* of `each` floats, one a part */
    int64_t each, groups;
    _Atomic int64_t *next; /* the group to take */
} backward_call;

static void backward_groups(const void *ctx, int64_t part)
{
    const backward_call *c = ctx;
    attn_drawn drawn = { 0 };
    backward w = { .a = c->a, .x = c->x, .drawn = &drawn };
    backward_place(&w, c->rooms + part * c->each);
    for (int64_t i;
         (i = atomic_fetch_add_explicit(c->next, 1, memory_order_relaxed)) < c->groups;) {
        w.b = i / c->a->G;
        w.g = i % c->a->G;
        backward_group(&w);
    }
}

kn_status VEC_FN(vec_attention_grad)(const void *args)
{
    const kn_attention_grad_args *x = args;
    const kn_dtype t = x->q.dtype;
    attn a = ATTN_OF(x);
    if (!attn_make(&a, &x->q, &x->k, &x->v, &x->o, &x->lse) || !attn_takes(&x->dout, t) ||
        !attn_takes(&x->dq, t) || !attn_takes(&x->dk, t) || !attn_takes(&x->dv, t) ||
        !attn_takes(&x->dmask, t))
        return KN_DECLINED;
    attn_cut(&a, SB);
    const int64_t groups = a.B * a.G, each = round_up(backward_floats(&a), 16);
    const int wanted = kn_threads_for(a.B * a.H * a.T * v_min_i64(a.S * a.D, 1 << 20) / 4);
    const int threads = (int)v_min_i64(wanted, groups);
    const size_t bytes = (size_t)(each * threads) * sizeof(float);
    float *rooms = vec_scratch(bytes);
    if (!rooms)
        return KN_FAILED;
    _Atomic int64_t next = 0;
    kn_each_part(threads, backward_groups, &(backward_call){ &a, x, rooms, each, groups, &next });
    vec_scratch_end(rooms, bytes);
    return KN_DONE;
}
