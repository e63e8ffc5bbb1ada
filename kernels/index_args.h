/* kernels/index_args.h: arguments of the kernels that pick, put and order elements along a dim. A
 * part of kernels.h, whose rules hold. */
#ifndef KNAP_KERNELS_INDEX_ARGS_H
#define KNAP_KERNELS_INDEX_ARGS_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* dst = src's slices along dim picked by index: dst.shape = src.shape with shape[dim] replaced by
 * index.shape[0]. index: 1-d, i64 or i32. Any dtype. An index outside [0, n) is an error that
 * names position and value. Embedding is dim 0. */
typedef struct kn_index_select_args {
    kn_array dst, src, index;
    int dim;
} kn_index_select_args;

/* dst's slices along dim += src's, in ascending position of index (deterministic); dst is not
 * zeroed. The terms of one element of dst are added in f32 (f64 if either is f64) and rounded once.
 * dst may be f32 while src is bf16/f16. */
typedef struct kn_index_add_args {
    kn_array dst, src, index;
    int dim;
} kn_index_add_args;

/* How two numbers become one. MAX and MIN of NaN are NaN; integers wrap. */
typedef enum kn_join {
    KN_JOIN_SUM = 0,
    KN_JOIN_PRODUCT,
    KN_JOIN_MAX,
    KN_JOIN_MIN,
    KN_JOIN_LOG_SUM, /* log(e^a + e^b), floats */
    KN_JOIN_COUNT
} kn_join;

/* dst[i..] = src[i.., index[i..] in place of dim, ..i]. dst and index (i64 or i32) have one shape,
 * src as many dims, each but dim at least as large. Any dtype. An index outside [0, n) of dim is an
 * error that names its row-major position and its value. */
typedef struct kn_gather_args {
    kn_array dst, src, index;
    int dim;
} kn_gather_args;

/* The other way: dst[i.., index[i..] in place of dim, ..i] = src[i..], for src of index's shape;
 * where several go to one element the last one in row-major order stays (any dtype, the same on
 * both sides). join: they are joined with dst, in row-major order, floats in f32 (f64 if either is
 * f64) and rounded once; float into float, integer into integer. */
typedef struct kn_scatter_args {
    kn_array dst, src, index;
    int dim;
    bool join;
    const char *op; /* for messages about indices */
    kn_join by;     /* not KN_JOIN_LOG_SUM */
} kn_scatter_args;

/* The first k of each line of src along dim in ascending (or descending) order, and their positions
 * (i64): k is the size of values and indices along dim, the other dims are src's. Stable; NaN comes
 * after all, and before all where descending; -0 equals 0. Any dtype with arithmetic. */
typedef struct kn_sort_args {
    kn_array values, indices, src;
    int dim;
    bool descending;
} kn_sort_args;

/* y[.., j, ..] = sum (or another joining) over i <= j of x[.., i, ..] along dim (reverse: i >= j),
 * any floats, joined in f64, or integers and bool into i64. In place. */
typedef struct kn_cumsum_args {
    kn_array y, x;
    int dim;
    bool reverse;
    kn_join by;
} kn_cumsum_args;

/* An index of slices along dim as one of elements of picked: each has that of its slice. So picking
 * slices is kn_gather_args, and adding into them kn_scatter_args with join. */
static inline kn_array kn_index_of_elements(const kn_array *index, const kn_array *picked, int dim)
{
    kn_array r = *picked;
    for (int d = 0; d < r.ndim; d++)
        r.stride[d] = d == dim ? index->stride[0] : 0;
    r.data = index->data;
    r.dtype = index->dtype;
    return r;
}

/* a's first element along dim for each of its lines: a without dim. */
static inline kn_array kn_without_dim(const kn_array *a, int dim)
{
    kn_array b = *a;
    b.ndim--;
    for (int d = dim; d < b.ndim; d++) {
        b.shape[d] = a->shape[d + 1];
        b.stride[d] = a->stride[d + 1];
    }
    return b;
}

#ifdef __cplusplus
}
#endif
#endif
