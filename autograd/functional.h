/* autograd/functional.h: differentiable operations of neural networks, as in torch.nn.functional.
 *
 * They keep to the rules of autograd/operations.h. A default for an option is in the comment beside
 * it; KN_ZERO (autograd/autograd.h) stands for 0 where 0 means the default. */
#ifndef KNAP_AUTOGRAD_FUNCTIONAL_H
#define KNAP_AUTOGRAD_FUNCTIONAL_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- neural networks ------------------------------------------------------------------------- */

/* exp(x) / sum exp(x) along dim, and its logarithm: kn_softmax(x, dim), where kn_softmax(x) stands
 * for the last dim. Float, at least one dim. */
KN_API kn_tensor *kn_softmax_(kn_tensor *x, int dim);
KN_API kn_tensor *kn_log_softmax_(kn_tensor *x, int dim);
#define KN_DIM_OR_LAST(x, dim, ...) (x), (dim)
#define kn_softmax(...)             kn_softmax_(KN_DIM_OR_LAST(__VA_ARGS__, -1, 0))
#define kn_log_softmax(...)         kn_log_softmax_(KN_DIM_OR_LAST(__VA_ARGS__, -1, 0))

/* (x - mean) / sqrt(var + eps) * w + b over the last dim of x[..., C]. w and b [C] may be NULL;
 * they may be f32 while x is bf16 or f16. eps 0: 1e-5; KN_ZERO: 0. */
KN_API kn_tensor *kn_layer_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, double eps);
#define kn_layer_norm(x, w, b, eps) kn_layer_norm_((x), (w), (b), (eps))
KN_API kn_tensor *kn_rms_norm_(kn_tensor *x, kn_tensor *w, double eps);
#define kn_rms_norm(x, w, eps) kn_rms_norm_((x), (w), (eps))
/* *sum = kn_add(x, add), of one shape and dtype, and its norm. x and add share their gradient. */
KN_API kn_tensor *kn_add_layer_norm(kn_tensor *x, kn_tensor *add, kn_tensor *w, kn_tensor *b,
                                    double eps, kn_tensor **sum);
KN_API kn_tensor *kn_add_rms_norm(kn_tensor *x, kn_tensor *add, kn_tensor *w, double eps,
                                  kn_tensor **sum);
typedef struct kn_embedding_options {
    KN_BEGIN_OPTIONS;
    /* A row that gets no gradient; negative ones count from the end. 0: none; KN_ZERO: row 0 */
    int64_t padding_idx;
} kn_embedding_options;
/* Rows of w[V, C] picked by index[...] -> [..., C]. */
KN_API kn_tensor *kn_embedding_(kn_tensor *w, kn_tensor *index, kn_embedding_options o);
#define kn_embedding(w, index, ...)                                                                \
    kn_embedding_(w, index, KN_OPTIONS(kn_embedding_options, __VA_ARGS__))
typedef enum kn_bag_mode {
    KN_BAG_DEFAULT = 0, /* KN_BAG_MEAN */
    KN_BAG_SUM,
    KN_BAG_MEAN,
    KN_BAG_MAX /* the gradient of an element goes to the first maximum */
} kn_bag_mode;
typedef struct kn_embedding_bag_options {
    KN_BEGIN_OPTIONS;
    kn_tensor *offsets; /* i64 or i32 [B], rising from 0: where bags begin; with a 1-d index only */
    kn_tensor *per_sample_weights; /* of index's shape and w's dtype; only with KN_BAG_SUM */
    kn_bag_mode mode;              /* 0: KN_BAG_MEAN */
    bool include_last_offset;      /* .offsets has one more, the end of the last bag */
    int64_t padding_idx; /* as kn_embedding's; positions with this row don't count in a bag */
} kn_embedding_bag_options;
/* Sums, means or maxima over bags of rows of w[V, C]: index[B, L], bags of L each, or index[n] with
 * .offsets -> [B, C]. An empty bag gives zeros. bf16 and f16 are added in f32 and rounded once. */
KN_API kn_tensor *kn_embedding_bag_(kn_tensor *w, kn_tensor *index, kn_embedding_bag_options o);
#define kn_embedding_bag(w, index, ...)                                                            \
    kn_embedding_bag_(w, index, KN_OPTIONS(kn_embedding_bag_options, __VA_ARGS__))
