/* kernels/cpu/reference_gather.c: elements along a dim picked by an index of their own each, put or
 * added there; slices, whose elements have one index. */
#include "kernels/cpu/reference.h"
#include "kernels/join.h"
#include <string.h>

/* full, seen in picked's shape: its first element of dim stands for all, which index replaces. */
static kn_array lines_of(const kn_array *full, const kn_array *picked, int dim)
{
    kn_array a = *full;
    memcpy(a.shape, picked->shape, sizeof a.shape);
    a.stride[dim] = 0;
    return a;
}

static void pick(const kn_array *dst, const kn_array *src, const kn_array *index, int dim)
{
    const int64_t size = (int64_t)kn_dtype_size(dst->dtype), step = src->stride[dim];
    kn_array lines = lines_of(src, dst, dim);
    kn_ref_walk w = kn_ref_walk_over(dst, &lines, index, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        const int64_t from = w.off[1] + kn_ref_get_int(index, w.off[2]) * step;
        memcpy((char *)dst->data + w.off[0] * size, (const char *)src->data + from * size,
               (size_t)size);
    }
}

kn_status kn_ref_gather(const void *args)
{
    const kn_gather_args *a = args;
    if (!kn_ref_check_index("gather", &a->index, &a->src, a->dim))
        return KN_FAILED;
    pick(&a->dst, &a->src, &a->index, a->dim);
    return KN_DONE;
}

kn_status kn_ref_index_select(const void *args)
{
    const kn_index_select_args *a = args;
    const kn_array index = kn_index_of_elements(&a->index, &a->dst, a->dim);
    if (!kn_ref_check_index("index_select", &a->index, &a->src, a->dim))
        return KN_FAILED;
    pick(&a->dst, &a->src, &index, a->dim);
    return KN_DONE;
}

/* One after another, in row-major order. join: dst has the precision of joining. */
static void put(const kn_array *dst, const kn_scatter_args *a)
{
    const int64_t size = (int64_t)kn_dtype_size(dst->dtype), step = dst->stride[a->dim];
    kn_array lines = lines_of(dst, &a->src, a->dim);
    kn_ref_walk w = kn_ref_walk_over(&a->src, &lines, &a->index, NULL);
    for (; w.more; kn_ref_walk_next(&w)) {
        const int64_t to = w.off[1] + kn_ref_get_int(&a->index, w.off[2]) * step;
        if (!a->join)
            memcpy((char *)dst->data + to * size, (const char *)a->src.data + w.off[0] * size,
                   (size_t)size);
        else if (kn_dtype_is_float(dst->dtype))
            kn_ref_set_computed(
                dst, to, kn_joined(a->by, kn_ref_get(dst, to), kn_ref_get(&a->src, w.off[0])));
        else
            kn_ref_set_int(
                dst, to,
                kn_joined_int(a->by, kn_ref_get_int(dst, to), kn_ref_get_int(&a->src, w.off[0])));
    }
}

/* They are joined in a wider dtype beside dst. */
static bool join_wide(const kn_scatter_args *a, kn_dtype wide)
{
    const int64_t n = kn_array_numel(&a->dst);
    void *bytes = kn_host_alloc((size_t)(n > 0 ? n : 1) * kn_dtype_size(wide));
    if (!bytes)
        return false;
    kn_array sums = kn_array_make(bytes, wide, a->dst.ndim, a->dst.shape);
    bool ok = kn_ref_copy(&(kn_copy_args){ sums, a->dst }) == KN_DONE;
    if (ok) {
        put(&sums, a);
        for (int64_t i = 0; wide == KN_F64 && i < n; i++) /* computed values go through f32 */
            ((double *)bytes)[i] = (double)(float)((double *)bytes)[i];
        ok = kn_ref_copy(&(kn_copy_args){ a->dst, sums }) == KN_DONE;
    }
    kn_host_free(bytes);
    return ok;
}

static kn_status scatter(const kn_scatter_args *a)
{
    const kn_dtype to = a->dst.dtype;
    const kn_dtype wide = to == KN_F64 || a->src.dtype == KN_F64 ? KN_F64 : KN_F32;
    if (a->join && kn_dtype_is_float(to) && to != wide)
        return join_wide(a, wide) ? KN_DONE : KN_FAILED;
    put(&a->dst, a);
    return KN_DONE;
}

kn_status kn_ref_scatter(const void *args)
{
    const kn_scatter_args *a = args;
    return kn_ref_check_index(a->op ? a->op : "scatter", &a->index, &a->dst, a->dim) ? scatter(a)
                                                                                     : KN_FAILED;
}

kn_status kn_ref_index_add(const void *args)
{
    const kn_index_add_args *a = args;
    const kn_array index = kn_index_of_elements(&a->index, &a->src, a->dim);
    const kn_scatter_args s = { a->dst, a->src, index, a->dim, true };
    if (!kn_ref_check_index("index_add", &a->index, &a->dst, a->dim))
        return KN_FAILED;
    if (a->dst.dtype == KN_BOOL) /* whether the whole sum is 0, not one on the way to it */
        return join_wide(&s, KN_I64) ? KN_DONE : KN_FAILED;
    return scatter(&s);
}
