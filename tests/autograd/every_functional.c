/* tests/autograd/every_functional.c: the rows of autograd/functional.h and, for one
 * rank, of autograd/collectives.h (every.h). */
#include "autograd/collectives.h"
#include "autograd/sequences.h"
#include "tests/autograd/every.h"

/* ---- neural networks ------------------------------------------------------------------------- */

/* The norm of x + add, and the sum. */
static kn_tensor *layer_norm_and_sum(kn_tensor *x, kn_tensor *add, kn_tensor *w, kn_tensor *b)
{
    kn_tensor *sum, *y = kn_add_layer_norm(x, add, w, b, 0, &sum);
    return kn_add_scaled(y, sum, 0.5);
}

static kn_tensor *rms_norm_and_sum(kn_tensor *x, kn_tensor *add, kn_tensor *w)
{
    kn_tensor *sum, *y = kn_add_rms_norm(x, add, w, 0, &sum);
    return kn_add_scaled(y, sum, 0.5);
}

EVERY(kn_softmax, "3 5t | 2 2 7 | 4 1 | 0 3", kn_softmax(x));
EVERY(kn_softmax, "2 3 | .", kn_softmax(x, 0));
EVERY(kn_log_softmax, "3 5s | 9", kn_log_softmax(x));
EVERY(kn_layer_norm, "2 3 5; 5; 5 | 3 4t; 4 | 6 | 0 6", kn_layer_norm(x, y, z, 0));
EVERY(kn_rms_norm, "3 5s; 5 | 2 1 7", kn_rms_norm(x, y, 0));
EVERY(kn_add_layer_norm, "2 3 5t; 2 3 5; 5; 5 | 6; 6 | 0 6; 0 6", layer_norm_and_sum(x, y, z, w));
EVERY(kn_add_rms_norm, "3 5s; 3 5e; 5", rms_norm_and_sum(x, y, z));
EVERY(kn_scaled_dot_product_attention, "1 2 3 2; 1 1 4 2; 1 1 4 2; 3 4",
      kn_scaled_dot_product_attention(x, y, z, .causal = true, .align = KN_CAUSAL_LAST, .mask = w));
EVERY(kn_scaled_dot_product_attention,
      "1 2 3 2; 1 1 4 2; 1 1 4 2; 3 4 | 1 2 4 2; 1 1 3 2; 1 1 3 2; 4 3",
      kn_scaled_dot_product_attention(x, y, z, .causal = true, .align = KN_CAUSAL_FIRST,
                                      .mask = w));
EVERY(kn_scaled_dot_product_attention,
      "2 4 5 4; 2 2 7 4; 2 2 7 4; 2 4 5 7 | 2 4 5 4; 2 2 7 4; 2 2 7 4; 2 1 5 7",
      kn_scaled_dot_product_attention(x, y, z, .causal = true, .align = KN_CAUSAL_LAST, .window = 3,
                                      .mask = w, .dropout = 0.2));
EVERY(kn_scaled_dot_product_attention,
      "2 2 3 4; 2 2 5 4; 2 2 5 4; 2 1 5 | 2 2 3 4; 2 2 5 4; 2 2 5 4; 3 5",
      kn_scaled_dot_product_attention(x, y, z,
                                      .mask = kn_masked_fill(w, kn_gt_scalar(kn_detach(w), 0.5),
                                                             -INFINITY)));
EVERY(kn_scaled_dot_product_attention, "2 2 3 4; 2 2 5 4; 2 2 5 4 | 0 2 3 4; 0 2 3 4; 0 2 3 4",
      kn_scaled_dot_product_attention(x, y, z));
EVERY(kn_scaled_dot_product_attention, "1 4 5 3s; 1 2 5 3; 1 2 5 3 | 1 3 4 2t; 1 1 4 2t; 1 1 4 2",
      kn_scaled_dot_product_attention(x, y, z, .causal = true, .scale = 0.7));
EVERY(kn_scaled_dot_product_attention, "1 2 4 2; 1 2 4 2; 1 2 4 2",
      kn_scaled_dot_product_attention(x, y, z, .causal = true, .dropout = 0.3));
EVERY(kn_rope, "2 2 3 4 | 1 2 3 2t", kn_rope(x, 100, 3));
EVERY(kn_rope, "2 1 3 8", kn_rope(x, 100, 3, .scaling = { .factor = 8, .original_ctx = 40 }));

