/* autograd/autograd.h: differentiable operations and the tape.
 *
 * Every operation takes borrowed tensors and gives its result to the current scope. Where grad mode
 * is on and an input requires grad, it also leaves a node; kn_backward() runs the nodes in reverse.
 * Mixed float dtypes are an error except where an operation says otherwise; there is no autocast.
 * Shapes are written as in PyTorch; broadcasting follows the usual rule (trailing dims align). */
#ifndef KNAP_AUTOGRAD_AUTOGRAD_H
#define KNAP_AUTOGRAD_AUTOGRAD_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Options: a field that is left out, or 0, has the default of the comment beside it. If 0 itself
 * has a meaning, KN_ZERO stands for it: .weight_decay = KN_ZERO, .ignore_index = KN_ZERO, .seed =
 * KN_ZERO. Every value is checked; values that aren't finite are refused. */
#define KN_ZERO (-((int64_t)1 << 62))

/* ---- gradients ------------------------------------------------------------------------------- */

/* Makes a leaf collect a gradient (float tensors that no operation made). Returns t. */
KN_API kn_tensor *kn_require_grad(kn_tensor *t, bool on);
KN_API bool kn_requires_grad(const kn_tensor *t);
/* The accumulated gradient of a leaf: the raw sum over backward passes since it was cleared.
 * Borrowed; NULL where none arrived (without an error), and for parameters of units of fsdp, whose
 * gradients lie in shards (kn_param_grad, or kn_summon with .with_grads). */
KN_API kn_tensor *kn_grad(const kn_tensor *t);
KN_API void kn_clear_grad(kn_tensor *t);
/* Records nothing while off. Returns the previous state, to be restored. */
KN_API bool kn_set_grad_mode(bool on);
KN_API bool kn_grad_mode(void);
/* The same values without history. */
KN_API kn_tensor *kn_detach(kn_tensor *t);

typedef struct kn_backward_options {
    size_t _size;
    struct kn_guard *_positional; /* use names: .retain_graph = true */
    kn_tensor *grad;              /* gradient of the result; NULL: ones, result must be a scalar */
    bool retain_graph;            /* keep saved tensors for a second backward */
} kn_backward_options;

/* Adds d result / d leaf to every reachable leaf that requires grad. Frees the graph's saved
 * tensors unless retain_graph; a second backward through freed ones is an error that says so. A
 * backward that fails takes back what it had added; where a leaf had a gradient before, that can't
 * be, and kn_grad and steps refuse until kn_clear_grad. */
KN_API bool kn_backward_(kn_tensor *result, kn_backward_options o);
#define kn_backward(result, ...)                                                                   \
    kn_backward_((result),                                                                         \
                 (kn_backward_options){ ._size = sizeof(kn_backward_options), __VA_ARGS__ })

/* ---- hooks ----------------------------------------------------------------------------------- */

/* Runs with the complete gradient of t before it flows on; returns NULL to keep it or a replacement
 * of the same shape. t requires grad. */
typedef kn_tensor *(*kn_tensor_hook)(kn_tensor *grad, void *arg);
KN_API bool kn_on_grad(kn_tensor *t, kn_tensor_hook hook, void *arg);
/* Runs after a leaf's gradient of one backward was complete and accumulated. */
typedef void (*kn_leaf_hook)(kn_tensor *leaf, void *arg);
KN_API bool kn_on_accumulated(kn_tensor *leaf, kn_leaf_hook hook, void *arg);
/* Run just before and after the node that made t computes its backward. */
typedef void (*kn_node_hook)(kn_tensor *const *grads, int n, void *arg);
KN_API bool kn_on_node(kn_tensor *t, kn_node_hook pre, kn_node_hook post, void *arg);
/* Queues fn to run once at the end of the running backward, if that doesn't fail (error outside
 * one). */
KN_API bool kn_on_backward_end(void (*fn)(void *arg), void *arg);

/* ---- random keys ----------------------------------------------------------------------------- */

/* What dropout and the like draw is a function of (seed, step, micro-batch, module path, call,
 * element).
 *
 * kn_seed sets the seed, 1337 at first; parameters that their first read fills take it, too.
 * kn_set_step sets the number of steps done, for a program that resumes; kn_get_step tells it.
 * kn_step counts it on, with several optimizers once each time that one of them steps again: they
 * step in turn, and it counts the rounds. */
KN_API void kn_seed(uint64_t seed);
KN_API void kn_set_step(int64_t step);
KN_API int64_t kn_get_step(void);

/* ---- elementwise ----------------------------------------------------------------------------- */

