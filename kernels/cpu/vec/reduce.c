/* kernels/cpu/vec/reduce.c: sums, means, extrema and their places over the last or the leading
 * dims. The source is seen as (A, R, C) with R reduced: rows where C = 1, columns otherwise. Sums
 * are built from blocks of fixed size, f32 inside a block and f64 across blocks, so that the order
 * of additions depends on the shape alone. */
#include "kernels/cpu/vec/rows.h"

#define ROW_CHUNK 32768 /* elements a task of a long row */
#define COL_ROWS  64    /* rows added in f32 */
#define COL_CHUNK 1024  /* rows a task */
#define COL_BLOCK 128   /* columns a task */

enum { FROM, TO }; /* the arrays of a walk */

typedef struct plan {
    const char *src;
    kn_dtype from, to;
    int64_t a, r, c; /* shape */
    int64_t sa, sr;  /* strides; C's is 1, or R's where c = 1 */
    int64_t size;    /* bytes an element of src */
    int64_t chunks;  /* tasks along R */
    void *dst;       /* dense [a, c] */
    double *partial; /* [a, mid, chunks, c], NULL: sums go to dst */
    double scale;    /* 1, or 1 over the number of terms for a mean */
    bool sums, max;  /* an extremum, if it doesn't sum: the largest or the smallest */
    /* A is summed, too: dst is [c], or, of channels between (A, mid, R), [mid] */
    bool outer;
    int64_t mid, sm; /* mid is 1 elsewhere */
} plan;

/* Whether the result is dense over the dims that it keeps. */
static bool is_dense(const vec_iter *it)
{
    int64_t step = 1;
    for (int i = it->ndim - 1; i >= 0; i--) {
        if (it->stride[TO][i] != 0 && it->stride[TO][i] != step)
            return false;
        step *= it->stride[TO][i] ? it->shape[i] : 1;
    }
    return true;
}

/* Reads the plan off the dims in one order, by_stride: the source's largest stride first; false
 * where the pattern is another one. */
static bool plan_in_order(plan *p, const kn_reduce_args *args, bool by_stride)
{
    vec_iter it;
    kn_array to = args->src; /* strides of the result are 0 where it is reduced */
    for (int d = 0; d < to.ndim; d++)
        to.stride[d] = args->dst.shape[d] == 1 ? 0 : args->dst.stride[d];
    vec_iter_dims(&it, 2, (const kn_array *const[]){ [FROM] = &args->src, [TO] = &to });
    if (by_stride)
        vec_iter_sort(&it);
    vec_iter_join(&it);
    const int n = it.ndim;
    const int64_t *stride = it.stride[FROM], *kept = it.stride[TO];
    if (!is_dense(&it) || n > 3 || stride[n - 1] != 1)
        return false;
    *p = (plan){ .src = args->src.data,
                 .from = args->src.dtype,
                 .to = args->dst.dtype,
                 .a = 1,
                 .c = 1,
                 .mid = 1,
                 .size = it.size[FROM],
                 .dst = args->dst.data };
    int i = 0;
    p->outer = n > 1 && !kept[0] && (!kept[1] || n > 2);
    if (kept[0] || p->outer) {
        p->a = it.shape[0];
        p->sa = stride[i++];
    }
    if (p->outer && kept[i]) {
        p->mid = it.shape[i];
        p->sm = stride[i++];
    }
    const bool reduces = i < n && !kept[i];
    if (p->outer && !reduces)
        return false;
    p->r = 1;
    if (reduces)
        p->r = it.shape[i], p->sr = stride[i++];
    else if (i == n) /* a row of columns, each of one number */
        p->c = p->a, p->a = 1;
    if (i < n && kept[i])
        p->c = it.shape[i++];
    p->sums = args->kind == KN_SUM || args->kind == KN_MEAN;
    p->max = args->kind == KN_MAX;
    p->scale = args->kind == KN_MEAN ? 1.0 / (double)(p->outer ? p->a * p->r : p->r) : 1.0;
    return i == n;
}

/* The dims as they come, else in the source's order of memory (channels-last images). */
static bool plan_make(plan *p, const kn_reduce_args *args)
{
    return plan_in_order(p, args, false) || plan_in_order(p, args, true);
}

/* What changes no result. */
static double neutral(const plan *p)
{
    return p->sums ? 0 : p->max ? -(double)__builtin_inff() : (double)__builtin_inff();
}

static void put(const plan *p, int64_t i, double sum)
{
    const float result = (float)(sum * p->scale);
    if (p->to == KN_I64)
        ((int64_t *)p->dst)[i] = (int64_t)sum;
    else if (p->to == KN_F32)
        ((float *)p->dst)[i] = result;
    else
        v_put_n(p->to, p->dst, i, v_set1(result), 1);
}

/* ---- extrema -------------------------------------------------------------------------------- */

/* The larger (or smaller) of x and best; NaN on either side stays. */
VEC_INLINE vf better(bool max, vf x, vf best)
{
    return v_sel(v_ne(x, x), x, max ? v_max(x, best) : v_min(x, best));
}

