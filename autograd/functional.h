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

typedef struct kn_cross_entropy_options {
    size_t _size;
    struct kn_guard *_positional;
    int64_t ignore_index; /* targets with this value don't count; 0: -100; KN_ZERO: 0 */
    double smoothing;     /* label smoothing in [0, 1) */
} kn_cross_entropy_options;
/* Mean over counted rows of logits[..., V] against targets[...] (i64 or i32). Fused; probabilities
 * are never stored. */
KN_API kn_tensor *kn_cross_entropy_(kn_tensor *logits, kn_tensor *targets,
                                    kn_cross_entropy_options o);
#define kn_cross_entropy(logits, targets, ...)                                                     \
    kn_cross_entropy_(                                                                             \
        (logits), (targets),                                                                       \
        (kn_cross_entropy_options){ ._size = sizeof(kn_cross_entropy_options), __VA_ARGS__ })
/* (x - mean) / sqrt(var + eps) * w + b over the last dim of x[..., C]. w and b [C] may be NULL;
 * they may be f32 while x is bf16 or f16. eps 0: 1e-5; KN_ZERO: 0. */
KN_API kn_tensor *kn_layer_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, double eps);
#define kn_layer_norm(x, w, b, eps) kn_layer_norm_((x), (w), (b), (eps))
KN_API kn_tensor *kn_rms_norm_(kn_tensor *x, kn_tensor *w, double eps);
#define kn_rms_norm(x, w, eps) kn_rms_norm_((x), (w), (eps))
/* Rows of w[V, C] picked by index[...] -> [..., C]. */
KN_API kn_tensor *kn_embedding_(kn_tensor *w, kn_tensor *index);
#define kn_embedding(w, index) kn_embedding_((w), (index))
/* Slices of x along dim picked by the 1-d index. */
KN_API kn_tensor *kn_index_select(kn_tensor *x, int dim, kn_tensor *index);
/* Zeroes with probability p and scales the rest by 1/(1-p). The draw depends on the random key. */
KN_API kn_tensor *kn_dropout_(kn_tensor *x, double p);
#define kn_dropout(x, p) kn_dropout_((x), (p))

typedef struct kn_scaled_dot_product_attention_options {
    size_t _size;
    struct kn_guard *_positional;
    double scale;   /* 0: 1/sqrt(D); KN_ZERO: 0 */
    bool causal;    /* query t sees keys s <= t + (S - T): the last query sees all */
    double dropout; /* of the probabilities */
} kn_scaled_dot_product_attention_options;
/* softmax(scale q k^T) v for q[B,H,T,D], k and v [B,G,S,D] with G dividing H. Memory linear in
 * T. */
KN_API kn_tensor *kn_scaled_dot_product_attention_(kn_tensor *q, kn_tensor *k, kn_tensor *v,
                                                   kn_scaled_dot_product_attention_options o);
#define kn_scaled_dot_product_attention(q, k, v, ...)                                              \
    kn_scaled_dot_product_attention_(                                                              \
        (q), (k), (v),                                                                             \
        (kn_scaled_dot_product_attention_options){                                                 \
            ._size = sizeof(kn_scaled_dot_product_attention_options), __VA_ARGS__ })
/* Rotary embedding (Su et al., arXiv:2104.09864) of x[B,H,T,D] at positions start + t: turns each
 * pair (x[i], x[i + D/2]), i < D/2, by the angle (start + t) base^(-2i/D). D is even. base 0:
 * 10000. */
KN_API kn_tensor *kn_rope(kn_tensor *x, double base, int64_t start);

/* ---- images: x[N,C,H,W], row-major or channels-last; sequences: x[N,C,L] --------------------- */

typedef struct kn_conv2d_options {
    size_t _size;
    struct kn_guard *_positional;
    int64_t stride, pad, dilation;             /* 0: 1, 0, 1; the same for rows and columns */
    int64_t strides[2], pads[2], dilations[2]; /* {rows, columns} in their place, where not all 0 */
    int64_t groups;                            /* 0: 1; divides C and O */
} kn_conv2d_options;
/* y[N,O,P,Q] = bias[o] + sum over c, r, s of w[o,c,r,s] x[n, c, p stride + r dilation - pad, ...]
 * for w[O,C/groups,R,S] and zeros outside of x (torch.nn.functional.conv2d), with P = (H + 2 pad -
 * dilation (R - 1) - 1) / stride + 1. bias[O] may be NULL; f32 beside a narrower x. */
KN_API kn_tensor *kn_conv2d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv2d_options o);
#define kn_conv2d(x, w, bias, ...)                                                                 \
    kn_conv2d_((x), (w), (bias),                                                                   \
               (kn_conv2d_options){ ._size = sizeof(kn_conv2d_options), __VA_ARGS__ })

typedef struct kn_conv1d_options {
    size_t _size;
    struct kn_guard *_positional;
    int64_t stride, pad, dilation, groups; /* 0: 1, 0, 1, 1 */
} kn_conv1d_options;
/* The same of x[N,C,L] and w[O,C/groups,S] (torch.nn.functional.conv1d). */
KN_API kn_tensor *kn_conv1d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, kn_conv1d_options o);
#define kn_conv1d(x, w, bias, ...)                                                                 \
    kn_conv1d_((x), (w), (bias),                                                                   \
               (kn_conv1d_options){ ._size = sizeof(kn_conv1d_options), __VA_ARGS__ })

