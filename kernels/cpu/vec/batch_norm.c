/* kernels/cpu/vec/batch_norm.c: batch norm and its gradient, where channels are planes without gaps
 * (row-major) or lie side by side (channels-last). Sums are in f32 over short runs and in f64
 * across them, cut by shape alone. */
#include "kernels/cpu/vec/iter.h"

enum {
    RUN = 1024,
    ROWS = 1024,
    SHORT = 64,
    STRIP = KN_VW == 16 ? 4 : 2
}; /* elements of a plane; rows of a block; of a sum in f32; vectors added side by side */

/* x and up to two arrays like it. last: rows of C channels, N S of them; else planes of S. */
typedef struct images {
    bool last;
    int64_t N, C, S, M;
    int64_t n[3], c[3]; /* strides: of samples and channels, or n: of rows */
    char *p[3];
    kn_dtype t;
} images;

typedef enum sum_kind { VALUES, SQUARES, PRODUCTS } sum_kind;

/* The numbers of each channel, as f32 [C]. */
typedef struct factors {
    float *mean, *rstd, *w, *b; /* b: the gradient's db/M */
    float *dw;                  /* dw/M */
} factors;

/* ---- how the arrays lie ---------------------------------------------------------------------- */

/* The dims of a in this order make one run of a common stride. */
static bool joins(const kn_array *a, const int *dims, int n, int64_t *stride)
{
    int64_t count = 1;
    *stride = 1;
    for (int i = n - 1; i >= 0; i--) {
        const int d = dims[i];
        if (a->shape[d] == 1)
            continue;
        if (count == 1)
            *stride = a->stride[d];
        else if (a->stride[d] != *stride * count)
            return false;
        count *= a->shape[d];
    }
    return true;
}

static bool seen_as(images *m, bool last, int count, const kn_array *const a[])
{
    int spatial[KN_MAX_DIMS] = { 0 }; /* with samples in front */
    for (int d = 2; d < a[0]->ndim; d++)
        spatial[d - 1] = d;
    m->last = last;
    for (int i = 0; i < count; i++) {
        int64_t stride;
        const int skip = last ? 0 : 1;
        if (!joins(a[i], spatial + skip, a[i]->ndim - 1 - skip, &stride))
            return false;
        if (last ? a[i]->stride[1] != 1 && m->C > 1 : stride != 1)
            return false;
        m->n[i] = last ? stride : a[i]->stride[0];
        m->c[i] = a[i]->stride[1];
    }
    return true;
}

/* Arrays of one shape and dtype, in an order that all share. */
static bool images_of(images *m, int count, const kn_array *const a[])
{
    const kn_array *x = a[0];
    if (!vec_float(x->dtype) || x->ndim < 2 || kn_array_numel(x) == 0)
        return false;
    *m = (images){ .N = x->shape[0], .C = x->shape[1], .S = 1, .t = x->dtype };
    for (int d = 2; d < x->ndim; d++)
        m->S *= x->shape[d];
    m->M = m->N * m->S;
    for (int i = 0; i < count; i++) {
        if (a[i]->dtype != m->t || !vec_same_shape(a[i], x))
            return false;
        m->p[i] = a[i]->data;
    }
    return (m->C > 1 && seen_as(m, true, count, a)) || seen_as(m, false, count, a);
}

VEC_INLINE int64_t size_of(kn_dtype t)
{
    return t == KN_F32 ? 4 : 2;
}

VEC_INLINE void *plane(const images *m, int i, int64_t n, int64_t c, kn_dtype t)
{
    return m->p[i] + (n * m->n[i] + c * m->c[i]) * size_of(t);
}

VEC_INLINE void *row(const images *m, int i, int64_t r, kn_dtype t)
{
    return m->p[i] + r * m->n[i] * size_of(t);
}

/* ---- sums ------------------------------------------------------------------------------------ */

/* The terms of w lanes: sum x; sum (x - mean)^2; sum dy (x - mean) rstd and sum dy, where x is
 * array 0 and dy array 1. */
