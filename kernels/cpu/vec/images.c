/* kernels/cpu/vec/images.c: how images lie (images.h), and their sums by channel. */
#include "kernels/cpu/vec/images.h"

enum {
    RUN = 1024,                 /* elements of a plane */
    ROWS = 1024,                /* of a block */
    PIECE = 256,                /* channels of a block whose sums stay in the first cache */
    SHORT = 64,                 /* rows of a sum in f32 */
    FEW = 4,                    /* rows that are read together */
    STRIP = KN_VW == 16 ? 4 : 2 /* vectors of them */
};

/* ---- how the arrays lie ---------------------------------------------------------------------- */

static bool seen_as(images *m, bool last, int count, const kn_array *const a[])
{
    int spatial[KN_MAX_DIMS] = { 0 }; /* with samples in front */
    for (int d = 2; d < a[0]->ndim; d++)
        spatial[d - 1] = d;
    m->last = last;
    for (int i = 0; i < count; i++) {
        int64_t stride;
        const int skip = last ? 0 : 1;
        if (!m->p[i])
            continue;
        if (!vec_joins(a[i], spatial + skip, a[i]->ndim - 1 - skip, &stride))
            return false;
        if (last ? a[i]->stride[1] != 1 && m->C > 1 : stride != 1)
            return false;
        m->n[i] = last ? stride : a[i]->stride[0];
        m->c[i] = a[i]->stride[1];
    }
    return true;
}

bool images_of(images *m, int count, const kn_array *const a[])
{
    const kn_array *x = a[0];
    if (!vec_float(x->dtype) || kn_array_numel(x) == 0)
        return false;
    *m = (images){ .N = x->shape[0], .C = x->shape[1], .S = 1, .t = x->dtype };
    for (int d = 2; d < x->ndim; d++)
        m->S *= x->shape[d];
    m->M = m->N * m->S;
    for (int i = 0; i < count; i++) {
        if (!a[i]->data)
            continue;
        if (a[i]->dtype != m->t)
            return false;
        m->p[i] = a[i]->data;
    }
    return (m->C > 1 && seen_as(m, true, count, a)) || seen_as(m, false, count, a);
}

/* ---- moments --------------------------------------------------------------------------------- */

/* Sums of `count` values less `from`, and of their squares, of each of some channels. */
typedef struct sums_around {
    double *from, *sum, *squares;
    int64_t count;
} sums_around;

/* Adds `count` values a channel, whose sums less shift are sum and squares. */
VEC_INLINE void add_run(sums_around *s, int64_t channels, const float *shift, const float *sum,
                        const float *squares, int64_t count)
{
    const double n = (double)count;
    for (int64_t j = 0; j < channels; j++) {
        const double by = (double)shift[j] - s->from[j], a = (double)sum[j];
        s->sum[j] += a + n * by;
        s->squares[j] += (double)squares[j] + by * (2 * a + n * by);
    }
    s->count += count;
}

VEC_INLINE void put_moments(const sums_around *s, int64_t channels, double *mean, double *squares)
{
    const double M = (double)s->count;
    for (int64_t j = 0; j < channels; j++) {
        const double more = s->squares[j] - s->sum[j] * s->sum[j] / M;
        mean[j] = s->from[j] + s->sum[j] / M;
        squares[j] = more < 0 ? 0 : more;
    }
}

/* Of n values from x on, less shift. */
VEC_INLINE void run_sums(kn_dtype t, const char *x, int64_t n, float shift, float *sum,
                         float *squares)
{
    const vf less = v_set1(shift);
    vf a = v_zero(), b = v_zero();
    int64_t i = 0;
    for (; i + KN_VW <= n; i += KN_VW) {
        const vf d = v_get(t, x, i) - less;
        a += d;
        b = v_fma(d, d, b);
    }
    if (i < n) {
        float tail[KN_VW] = { 0 }; /* missing lanes must not count shift^2 */
        v_store_n(tail, v_get_n(t, x, i, n - i) - less, n - i);
        const vf d = v_load(tail);
        a += d;
        b = v_fma(d, d, b);
    }
    *sum = v_hsum(a);
    *squares = v_hsum(b);
}

