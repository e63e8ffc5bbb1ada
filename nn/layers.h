/* nn/layers.h: the library's layers: modules with parameters of PyTorch's names and initial values.
 *
 * Each is added to parent as "name", unless parent is NULL. After an error nothing stays
 * allocated. */
#ifndef KNAP_NN_LAYERS_H
#define KNAP_NN_LAYERS_H

#include "nn/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The first options of each layer: dtype and device of its parameters (0: kn_module_defaults). */
#define KN_LAYER_OPTIONS                                                                           \
    KN_BEGIN_OPTIONS;                                                                              \
    kn_dtype dtype;                                                                                \
    kn_device device

/* ---- layers ---------------------------------------------------------------------------------- */

/* y[..., out] = x[..., in] @ weight^T + bias[out]; weight [out, in] (torch.nn.Linear). */
typedef struct kn_linear {
    kn_module base;
} kn_linear;
typedef struct kn_linear_init_options {
    KN_LAYER_OPTIONS;
    bool no_bias;
    bool in_out;           /* weight stored [in, out], as GPT-2's checkpoints do */
    kn_initializer weight; /* default: uniform(-1/sqrt(in), 1/sqrt(in)) */
    kn_initializer bias;   /* default: the same interval */
} kn_linear_init_options;
KN_API bool kn_linear_init_(kn_linear *l, kn_module *parent, const char *name, int64_t in,
                            int64_t out, kn_linear_init_options o);
#define kn_linear_init(l, parent, name, in, out, ...)                                              \
    kn_linear_init_(l, parent, name, in, out, KN_OPTIONS(kn_linear_init_options, __VA_ARGS__))

/* y[..., dim] = rows of weight [count, dim] at the integers x[...] (torch.nn.Embedding). */
typedef struct kn_embedding {
    kn_module base;
} kn_embedding;
typedef struct kn_embedding_init_options {
    KN_LAYER_OPTIONS;
    kn_initializer weight; /* default: normal(0, 1) */
    /* A row that begins as zeros and gets no gradient; negative ones count from the end. 0: none;
     * KN_ZERO: row 0 */
    int64_t padding_idx;
    bool sparse; /* the gradient of weight stays rows (kn_keep_rows, docs/tables.md) */
} kn_embedding_init_options;
KN_API bool kn_embedding_init_(kn_embedding *e, kn_module *parent, const char *name, int64_t count,
                               int64_t dim, kn_embedding_init_options o);
#define kn_embedding_init(e, parent, name, count, dim, ...)                                        \
    kn_embedding_init_(e, parent, name, count, dim,                                                \
                       KN_OPTIONS(kn_embedding_init_options, __VA_ARGS__))

/* kn_embedding_bag of weight [count, dim] (torch.nn.EmbeddingBag):
 *
 *     y = kn_call(&bag, ids);                      // [B, L] -> [B, dim]
 *     y = kn_call_with(&bag, ids, offsets);        // [n], [B]
 *     y = kn_call_with(&bag, ids, NULL, weights);  // [B, L], [B, L], with .mode = KN_BAG_SUM */
typedef struct kn_embedding_bag {
    kn_module base;
} kn_embedding_bag;
typedef struct kn_embedding_bag_init_options {
    KN_LAYER_OPTIONS;
    kn_initializer weight; /* default: normal(0, 1) */
    kn_bag_mode mode;      /* 0: KN_BAG_MEAN */
    bool include_last_offset;
    int64_t padding_idx; /* as kn_embedding_init's */
    bool sparse;
} kn_embedding_bag_init_options;
KN_API bool kn_embedding_bag_init_(kn_embedding_bag *e, kn_module *parent, const char *name,
                                   int64_t count, int64_t dim, kn_embedding_bag_init_options o);
#define kn_embedding_bag_init(e, parent, name, count, dim, ...)                                    \
    kn_embedding_bag_init_(e, parent, name, count, dim,                                            \
                           KN_OPTIONS(kn_embedding_bag_init_options, __VA_ARGS__))

/* Norms over the last dimension of x[..., dim], with weight [dim]; kn_layer_norm has a bias [dim]
 * too (torch.nn.LayerNorm, RMSNorm). */
