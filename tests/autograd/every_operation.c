/* tests/autograd/every_operation.c: the rows of autograd/operations.h, of embedding, padding and
 * dropout (every.h). The rows of elementwise operations are made of those of kernels/kinds.h. */
#include "tests/autograd/every.h"

/* ---- elementwise ----------------------------------------------------------------------------- */

/* Shapes and layouts for any operation of one or two operands; r says in which range. */
#define LAYOUTS(r) r "7 |" r "3 5t |" r "2 1 3s |" r "3 4e |" r ". |" r "0 3"
#define BROADCASTS(r)                                                                              \
    r "3 5;" r "3 5 |" r "2 3 1;" r "1 4 |" r "4;" r "2 3 4t |" r ".;" r "3 3s |" r "2 3e;" r      \
      "2 1 |" r "0 3;" r "3"

/* The kinds that have a derivative, and a function without further arguments. */
#define RANGE_LINE      ""
#define RANGE_POSITIVE  "+"
#define RANGE_NONZERO   "*"
#define RANGE_UNIT      "%"
#define RANGE_ABOVE     "^"
#define IF_NOTHING(...) __VA_ARGS__
#define IF_X(...)       __VA_ARGS__
#define IF_Y(...)       __VA_ARGS__
#define IF_AB(...)      __VA_ARGS__
#define IF_B_OUT(...)   __VA_ARGS__
#define IF_AB_OUT(...)  __VA_ARGS__
#define IF_NO_GRAD(...)
#define IF_PLAIN(...) __VA_ARGS__
#define IF_PARAMS(...)
#define UNARY(kind, name, function, reads, dtypes, domain, ...)                                    \
    IF_##function(IF_##reads(EVERY(kn_##name, LAYOUTS(RANGE_##domain), kn_##name(x));))
#define BINARY(kind, name, function, reads, dtypes, domain, ...)                                   \
    IF_##function(IF_##reads(EVERY(kn_##name, BROADCASTS(RANGE_##domain), kn_##name(x, y));))
KN_UNARY_KINDS(UNARY)
KN_BINARY_KINDS(BINARY)

EVERY(kn_scale, LAYOUTS(""), kn_scale(x, -2.5));
EVERY(kn_add_scalar, LAYOUTS(""), kn_add_scalar(x, 0.75));
EVERY(kn_pow, LAYOUTS("+"), kn_pow(x, 2.5));
EVERY(kn_pow, LAYOUTS(""), kn_pow(x, 3));
EVERY(kn_clamp, LAYOUTS(""), kn_clamp(x, -0.6, 0.7));
EVERY(kn_hardtanh, LAYOUTS(""), kn_hardtanh(x, .low = -0.6, .high = 0.7));
EVERY(kn_relu6, "2 3", kn_relu6(x));
EVERY(kn_relu_squared, "2 3", kn_relu_squared(x));
EVERY(kn_leaky_relu, LAYOUTS(""), kn_leaky_relu(x, .slope = 0.3));
EVERY(kn_elu, LAYOUTS(""), kn_elu(x, .alpha = 1.4));
EVERY(kn_celu, LAYOUTS(""), kn_celu(x, .alpha = 1.4));
EVERY(kn_hardshrink, LAYOUTS(""), kn_hardshrink(x, .lambda = 0.7));
EVERY(kn_softshrink, LAYOUTS(""), kn_softshrink(x));
EVERY(kn_prelu, "2 3; 3 | 4; 1 | 2 3 4t; 3 | 3 2 2e; 1", kn_prelu(x, y));
EVERY(kn_nan_to_num, "2 3t", kn_nan_to_num(x));
EVERY(kn_softplus, LAYOUTS(""), kn_softplus(x, .beta = 3, .threshold = 1.25));
EVERY(kn_add_scaled, BROADCASTS(""), kn_add_scaled(x, y, -1.5));
EVERY(kn_lerp, BROADCASTS(""), kn_lerp(x, y, 0.3));
/* one leaf as both inputs */
EVERY(kn_mul, "3 4t | 5", kn_mul(x, x));
EVERY(kn_add, "5", kn_add(x, x));

