/* kernels/cpu/vec/cumsum.c: running sums, products and the like along a dim, each in f64 from its
 * beginning to its end, as the reference joins them. */
#include "kernels/cpu/vec/iter.h"
#include "kernels/join.h"

#define LINES 4  /* lines along the last dim at once: each addition waits for the one before */
#define BLOCK 64 /* elements of a line, or lines side by side, at once */

typedef struct plan {
    const char *x;
    char *y;
    kn_dtype t;
    int64_t size, n, inner; /* x and y are [outer, n, inner], dense */
    bool reverse;
    kn_join by;
} plan;

/* Calls run(__VA_ARGS__, by) with by as a constant. */
#define BY_JOIN(by, run, ...)                                                                      \
    do {                                                                                           \
        if ((by) == KN_JOIN_SUM)                                                                   \
            run(__VA_ARGS__, KN_JOIN_SUM);                                                         \
        else if ((by) == KN_JOIN_PRODUCT)                                                          \
            run(__VA_ARGS__, KN_JOIN_PRODUCT);                                                     \
        else if ((by) == KN_JOIN_MAX)                                                              \
            run(__VA_ARGS__, KN_JOIN_MAX);                                                         \
        else if ((by) == KN_JOIN_MIN)                                                              \
            run(__VA_ARGS__, KN_JOIN_MIN);                                                         \
        else                                                                                       \
            run(__VA_ARGS__, KN_JOIN_LOG_SUM);                                                     \
    } while (0)

/* sum[k] runs on over y[k][0..w), for LINES lines. */
VEC_INLINE void run_lines(double *sum, float (*y)[BLOCK], int64_t w, bool reverse, kn_join by)
{
    double s[LINES];
    memcpy(s, sum, sizeof s);
    for (int64_t j = 0; j < w; j++)
        for (int k = 0; k < LINES; k++) {
            float *at = &y[k][reverse ? w - 1 - j : j];
            s[k] = kn_joined(by, s[k], *at);
            *at = (float)s[k];
        }
    memcpy(sum, s, sizeof s);
}

VEC_INLINE void some_lines(const plan *p, int64_t line, int64_t lines, kn_dtype t)
{
    double sum[LINES];
    float part[LINES][BLOCK] = { 0 };
    for (int k = 0; k < LINES; k++)
        sum[k] = kn_join_neutral(p->by);
    for (int64_t done = 0, w; done < p->n; done += w) {
        w = v_min_i64(BLOCK, p->n - done);
        const int64_t at = line * p->n + (p->reverse ? p->n - done - w : done);
        for (int64_t k = 0; k < lines; k++)
            vec_cast(part[k], KN_F32, p->x + (at + k * p->n) * p->size, w, t);
        if (p->reverse)
            BY_JOIN(p->by, run_lines, sum, part, w, true);
        else
            BY_JOIN(p->by, run_lines, sum, part, w, false);
        for (int64_t k = 0; k < lines; k++)
            vec_cast(p->y + (at + k * p->n) * p->size, t, part[k], w, KN_F32);
    }
}

/* Groups [begin, end) of LINES lines; the last may have fewer. */
static void line_groups(const void *ctx, int64_t begin, int64_t end)
{
    const plan *p = ctx;
    for (int64_t g = begin; g < end; g++)
        VEC_BY_DTYPE(p->t, some_lines, p, g * LINES, v_min_i64(LINES, p->inner - g * LINES));
}

/* The next element of each of BLOCK lines. */
VEC_INLINE void run_row(double *sum, float *y, kn_join by)
{
    for (int64_t j = 0; j < BLOCK; j++) {
        sum[j] = kn_joined(by, sum[j], y[j]);
        y[j] = (float)sum[j];
    }
}

