/* kernels/cpu/vec/gather.c: elements picked along a dim by an index of their own each, and put or
 * joined there, where all arrays are dense and equal but in that dim. An index may be the same for
 * whole slices. Indices are checked first; if one is bad the reference takes the call and reports
 * it. */
#include "kernels/cpu/vec/iter.h"

/* full [outer, n, inner]; picked and index [outer, count, inner], or [count] by step for slices. */
typedef struct plan {
    int64_t outer, n, count, inner, size; /* size: bytes an element */
    const void *index;
    bool wide; /* i64 */
    char *full, *picked;
    bool slices, join;
    int64_t step;
    kn_join by;
} plan;

VEC_INLINE int64_t index_at(const void *index, int64_t i, bool wide)
{
    return wide ? ((const int64_t *)index)[i] : ((const int32_t *)index)[i];
}

/* Whether every index lies in [0, n). */
VEC_INLINE bool inside_as(const plan *p, bool wide)
{
    const int64_t count = p->slices ? p->count : p->outer * p->count * p->inner;
    const int64_t step = p->slices ? p->step : 1;
    uint64_t bad = 0;
    if (step == 1)
        for (int64_t i = 0; i < count; i++)
            bad |= (uint64_t)index_at(p->index, i, wide) >= (uint64_t)p->n;
    else
        for (int64_t i = 0; i < count; i++)
            bad |= (uint64_t)index_at(p->index, i * step, wide) >= (uint64_t)p->n;
    return !bad;
}

/* Whether index is the same for all elements of a slice. */
static bool by_slice(const kn_array *index, int dim)
{
    for (int d = 0; d < index->ndim; d++)
        if (d != dim && index->shape[d] != 1 && index->stride[d] != 0)
            return false;
    return true;
}

static bool plan_make(plan *p, const kn_array *full, const kn_array *picked, const kn_array *index,
                      int dim)
{
    if (full->dtype != picked->dtype || !kn_array_contiguous(full) ||
        !kn_array_contiguous(picked) || !(by_slice(index, dim) || kn_array_contiguous(index)))
        return false;
    *p = (plan){ .outer = 1,
                 .n = full->shape[dim],
                 .count = index->shape[dim],
                 .inner = 1,
                 .size = (int64_t)kn_dtype_size(full->dtype),
                 .index = index->data,
                 .wide = index->dtype == KN_I64,
                 .full = full->data,
                 .picked = picked->data,
                 .slices = by_slice(index, dim),
                 .step = index->stride[dim] };
    for (int i = 0; i < full->ndim; i++) {
        if (i != dim && index->shape[i] != full->shape[i])
            return false;
        if (i < dim)
            p->outer *= full->shape[i];
        if (i > dim)
            p->inner *= full->shape[i];
    }
    return p->wide ? inside_as(p, true) : inside_as(p, false);
}

/* Calls run(__VA_ARGS__, size, wide) with both as constants, but for the size of slices. */
#define BY_SIZE(p, run, ...)                                                                       \
    do {                                                                                           \
        if ((p)->wide && (p)->size == 4)                                                           \
            run(__VA_ARGS__, 4, true);                                                             \
        else if ((p)->wide && (p)->size == 8)                                                      \
            run(__VA_ARGS__, 8, true);                                                             \
        else if ((p)->size == 2)                                                                   \
            run(__VA_ARGS__, 2, (p)->wide);                                                        \
        else if ((p)->size == 4)                                                                   \
            run(__VA_ARGS__, 4, false);                                                            \
        else if ((p)->size == 8)                                                                   \
            run(__VA_ARGS__, 8, false);                                                            \
        else if ((p)->size == 1)                                                                   \
            run(__VA_ARGS__, 1, (p)->wide);                                                        \
        else                                                                                       \
            run(__VA_ARGS__, (p)->size, (p)->wide);                                                \
    } while (0)

/* ---- gather ---------------------------------------------------------------------------------- */

/* Slices [begin, end) of outer and count; neighbours go at once. */
VEC_INLINE void gather_slices(const plan *p, int64_t begin, int64_t end, int64_t size, bool wide)
{
    int64_t i = begin % p->count;
    const char *full = p->full + begin / p->count * p->n * size;
    for (int64_t r = begin, w; r < end; r += w) {
        const int64_t at = index_at(p->index, i * p->step, wide);
        const int64_t most = v_min_i64(p->count - i, end - r);
        for (w = 1; w < most && index_at(p->index, (i + w) * p->step, wide) == at + w;)
            w++;
        if (w == 1)
            memcpy(p->picked + r * size, full + at * size, (size_t)size);
        else
            memcpy(p->picked + r * size, full + at * size, (size_t)(w * size));
        if ((i += w) == p->count) {
            i = 0;
            full += p->n * size;
        }
    }
}

/* Rows [begin, end) of outer and count: inner elements each. */
VEC_INLINE void gather_elements(const plan *p, int64_t begin, int64_t end, int64_t size, bool wide)
{
    for (int64_t r = begin; r < end; r++) {
        const char *full = p->full + r / p->count * p->n * p->inner * size;
        for (int64_t j = 0, to = r * p->inner; j < p->inner; j++, to++) {
            const int64_t from = index_at(p->index, to, wide) * p->inner + j;
            memcpy(p->picked + to * size, full + from * size, (size_t)size);
        }
    }
}

static void gather_rows(const void *ctx, int64_t begin, int64_t end)
{
    const plan *p = ctx;
    if (p->slices)
        BY_SIZE(p, gather_slices, p, begin, end);
    else
        BY_SIZE(p, gather_elements, p, begin, end);
}