EVERY_FLAT(kn_floor_divide, BROADCASTS("*"), kn_floor_divide(x, y));
EVERY_FLAT(kn_eq, "2 3; 3", kn_eq(x, y));
EVERY_FLAT(kn_ne, "2 3; 3", kn_ne(x, y));
EVERY_FLAT(kn_lt, "2 3; 3", kn_lt(x, y));
EVERY_FLAT(kn_le, "2 3; 3", kn_le(x, y));
EVERY_FLAT(kn_gt, "2 3; 3", kn_gt(x, y));
EVERY_FLAT(kn_ge, "2 3; 3", kn_ge(x, y));
EVERY_FLAT(kn_eq_scalar, "2 3 | .", kn_eq_scalar(x, 0.5));
EVERY_FLAT(kn_ne_scalar, "2 3t", kn_ne_scalar(x, 0.5));
EVERY_FLAT(kn_lt_scalar, "2 3", kn_lt_scalar(x, 0.5));
EVERY_FLAT(kn_le_scalar, "2 3", kn_le_scalar(x, 0.5));
EVERY_FLAT(kn_gt_scalar, "2 3", kn_gt_scalar(x, 0.5));
EVERY_FLAT(kn_ge_scalar, "2 3", kn_ge_scalar(x, 0.5));
EVERY_FLAT(kn_logical_and, "2 3; 3", kn_logical_and(x, y));
EVERY_FLAT(kn_logical_and, "2 3; 3", kn_logical_and(kn_gt(x, y), kn_isnan(x)));
EVERY_FLAT(kn_logical_or, "2 3; 3", kn_logical_or(kn_gt(x, y), kn_isnan(x)));
EVERY_FLAT(kn_logical_xor, "2 3; 3", kn_logical_xor(kn_gt(x, y), kn_isnan(x)));
EVERY_FLAT(kn_logical_not, "2 3", kn_logical_not(kn_isnan(x)));
EVERY_FLAT(kn_isnan, "2 3", kn_isnan(x));
EVERY_FLAT(kn_isinf, "2 3", kn_isinf(x));
EVERY_FLAT(kn_isfinite, "2 3", kn_isfinite(x));

static kn_tensor *positive(kn_tensor *t)
{
    return kn_gt(kn_detach(t), kn_zeros_like(t));
}
EVERY(kn_where, "2 3; 3 | .; 4 3t", kn_where(positive(y), x, y));
EVERY(kn_masked_fill, "2 3", kn_masked_fill(x, positive(x), 3));
EVERY(kn_cast, "2 3", kn_cast(x, KN_F64));

/* kn_to_device would return x; meta takes nothing from a device. */
static kn_tensor *to_its_device(kn_tensor *x)
{
    const kn_device device = kn_device_of(x);
    for (int i = 0; device != KN_META && kn_op_at(i); i++)
        if (strcmp(kn_op_at(i)->name, "to_device") == 0)
            return kn_apply1(kn_op_at(i), 1, &x, 0, &device);
    return kn_to_device(x, device);
}
EVERY(kn_to_device, LAYOUTS(""), to_its_device(x));

/* ---- reductions ------------------------------------------------------------------------------ */

EVERY(kn_sum, LAYOUTS(""), kn_sum(x, 0, NULL, false));
EVERY(kn_sum, "3 2 5t | 0 3", kn_sum(x, DIMS(0), false));
EVERY(kn_sum, "2 3 2s", kn_sum(x, DIMS(0, -1), true));
EVERY(kn_mean, "2 3 5", kn_mean(x, 0, NULL, true));
EVERY(kn_mean, "2 1 5t | 0 4", kn_mean(x, DIMS(-1), false));
EVERY(kn_mean, "2 3 2", kn_mean(x, DIMS(-1, 0), true));
EVERY(kn_logsumexp, "2 3 2 | 3 2 5t | 0 3 2", kn_logsumexp(x, DIMS(-1, 1), false));
EVERY(kn_logsumexp, "2 3 2 | 3 5s", kn_logsumexp(x, DIMS(-1, 0), true));
EVERY(kn_prod, "2 3 2 | 3 5t", kn_prod(x, DIMS(-1, 0), true));
EVERY(kn_prod, "7 | 2 3 2 3", kn_prod(x, DIMS(0), false));
EVERY(kn_norm, "2 3 2 | 3 2 5t", kn_norm(x, 3, DIMS(0, 2), false));
EVERY(kn_norm, "2 3 2 | 3 2 5t | 0 3 2", kn_norm(x, 2, DIMS(1, 2), false));
EVERY(kn_norm, "2 3 | 3 5s", kn_norm(x, 1, DIMS(0), true));
EVERY(kn_norm, "2 3 | 3 5s", kn_norm(x, INFINITY, DIMS(1), false));
EVERY(kn_norm, "2 3 | 3 5t", kn_norm(x, -INFINITY, 0, NULL, false));
EVERY(kn_norm, "+2 3 | +3 5s", kn_norm(x, 0.5, DIMS(1), false));
EVERY(kn_norm, "+2 3 | +3 5t", kn_norm(x, -1, DIMS(-1), false));
EVERY_FLAT(kn_any, "2 3", kn_any(x, DIMS(1), false));
EVERY_FLAT(kn_all, "2 3", kn_all(x, DIMS(1), false));
EVERY(kn_amax, "5 3t | 6", kn_amax(x, DIMS(0), false));
EVERY(kn_amax, "2 3 4s", kn_amax(x, DIMS(-1, 0), true));
EVERY(kn_amin, "2 3 4 | 4 1", kn_amin(x, 0, NULL, false));
EVERY(kn_amin, "2 3 4t", kn_amin(x, DIMS(-1), false));
EVERY_FLAT(kn_argmax, "2 3", kn_argmax(x, 1));
EVERY_FLAT(kn_argmin, "2 3", kn_argmin(x, 1));
EVERY(kn_var, "2 3 | 3 5t", kn_var(x, 1, (int64_t[]){ 1 }));
EVERY(kn_var, "2 3 4 | 3 2 5t",
      kn_var(x, 2, ((int64_t[]){ 0, -1 }), .correction = KN_ZERO, .keep = true));