/* A run is summed less the mean of the one before it, the first less its own: how far it lies from
 * that counts in the sum of squares of all, so no digits are lost that would matter there. */
VEC_INLINE void plane_moments(const images *m, int64_t c, double *out, kn_dtype t)
{
    double from, sum = 0, squares = 0;
    sums_around s = { &from, &sum, &squares, 0 };
    float a, b;
    run_sums(t, image_plane(m, 0, 0, c, t), v_min_i64(RUN, m->S), 0, &a, &b);
    float shift = (float)((double)a / (double)v_min_i64(RUN, m->S));
    from = (double)shift;
    for (int64_t n = 0; n < m->N; n++) {
        const char *x = image_plane(m, 0, n, c, t);
        for (int64_t r = 0; r < m->S; r += RUN) {
            const int64_t count = v_min_i64(RUN, m->S - r);
            run_sums(t, x + r * v_size(t), count, shift, &a, &b);
            add_run(&s, 1, &shift, &a, &b, count);
            shift += (float)((double)a / (double)count);
        }
    }
    put_moments(&s, 1, &out[c], &out[m->C + c]);
}

/* Adds `rows` rows of n vectors of channels, the last one of w lanes, less `less`, to sum, and
 * their squares. n should be a constant. */
VEC_INLINE void add_rows(image_rows x, int64_t rows, int64_t c, int n, int64_t w, const float *less,
                         float *sum, float *squares, kn_dtype t)
{
    vf l[STRIP], a[STRIP], b[STRIP];
    for (int i = 0; i < n; i++) {
        l[i] = v_load(less + i * KN_VW);
        a[i] = v_load(sum + i * KN_VW);
        b[i] = v_load(squares + i * KN_VW);
    }
    for (int64_t k = 0; k < rows; k++)
        for (int i = 0; i < n; i++) {
            const vf d = v_get_n(t, x.p + k * x.step, c + i * KN_VW, i == n - 1 ? w : KN_VW) - l[i];
            a[i] += d;
            b[i] = v_fma(d, d, b[i]);
        }
    for (int i = 0; i < n; i++) {
        v_store(sum + i * KN_VW, a[i]);
        v_store(squares + i * KN_VW, b[i]);
    }
}