typedef struct kn_conv_transpose2d_options {
    size_t _size;
    struct kn_guard *_positional;
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
    kn_conv_transpose2d_((x), (w), (bias),                                                         \
                         (kn_conv_transpose2d_options){                                            \
                             ._size = sizeof(kn_conv_transpose2d_options), __VA_ARGS__ })

typedef struct kn_conv_transpose1d_options {
    size_t _size;
    struct kn_guard *_positional;
    int64_t stride, pad, output_pad, dilation, groups; /* 0: 1, 0, 0, 1, 1 */
} kn_conv_transpose1d_options;
/* The same of x[N,C,L] and w[C,O/groups,S] (torch.nn.functional.conv_transpose1d). */
KN_API kn_tensor *kn_conv_transpose1d_(kn_tensor *x, kn_tensor *w, kn_tensor *bias,
                                       kn_conv_transpose1d_options o);
#define kn_conv_transpose1d(x, w, bias, ...)                                                       \
    kn_conv_transpose1d_((x), (w), (bias),                                                         \
                         (kn_conv_transpose1d_options){                                            \
                             ._size = sizeof(kn_conv_transpose1d_options), __VA_ARGS__ })

typedef struct kn_batch_norm_options {
    size_t _size;
    struct kn_guard *_positional;
    bool training;
    double momentum; /* in [0, 1]; 0: 0.1; KN_ZERO: 0 */
    double eps;      /* 0: 1e-5; KN_ZERO: 0 */
} kn_batch_norm_options;
/* (x - mean) / sqrt(var + eps) * w + b for each channel of x[N,C,...] (Ioffe and Szegedy,
 * arXiv:1502.03167). Training: over the batch, and running_mean and running_var [C] move by
 * momentum towards its mean and unbiased variance, in place; else these two are used. w, b [C] may
 * be NULL, or f32 while x is bf16 or f16; the running ones may be NULL in training. */
KN_API kn_tensor *kn_batch_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, kn_tensor *running_mean,
                                 kn_tensor *running_var, kn_batch_norm_options o);
#define kn_batch_norm(x, w, b, mean, var, ...)                                                     \
    kn_batch_norm_((x), (w), (b), (mean), (var),                                                   \
                   (kn_batch_norm_options){ ._size = sizeof(kn_batch_norm_options), __VA_ARGS__ })

/* (x - mean) / sqrt(var + eps) * w + b with mean and (biased) variance of each of the groups of
 * channels of each sample of x[N,C,...] (Wu and He, arXiv:1803.08494); groups divides C. w, b [C]
 * may be NULL, or f32 while x is bf16 or f16, where the norm is rounded before w and b. eps 0:
 * 1e-5; KN_ZERO: 0. */
KN_API kn_tensor *kn_group_norm_(kn_tensor *x, int64_t groups, kn_tensor *w, kn_tensor *b,
                                 double eps);
#define kn_group_norm(x, groups, w, b, eps) kn_group_norm_((x), (groups), (w), (b), (eps))
/* The same of each channel by itself, of more than one value (Ulyanov et al., arXiv:1607.08022).
 * There are no running statistics. */
KN_API kn_tensor *kn_instance_norm_(kn_tensor *x, kn_tensor *w, kn_tensor *b, double eps);
#define kn_instance_norm(x, w, b, eps) kn_instance_norm_((x), (w), (b), (eps))

typedef struct kn_pool2d_options {
    size_t _size;
    struct kn_guard *_positional;
    int64_t kernel, stride, pad,
        dilation; /* kernel is required; 0: stride kernel, pad 0, dilation 1 */
    int64_t kernels[2], strides[2], pads[2], dilations[2]; /* {rows, columns} where not all 0 */
    bool ceil_mode;   /* a last window that only begins inside counts too */
    bool exclude_pad; /* averages divide by the elements that exist (count_include_pad = False) */
} kn_pool2d_options;
/* The largest element of each window, NaN above all; its gradient goes to the first of equals. pad
 * is at most half of kernel. */
KN_API kn_tensor *kn_max_pool2d_(kn_tensor *x, kn_pool2d_options o);
/* The mean of each window; no dilation. */
KN_API kn_tensor *kn_avg_pool2d_(kn_tensor *x, kn_pool2d_options o);
#define kn_max_pool2d(x, ...)                                                                      \
    kn_max_pool2d_((x), (kn_pool2d_options){ ._size = sizeof(kn_pool2d_options), __VA_ARGS__ })
#define kn_avg_pool2d(x, ...)                                                                      \
    kn_avg_pool2d_((x), (kn_pool2d_options){ ._size = sizeof(kn_pool2d_options), __VA_ARGS__ })
/* Means of P x Q windows that cover x: rows [floor(p H/P), ceil((p+1) H/P)), likewise columns. */
KN_API kn_tensor *kn_adaptive_avg_pool2d(kn_tensor *x, int64_t P, int64_t Q);

#ifdef __cplusplus
}
#endif
#endif