static float extremum_of(kn_dtype t, const void *x, int64_t n, bool max)
{
    if (t == KN_F32)
        return row_extremum(x, n, max, KN_F32);
    return t == KN_BF16 ? row_extremum(x, n, max, KN_BF16) : row_extremum(x, n, max, KN_F16);
}

/* best[j] = the extremum of it and x[., j] over some rows, for w <= COL_BLOCK columns */
VEC_INLINE void best_rows(double *best, bool max, const char *x, int64_t step, int64_t rows,
                          int64_t w, kn_dtype t)
{
    for (int64_t j = 0; j < w; j += KN_VW) {
        const int64_t n = v_min_i64(KN_VW, w - j);
        float out[KN_VW];
        for (int64_t i = 0; i < KN_VW; i++)
            out[i] = (float)best[j + (i < n ? i : 0)];
        vf acc = v_load(out);
        for (int64_t r = 0; r < rows; r++)
            acc = better(max, v_get_n(t, x + r * step, j, n), acc);
        v_store(out, acc);
        for (int64_t i = 0; i < n; i++)
            best[j + i] = out[i];
    }
}

/* ---- the first place of the largest ---------------------------------------------------------- */

/* Of n dense elements, whose largest is found first. */
VEC_INLINE int64_t row_place(const void *x, int64_t n, kn_dtype t)
{
    const vf best = v_set1(extremum_of(t, x, n, true));
    const bool nan = v_any(v_ne(best, best));
    int64_t i = 0;
    for (; i < n; i += KN_VW) {
        const vf v = v_get_n(t, x, i, n - i);
        if (v_any(nan ? v_ne(v, v) : v_eq(v, best)))
            break;
    }
    for (; i + 1 < n; i++) {
        const float v = v_get1(t, x, i)[0];
        if (nan ? v != v : v == best[0])
            break;
    }
    return i;
}

/* Of n columns of p, at most KN_VW, from x on. */
VEC_INLINE void column_places(int64_t *to, const plan *p, const char *x, int64_t n, kn_dtype t)
{
    vf best = v_get_n(t, x, 0, n);
    vi at = v_set1_i(0);
    for (int64_t r = 1; r < p->r; r++) {
        const vf v = v_get_n(t, x + r * p->sr * p->size, 0, n);
        const vm more = v_gt(v, best) | (v_ne(v, v) & v_eq(best, best));
        best = v_sel(more, v, best);
        at = v_sel_i(more, v_set1_i((int32_t)r), at);
    }
    for (int64_t j = 0; j < n; j++)
        to[j] = at[j];
}

/* Tasks [first, last): rows, or vectors of columns. */
static void find_places(const void *ctx, int64_t first, int64_t last)
{
    const plan *p = ctx;
    const int64_t across = (p->c + KN_VW - 1) / KN_VW;
    for (int64_t task = first; task < last; task++) {
        const int64_t a = task / across, c = task % across * KN_VW;
        const char *x = p->src + (a * p->sa + c) * p->size;
        int64_t *to = (int64_t *)p->dst + a * p->c + c;
        if (p->c > 1)
            VEC_BY_DTYPE(p->from, column_places, to, p, x, v_min_i64(KN_VW, p->c - c));
        else if (p->from == KN_F32)
            *to = row_place(x, p->r, KN_F32);
        else
            *to = row_place(x, p->r, p->from);
    }
}

/* ---- rows ----------------------------------------------------------------------------------- */

static double sum_of(kn_dtype t, const void *x, int64_t n)
{
    if (t == KN_F32)
        return row_sum(x, n, false, 0, KN_F32);
    if (t == KN_BOOL)
        return row_sum(x, n, false, 0, KN_BOOL);
    return t == KN_BF16 ? row_sum(x, n, false, 0, KN_BF16) : row_sum(x, n, false, 0, KN_F16);
}

/* Tasks [first, last): chunks of rows. */
static void sum_rows(const void *ctx, int64_t first, int64_t last)
{
    const plan *p = ctx;
    for (int64_t task = first; task < last; task++) {
        const int64_t a = task / p->chunks, begin = task % p->chunks * ROW_CHUNK;
        const int64_t n = p->chunks == 1 ? p->r : v_min_i64(ROW_CHUNK, p->r - begin);
        const int64_t at = a / p->mid * p->sa + a % p->mid * p->sm + begin;
        const char *x = p->src + at * p->size;
        const double sum = p->sums ? sum_of(p->from, x, n) : extremum_of(p->from, x, n, p->max);
        if (!p->partial)
            put(p, a, sum);
        else
            p->partial[task] = sum;
    }
}

/* ---- columns -------------------------------------------------------------------------------- */