/* Rows of 3, 1, 3, 1, ... steps. */
static kn_tensor *lengths_of(kn_tensor *x)
{
    return WHOLE(x, (kn_size(x, 1)), 3, 1, 3, 1);
}

/* y and the last states, each with a weight of its own. */
static kn_tensor *lstm_all(kn_tensor *x, kn_tensor *w_ih, kn_tensor *w_hh, kn_tensor *h0)
{
    kn_tensor *last[2];
    kn_tensor *y = kn_recurrent(x, w_ih, w_hh, .h0 = h0, .c0 = kn_scale(h0, 0.5), .reverse = true,
                                .lengths = lengths_of(x), .last = last);
    return kn_cat((kn_tensor *[]){ y, kn_unsqueeze(kn_scale(last[0], 0.7), 0),
                                   kn_unsqueeze(kn_scale(last[1], 0.3), 0) },
                  3, 0);
}

static kn_tensor *gru_all(kn_tensor *x, kn_tensor *w_ih, kn_tensor *w_hh, kn_tensor *h0)
{
    kn_tensor *last;
    kn_tensor *y = kn_recurrent(x, w_ih, w_hh, .cell = KN_CELL_GRU, .h0 = h0,
                                .lengths = lengths_of(x), .last = &last);
    return kn_cat((kn_tensor *[]){ y, kn_unsqueeze(kn_scale(last, 0.7), 0) }, 2, 0);
}

EVERY(kn_recurrent, "4 2 3; 8 3; 8 2; 8 | 3 1 2t; 12 2s; 12 3t; 12 | 2 0 3; 4 3; 4 1",
      kn_recurrent(x, y, z, .b_ih = w, .b_hh = w));
EVERY(kn_recurrent, "3 2 3; 8 3; 8 2; 2 2 | 4 4 2; 12 2; 12 3; 4 3t", lstm_all(x, y, z, w));
EVERY(kn_recurrent, "3 2 3; 6 3; 6 2; 2 2 | 4 4 2; 9 2; 9 3; 4 3t", gru_all(x, y, z, w));
EVERY(kn_recurrent, "3 2 2; 6 2; 6 2; 6",
      kn_recurrent(x, y, z, .cell = KN_CELL_GRU, .reverse = true, .b_ih = w, .b_hh = w));
EVERY(kn_recurrent, "3 2 3; 2 3; 2 2; 2",
      kn_recurrent(x, y, z, .cell = KN_CELL_TANH, .reverse = true, .b_hh = w));
EVERY(kn_recurrent, "3 2 3; +2 3; +2 2", kn_recurrent(kn_exp(x), y, z, .cell = KN_CELL_RELU));

/* ---- losses ---------------------------------------------------------------------------------- */

/* 0, 2, -100 (ignored), 1, 0, 2, ... below classes, for each row of x. */
static kn_tensor *targets(kn_tensor *x, int64_t classes)
{
    enum { MOST = 1100 };
    int64_t t[MOST], n = 1;
    for (int d = 0; d < kn_ndim(x) - 1; d++)
        n *= kn_size(x, d);
    for (int64_t i = 0; i < n && i < MOST; i++)
        t[i] = i % 4 == 2 ? -100 : (int64_t[]){ 0, 2, 0, 1 }[i % 4] % classes;
    return kn_from(KN_I64, kn_device_of(x), t, kn_ndim(x) - 1, kn_shape(x));
}

EVERY(kn_mse_loss, "2 3; 2 3", kn_mse_loss(x, y));
EVERY(kn_l1_loss, "2 3; 2 3", kn_l1_loss(x, y));
EVERY(kn_huber_loss, "2 3; 2 3", kn_huber_loss(x, y, .delta = 0.7));
EVERY(kn_smooth_l1_loss, "2 3; 2 3", kn_smooth_l1_loss(x, y, .beta = 0.7));
EVERY(kn_binary_cross_entropy, "%2 3; %2 3; +3", kn_binary_cross_entropy(x, y, .weight = z));
EVERY(kn_binary_cross_entropy_with_logits, "2 3; %2 3",
      kn_binary_cross_entropy_with_logits(x, y, .pos_weight = kn_full_like(x, 2)));
