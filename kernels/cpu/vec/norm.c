/* kernels/cpu/vec/norm.c: layer_norm and rms_norm over the last dim, and their gradients. A row is
 * read from memory once (its second and third pass hit the cache) and belongs to one thread. */
#include "kernels/cpu/vec/math.h"
#include "kernels/cpu/vec/rows.h"

/* ---- forward -------------------------------------------------------------------------------- */

/* sum = x + add */
VEC_INLINE void row_add(void *sum, const void *x, const void *add, int64_t n, kn_dtype t)
{
    for (int64_t i = 0; i < n; i += KN_VW)
        v_put_n(t, sum, i, v_get_n(t, x, i, n - i) + v_get_n(t, add, i, n - i), n - i);
}

typedef struct norm_plan {
    vec_rows y, x, add, sum; /* add.data NULL: the norm of x alone */
    const void *w, *b;       /* dense [C] or NULL */
    float *mean, *rstd;
    double eps;
    kn_dtype t;
    bool rms, wide; /* wide: w and b are f32 */
} norm_plan;

/* y = (x - mean) * rstd * w + b; mean = 0 for rms. wt: dtype of w and b. */
VEC_INLINE void norm_row(const norm_plan *p, int64_t r, kn_dtype wt, kn_dtype t)
{
    const int64_t n = p->x.cols, size = v_size(t);
    const void *x = vec_row(&p->x, r, size);
    void *y = vec_row(&p->y, r, size);
    if (p->add.data) {
        void *sum = vec_row(&p->sum, r, size);
        row_add(sum, x, vec_row(&p->add, r, size), n, t);
        x = sum;
    }
    const float mean = p->rms ? 0.0f : (float)(row_sum(x, n, false, 0.0f, t) / (double)n);
    const double var = row_sum(x, n, true, mean, t) / (double)n;
    const float rstd = (float)(1.0 / __builtin_sqrt(var + p->eps));
    const vf m = v_set1(mean), k = v_set1(rstd);
    const void *w = p->w, *b = p->b; /* in registers: the stores might alias *p */
    for (int64_t i = 0; i < n; i += KN_VW) {
        vf v = (v_get_n(t, x, i, n - i) - m) * k;
        if (w && b)
            v = v_fma(v, v_get_n(wt, w, i, n - i), v_get_n(wt, b, i, n - i));
        else if (w)
            v = v * v_get_n(wt, w, i, n - i);
        else if (b)
            v = v + v_get_n(wt, b, i, n - i);
        v_put_n(t, y, i, v, n - i);
    }
    if (!p->rms && p->mean)
        p->mean[r] = mean;
    if (p->rstd)
        p->rstd[r] = rstd;
}

VEC_INLINE void norm_some(const norm_plan *p, int64_t begin, int64_t end, kn_dtype t)
{
    for (int64_t r = begin; r < end; r++)
        norm_row(p, r, p->wide ? KN_F32 : t, t);
}

static void norm_rows(const void *ctx, int64_t begin, int64_t end)
{
    const norm_plan *p = ctx;
    VEC_BY_DTYPE(p->t, norm_some, p, begin, end);
}

/* A vector [C] that we can read: dense, x's dtype or f32; *wide: f32. */
static bool vector_ok(const kn_array *v, const kn_array *x, bool *wide)
{
    if (!v->data)
        return true;
    *wide = v->dtype == KN_F32;
    return (v->dtype == x->dtype || v->dtype == KN_F32) && kn_array_contiguous(v);
}

/* Rows of a that can be read beside x's. */
static bool rows_like(const kn_array *a, const kn_array *x, vec_rows *rows)
{
    return a->dtype == x->dtype && vec_rows_of(a, rows);
}

kn_status VEC_FN(vec_norm)(const void *args)
{
    const kn_norm_args *a = args;
    norm_plan p = { .w = a->w.data, .b = a->b.data, .eps = a->eps, .rms = a->rms };
    bool wide = false, wide_b = false;
    if (!vec_float(a->x.dtype) || !vec_rows_of(&a->x, &p.x) || !rows_like(&a->y, &a->x, &p.y) ||
        p.x.rows * p.x.cols == 0)
        return KN_DECLINED;
    if (a->add.data && (!rows_like(&a->add, &a->x, &p.add) || !rows_like(&a->sum, &a->x, &p.sum)))
        return KN_DECLINED;
    if (!vector_ok(&a->w, &a->x, &wide) || !vector_ok(&a->b, &a->x, &wide_b) ||
        (p.w && p.b && wide != wide_b))
        return KN_DECLINED;
    p.mean = a->mean.data;
    p.rstd = a->rstd.data;
    p.t = a->x.dtype;
    p.wide = wide || wide_b;
    kn_each_range(kn_threads_for(p.x.rows * p.x.cols * 12), p.x.rows, norm_rows, &p);
    return KN_DONE;
}

/* ---- backward ------------------------------------------------------------------------------- */

typedef struct grad_plan {
    vec_rows dx, dy, x, more; /* dx.data NULL: not wanted, more.data NULL: nothing to add */
    const void *w;
    const float *mean, *rstd;
    float *partial; /* [chunks][2][C]: sums of dy * xhat and of dy over a chunk of rows, or NULL */
    int64_t chunk;  /* rows of a chunk */
    kn_dtype t;
    bool rms, wide; /* wide: w is f32 */
} grad_plan;

/* With xhat = (x - mean) rstd and g = dy w:
 *   dx = rstd (g - mean_c(g) - xhat mean_c(g xhat)) + more,   for rms without mean_c(g). */