/* sum[j] += over up to COL_ROWS rows of x[., j], for w <= COL_BLOCK columns */
VEC_INLINE void add_rows(double *sum, const char *x, int64_t step, int64_t rows, int64_t w,
                         kn_dtype t)
{
    float acc[COL_BLOCK] = { 0 };
    int64_t r = 0;
    for (; r + 4 <= rows; r += 4) {
        const char *x0 = x + r * step, *x1 = x0 + step, *x2 = x1 + step, *x3 = x2 + step;
        int64_t j = 0;
        for (; j + KN_VW <= w; j += KN_VW)
            v_store(acc + j, v_load(acc + j) + ((v_get(t, x0, j) + v_get(t, x1, j)) +
                                                (v_get(t, x2, j) + v_get(t, x3, j))));
        if (j < w) {
            const int64_t n = w - j;
            v_store_n(acc + j,
                      v_load_n(acc + j, n) + ((v_get_n(t, x0, j, n) + v_get_n(t, x1, j, n)) +
                                              (v_get_n(t, x2, j, n) + v_get_n(t, x3, j, n))),
                      n);
        }
    }
    for (; r < rows; r++)
        for (int64_t j = 0; j < w; j += KN_VW)
            v_put_n(KN_F32, acc, j,
                    v_get_n(KN_F32, acc, j, w - j) + v_get_n(t, x + r * step, j, w - j), w - j);
    for (int64_t j = 0; j < w; j++)
        sum[j] += acc[j];
}

static int64_t column_blocks(const plan *p)
{
    return (p->c + COL_BLOCK - 1) / COL_BLOCK;
}

/* Tasks [first, last): chunks of blocks of columns. */
static void sum_columns(const void *ctx, int64_t first, int64_t last)
{
    const plan *p = ctx;
    const int64_t blocks = column_blocks(p), step = p->sr * p->size;
    for (int64_t task = first; task < last; task++) {
        const int64_t c = task % blocks * COL_BLOCK, w = v_min_i64(COL_BLOCK, p->c - c);
        const int64_t chunk = task / blocks % p->chunks, a = task / blocks / p->chunks;
        const int64_t begin = chunk * COL_CHUNK, end = v_min_i64(begin + COL_CHUNK, p->r);
        const char *x = p->src + (a * p->sa + c) * p->size;
        double sum[COL_BLOCK];
        for (int64_t j = 0; j < w; j++)
            sum[j] = neutral(p);
        for (int64_t r = begin; r < end; r += COL_ROWS) {
            const int64_t rows = v_min_i64(COL_ROWS, end - r);
            if (p->from == KN_BOOL)
                add_rows(sum, x + r * step, step, rows, w, KN_BOOL);
            else if (p->sums)
                VEC_BY_DTYPE(p->from, add_rows, sum, x + r * step, step, rows, w);
            else
                VEC_BY_DTYPE(p->from, best_rows, sum, p->max, x + r * step, step, rows, w);
        }
        for (int64_t j = 0; j < w; j++) {
            if (!p->partial)
                put(p, a * p->c + c + j, sum[j]);
            else
                p->partial[(a * p->chunks + chunk) * p->c + c + j] = sum[j];
        }
    }
}

/* The chunks of each result, put together in order. */
static void join_partials(const plan *p)
{
    const int64_t results = p->outer ? p->mid : p->a, outer = p->outer ? p->a : 1;
    for (int64_t r = 0; r < results; r++)
        for (int64_t c = 0; c < p->c; c++) {
            double sum = neutral(p);
            for (int64_t a = 0; a < outer; a++)
                for (int64_t k = 0; k < p->chunks; k++) {
                    const double x = p->partial[((a * p->mid + r) * p->chunks + k) * p->c + c];
                    sum = p->sums ? sum + x : p->max ? VEC_MAX_(sum, x) : VEC_MIN_(sum, x);
                }
            put(p, r * p->c + c, sum);
        }
}

static kn_status run(plan *p, int threads)
{
    const int64_t chunk = p->c == 1 ? ROW_CHUNK : COL_CHUNK;
    p->chunks = (p->r + chunk - 1) / chunk;
    const size_t bytes = (size_t)(p->a * p->mid * p->chunks * p->c) * sizeof *p->partial;
    const bool partial = p->chunks > 1 || p->outer;
    if (partial) {
        p->partial = vec_scratch(bytes);
        if (!p->partial)
            return KN_FAILED;
    }
    if (p->c == 1)
        kn_each_range(threads, p->a * p->mid * p->chunks, sum_rows, p);
    else
        kn_each_range(threads, p->a * p->chunks * column_blocks(p), sum_columns, p);
    if (partial)
        join_partials(p);
    vec_scratch_end(p->partial, bytes);
    return KN_DONE;
}

kn_status VEC_FN(vec_reduce)(const void *args)
{
    const kn_reduce_args *a = args;
    plan p;
    const bool place = a->kind == KN_ARGMAX;
    const bool count = a->kind == KN_SUM && a->src.dtype == KN_BOOL && a->dst.dtype == KN_I64;
    const bool same = place || a->dst.dtype == a->src.dtype || a->dst.dtype == KN_F32;
    if (!count && (!vec_float(a->src.dtype) || !same))
        return KN_DECLINED;
    if (kn_array_numel(&a->src) == 0 || !plan_make(&p, a) || (place && p.r > INT32_MAX))
        return KN_DECLINED;
    const int threads = kn_threads_for(kn_array_numel(&a->src) * p.size);
    if (!place)
        return run(&p, threads);
    kn_each_range(threads, p.a * ((p.c + KN_VW - 1) / KN_VW), find_places, &p);
    return KN_DONE;
}