/* Of rows [begin, end) and `channels` channels from c on: moments to part[2][C]. */
VEC_INLINE void piece_moments(const images *m, int64_t begin, int64_t end, int64_t c,
                              int64_t channels, double *part, kn_dtype t)
{
    double from[PIECE], all[PIECE] = { 0 }, all_squares[PIECE] = { 0 };
    sums_around s = { from, all, all_squares, 0 };
    float less[PIECE] = { 0 }, sum[PIECE], squares[PIECE];
    for (int64_t first = 1, r = begin; r < end;) {
        const int64_t stop = v_min_i64(r + SHORT, end);
        memset(sum, 0, sizeof sum);
        memset(squares, 0, sizeof squares);
        for (int64_t k = r; k < stop; k += FEW) {
            const image_rows x = image_rows_of(m, AT_X, k, t);
            const int64_t rows = v_min_i64(FEW, stop - k);
            int64_t j = 0;
            for (; j + STRIP * KN_VW <= channels; j += STRIP * KN_VW)
                add_rows(x, rows, c + j, STRIP, KN_VW, less + j, sum + j, squares + j, t);
            for (; j + KN_VW <= channels; j += KN_VW)
                add_rows(x, rows, c + j, 1, KN_VW, less + j, sum + j, squares + j, t);
            if (j < channels)
                add_rows(x, rows, c + j, 1, channels - j, less + j, sum + j, squares + j, t);
        }
        if (!first)
            add_run(&s, channels, less, sum, squares, stop - r);
        const vf share = v_set1(1.0f / (float)(stop - r));
        for (int64_t j = 0; j < channels; j += KN_VW)
            v_store(less + j, v_fma(v_load(sum + j), share, v_load(less + j)));
        for (int64_t j = 0; j < channels && first; j++)
            from[j] = (double)less[j];
        r = first ? r : stop; /* the first run less 0 gives its mean: once more, less that */
        first = 0;
    }
    put_moments(&s, channels, part + c, part + m->C + c);
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where w lanes of each array lie, from element i on. */
typedef struct places {
    const void *x, *dy, *y;
    void *dadd;
} places;

/* Adds to s->dw and s->db. */
VEC_INLINE void add_products(image_mask mask, kn_dtype t, const places *p, int64_t i, int64_t w,
                             image_lanes *s)
{
    const vf h = (v_get_n(t, p->x, i, w) - s->mean) * s->rstd;
    const vf g = image_masked(mask, t, p->dy, p->y, i, w, h, s);
    if (p->dadd)
        v_put_n(t, p->dadd, i, g, w);
    s->dw = v_fma(g, h, s->dw);
    s->db += g;
}

VEC_INLINE void plane_products(const images *m, image_mask mask, int64_t c, const factors *f,
                               double *sum, kn_dtype t)
{
    image_lanes s = image_lanes_of(f, c, 0);
    double first = 0, second = 0;
    for (int64_t n = 0; n < m->N; n++) {
        const places p = { image_plane(m, AT_X, n, c, t), image_plane(m, AT_DY, n, c, t),
                           image_plane(m, AT_Y, n, c, t), image_plane(m, AT_DADD, n, c, t) };
        for (int64_t r = 0; r < m->S; r += RUN) {
            const int64_t end = v_min_i64(r + RUN, m->S);
            int64_t i = r;
            s.dw = s.db = v_zero();
            for (; i + KN_VW <= end; i += KN_VW)
                add_products(mask, t, &p, i, KN_VW, &s);
            if (i < end)
                add_products(mask, t, &p, i, end - i, &s);
            first += (double)v_hsum(s.dw);
            second += (double)v_hsum(s.db);
        }
    }
    sum[c] = first;
    sum[m->C + c] = second;
}

/* As add_rows, of products: to dw and db of n vectors from channel c on. */
VEC_INLINE void add_product_rows(const images *m, image_mask mask, int64_t r, int64_t rows,
                                 int64_t c, int n, int64_t w, const factors *f, float *dw,
                                 float *db, kn_dtype t)
{
    const image_rows x = image_rows_of(m, AT_X, r, t), dy = image_rows_of(m, AT_DY, r, t),
                     y = image_rows_of(m, AT_Y, r, t), dadd = image_rows_of(m, AT_DADD, r, t);
    image_lanes s[STRIP];
    for (int i = 0; i < n; i++) {
        s[i] = image_lanes_of(f, c + i * KN_VW, i == n - 1 ? w : KN_VW);
        s[i].dw = v_load(dw + i * KN_VW);
        s[i].db = v_load(db + i * KN_VW);
    }
    for (int64_t k = 0; k < rows; k++) {
        const places p = { x.p + k * x.step, dy.p + k * dy.step, y.p ? y.p + k * y.step : NULL,
                           dadd.p ? dadd.p + k * dadd.step : NULL };
        for (int i = 0; i < n; i++)
            add_products(mask, t, &p, c + i * KN_VW, i == n - 1 ? w : KN_VW, &s[i]);
    }
    for (int i = 0; i < n; i++) {
        v_store(dw + i * KN_VW, s[i].dw);
        v_store(db + i * KN_VW, s[i].db);
    }
}

/* As piece_moments, of products. */
VEC_INLINE void piece_products(const images *m, image_mask mask, int64_t begin, int64_t end,
                               int64_t c, int64_t channels, const factors *f, double *part,
                               kn_dtype t)
{
    double *first = part + c, *second = part + m->C + c;
    memset(first, 0, (size_t)channels * sizeof *first);
    memset(second, 0, (size_t)channels * sizeof *second);
    for (int64_t r = begin; r < end; r += SHORT) {
        float dw[PIECE] = { 0 }, db[PIECE] = { 0 };
        const int64_t stop = v_min_i64(r + SHORT, end);
        for (int64_t k = r; k < stop; k += FEW) {
            const int64_t rows = v_min_i64(FEW, stop - k);
            int64_t j = 0;
            for (; j + STRIP * KN_VW <= channels; j += STRIP * KN_VW)
                add_product_rows(m, mask, k, rows, c + j, STRIP, KN_VW, f, dw + j, db + j, t);
            for (; j + KN_VW <= channels; j += KN_VW)
                add_product_rows(m, mask, k, rows, c + j, 1, KN_VW, f, dw + j, db + j, t);
            if (j < channels)
                add_product_rows(m, mask, k, rows, c + j, 1, channels - j, f, dw + j, db + j, t);
        }
        for (int64_t j = 0; j < channels; j++) {
            first[j] += (double)dw[j];
            second[j] += (double)db[j];
        }
    }
}

/* ---- channels, or pieces of blocks of rows, shared by threads -------------------------------- */

typedef struct sums_call {
    const images *m;
    image_mask mask;
    const factors *f; /* NULL: moments */
    double *sum;
} sums_call;

static int64_t row_blocks(const images *m)
{
    return m->last ? (m->M + ROWS - 1) / ROWS : 1;
}

static int64_t pieces(const images *m)
{
    return m->last ? (m->C + PIECE - 1) / PIECE : m->C;
}

/* Piece i: of the channels of a block, or the plane of a channel. */
VEC_INLINE void sums_in(const sums_call *s, image_mask mask, int64_t i, kn_dtype t)
{
    const images *m = s->m;
    const int64_t begin = i / pieces(m) * ROWS, end = v_min_i64(begin + ROWS, m->M),
                  c = i % pieces(m) * PIECE, channels = v_min_i64(PIECE, m->C - c);
    double *part = s->sum + i / pieces(m) * 2 * m->C;
    if (!s->f && m->last)
        piece_moments(m, begin, end, c, channels, part, t);
    else if (!s->f)
        plane_moments(m, i, s->sum, t);
    else if (m->last)
        piece_products(m, mask, begin, end, c, channels, s->f, part, t);
    else
        plane_products(m, mask, i, s->f, s->sum, t);
}

VEC_INLINE void sums_of(const sums_call *s, int64_t i, kn_dtype t)
{
    if (s->mask == MASK_NONE)
        sums_in(s, MASK_NONE, i, t);
    else if (s->mask == MASK_FROM_X)
        sums_in(s, MASK_FROM_X, i, t);
    else
        sums_in(s, MASK_FROM_Y, i, t);
}

static void some_sums(const void *ctx, int64_t begin, int64_t end)
{
    const sums_call *s = ctx;
    for (int64_t i = begin; i < end; i++)
        VEC_BY_DTYPE(s->m->t, sums_of, s, i);
}

static void run_sums_of(const sums_call *s)
{
    const images *m = s->m;
    kn_each_range(image_threads(m), row_blocks(m) * pieces(m), some_sums, s);
}

int64_t image_sum_room(const images *m)
{
    return row_blocks(m) * 2 * m->C;
}

void image_moments(const images *m, double *sum)
{
    run_sums_of(&(sums_call){ .m = m, .sum = sum });
    for (int64_t i = 1; i < row_blocks(m); i++) {
        const double *more = sum + i * 2 * m->C, one = (double)(i * ROWS),
                     two = (double)(v_min_i64((i + 1) * ROWS, m->M) - i * ROWS);
        for (int64_t c = 0; c < m->C; c++) {
            const double d = more[c] - sum[c];
            sum[c] += d * (two / (one + two));
            sum[m->C + c] += more[m->C + c] + d * d * (one * two / (one + two));
        }
    }
}

void image_products(const images *m, image_mask mask, const factors *f, double *sum)
{
    run_sums_of(&(sums_call){ .m = m, .mask = mask, .f = f, .sum = sum });
    for (int64_t i = 1; i < row_blocks(m); i++)
        for (int64_t j = 0; j < 2 * m->C; j++)
            sum[j] += sum[i * 2 * m->C + j];
}
