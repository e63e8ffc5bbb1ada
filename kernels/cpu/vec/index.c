/* kernels/cpu/vec/index.c: slices along a dim by one index each: picked, and added to. Picking them
 * is picking elements (gather.c), and so is adding in f32; sums of narrower dtypes, which are
 * rounded once, are made here. If an index is bad the reference takes the call and reports it. */
#include "kernels/cpu/vec/iter.h"

kn_status VEC_FN(vec_index_select)(const void *args)
{
    const kn_index_select_args *a = args;
    const kn_array index = kn_index_of_elements(&a->index, &a->dst, a->dim);
    return VEC_FN(vec_gather)(&(kn_gather_args){ a->dst, a->src, index, a->dim });
}

/* dst [outer, n, inner] and src [outer, count, inner], both dense. */
typedef struct addition {
    const kn_index_add_args *a;
    int64_t outer, n, count, inner, groups; /* groups: of 64 columns */
    int64_t *row;                           /* [count], the index */
    /* The positions that pick one row, in ascending order: first[row], then next[position], ...
     * until -1; first's other elements are never set. */
    int64_t *first, *next;
} addition;

/* False if an index is bad. */
static bool chain(addition *s)
{
    const kn_array *index = &s->a->index;
    for (int64_t i = 0; i < s->count; i++) {
        const int64_t at = i * index->stride[0];
        s->row[i] = index->dtype == KN_I64 ? ((const int64_t *)index->data)[at]
                                           : ((const int32_t *)index->data)[at];
        if (s->row[i] < 0 || s->row[i] >= s->n)
            return false;
        s->first[s->row[i]] = -1;
    }
    for (int64_t i = s->count - 1; i >= 0; i--) {
        s->next[i] = s->first[s->row[i]];
        s->first[s->row[i]] = i;
    }
    return true;
}

/* Up to `vectors` vectors of a row of o, an index of outer, from column c on: w elements. */
VEC_INLINE void add_vectors(const addition *s, int64_t o, int64_t row, int64_t c, int64_t w,
                            int vectors, kn_dtype to, kn_dtype from)
{
    const int64_t at = (o * s->n + row) * s->inner + c, from_at = o * s->count * s->inner + c;
    vf sum[4];
    for (int k = 0; k < vectors; k++)
        sum[k] = v_get_n(to, s->a->dst.data, at + k * KN_VW, w - k * KN_VW);
    for (int64_t i = s->first[row]; i >= 0; i = s->next[i])
        for (int k = 0; k < vectors; k++)
            sum[k] +=
                v_get_n(from, s->a->src.data, from_at + i * s->inner + k * KN_VW, w - k * KN_VW);
    for (int k = 0; k < vectors; k++)
        v_put_n(to, s->a->dst.data, at + k * KN_VW, sum[k], w - k * KN_VW);
}

/* dst[o, row, c..end) += src[o, i, c..end) for all i with index[i] = row, in ascending order;
 * rounded once. */
VEC_INLINE void add_row(const addition *s, int64_t o, int64_t row, int64_t c, int64_t end,
                        kn_dtype to, kn_dtype from)
{
    for (; c + 4 * KN_VW <= end; c += 4 * KN_VW)
        add_vectors(s, o, row, c, 4 * KN_VW, 4, to, from);
    for (; c < end; c += KN_VW)
        add_vectors(s, o, row, c, end - c, 1, to, from);
}

VEC_INLINE void add_row_to(const addition *s, int64_t o, int64_t row, int64_t c, int64_t end,
                           kn_dtype to)
{
    VEC_BY_DTYPE(s->a->src.dtype, add_row, s, o, row, c, end, to);
}

/* Tasks [begin, end): of outer and groups of columns, the rows that index picks first at i. So an
 * element belongs to one task. */
static void add_groups(const void *ctx, int64_t begin, int64_t end)
{
    const addition *s = ctx;
    for (int64_t task = begin; task < end; task++) {
        const int64_t i = task % s->count, g = task / s->count % s->groups * 64;
        const int64_t row = s->row[i], last = v_min_i64(g + 64, s->inner);
        if (s->first[row] == i)
            VEC_BY_DTYPE(s->a->dst.dtype, add_row_to, s, task / s->count / s->groups, row, g, last);
    }
}

kn_status VEC_FN(vec_index_add)(const void *args)
{
    const kn_index_add_args *a = args;
    const int64_t n = a->dst.shape[a->dim], count = a->index.shape[0];
    addition s = { .a = a, .outer = 1, .n = n, .count = count, .inner = 1 };
    if (a->dst.dtype == KN_F32 && a->src.dtype == KN_F32) {
        const kn_array index = kn_index_of_elements(&a->index, &a->src, a->dim);
        const kn_status added =
            VEC_FN(vec_scatter)(&(kn_scatter_args){ a->dst, a->src, index, a->dim, true });
        if (added != KN_DECLINED)
            return added;
    }
    if (!vec_float(a->dst.dtype) || !vec_float(a->src.dtype) || !kn_array_contiguous(&a->dst) ||
        !kn_array_contiguous(&a->src))
        return KN_DECLINED;
    for (int d = 0; d < a->dst.ndim; d++) {
        s.outer *= d < a->dim ? a->dst.shape[d] : 1;
        s.inner *= d > a->dim ? a->dst.shape[d] : 1;
    }
    const size_t bytes = (size_t)(1 + 2 * count + n) * sizeof *s.row;
    kn_status status = KN_DECLINED;
    s.groups = (s.inner + 63) / 64;
    s.row = vec_scratch(bytes);
    if (!s.row)
        return KN_FAILED;
    s.next = s.row + count;
    s.first = s.next + count;
    if (chain(&s)) {
        kn_each_range(kn_threads_for(12 * s.outer * count * s.inner), s.outer * s.groups * count,
                      add_groups, &s);
        status = KN_DONE;
    }
    vec_scratch_end(s.row, bytes);
    return status;
}