EVERY(kn_std, "2 3 | 3 5t", kn_std(x, 1, (int64_t[]){ 1 }));
EVERY(kn_std, "2 3 4 | 3 2 5t",
      kn_std(x, 2, ((int64_t[]){ 0, -1 }), .correction = KN_ZERO, .keep = true));

/* ---- indexing and order ---------------------------------------------------------------------- */

EVERY(kn_gather, "3 5 | 3 2t", kn_gather(x, 0, WHOLE(x, (4, 2), 2, 0, 2, 1, 1, 2, 0, 0)));
EVERY(kn_gather, "2 2 3s | 2 1 3e",
      kn_gather(x, -1, WHOLE(x, (2, 1, 5), 2, 0, 2, 1, 1, 2, 0, 0, 2, 2)));
EVERY(kn_gather, ".", kn_gather(x, -1, kn_zeros(KN_I64, kn_device_of(x), KN_SCALAR)));
EVERY(kn_gather, "2 3", kn_gather(x, 1, kn_zeros(KN_I64, kn_device_of(x), KN_SHAPE(0, 3))));
EVERY(kn_take_along_dim, "3 2", kn_take_along_dim(x, WHOLE(x, (2, 1), 2, -3), 0));
EVERY(kn_scatter, "3 5; 3 2t | 4 2e; 5 3", kn_scatter(x, 0, WHOLE(x, (3, 2), 2, 0, 2, 1, 1, 2), y));
EVERY(kn_scatter_add, "3 5s; 3 2", kn_scatter_add(x, 0, WHOLE(x, (3, 2), 2, 0, 2, 1, 1, 2), y));
EVERY(kn_scatter_add, "2 2 3; 3 1 4",
      kn_scatter_add(x, 2, WHOLE(x, (2, 1, 4), 2, 0, 2, 1, 1, 2, 0, 0), y));
EVERY(kn_index_add, "2 3; 2 4t | 2 3 2s; 2 4 2", kn_index_add(x, 1, WHOLE(x, (4), 2, 0, 2, 1), y));
/* so many places that some take several, some one, some none */
#define BY_ELEMENT(by, ...)                                                                        \
    kn_scatter_reduce(x, 0, WHOLE(x, (3, 2), 2, 0, 2, 1, 0, 2), y, by, __VA_ARGS__)
