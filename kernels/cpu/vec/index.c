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
    int64_t *place, *run, bytes; /* [count], the indices; how many from one on are neighbours */
} plan;

static void plan_end(plan *p)
{
    vec_scratch_end(p->place, (size_t)p->bytes);
}

/* more: times count and n elements of scratch follow place and run. */
static kn_status plan_make(plan *p, const kn_array *full, const kn_array *picked,
                           const kn_array *index, int dim, int more)
{
    if (!kn_array_contiguous(full) || !kn_array_contiguous(picked))
        return KN_DECLINED;
    *p = (plan){ .outer = 1, .n = full->shape[dim], .count = index->shape[0], .inner = 1 };
    for (int i = 0; i < full->ndim; i++) {
        if (i < dim)
            p->outer *= full->shape[i];
        if (i > dim)
            p->inner *= full->shape[i];
    }
    p->bytes = (1 + 2 * p->count + more * (p->count + p->n)) * (int64_t)sizeof *p->place;
    p->place = vec_scratch((size_t)p->bytes);
    if (!p->place)
        return KN_FAILED;
    for (int64_t i = 0; i < p->count; i++) {
        p->place[i] = index_at(index, i);
        if (p->place[i] < 0 || p->place[i] >= p->n) {
            plan_end(p);
            return KN_DECLINED;
        }
    }
    p->run = p->place + p->count;
    for (int64_t i = p->count - 1, run = 0; i >= 0; i--) {
        run = i + 1 < p->count && p->place[i + 1] == p->place[i] + 1 ? run + 1 : 1;
        p->run[i] = run;
    }
    return KN_DONE;
}

typedef struct selection {
    char *dst;
    const char *src;
    const plan *p;
    int64_t bytes; /* of a slice */
} selection;

/* Slices [begin, end) of outer and count, of one size. */
VEC_INLINE void select_as(const selection *s, int64_t begin, int64_t end, int64_t bytes)
{
    const plan *p = s->p;
    int64_t i = begin % p->count;
    const char *src = s->src + begin / p->count * p->n * bytes;
    for (int64_t k = begin, w; k < end; k += w) {
        const char *from = src + p->place[i] * bytes;
        w = v_min_i64(p->run[i], end - k);
        if (w == 1)
            memcpy(s->dst + k * bytes, from, (size_t)bytes);
        else
            memcpy(s->dst + k * bytes, from, (size_t)(w * bytes));
        if ((i += w) == p->count) {
            i = 0;
            src += p->n * bytes;
        }
    }
}

static void select_slices(const void *ctx, int64_t begin, int64_t end)
{
    const selection *s = ctx;
    if (s->bytes == 2)
        select_as(s, begin, end, 2);
    else if (s->bytes == 4)
        select_as(s, begin, end, 4);
    else if (s->bytes == 8)
        select_as(s, begin, end, 8);
    else
        select_as(s, begin, end, s->bytes);
}

/* dst[o, i, :] = src[o, index[i], :], slice by slice */
kn_status VEC_FN(vec_index_select)(const void *args)
{
    const kn_index_select_args *a = args;
    plan p;
    if (a->dim + 1 == a->src.ndim)
        return VEC_FN(vec_gather)(&(kn_gather_args){
            a->dst, a->src, kn_index_of_elements(&a->index, &a->dst, a->dim), a->dim });
    const kn_status made = a->dst.dtype != a->src.dtype
                               ? KN_DECLINED
                               : plan_make(&p, &a->src, &a->dst, &a->index, a->dim, 0);
    if (made != KN_DONE)
        return made;
    const int64_t bytes = p.inner * (int64_t)kn_dtype_size(a->dst.dtype);
    const int threads = kn_threads_for(2 * p.outer * p.count * v_max_i64(bytes, 8));
    kn_each_range(threads, p.outer * p.count, select_slices,
                  &(selection){ a->dst.data, a->src.data, &p, bytes });
    plan_end(&p);
    return KN_DONE;
}

/* The positions of index that pick one row, in ascending order: first[row], then next[position],
 * ... until -1. */
typedef struct addition {
    const kn_index_add_args *a;
    const plan *p;
    int64_t *first, *next, groups; /* groups: of 64 columns */
} addition;

/* Of the rows that are picked; first's other elements stay as they are. */
static void chain(addition *s)
{
    for (int64_t i = 0; i < s->p->count; i++)
        s->first[s->p->place[i]] = -1;
    for (int64_t i = s->p->count - 1; i >= 0; i--) {
        const int64_t row = s->p->place[i];
        s->next[i] = s->first[row];
        s->first[row] = i;
    }
}

/* Up to `vectors` vectors of a row of o, an index of outer, from column c on: w elements. */
VEC_INLINE void add_vectors(const addition *s, int64_t o, int64_t row, int64_t c, int64_t w,
                            int vectors, kn_dtype to, kn_dtype from)
{
    const int64_t inner = s->p->inner, at = (o * s->p->n + row) * inner + c;
    const int64_t from_at = o * s->p->count * inner + c;
    vf sum[4];
    for (int k = 0; k < vectors; k++)
        sum[k] = v_get_n(to, s->a->dst.data, at + k * KN_VW, w - k * KN_VW);
    for (int64_t i = s->first[row]; i >= 0; i = s->next[i])
        for (int k = 0; k < vectors; k++)
            sum[k] += v_get_n(from, s->a->src.data, from_at + i * inner + k * KN_VW, w - k * KN_VW);
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

/* Tasks [begin, end): of outer and groups of columns, the rows that index picks first at i. */
static void add_groups(const void *ctx, int64_t begin, int64_t end)
{
    const addition *s = ctx;
    for (int64_t task = begin; task < end; task++) {
        const int64_t i = task % s->p->count, g = task / s->p->count % s->groups * 64;
        const int64_t row = s->p->place[i], last = v_min_i64(g + 64, s->p->inner);
        if (s->first[row] == i)
            VEC_BY_DTYPE(s->a->dst.dtype, add_row_to, s, task / s->p->count / s->groups, row, g,
                         last);
    }
}

/* The same bits without chains, where a sum in dst is as wide as one in a register. */
static kn_status add_in_place(const kn_index_add_args *a)
{
    return VEC_FN(vec_scatter)(&(kn_scatter_args){
        a->dst, a->src, kn_index_of_elements(&a->index, &a->src, a->dim), a->dim, true });
}

/* An element belongs to one task, so its additions happen in the order of index. */
kn_status VEC_FN(vec_index_add)(const void *args)
{
    const kn_index_add_args *a = args;
    plan p;
    const bool f32 = a->dst.dtype == KN_F32 && a->src.dtype == KN_F32;
    const kn_status added = f32 ? add_in_place(a) : KN_DECLINED;
    if (added != KN_DECLINED)
        return added;
    const kn_status made = vec_float(a->dst.dtype) && vec_float(a->src.dtype)
                               ? plan_make(&p, &a->dst, &a->src, &a->index, a->dim, 1)
                               : KN_DECLINED;
    if (made != KN_DONE)
        return made;
    addition s = { a, &p, p.run + p.count, p.run + p.count + p.n, (p.inner + 63) / 64 };
    const int threads = kn_threads_for(12 * p.outer * p.count * p.inner);
    chain(&s);
    kn_each_range(threads, p.outer * s.groups * p.count, add_groups, &s);
    plan_end(&p);
    return KN_DONE;
}