VEC_INLINE void grad_row(const grad_plan *p, int64_t r, float *dw, float *db, kn_dtype wt,
                         kn_dtype t)
{
    const int64_t n = p->x.cols, size = v_size(t);
    const void *x = vec_row(&p->x, r, size), *dy = vec_row(&p->dy, r, size), *weight = p->w;
    const vf one = v_set1(1.0f), m = v_set1(p->rms ? 0.0f : p->mean[r]), k = v_set1(p->rstd[r]);
    double sum = 0, dot = 0;
    for (int64_t b = 0; b < n;
         b += ROW_BLOCK) { /* dw and db ride on the pass that needs dy and x */
        const int64_t end = v_min_i64(b + ROW_BLOCK, n);
        vf s = v_zero(), d = v_zero();
        for (int64_t i = b; i < end; i += KN_VW) {
            const int64_t w = end - i;
            const vf gy = v_get_n(t, dy, i, w), hat = (v_get_n(t, x, i, w) - m) * k;
            const vf g = weight ? gy * v_get_n(wt, weight, i, w) : gy;
            s += g; /* missing lanes have dy = 0 */
            d = v_fma(g, hat, d);
            if (dw) {
                v_put_n(KN_F32, dw, i, v_fma(gy, hat, v_get_n(KN_F32, dw, i, w)), w);
                v_put_n(KN_F32, db, i, gy + v_get_n(KN_F32, db, i, w), w);
            }
        }
        sum += v_hsum(s);
        dot += v_hsum(d);
    }
    if (!p->dx.data)
        return;
    void *dx = vec_row(&p->dx, r, size);
    const void *more = p->more.data ? vec_row(&p->more, r, size) : NULL;
    const vf c1 = v_set1(p->rms ? 0.0f : (float)(sum / (double)n));
    const vf c2 = v_set1((float)(dot / (double)n));
    for (int64_t i = 0; i < n; i += KN_VW) {
        const int64_t w = n - i;
        const vf gy = v_get_n(t, dy, i, w), hat = (v_get_n(t, x, i, w) - m) * k;
        const vf g = gy * (weight ? v_get_n(wt, weight, i, w) : one);
        const vf d = k * v_fnma(hat, c2, g - c1);
        v_put_n(t, dx, i, more ? d + v_get_n(t, more, i, w) : d, w);
    }
}

VEC_INLINE void grad_chunk(const grad_plan *p, int64_t c, kn_dtype t)
{
    const int64_t n = p->x.cols, end = v_min_i64((c + 1) * p->chunk, p->x.rows);
    float *dw = p->partial ? p->partial + c * 2 * n : NULL, *db = dw ? dw + n : NULL;
    if (dw)
        memset(dw, 0, (size_t)(2 * n) * sizeof *dw);
    for (int64_t r = c * p->chunk; r < end; r++)
        grad_row(p, r, dw, db, p->wide ? KN_F32 : t, t);
}

static void grad_chunks(const void *ctx, int64_t begin, int64_t end)
{
    const grad_plan *p = ctx;
    for (int64_t c = begin; c < end; c++)
        VEC_BY_DTYPE(p->t, grad_chunk, p, c);
}

/* dst[i] = the sum over chunks of their row which (0: dw, 1: db), in order. */
static void sum_chunks(const grad_plan *p, int which, const kn_array *dst)
{
    const int64_t n = p->x.cols, chunks = (p->x.rows + p->chunk - 1) / p->chunk;
    if (!dst->data)
        return;
    for (int64_t i = 0; i < n; i++) {
        double sum = 0;
        for (int64_t c = 0; c < chunks; c++)
            sum += p->partial[(c * 2 + which) * n + i];
        v_put_n(dst->dtype, dst->data, i, v_set1((float)sum), 1);
    }
}

#define MAX_CHUNKS 64

kn_status VEC_FN(vec_norm_grad)(const void *args)
{
    const kn_norm_grad_args *a = args;
    const kn_dtype t = a->x.dtype;
    grad_plan p = { .w = a->w.data, .mean = a->mean.data, .rstd = a->rstd.data, .rms = a->rms };
    bool wide = false, any;
    if (!vec_float(t) || !vec_rows_of(&a->x, &p.x) || !rows_like(&a->dy, &a->x, &p.dy) ||
        p.x.rows * p.x.cols == 0)
        return KN_DECLINED;
    if ((a->dx.data && !rows_like(&a->dx, &a->x, &p.dx)) ||
        (a->more.data && !rows_like(&a->more, &a->x, &p.more)))
        return KN_DECLINED;
    if (!vector_ok(&a->w, &a->x, &wide) || !vector_ok(&a->dw, &a->x, &any) ||
        !vector_ok(&a->db, &a->x, &any))
        return KN_DECLINED;
    /* 32 rows a chunk, more where that would make more than MAX_CHUNKS: by the shape alone */
    p.chunk = v_max_i64(32, (p.x.rows + MAX_CHUNKS - 1) / MAX_CHUNKS);
    const int64_t chunks = (p.x.rows + p.chunk - 1) / p.chunk;
    const size_t bytes = (size_t)(chunks * 2 * p.x.cols) * sizeof *p.partial;
    const bool sums = a->dw.data || a->db.data;
    if (sums && !(p.partial = vec_scratch(bytes)))
        return KN_FAILED;
    p.t = t;
    p.wide = wide;
    kn_each_range(kn_threads_for(p.x.rows * p.x.cols * 20), chunks, grad_chunks, &p);
    if (sums) {
        sum_chunks(&p, 0, &a->dw);
        sum_chunks(&p, 1, &a->db);
    }
    vec_scratch_end(p.partial, bytes);
    return KN_DONE;
}
