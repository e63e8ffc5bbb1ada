/* tests/autograd/op_cases_index.h: gather, scatter, sort and the like as functions of their inputs,
 * and the table of their cases. */
#ifndef KNAP_TESTS_OP_CASES_INDEX_H
#define KNAP_TESTS_OP_CASES_INDEX_H

#include "tests/autograd/op_check.h"

/* Indices in [0, 3), which repeat. */
static kn_tensor *index_of(int ndim, const int64_t *shape)
{
    static const int64_t id[12] = { 2, 0, 2, 1, 1, 2, 0, 0, 2, 2, 1, 0 };
    return kn_from(KN_I64, CHECKED_DEVICE, id, ndim, shape);
}
static kn_tensor *run_gather_rows(kn_tensor *const *x)
{
    return kn_gather(x[0], 0, index_of(KN_SHAPE(4, 2)));
}
static kn_tensor *run_gather_last(kn_tensor *const *x)
{
    return kn_gather(x[0], -1, index_of(KN_SHAPE(2, 1, 5)));
}
static kn_tensor *run_gather_none(kn_tensor *const *x)
{
    return kn_gather(x[0], 1, index_of(KN_SHAPE(0, 3)));
}
static kn_tensor *run_scatter(kn_tensor *const *x)
{
    return kn_scatter(x[0], 0, index_of(KN_SHAPE(3, 2)), x[1]);
}
static kn_tensor *run_scatter_add(kn_tensor *const *x)
{
    return kn_scatter_add(x[0], 0, index_of(KN_SHAPE(3, 2)), x[1]);
}
static kn_tensor *run_scatter_add_last(kn_tensor *const *x)
{
    return kn_scatter_add(x[0], 2, index_of(KN_SHAPE(2, 1, 4)), x[1]);
}
static kn_tensor *run_index_add(kn_tensor *const *x)
{
    return kn_index_add(x[0], 1, index_of(KN_SHAPE(4)), x[1]);
}
static kn_tensor *run_sort(kn_tensor *const *x)
{
    return kn_sort(x[0], -1);
}
static kn_tensor *run_sort_down(kn_tensor *const *x)
{
    return kn_sort(x[0], 0, .descending = true);
}
static kn_tensor *run_topk(kn_tensor *const *x)
{
    return kn_topk(x[0], 2, -1);
}
static kn_tensor *run_topk_least(kn_tensor *const *x)
{
    return kn_topk(x[0], 1, 1, .smallest = true);
}
static kn_tensor *run_cumsum(kn_tensor *const *x)
{
    return kn_cumsum(x[0], 1);
}

/* Logits of x[.., C] and w[V, C]; every seventh target doesn't count. */
static kn_tensor *head_loss(kn_tensor *const *x, kn_tensor *rows, kn_loss_reduction r)
{
    enum { MOST = 1100 };
    int64_t t[MOST], n = kn_numel(rows) / kn_size(rows, -1);
    for (int64_t i = 0; i < n && i < MOST; i++)
        t[i] = i % 7 != 2 ? i % kn_size(x[1], 0) : -100;
    kn_tensor *to = kn_from(KN_I64, CHECKED_DEVICE, t, kn_ndim(rows) - 1, kn_shape(rows));
    return kn_linear_cross_entropy(rows, x[1], to, .bias = x[2], .smoothing = 0.2, .reduction = r);
}
static kn_tensor *run_head(kn_tensor *const *x)
{
    return head_loss(x, x[0], KN_REDUCTION_MEAN);
}
static kn_tensor *run_head_sum(kn_tensor *const *x)
{
    return head_loss(x, x[0], KN_REDUCTION_SUM);
}
/* So many rows that there are several chunks. */
static kn_tensor *run_head_chunks(kn_tensor *const *x)
{
    kn_tensor *many = kn_expand(x[0], KN_SHAPE(275, 4, kn_size(x[0], 1)));
    return head_loss(x, many, KN_REDUCTION_MEAN);
}

static const op_case index_cases[] = {
    { "linear_cross_entropy",
      run_head,
      3,
      { { 2, { 5, 3 } }, { 2, { 4, 3 } }, { 1, { 4 } } },
      0,
      0 },
    { "linear_cross_entropy",
      run_head,
      2,
      { { 3, { 2, 3, 4 }, TRANSPOSED }, { 2, { 3, 4 }, SLICED } },
      0,
      0 },
    { "linear_cross_entropy", run_head_sum, 2, { { 1, { 4 } }, { 2, { 5, 4 } } }, 0, 0 },
    { "linear_cross_entropy_chunks",
      run_head_chunks,
      3,
      { { 2, { 4, 3 } }, { 2, { 5, 3 } }, { 1, { 5 } } },
      0,
      0 },
    { "linear_cross_entropy_chunks",
      run_head_chunks,
      2,
      { { 2, { 4, 3 }, TRANSPOSED }, { 2, { 3, 3 }, SLICED } },
      0,
      0 },
    { "gather", run_gather_rows, 1, { { 2, { 3, 5 } } }, 0, 0 },
    { "gather", run_gather_rows, 1, { { 2, { 3, 2 }, TRANSPOSED } }, 0, 0 },
    { "gather", run_gather_last, 1, { { 3, { 2, 2, 3 }, SLICED } }, 0, 0 },
    { "gather", run_gather_last, 1, { { 3, { 2, 1, 3 }, STRETCHED } }, 0, 0 },
    { "gather", run_gather_none, 1, { { 2, { 2, 3 } } }, 0, 0 },
    { "scatter", run_scatter, 2, { { 2, { 3, 5 } }, { 2, { 3, 2 }, TRANSPOSED } }, 0, 0 },
    { "scatter", run_scatter, 2, { { 2, { 4, 2 }, STRETCHED }, { 2, { 5, 3 } } }, 0, 0 },
    { "scatter_add", run_scatter_add, 2, { { 2, { 3, 5 }, SLICED }, { 2, { 3, 2 } } }, 0, 0 },
    { "scatter_add", run_scatter_add_last, 2, { { 3, { 2, 2, 3 } }, { 3, { 3, 1, 4 } } }, 0, 0 },
    { "index_add", run_index_add, 2, { { 2, { 2, 3 } }, { 2, { 2, 4 }, TRANSPOSED } }, 0, 0 },
    { "index_add", run_index_add, 2, { { 3, { 2, 3, 2 }, SLICED }, { 3, { 2, 4, 2 } } }, 0, 0 },
    { "sort", run_sort, 1, { { 2, { 3, 5 }, TRANSPOSED } }, 0, 0 },
    { "sort", run_sort_down, 1, { { 2, { 6, 2 }, SLICED } }, 0, 0 },
    { "sort", run_sort, 1, { { 2, { 0, 4 } } }, 0, 0 },
    { "topk", run_topk, 1, { { 3, { 2, 2, 5 } } }, 0, 0 },
    { "topk", run_topk_least, 1, { { 2, { 3, 4 }, TRANSPOSED } }, 0, 0 },
    { "cumsum", run_cumsum, 1, { { 3, { 2, 4, 3 }, SLICED } }, 0, 0 },
    { "cumsum", run_cumsum, 1, { { 2, { 3, 5 }, TRANSPOSED } }, 0, 0 },
    { "cumsum", run_cumsum, 1, { { 2, { 3, 0 } } }, 0, 0 },
};

#endif
