/* kernels/cpu/reference_index.c: picking slices by index and its backward, adding into slices. */
#include "kernels/cpu/reference.h"
#include <string.h>

/* dst[.., i, ..] = src[.., index[i], ..] */
kn_status kn_ref_index_select(const void *args)
{
    const kn_index_select_args *a = args;
    if (!kn_ref_check_index("index_select", &a->index, &a->src, a->dim))
        return KN_FAILED;
    const int64_t size = (int64_t)kn_dtype_size(a->dst.dtype);
    kn_ref_walk w = kn_ref_walk_over(&a->dst, &a->src, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        const int64_t i = w.at[a->dim], at = kn_ref_get_int(&a->index, i * a->index.stride[0]);
        const int64_t from = w.off[1] + (at - i) * a->src.stride[a->dim];
        memcpy((char *)a->dst.data + w.off[0] * size, (const char *)a->src.data + from * size,
               (size_t)size);
    }
    return KN_DONE;
}

/* The positions of index that pick one slice, in ascending order: first[slice], then
 * next[position], ... until -1. */
typedef struct chains {
    int64_t *first, *next;
} chains;

/* Of the slices that are picked; first's other elements stay as they are. */
static bool chains_make(chains *c, const kn_array *index, int64_t slices)
{
    const int64_t n = index->shape[0];
    c->first = kn_host_alloc((size_t)(slices + n) * sizeof *c->first);
    if (!c->first)
        return false;
    c->next = c->first + slices;
    for (int64_t i = 0; i < n; i++)
        c->first[kn_ref_get_int(index, i * index->stride[0])] = -1;
    for (int64_t i = n - 1; i >= 0; i--) {
        const int64_t slice = kn_ref_get_int(index, i * index->stride[0]);
        c->next[i] = c->first[slice];
        c->first[slice] = i;
    }
    return true;
}

/* full[f] += picked[p], picked[p + step next], ...: every element of a chain that begins at
 * position i. */
static void add_chain(const kn_array *full, int64_t f, const kn_array *picked, int64_t p,
                      int64_t step, const int64_t *next, int64_t i)
{
    const bool wide = full->dtype == KN_F64 || picked->dtype == KN_F64;
    if (kn_dtype_is_int(full->dtype)) {
        uint64_t sum = (uint64_t)kn_ref_get_int(full, f);
        for (int64_t k = i; k >= 0; k = next[k])
            sum += (uint64_t)kn_ref_get_int(picked, p + (k - i) * step);
        kn_ref_set_int(full, f, (int64_t)sum);
        return;
    }
    double sum = kn_ref_get(full, f);
    for (int64_t k = i; k >= 0; k = next[k]) {
        sum += kn_ref_get(picked, p + (k - i) * step);
        sum = wide ? sum : (double)(float)sum;
    }
    kn_ref_set_computed(full, f, sum);
}

/* dst[.., j, ..] += src[.., i, ..] for all i with index[i] = j, in ascending order. */
kn_status kn_ref_index_add(const void *args)
{
    const kn_index_add_args *a = args;
    if (!kn_ref_check_index("index_add", &a->index, &a->dst, a->dim))
        return KN_FAILED;
    chains c;
    if (!chains_make(&c, &a->index, a->dst.shape[a->dim]))
        return KN_FAILED;
    kn_ref_walk w = kn_ref_walk_over(&a->src, &a->dst, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        const int64_t i = w.at[a->dim], slice = kn_ref_get_int(&a->index, i * a->index.stride[0]);
        if (c.first[slice] == i)
            add_chain(&a->dst, w.off[1] + (slice - i) * a->dst.stride[a->dim], &a->src, w.off[0],
                      a->src.stride[a->dim], c.next, i);
    }
    kn_host_free(c.first);
    return KN_DONE;
}