VEC_INLINE void add_terms(sum_kind kind, kn_dtype t, const void *x, const void *dy, int64_t i,
                          int64_t w, vf mean, vf rstd, vf *a, vf *b)
{
    const vf v = v_get_n(t, x, i, w);
    if (kind == VALUES) {
        *a += v;
    } else if (kind == SQUARES) {
        vf d = v - mean;
        if (w < KN_VW) { /* missing lanes must not count mean^2 */
            float tail[KN_VW] = { 0 };
            v_put_n(KN_F32, tail, 0, d, w);
            d = v_load(tail);
        }
        *a = v_fma(d, d, *a);
    } else {
        const vf g = v_get_n(t, dy, i, w);
        *a = v_fma(g, (v - mean) * rstd, *a);
        *b += g;
    }
}

VEC_INLINE void plane_sums(const images *m, sum_kind kind, int64_t c, const factors *f, double *sum,
                           kn_dtype t)
{
    const vf mean = v_set1(kind == VALUES ? 0.0f : f->mean[c]);
    const vf rstd = v_set1(kind == PRODUCTS ? f->rstd[c] : 0.0f);
    double first = 0, second = 0;
    for (int64_t n = 0; n < m->N; n++) {
        const void *x = plane(m, 0, n, c, t), *dy = kind == PRODUCTS ? plane(m, 1, n, c, t) : NULL;
        for (int64_t r = 0; r < m->S; r += RUN) {
            const int64_t end = v_min_i64(r + RUN, m->S);
            vf a = v_zero(), b = v_zero();
            for (int64_t i = r; i < end; i += KN_VW)
                add_terms(kind, t, x, dy, i, v_min_i64(end - i, KN_VW), mean, rstd, &a, &b);
            first += v_hsum(a);
            second += v_hsum(b);
        }
    }
    sum[c] = first;
    sum[m->C + c] = second;
}

/* Adds those of rows [begin, end) and n vectors of channels from c on, the last one of w lanes, to
 * part[2][C]. n and w should be constants. */
VEC_INLINE void strip_sums(const images *m, sum_kind kind, int64_t begin, int64_t end, int64_t c,
                           int n, int64_t w, const factors *f, double *part, kn_dtype t)
{
    vf mean[STRIP], rstd[STRIP], a[STRIP], b[STRIP];
    for (int i = 0; i < n; i++) {
        const int64_t lanes = i == n - 1 ? w : KN_VW, at = c + i * KN_VW;
        mean[i] = kind == VALUES ? v_zero() : v_get_n(KN_F32, f->mean, at, lanes);
        rstd[i] = kind == PRODUCTS ? v_get_n(KN_F32, f->rstd, at, lanes) : v_zero();
    }
    for (int64_t r = begin; r < end; r += SHORT) {
        for (int i = 0; i < n; i++)
            a[i] = b[i] = v_zero();
        for (int64_t k = r; k < v_min_i64(r + SHORT, end); k++) {
            const void *x = row(m, 0, k, t), *dy = kind == PRODUCTS ? row(m, 1, k, t) : NULL;
            for (int i = 0; i < n; i++)
                add_terms(kind, t, x, dy, c + i * KN_VW, i == n - 1 ? w : KN_VW, mean[i], rstd[i],
                          &a[i], &b[i]);
        }
        for (int i = 0; i < n; i++)
            for (int64_t j = 0; j < (i == n - 1 ? w : KN_VW); j++) {
                part[c + i * KN_VW + j] += a[i][j];
                part[m->C + c + i * KN_VW + j] += b[i][j];
            }
    }
}

/* Of rows [begin, end), into part[2][C]. */
VEC_INLINE void row_sums(const images *m, sum_kind kind, int64_t begin, int64_t end,
                         const factors *f, double *part, kn_dtype t)
{
    int64_t c = 0;
    memset(part, 0, (size_t)(2 * m->C) * sizeof *part);
    for (; c + STRIP * KN_VW <= m->C; c += STRIP * KN_VW)
        strip_sums(m, kind, begin, end, c, STRIP, KN_VW, f, part, t);
    for (; c + KN_VW <= m->C; c += KN_VW)
        strip_sums(m, kind, begin, end, c, 1, KN_VW, f, part, t);
    if (c < m->C)
        strip_sums(m, kind, begin, end, c, 1, m->C - c, f, part, t);
}