#define BY_SLICE(by, ...) kn_index_reduce(x, 1, WHOLE(x, (4), 2, 0, 2, 1), y, by, __VA_ARGS__)
EVERY(kn_scatter_reduce, "4 3s; 3 2", BY_ELEMENT(KN_BY_SUM, .exclude_self = true));
EVERY(kn_scatter_reduce, "4 3; 3 4t", BY_ELEMENT(KN_BY_MEAN, .exclude_self = false));
EVERY(kn_scatter_reduce, "4 3; 3 2e", BY_ELEMENT(KN_BY_MEAN, .exclude_self = true));
EVERY(kn_scatter_reduce, "4 3; 3 2", BY_ELEMENT(KN_BY_PROD, .exclude_self = false));
EVERY(kn_scatter_reduce, "4 3t; 3 2", BY_ELEMENT(KN_BY_PROD, .exclude_self = true));
EVERY(kn_scatter_reduce, "4 3; 3 2", BY_ELEMENT(KN_BY_AMAX, .exclude_self = false));
EVERY(kn_scatter_reduce, "4 3e; 3 2s", BY_ELEMENT(KN_BY_AMIN, .exclude_self = true));
EVERY(kn_index_reduce, "2 4; 2 4t | 2 3 2s; 2 4 2", BY_SLICE(KN_BY_SUM, .exclude_self = false));
EVERY(kn_index_reduce, "2 4; 2 4t | 2 3 2s; 2 4 2", BY_SLICE(KN_BY_MEAN, .exclude_self = true));
EVERY(kn_index_reduce, "2 4; 2 4 | 2 3 2; 2 4 2e", BY_SLICE(KN_BY_PROD, .exclude_self = true));
EVERY(kn_index_reduce, "2 4; 2 4", BY_SLICE(KN_BY_AMAX, .exclude_self = true));
EVERY(kn_index_reduce, "2 4s; 2 4", BY_SLICE(KN_BY_AMIN, .exclude_self = false));
#define EDGES WHOLE(x, (4), 2, 0, 2, 1)
EVERY(kn_segment_reduce, "4 3 | 4 | 4 2 2t", kn_segment_reduce(x, EDGES, 4, KN_BY_AMAX));
EVERY(kn_segment_reduce, "4 3s", kn_segment_reduce(x, EDGES, 3, KN_BY_MEAN));
EVERY(kn_segment_softmax, "4 3 | 4 | 4 2 2t", kn_segment_softmax(x, EDGES, 4));
#define TWO_INDICES 2, ((kn_tensor *[]){ WHOLE(x, (2, 1), 1, -2), WHOLE(x, (3), 0, 2, -1) })
#define APART       3, ((kn_tensor *[]){ WHOLE(x, (3), 1, -2, 1), NULL, WHOLE(x, (3), 0, 2, 0) })
#define LAST        2, ((kn_tensor *[]){ NULL, WHOLE(x, (2, 2), 1, -2, 1, 0) })
EVERY(kn_index, "2 3 | 2 4 2s", kn_index(x, TWO_INDICES));
EVERY(kn_index, "2 3 4 | 2 2 4t", kn_index(x, APART));
EVERY(kn_index, "3 4t | 3 2 2", kn_index(x, LAST));
EVERY(kn_index_put, "2 3 4t; 3 1 | 2 2 4; 2", kn_index_put(x, APART, y, true));
EVERY(kn_index_put, "3 4 2; 2 1 2", kn_index_put(x, LAST, y, false));
EVERY(kn_index_put, "2 3; 2 3 | 2 3 2t; 2", kn_index_put(x, TWO_INDICES, y, true));
EVERY(kn_index_put, "2 4; . | 2 4 2; 2 3 2s", kn_index_put(x, TWO_INDICES, y, false));
EVERY(kn_index_copy, "2 3; 2 2t | 2 3 2s; 2 2 2", kn_index_copy(x, 1, WHOLE(x, (2), 2, 0), y));
EVERY(kn_masked_scatter, "2 3; 6 | 2 1t; 7", kn_masked_scatter(x, positive(x), y));
EVERY_FLAT(kn_searchsorted, "2 3; 2 2t", kn_searchsorted(kn_cumsum(kn_exp(x), -1), y, true));
EVERY_FLAT(kn_bucketize, "2 3; 4", kn_bucketize(x, kn_cumsum(kn_exp(y), 0), false));
EVERY_FLAT(kn_isin, "2 3; 4", kn_isin(x, y));
EVERY_ROW(kn_bincount, false, false, "3", kn_bincount(WHOLE(x, (3), 1, 0, 1), NULL, 0));
EVERY_ROW(kn_unique, false, false, "2 3", kn_unique(x, NULL, NULL));
EVERY_FLAT(kn_histc, "2 3", kn_histc(x, 4, -1, 1));
EVERY_FLAT(kn_one_hot, "3", kn_one_hot(WHOLE(x, (3), 1, 0, 1), 2));
EVERY(kn_sort, "3 5t | 0 4", kn_sort(x, -1));
EVERY(kn_sort, ".", kn_sort(x, -1));
EVERY(kn_sort, "6 2s", kn_sort(x, 0, .descending = true));
EVERY_FLAT(kn_argsort, "3 2", kn_argsort(x, 0, false));
EVERY(kn_topk, "2 2 5", kn_topk(x, 2, -1));
EVERY(kn_topk, "3 4t", kn_topk(x, 1, 1, .smallest = true));
EVERY_ROW(kn_nonzero, false, false, "2 3", kn_nonzero(x));
EVERY_ROW(kn_masked_select, true, false, "2 1; 3", kn_masked_select(x, positive(y)));
EVERY(kn_cumsum, "2 4 3s | 3 5t | 3 0", kn_cumsum(x, 1));
EVERY(kn_cumsum, ".", kn_cumsum(x, 0));
EVERY(kn_sum, ".", kn_sum(x, DIMS(-1), true));
EVERY(kn_cumprod, "2 4 3s | 3 5t | 3 0", kn_cumprod(x, 1));
EVERY(kn_logcumsumexp, "2 4 3s | 3 5t | 3 0", kn_logcumsumexp(x, 1));
EVERY(kn_cummax, "2 4 3s | 3 5t | 3 0", kn_cummax(x, 1, NULL));
EVERY(kn_cummin, "2 4 3 | 3 5e", kn_cummin(x, -1, NULL));
EVERY(kn_diff, "2 4 3s | 3 5t | 3 0", kn_diff(x, 2, 1));
EVERY(kn_index_select, "3 3 | 2 3 3t", kn_index_select(x, -1, WHOLE(x, (4), 2, 0, 2, 1)));
EVERY(kn_embedding, "5 3 | 4 1t",
      kn_embedding(x, kn_cast(WHOLE(x, (2, 3), 1, 0, 1, 3, 1, 3), KN_I32)));
