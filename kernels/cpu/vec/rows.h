/* kernels/cpu/vec/rows.h (private): arrays as rows of their last dim, sums and extrema of a row. A
 * sum is built from blocks of fixed size, f32 inside a block and f64 across blocks, so that its
 * bits depend on the row alone. */
#ifndef KNAP_KERNELS_CPU_VEC_ROWS_H
#define KNAP_KERNELS_CPU_VEC_ROWS_H

#include "kernels/cpu/vec/iter.h"

enum { ROW_BLOCK = 1024 /* elements added in f32: 4 KiB, which stay in the first-level cache */ };

/* An array seen as rows of its last dim; leading dims that continue each other are one. */
typedef struct vec_rows {
    char *data;
    int64_t rows, cols, shape[KN_MAX_DIMS], stride[KN_MAX_DIMS]; /* strides in elements */
    int ndim;                                                    /* leading dims, at least 1 */
} vec_rows;

/* false where the last dim isn't dense. */
static inline bool vec_rows_of(const kn_array *a, vec_rows *r)
{
    const int last = a->ndim - 1;
    if (last < 0 || (a->stride[last] != 1 && a->shape[last] != 1))
        return false;
    vec_iter it;
    kn_array leading = *a;
    leading.ndim = last;
    vec_iter_dims(&it, 1, (const kn_array *const[]){ &leading });
    vec_iter_join(&it);
    *r = (vec_rows){ a->data, it.total, a->shape[last], .ndim = it.ndim };
    memcpy(r->shape, it.shape, sizeof r->shape);
    memcpy(r->stride, it.stride[0], sizeof r->stride);
    return true;
}

/* Row n of an array of elements of size bytes. */
static inline void *vec_row(const vec_rows *r, int64_t n, int64_t size)
{
    int64_t at = 0;
    for (int i = r->ndim - 1; i > 0; n /= r->shape[i--])
        at += n % r->shape[i] * r->stride[i];
    return r->data + (at + n * r->stride[0]) * size;
}

/* sum + x, or with square sum + (x - shift)^2, of w lanes. */
VEC_INLINE vf row_term(vf sum, vf x, int64_t w, bool square, vf shift)
{
    const vf d = square ? x - shift : x;
    const vf some = square && w < KN_VW ? v_first_lanes(d, v_zero(), w) : d; /* x is 0 beyond */
    return square ? v_fma(some, some, sum) : sum + some;
}

VEC_INLINE double row_sum(const void *x, int64_t n, bool square, float shift, kn_dtype t)
{
    const vf m = v_set1(shift);
    double sum = 0;
    for (int64_t b = 0; b < n; b += ROW_BLOCK) {
        const int64_t end = v_min_i64(b + ROW_BLOCK, n);
        vf s0 = v_zero(), s1 = s0, s2 = s0, s3 = s0;
        int64_t i = b;
        for (; i + 4 * KN_VW <= end; i += 4 * KN_VW) {
            s0 = row_term(s0, v_get(t, x, i), KN_VW, square, m);
            s1 = row_term(s1, v_get(t, x, i + KN_VW), KN_VW, square, m);
            s2 = row_term(s2, v_get(t, x, i + 2 * KN_VW), KN_VW, square, m);
            s3 = row_term(s3, v_get(t, x, i + 3 * KN_VW), KN_VW, square, m);
        }
        for (; i < end; i += KN_VW)
            s0 = row_term(s0, v_get_n(t, x, i, end - i), end - i, square, m);
        sum += v_hsum((s0 + s1) + (s2 + s3));
    }
    return sum;
}

/* The largest or the smallest of n >= 1 elements; NaN where there is one. The last vector takes
 * some of them again. */
VEC_INLINE float row_extremum(const void *x, int64_t n, bool max, kn_dtype t)
{
    vf best[4];
    vm nan = v_ne(v_zero(), v_zero());
    const vf first = v_get1(t, x, 0);
    int64_t i = 0;
    for (int k = 0; k < 4; k++)
        best[k] = first;
    for (; i + 4 * KN_VW <= n; i += 4 * KN_VW)
        for (int k = 0; k < 4; k++) {
            const vf v = v_get(t, x, i + k * KN_VW);
            nan |= v_ne(v, v);
            best[k] = max ? v_max(v, best[k]) : v_min(v, best[k]);
        }
    for (; i < n; i += KN_VW) {
        const vf v = n < KN_VW ? v_first_lanes(v_get_n(t, x, 0, n), first, n)
                               : v_get(t, x, v_min_i64(i, n - KN_VW));
        nan |= v_ne(v, v);
        best[0] = max ? v_max(v, best[0]) : v_min(v, best[0]);
    }
    if (v_any(nan))
        return __builtin_nanf("");
    for (int k = 1; k < 4; k++)
        best[0] = max ? v_max(best[k], best[0]) : v_min(best[k], best[0]);
    return max ? v_hmax(best[0]) : v_hmin(best[0]);
}

#endif
