/* kernels/cpu/vec/cumsum.c: running sums along a dim, each in f64 from its beginning to its end, as
 * the reference adds them. */
#include "kernels/cpu/vec/iter.h"

#define LINES 4  /* lines along the last dim at once: each addition waits for the one before */
#define BLOCK 64 /* elements of a line, or lines side by side, at once */

typedef struct plan {
    const char *x;
    char *y;
    kn_dtype t;
    int64_t size, n, inner; /* x and y are [outer, n, inner], dense */
    bool reverse;
} plan;

/* sum[k] runs on over x[k][0..w), for LINES lines; y may be x. */
VEC_INLINE void run_lines(double *sum, float (*y)[BLOCK], int64_t w, bool reverse)
{
    double s[LINES];
    memcpy(s, sum, sizeof s);
    for (int64_t j = 0; j < w; j++)
        for (int k = 0; k < LINES; k++) {
            float *at = &y[k][reverse ? w - 1 - j : j];
            s[k] += *at;
            *at = (float)s[k];
        }
    memcpy(sum, s, sizeof s);
}

VEC_INLINE void some_lines(const plan *p, int64_t line, int64_t lines, kn_dtype t)
{
    double sum[LINES] = { 0 };
    float part[LINES][BLOCK] = { 0 };
    for (int64_t done = 0, w; done < p->n; done += w) {
        w = v_min_i64(BLOCK, p->n - done);
        const int64_t at = line * p->n + (p->reverse ? p->n - done - w : done);
        for (int64_t k = 0; k < lines; k++)
            vec_cast(part[k], KN_F32, p->x + (at + k * p->n) * p->size, w, t);
        p->reverse ? run_lines(sum, part, w, true) : run_lines(sum, part, w, false);
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

/* w neighbouring lines from column c of [n, inner] on. */
VEC_INLINE void side_by_side(const plan *p, int64_t first, int64_t w, kn_dtype t)
{
    double sum[BLOCK] = { 0 };
    float part[BLOCK] = { 0 };
    for (int64_t i = 0; i < p->n; i++) {
        const int64_t at = (first + (p->reverse ? p->n - 1 - i : i) * p->inner) * p->size;
        vec_cast(part, KN_F32, p->x + at, w, t);
        for (int64_t j = 0; j < BLOCK; j++) {
            sum[j] += part[j];
            part[j] = (float)sum[j];
        }
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

kn_status VEC_FN(vec_cumsum)(const void *args)
{
    const kn_cumsum_args *a = args;
    plan p = { a->x.data, a->y.data, a->x.dtype, .n = a->x.shape[a->dim], .reverse = a->reverse };
    if (!vec_float(p.t) || a->y.dtype != p.t || !kn_array_contiguous(&a->x) ||
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
    if (p.inner == 1) {
        p.inner = outer;
        kn_each_range(threads, (outer + LINES - 1) / LINES, line_groups, &p);
    } else {
        kn_each_range(threads, outer * ((p.inner + BLOCK - 1) / BLOCK), column_blocks, &p);
    }
    return KN_DONE;
}