typedef struct kn_layer_norm {
    kn_module base;
} kn_layer_norm;
typedef struct kn_rms_norm {
    kn_module base;
} kn_rms_norm;
typedef struct kn_norm_init_options {
    KN_LAYER_OPTIONS;
    double eps;     /* 0: 1e-5; KN_ZERO: 0 */
    bool no_bias;   /* layer_norm only */
    bool no_affine; /* without weight and bias (elementwise_affine=False) */
} kn_norm_init_options;
KN_API bool kn_layer_norm_init_(kn_layer_norm *l, kn_module *parent, const char *name, int64_t dim,
                                kn_norm_init_options o);
KN_API bool kn_rms_norm_init_(kn_rms_norm *l, kn_module *parent, const char *name, int64_t dim,
                              kn_norm_init_options o);
#define kn_layer_norm_init(l, parent, name, dim, ...)                                              \
    kn_layer_norm_init_(l, parent, name, dim, KN_OPTIONS(kn_norm_init_options, __VA_ARGS__))
#define kn_rms_norm_init(l, parent, name, dim, ...)                                                \
    kn_rms_norm_init_(l, parent, name, dim, KN_OPTIONS(kn_norm_init_options, __VA_ARGS__))

/* *sum = kn_add(x, add) and kn_call(norm, *sum), to the bit, in fewer passes over memory
 * (kn_add_layer_norm, kn_add_rms_norm); gradients in 16 bits are rounded once less. So a residual
 * stream x goes on past a norm:
 *
 *     h = kn_add_norm(&b->ln_2, x, kn_call(&b->attn, h), &x);
 *
 * It is a call of the norm, whose hooks see x and add come, the result and the sum go. kn_add and
 * an ordinary call run instead where another module stands in norm's place, or where norm is a unit
 * of fsdp that would cast or move its input or its result: that is not for the sum. x and add have
 * one shape and dtype. NULL with an error. */
KN_API kn_tensor *kn_add_norm(void *norm, kn_tensor *x, kn_tensor *add, kn_tensor **sum);

/* kn_conv2d of x[N,in,H,W]; weight [out, in/groups, R, S], bias [out] (torch.nn.Conv2d). */
typedef struct kn_conv2d {
    kn_module base;
} kn_conv2d;
typedef struct kn_conv2d_init_options {
    KN_LAYER_OPTIONS;
    int64_t stride, pad, dilation, groups; /* as in kn_conv2d_options */
    int64_t kernels[2], strides[2], pads[2], dilations[2];
    bool no_bias, same;
    kn_initializer weight; /* default: uniform(-b, b), b = 1/sqrt(in/groups R S) */
    kn_initializer bias;   /* default: the same interval */
} kn_conv2d_init_options;
/* kernel: rows and columns; 0 where .kernels gives both. */
KN_API bool kn_conv2d_init_(kn_conv2d *c, kn_module *parent, const char *name, int64_t in,
                            int64_t out, int64_t kernel, kn_conv2d_init_options o);
#define kn_conv2d_init(c, parent, name, in, out, kernel, ...)                                      \
    kn_conv2d_init_(c, parent, name, in, out, kernel,                                              \
                    KN_OPTIONS(kn_conv2d_init_options, __VA_ARGS__))

/* kn_conv1d of x[N,in,L]; weight [out, in/groups, kernel], bias [out] (torch.nn.Conv1d). */
typedef struct kn_conv1d {
    kn_module base;
} kn_conv1d;
typedef struct kn_conv1d_init_options {
    KN_LAYER_OPTIONS;
    int64_t stride, pad, dilation, groups; /* as in kn_conv1d_options */
    bool no_bias, same;
    kn_initializer weight; /* default: uniform(-b, b), b = 1/sqrt(in/groups kernel) */
    kn_initializer bias;   /* default: the same interval */
} kn_conv1d_init_options;
KN_API bool kn_conv1d_init_(kn_conv1d *c, kn_module *parent, const char *name, int64_t in,
                            int64_t out, int64_t kernel, kn_conv1d_init_options o);