/* Sums over planes or blocks of rows, or their elements one by one. */
typedef struct image_call {
    const images *m;
    sum_kind kind;
    bool grad;
    const factors *f;
    double *sum;
} image_call;

VEC_INLINE void plane_sums_of(const image_call *s, int64_t c, kn_dtype t)
{
    if (s->kind == VALUES)
        plane_sums(s->m, VALUES, c, s->f, s->sum, t);
    else if (s->kind == SQUARES)
        plane_sums(s->m, SQUARES, c, s->f, s->sum, t);
    else
        plane_sums(s->m, PRODUCTS, c, s->f, s->sum, t);
}

static void sums_planes(const void *ctx, int64_t begin, int64_t end)
{
    const image_call *s = ctx;
    for (int64_t c = begin; c < end; c++)
        VEC_BY_DTYPE(s->m->t, plane_sums_of, s, c);
}

VEC_INLINE void row_sums_of(const image_call *s, int64_t block, kn_dtype t)
{
    const int64_t begin = block * ROWS, end = v_min_i64(begin + ROWS, s->m->M);
    double *p = s->sum + block * 2 * s->m->C;
    if (s->kind == VALUES)
        row_sums(s->m, VALUES, begin, end, s->f, p, t);
    else if (s->kind == SQUARES)
        row_sums(s->m, SQUARES, begin, end, s->f, p, t);
    else
        row_sums(s->m, PRODUCTS, begin, end, s->f, p, t);
}

static void sums_rows(const void *ctx, int64_t begin, int64_t end)
{
    const image_call *s = ctx;
    for (int64_t i = begin; i < end; i++)
        VEC_BY_DTYPE(s->m->t, row_sums_of, s, i);
}

static int threads_of(const images *m)
{
    return kn_threads_for(m->M * m->C * 4);
}

static int64_t row_blocks(const images *m)
{
    return m->last ? (m->M + ROWS - 1) / ROWS : 1;
}

/* sum[2][C], and room after it (sums_bytes). */
static void sums(const images *m, sum_kind kind, const factors *f, double *sum)
{
    const image_call s = { .m = m, .kind = kind, .f = f, .sum = sum };
    if (m->last)
        kn_each_range(threads_of(m), row_blocks(m), sums_rows, &s);
    else
        kn_each_range(threads_of(m), m->C, sums_planes, &s);
    for (int64_t i = 1; i < row_blocks(m); i++)
        for (int64_t j = 0; j < 2 * m->C; j++)
            sum[j] += sum[i * 2 * m->C + j];
}

static size_t sums_bytes(const images *m)
{
    const int64_t blocks = row_blocks(m);
    return (size_t)(blocks * 2 * m->C) * sizeof(double);
}

/* ---- element by element ---------------------------------------------------------------------- */

/* y (array 1) of x; or dx (array 2) of x and dy (array 1). */
VEC_INLINE void apply(const images *m, bool grad, const void *x, const void *dy, void *out,
                      int64_t i, int64_t w, vf mean, vf rstd, vf k, vf b, vf dw, kn_dtype t)
{
    (void)m;
    const vf h = (v_get_n(t, x, i, w) - mean) * rstd;
    const vf v = grad ? k * rstd * (v_get_n(t, dy, i, w) - v_fma(h, dw, b)) : v_fma(h, k, b);
    v_put_n(t, out, i, v, w);
}

