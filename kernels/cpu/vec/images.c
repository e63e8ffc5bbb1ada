/* kernels/cpu/vec/images.c: how images lie (images.h), and their sums by channel. */
#include "kernels/cpu/vec/images.h"

enum {
    RUN = 1024,
    ROWS = 1024,
    SHORT = 64,
    STRIP = KN_VW == 16 ? 4 : 2,
    WIDTH = STRIP * KN_VW
}; /* elements of a plane; rows of a block; of a sum in f32; vectors added side by side; lanes */

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
        if (!m->p[i])
            continue;
        if (!joins(a[i], spatial + skip, a[i]->ndim - 1 - skip, &stride))
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
    if (!vec_float(x->dtype) || x->ndim < 2 || kn_array_numel(x) == 0)
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

/* Sums of the values less `from`, and of their squares, over `count` values. */
typedef struct sums_around {
    double from, sum, squares;
    int64_t count;
} sums_around;

/* Adds `count` values whose sums less `shift` are sum and squares. */
VEC_INLINE void add_run(sums_around *s, double shift, double sum, double squares, int64_t count)
{
    const double by = shift - s->from;
    s->sum += sum + (double)count * by;
    s->squares += squares + by * (2 * sum + (double)count * by);
    s->count += count;
}

VEC_INLINE void put_moments(const sums_around *s, double *mean, double *squares)
{
    const double M = (double)s->count, more = s->squares - s->sum * s->sum / M;
    *mean = s->from + s->sum / M;
    *squares = more < 0 ? 0 : more;
}

/* Of n values from x on, less shift. */
VEC_INLINE void run_sums(kn_dtype t, const char *x, int64_t n, float shift, double *sum,
                         double *squares)
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
    sums_around s = { 0 };
    double a, b;
    run_sums(t, image_plane(m, 0, 0, c, t), v_min_i64(RUN, m->S), 0, &a, &b);
    float shift = (float)(a / (double)v_min_i64(RUN, m->S));
    s.from = shift;
    for (int64_t n = 0; n < m->N; n++) {
        const char *x = image_plane(m, 0, n, c, t);
        for (int64_t r = 0; r < m->S; r += RUN) {
            const int64_t count = v_min_i64(RUN, m->S - r);
            run_sums(t, x + r * image_size(t), count, shift, &a, &b);
            add_run(&s, shift, a, b, count);
            shift += (float)(a / (double)count);
        }
    }
    put_moments(&s, &out[c], &out[m->C + c]);
}

/* Of rows [begin, end) and n vectors of channels from c on, the last one of w lanes: moments to
 * part[2][C]. n and w should be constants. */
VEC_INLINE void strip_moments(const images *m, int64_t begin, int64_t end, int64_t c, int n,
                              int64_t w, double *part, kn_dtype t)
{
    sums_around s[WIDTH] = { 0 };
    float shift[WIDTH] = { 0 }, sum[WIDTH] = { 0 }, squares[WIDTH] = { 0 };
    vf less[STRIP], a[STRIP], b[STRIP];
    const int64_t lanes = (n - 1) * KN_VW + w;
    for (int i = 0; i < STRIP; i++)
        less[i] = v_zero();
    for (int64_t first = 1, r = begin; r < end;) {
        const int64_t stop = v_min_i64(r + SHORT, end);
        for (int i = 0; i < n; i++)
            a[i] = b[i] = v_zero();
        for (int64_t k = r; k < stop; k++) {
            const void *x = image_row(m, 0, k, t);
            for (int i = 0; i < n; i++) {
                const vf d = v_get_n(t, x, c + i * KN_VW, i == n - 1 ? w : KN_VW) - less[i];
                a[i] += d;
                b[i] = v_fma(d, d, b[i]);
            }
        }
        const vf share = v_set1(1.0f / (float)(stop - r));
        for (int i = 0; i < n; i++) {
            v_store(shift + i * KN_VW, less[i]);
            v_store(sum + i * KN_VW, a[i]);
            v_store(squares + i * KN_VW, b[i]);
            less[i] = v_fma(a[i], share, less[i]);
        }
        if (first) { /* less 0 so far: once more, from its own mean */
            for (int64_t j = 0; j < lanes; j++)
                s[j].from = less[j / KN_VW][j % KN_VW];
            first = 0;
            continue;
        }
        for (int64_t j = 0; j < lanes; j++)
            add_run(&s[j], shift[j], sum[j], squares[j], stop - r);
        r = stop;
    }
    for (int64_t j = 0; j < lanes; j++)
        put_moments(&s[j], &part[c + j], &part[m->C + c + j]);
}

VEC_INLINE void block_moments(const images *m, int64_t block, double *sum, kn_dtype t)
{
    const int64_t begin = block * ROWS, end = v_min_i64(begin + ROWS, m->M);
    double *part = sum + block * 2 * m->C;
    int64_t c = 0;
    for (; c + WIDTH <= m->C; c += WIDTH)
        strip_moments(m, begin, end, c, STRIP, KN_VW, part, t);
    for (; c + KN_VW <= m->C; c += KN_VW)
        strip_moments(m, begin, end, c, 1, KN_VW, part, t);
    if (c < m->C)
        strip_moments(m, begin, end, c, 1, m->C - c, part, t);
}

/* ---- products -------------------------------------------------------------------------------- */

/* Where w lanes of each array lie, from element i on. */
typedef struct places {
    const void *x, *dy, *y;
    void *dadd;
} places;

VEC_INLINE void add_products(image_mask mask, kn_dtype t, const places *p, int64_t i, int64_t w,
                             vf mean, vf rstd, vf k, vf b, vf *dw, vf *db)
{
    const vf h = (v_get_n(t, p->x, i, w) - mean) * rstd;
    const vf g = image_masked(mask, t, p->dy, p->y, i, w, h, k, b);
    if (p->dadd)
        v_put_n(t, p->dadd, i, g, w);
    *dw = v_fma(g, h, *dw);
    *db += g;
}