#define kn_conv1d_init(c, parent, name, in, out, kernel, ...)                                      \
    kn_conv1d_init_(c, parent, name, in, out, kernel,                                              \
                    KN_OPTIONS(kn_conv1d_init_options, __VA_ARGS__))

/* kn_conv3d of x[N,in,D,H,W]; weight [out, in/groups, K, R, S], bias [out] (torch.nn.Conv3d). */
typedef struct kn_conv3d {
    kn_module base;
} kn_conv3d;
typedef struct kn_conv3d_init_options {
    KN_LAYER_OPTIONS;
    int64_t stride, pad, dilation, groups; /* as in kn_conv3d_options */
    int64_t kernels[3], strides[3], pads[3], dilations[3];
    bool no_bias, same;
    kn_initializer weight; /* default: uniform(-b, b), b = 1/sqrt(in/groups K R S) */
    kn_initializer bias;   /* default: the same interval */
} kn_conv3d_init_options;
/* kernel: planes, rows and columns; 0 where .kernels gives all three. */
KN_API bool kn_conv3d_init_(kn_conv3d *c, kn_module *parent, const char *name, int64_t in,
                            int64_t out, int64_t kernel, kn_conv3d_init_options o);
#define kn_conv3d_init(c, parent, name, in, out, kernel, ...)                                      \
    kn_conv3d_init_(c, parent, name, in, out, kernel,                                              \
                    KN_OPTIONS(kn_conv3d_init_options, __VA_ARGS__))

/* kn_conv_transpose2d of x[N,in,H,W]; weight [in, out/groups, R, S], bias [out]
 * (torch.nn.ConvTranspose2d). */
typedef struct kn_conv_transpose2d {
    kn_module base;
} kn_conv_transpose2d;
typedef struct kn_conv_transpose2d_init_options {
    KN_LAYER_OPTIONS;
    int64_t stride, pad, output_pad, dilation, groups; /* as in kn_conv_transpose2d_options */
    int64_t kernels[2], strides[2], pads[2], output_pads[2], dilations[2];
    bool no_bias;
    kn_initializer weight; /* default: uniform(-b, b), b = 1/sqrt(out/groups R S) */
    kn_initializer bias;   /* default: the same interval */
} kn_conv_transpose2d_init_options;
/* kernel: rows and columns; 0 where .kernels gives both. */
KN_API bool kn_conv_transpose2d_init_(kn_conv_transpose2d *c, kn_module *parent, const char *name,
                                      int64_t in, int64_t out, int64_t kernel,
                                      kn_conv_transpose2d_init_options o);
#define kn_conv_transpose2d_init(c, parent, name, in, out, kernel, ...)                            \
    kn_conv_transpose2d_init_(c, parent, name, in, out, kernel,                                    \
                              KN_OPTIONS(kn_conv_transpose2d_init_options, __VA_ARGS__))

/* kn_conv_transpose1d of x[N,in,L]; weight [in, out/groups, kernel], bias [out]
 * (torch.nn.ConvTranspose1d). */
typedef struct kn_conv_transpose1d {
    kn_module base;
} kn_conv_transpose1d;
typedef struct kn_conv_transpose1d_init_options {
    KN_LAYER_OPTIONS;
    int64_t stride, pad, output_pad, dilation, groups; /* as in kn_conv_transpose1d_options */
    bool no_bias;
    kn_initializer weight; /* default: uniform(-b, b), b = 1/sqrt(out/groups kernel) */
    kn_initializer bias;   /* default: the same interval */
} kn_conv_transpose1d_init_options;
KN_API bool kn_conv_transpose1d_init_(kn_conv_transpose1d *c, kn_module *parent, const char *name,
                                      int64_t in, int64_t out, int64_t kernel,
                                      kn_conv_transpose1d_init_options o);
#define kn_conv_transpose1d_init(c, parent, name, in, out, kernel, ...)                            \
    kn_conv_transpose1d_init_(c, parent, name, in, out, kernel,                                    \
                              KN_OPTIONS(kn_conv_transpose1d_init_options, __VA_ARGS__))