VEC_INLINE void apply_plane(const images *m, bool grad, int64_t at, const factors *f, kn_dtype t)
{
    const int64_t n = at / m->C, c = at % m->C;
    const vf mean = v_set1(f->mean[c]), rstd = v_set1(f->rstd[c]), k = v_set1(f->w[c]),
             b = v_set1(f->b[c]), dw = v_set1(grad ? f->dw[c] : 0.0f);
    const void *x = plane(m, 0, n, c, t), *dy = plane(m, 1, n, c, t);
    void *out = plane(m, grad ? 2 : 1, n, c, t);
    int64_t i = 0;
    for (; i + KN_VW <= m->S; i += KN_VW)
        apply(m, grad, x, dy, out, i, KN_VW, mean, rstd, k, b, dw, t);
    if (i < m->S)
        apply(m, grad, x, dy, out, i, m->S - i, mean, rstd, k, b, dw, t);
}

VEC_INLINE void apply_row(const images *m, bool grad, int64_t r, const factors *f, kn_dtype t)
{
    const void *x = row(m, 0, r, t), *dy = row(m, 1, r, t);
    void *out = row(m, grad ? 2 : 1, r, t);
    for (int64_t c = 0; c < m->C; c += KN_VW) {
        const int64_t w = v_min_i64(m->C - c, KN_VW);
        apply(m, grad, x, dy, out, c, w, v_get_n(KN_F32, f->mean, c, w),
              v_get_n(KN_F32, f->rstd, c, w), v_get_n(KN_F32, f->w, c, w),
              v_get_n(KN_F32, f->b, c, w), grad ? v_get_n(KN_F32, f->dw, c, w) : v_zero(), t);
    }
}

VEC_INLINE void apply_one(const image_call *s, int64_t i, kn_dtype t)
{
    if (s->m->last && s->grad)
        apply_row(s->m, true, i, s->f, t);
    else if (s->m->last)
        apply_row(s->m, false, i, s->f, t);
    else if (s->grad)
        apply_plane(s->m, true, i, s->f, t);
    else
        apply_plane(s->m, false, i, s->f, t);
}

static void apply_some(const void *ctx, int64_t begin, int64_t end)
{
    const image_call *s = ctx;
    for (int64_t i = begin; i < end; i++)
        VEC_BY_DTYPE(s->m->t, apply_one, s, i);
}

static void apply_all(const images *m, bool grad, const factors *f)
{
    kn_each_range(threads_of(m), m->last ? m->M : m->N * m->C, apply_some,
                  &(image_call){ .m = m, .grad = grad, .f = f });
}

/* ---- the entries ----------------------------------------------------------------------------- */

static bool vector_ok(const kn_array *v, const images *m)
{
    return !v->data || (v->ndim == 1 && v->shape[0] == m->C && kn_array_contiguous(v) &&
                        (v->dtype == m->t || v->dtype == KN_F32));
}

static bool statistic_ok(const kn_array *v, const images *m)
{
    return v->data && v->dtype == KN_F32 && vector_ok(v, m);
}

/* The means of the whole batch's gradient, which dx needs while training: both or neither. */
static bool given_ok(const kn_batch_norm_grad_args *a, const images *m)
{
    return (!a->mean_dw.data && !a->mean_db.data) ||
           (a->training && statistic_ok(&a->mean_dw, m) && statistic_ok(&a->mean_db, m));
}

static void vector_get(float *to, const kn_array *v, float otherwise, int64_t C)
{
    for (int64_t c = 0; c < C; c++)
        to[c] = v->data ? v_get1(v->dtype, v->data, c)[0] : otherwise;
}

static void vector_put(const kn_array *v, const double *from, int64_t C)
{
    for (int64_t c = 0; v->data && c < C; c++)
        v_put_n(v->dtype, v->data, c, v_set1((float)from[c]), 1);
}

/* Scratch: sums, then the factors w, b, dw. */
static double *room_take(const images *m, factors *f, size_t *bytes)
{
    const size_t first = sums_bytes(m);
    *bytes = first + 3 * (size_t)m->C * sizeof(float);
    double *sum = vec_scratch(*bytes);
    if (sum) {
        f->w = (float *)(void *)((char *)sum + first);
        f->b = f->w + m->C;
        f->dw = f->b + m->C;
    }
    return sum;
}

static void move(const kn_array *running, int64_t c, double momentum, double value)
{
    float *r = running->data;
    if (r)
        r[c] = (float)((1 - momentum) * (double)r[c] + momentum * value);
}