EVERY(kn_kl_div, "2 3; %2 3", kn_kl_div(x, y));
EVERY(kn_margin_ranking_loss, "2 3; 2 3t; 2 3", kn_margin_ranking_loss(x, y, z, .margin = 0.3));
EVERY(kn_hinge_embedding_loss, "2 3", kn_hinge_embedding_loss(x, kn_sign(kn_detach(x))));
EVERY(kn_triplet_margin_loss, "2 3; 2 3; 2 3t", kn_triplet_margin_loss(x, y, z, .swap = true));
EVERY(kn_triplet_margin_loss, "4; 4; 4", kn_triplet_margin_loss(x, y, z, .p = 3, .margin = 3));
EVERY(kn_pairwise_distance, "2 3t; 3 | 4; 4", kn_pairwise_distance(x, y, .keep = true));
EVERY(kn_gaussian_nll_loss, "2 3; 2 3; +2 1 | 2 3t; 2 3; +3",
      kn_gaussian_nll_loss(x, y, z, .full = true));
EVERY(kn_poisson_nll_loss, "2 3; +2 3t", kn_poisson_nll_loss(x, y, .full = true));
EVERY(kn_poisson_nll_loss, "+2 3; 2 3",
      kn_poisson_nll_loss(x, y, .no_log_input = true, .reduction = KN_REDUCTION_NONE));
EVERY(kn_channel_shuffle, "2 4 3 | 1 6 2 2t", kn_channel_shuffle(x, 2));
EVERY(kn_nll_loss, "3 4", kn_nll_loss(x, WHOLE(x, (3), 3, 0, 1)));
EVERY(kn_cross_entropy, "3 4", kn_cross_entropy(x, WHOLE(x, (3), 3, 0, 1), .smoothing = 0.1));
EVERY(kn_cross_entropy, "5 3 | 2 3 4t | 4", kn_cross_entropy(x, targets(x, 3)));
EVERY(kn_cross_entropy, "6 5s", kn_cross_entropy(x, targets(x, 5), .smoothing = 0.2));
/* The gradient is that by the logits. */
EVERY(kn_ctc_loss, "6 2 4 | 5 2 3t",
      kn_ctc_loss(kn_log_softmax(x), WHOLE(x, (2, 3), 1, 2, 0, 2, 2, 1), WHOLE(x, (2), 5, 4),
                  WHOLE(x, (2), 2, 2)));
EVERY(kn_ctc_loss, "6 2 4",
      kn_ctc_loss(kn_log_softmax(x), WHOLE(x, (4), 0, 2, 2, 1), WHOLE(x, (2), 6, 5),
                  WHOLE(x, (2), 3, 1), .blank = 3, .reduction = KN_REDUCTION_NONE));
EVERY(kn_ctc_loss, "3 2 4",
      kn_ctc_loss(kn_log_softmax(x), WHOLE(x, (2, 2), 1, 1, 2, 3), WHOLE(x, (2), 2, 3),
                  WHOLE(x, (2), 2, 0), .reduction = KN_REDUCTION_SUM, .zero_infinity = true));
EVERY(kn_linear_cross_entropy, "2 2 3; 3 4; 4",
      kn_linear_cross_entropy(x, y, WHOLE(x, (2, 2), 3, -100, 1, 0), .bias = z, .in_out = true,
                              .smoothing = 0.1));
EVERY(kn_linear_cross_entropy, "5 3; 4 3; 4 | 2 3 4t; 3 4s",
      kn_linear_cross_entropy(x, y, targets(x, 3), .bias = z, .smoothing = 0.2));
EVERY(kn_linear_cross_entropy, "4 3; 5 3; 5",
      kn_linear_cross_entropy(x, y, targets(x, 5), .bias = z, .reduction = KN_REDUCTION_NONE));
EVERY(kn_linear_cross_entropy, "4; 5 4",
      kn_linear_cross_entropy(x, y, targets(x, 5), .reduction = KN_REDUCTION_SUM));