/* Slices of x along dim picked by the 1-d index. */
KN_API kn_tensor *kn_index_select(kn_tensor *x, int dim, kn_tensor *index);
/* Zeroes with probability p and scales the rest by 1/(1-p). The draw depends on the random key. */
KN_API kn_tensor *kn_dropout_(kn_tensor *x, double p);
#define kn_dropout(x, p) kn_dropout_((x), (p))

/* Which keys a query of causal attention sees where there are S keys for T queries. */
typedef enum kn_causal_align {
    KN_CAUSAL_ALIGN_DEFAULT = 0, /* S and T are equal, else it is an error */
    KN_CAUSAL_FIRST,             /* s <= t: query 0 sees key 0 (torch's is_causal) */
    KN_CAUSAL_LAST               /* s <= t + (S - T): the last query sees all, as behind a cache */
} kn_causal_align;
typedef struct kn_scaled_dot_product_attention_options {
    KN_BEGIN_OPTIONS;
    double scale;          /* 0: 1/sqrt(D); KN_ZERO: 0 */
    bool causal;           /* query t sees keys s <= t; where S isn't T, .align says more */
    double dropout;        /* of the probabilities */
    int64_t window;        /* of the keys that .causal lets a query see, the last so many; 0: all */
    kn_tensor *mask;       /* or NULL; beside .causal both must let a key be seen */
    kn_causal_align align; /* of .causal; required where S isn't T */
} kn_scaled_dot_product_attention_options;
/* softmax(scale q k^T + mask) v for q[B,H,T,D], k and v [B,G,S,D] with G dividing H. Memory linear
 * in T. The mask broadcasts to [B,H,T,S]: bool, where true keys take part, or of q's dtype, added
 * to the scores; -infinity hides a key, whose value must be finite all the same. A query that sees
 * no key gives zeros, without gradients. A mask that requires grad gets one, which takes a tensor
 * [B,H,T,S] in backward. */
KN_API kn_tensor *kn_scaled_dot_product_attention_(kn_tensor *q, kn_tensor *k, kn_tensor *v,
                                                   kn_scaled_dot_product_attention_options o);
#define kn_scaled_dot_product_attention(q, k, v, ...)                                              \
    kn_scaled_dot_product_attention_(                                                              \
        q, k, v, KN_OPTIONS(kn_scaled_dot_product_attention_options, __VA_ARGS__))
/* The keys and values of the positions so far, for generation: each step appends those of its new
 * positions and attends to all, without copying the earlier ones.
 *
 *     kn_tensor *all[2];
 *     kn_kv_cache_append(cache, k, v, all); // k and v [B,G,t,D] of t new positions
 *     y = kn_scaled_dot_product_attention(q, all[0], all[1], .causal = true,
 *                                         .align = KN_CAUSAL_LAST); */
typedef struct kn_kv_cache kn_kv_cache;
/* An empty one for up to capacity positions of k and v [B,G,.,D] of a float dtype (0: f32) on
 * device (0: cpu), whose bytes it takes at once. The caller frees it. NULL with an error. */
KN_API kn_kv_cache *kn_kv_cache_new(kn_dtype dtype, kn_device device, int64_t B, int64_t G,
                                    int64_t capacity, int64_t D);
KN_API void kn_kv_cache_free(kn_kv_cache *c); /* NULL is fine */
/* Copies k and v behind the positions so far. all[0] and all[1] become views of the keys and values
 * of all positions, [B,G,length,D], of the current scope. No gradient flows through a cache: k and
 * v that require one are an error in grad mode, and so is a backward through an attention to views
 * that were appended to since. False with an error, also where the capacity is exceeded. */
KN_API bool kn_kv_cache_append(kn_kv_cache *c, kn_tensor *k, kn_tensor *v, kn_tensor **all);
KN_API int64_t kn_kv_cache_length(const kn_kv_cache *c); /* positions so far */
/* Forgets the positions from length on; 0: all. */
KN_API bool kn_kv_cache_truncate(kn_kv_cache *c, int64_t length);
typedef struct kn_rope_options {
    KN_BEGIN_OPTIONS;
    kn_rope_scaling scaling; /* Llama 3's (kernels/types.h); none by default */
} kn_rope_options;
/* Rotary embedding (Su et al., arXiv:2104.09864) of x[B,H,T,D] at positions start + t: turns each
 * pair (x[i], x[i + D/2]), i < D/2, by the angle (start + t) base^(-2i/D), which .scaling makes
 * smaller. D is even. base 0: 10000. */