/* kn_batch_norm of x[N,C,...] (torch.nn.BatchNorm1d, 2d, 3d): weight and bias [C], buffers
 * running_mean, running_var [C] and num_batches_tracked. While training (kn_train) it normalises by
 * the batch of this rank, or of all (kn_sync_batch_norm), and moves the running statistics, but not
 * when a call is computed again (kn_recompute). */
typedef struct kn_batch_norm {
    kn_module base;
} kn_batch_norm;
typedef struct kn_batch_norm_init_options {
    KN_LAYER_OPTIONS;
    double eps;            /* 0: 1e-5; KN_ZERO: 0 */
    double momentum;       /* 0: 0.1; KN_ZERO: 0 */
    bool no_affine;        /* no weight and bias */
    bool no_running;       /* no buffers: the batch's statistics always */
    kn_initializer weight; /* default: ones */
    bool cumulative;       /* running statistics average all batches (torch: momentum None) */
} kn_batch_norm_init_options;
KN_API bool kn_batch_norm_init_(kn_batch_norm *b, kn_module *parent, const char *name,
                                int64_t channels, kn_batch_norm_init_options o);
#define kn_batch_norm_init(b, parent, name, channels, ...)                                         \
    kn_batch_norm_init_(b, parent, name, channels,                                                 \
                        KN_OPTIONS(kn_batch_norm_init_options, __VA_ARGS__))
/* relu(kn_call(norm, x) + residual), of a batch norm in fewer passes over memory (kn_batch_norm's
 * .relu and .residual); any other module that stands in its place is called, and relu follows.
 * residual, of the shape and dtype of norm's result, or NULL: none. It is a call of the batch norm,
 * whose hooks see what comes out. NULL with an error. */
KN_API kn_tensor *kn_batch_norm_relu(void *norm, kn_tensor *x, kn_tensor *residual);

/* kn_group_norm of x[N,channels,...] with weight and bias [channels] (torch.nn.GroupNorm). */
typedef struct kn_group_norm {
    kn_module base;
} kn_group_norm;
typedef struct kn_group_norm_init_options {
    KN_LAYER_OPTIONS;
    double eps;     /* 0: 1e-5; KN_ZERO: 0 */
    bool no_affine; /* no weight and bias */
} kn_group_norm_init_options;
KN_API bool kn_group_norm_init_(kn_group_norm *m, kn_module *parent, const char *name,
                                int64_t groups, int64_t channels, kn_group_norm_init_options o);
#define kn_group_norm_init(m, parent, name, groups, channels, ...)                                 \
    kn_group_norm_init_(m, parent, name, groups, channels,                                         \
                        KN_OPTIONS(kn_group_norm_init_options, __VA_ARGS__))

/* kn_instance_norm of x[N,channels,...], without weight and bias unless .affine
 * (torch.nn.InstanceNorm1d, 2d, 3d). */
typedef struct kn_instance_norm {
    kn_module base;
} kn_instance_norm;
typedef struct kn_instance_norm_init_options {
    KN_LAYER_OPTIONS;
    double eps;  /* 0: 1e-5; KN_ZERO: 0 */
    bool affine; /* weight and bias [channels] */
    /* Buffers running_mean and running_var, which training moves and evaluation normalises by, and
     * num_batches_tracked, which stays 0, as in torch. */
    bool track_running_stats;
    double momentum; /* of them; in [0, 1]; 0: 0.1; KN_ZERO: 0 */
} kn_instance_norm_init_options;
KN_API bool kn_instance_norm_init_(kn_instance_norm *m, kn_module *parent, const char *name,
                                   int64_t channels, kn_instance_norm_init_options o);
#define kn_instance_norm_init(m, parent, name, channels, ...)                                      \
    kn_instance_norm_init_(m, parent, name, channels,                                              \
                           KN_OPTIONS(kn_instance_norm_init_options, __VA_ARGS__))