/* so many rows that there are several chunks */
static kn_tensor *chunks_of_rows(kn_tensor *x, kn_tensor *w, kn_tensor *bias)
{
    kn_tensor *many = kn_expand(x, KN_SHAPE(275, 4, kn_size(x, 1)));
    return kn_linear_cross_entropy(many, w, targets(many, 3), .bias = bias, .smoothing = 0.2);
}
EVERY(kn_linear_cross_entropy, "4 3; 5 3; 5 | 4 3t; 3 3s", chunks_of_rows(x, y, z));
EVERY(kn_normalize, "2 3", kn_normalize(x));
EVERY(kn_cosine_similarity, "2 3; 3", kn_cosine_similarity(x, y));
EVERY(kn_cosine_embedding_loss, "2 3; 2 3", kn_cosine_embedding_loss(x, y, WHOLE(x, (2), 1, -1)));
/* by elements and sums, weights of classes, targets that are shares */
static kn_tensor *weights(kn_tensor *x)
{
    return kn_add_scalar(kn_arange(kn_dtype_of(x), kn_device_of(x), kn_size(x, -1)), 0.25);
}
EVERY(kn_mse_loss, "3 4; 3 4", kn_mse_loss(x, y, .reduction = KN_REDUCTION_SUM));
EVERY(kn_huber_loss, "3 4; 3 4", kn_huber_loss(x, y, .delta = 0.7, .reduction = KN_REDUCTION_NONE));
EVERY(kn_binary_cross_entropy, "%3 4; %3 4; +4",
      kn_binary_cross_entropy(x, y, .weight = z, .reduction = KN_REDUCTION_NONE));
EVERY(kn_binary_cross_entropy_with_logits, "3 4; %3 4; +4",
      kn_binary_cross_entropy_with_logits(x, y, .weight = z));
EVERY(kn_binary_cross_entropy_with_logits, "3 4; %3 4",
      kn_binary_cross_entropy_with_logits(x, y, .pos_weight = weights(x),
                                          .reduction = KN_REDUCTION_NONE));
EVERY(kn_kl_div, "3 4; %3 4", kn_kl_div(x, y, .reduction = KN_REDUCTION_NONE));
EVERY(kn_kl_div, "3 4; 3 4", kn_kl_div(x, y, .log_target = true));
EVERY(kn_nll_loss, "3 4",
      kn_nll_loss(x, WHOLE(x, (3), 3, 2, 0), .weight = weights(x), .ignore_index = 2));
EVERY(kn_cross_entropy, "3 4",
      kn_cross_entropy(x, WHOLE(x, (3), 3, 2, 0), .reduction = KN_REDUCTION_NONE,
                       .smoothing = 0.1));
EVERY(kn_cross_entropy, "3 4",
      kn_cross_entropy(x, WHOLE(x, (3), 3, 2, 0), .weight = weights(x), .smoothing = 0.1,
                       .ignore_index = 2));
EVERY(kn_cross_entropy, "3 4",
      kn_cross_entropy(x, WHOLE(x, (3), 3, 2, 0), .reduction = KN_REDUCTION_SUM,
                       .ignore_index = 2));
EVERY(kn_cross_entropy, "3 4; 3 4",
      kn_cross_entropy(x, kn_softmax(y), .weight = weights(x), .smoothing = 0.1));
EVERY(kn_cosine_similarity, "3 4; 3 4", kn_cosine_similarity(x, y, .dim = KN_ZERO));
EVERY(kn_cosine_embedding_loss, "3 4; 3 4",
      kn_cosine_embedding_loss(x, y, WHOLE(x, (3), 1, -1, 1), .reduction = KN_REDUCTION_NONE));

/* ---- convolutions ---------------------------------------------------------------------------- */

EVERY(kn_conv2d, "2 3 4 5; 2 3 3 2; 2 | 1 2 3 4t; 3 2 1 1s | 0 2 3 4; 3 2 2 2", kn_conv2d(x, y, z));
EVERY(kn_conv2d, "2 2 4 5e; 2 2 3 3t; 2", kn_conv2d(x, y, z, .stride = 2, .pad = 1));
EVERY(kn_conv2d, "2 4 5 3; 6 2 3 3; 6",
      kn_conv2d(kn_channels_last(x), y, z, .groups = 2, .dilation = 2, .pads = { 0, 2 }));
EVERY(kn_conv2d, "1 2 4 3; 2 1 2 2; 2",
      kn_conv2d(x, y, z, .pad = 1, .strides = { 2, 1 }, .groups = 2));
EVERY(kn_conv2d, "3 4 5; 2 3 3 2; 2 | 2 3 4 5; 4 3 4 1",
      kn_conv2d(x, y, z, .same = true, .dilations = { 1, 2 }));
EVERY(kn_conv1d, "3 7; 4 3 4; 4", kn_conv1d(x, y, z, .same = true));
EVERY(kn_conv1d, "2 3 7; 4 3 3; 4 | 0 3 7; 4 3 3", kn_conv1d(x, y, z));
EVERY(kn_conv1d, "2 4 5t; 2 2 3s; 2",
      kn_conv1d(x, y, z, .stride = 2, .pad = 2, .dilation = 2, .groups = 2));
