/* kernels/cpu/vec/iter.h (private): walks up to four equally shaped strided arrays in runs along
 * their innermost dim. Dims are ordered by the first array's strides (the output), joined where
 * all arrays allow, and the elements are divided evenly among the threads. */
#ifndef KNAP_KERNELS_CPU_VEC_ITER_H
#define KNAP_KERNELS_CPU_VEC_ITER_H

#include "kernels/cpu/vec/vec.h"

#define VEC_OPERANDS 4

typedef struct vec_iter vec_iter;

/* One run: p[k] points at its first element of array k, n elements, ctx as given. The innermost
 * strides are those of the iterator. */
typedef void (*vec_run_fn)(const vec_iter *it, char *const p[VEC_OPERANDS], int64_t n,
                           const void *ctx);
/* The elements [at, at + n) of a plane, which is the last two dims. */
typedef void (*vec_plane_fn)(const vec_iter *it, char *const plane[VEC_OPERANDS], int64_t at,
                             int64_t n, vec_run_fn fn, const void *ctx);

struct vec_iter {
    int n, ndim;                               /* arrays, dims; ndim >= 1 */
    int64_t shape[KN_MAX_DIMS];                /* shape[ndim - 1] is the run */
    int64_t stride[VEC_OPERANDS][KN_MAX_DIMS]; /* elements */
    char *base[VEC_OPERANDS];
    int64_t size[VEC_OPERANDS]; /* bytes an element */
    int64_t total;              /* elements */
    vec_plane_fn plane;         /* takes planes of short runs; NULL: vec_iter_range chooses */
};

/* Whether dim i + 1 continues dim i in every array. */
static inline bool vec_iter_joins(const vec_iter *it, int i)
{
    for (int k = 0; k < it->n; k++)
        if (it->stride[k][i] != it->stride[k][i + 1] * it->shape[i + 1])
            return false;
    return true;
}

static inline void vec_iter_swap(vec_iter *it, int i, int j)
{
    const int64_t s = it->shape[i];
    it->shape[i] = it->shape[j];
    it->shape[j] = s;
    for (int k = 0; k < it->n; k++) {
        const int64_t t = it->stride[k][i];
        it->stride[k][i] = it->stride[k][j];
        it->stride[k][j] = t;
    }
}

/* The dims of a[0..n-1], which have one shape, but for those of size 1. */
static inline void vec_iter_dims(vec_iter *it, int n, const kn_array *const a[])
{
    *it = (vec_iter){ .n = n, .total = kn_array_numel(a[0]) };
    for (int k = 0; k < n; k++) {
        it->base[k] = a[k]->data;
        it->size[k] = (int64_t)kn_dtype_size(a[k]->dtype);
    }
    for (int i = 0; i < a[0]->ndim; i++) {
        if (a[0]->shape[i] == 1)
            continue;
        it->shape[it->ndim] = a[0]->shape[i];
        for (int k = 0; k < n; k++)
            it->stride[k][it->ndim] = a[k]->stride[i];
        it->ndim++;
    }
}

/* The largest stride of the first array comes first; stable. */
static inline void vec_iter_sort(vec_iter *it)
{
    for (int i = 1; i < it->ndim; i++)
        for (int j = i; j > 0 && it->stride[0][j] > it->stride[0][j - 1]; j--)
            vec_iter_swap(it, j, j - 1);
}

/* Dims that continue each other in every array become one; there is one dim at least. */
static inline void vec_iter_join(vec_iter *it)
{
    for (int i = it->ndim - 2; i >= 0; i--) {
        if (!vec_iter_joins(it, i))
            continue;
        it->shape[i] *= it->shape[i + 1];
        for (int k = 0; k < it->n; k++)
            it->stride[k][i] = it->stride[k][i + 1];
        for (int j = i + 1; j < it->ndim - 1; j++) {
            it->shape[j] = it->shape[j + 1];
            for (int k = 0; k < it->n; k++)
                it->stride[k][j] = it->stride[k][j + 1];
        }
        it->ndim--;
    }
    if (it->ndim > 0)
        return;
    it->ndim = 1;
    it->shape[0] = 1;
    for (int k = 0; k < it->n; k++)
        it->stride[k][0] = 1;
}