/* Recurrent layers (torch.nn.LSTM, GRU, RNN; kernels/cells.h has the formulas) of x[T,N,in], or
 * [N,T,in] with .batch_first:
 *
 *     y = kn_call(&lstm, x);                                           // states begin as zeros
 *     kn_values v = kn_call_n(&lstm, KN_VALUES(x, h0, c0), NULL, 0);   // y, h_n, c_n
 *     v = kn_call_n(&lstm, KN_VALUES(x, NULL, NULL, lengths), NULL, 0);
 *     v = kn_call_n(&gru, KN_VALUES(x, h0, lengths), NULL, 0);         // y, h_n; of kn_rnn, too
 *
 * y is [T,N,hidden], or with .bidirectional [T,N,2 hidden], forward and backward side by side.
 * States are [layers ways,N,hidden], ways 2 with .bidirectional, a layer's ways side by side. With
 * lengths, i64[N] in [1,T] in any order on x's device, row n ends after lengths[n] steps, as in a
 * packed sequence of torch: h_n and c_n are those of its end, the other way begins there, and y is
 * 0 behind it.
 *
 * Of layer 0: weight_ih_l0 [G,in], weight_hh_l0 [G,hidden], bias_ih_l0 [G], bias_hh_l0 [G], and
 * those of the other way, weight_ih_l0_reverse, ...; G is 4 hidden for LSTM (i, f, g, o), 3 for GRU
 * (r, z, n), 1 for RNN; deeper layers have weight_ih [G, ways hidden]. */
typedef struct kn_lstm {
    kn_module base;
} kn_lstm;
typedef struct kn_gru {
    kn_module base;
} kn_gru;
typedef struct kn_rnn {
    kn_module base;
} kn_rnn;
typedef struct kn_recurrent_init_options {
    KN_LAYER_OPTIONS;
    int layers; /* 0: 1 */
    bool no_bias, batch_first, bidirectional;
    bool relu;             /* kn_rnn: in place of tanh */
    double dropout;        /* in training, of what goes from layer to layer */
    kn_initializer weight; /* biases too; default: uniform(-1/sqrt(hidden), 1/sqrt(hidden)) */
} kn_recurrent_init_options;
KN_API bool kn_lstm_init_(kn_lstm *m, kn_module *parent, const char *name, int64_t in,
                          int64_t hidden, kn_recurrent_init_options o);
KN_API bool kn_gru_init_(kn_gru *m, kn_module *parent, const char *name, int64_t in, int64_t hidden,
                         kn_recurrent_init_options o);
KN_API bool kn_rnn_init_(kn_rnn *m, kn_module *parent, const char *name, int64_t in, int64_t hidden,
                         kn_recurrent_init_options o);
#define kn_lstm_init(m, parent, name, in, hidden, ...)                                             \
    kn_lstm_init_(m, parent, name, in, hidden, KN_OPTIONS(kn_recurrent_init_options, __VA_ARGS__))
#define kn_gru_init(m, parent, name, in, hidden, ...)                                              \
    kn_gru_init_(m, parent, name, in, hidden, KN_OPTIONS(kn_recurrent_init_options, __VA_ARGS__))
#define kn_rnn_init(m, parent, name, in, hidden, ...)                                              \
    kn_rnn_init_(m, parent, name, in, hidden, KN_OPTIONS(kn_recurrent_init_options, __VA_ARGS__))

/* Dropout: in training each element is 0 with probability p, else divided by 1 - p. */
typedef struct kn_dropout {
    kn_module base;
} kn_dropout;
KN_API bool kn_dropout_init(kn_dropout *d, kn_module *parent, const char *name, double p);

/* A function as a module, for a kn_sequential: kn_activation_init(&act, NULL, "", kn_relu). */
typedef struct kn_activation {
    kn_module base;
} kn_activation;
KN_API bool kn_activation_init(kn_activation *a, kn_module *parent, const char *name,
                               kn_tensor *(*function)(kn_tensor *x));

/* Its children, called one after another in the order in which they were added
 * (torch.nn.Sequential); without children it returns its input.
 *
 *     kn_sequential_init(&net, NULL, "");
 *     kn_linear_init(&fc1, &net.base, "0", 784, 512);
 *     kn_activation_init(&act, &net.base, "1", kn_relu);
 *     kn_linear_init(&fc2, &net.base, "2", 512, 10); */