KN_API kn_tensor *kn_rope_(kn_tensor *x, double base, int64_t start, kn_rope_options o);
#define kn_rope(x, base, start, ...)                                                               \
    kn_rope_(x, base, start, KN_OPTIONS(kn_rope_options, __VA_ARGS__))

/* ---- losses ---------------------------------------------------------------------------------- */

/* The shape of a loss: one value, or one an element (a row, where the comment says so). */
typedef enum kn_loss_reduction {
    KN_REDUCTION_DEFAULT = 0, /* the mean */
    KN_REDUCTION_MEAN,
    KN_REDUCTION_SUM,
    KN_REDUCTION_NONE,
    KN_REDUCTION_BATCHMEAN /* kn_kl_div: the sum divided by the size of dim 0 */
} kn_loss_reduction;

/* x and target have one shape and one float dtype, but for losses of classes; a target that
 * requires a gradient gets one. */
typedef struct kn_mse_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
} kn_mse_loss_options;
/* (x - target)^2 */
KN_API kn_tensor *kn_mse_loss_(kn_tensor *x, kn_tensor *target, kn_mse_loss_options o);
#define kn_mse_loss(x, target, ...)                                                                \
    kn_mse_loss_(x, target, KN_OPTIONS(kn_mse_loss_options, __VA_ARGS__))

typedef struct kn_l1_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
} kn_l1_loss_options;
/* |x - target|; where they are equal the gradient is 0. */
KN_API kn_tensor *kn_l1_loss_(kn_tensor *x, kn_tensor *target, kn_l1_loss_options o);
#define kn_l1_loss(x, target, ...)                                                                 \
    kn_l1_loss_(x, target, KN_OPTIONS(kn_l1_loss_options, __VA_ARGS__))

typedef struct kn_huber_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    double delta; /* above 0; 0: 1 */
} kn_huber_loss_options;
/* With d = x - target: d^2 / 2 where |d| < delta, else delta (|d| - delta / 2). */
KN_API kn_tensor *kn_huber_loss_(kn_tensor *x, kn_tensor *target, kn_huber_loss_options o);
#define kn_huber_loss(x, target, ...)                                                              \
    kn_huber_loss_(x, target, KN_OPTIONS(kn_huber_loss_options, __VA_ARGS__))

typedef struct kn_smooth_l1_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    double beta; /* 0: 1; KN_ZERO: 0, kn_l1_loss */
} kn_smooth_l1_loss_options;
/* With d = x - target: d^2 / (2 beta) where |d| < beta, else |d| - beta / 2. */
KN_API kn_tensor *kn_smooth_l1_loss_(kn_tensor *x, kn_tensor *target, kn_smooth_l1_loss_options o);
#define kn_smooth_l1_loss(x, target, ...)                                                          \
    kn_smooth_l1_loss_(x, target, KN_OPTIONS(kn_smooth_l1_loss_options, __VA_ARGS__))

typedef struct kn_binary_cross_entropy_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    kn_tensor *weight; /* broadcasts to x; multiplies each element's loss; or NULL */
} kn_binary_cross_entropy_options;
/* -(target log x + (1 - target) log(1 - x)) of probabilities x in [0, 1], NaN for others.
 * Logarithms are at least -100, as in torch, and the gradient by x, (x - target) / (x (1 - x)),
 * divides by at least 1e-12. Computed in f32 or f64. */
KN_API kn_tensor *kn_binary_cross_entropy_(kn_tensor *x, kn_tensor *target,
                                           kn_binary_cross_entropy_options o);
#define kn_binary_cross_entropy(x, target, ...)                                                    \
    kn_binary_cross_entropy_(x, target, KN_OPTIONS(kn_binary_cross_entropy_options, __VA_ARGS__))

typedef struct kn_binary_cross_entropy_with_logits_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    kn_tensor *weight;     /* broadcasts to x; multiplies each element's loss; or NULL */
    kn_tensor *pos_weight; /* broadcasts to x; of positive targets; no gradient; or NULL */
} kn_binary_cross_entropy_with_logits_options;
/* -(pos_weight target log s + (1 - target) log(1 - s)) with s = sigmoid(x), without overflow for
 * any finite x. Computed in f32 or f64; backward keeps x, target and pos_weight only. */