/* The walk over a[0..n-1]. */
static inline void vec_iter_make(vec_iter *it, int n, const kn_array *const a[])
{
    vec_iter_dims(it, n, a);
    vec_iter_sort(it);
    vec_iter_join(it);
}

/* The innermost stride of array k. */
static inline int64_t vec_iter_inner(const vec_iter *it, int k)
{
    return it->stride[k][it->ndim - 1];
}

/* d[r dr + j ds] = s[r sr + j ss] for the elements [at, at + n) of rows of w, counted through. */
#define VEC_COPY_ROWS(type, ds, ss)                                                                \
    for (int64_t done = 0, j = at % w, r = at / w, m; done < n; done += m, j = 0, r++) {           \
        m = v_min_i64(w - j, n - done);                                                            \
        type *restrict d = (type *)(void *)to + r * dr + j * (ds);                                 \
        const type *restrict s = (const type *)(const void *)from + r * sr + j * (ss);             \
        for (int64_t i = 0; i < m; i++, d += (ds), s += (ss))                                      \
            *d = *s;                                                                               \
    }
#define VEC_COPY_ROWS_OF(type)                                                                     \
    do {                                                                                           \
        if (ds == 1 && ss == 1)                                                                    \
            VEC_COPY_ROWS(type, 1, 1)                                                              \
        else if (ds == 1 && ss == 0)                                                               \
            VEC_COPY_ROWS(type, 1, 0)                                                              \
        else if (ds == 1)                                                                          \
            VEC_COPY_ROWS(type, 1, ss)                                                             \
        else                                                                                       \
            VEC_COPY_ROWS(type, ds, ss)                                                            \
    } while (0)

/* Elements of 1, 2, 4 or 8 bytes; rows too short for a call each. */
static __attribute__((noinline, unused)) void vec_copy_rows(char *to, int64_t dr, int64_t ds,
                                                            const char *from, int64_t sr,
                                                            int64_t ss, int64_t size, int64_t w,
                                                            int64_t at, int64_t n)
{
    switch (size) {
    case 1:
        VEC_COPY_ROWS_OF(uint8_t);
        break;
    case 2:
        VEC_COPY_ROWS_OF(uint16_t);
        break;
    case 4:
        VEC_COPY_ROWS_OF(uint32_t);
        break;
    default:
        VEC_COPY_ROWS_OF(uint64_t);
    }
}

enum {
    VEC_SHORT = 64 /* elements of a run so short that many are taken at once */,
    VEC_PACK = 512
};

static inline bool vec_iter_short(const vec_iter *it)
{
    return it->ndim > 1 && it->shape[it->ndim - 1] <= VEC_SHORT;
}

/* Runs are short, and the output is dense over them. */
static inline bool vec_iter_packs(const vec_iter *it)
{
    const int d = it->ndim - 1;
    return vec_iter_short(it) && it->stride[0][d] == 1 && it->stride[0][d - 1] == it->shape[d];
}

/* The elements [at, at + n) of a plane of short runs: inputs that aren't dense over it are copied.
 * One that repeats a row is copied once: held has the row in room[k]. */
static inline void vec_iter_plane(const vec_iter *it, char *const plane[VEC_OPERANDS], int64_t at,
                                  int64_t n, vec_run_fn fn, const void *ctx)
{
    const int d = it->ndim - 1;
    const int64_t w = it->shape[d];
    vec_iter dense = *it;
    uint64_t room[VEC_OPERANDS][VEC_PACK];
    bool held[VEC_OPERANDS] = { false };
    for (int64_t m; n > 0; at += m, n -= m) {
        m = v_min_i64(n, (VEC_PACK / w - 1) * w + (w - at % w)); /* ends with a row */
        char *p[VEC_OPERANDS];
        for (int k = 0; k < it->n; k++) {
            const int64_t row = it->stride[k][d - 1], step = it->stride[k][d];
            const char *rows = plane[k] + at / w * row * it->size[k];
            p[k] = plane[k] + (at / w * row + at % w * step) * it->size[k];
            if (row == w * step)
                continue;
            dense.stride[k][d] = 1;
            p[k] = (char *)room[k] + at % w * it->size[k];
            if (!held[k])
                vec_copy_rows((char *)room[k], w, 1, rows, row, step, it->size[k], w, at % w, m);
            held[k] = row == 0 && at % w == 0;
        }
        fn(&dense, p, m, ctx);
    }
}