/* The second bag is empty, as is the last. */
EVERY(kn_embedding_bag, "5 3 | 4 1t",
      kn_embedding_bag(x, WHOLE(x, (5), 1, 0, 1, 3, 2), .offsets = WHOLE(x, (4), 0, 2, 2, 5)));
EVERY(kn_embedding_bag, "5 3t; 2 3",
      kn_embedding_bag(x, WHOLE(x, (2, 3), 1, 0, 1, 3, 2, 3), .mode = KN_BAG_SUM,
                       .per_sample_weights = y));
EVERY(kn_embedding_bag, "5 3; 5",
      kn_embedding_bag(x, WHOLE(x, (5), 1, 0, 1, 3, 2), .mode = KN_BAG_SUM, .per_sample_weights = y,
                       .offsets = WHOLE(x, (3), 0, 3, 5), .include_last_offset = true));
EVERY(kn_embedding_bag, "5 3 | 4 1",
      kn_embedding_bag(x, WHOLE(x, (2, 2), 1, 0, 3, 1), .padding_idx = KN_ZERO));
EVERY(kn_embedding_bag, "5 3 | 4 1t",
      kn_embedding_bag(x, WHOLE(x, (6), 1, 0, 1, 3, 2, 1), .mode = KN_BAG_MAX, .padding_idx = 1,
                       .offsets = WHOLE(x, (4), 0, 3, 3, 5)));
EVERY(kn_embedding_bag, "5 3",
      kn_embedding_bag(x, WHOLE(x, (2, 2), 4, 0, 3, 1), .mode = KN_BAG_MAX));
EVERY(kn_embedding_bag, "5 3",
      kn_embedding_bag(x, kn_zeros(KN_I64, kn_device_of(x), KN_SHAPE(0)), .mode = KN_BAG_MAX,
                       .offsets = WHOLE(x, (2), 0, 0)));

/* ---- shape ----------------------------------------------------------------------------------- */

/* Parts of x along dim 1 in another order. */
static kn_tensor *chunks(kn_tensor *x)
{
    kn_tensor *p[3];
    return kn_chunk(x, 1, 3, p) ? kn_cat((kn_tensor *[]){ p[2], p[0], p[1] }, 3, 1) : NULL;
}
/* Two parts never get a gradient. */
static kn_tensor *one_chunk(kn_tensor *x)
{
    kn_tensor *p[3];
    return kn_chunk(x, 1, 3, p) ? p[1] : NULL;
}
static kn_tensor *parts(kn_tensor *x)
{
    kn_tensor *p[3];
    const bool ok = kn_split(x, 1, 3, (int64_t[]){ 1, 0, kn_size(x, 1) - 1 }, p);
    return ok ? kn_cat((kn_tensor *[]){ p[2], p[0], p[1] }, 3, 1) : NULL;
}