EVERY(kn_conv_transpose2d, "2 3 3 4; 3 2 3 2; 2 | 0 3 3 4; 3 2 3 2", kn_conv_transpose2d(x, y, z));
EVERY(kn_conv_transpose2d, "2 2 3 2e; 2 3 2 3t; 3",
      kn_conv_transpose2d(x, y, z, .strides = { 2, 3 }, .pad = 1, .output_pads = { 1, 2 }));
EVERY(kn_conv_transpose2d, "2 4 3 2; 4 3 2 2; 6",
      kn_conv_transpose2d(kn_channels_last(x), y, z, .groups = 2, .dilation = 2,
                          .output_pads = { 0, 1 }));
EVERY(kn_conv_transpose1d, "2 4 3t; 4 1 2; 2",
      kn_conv_transpose1d(x, y, z, .stride = 3, .pad = 1, .output_pad = 2, .groups = 2));

/* ---- norms by channel ------------------------------------------------------------------------ */

/* Of what was seen before: mean and variance of two channels. */
static kn_tensor *seen_norm(kn_tensor *x, kn_tensor *w, kn_tensor *b, kn_tensor *add, bool relu)
{
    const kn_device on = kn_device_of(x);
    kn_tensor *mean = kn_from(KN_F64, on, (double[]){ 0.25, -0.5 }, KN_SHAPE(2));
    kn_tensor *var = kn_from(KN_F64, on, (double[]){ 0.5, 2 }, KN_SHAPE(2));
    return kn_batch_norm(x, w, b, kn_cast(mean, kn_dtype_of(x)), kn_cast(var, kn_dtype_of(x)),
                         .relu = relu, .residual = add);
}
/* Of the ranks of a communicator, here one: tests/fsdp/sync_batch_norm_test.c has several. */
#define TRAINED_NORM(x, ...) kn_batch_norm(x, y, z, NULL, NULL, .training = true, __VA_ARGS__)
#define SYNC_NORM(x, ...)    TRAINED_NORM(x, .sync = kn_comm_self(), __VA_ARGS__)

EVERY(kn_batch_norm, "2 3 2 3; 3; 3 | 5 3t; 3 | 3 1 4", TRAINED_NORM(x, .relu = false));
EVERY(kn_batch_norm, "2 3 2 3s; 3; 3", TRAINED_NORM(kn_channels_last(x), .relu = false));
EVERY(kn_batch_norm, "2 2 3 2t; 2; 2 | 1 2", seen_norm(x, y, z, NULL, false));
EVERY(kn_batch_norm, "2 3 2 3t; 3; 3 | 5 3; 3", TRAINED_NORM(x, .relu = true));
EVERY(kn_batch_norm, "2 3 2 3; 3; 3; 2 3 2 3s", TRAINED_NORM(x, .relu = true, .residual = w));
EVERY(kn_batch_norm, "2 2 3 2; 2; 2 2 3 2t", seen_norm(kn_channels_last(x), y, NULL, z, true));
EVERY(kn_batch_norm, "2 3 2 3; 3; 3 | 5 3t; 3 | 3 1 4", SYNC_NORM(x, .relu = false));
EVERY(kn_batch_norm, "3 3 2 3s; 3; 3", SYNC_NORM(kn_channels_last(x), .relu = false));
EVERY(kn_batch_norm, "2 3 2 3; 3; 3", SYNC_NORM(x, .relu = true));
EVERY(kn_batch_norm, "2 3 2 3; 3; 3; 2 3 2 3",
      SYNC_NORM(kn_channels_last(x), .relu = true, .residual = w));
EVERY(kn_group_norm, "2 4 2 3; 4; 4 | 3 6t; 6 | 0 2 3", kn_group_norm(x, 2, y, z, 1e-3));
EVERY(kn_group_norm, "2 3 2 3s; 3; 3", kn_group_norm(kn_channels_last(x), 1, y, z, 1e-3));
EVERY(kn_group_norm, "2 4 3; 4", kn_group_norm(x, 2, NULL, y, 1e-3));
EVERY(kn_instance_norm, "2 3 4t; 3; 3 | 2 2 3 2e", kn_instance_norm(x, y, z, 1e-3));
EVERY(kn_instance_norm, "2 3 4; 3; 3",
      kn_instance_norm(x, y, z, 0, .running_mean = kn_zeros_like(kn_detach(y)),
                       .running_var = kn_full_like(kn_detach(y), 2), .use_running = true));