/* Elements [begin, end) of the walk, run by run, or by planes of short runs. */
static inline void vec_iter_range(const vec_iter *it, int64_t begin, int64_t end, vec_run_fn fn,
                                  const void *ctx)
{
    const vec_plane_fn plane = it->plane ? it->plane : vec_iter_packs(it) ? vec_iter_plane : NULL;
    const int outer = it->ndim - (plane ? 2 : 1);
    const int64_t size = plane ? it->shape[outer] * it->shape[outer + 1] : it->shape[outer];
    int64_t at[KN_MAX_DIMS], rest = begin / size, first = begin % size;
    char *p[VEC_OPERANDS] = { 0 };
    for (int k = 0; k < it->n; k++)
        p[k] = it->base[k];
    for (int i = outer - 1; i >= 0; i--) {
        at[i] = rest % it->shape[i];
        rest /= it->shape[i];
        for (int k = 0; k < it->n; k++)
            p[k] += at[i] * it->stride[k][i] * it->size[k];
    }
    for (int64_t n; begin < end; begin += n, first = 0) {
        n = v_min_i64(size - first, end - begin);
        if (plane) {
            plane(it, p, first, n, fn, ctx);
        } else {
            char *run[VEC_OPERANDS] = { 0 };
            for (int k = 0; k < it->n; k++)
                run[k] = p[k] + first * it->stride[k][outer] * it->size[k];
            fn(it, run, n, ctx);
        }
        for (int i = outer - 1; i >= 0; i--) {
            const int64_t back = ++at[i] == it->shape[i] ? it->shape[i] : 0;
            for (int k = 0; k < it->n; k++)
                p[k] += (1 - back) * it->stride[k][i] * it->size[k];
            if (!back)
                break;
            at[i] = 0;
        }
    }
}

typedef struct vec_iter_call {
    const vec_iter *it;
    vec_run_fn fn;
    const void *ctx;
} vec_iter_call;

/* Groups [begin, end) of 64 elements. */
static void vec_iter_groups(const void *ctx, int64_t begin, int64_t end)
{
    const vec_iter_call *c = ctx;
    vec_iter_range(c->it, begin * 64, v_min_i64(end * 64, c->it->total), c->fn, c->ctx);
}

/* The whole walk on as many threads as bytes of work deserve; cuts fall on multiples of 64. */
static inline void vec_iter_run(const vec_iter *it, int64_t bytes, vec_run_fn fn, const void *ctx)
{
    if (it->total == 0)
        return;
    const int64_t threads = kn_threads_for(bytes);
    if (threads <= 1) {
        vec_iter_range(it, 0, it->total, fn, ctx);
        return;
    }
    kn_each_range(threads, (it->total + 63) / 64, vec_iter_groups, &(vec_iter_call){ it, fn, ctx });
}

/* n elements with a stride as dense ones: p itself, or copied to buf. */
static inline const void *vec_dense_run(const void *p, int64_t stride, int64_t size, int64_t n,
                                        void *buf)
{
    if (stride == 1)
        return p;
    vec_copy_rows(buf, 0, 1, p, 0, stride, size, n, 0, n);
    return buf;
}

/* Whether the dims of a in this order make one run of a common stride; 1 where all have size 1. */
static inline bool vec_joins(const kn_array *a, const int *dims, int n, int64_t *stride)
{
    vec_iter it;
    kn_array some = *a;
    some.ndim = n;
    for (int i = 0; i < n; i++)
        some.shape[i] = a->shape[dims[i]], some.stride[i] = a->stride[dims[i]];
    vec_iter_dims(&it, 1, (const kn_array *const[]){ &some });
    vec_iter_join(&it);
    *stride = it.stride[0][0];
    return it.ndim == 1;
}

#endif