static kn_tensor *meshed(kn_tensor *x, kn_tensor *y, bool xy)
{
    kn_tensor *p[2];
    return kn_meshgrid((kn_tensor *[]){ x, y }, 2, xy, p) ? kn_mul(p[0], p[1]) : NULL;
}

EVERY(kn_reshape, "3 2 4", kn_reshape(x, DIMS(-1, 2)));
EVERY(kn_reshape, "3 4t | 3 4e | 0 4", kn_reshape(x, DIMS(kn_numel(x))));
EVERY(kn_view, "2 3", kn_view(kn_contiguous(x), DIMS(6)));
EVERY(kn_transpose, "2 3", kn_transpose(x, 0, 1));
EVERY(kn_permute, "3 1 4 | 3 2 4s", kn_permute(x, DIMS(2, 0, 1)));
EVERY(kn_slice, "2 4 3 | 3 5t", kn_slice(x, 1, 1, 3));
EVERY(kn_slice, "3 5", kn_slice(x, 0, 1, 1));
EVERY(kn_slice_step, "7 3t | 6 2", kn_slice_step(x, 0, 1, 6, 2));
EVERY(kn_slice_step, "3 5", kn_slice_step(x, -1, 2, 2, 3));
EVERY(kn_select, "3 5t | 1 2 3", kn_select(x, 1, -1));
EVERY(kn_expand, "4 | 3 1 | .", kn_expand(x, KN_SHAPE(2, 3, 4)));
EVERY(kn_contiguous, "2 3 | 3 4t | 3 4e", kn_contiguous(x));
EVERY(kn_channels_last, "1 2 2 3", kn_channels_last(x));
EVERY(kn_squeeze, "2 1 3", kn_squeeze(x, 0, NULL));
EVERY(kn_unsqueeze, "2 3", kn_unsqueeze(x, -1));
EVERY(kn_flatten, "2 3 2", kn_flatten(x, 0, 1));
EVERY(kn_unflatten, "4 3", kn_unflatten(x, 0, DIMS(2, -1)));
/* [2,1,6], [2,2,1,3], [2,6] */
static kn_tensor *chain_of_views(kn_tensor *x)
{
    x = kn_movedim(kn_unflatten(kn_unsqueeze(x, 1), -1, KN_SHAPE(3, -1)), -1, 0);
    x = kn_flatten(kn_squeeze(x, KN_SHAPE(2)), 1, 2);
    return kn_mul(x, x);
}
EVERY(kn_unflatten, "2 6", chain_of_views(x));
EVERY(kn_movedim, "2 3 2", kn_movedim(x, 0, 2));
EVERY(kn_diagonal, "3 2 4 | 4 3t | 0 3", kn_diagonal(x, -1, 0, -1));
EVERY(kn_diag_embed, "3 2 | 2 3t | 0 3", kn_diag_embed(x, 1, 0, -1));
EVERY(kn_diag_embed, "3", kn_diag_embed(x, -2, 1, 0));
EVERY(kn_meshgrid, "2; 3 | .; 2", meshed(x, y, true));
EVERY(kn_meshgrid, "2; 3s", meshed(x, y, false));
EVERY(kn_unfold, "2 7s | 2 6 3t | 0 4", kn_unfold(x, 1, 3, 2)); /* windows overlap */
EVERY(kn_unfold, "5 3t", kn_unfold(x, 0, 2, 2));
EVERY(kn_chunk, "2 9 | 2 3 4t", chunks(x));
EVERY(kn_chunk, "2 6", one_chunk(x));
EVERY(kn_split, "2 4 3t", parts(x));
EVERY(kn_cat, "2 3; 2 1 | 2 3 2t; 2 0 2", kn_cat((kn_tensor *[]){ x, y, x }, 3, 1));
EVERY(kn_stack, "2 3; 2 3 | 2 3t; 2 3", kn_stack((kn_tensor *[]){ x, y, x }, 3, -1));
EVERY(kn_flip, "2 2 3t | 2 3 2 2", kn_flip(x, DIMS(-1)));
EVERY(kn_roll, "2 2 5t | 0 5", kn_roll(x, DIMS(2), (int64_t[]){ -1 }));
EVERY(kn_repeat, "2 3 | 2 3t", kn_repeat(x, DIMS(2, 1, 2)));
EVERY(kn_tile, "2 3", kn_tile(x, DIMS(2)));
EVERY(kn_repeat_interleave, "2 3", kn_repeat_interleave(x, 1, DIMS(1, 0, 2)));
EVERY(kn_repeat_interleave, "3 2t", kn_repeat_interleave(x, 0, DIMS(2)));
EVERY(kn_tril, "3 3 | 2 3", kn_tril(x, 0));
EVERY(kn_triu, "3 3 | 3 2t", kn_triu(x, 1));
EVERY(kn_pad, "2 2 5t | 3 4s", kn_pad(x, KN_PAD_CONSTANT, 0.5, DIMS(2, -1)));
EVERY(kn_pad, "2 3 4", kn_pad(x, KN_PAD_CONSTANT, 9, DIMS(1, 1, 2, 0, 0, 1)));
EVERY(kn_pad, "2 3 4", kn_pad(x, KN_PAD_CONSTANT, 9, DIMS(-1, 2, 1, -2, -1, -1)));
EVERY(kn_pad, "2 3 4t", kn_pad(x, KN_PAD_REFLECT, 0, DIMS(1, 0, 2, 2, 1, 1)));
EVERY(kn_pad, "2 3 4", kn_pad(x, KN_PAD_REPLICATE, 0, DIMS(0, 1, 2, 3, 1, 4)));
EVERY(kn_pad, "2 3 4", kn_pad(x, KN_PAD_REPLICATE, 0, DIMS(-1, 2, 1, -2)));
EVERY(kn_pad, "2 3 4", kn_pad(x, KN_PAD_CIRCULAR, 0, DIMS(-1, 2, 1, -1)));
EVERY(kn_pad, "2 3 4", kn_pad(x, KN_PAD_CIRCULAR, 0, DIMS(1, 2, 1, 1, 2, 2)));