typedef struct kn_sequential {
    kn_module base;
} kn_sequential;
KN_API bool kn_sequential_init(kn_sequential *s, kn_module *parent, const char *name);
/* Adds child, any struct that begins with a kn_module and has no parent yet, named by its number:
 * "0", "1", ... As with kn_module_add, the tree frees it, also after an error. extend adds
 * children[n]. */
KN_API bool kn_sequential_append(kn_sequential *s, void *child);
KN_API bool kn_sequential_extend(kn_sequential *s, void *const *children, int n);

/* Self-attention of x[B,T,dim] as in GPT-2: c_attn makes queries, keys and values, c_proj the
 * result. Causal unless .not_causal; grouped key-value heads, rope, and norms of queries and keys
 * (q_norm and k_norm with weights [dim / heads], as in Qwen3) are options. dim must divide
 * into heads, heads into groups of kv_heads. kn_call_with(a, x, mask) takes the mask of
 * kn_scaled_dot_product_attention, too. */
typedef struct kn_self_attention {
    kn_module base;
} kn_self_attention;
typedef struct kn_self_attention_init_options {
    KN_LAYER_OPTIONS;
    int kv_heads; /* 0: as many as heads */
    bool no_bias, in_out, not_causal;
    bool rope;                          /* rotary embedding of queries and keys (kn_rope) */
    double rope_base;                   /* 0: 10000; only with .rope */
    kn_rope_scaling rope_scaling;       /* Llama 3's; only with .rope */
    bool qk_norm;                       /* RMS norms of queries and keys by head, before rope */
    double qk_norm_eps;                 /* 0: 1e-5; KN_ZERO: 0 */
    double dropout;                     /* of the probabilities, and of the result */
    kn_initializer weight, proj_weight; /* default: linear's */
} kn_self_attention_init_options;
KN_API bool kn_self_attention_init_(kn_self_attention *a, kn_module *parent, const char *name,
                                    int64_t dim, int heads, kn_self_attention_init_options o);
#define kn_self_attention_init(a, parent, name, dim, heads, ...)                                   \
    kn_self_attention_init_(a, parent, name, dim, heads,                                           \
                            KN_OPTIONS(kn_self_attention_init_options, __VA_ARGS__))

/* Attention of x[B,T,dim] to a context[B,S,kv_dim], or to x itself:
 *
 *     y = kn_call(&a, x);
 *     y = kn_call_n(&a, KN_VALUES(x, context), NULL, 0).v[0];
 *     y = kn_call_n(&a, KN_VALUES(x, NULL, mask), NULL, 0).v[0];
 *
 * q_proj makes queries of x, k_proj and v_proj keys and values of the context, o_proj the result
 * [B,T,dim]. The mask is that of kn_scaled_dot_product_attention. dim must divide into heads unless
 * .head_dim is given, heads into groups of kv_heads. */
typedef struct kn_multi_head_attention {
    kn_module base;
} kn_multi_head_attention;
typedef struct kn_multi_head_attention_init_options {
    KN_LAYER_OPTIONS;
    int64_t kv_dim;   /* channels of the context; 0: dim */
    int kv_heads;     /* 0: as many as heads */
    int64_t head_dim; /* channels of a head; 0: dim / heads */
    bool no_bias, causal;
    bool qkv_bias;    /* beside .no_bias: queries, keys and values have biases, as in Qwen2 */
    int64_t window;   /* of the keys that .causal lets a query see, the last so many; 0: all */
    bool rope;        /* rotary embedding, of each by its own positions */
    double rope_base; /* 0: 10000; only with .rope */
    kn_rope_scaling rope_scaling;       /* Llama 3's; only with .rope */
    bool qk_norm;                       /* RMS norms q_norm and k_norm by head, before rope */
    double qk_norm_eps;                 /* 0: 1e-5; KN_ZERO: 0 */
    double dropout;                     /* of the probabilities */
    kn_initializer weight, proj_weight; /* of q_proj, k_proj and v_proj, of o_proj; linear's */
} kn_multi_head_attention_init_options;
KN_API bool kn_multi_head_attention_init_(kn_multi_head_attention *a, kn_module *parent,
                                          const char *name, int64_t dim, int heads,
                                          kn_multi_head_attention_init_options o);