/* ---- windows and sizes ----------------------------------------------------------------------- */

EVERY(kn_max_pool2d, "2 2 4 5 | 0 2 2 2", kn_max_pool2d(x, .kernel = 2));
EVERY(kn_max_pool2d, "2 3 4 5t",
      kn_max_pool2d(kn_channels_last(x), .kernel = 3, .stride = 1, .pad = 1, .dilations = { 1, 2 },
                    .ceil_mode = true));
EVERY(kn_avg_pool2d, "2 2 4 5",
      kn_avg_pool2d(x, .kernel = 3, .stride = 2, .pad = 1, .ceil_mode = true));
EVERY(kn_avg_pool2d, "1 2 3 4s",
      kn_avg_pool2d(x, .kernels = { 3, 2 }, .stride = 1, .pad = 1, .exclude_pad = true));
EVERY(kn_adaptive_avg_pool2d, "2 1 5 6 | 1 2 1 2t", kn_adaptive_avg_pool2d(x, 2, 3));
EVERY(kn_max_pool2d, "3 4 5", kn_max_pool2d(x, .kernel = 2));
EVERY(kn_avg_pool2d, "3 4 5", kn_avg_pool2d(x, .kernel = 2));
EVERY(kn_adaptive_avg_pool2d, "3 4 5", kn_adaptive_avg_pool2d(x, 2, 3));
EVERY(kn_adaptive_avg_pool1d, "3 5", kn_adaptive_avg_pool1d(x, 2));
EVERY(kn_max_pool1d, "1 2 7 | 2 7", kn_max_pool1d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_avg_pool1d, "1 2 7", kn_avg_pool1d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_adaptive_avg_pool1d, "1 2 7", kn_adaptive_avg_pool1d(x, 3));
EVERY(kn_fold2d, "1 8 6", kn_fold2d(x, 3, 4, .kernel = 2, .pad = 1, .stride = 2));
EVERY(kn_unfold2d, "1 2 3 4 | 1 2 5 4t", kn_unfold2d(x, .kernel = 2, .pad = 1, .stride = 2));
EVERY(kn_unfold2d, "1 2 5 4",
      kn_unfold2d(x, .kernels = { 2, 3 }, .strides = { 1, 2 }, .pads = { 0, 2 },
                  .dilations = { 2, 1 }));
EVERY(kn_interpolate, "2 2 3 4 | 0 2 3 4", kn_interpolate(x, .sizes = { 5, 3 }));
EVERY(kn_interpolate, "2 2 5", kn_interpolate(x, .size = 7, .mode = KN_BILINEAR));
EVERY(kn_interpolate, "1 2 2 3 3", kn_interpolate(x, .scale = 1.7, .mode = KN_BILINEAR));
EVERY(kn_interpolate, "1 1 2 3 3t", kn_interpolate(x, .sizes = { 3, 2, 5 }));
EVERY(kn_interpolate, "2 1 4 5t | 1 2 1 2",
      kn_interpolate(x, .sizes = { 6, 3 }, .mode = KN_BICUBIC));
EVERY(kn_interpolate, "1 2 5 6",
      kn_interpolate(x, .sizes = { 3, 8 }, .mode = KN_BICUBIC, .antialias = true));
EVERY(kn_interpolate, "1 2 5 6t | 1 1 7 2",
      kn_interpolate(x, .sizes = { 3, 2 }, .mode = KN_BILINEAR, .antialias = true));
EVERY(kn_interpolate, "1 2 5 3 | 1 2 3", kn_interpolate(x, .size = 4, .mode = KN_NEAREST_EXACT));
EVERY(kn_interpolate, "1 2 5 3 | 1 2 3 2 2", kn_interpolate(x, .size = 2, .mode = KN_AREA));
EVERY(kn_grid_sample, "2 2 3 4; 2 2 3 2 | 1 1 2 3t; 1 4 1 2s", kn_grid_sample(x, y));
EVERY(kn_grid_sample, "1 2 3 4; 1 2 3 2",
      kn_grid_sample(x, y, .padding = KN_GRID_REFLECTION, .align_corners = true));
EVERY(kn_grid_sample, "1 2 1 4; 1 2 3 2",
      kn_grid_sample(x, kn_detach(y), .padding = KN_GRID_BORDER, .nearest = true));