/* ---- products -------------------------------------------------------------------------------- */

EVERY(kn_matmul,
      "3 5; 5 4 | 3 5t; 5 1s | 2 3 4; 4 5t | 2 1 2 3; 3 3 2 | 2 2 3e; 2 3 2 | 2 0; 0 3 | 0 3; 3 2 "
      "| 4; 4 | 3; 3 2 | 5; 2 5 3 | 2 3; 3s | 2 3 4; 4",
      kn_matmul(x, y));
EVERY(kn_matmul, "3 4", kn_matmul(x, kn_transpose(x, -1, -2)));
EVERY(kn_einsum, "2 3; 3 2", kn_einsum("ij,jk->ki", 2, (kn_tensor *[]){ x, y }));
EVERY(kn_cdist, "2 3 4; 2 2 4t | 3 2; 5 2", kn_cdist(x, y));
EVERY(kn_cdist, "26 2; 3 2t | 2 2 3; 2 27 3", kn_cdist(x, y));
EVERY(kn_cdist, "3 4; 2 4", kn_cdist(x, y, .p = 1));
EVERY(kn_linear, "3 5; 4 5; 4 | 2 3 5t; 4 5t; 4 | 5; 1 5", kn_linear(x, y, z, false));
EVERY(kn_linear, "2 1 5; 5 3; 3 | 0 5; 5 3", kn_linear(x, y, z, true));

/* ---- random ---------------------------------------------------------------------------------- */

EVERY_FLAT(kn_rand_like, "%2 3", kn_rand_like(x));
EVERY_FLAT(kn_randn_like, "%2 3", kn_randn_like(x));
EVERY_FLAT(kn_bernoulli, "%2 3", kn_bernoulli(x));
EVERY_FLAT(kn_randint, "2 3", kn_randint(KN_I64, kn_device_of(x), -3, 4, 1, 2, KN_SHAPE(2, 3)));
EVERY_FLAT(kn_randint_like, "2 3", kn_randint_like(x, -3, 4));
EVERY_FLAT(kn_randperm, "2 3", kn_randperm(kn_device_of(x), 5, 1, 2));
EVERY_FLAT(kn_multinomial, "%2 3", kn_multinomial(x, 2, false));
EVERY(kn_dropout, LAYOUTS(""), kn_dropout(x, 0.4));
EVERY(kn_dropout, "3", kn_dropout(x, 1));