static void statistics(const kn_batch_norm_args *a, const images *m, const factors *f, double *sum)
{
    const double M = (double)m->M;
    if (!a->training) {
        for (int64_t c = 0; c < m->C; c++) {
            const double var = ((const float *)a->running_var.data)[c];
            f->mean[c] = ((const float *)a->running_mean.data)[c];
            f->rstd[c] = (float)(1.0 / __builtin_sqrt(var + a->eps));
        }
        return;
    }
    sums(m, VALUES, f, sum);
    for (int64_t c = 0; c < m->C; c++) {
        f->mean[c] = (float)(sum[c] / M);
        if (m->M > 1)
            move(&a->running_mean, c, a->momentum, sum[c] / M);
    }
    sums(m, SQUARES, f, sum);
    for (int64_t c = 0; c < m->C; c++) {
        f->rstd[c] = (float)(1.0 / __builtin_sqrt(sum[c] / M + a->eps));
        if (m->M > 1)
            move(&a->running_var, c, a->momentum, sum[c] / (M - 1));
    }
}

kn_status vec_batch_norm(const void *args)
{
    const kn_batch_norm_args *a = args;
    const kn_array *const arrays[] = { &a->x, &a->y };
    images m;
    if (!images_of(&m, a->y.data ? 2 : 1, arrays) || !vector_ok(&a->w, &m) ||
        !vector_ok(&a->b, &m) || !statistic_ok(&a->mean, &m) || !statistic_ok(&a->rstd, &m))
        return KN_DECLINED;
    if ((!a->training || a->running_mean.data) && !statistic_ok(&a->running_mean, &m))
        return KN_DECLINED;
    if ((!a->training || a->running_var.data) && !statistic_ok(&a->running_var, &m))
        return KN_DECLINED;
    factors f = { .mean = a->mean.data, .rstd = a->rstd.data };
    size_t bytes;
    double *sum = room_take(&m, &f, &bytes);
    if (!sum)
        return KN_FAILED;
    statistics(a, &m, &f, sum);
    vector_get(f.w, &a->w, 1, m.C);
    vector_get(f.b, &a->b, 0, m.C);
    if (a->y.data)
        apply_all(&m, false, &f);
    vec_scratch_end(sum, bytes);
    return KN_DONE;
}

kn_status vec_batch_norm_grad(const void *args)
{
    const kn_batch_norm_grad_args *a = args;
    const kn_array *const arrays[] = { &a->x, &a->dy, &a->dx };
    images m;
    if (!images_of(&m, a->dx.data ? 3 : 2, arrays) || !vector_ok(&a->w, &m) ||
        !vector_ok(&a->dw, &m) || !vector_ok(&a->db, &m) || !statistic_ok(&a->mean, &m) ||
        !statistic_ok(&a->rstd, &m) || !given_ok(a, &m))
        return KN_DECLINED;
    const bool given = a->mean_dw.data != NULL;
    factors f = { .mean = a->mean.data, .rstd = a->rstd.data };
    size_t bytes;
    double *sum = room_take(&m, &f, &bytes);
    if (!sum)
        return KN_FAILED;
    if ((a->training && !given) || a->dw.data || a->db.data)
        sums(&m, PRODUCTS, &f, sum);
    vector_put(&a->dw, sum, m.C);
    vector_put(&a->db, sum + m.C, m.C);
    vector_get(f.w, &a->w, 1, m.C);
    for (int64_t c = 0; c < m.C && !given; c++) {
        f.dw[c] = a->training ? (float)(sum[c] / (double)m.M) : 0.0f;
        f.b[c] = a->training ? (float)(sum[m.C + c] / (double)m.M) : 0.0f;
    }
    if (given) {
        vector_get(f.dw, &a->mean_dw, 0, m.C);
        vector_get(f.b, &a->mean_db, 0, m.C);
    }
    if (a->dx.data)
        apply_all(&m, true, &f);
    vec_scratch_end(sum, bytes);
    return KN_DONE;
}