/* w neighbouring lines from column c of [n, inner] on. */
VEC_INLINE void side_by_side(const plan *p, int64_t first, int64_t w, kn_dtype t)
{
    double sum[BLOCK];
    float part[BLOCK] = { 0 };
    for (int64_t j = 0; j < BLOCK; j++)
        sum[j] = kn_join_neutral(p->by);
    for (int64_t i = 0; i < p->n; i++) {
        const int64_t at = (first + (p->reverse ? p->n - 1 - i : i) * p->inner) * p->size;
        vec_cast(part, KN_F32, p->x + at, w, t);
        BY_JOIN(p->by, run_row, sum, part);
        vec_cast(p->y + at, t, part, w, KN_F32);
    }
}

/* Blocks [begin, end) of columns of all [n, inner]. */
static void column_blocks(const void *ctx, int64_t begin, int64_t end)
{
    const plan *p = ctx;
    const int64_t blocks = (p->inner + BLOCK - 1) / BLOCK;
    for (int64_t b = begin; b < end; b++) {
        const int64_t c = b % blocks * BLOCK;
        VEC_BY_DTYPE(p->t, side_by_side, p, b / blocks * p->n * p->inner + c,
                     v_min_i64(BLOCK, p->inner - c));
    }
}

/* Of i64, blocks [begin, end) of columns. */
VEC_INLINE void whole_blocks_as(const plan *p, int64_t begin, int64_t end, kn_join by)
{
    const int64_t blocks = (p->inner + BLOCK - 1) / BLOCK;
    for (int64_t b = begin; b < end; b++) {
        const int64_t c = b % blocks * BLOCK, w = v_min_i64(BLOCK, p->inner - c);
        const int64_t at = b / blocks * p->n * p->inner + c;
        int64_t so_far[BLOCK];
        for (int64_t j = 0; j < w; j++)
            so_far[j] = kn_join_neutral_int(by);
        int64_t row = at + (p->reverse ? p->n - 1 : 0) * p->inner;
        const int64_t down = p->reverse ? -p->inner : p->inner;
        for (int64_t i = 0; i < p->n; i++, row += down) {
            if (w == 1) {
                *so_far = kn_joined_int(by, *so_far, ((const int64_t *)p->x)[row]);
                ((int64_t *)p->y)[row] = *so_far;
                continue;
            }
            for (int64_t j = 0; j < w; j++) {
                so_far[j] = kn_joined_int(by, so_far[j], ((const int64_t *)p->x)[row + j]);
                ((int64_t *)p->y)[row + j] = so_far[j];
            }
        }
    }
}

static void whole_blocks(const void *ctx, int64_t begin, int64_t end)
{
    const plan *p = ctx;
    BY_JOIN(p->by, whole_blocks_as, p, begin, end);
}

kn_status VEC_FN(vec_cumsum)(const void *args)
{
    const kn_cumsum_args *a = args;
    plan p = { a->x.data,  a->y.data, a->x.dtype, .n = a->x.shape[a->dim], .reverse = a->reverse,
               .by = a->by };
    if ((!vec_float(p.t) && p.t != KN_I64) || a->y.dtype != p.t || !kn_array_contiguous(&a->x) ||
        !kn_array_contiguous(&a->y))
        return KN_DECLINED;
    const int64_t numel = kn_array_numel(&a->x);
    if (numel == 0)
        return KN_DONE;
    p.size = (int64_t)kn_dtype_size(p.t);
    p.inner = 1;
    for (int d = a->dim + 1; d < a->x.ndim; d++)
        p.inner *= a->x.shape[d];
    const int64_t outer = numel / p.n / p.inner, threads = kn_threads_for(numel * 16);
    if (p.t == KN_I64) {
        kn_each_range(threads, outer * ((p.inner + BLOCK - 1) / BLOCK), whole_blocks, &p);
    } else if (p.inner == 1) {
        p.inner = outer;
        kn_each_range(threads, (outer + LINES - 1) / LINES, line_groups, &p);
    } else {
        kn_each_range(threads, outer * ((p.inner + BLOCK - 1) / BLOCK), column_blocks, &p);
    }
    return KN_DONE;
}
