/* kernels/cpu/vec/interpolate.c: dense images of f32 in another size, and their gradient: rows on
 * several threads, the places and weights of columns computed once. The arithmetic is the
 * reference's, bit for bit. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/grid.h"
#include "kernels/memory.h"

static bool takes(const kn_array *x, const kn_array *y)
{
    return x->dtype == KN_F32 && y->dtype == KN_F32 && kn_array_contiguous(x) &&
           kn_array_contiguous(y);
}

/* ---- forward --------------------------------------------------------------------------------- */

typedef struct forward {
    const float *x;
    float *y;
    const kn_grid_place *column; /* of each column of y */
    kn_grid_dim rows, columns;
} forward;

VEC_INLINE double along(const float *row, kn_grid_place w)
{
    const double left = (double)row[w.first];
    return w.part == 0 ? left : (1 - w.part) * left + w.part * (double)row[w.first + 1];
}

/* Rows of y, counted over all planes. */
static void make_rows(const void *ctx, int64_t begin, int64_t end)
{
    const forward *f = ctx;
    const int64_t W = f->columns.read, Q = f->columns.made;
    for (int64_t r = begin; r < end; r++) {
        const kn_grid_place h = kn_grid_at(&f->rows, r % f->rows.made);
        const float *above = f->x + (r / f->rows.made * f->rows.read + h.first) * W;
        float *y = f->y + r * Q;
        for (int64_t q = 0; q < Q; q++) {
            double v = along(above, f->column[q]);
            if (h.part != 0)
                v = (1 - h.part) * v + h.part * along(above + W, f->column[q]);
            y[q] = (float)v;
        }
    }
}

kn_status VEC_FN(vec_interpolate)(const void *args)
{
    const kn_interpolate_args *a = args;
    if (!takes(&a->x, &a->y))
        return KN_DECLINED;
    forward f = { .x = a->x.data,
                  .y = a->y.data,
                  .rows = kn_grid_dim_of(&a->grid, a->linear, 0, &a->x, &a->y),
                  .columns = kn_grid_dim_of(&a->grid, a->linear, 1, &a->x, &a->y) };
    const int64_t Q = f.columns.made, rows = a->y.shape[0] * a->y.shape[1] * f.rows.made;
    kn_grid_place *column = kn_host_alloc((size_t)Q * sizeof *column);
    if (!column)
        return KN_FAILED;
    for (int64_t q = 0; q < Q; q++)
        column[q] = kn_grid_at(&f.columns, q);
    f.column = column;
    kn_each_range(kn_threads_for(rows * Q * 16), rows, make_rows, &f);
    kn_host_free(column);
    return KN_DONE;
}

/* ---- gradient -------------------------------------------------------------------------------- */

/* Along one dim: element h has weight[at[h] .. at[h + 1]) at the positions from[h], from[h] + 1...
 */
typedef struct shares {
    int64_t *from, *at;
    double *weight;
} shares;

static void shares_free(shares *s)
{
    kn_host_free(s->from);
    kn_host_free(s->weight);
}

static bool shares_make(shares *s, const kn_grid_dim *d)
{
    int64_t total = 0;
    *s = (shares){ .from = kn_host_alloc((size_t)(2 * d->read + 1) * sizeof *s->from) };
    if (!s->from)
        return false;
    s->at = s->from + d->read;
    for (int64_t h = 0; h < d->read; h++) {
        const int64_t to = kn_grid_to(d, h);
        s->from[h] = kn_grid_from(d, h);
        s->at[h] = total;
        total += to > s->from[h] ? to - s->from[h] : 0;
    }
    s->at[d->read] = total;
    s->weight = kn_host_alloc((size_t)(total + 1) * sizeof *s->weight);
    for (int64_t h = 0; s->weight && h < d->read; h++)
        for (int64_t i = s->at[h]; i < s->at[h + 1]; i++)
            s->weight[i] = kn_grid_share(d, s->from[h] + i - s->at[h], h);
    return s->weight != NULL;
}

typedef struct backward {
    float *dx;
    const float *dy;
    kn_grid_dim rows, columns;
    shares row, column;
} backward;

/* The shares of dy that element w of a row gets, whose own are row->weight[begin..end). */
VEC_INLINE float element(const backward *b, const float *plane, int64_t h, int64_t w)
{
    const shares *row = &b->row, *column = &b->column;
    double sum = 0;
    for (int64_t i = row->at[h]; i < row->at[h + 1]; i++) {
        const double share = row->weight[i];
        const float *dy = plane + (row->from[h] + i - row->at[h]) * b->columns.made;
        for (int64_t k = column->at[w]; share != 0 && k < column->at[w + 1]; k++) {
            const double by = share * column->weight[k];
            if (by != 0)
                sum += by * (double)dy[column->from[w] + k - column->at[w]];
        }
    }
    return (float)sum;
}

static void grad_rows(const void *ctx, int64_t begin, int64_t end)
{
    const backward *b = ctx;
    for (int64_t r = begin; r < end; r++) {
        const float *plane = b->dy + r / b->rows.read * b->rows.made * b->columns.made;
        for (int64_t w = 0; w < b->columns.read; w++)
            b->dx[r * b->columns.read + w] = element(b, plane, r % b->rows.read, w);
    }
}

kn_status VEC_FN(vec_interpolate_grad)(const void *args)
{
    const kn_interpolate_grad_args *a = args;
    if (!takes(&a->dx, &a->dy))
        return KN_DECLINED;
    backward b = { .dx = a->dx.data,
                   .dy = a->dy.data,
                   .rows = kn_grid_dim_of(&a->grid, a->linear, 0, &a->dx, &a->dy),
                   .columns = kn_grid_dim_of(&a->grid, a->linear, 1, &a->dx, &a->dy) };
    const int64_t rows = a->dx.shape[0] * a->dx.shape[1] * b.rows.read;
    const int64_t work = a->dx.shape[0] * a->dx.shape[1] *
                         (b.rows.read * b.columns.read + b.rows.made * b.columns.made);
    const bool ok = shares_make(&b.row, &b.rows) && shares_make(&b.column, &b.columns);
    if (ok)
        kn_each_range(kn_threads_for(work * 32), rows, grad_rows, &b);
    shares_free(&b.row);
    shares_free(&b.column);
    return ok ? KN_DONE : KN_FAILED;
}
