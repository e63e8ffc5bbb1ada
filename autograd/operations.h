/* autograd/operations.h: differentiable operations on tensors of any kind.
 *
 * Shapes are written as in PyTorch; broadcasting follows the usual rule (trailing dims align).
 * Mixed float dtypes are an error except where an operation says otherwise; there is no
 * autocast. */
#ifndef KNAP_AUTOGRAD_OPERATIONS_H
#define KNAP_AUTOGRAD_OPERATIONS_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- elementwise ----------------------------------------------------------------------------- */

/* Results have the dtype of their inputs. Where a comment names no dtype, floats are taken; numbers
 * are floats and integers. Two operands have one dtype, and their shapes broadcast. Options: a
 * field that is left out, or 0, has the default of the comment beside it; KN_ZERO (autograd.h) is a
 * real 0. NaN gives NaN, also in kn_sign. */

/* Of two numbers. Division of integers truncates; by zero it gives 0. */
KN_API kn_tensor *kn_add(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_sub(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_mul(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_div(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_maximum(kn_tensor *a, kn_tensor *b); /* where equal, half the gradient each */
KN_API kn_tensor *kn_minimum(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_add_scaled(kn_tensor *a, kn_tensor *b, double factor); /* a + factor b */
/* a + weight (b - a): a at 0, b at 1, exactly. Floats. */
KN_API kn_tensor *kn_lerp(kn_tensor *a, kn_tensor *b, double weight);
/* a^b. The gradient of a is 0 where b is 0, that of b where a is 0 and b >= 0; below 0 that of b is
 * NaN. */
KN_API kn_tensor *kn_pow_tensor(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_atan2(kn_tensor *a, kn_tensor *b);     /* the angle of the point (b, a) */
KN_API kn_tensor *kn_logaddexp(kn_tensor *a, kn_tensor *b); /* log(e^a + e^b) */
/* Of numbers; of integers by zero they give 0. floor(a / b), without gradient; a - b floor(a / b),
 * whose sign is b's; a - b trunc(a / b), whose sign is a's. */
KN_API kn_tensor *kn_floor_divide(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_remainder(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_fmod(kn_tensor *a, kn_tensor *b);
/* Comparisons of numbers give bool tensors without gradient. */
KN_API kn_tensor *kn_eq(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_ne(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_lt(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_le(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_gt(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_ge(kn_tensor *a, kn_tensor *b);
/* The same of x and a number, which x's dtype must hold: kn_gt_scalar(x, 0.5). */
KN_API kn_tensor *kn_eq_scalar(kn_tensor *x, double value);
KN_API kn_tensor *kn_ne_scalar(kn_tensor *x, double value);
KN_API kn_tensor *kn_lt_scalar(kn_tensor *x, double value);
KN_API kn_tensor *kn_le_scalar(kn_tensor *x, double value);
KN_API kn_tensor *kn_gt_scalar(kn_tensor *x, double value);
KN_API kn_tensor *kn_ge_scalar(kn_tensor *x, double value);
/* Of bool tensors, or of numbers, which are true where they aren't 0; into bool, without
 * gradient. */
KN_API kn_tensor *kn_logical_and(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_logical_or(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_logical_xor(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_logical_not(kn_tensor *x);
/* Which numbers are NaN, infinite, neither: bool, without gradient. */
KN_API kn_tensor *kn_isnan(kn_tensor *x);
KN_API kn_tensor *kn_isinf(kn_tensor *x);
KN_API kn_tensor *kn_isfinite(kn_tensor *x);

/* Of numbers; integers take whole parameters (bounds of kn_clamp also infinite ones), and wrap. */
KN_API kn_tensor *kn_scale(kn_tensor *x, double factor);      /* factor * x */
KN_API kn_tensor *kn_add_scalar(kn_tensor *x, double offset); /* x + offset */
KN_API kn_tensor *kn_neg(kn_tensor *x);
KN_API kn_tensor *kn_abs(kn_tensor *x); /* gradient 0 at 0 */
KN_API kn_tensor *kn_square(kn_tensor *x);
/* min(max(x, low), high): the bounds are rounded to x's dtype, and not NaN; gradient 1 at both */
KN_API kn_tensor *kn_clamp(kn_tensor *x, double low, double high);
/* -1, 0 or 1; then integers below, above, nearest (half to even), towards 0. Their gradients are
 * 0. */
KN_API kn_tensor *kn_sign(kn_tensor *x);
KN_API kn_tensor *kn_floor(kn_tensor *x);
KN_API kn_tensor *kn_ceil(kn_tensor *x);
KN_API kn_tensor *kn_round(kn_tensor *x);
KN_API kn_tensor *kn_trunc(kn_tensor *x);

KN_API kn_tensor *kn_frac(kn_tensor *x); /* x - trunc(x) */
KN_API kn_tensor *kn_exp(kn_tensor *x);
KN_API kn_tensor *kn_exp2(kn_tensor *x);
KN_API kn_tensor *kn_expm1(kn_tensor *x); /* e^x - 1, exact near 0 */
KN_API kn_tensor *kn_log(kn_tensor *x);
KN_API kn_tensor *kn_log1p(kn_tensor *x); /* log(1 + x), exact near 0 */
KN_API kn_tensor *kn_log2(kn_tensor *x);
KN_API kn_tensor *kn_log10(kn_tensor *x);
KN_API kn_tensor *kn_sqrt(kn_tensor *x);
KN_API kn_tensor *kn_rsqrt(kn_tensor *x);
KN_API kn_tensor *kn_reciprocal(kn_tensor *x);
KN_API kn_tensor *kn_pow(kn_tensor *x, double exponent);
KN_API kn_tensor *kn_sin(kn_tensor *x);
KN_API kn_tensor *kn_cos(kn_tensor *x);
KN_API kn_tensor *kn_tan(kn_tensor *x);
KN_API kn_tensor *kn_atan(kn_tensor *x);
KN_API kn_tensor *kn_asin(kn_tensor *x);
KN_API kn_tensor *kn_acos(kn_tensor *x);
KN_API kn_tensor *kn_sinh(kn_tensor *x);
KN_API kn_tensor *kn_cosh(kn_tensor *x);
KN_API kn_tensor *kn_asinh(kn_tensor *x);
KN_API kn_tensor *kn_acosh(kn_tensor *x);
KN_API kn_tensor *kn_atanh(kn_tensor *x);
KN_API kn_tensor *kn_erf(kn_tensor *x);
KN_API kn_tensor *kn_erfc(kn_tensor *x);    /* 1 - erf(x), exact where that is small */
KN_API kn_tensor *kn_erfinv(kn_tensor *x);  /* y with erf(y) = x */
KN_API kn_tensor *kn_lgamma(kn_tensor *x);  /* log |gamma(x)| */
KN_API kn_tensor *kn_digamma(kn_tensor *x); /* its derivative; NaN at whole numbers below 0 */

KN_API kn_tensor *kn_tanh(kn_tensor *x);
KN_API kn_tensor *kn_sigmoid(kn_tensor *x);
KN_API kn_tensor *kn_logsigmoid(kn_tensor *x); /* log(sigmoid(x)) */
KN_API kn_tensor *kn_relu(kn_tensor *x);
KN_API kn_tensor *kn_relu6(kn_tensor *x);        /* min(max(x, 0), 6); gradient 0 at 0 and 6 */
KN_API kn_tensor *kn_relu_squared(kn_tensor *x); /* max(x, 0)^2, in one pass each way */
KN_API kn_tensor *kn_gelu_tanh(kn_tensor *x);    /* tanh form, as GPT-2 */
KN_API kn_tensor *kn_gelu(kn_tensor *x);         /* exact form */
KN_API kn_tensor *kn_silu(kn_tensor *x);
KN_API kn_tensor *kn_mish(kn_tensor *x);        /* x tanh(log(1 + e^x)) */
KN_API kn_tensor *kn_hardsigmoid(kn_tensor *x); /* min(max(x + 3, 0), 6) / 6; gradient 0 at -3, 3 */
KN_API kn_tensor *kn_hardswish(kn_tensor *x);   /* x hardsigmoid(x); gradient 0 at -3, 1 at 3 */
/* scale x where x > 0, else scale alpha (e^x - 1), with KN_SELU_SCALE and KN_SELU_ALPHA */
KN_API kn_tensor *kn_selu(kn_tensor *x);
KN_API kn_tensor *kn_softsign(kn_tensor *x);   /* x / (1 + |x|) */
KN_API kn_tensor *kn_tanhshrink(kn_tensor *x); /* x - tanh(x) */
/* x where x > 0, else w x, of x[N,C,...] with w[C], one a channel, w[1] or w[]; both of one dtype,
 * and both get gradients. */
KN_API kn_tensor *kn_prelu(kn_tensor *x, kn_tensor *w);

typedef struct kn_leaky_relu_options {
    KN_BEGIN_OPTIONS;
    double slope; /* default 0.01; finite */
} kn_leaky_relu_options;

/* x where x > 0, else slope x */
KN_API kn_tensor *kn_leaky_relu_(kn_tensor *x, kn_leaky_relu_options o);
#define kn_leaky_relu(x, ...) kn_leaky_relu_(x, KN_OPTIONS(kn_leaky_relu_options, __VA_ARGS__))

typedef struct kn_elu_options {
    KN_BEGIN_OPTIONS;
    double alpha; /* default 1; finite */
} kn_elu_options;

/* x where x > 0, else alpha (e^x - 1) */
KN_API kn_tensor *kn_elu_(kn_tensor *x, kn_elu_options o);
#define kn_elu(x, ...) kn_elu_(x, KN_OPTIONS(kn_elu_options, __VA_ARGS__))

/* x where x > 0, else alpha (e^(x / alpha) - 1); alpha isn't 0 */
KN_API kn_tensor *kn_celu_(kn_tensor *x, kn_elu_options o);
#define kn_celu(x, ...) kn_celu_(x, KN_OPTIONS(kn_elu_options, __VA_ARGS__))

typedef struct kn_shrink_options {
    KN_BEGIN_OPTIONS;
    double lambda; /* at least 0; 0: 0.5; KN_ZERO: 0 */
} kn_shrink_options;

/* x where |x| > lambda, else 0; kn_softshrink moves x towards 0 by lambda there. */
KN_API kn_tensor *kn_hardshrink_(kn_tensor *x, kn_shrink_options o);
KN_API kn_tensor *kn_softshrink_(kn_tensor *x, kn_shrink_options o);
#define kn_hardshrink(x, ...) kn_hardshrink_(x, KN_OPTIONS(kn_shrink_options, __VA_ARGS__))
#define kn_softshrink(x, ...) kn_softshrink_(x, KN_OPTIONS(kn_shrink_options, __VA_ARGS__))

typedef struct kn_nan_to_num_options {
    KN_BEGIN_OPTIONS;
    double nan;            /* default 0 */
    double posinf, neginf; /* 0: the largest and the smallest number of the dtype; KN_ZERO: 0 */
} kn_nan_to_num_options;

/* x with numbers in place of NaN and of both infinities, where its gradient is 0. */
KN_API kn_tensor *kn_nan_to_num_(kn_tensor *x, kn_nan_to_num_options o);
#define kn_nan_to_num(x, ...) kn_nan_to_num_(x, KN_OPTIONS(kn_nan_to_num_options, __VA_ARGS__))

typedef struct kn_softplus_options {
    KN_BEGIN_OPTIONS;
    double beta;      /* default 1; above 0 */
    double threshold; /* default 20; finite */
} kn_softplus_options;

/* log(1 + e^(beta x)) / beta; x itself where beta x is above the threshold */
KN_API kn_tensor *kn_softplus_(kn_tensor *x, kn_softplus_options o);
#define kn_softplus(x, ...) kn_softplus_(x, KN_OPTIONS(kn_softplus_options, __VA_ARGS__))

typedef struct kn_hardtanh_options {
    KN_BEGIN_OPTIONS;
    double low, high; /* defaults -1 and 1; finite, low <= high */
} kn_hardtanh_options;

/* min(max(x, low), high), as kn_clamp, but the gradient is 0 at low and at high */
KN_API kn_tensor *kn_hardtanh_(kn_tensor *x, kn_hardtanh_options o);
#define kn_hardtanh(x, ...) kn_hardtanh_(x, KN_OPTIONS(kn_hardtanh_options, __VA_ARGS__))

/* cond ? a : b, cond bool; any dtype */
KN_API kn_tensor *kn_where(kn_tensor *cond, kn_tensor *a, kn_tensor *b);
/* value where mask, a bool tensor, holds, else x, whose gradient is 0 there. Numbers; an integer x
 * needs a whole value. */
KN_API kn_tensor *kn_masked_fill(kn_tensor *x, kn_tensor *mask, double value);
/* Converts; the gradient converts back. Returns x itself where the dtype is the same. */
KN_API kn_tensor *kn_cast(kn_tensor *x, kn_dtype dtype);
/* Copies to device; the gradient is copied back. Returns x itself where it is there. Tensors on
 * meta have no values, so from or to there is an error. */
KN_API kn_tensor *kn_to_device(kn_tensor *x, kn_device device);

/* ---- reductions ------------------------------------------------------------------------------ */

/* Over the n dims listed (negative counts from the end; n == 0: all). keep: reduced dims stay as 1.
 * The sum of bool and integers is i64. */
KN_API kn_tensor *kn_sum(kn_tensor *x, int n, const int64_t *dims, bool keep);
KN_API kn_tensor *kn_mean(kn_tensor *x, int n, const int64_t *dims, bool keep);
/* The same of an extremum: an error where there is no element. The gradient goes to all equal
 * extrema in equal parts. */
KN_API kn_tensor *kn_amax(kn_tensor *x, int n, const int64_t *dims, bool keep);
KN_API kn_tensor *kn_amin(kn_tensor *x, int n, const int64_t *dims, bool keep);
/* The position of the first maximum (minimum), NaN above (below) all; i64, no gradient. */
KN_API kn_tensor *kn_argmax(kn_tensor *x, int dim);
KN_API kn_tensor *kn_argmin(kn_tensor *x, int dim);
/* Over the n dims listed, as kn_sum; bf16 and f16 are computed in f32 and rounded once.
 *
 * log sum exp(x), of nothing -inf. Float. Where all are -inf, or one is inf, the gradient is
 * NaN. */
KN_API kn_tensor *kn_logsumexp(kn_tensor *x, int n, const int64_t *dims, bool keep);
/* The product: of nothing 1; of bool and integers i64. The gradient is right where factors are 0.
 * It keeps about twice x for backward. */
KN_API kn_tensor *kn_prod(kn_tensor *x, int n, const int64_t *dims, bool keep);
/* The p-norm (sum |x|^p)^(1/p) of a float x (torch.linalg.vector_norm). p INFINITY: the largest
 * |x|; -INFINITY: the smallest; 0: the number of elements that aren't 0. The gradient is 0 where p,
 * x or the norm is 0, and equal extrema share it in equal parts. Of nothing it is 0, and an error
 * for p < 0 and INFINITY. */
KN_API kn_tensor *kn_norm(kn_tensor *x, double p, int n, const int64_t *dims, bool keep);
/* Bool, no gradient: some element isn't 0 (of nothing false); no element is 0 (of nothing true).
 * NaN isn't 0. */
KN_API kn_tensor *kn_any(kn_tensor *x, int n, const int64_t *dims, bool keep);
KN_API kn_tensor *kn_all(kn_tensor *x, int n, const int64_t *dims, bool keep);

typedef struct kn_var_options {
    KN_BEGIN_OPTIONS;
    double correction; /* 0: 1, the unbiased variance; KN_ZERO: 0, the biased one */
    bool keep;         /* reduced dims stay as 1 */
} kn_var_options;
/* Variance sum (x - mean)^2 / (N - correction) over the N elements of the n dims listed (n == 0:
 * all), and its root. Float. NaN where N is correction (one element, unbiased). Where std is 0 its
 * gradient is 0. */
KN_API kn_tensor *kn_var_(kn_tensor *x, int n, const int64_t *dims, kn_var_options o);
KN_API kn_tensor *kn_std_(kn_tensor *x, int n, const int64_t *dims, kn_var_options o);
#define kn_var(x, n, dims, ...) kn_var_(x, n, dims, KN_OPTIONS(kn_var_options, __VA_ARGS__))
#define kn_std(x, n, dims, ...) kn_std_(x, n, dims, KN_OPTIONS(kn_var_options, __VA_ARGS__))

/* ---- indexing and order ---------------------------------------------------------------------- */

/* Indices are i64 or i32 in [0, n) of the dim; one outside is an error that names its position and
 * its value. They get no gradient. Results are the same on every device and with any number of
 * threads.
 *
 * y[i, j, k] = x[i, index[i, j, k], k] for dim 1: y has index's shape, which has x's number of dims
 * and is no larger than x but in dim. The gradient adds up where an index repeats. */
KN_API kn_tensor *kn_gather(kn_tensor *x, int dim, kn_tensor *index);
/* As kn_gather, where x and index broadcast in the other dims; indices below 0 count from the
 * end. */
KN_API kn_tensor *kn_take_along_dim(kn_tensor *x, kn_tensor *index, int dim);
/* A copy y of x with y[i, index[i, j, k], k] = src[i, j, k] for dim 1, and += for scatter_add. src,
 * of x's dtype, is at least as large as index in each dim. Where an index repeats, the last element
 * in row-major order stays, and it alone gets the gradient (torch leaves both open); sums are added
 * in row-major order, of floats in f32 or f64, and rounded once. */
KN_API kn_tensor *kn_scatter(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src);
KN_API kn_tensor *kn_scatter_add(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src);
/* A copy y of x to whose slice index[i] along dim slice i of src is added, in the order of the 1-d
 * index. src has x's dtype and, but in dim, its shape. */
KN_API kn_tensor *kn_index_add(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src);
/* How values that go to one place are joined. Integers wrap; their mean is rounded down. */
typedef enum kn_reduce_by {
    KN_BY_SUM = 0,
    KN_BY_MEAN,
    KN_BY_PROD,
    KN_BY_AMAX, /* equal extrema share the gradient in equal parts */
    KN_BY_AMIN
} kn_reduce_by;
typedef struct kn_scatter_reduce_options {
    KN_BEGIN_OPTIONS;
    bool exclude_self; /* x's elements count only where nothing goes (include_self = False) */
} kn_scatter_reduce_options;
/* A copy y of x with y[i, index[i, j, k], k] joined with src[i, j, k] for dim 1 (sizes as for
 * kn_scatter_add), and with x's own element there. They are joined in row-major order, floats in
 * f32 or f64, and rounded once; the gradient of a product is right where factors are 0. */
KN_API kn_tensor *kn_scatter_reduce_(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src,
                                     kn_reduce_by by, kn_scatter_reduce_options o);
#define kn_scatter_reduce(x, dim, index, src, by, ...)                                             \
    kn_scatter_reduce_(x, dim, index, src, by, KN_OPTIONS(kn_scatter_reduce_options, __VA_ARGS__))
/* The same of slices along dim: slice i of src is joined with slice index[i] of x, for a 1-d index
 * (sizes as for kn_index_add). */
KN_API kn_tensor *kn_index_reduce_(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src,
                                   kn_reduce_by by, kn_scatter_reduce_options o);
#define kn_index_reduce(x, dim, index, src, by, ...)                                               \
    kn_index_reduce_(x, dim, index, src, by, KN_OPTIONS(kn_scatter_reduce_options, __VA_ARGS__))
/* Rows of x[E, ...] with one index[E], joined: [n, ...]. A segment without rows is 0, a product of
 * none 1. Edges of a graph by the node at which they end, points by their cloud. */
KN_API kn_tensor *kn_segment_reduce(kn_tensor *x, kn_tensor *index, int64_t n, kn_reduce_by by);
/* exp(x) / sum exp(x) over the rows of x[E, ...] with one index[E] in [0, n). Float, computed in
 * f32 or f64. */
KN_API kn_tensor *kn_segment_softmax(kn_tensor *x, kn_tensor *index, int64_t n);
/* kn_nonzero: the places of the elements of x that aren't 0, NaN among them, in row-major order:
 * i64 [n, dims of x], without gradient. kn_masked_select: the elements of x where mask, a bool
 * tensor, holds: [n]; x and mask broadcast. n depends on values, for which the host waits: neither
 * works on meta or in a recorded step. */
KN_API kn_tensor *kn_nonzero(kn_tensor *x);
KN_API kn_tensor *kn_masked_select(kn_tensor *x, kn_tensor *mask);
/* x[i[0], i[1], ...] for n indices into the first dims of x, which broadcast; negative ones count
 * from the end. NULL is a whole dim: x[:, i] has { NULL, i }. A bool one stands for the places of
 * its true elements, in as many dims as it has, for which the host waits as in kn_nonzero. The dims
 * of the indices come in the place of the first, or in front where a whole one is between two. */
KN_API kn_tensor *kn_index(kn_tensor *x, int n, kn_tensor *const *index);
/* A copy y of x with y[i[0], i[1], ...] = values, or += where accumulate; values broadcast to
 * kn_index(x, n, i). Where a place repeats, the last one in order stays. */
KN_API kn_tensor *kn_index_put(kn_tensor *x, int n, kn_tensor *const *index, kn_tensor *values,
                               bool accumulate);
/* The same with slice index[i] along dim replaced by slice i of src (sizes as for kn_index_add). */
KN_API kn_tensor *kn_index_copy(kn_tensor *x, int dim, kn_tensor *index, kn_tensor *src);
/* x where mask, a bool tensor that broadcasts to x, doesn't hold; the elements of src, of x's
 * dtype, one after another where it does. src has as many at least. */
KN_API kn_tensor *kn_masked_scatter(kn_tensor *x, kn_tensor *mask, kn_tensor *src);
/* Where values x would come in sorted[N], ascending: i64 of x's shape, before equal elements, or
 * after them where right. sorted[..., N] has a line for each of x[..., M]. Takes the time of
 * sorting both. */
KN_API kn_tensor *kn_searchsorted(kn_tensor *sorted, kn_tensor *x, bool right);
KN_API kn_tensor *kn_bucketize(kn_tensor *x, kn_tensor *boundaries, bool right);
/* Which elements of x are among elements, of the same dtype: bool. */
KN_API kn_tensor *kn_isin(kn_tensor *x, kn_tensor *elements);
/* How often each of 0, 1, ..., max(x) occurs in x[N], i64, or the sum of its weights[N] (or NULL);
 * at least so many of them. The host waits for values, as in kn_nonzero. */
KN_API kn_tensor *kn_bincount(kn_tensor *x, kn_tensor *weights, int64_t least);
/* The different elements of x in ascending order, without gradient; in *inverse the place of each
 * element of x among them, in *counts how often each occurs (i64; NULL: not wanted). The host waits
 * for values. */
KN_API kn_tensor *kn_unique(kn_tensor *x, kn_tensor **inverse, kn_tensor **counts);
/* How many elements of a float x lie in each of these bins of equal width from low to high, in x's
 * dtype; others don't count. Where low is high: from the least to the largest element, for
 * which the host waits. */
KN_API kn_tensor *kn_histc(kn_tensor *x, int64_t bins, double low, double high);
/* i64 [..., classes] of zeros, with a one at index[...]. classes -1: one more than the largest
 * index, for which the host waits. */
KN_API kn_tensor *kn_one_hot(kn_tensor *index, int64_t classes);

typedef struct kn_sort_options {
    KN_BEGIN_OPTIONS;
    bool descending;
    kn_tensor **indices; /* gets the elements' positions in x, i64; NULL: not wanted */
} kn_sort_options;
/* The elements of x along dim in ascending order, equal ones in that of x (stable, also where
 * descending). NaN is above all. Any dtype with arithmetic. */
KN_API kn_tensor *kn_sort_(kn_tensor *x, int dim, kn_sort_options o);
#define kn_sort(x, dim, ...) kn_sort_(x, dim, KN_OPTIONS(kn_sort_options, __VA_ARGS__))
/* The positions alone. */
KN_API kn_tensor *kn_argsort(kn_tensor *x, int dim, bool descending);

typedef struct kn_topk_options {
    KN_BEGIN_OPTIONS;
    bool smallest;       /* not the largest */
    kn_tensor **indices; /* as in kn_sort_options */
} kn_topk_options;
/* The k largest elements along dim, k in [0, n], in order: what a stable sort has in front. */
KN_API kn_tensor *kn_topk_(kn_tensor *x, int64_t k, int dim, kn_topk_options o);
#define kn_topk(x, k, dim, ...) kn_topk_(x, k, dim, KN_OPTIONS(kn_topk_options, __VA_ARGS__))
/* Running sums along dim, added in f64; of bool and integers i64. */
KN_API kn_tensor *kn_cumsum(kn_tensor *x, int dim);
/* Running products (of integers i64), whose gradient is right where factors are 0, and running
 * log sum exp(x) of floats. They are joined in f64. */
KN_API kn_tensor *kn_cumprod(kn_tensor *x, int dim);
KN_API kn_tensor *kn_logcumsumexp(kn_tensor *x, int dim);
/* The largest (smallest) element so far along dim, and in *indices, unless that is NULL, its last
 * place (i64), which gets the gradient. NaN is above (below) all. */
KN_API kn_tensor *kn_cummax(kn_tensor *x, int dim, kn_tensor **indices);
KN_API kn_tensor *kn_cummin(kn_tensor *x, int dim, kn_tensor **indices);
/* x[i + 1] - x[i] along dim, n times over. */
KN_API kn_tensor *kn_diff(kn_tensor *x, int n, int dim);

/* ---- shape ----------------------------------------------------------------------------------- */

/* A view where strides allow it, else a copy. One size may be -1. */
KN_API kn_tensor *kn_reshape(kn_tensor *x, int ndim, const int64_t *shape);
/* As reshape, but an error where a copy would be needed. */
KN_API kn_tensor *kn_view(kn_tensor *x, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_transpose(kn_tensor *x, int dim0, int dim1);              /* a view */
KN_API kn_tensor *kn_permute(kn_tensor *x, int n, const int64_t *order);       /* a view */
KN_API kn_tensor *kn_slice(kn_tensor *x, int dim, int64_t begin, int64_t end); /* [begin, end) */
/* Every step-th element of these, step above 0: x[begin:end:step]. A view. */
KN_API kn_tensor *kn_slice_step(kn_tensor *x, int dim, int64_t begin, int64_t end, int64_t step);
/* x without dim, where it is at index, which counts from the end where it is below 0: x[:, t] is
 * kn_select(x, 1, t). A view. */
KN_API kn_tensor *kn_select(kn_tensor *x, int dim, int64_t index);
/* Repeats dims of size 1 without a copy; new dims come in front; -1 keeps a dim's size. */
KN_API kn_tensor *kn_expand(kn_tensor *x, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_contiguous(kn_tensor *x); /* row-major: a copy, or x itself */
/* x[N,C,H,W] with its channels side by side in memory, as [N,H,W,C]: the order in which
 * convolutions of many channels are fast. Elementwise operations, convolution, batch norm and
 * pooling give results in the order of their input. A copy, or x itself where it is so already. */
KN_API kn_tensor *kn_channels_last(kn_tensor *x);
KN_API bool kn_is_channels_last(const kn_tensor *x); /* dense in that order */
/* x without those of the n dims listed (negative counts from the end; n == 0: all) that have size
 * 1; others stay. A view. */
KN_API kn_tensor *kn_squeeze(kn_tensor *x, int n, const int64_t *dims);
/* A dim of size 1 more, at dim of the result; -1 is behind all. A view. */
KN_API kn_tensor *kn_unsqueeze(kn_tensor *x, int dim);
/* Dims start to end, both included, as one; a scalar as [1]. A view where strides allow it. */
KN_API kn_tensor *kn_flatten(kn_tensor *x, int start, int end);
/* One dim as n dims of these sizes; one size may be -1. A view. */
KN_API kn_tensor *kn_unflatten(kn_tensor *x, int dim, int n, const int64_t *sizes);
/* Dim from becomes dim to; the others keep their order. A view. */
KN_API kn_tensor *kn_movedim(kn_tensor *x, int from, int to);
/* Elements [.., i, .., i + offset, ..] of dims dim0 and dim1, which go; i is the last dim of the
 * result. Offsets beyond the corners give size 0. A view. */
KN_API kn_tensor *kn_diagonal(kn_tensor *x, int64_t offset, int dim0, int dim1);
/* The last dim of x[...] as the diagonal of dims dim0 and dim1 of the result, which has one dim
 * more: kn_diagonal takes it back. 0 elsewhere. */
KN_API kn_tensor *kn_diag_embed(kn_tensor *x, int64_t offset, int dim0, int dim1);
/* n tensors of one dim, expanded over the grid that they span: out[i] varies along dim i; xy: the
 * first along dim 1 and the second along dim 0. Views. */
KN_API bool kn_meshgrid(kn_tensor *const *x, int n, bool xy, kn_tensor **out);
/* Windows of size elements along dim, one each step elements (torch.Tensor.unfold): dim gets size
 * (n - size) / step + 1, and a last dim of size is new. A view, whose elements share bytes where
 * windows overlap; there the gradient is their sum. */
KN_API kn_tensor *kn_unfold(kn_tensor *x, int dim, int64_t size, int64_t step);
/* Cuts dim into n equal parts, stored in out[0..n-1] (views). */
KN_API bool kn_chunk(kn_tensor *x, int dim, int n, kn_tensor **out);
/* Cuts dim into n parts of these sizes, which add up to dim's (torch.split); views. */
KN_API bool kn_split(kn_tensor *x, int dim, int n, const int64_t *sizes, kn_tensor **out);
/* One after another along dim: n tensors of one dtype, which may differ in that dim only. More than
 * 16 are joined in groups, whose results take memory until backward no longer needs them. */
KN_API kn_tensor *kn_cat(kn_tensor *const *x, int n, int dim);
/* n tensors of one shape and dtype, one after another along a new dim, dim of the result; more than
 * 16 as kn_cat. */
KN_API kn_tensor *kn_stack(kn_tensor *const *x, int n, int dim);
/* Elements in reverse order along the n dims listed (negative counts from the end; n == 0: all). */
KN_API kn_tensor *kn_flip(kn_tensor *x, int n, const int64_t *dims);
/* Element i of dims[k] moves to i + shifts[k]; those that leave the dim come in at its other end.
 * dims NULL and n == 1: all elements as one dim. n is 1 to 8. */
KN_API kn_tensor *kn_roll(kn_tensor *x, int n, const int64_t *shifts, const int64_t *dims);
/* times[i] copies of x one after another along dim i (torch.Tensor.repeat). Where n is more than
 * x's dims, new dims come in front; it isn't less. */
KN_API kn_tensor *kn_repeat(kn_tensor *x, int n, const int64_t *times);
/* As kn_repeat, but n may be less than x's dims: the first ones then stay. */
KN_API kn_tensor *kn_tile(kn_tensor *x, int n, const int64_t *times);
/* Each slice along dim so many times in a row: times[0] for all of them where n == 1, else times[i]
 * for slice i, with n the size of dim. */
KN_API kn_tensor *kn_repeat_interleave(kn_tensor *x, int dim, int n, const int64_t *times);
/* The elements of each matrix x[..., M, N] with column - row <= diagonal (tril), or >= (triu); 0
 * elsewhere, also where x is NaN. */
KN_API kn_tensor *kn_tril(kn_tensor *x, int64_t diagonal);
KN_API kn_tensor *kn_triu(kn_tensor *x, int64_t diagonal);

/* ---- products -------------------------------------------------------------------------------- */

/* [..., M, K] @ [..., K, N] -> [..., M, N]; leading dims broadcast. A vector [K] on the left gives
 * [..., N], one on the right [..., M], two a number. */
KN_API kn_tensor *kn_matmul(kn_tensor *a, kn_tensor *b);
/* Sums of products of n tensors (at most 16) by an equation, as torch.einsum: one letter a dim,
 * kn_einsum("bhtd,bhsd->bhts", 2, (kn_tensor *[]){ q, k }); what doesn't stand behind -> is summed.
 * Without -> the letters that stand once remain, in alphabetical order, behind the dims of "...".
 * A letter that stands twice in an operand takes its diagonal. Dims of one letter have one size, or
 * 1; those of "..." broadcast from the end. Spaces don't count. Floats of one dtype. Operands are
 * multiplied from left to right, each product as a batched kn_matmul or a kn_mul. */
KN_API kn_tensor *kn_einsum(const char *equation, int n, kn_tensor *const *x);
/* x[..., K] @ w^T + bias with w[N, K] (torch.nn.Linear), or x @ w + bias with w[K, N] where in_out
 * (GPT-2's Conv1D). bias[N] may be NULL. */
KN_API kn_tensor *kn_linear_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, bool in_out);
#define kn_linear(x, w, bias, in_out) kn_linear_((x), (w), (bias), (in_out))

/* ---- random ---------------------------------------------------------------------------------- */

/* Draws without gradient, the same with any number of threads. Those with a seed and a stream are
 * functions of them and the element, as kn_rand; the others of the random key
 * (autograd/autograd.h), as kn_dropout: in a recomputed module call they give the same numbers
 * again, and sharded training gives those of one process; ranks draw apart, but between
 * kn_draws_begin and kn_draws_end. Results are row-major. */

/* Uniform in [0, 1), or normal, of x's shape, float dtype and device. bf16 and f16 are rounded from
 * f32, as kn_rand's. */
KN_API kn_tensor *kn_rand_like(const kn_tensor *x);
KN_API kn_tensor *kn_randn_like(const kn_tensor *x);
/* Integers in [low, high), which the dtype must hold exactly: at most 2^48 of them, each with the
 * same probability but for 2^-48 (kn_randint: dtype default i64). */
KN_API kn_tensor *kn_randint(kn_dtype dtype, kn_device device, int64_t low, int64_t high,
                             uint64_t seed, uint64_t stream, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_randint_like(const kn_tensor *x, int64_t low, int64_t high);
/* 0, 1, ..., n - 1 in random order, i64. Made on the host. */
KN_API kn_tensor *kn_randperm(kn_device device, int64_t n, uint64_t seed, uint64_t stream);
/* 1 with probability p, else 0, for each element of p, in its float dtype. p below 0 and NaN count
 * as 0, above 1 as 1. */
KN_API kn_tensor *kn_bernoulli(kn_tensor *p);
/* n indices (i64 [..., n]) into each row of weights p[..., K], which needn't add up to 1, each
 * drawn with probability p / sum p; without replacement from those that are left. Weights below 0,
 * infinite or NaN, or fewer above 0 than are drawn, are an error on the CPU; on other devices, for
 * whose values the host doesn't wait, the row's indices are -1. */
KN_API kn_tensor *kn_multinomial(kn_tensor *p, int64_t n, bool replacement);

#ifdef __cplusplus
}
#endif
#endif
