/* tests/autograd/every_functional.c: the cases of autograd/functional.h (every.h). */
#include "tests/autograd/every.h"

/* ---- neural networks ------------------------------------------------------------------------- */

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

EVERY(kn_softmax, "2 3", kn_softmax(x, 0));
EVERY(kn_log_softmax, "2 3", kn_log_softmax(x));
EVERY(kn_layer_norm, "2 4; 4; 4", kn_layer_norm(x, y, z, 0));
EVERY(kn_rms_norm, "2 4; 4", kn_rms_norm(x, y, 0));
EVERY(kn_add_layer_norm, "2 4; 2 4; 4; 4", layer_norm_and_sum(x, y, z, w));
EVERY(kn_add_rms_norm, "2 4; 2 4; 4", rms_norm_and_sum(x, y, z));
EVERY(kn_scaled_dot_product_attention, "1 2 3 2; 1 1 4 2; 1 1 4 2; 3 4",
      kn_scaled_dot_product_attention(x, y, z, .causal = true, .mask = w));
EVERY(kn_rope, "1 2 3 4", kn_rope(x, 0, 2));

/* ---- losses ---------------------------------------------------------------------------------- */

EVERY(kn_mse_loss, "2 3; 2 3", kn_mse_loss(x, y));
EVERY(kn_l1_loss, "2 3; 2 3", kn_l1_loss(x, y));
EVERY(kn_huber_loss, "2 3; 2 3", kn_huber_loss(x, y, .delta = 0.7));
EVERY(kn_smooth_l1_loss, "2 3; 2 3", kn_smooth_l1_loss(x, y, .beta = 0.7));
EVERY(kn_binary_cross_entropy, "%2 3; %2 3; +3", kn_binary_cross_entropy(x, y, .weight = z));
EVERY(kn_binary_cross_entropy_with_logits, "2 3; %2 3",
      kn_binary_cross_entropy_with_logits(x, y, .pos_weight = kn_full_like(x, 2)));
EVERY(kn_kl_div, "2 3; %2 3", kn_kl_div(x, y));
EVERY(kn_nll_loss, "3 4", kn_nll_loss(x, WHOLE(x, (3), 3, 0, 1)));
EVERY(kn_cross_entropy, "3 4", kn_cross_entropy(x, WHOLE(x, (3), 3, 0, 1), .smoothing = 0.1));
EVERY(kn_linear_cross_entropy, "2 2 3; 3 4; 4",
      kn_linear_cross_entropy(x, y, WHOLE(x, (2, 2), 3, -100, 1, 0), .bias = z, .in_out = true,
                              .smoothing = 0.1));
EVERY(kn_normalize, "2 3", kn_normalize(x));
EVERY(kn_cosine_similarity, "2 3; 3", kn_cosine_similarity(x, y));
EVERY(kn_cosine_embedding_loss, "2 3; 2 3", kn_cosine_embedding_loss(x, y, WHOLE(x, (2), 1, -1)));

/* ---- images and sequences -------------------------------------------------------------------- */

EVERY(kn_conv2d, "1 2 4 3; 2 1 2 2; 2",
      kn_conv2d(x, y, z, .pad = 1, .strides = { 2, 1 }, .groups = 2));
EVERY(kn_conv1d, "1 2 5; 2 2 3; 2", kn_conv1d(x, y, z, .pad = 1, .stride = 2));
EVERY(kn_conv_transpose2d, "1 2 3 2; 2 1 2 2; 2",
      kn_conv_transpose2d(x, y, z, .stride = 2, .groups = 2));
EVERY(kn_conv_transpose1d, "1 2 3; 2 2 3; 2",
      kn_conv_transpose1d(x, y, z, .stride = 2, .output_pad = 1));
EVERY(kn_batch_norm, "3 2 2; 2; 2", kn_batch_norm(x, y, z, NULL, NULL, .training = true));
EVERY(kn_group_norm, "2 4 2; 4; 4", kn_group_norm(x, 2, y, z, 0));
EVERY(kn_instance_norm, "2 2 3; 2; 2", kn_instance_norm(x, y, z, 0));
EVERY(kn_max_pool2d, "1 2 4 5", kn_max_pool2d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_avg_pool2d, "1 2 4 5", kn_avg_pool2d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_adaptive_avg_pool2d, "1 2 5 4", kn_adaptive_avg_pool2d(x, 3, 2));
EVERY(kn_max_pool1d, "1 2 7", kn_max_pool1d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_avg_pool1d, "1 2 7", kn_avg_pool1d(x, .kernel = 3, .stride = 2, .pad = 1));
EVERY(kn_adaptive_avg_pool1d, "1 2 7", kn_adaptive_avg_pool1d(x, 3));
EVERY(kn_fold2d, "1 8 6", kn_fold2d(x, 3, 4, .kernel = 2, .pad = 1, .stride = 2));
EVERY(kn_unfold2d, "1 2 3 4", kn_unfold2d(x, .kernel = 2, .pad = 1, .stride = 2));
EVERY(kn_interpolate, "1 2 3 2", kn_interpolate(x, .sizes = { 5, 3 }, .mode = KN_BILINEAR));
EVERY(kn_pixel_shuffle, "1 4 2 2", kn_pixel_shuffle(x, 2));
EVERY(kn_pixel_unshuffle, "1 1 4 2", kn_pixel_unshuffle(x, 2));