KN_API kn_tensor *
kn_binary_cross_entropy_with_logits_(kn_tensor *x, kn_tensor *target,
                                     kn_binary_cross_entropy_with_logits_options o);
#define kn_binary_cross_entropy_with_logits(x, target, ...)                                        \
    kn_binary_cross_entropy_with_logits_(                                                          \
        x, target, KN_OPTIONS(kn_binary_cross_entropy_with_logits_options, __VA_ARGS__))

typedef struct kn_kl_div_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    bool log_target; /* target holds logarithms too */
} kn_kl_div_options;
/* target (log target - x) of logarithms x of probabilities; 0 where the target is 0 and x is
 * finite, with a gradient of -x by the target. log_target: exp(target) (target - x). */
KN_API kn_tensor *kn_kl_div_(kn_tensor *x, kn_tensor *target, kn_kl_div_options o);
#define kn_kl_div(x, target, ...) kn_kl_div_(x, target, KN_OPTIONS(kn_kl_div_options, __VA_ARGS__))

typedef struct kn_nll_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    int64_t ignore_index; /* targets with this value don't count; 0: -100; KN_ZERO: 0 */
    kn_tensor *weight;    /* [V], of the classes; x's dtype; no gradient; or NULL */
} kn_nll_loss_options;
/* -weight[target] x[target] for each row of x[..., V], logarithms of probabilities, and targets
 * [...] (i64 or i32). Classes are the last dim (torch: dim 1). Rows that don't count give 0. The
 * mean divides by the sum of the weights of the targets that count; it is 0 where that is 0. A
 * target outside of [0, V) is an error, as kn_embedding's. */
KN_API kn_tensor *kn_nll_loss_(kn_tensor *x, kn_tensor *targets, kn_nll_loss_options o);
#define kn_nll_loss(x, targets, ...)                                                               \
    kn_nll_loss_(x, targets, KN_OPTIONS(kn_nll_loss_options, __VA_ARGS__))

typedef struct kn_cross_entropy_options {
    KN_BEGIN_OPTIONS;
    int64_t ignore_index;        /* targets with this value don't count; 0: -100; KN_ZERO: 0 */
    double smoothing;            /* label smoothing in [0, 1) */
    kn_tensor *weight;           /* [V], of the classes; the logits' dtype; no gradient; or NULL */
    kn_loss_reduction reduction; /* NONE: a value a row */
} kn_cross_entropy_options;
/* kn_nll_loss of kn_log_softmax(logits[..., V]) against targets[...] (i64 or i32), in f32, or f64
 * for f64. Mean and sum without weights are fused: probabilities are never stored. With weights or
 * KN_REDUCTION_NONE it keeps the logarithms for backward. Targets of the logits' shape and dtype
 * are probabilities: -sum_v weight_v target_v log_softmax(logits)_v for each row; their mean is
 * over rows, and no row is ignored. A mean over no target that counts is 0, with gradients of 0
 * (torch: NaN). Smoothing mixes each target with smoothing / V for all classes. */
KN_API kn_tensor *kn_cross_entropy_(kn_tensor *logits, kn_tensor *targets,
                                    kn_cross_entropy_options o);
#define kn_cross_entropy(logits, targets, ...)                                                     \
    kn_cross_entropy_(logits, targets, KN_OPTIONS(kn_cross_entropy_options, __VA_ARGS__))

typedef struct kn_linear_cross_entropy_options {
    KN_BEGIN_OPTIONS;
    kn_tensor *bias;             /* [V], x's dtype or f32; or NULL */
    bool in_out;                 /* w is stored [C, V] */
    int64_t ignore_index;        /* targets with this value don't count; 0: -100; KN_ZERO: 0 */
    double smoothing;            /* label smoothing in [0, 1) */
    kn_loss_reduction reduction; /* NONE: a value a row */
    kn_tensor *weight;           /* [V], as kn_cross_entropy's; or NULL */
} kn_linear_cross_entropy_options;
/* kn_cross_entropy(kn_linear(x[..., C], w[V, C], bias), targets[...]), but the logits [..., V]
 * never exist as a whole: they are made for max(1024, N / 8) of the N rows at a time, and turned
 * into their gradient in place. Beyond so many rows the gradients of x, w and bias are made in the
 * forward, where w's takes memory in f32 (f64 for f64) until backward, which multiplies them by
 * the gradient that arrives. Without gradients it makes the loss only. With a weight,
 * KN_REDUCTION_NONE, or targets that are probabilities the logits do exist. */
