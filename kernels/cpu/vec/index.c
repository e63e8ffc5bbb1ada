/* kernels/cpu/vec/index.c: picking slices by index, and adding into them. Indices are checked
 * first; if one is bad the reference takes the call and reports it. */
#include "kernels/cpu/vec/iter.h"

static int64_t index_at(const kn_array *index, int64_t i)
{
    const int64_t at = i * index->stride[0];
    return index->dtype == KN_I64 ? ((const int64_t *)index->data)[at]
                                  : ((const int32_t *)index->data)[at];
}

/* full [outer, n, inner] and picked [outer, count, inner], both dense. */
typedef struct plan {
    int64_t outer, n, count, inner;
} plan;

static bool plan_make(plan *p, const kn_array *full, const kn_array *picked, const kn_array *index,
                      int dim)
{
    if (!kn_array_contiguous(full) || !kn_array_contiguous(picked))
        return false;
    *p = (plan){ .outer = 1, .n = full->shape[dim], .count = index->shape[0], .inner = 1 };
    for (int i = 0; i < full->ndim; i++) {
        if (i < dim)
            p->outer *= full->shape[i];
        if (i > dim)
            p->inner *= full->shape[i];
    }
    for (int64_t i = 0; i < p->count; i++)
        if (index_at(index, i) < 0 || index_at(index, i) >= p->n)
            return false;
    return true;
}

typedef struct selection {
    const kn_index_select_args *a;
    const plan *p;
    int64_t bytes; /* of a slice */
} selection;

static void select_slices(const void *ctx, int64_t begin, int64_t end)
{
    const selection *s = ctx;
    const plan *p = s->p;
    for (int64_t k = begin; k < end; k++) {
        const int64_t from = k / p->count * p->n + index_at(&s->a->index, k % p->count);
        memcpy((char *)s->a->dst.data + k * s->bytes,
               (const char *)s->a->src.data + from * s->bytes, (size_t)s->bytes);
    }
}

/* dst[o, i, :] = src[o, index[i], :], slice by slice */
kn_status VEC_FN(vec_index_select)(const void *args)
{
    const kn_index_select_args *a = args;
    plan p;
    if (a->dst.dtype != a->src.dtype || !plan_make(&p, &a->src, &a->dst, &a->index, a->dim))
        return KN_DECLINED;
    const int64_t bytes = p.inner * (int64_t)kn_dtype_size(a->dst.dtype);
    const int threads = kn_threads_for(2 * p.outer * p.count * bytes);
    kn_each_range(threads, p.outer * p.count, select_slices, &(selection){ a, &p, bytes });
    return KN_DONE;
}

/* The positions of index that pick one row, in ascending order: first[row], then next[position],
 * ... until -1. */
typedef struct addition {
    const kn_index_add_args *a;
    const plan *p;
    int64_t *first, *next;
} addition;

/* Of the rows that are picked; first's other elements stay as they are. */
static void chain(addition *s)
{
    const kn_array *index = &s->a->index;
    for (int64_t i = 0; i < s->p->count; i++)
        s->first[index_at(index, i)] = -1;
    for (int64_t i = s->p->count - 1; i >= 0; i--) {
        const int64_t row = index_at(index, i);
        s->next[i] = s->first[row];
        s->first[row] = i;
    }
}

/* Up to `vectors` vectors of a row from column c on: w elements. */
VEC_INLINE void add_vectors(const addition *s, int64_t row, int64_t c, int64_t w, int vectors,
                            kn_dtype to, kn_dtype from)
{
    const int64_t inner = s->p->inner, at = row * inner + c;
    vf sum[4];
    for (int k = 0; k < vectors; k++)
        sum[k] = v_get_n(to, s->a->dst.data, at + k * KN_VW, w - k * KN_VW);
    for (int64_t i = s->first[row]; i >= 0; i = s->next[i])
        for (int k = 0; k < vectors; k++)
            sum[k] += v_get_n(from, s->a->src.data, i * inner + c + k * KN_VW, w - k * KN_VW);
    for (int k = 0; k < vectors; k++)
        v_put_n(to, s->a->dst.data, at + k * KN_VW, sum[k], w - k * KN_VW);
}

/* dst[row, c..end) += src[i, c..end) for all i with index[i] = row, in ascending order; rounded
 * once. */
VEC_INLINE void add_row(const addition *s, int64_t row, int64_t c, int64_t end, kn_dtype to,
                        kn_dtype from)
{
    for (; c + 4 * KN_VW <= end; c += 4 * KN_VW)
        add_vectors(s, row, c, 4 * KN_VW, 4, to, from);
    for (; c < end; c += KN_VW)
        add_vectors(s, row, c, end - c, 1, to, from);
}

VEC_INLINE void add_row_to(const addition *s, int64_t row, int64_t c, int64_t end, kn_dtype to)
{
    VEC_BY_DTYPE(s->a->src.dtype, add_row, s, row, c, end, to);
}

/* Groups [begin, end) of 64 columns of all rows. */
static void add_groups(const void *ctx, int64_t begin, int64_t end)
{
    const addition *s = ctx;
    const int64_t last = v_min_i64(end * 64, s->p->inner);
    for (int64_t i = 0; i < s->p->count; i++) {
        const int64_t row = index_at(&s->a->index, i);
        if (s->first[row] == i)
            VEC_BY_DTYPE(s->a->dst.dtype, add_row_to, s, row, begin * 64, last);
    }
}

/* The same bits without chains, where a sum in dst is as wide as one in a register. */
static kn_status add_in_place(const kn_index_add_args *a)
{
    kn_array index = a->src;
    for (int d = 0; d < index.ndim; d++)
        index.stride[d] = d == a->dim ? a->index.stride[0] : 0;
    index.data = a->index.data;
    index.dtype = a->index.dtype;
    return VEC_FN(vec_scatter)(&(kn_scatter_args){ a->dst, a->src, index, a->dim, true });
}

/* Tasks are ranges of columns, so each element's additions happen in the order of index. */
kn_status VEC_FN(vec_index_add)(const void *args)
{
    const kn_index_add_args *a = args;
    plan p;
    if (a->dst.dtype == KN_F32 && a->src.dtype == KN_F32)
        return add_in_place(a);
    if (!vec_float(a->dst.dtype) || !vec_float(a->src.dtype) || a->dim != 0 ||
        !plan_make(&p, &a->dst, &a->src, &a->index, a->dim))
        return KN_DECLINED;
    const size_t bytes = (size_t)(p.n + p.count) * sizeof(int64_t);
    addition s = { .a = a, .p = &p, .first = vec_scratch(bytes) };
    if (!s.first)
        return KN_FAILED;
    s.next = s.first + p.n;
    chain(&s);
    kn_each_range(kn_threads_for(12 * p.count * p.inner), (p.inner + 63) / 64, add_groups, &s);
    vec_scratch_end(s.first, bytes);
    return KN_DONE;
}