KN_API kn_tensor *kn_add(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_sub(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_mul(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_div(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_maximum(kn_tensor *a, kn_tensor *b); /* where equal, half the gradient each */
KN_API kn_tensor *kn_minimum(kn_tensor *a, kn_tensor *b);
/* Comparisons give bool tensors without gradient. */
KN_API kn_tensor *kn_eq(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_ne(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_lt(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_le(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_gt(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_ge(kn_tensor *a, kn_tensor *b);
KN_API kn_tensor *kn_scale(kn_tensor *x, double factor);      /* factor * x */
KN_API kn_tensor *kn_add_scalar(kn_tensor *x, double offset); /* x + offset */
KN_API kn_tensor *kn_neg(kn_tensor *x);
KN_API kn_tensor *kn_abs(kn_tensor *x);
KN_API kn_tensor *kn_exp(kn_tensor *x);
KN_API kn_tensor *kn_log(kn_tensor *x);
KN_API kn_tensor *kn_sqrt(kn_tensor *x);
KN_API kn_tensor *kn_rsqrt(kn_tensor *x);
KN_API kn_tensor *kn_tanh(kn_tensor *x);
KN_API kn_tensor *kn_sigmoid(kn_tensor *x);
KN_API kn_tensor *kn_relu(kn_tensor *x);
KN_API kn_tensor *kn_gelu_tanh(kn_tensor *x); /* tanh form, as GPT-2 */
KN_API kn_tensor *kn_gelu(kn_tensor *x);      /* exact form */
KN_API kn_tensor *kn_silu(kn_tensor *x);
KN_API kn_tensor *kn_sin(kn_tensor *x);
KN_API kn_tensor *kn_cos(kn_tensor *x);
KN_API kn_tensor *kn_pow(kn_tensor *x, double exponent);
KN_API kn_tensor *kn_clamp(kn_tensor *x, double low, double high);
KN_API kn_tensor *kn_where(kn_tensor *cond, kn_tensor *a, kn_tensor *b); /* cond bool */
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
/* Over one dim; the gradient goes to every maximum in equal parts. */
KN_API kn_tensor *kn_amax(kn_tensor *x, int dim, bool keep);
KN_API kn_tensor *kn_amin(kn_tensor *x, int dim, bool keep);
KN_API kn_tensor *kn_argmax(kn_tensor *x, int dim); /* i64, no gradient */

/* ---- shape ----------------------------------------------------------------------------------- */

/* A view where strides allow it, else a copy. One size may be -1. */
KN_API kn_tensor *kn_reshape(kn_tensor *x, int ndim, const int64_t *shape);
/* As reshape, but an error where a copy would be needed. */
KN_API kn_tensor *kn_view(kn_tensor *x, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_transpose(kn_tensor *x, int dim0, int dim1);
KN_API kn_tensor *kn_permute(kn_tensor *x, int n, const int64_t *order);
KN_API kn_tensor *kn_slice(kn_tensor *x, int dim, int64_t begin, int64_t end); /* [begin, end) */
/* Repeats dims of size 1 without a copy; new dims come in front; -1 keeps a dim's size. */
KN_API kn_tensor *kn_expand(kn_tensor *x, int ndim, const int64_t *shape);
KN_API kn_tensor *kn_contiguous(kn_tensor *x);
/* x[N,C,H,W] with its channels side by side in memory, as [N,H,W,C]: the order in which
 * convolutions of many channels are fast. Elementwise operations, convolution, batch norm and
 * pooling give results in the order of their input. A copy, or x itself where it is so already. */
KN_API kn_tensor *kn_channels_last(kn_tensor *x);
KN_API bool kn_is_channels_last(const kn_tensor *x); /* dense in that order */
/* Cuts dim into n equal parts, stored in out[0..n-1] (views; n <= 8). */
KN_API bool kn_chunk(kn_tensor *x, int dim, int n, kn_tensor **out);
/* One after another along dim: 1 to 16 tensors of one dtype, which may differ in that dim only. */
KN_API kn_tensor *kn_cat(kn_tensor *const *x, int n, int dim);

/* ---- products -------------------------------------------------------------------------------- */

/* [..., M, K] @ [..., K, N] -> [..., M, N]; leading dims broadcast. Both have at least 2 dims. */
KN_API kn_tensor *kn_matmul(kn_tensor *a, kn_tensor *b);
/* x[..., K] @ w^T + bias with w[N, K] (torch.nn.Linear), or x @ w + bias with w[K, N] where in_out
 * (GPT-2's Conv1D). bias[N] may be NULL. */
KN_API kn_tensor *kn_linear_(kn_tensor *x, kn_tensor *w, kn_tensor *bias, bool in_out);
#define kn_linear(x, w, bias, in_out) kn_linear_((x), (w), (bias), (in_out))

/* ---- neural networks ------------------------------------------------------------------------- */

KN_API kn_tensor *kn_softmax(kn_tensor *x);     /* over the last dim */
KN_API kn_tensor *kn_log_softmax(kn_tensor *x); /* over the last dim */

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

/* ---- images: x[N,C,H,W], row-major or channels-last ------------------------------------------ */

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