KN_API kn_tensor *kn_linear_cross_entropy_(kn_tensor *x, kn_tensor *w, kn_tensor *targets,
                                           kn_linear_cross_entropy_options o);
#define kn_linear_cross_entropy(x, w, targets, ...)                                                \
    kn_linear_cross_entropy_(x, w, targets,                                                        \
                             KN_OPTIONS(kn_linear_cross_entropy_options, __VA_ARGS__))

typedef struct kn_normalize_options {
    KN_BEGIN_OPTIONS;
    int64_t dim; /* negative ones count from the end; 0: 1; KN_ZERO: 0 */
    double eps;  /* 0: 1e-12; KN_ZERO: the least that the dtype allows */
} kn_normalize_options;
/* x / max(norm, eps) with norm = sqrt(sum x^2) over one dim. Below eps the norm has no gradient, so
 * rows of zeros are safe. Computed in f32 or f64. */
KN_API kn_tensor *kn_normalize_(kn_tensor *x, kn_normalize_options o);
#define kn_normalize(x, ...) kn_normalize_(x, KN_OPTIONS(kn_normalize_options, __VA_ARGS__))

typedef struct kn_cosine_similarity_options {
    KN_BEGIN_OPTIONS;
    int64_t dim; /* of the broadcast shape; negative ones count from the end; 0: 1; KN_ZERO: 0 */
    double eps;  /* 0: 1e-8; KN_ZERO: the least that the dtype allows */
} kn_cosine_similarity_options;
/* sum x y / (max(|x|, eps) max(|y|, eps)) over one dim, which goes; x and y broadcast. */
KN_API kn_tensor *kn_cosine_similarity_(kn_tensor *x, kn_tensor *y, kn_cosine_similarity_options o);
#define kn_cosine_similarity(x, y, ...)                                                            \
    kn_cosine_similarity_(x, y, KN_OPTIONS(kn_cosine_similarity_options, __VA_ARGS__))

typedef struct kn_cosine_embedding_loss_options {
    KN_BEGIN_OPTIONS;
    kn_loss_reduction reduction;
    double margin; /* in [-1, 1] */
} kn_cosine_embedding_loss_options;
/* For each row of x and y [..., D] and sign[...] of any number dtype, with the cosine c of the row
 * (1e-12 is added to both sums of squares): 1 - c where sign is 1, max(0, c - margin) where it is
 * -1, else 0. */
KN_API kn_tensor *kn_cosine_embedding_loss_(kn_tensor *x, kn_tensor *y, kn_tensor *sign,
                                            kn_cosine_embedding_loss_options o);
#define kn_cosine_embedding_loss(x, y, sign, ...)                                                  \
    kn_cosine_embedding_loss_(x, y, sign, KN_OPTIONS(kn_cosine_embedding_loss_options, __VA_ARGS__))
typedef enum kn_pad_mode {
    KN_PAD_CONSTANT = 0, /* the value */
    KN_PAD_REFLECT,      /* mirrored at the edge's element, which isn't repeated; size < dim */
    KN_PAD_REPLICATE,    /* the edge's element */
    KN_PAD_CIRCULAR      /* from the other end; size <= dim */
} kn_pad_mode;
/* x with more elements at its ends, as torch.nn.functional.pad: sizes has {before, after} of the
 * last dim, then of the one before it, ...; n is at most twice the dims: kn_pad(x, KN_PAD_CONSTANT,
 * 0, KN_SHAPE(left, right, top, bottom)). Sizes below 0 cut the result;
 * KN_PAD_CIRCULAR goes round what they leave. */
KN_API kn_tensor *kn_pad(kn_tensor *x, kn_pad_mode mode, double value, int n, const int64_t *sizes);

/* ---- images: x[N,C,H,W], row-major or channels-last; sequences: x[N,C,L] --------------------- */

/* Convolutions and pools also take one image x[C,H,W] or sequence x[C,L]; so is their result. */

typedef struct kn_conv2d_options {
    KN_BEGIN_OPTIONS;
    int64_t stride, pad, dilation;             /* 0: 1, 0, 1; the same for rows and columns */
    int64_t strides[2], pads[2], dilations[2]; /* {rows, columns} in their place, where not all 0 */
    int64_t groups;                            /* 0: 1; divides C and O */
    bool same; /* pads so that the size stays (padding="same"); with stride 1 */
} kn_conv2d_options;
/* y[N,O,P,Q] = bias[o] + sum over c, r, s of w[o,c,r,s] x[n, c, p stride + r dilation - pad, ...]
 * for w[O,C/groups,R,S] and zeros outside of x (torch.nn.functional.conv2d), with P = (H + 2 pad -
 * dilation (R - 1) - 1) / stride + 1. bias[O] may be NULL; f32 beside a narrower x. */