VEC_INLINE void plane_products(const images *m, image_mask mask, int64_t c, const factors *f,
                               double *sum, kn_dtype t)
{
    const vf mean = v_set1(f->mean[c]), rstd = v_set1(f->rstd[c]), k = v_set1(f->w[c]),
             b = v_set1(f->b[c]);
    double first = 0, second = 0;
    for (int64_t n = 0; n < m->N; n++) {
        const places p = { image_plane(m, AT_X, n, c, t), image_plane(m, AT_DY, n, c, t),
                           image_plane(m, AT_Y, n, c, t), image_plane(m, AT_DADD, n, c, t) };
        for (int64_t r = 0; r < m->S; r += RUN) {
            const int64_t end = v_min_i64(r + RUN, m->S);
            vf dw = v_zero(), db = v_zero();
            for (int64_t i = r; i < end; i += KN_VW)
                add_products(mask, t, &p, i, v_min_i64(end - i, KN_VW), mean, rstd, k, b, &dw, &db);
            first += v_hsum(dw);
            second += v_hsum(db);
        }
    }
    sum[c] = first;
    sum[m->C + c] = second;
}

/* As strip_moments, of products. */
VEC_INLINE void strip_products(const images *m, image_mask mask, int64_t begin, int64_t end,
                               int64_t c, int n, int64_t w, const factors *f, double *part,
                               kn_dtype t)
{
    vf mean[STRIP], rstd[STRIP], k[STRIP], b[STRIP], dw[STRIP], db[STRIP];
    double first[WIDTH] = { 0 }, second[WIDTH] = { 0 };
    for (int i = 0; i < n; i++) {
        const int64_t lanes = i == n - 1 ? w : KN_VW, at = c + i * KN_VW;
        mean[i] = v_get_n(KN_F32, f->mean, at, lanes);
        rstd[i] = v_get_n(KN_F32, f->rstd, at, lanes);
        k[i] = v_get_n(KN_F32, f->w, at, lanes);
        b[i] = v_get_n(KN_F32, f->b, at, lanes);
    }
    for (int64_t r = begin; r < end; r += SHORT) {
        float one[WIDTH], two[WIDTH];
        for (int i = 0; i < n; i++)
            dw[i] = db[i] = v_zero();
        for (int64_t row = r; row < v_min_i64(r + SHORT, end); row++) {
            const places p = { image_row(m, AT_X, row, t), image_row(m, AT_DY, row, t),
                               image_row(m, AT_Y, row, t), image_row(m, AT_DADD, row, t) };
            for (int i = 0; i < n; i++)
                add_products(mask, t, &p, c + i * KN_VW, i == n - 1 ? w : KN_VW, mean[i], rstd[i],
                             k[i], b[i], &dw[i], &db[i]);
        }
        for (int i = 0; i < n; i++) {
            v_store(one + i * KN_VW, dw[i]);
            v_store(two + i * KN_VW, db[i]);
        }
        for (int j = 0; j < n * KN_VW; j++) {
            first[j] += (double)one[j];
            second[j] += (double)two[j];
        }
    }
    for (int64_t j = 0; j < (n - 1) * KN_VW + w; j++) {
        part[c + j] = first[j];
        part[m->C + c + j] = second[j];
    }
}

VEC_INLINE void block_products(const images *m, image_mask mask, int64_t block, const factors *f,
                               double *sum, kn_dtype t)
{
    const int64_t begin = block * ROWS, end = v_min_i64(begin + ROWS, m->M);
    double *part = sum + block * 2 * m->C;
    int64_t c = 0;
    for (; c + WIDTH <= m->C; c += WIDTH)
        strip_products(m, mask, begin, end, c, STRIP, KN_VW, f, part, t);
    for (; c + KN_VW <= m->C; c += KN_VW)
        strip_products(m, mask, begin, end, c, 1, KN_VW, f, part, t);
    if (c < m->C)
        strip_products(m, mask, begin, end, c, 1, m->C - c, f, part, t);
}

/* ---- channels or blocks of rows, shared by threads ------------------------------------------- */

typedef struct sums_call {
    const images *m;
    image_mask mask;
    const factors *f; /* NULL: moments */
    double *sum;
} sums_call;

VEC_INLINE void products_of(const sums_call *s, image_mask mask, int64_t i, kn_dtype t)
{
    if (s->m->last)
        block_products(s->m, mask, i, s->f, s->sum, t);
    else
        plane_products(s->m, mask, i, s->f, s->sum, t);
}

VEC_INLINE void sums_of(const sums_call *s, int64_t i, kn_dtype t)
{
    if (!s->f && s->m->last)
        block_moments(s->m, i, s->sum, t);
    else if (!s->f)
        plane_moments(s->m, i, s->sum, t);
    else if (s->mask == MASK_NONE)
        products_of(s, MASK_NONE, i, t);
    else if (s->mask == MASK_FROM_X)
        products_of(s, MASK_FROM_X, i, t);
    else
        products_of(s, MASK_FROM_Y, i, t);
}

static void some_sums(const void *ctx, int64_t begin, int64_t end)
{
    const sums_call *s = ctx;
    for (int64_t i = begin; i < end; i++)
        VEC_BY_DTYPE(s->m->t, sums_of, s, i);
}

static int64_t row_blocks(const images *m)
{
    return m->last ? (m->M + ROWS - 1) / ROWS : 1;
}

static void run_sums_of(const sums_call *s)
{
    const images *m = s->m;
    kn_each_range(image_threads(m), m->last ? row_blocks(m) : m->C, some_sums, s);
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