kn_status VEC_FN(vec_gather)(const void *args)
{
    const kn_gather_args *a = args;
    plan p;
    if (!plan_make(&p, &a->src, &a->dst, &a->index, a->dim))
        return KN_DECLINED;
    if (p.slices) {
        p.size *= p.inner;
        p.inner = 1;
    }
    const int64_t rows = p.outer * p.count, numel = rows * p.inner;
    if (numel * p.size > 0)
        kn_each_range(kn_threads_for(numel * v_max_i64(16, 2 * p.size)), rows, gather_rows, &p);
    return KN_DONE;
}

/* ---- scatter --------------------------------------------------------------------------------- */

VEC_INLINE float joined(kn_join by, float a, float b)
{
    switch (by) {
    case KN_JOIN_PRODUCT:
        return a * b;
    case KN_JOIN_MAX:
        return a != a || a > b ? a : b;
    case KN_JOIN_MIN:
        return a != a || a < b ? a : b;
    default:
        return a + b;
    }
}

/* to[0..w) = to joined with from, w elements beside each other. */
VEC_INLINE void join_run_as(float *to, const float *from, int64_t w, kn_join by)
{
    int64_t k = 0;
    for (; k + KN_VW <= w; k += KN_VW) {
        const vf a = v_load(to + k), b = v_load(from + k);
        v_store(to + k, by == KN_JOIN_SUM ? a + b
                        : by == KN_JOIN_PRODUCT
                            ? a * b
                            : v_sel(v_ne(a, a), a, by == KN_JOIN_MAX ? v_max(a, b) : v_min(a, b)));
    }
    for (; k < w; k++)
        to[k] = joined(by, to[k], from[k]);
}

/* w columns from j of slices i of outer o, whose index is one. */
VEC_INLINE void join_slices_as(const plan *p, int64_t o, int64_t j, int64_t w, bool wide,
                               kn_join by)
{
    float *full = (float *)p->full + o * p->n * p->inner + j;
    const float *picked = (const float *)p->picked + o * p->count * p->inner + j;
    for (int64_t i = 0; i < p->count && w == 1; i++) {
        float *to = full + index_at(p->index, i * p->step, wide) * p->inner;
        *to = joined(by, *to, picked[i * p->inner]);
    }
    for (int64_t i = 0; i < p->count && w > 1; i++, picked += p->inner)
        join_run_as(full + index_at(p->index, i * p->step, wide) * p->inner, picked, w, by);
}

VEC_INLINE void join_slices(const plan *p, int64_t o, int64_t j, int64_t w, bool wide)
{
    if (p->by == KN_JOIN_SUM)
        join_slices_as(p, o, j, w, wide, KN_JOIN_SUM);
    else if (p->by == KN_JOIN_PRODUCT)
        join_slices_as(p, o, j, w, wide, KN_JOIN_PRODUCT);
    else if (p->by == KN_JOIN_MAX)
        join_slices_as(p, o, j, w, wide, KN_JOIN_MAX);
    else
        join_slices_as(p, o, j, w, wide, KN_JOIN_MIN);
}

VEC_INLINE void put_slices(const plan *p, int64_t o, int64_t j, int64_t w, bool wide)
{
    const int64_t slice = p->inner * p->size;
    char *full = p->full + o * p->n * slice + j * p->size;
    const char *picked = p->picked + o * p->count * slice + j * p->size;
    const size_t bytes = (size_t)(w * p->size);
    for (int64_t i = 0, at = 0; i < p->count; i++, at += p->step, picked += slice)
        memcpy(full + index_at(p->index, at, wide) * slice, picked, bytes);
}

/* Columns [begin, end) of outer and inner, each by itself in ascending order along dim. */
VEC_INLINE void scatter_as(const plan *p, int64_t begin, int64_t end, int64_t size, bool wide)
{
    while (begin < end) {
        const int64_t o = begin / p->inner, j = begin % p->inner;
        const int64_t w = v_min_i64(end - begin, p->inner - j);
        if (p->slices && p->join)
            join_slices(p, o, j, w, wide);
        else if (p->slices)
            put_slices(p, o, j, w, wide);
        for (int64_t i = 0; i < p->count && !p->slices; i++) {
            const int64_t row = (o * p->count + i) * p->inner + j;
            for (int64_t k = 0; k < w; k++) {
                const int64_t at = index_at(p->index, row + k, wide);
                const int64_t to = (o * p->n + at) * p->inner + j + k;
                float *full = (float *)p->full;
                if (p->join)
                    full[to] = joined(p->by, full[to], ((const float *)p->picked)[row + k]);
                else
                    memcpy(p->full + to * size, p->picked + (row + k) * size, (size_t)size);
            }
        }
        begin += w;
    }
}

static void scatter_columns(const void *ctx, int64_t begin, int64_t end)
{
    const plan *p = ctx;
    BY_SIZE(p, scatter_as, p, begin, end);
}

/* join: f32 only, whose sums need no wider place. */
kn_status VEC_FN(vec_scatter)(const void *args)
{
    const kn_scatter_args *a = args;
    plan p;
    if ((a->join && a->dst.dtype != KN_F32) || !plan_make(&p, &a->dst, &a->src, &a->index, a->dim))
        return KN_DECLINED;
    p.join = a->join;
    p.by = a->by;
    const int64_t columns = p.outer * p.inner, each = p.slices && !p.join ? p.size : 16;
    if (columns * p.count > 0)
        kn_each_range(kn_threads_for(columns * p.count * each), columns, scatter_columns, &p);
    return KN_DONE;
}