KN_API kn_tensor *kn_conv2d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv2d_options o);
#define kn_conv2d(x, w, bias, ...)                                                                 \
    kn_conv2d_(x, w, bias, KN_OPTIONS(kn_conv2d_options, __VA_ARGS__))

typedef struct kn_conv1d_options {
    KN_BEGIN_OPTIONS;
    int64_t stride, pad, dilation, groups; /* 0: 1, 0, 1, 1 */
    bool same;
} kn_conv1d_options;
/* The same of x[N,C,L] and w[O,C/groups,S] (torch.nn.functional.conv1d). */
KN_API kn_tensor *kn_conv1d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv1d_options o);
#define kn_conv1d(x, w, bias, ...)                                                                 \
    kn_conv1d_(x, w, bias, KN_OPTIONS(kn_conv1d_options, __VA_ARGS__))

typedef struct kn_conv_transpose2d_options {
    KN_BEGIN_OPTIONS;
    int64_t stride, pad, output_pad, dilation; /* 0: 1, 0, 0, 1; the same for rows and columns */
    int64_t strides[2], pads[2], output_pads[2], dilations[2]; /* {rows, columns} where not all 0 */
    int64_t groups;                                            /* 0: 1; divides C */
} kn_conv_transpose2d_options;
/* y[N,O,P,Q]: the gradient by its image of a convolution of these numbers that takes images of y's
 * shape to x's, with weight w[C,O/groups,R,S], plus bias[o] (torch.nn.functional.conv_transpose2d).
 * P = (H - 1) stride - 2 pad + dilation (R - 1) + output_pad + 1; output_pad, below stride or
 * dilation, chooses among the images that the convolution takes to H rows. bias[O] may be NULL; an
 * f32 one beside a narrower x is rounded to x's dtype. */
KN_API kn_tensor *kn_conv_transpose2d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias,
                                       kn_conv_transpose2d_options o);
#define kn_conv_transpose2d(x, w, bias, ...)                                                       \
    kn_conv_transpose2d_(x, w, bias, KN_OPTIONS(kn_conv_transpose2d_options, __VA_ARGS__))

typedef struct kn_conv_transpose1d_options {
    KN_BEGIN_OPTIONS;
    int64_t stride, pad, output_pad, dilation, groups; /* 0: 1, 0, 0, 1, 1 */
} kn_conv_transpose1d_options;
/* The same of x[N,C,L] and w[C,O/groups,S] (torch.nn.functional.conv_transpose1d). */
KN_API kn_tensor *kn_conv_transpose1d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias,
                                       kn_conv_transpose1d_options o);
#define kn_conv_transpose1d(x, w, bias, ...)                                                       \
    kn_conv_transpose1d_(x, w, bias, KN_OPTIONS(kn_conv_transpose1d_options, __VA_ARGS__))

struct kn_comm; /* comm/comm.h */
typedef struct kn_batch_norm_options {
    KN_BEGIN_OPTIONS;
    bool training;
    double momentum; /* in [0, 1]; 0: 0.1; KN_ZERO: 0 */
    double eps;      /* 0: 1e-5; KN_ZERO: 0 */
    /* Training: the batches of this communicator's ranks are one; borrowed. Collective, in backward
     * as well, on the compute stream, so it must be one that nothing else uses (kn_comm_dup). */
    struct kn_comm *sync;
    bool relu;           /* the result is 0 where it would be less */
    kn_tensor *residual; /* with .relu: added before it; x's shape and dtype */
} kn_batch_norm_options;
/* (x - mean) / sqrt(var + eps) * w + b for each channel of x[N,C,...] (Ioffe and Szegedy,
 * arXiv:1502.03167). Training: over the batch, and running_mean and running_var [C] move by
 * momentum towards its mean and unbiased variance, in place; else these two are used. w, b [C] may
 * be NULL, or f32 while x is bf16 or f16; the running ones may be NULL in training.
 *
 * .relu, .residual: relu of it and of its sum with .residual, as kn_relu and kn_add give them, but
 * rounded once; on the CPU without passes over memory of their own, forward or backward.
 *
 * .sync: mean and variance are those of the batches of all its ranks, of any sizes; a batch may be
 * empty, but all together must hold more than one value a channel (on a GPU nobody looks). The
 * gradient of x counts what the values of all ranks did to it, as if their losses were added; those
 * of w and b are of this rank's own values, for its caller to add (fsdp does). Sums are made by
 * sample, in pairs and in f64 between samples: ranks with equal batches of 2^k samples get the bits
 * of one rank with all of them. */
