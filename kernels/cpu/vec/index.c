/* kernels/cpu/vec/index.c: picking slices by index, and adding into them. Indices are checked
 * first; where one is bad the reference takes the call and says which. */
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
    if (full->ndim != picked->ndim || dim < 0 || dim >= full->ndim || index->ndim != 1 ||
        (index->dtype != KN_I64 && index->dtype != KN_I32) || !kn_array_contiguous(full) ||
        !kn_array_contiguous(picked))
        return false;
    *p = (plan){ .outer = 1, .n = full->shape[dim], .count = index->shape[0], .inner = 1 };
    for (int i = 0; i < full->ndim; i++) {
        if (picked->shape[i] != (i == dim ? p->count : full->shape[i]))
            return false;
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
kn_status vec_index_select(const void *args)
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

/* dst[index[i], c..c+w) += src[i, c..c+w) for every i in order */
VEC_INLINE void add_columns(const kn_index_add_args *a, const plan *p, int64_t c, int64_t w,
                            kn_dtype t)
{
    for (int64_t i = 0; i < p->count; i++) {
        float *dst = (float *)a->dst.data + index_at(&a->index, i) * p->inner + c;
        const int64_t from = i * p->inner + c;
        for (int64_t j = 0; j < w; j += KN_VW)
            v_put_n(KN_F32, dst, j,
                    v_get_n(KN_F32, dst, j, w - j) + v_get_n(t, a->src.data, from + j, w - j),
                    w - j);
    }
}

typedef struct addition {
    const kn_index_add_args *a;
    const plan *p;
} addition;

/* Groups [begin, end) of 64 columns. */
static void add_groups(const void *ctx, int64_t begin, int64_t end)
{
    const addition *s = ctx;
    const int64_t c = begin * 64, w = v_min_i64(end * 64, s->p->inner) - c;
    VEC_BY_DTYPE(s->a->src.dtype, add_columns, s->a, s->p, c, w);
}

/* Tasks are ranges of columns, so each element's additions happen in the order of index. */
kn_status vec_index_add(const void *args)
{
    const kn_index_add_args *a = args;
    plan p;
    if (a->dst.dtype != KN_F32 || !vec_float(a->src.dtype) || a->dim != 0 ||
        !plan_make(&p, &a->dst, &a->src, &a->index, a->dim))
        return KN_DECLINED;
    kn_each_range(kn_threads_for(12 * p.count * p.inner), (p.inner + 63) / 64, add_groups,
                  &(addition){ a, &p });
    return KN_DONE;
}