EVERY(kn_affine_grid, "2 2 3 | 1 2 3t", kn_affine_grid(x, 3, 2, false));
EVERY(kn_affine_grid, "2 2 3", kn_affine_grid(x, 3, 1, true));
EVERY(kn_rfft, "2 5 | 6 | 2 3 4t", kn_rfft(x));
EVERY(kn_rfft, "70", kn_rfft(x));
EVERY(kn_irfft, "2 4 2", kn_irfft(x, 7));
EVERY(kn_irfft, "4 2 | 36 2", kn_irfft(x, 0));
EVERY(kn_stft, "2 9; +4 | 12; +3", kn_stft(x, .n_fft = 5, .hop = 2, .window = y));
EVERY(kn_stft, "8", kn_stft(x, .n_fft = 4, .no_center = true, .normalized = true));
EVERY(kn_istft, "2 3 5 2 | 3 5 2",
      kn_istft(x, .n_fft = 4, .hop = 2, .normalized = true, .length = 7,
               .window = kn_full(x->dtype, kn_device_of(x), 0.5, KN_SHAPE(3))));
EVERY(kn_conv3d, "1 2 3 4 4; 3 2 2 3 2; 3 | 2 2 2 2 3t; 1 2 1 1 2",
      kn_conv3d(x, y, z, .strides = { 1, 2, 1 }, .pads = { 1, 0, 1 }));
EVERY(kn_conv3d, "1 4 5 2 3; 2 2 2 1 2", kn_conv3d(x, y, z, .groups = 2, .dilations = { 3, 1, 2 }));
EVERY(kn_conv3d, "2 3 4 4; 3 2 2 3 2; 3 | 1 2 3 4 3; 2 2 4 1 2", kn_conv3d(x, y, z, .same = true));
EVERY(kn_max_pool3d, "1 2 4 3 5 | 2 1 3 4 3t | 2 3 4 3",
      kn_max_pool3d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_avg_pool3d, "1 2 4 3 5", kn_avg_pool3d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_avg_pool3d, "1 2 4 3 5",
      kn_avg_pool3d(x, .kernels = { 2, 3, 2 }, .pads = { 1, 1, 0 }, .exclude_pad = true,
                    .ceil_mode = true));
EVERY(kn_adaptive_avg_pool3d, "1 2 4 3 5", kn_adaptive_avg_pool3d(x, 3, 1, 2));
EVERY(kn_adaptive_max_pool3d, "1 2 4 3 5", kn_adaptive_max_pool3d(x, 3, 1, 2));
EVERY(kn_adaptive_max_pool2d, "2 1 5 6 | 1 2 1 2t", kn_adaptive_max_pool2d(x, 2, 3));
EVERY(kn_adaptive_max_pool1d, "1 2 7", kn_adaptive_max_pool1d(x, 3));
EVERY(kn_interpolate, "2 3 2 3t",
      kn_interpolate(kn_channels_last(x), .scale = 2, .mode = KN_BILINEAR));
EVERY(kn_interpolate, "1 2 4 5s",
      kn_interpolate(x, .sizes = { 7, 2 }, .mode = KN_BILINEAR, .align_corners = true));
EVERY(kn_pixel_shuffle, "1 4 2 2", kn_pixel_shuffle(x, 2));
EVERY(kn_pixel_unshuffle, "1 1 4 2", kn_pixel_unshuffle(x, 2));

/* ---- collectives ----------------------------------------------------------------------------- */

EVERY(kn_all_gather_tensor, "2 3 | 3 4t | 0 3", kn_all_gather_tensor(kn_comm_self(), x, 1));
EVERY(kn_reduce_scatter_tensor, "2 3s | 2 1 3t", kn_reduce_scatter_tensor(kn_comm_self(), x, -1));
EVERY(kn_all_reduce_tensor, "2 3t | .", kn_all_reduce_tensor(kn_comm_self(), x));
EVERY(kn_mean_tensor, "2 3t | .", kn_mean_tensor(kn_comm_self(), x));
EVERY(kn_broadcast_tensor, "2 3e | .", kn_broadcast_tensor(kn_comm_self(), x, 0));
EVERY(kn_all_to_all_tensor, "4 3t", kn_all_to_all_tensor(kn_comm_self(), x, NULL, NULL));
EVERY(kn_all_to_all_tensor, "4 3", kn_all_to_all_tensor(kn_comm_self(), x, (int64_t[]){ 4 }, NULL));
