/* kernels/cpu/reference_index.c: picking slices by index and its backward, adding into slices. */
#include "kernels/cpu/reference.h"
#include <string.h>

/* picked is full with shape[dim] replaced by the number of indices, and every index is inside. */
static bool index_check(kn_kernel k, const kn_array *full, const kn_array *picked,
                        const kn_array *index, int dim)
{
    bool fits = full->ndim == picked->ndim && index->ndim == 1 && dim >= 0 && dim < full->ndim &&
                (index->dtype == KN_I64 || index->dtype == KN_I32);
    for (int d = 0; fits && d < full->ndim; d++)
        fits = picked->shape[d] == (d == dim ? index->shape[0] : full->shape[d]);
    if (!fits) {
        char one[128], two[128], three[128];
        return kn_fail("%s: %s along dim %d by %s does not fit %s; index is i64 or i32 with one "
                       "dim, the other dims agree",
                       kn_kernel_name(k), kn_array_describe(full, one, sizeof one), dim,
                       kn_array_describe(index, two, sizeof two),
                       kn_array_describe(picked, three, sizeof three));
    }
    for (int64_t i = 0; i < index->shape[0]; i++) {
        int64_t at = kn_ref_get_int(index, i * index->stride[0]);
        if (at < 0 || at >= full->shape[dim])
            return kn_fail("%s: index %lld at position %lld is outside [0, %lld) of dim %d",
                           kn_kernel_name(k), (long long)at, (long long)i,
                           (long long)full->shape[dim], dim);
    }
    return true;
}

/* Calls each(full's offset, picked's offset) for every element of picked in row-major order: where
 * a slice is picked twice, the lower position of index comes first. */
typedef void (*pair_fn)(const kn_array *full, int64_t f, const kn_array *picked, int64_t p);

static void for_each_pair(const kn_array *full, const kn_array *picked, const kn_array *index,
                          int dim, pair_fn each)
{
    kn_ref_walk w = kn_ref_walk_over(picked, full, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        int64_t at = kn_ref_get_int(index, w.at[dim] * index->stride[0]);
        each(full, w.off[1] + (at - w.at[dim]) * full->stride[dim], picked, w.off[0]);
    }
}

static void pick(const kn_array *full, int64_t f, const kn_array *picked, int64_t p)
{
    int64_t size = (int64_t)kn_dtype_size(full->dtype);
    memcpy((char *)picked->data + p * size, (const char *)full->data + f * size, (size_t)size);
}

/* dst[.., i, ..] = src[.., index[i], ..] */
kn_status kn_ref_index_select(const void *args)
{
    const kn_index_select_args *a = args;
    if (a->dst.dtype != a->src.dtype) {
        kn_fail("index_select: dst is %s, src is %s; they must agree", kn_dtype_name(a->dst.dtype),
                kn_dtype_name(a->src.dtype));
        return KN_FAILED;
    }
    if (!index_check(KN_K_INDEX_SELECT, &a->src, &a->dst, &a->index, a->dim))
        return KN_FAILED;
    for_each_pair(&a->src, &a->dst, &a->index, a->dim, pick);
    return KN_DONE;
}

static void add(const kn_array *full, int64_t f, const kn_array *picked, int64_t p)
{
    if (kn_ref_is_int(full->dtype))
        kn_ref_set_int(
            full, f,
            (int64_t)((uint64_t)kn_ref_get_int(full, f) + (uint64_t)kn_ref_get_int(picked, p)));
    else
        kn_ref_set_computed(full, f, kn_ref_get(full, f) + kn_ref_get(picked, p));
}

/* dst[.., index[i], ..] += src[.., i, ..] for i = 0, 1, ..., rounded to dst's dtype each time. */
kn_status kn_ref_index_add(const void *args)
{
    const kn_index_add_args *a = args;
    kn_dtype to = a->dst.dtype, from = a->src.dtype;
    if (!kn_ref_is_arithmetic(to) || !kn_ref_is_arithmetic(from) ||
        kn_dtype_is_float(to) != kn_dtype_is_float(from)) {
        kn_fail("index_add: %s into %s is not supported; float into float, integer into integer",
                kn_dtype_name(from), kn_dtype_name(to));
        return KN_FAILED;
    }
    if (!index_check(KN_K_INDEX_ADD, &a->dst, &a->src, &a->index, a->dim))
        return KN_FAILED;
    for_each_pair(&a->dst, &a->src, &a->index, a->dim, add);
    return KN_DONE;
}