KN_API kn_tensor *kn_batch_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, kn_tensor *running_mean,
                                 kn_tensor *running_var, kn_batch_norm_options o);
#define kn_batch_norm(x, w, b, mean, var, ...)                                                     \
    kn_batch_norm_(x, w, b, mean, var, KN_OPTIONS(kn_batch_norm_options, __VA_ARGS__))

/* (x - mean) / sqrt(var + eps) * w + b with mean and (biased) variance of each of the groups of
 * channels of each sample of x[N,C,...] (Wu and He, arXiv:1803.08494); groups divides C. w, b [C]
 * may be NULL, or f32 while x is bf16 or f16, where the norm is rounded before w and b. eps 0:
 * 1e-5; KN_ZERO: 0. */
KN_API kn_tensor *kn_group_norm_(kn_tensor *x, int64_t groups, kn_tensor *w, kn_tensor *b,
                                 double eps);
#define kn_group_norm(x, groups, w, b, eps) kn_group_norm_((x), (groups), (w), (b), (eps))
typedef struct kn_instance_norm_options {
    KN_BEGIN_OPTIONS;
    /* [C], f32 or x's dtype: moved by each call to the mean and unbiased variance of a channel in a
     * sample, averaged over samples; or NULL. */
    kn_tensor *running_mean, *running_var;
    double momentum;  /* in [0, 1]; 0: 0.1; KN_ZERO: 0 */
    bool use_running; /* normalises by them as they are, as kn_batch_norm without .training */
} kn_instance_norm_options;
/* The same of each channel by itself, of more than one value (Ulyanov et al.,
 * arXiv:1607.08022). */
KN_API kn_tensor *kn_instance_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, double eps,
                                    kn_instance_norm_options o);
#define kn_instance_norm(x, w, b, eps, ...)                                                        \
    kn_instance_norm_((x), (w), (b), (eps), KN_OPTIONS(kn_instance_norm_options, __VA_ARGS__))

typedef struct kn_pool2d_options {
    KN_BEGIN_OPTIONS;
    int64_t kernel, stride, pad,
        dilation; /* kernel is required; 0: stride kernel, pad 0, dilation 1 */
    int64_t kernels[2], strides[2], pads[2], dilations[2]; /* {rows, columns} where not all 0 */
    bool ceil_mode;   /* a last window that only begins inside counts too */
    bool exclude_pad; /* averages divide by the elements that exist (count_include_pad = False) */
} kn_pool2d_options;
/* The largest element of each window, NaN above all, also of integers; its gradient goes to the
 * first of equals. pad is at most half of kernel. */
KN_API kn_tensor *kn_max_pool2d_(kn_tensor *x, kn_pool2d_options o);
/* The mean of each window; no dilation. */
KN_API kn_tensor *kn_avg_pool2d_(kn_tensor *x, kn_pool2d_options o);
#define kn_max_pool2d(x, ...) kn_max_pool2d_(x, KN_OPTIONS(kn_pool2d_options, __VA_ARGS__))
#define kn_avg_pool2d(x, ...) kn_avg_pool2d_(x, KN_OPTIONS(kn_pool2d_options, __VA_ARGS__))
/* Means of P x Q windows that cover x: rows [floor(p H/P), ceil((p+1) H/P)), likewise columns. */
KN_API kn_tensor *kn_adaptive_avg_pool2d(kn_tensor *x, int64_t P, int64_t Q);