#define kn_multi_head_attention_init(a, parent, name, dim, heads, ...)                             \
    kn_multi_head_attention_init_(a, parent, name, dim, heads,                                     \
                                  KN_OPTIONS(kn_multi_head_attention_init_options, __VA_ARGS__))

/* Keys and values of the positions so far, in all attentions below a module, for generation: while
 * it is there, a forward takes the tokens that are new, at the positions behind those so far.
 *
 *     kn_cache *c = kn_cache_new(&net, ctx);
 *     y = kn_gpt_next_logits(&net, prompt);   // [1, T]
 *     y = kn_gpt_next_logits(&net, token);    // [1, 1], at position T
 *
 * Grad mode must be off, attention causal and to x itself. A net whose positions are its own, as
 * the rows of an embedding, asks kn_token_positions. The caches take their memory at the first
 * forward, for rows of as many tokens. The caller frees it before module; a module has one at a
 * time. NULL with an error. */
typedef struct kn_cache kn_cache;
KN_API kn_cache *kn_cache_new(void *module, int64_t capacity); /* positions */
KN_API void kn_cache_free(kn_cache *c);                        /* NULL is fine */
KN_API int64_t kn_cache_length(const kn_cache *c);             /* positions so far */
/* Forgets the positions from length on; 0: all. */
KN_API bool kn_cache_truncate(kn_cache *c, int64_t length);
/* Texts of different lengths in one cache: the next forwards have n rows, of which row i goes on
 * with text texts[i]; one text alone, as number 0 is at first, may be of several rows of one
 * length. Texts have numbers of the caller's choice, from 0; each takes memory for the capacity
 * when it begins. kn_cache_truncate is about the selected texts, kn_cache_length and
 * kn_cached_positions say the longest one's. Each row is attended to alone, so it gives the same
 * bits as alone wherever the products do, as the CPU's do for up to 4 rows. */
enum { KN_CACHE_TEXTS = 64 }; /* selected at once */
KN_API bool kn_cache_select(kn_cache *c, const int64_t *texts, int n);
/* Of an attention, 0 where it has no cache. */
KN_API int64_t kn_cached_positions(const void *attention);
/* The positions of tokens ids[B, T] in a net with this attention: [T] (i64), from 0 or behind those
 * in its cache, or [B, T] where several texts are selected. */
KN_API kn_tensor *kn_token_positions(const void *attention, kn_tensor *ids);

/* c_proj(gelu(c_fc(x))) of x[..., dim], hidden = 4 dim unless given, dropout at the end. */
typedef struct kn_mlp {
    kn_module base;
} kn_mlp;
typedef struct kn_mlp_init_options {
    KN_LAYER_OPTIONS;
    int64_t hidden;
    bool no_bias, in_out;
    double dropout;
    kn_initializer weight, proj_weight;
} kn_mlp_init_options;
KN_API bool kn_mlp_init_(kn_mlp *m, kn_module *parent, const char *name, int64_t dim,
                         kn_mlp_init_options o);
#define kn_mlp_init(m, parent, name, dim, ...)                                                     \
    kn_mlp_init_(m, parent, name, dim, KN_OPTIONS(kn_mlp_init_options, __VA_ARGS__))

/* down_proj(silu(gate_proj(x)) * up_proj(x)) of x[..., dim], dropout at the end: the MLP of Llama
 * (Shazeer, arXiv:2002.05202), whose layers have no bias (.no_bias). */
typedef struct kn_swiglu {
    kn_module base;
} kn_swiglu;
typedef struct kn_swiglu_init_options {
    KN_LAYER_OPTIONS;
    bool no_bias;
    double dropout;
    kn_initializer weight, proj_weight; /* of gate_proj and up_proj, of down_proj; linear's */
} kn_swiglu_init_options;
KN_API bool kn_swiglu_init_(kn_swiglu *m, kn_module *parent, const char *name, int64_t dim,
                            int64_t hidden, kn_swiglu_init_options o);
#define kn_swiglu_init(m, parent, name, dim, hidden, ...)                                          \
    kn_swiglu_init_(m, parent, name, dim, hidden, KN_OPTIONS(kn_swiglu_init_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