typedef struct kn_pool1d_options {
    KN_BEGIN_OPTIONS;
    int64_t kernel, stride, pad, dilation; /* as in kn_pool2d_options */
    bool ceil_mode, exclude_pad;
} kn_pool1d_options;
/* The same of x[N,C,L], and means of P windows that cover it. */
KN_API kn_tensor *kn_max_pool1d_(kn_tensor *x, kn_pool1d_options o);
KN_API kn_tensor *kn_avg_pool1d_(kn_tensor *x, kn_pool1d_options o);
KN_API kn_tensor *kn_adaptive_avg_pool1d(kn_tensor *x, int64_t P);
#define kn_max_pool1d(x, ...) kn_max_pool1d_(x, KN_OPTIONS(kn_pool1d_options, __VA_ARGS__))
#define kn_avg_pool1d(x, ...) kn_avg_pool1d_(x, KN_OPTIONS(kn_pool1d_options, __VA_ARGS__))

typedef struct kn_unfold2d_options {
    KN_BEGIN_OPTIONS;
    int64_t kernel, stride, pad, dilation; /* kernel is required; 0: stride 1, pad 0, dilation 1 */
    int64_t kernels[2], strides[2], pads[2], dilations[2]; /* {rows, columns} where not all 0 */
} kn_unfold2d_options;
/* Windows of x[N,C,H,W] as columns (torch.nn.functional.unfold): y[N, C R S, P Q] of R x S windows
 * at P x Q places, y[n, (c R + r) S + s, p Q + q] = x[n, c, p stride - pad + r dilation, ...], 0
 * outside. The gradient adds windows up. */
KN_API kn_tensor *kn_unfold2d_(kn_tensor *x, kn_unfold2d_options o);
#define kn_unfold2d(x, ...) kn_unfold2d_(x, KN_OPTIONS(kn_unfold2d_options, __VA_ARGS__))
/* Such columns y[N, C R S, P Q] added up into the image x[N,C,H,W] that kn_unfold2d with the same
 * options takes to as many (torch.nn.functional.fold). Elements of the pad go. */
KN_API kn_tensor *kn_fold2d_(kn_tensor *y, int64_t H, int64_t W, kn_unfold2d_options o);
#define kn_fold2d(y, H, W, ...) kn_fold2d_(y, H, W, KN_OPTIONS(kn_unfold2d_options, __VA_ARGS__))

typedef enum kn_interpolate_mode {
    KN_NEAREST = 0,
    KN_BILINEAR,      /* in each dim, so linear of sequences, trilinear of volumes */
    KN_BICUBIC,       /* Keys' cubic through four rows, with a = -3/4 */
    KN_NEAREST_EXACT, /* row floor((p + 0.5) s) */
    KN_AREA           /* means of the windows of kn_adaptive_avg_pool2d */
} kn_interpolate_mode;
typedef struct kn_interpolate_options {
    KN_BEGIN_OPTIONS;
    int64_t size, sizes[3];   /* of the result; the same for all dims, or {rows, columns} */
    double scale, scales[3];  /* in its place: its size is floor(H scale) */
    kn_interpolate_mode mode; /* KN_NEAREST is the default */
    bool align_corners;       /* linear and cubic ones: the corners of x and y are one */
    bool antialias; /* bilinear, bicubic: where y is smaller, over 1 / scale as many rows */
} kn_interpolate_options;
/* An image x[N,C,H,W] of another size, a sequence or a volume (torch.nn.functional.interpolate).
 * With s = 1 / scale, or H / P where a
 * size is given, row p of y is, nearest: row floor(p s); bilinear: between the two rows around
 * (p + 0.5) s - 0.5, or around p (H - 1) / (P - 1) with .align_corners; likewise columns. Places
 * outside count as the edge. They are computed in f64. Cubic and antialiased ones are products with
 * a matrix [P,H] for each dim. */
KN_API kn_tensor *kn_interpolate_(kn_tensor *x, kn_interpolate_options o);
#define kn_interpolate(x, ...) kn_interpolate_(x, KN_OPTIONS(kn_interpolate_options, __VA_ARGS__))
/* x[...,C r r,H,W] -> y[...,C,H r,W r]: y[c, h r + i, w r + j] = x[(c r + i) r + j, h, w]. Any
 * dtype. kn_pixel_unshuffle takes y back to x; r divides its rows and columns. */
KN_API kn_tensor *kn_pixel_shuffle(kn_tensor *x, int64_t r);
KN_API kn_tensor *kn_pixel_unshuffle(kn_tensor *x, int64_t r);
/* Channels of x[N,C,...] from the groups in turn: channel c of group g becomes c groups + g. */
KN_API kn_tensor *kn_channel_shuffle(kn_tensor *x, int64_t groups);

#ifdef __cplusplus
}
#endif
#endif
