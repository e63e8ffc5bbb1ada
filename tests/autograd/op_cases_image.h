/* tests/autograd/op_cases_image.h: the operations of images and sequences as functions of their
 * inputs, and the table of their cases. */
#ifndef KNAP_TESTS_OP_CASES_IMAGE_H
#define KNAP_TESTS_OP_CASES_IMAGE_H

#include "comm/comm.h"
#include "tests/autograd/op_check.h"

static kn_tensor *run_conv(kn_tensor *const *x)
{
    return kn_conv2d(x[0], x[1], x[2]);
}
static kn_tensor *run_conv_strided(kn_tensor *const *x)
{
    return kn_conv2d(x[0], x[1], x[2], .stride = 2, .pad = 1);
}
static kn_tensor *run_conv_groups(kn_tensor *const *x)
{
    return kn_conv2d(kn_channels_last(x[0]), x[1], x[2], .groups = 2, .dilation = 2,
                     .pads = { 0, 2 });
}
static kn_tensor *run_batch_norm(kn_tensor *const *x)
{
    return kn_batch_norm(x[0], x[1], x[2], NULL, NULL, .training = true);
}
static kn_tensor *run_batch_norm_last(kn_tensor *const *x)
{
    return kn_batch_norm(kn_channels_last(x[0]), x[1], x[2], NULL, NULL, .training = true);
}
static kn_tensor *run_batch_norm_eval(kn_tensor *const *x)
{
    const kn_dtype t = kn_dtype_of(x[0]);
    double mean[2] = { 0.25, -0.5 }, var[2] = { 0.5, 2 };
    return kn_batch_norm(x[0], x[1], x[2], tensor_of(t, mean, KN_SHAPE(2)),
                         tensor_of(t, var, KN_SHAPE(2)));
}
static kn_tensor *run_batch_norm_relu(kn_tensor *const *x)
{
    return kn_batch_norm(x[0], x[1], x[2], NULL, NULL, .training = true, .relu = true);
}
static kn_tensor *run_batch_norm_add_relu(kn_tensor *const *x)
{
    return kn_batch_norm(x[0], x[1], x[2], NULL, NULL, .training = true, .relu = true,
                         .residual = x[3]);
}
static kn_tensor *run_batch_norm_relu_eval(kn_tensor *const *x)
{
    const kn_dtype t = kn_dtype_of(x[0]);
    double mean[2] = { 0.25, -0.5 }, var[2] = { 0.5, 2 };
    return kn_batch_norm(kn_channels_last(x[0]), x[1], NULL, tensor_of(t, mean, KN_SHAPE(2)),
                         tensor_of(t, var, KN_SHAPE(2)), .relu = true, .residual = x[2]);
}
/* Of the ranks of a communicator, here one: tests/fsdp/sync_batch_norm_test.c has several. */
static kn_tensor *run_sync_batch_norm(kn_tensor *const *x)
{
    return kn_batch_norm(x[0], x[1], x[2], NULL, NULL, .training = true, .sync = kn_comm_self());
}
static kn_tensor *run_sync_batch_norm_last(kn_tensor *const *x)
{
    return run_sync_batch_norm((kn_tensor *[]){ kn_channels_last(x[0]), x[1], x[2] });
}
static kn_tensor *run_sync_batch_norm_relu(kn_tensor *const *x)
{
    return kn_batch_norm(x[0], x[1], x[2], NULL, NULL, .training = true, .sync = kn_comm_self(),
                         .relu = true);
}
static kn_tensor *run_sync_batch_norm_add_relu(kn_tensor *const *x)
{
    return kn_batch_norm(kn_channels_last(x[0]), x[1], x[2], NULL, NULL, .training = true,
                         .sync = kn_comm_self(), .relu = true, .residual = x[3]);
}
static kn_tensor *run_max_pool(kn_tensor *const *x)
{
    return kn_max_pool2d(x[0], .kernel = 2);
}
static kn_tensor *run_max_pool_over(kn_tensor *const *x)
{
    return kn_max_pool2d(kn_channels_last(x[0]), .kernel = 3, .stride = 1, .pad = 1,
                         .dilations = { 1, 2 }, .ceil_mode = true);
}
static kn_tensor *run_avg_pool(kn_tensor *const *x)
{
    return kn_avg_pool2d(x[0], .kernel = 3, .stride = 2, .pad = 1, .ceil_mode = true);
}
static kn_tensor *run_avg_pool_exclude(kn_tensor *const *x)
{
    return kn_avg_pool2d(x[0], .kernels = { 3, 2 }, .stride = 1, .pad = 1, .exclude_pad = true);
}
static kn_tensor *run_adaptive(kn_tensor *const *x)
{
    return kn_adaptive_avg_pool2d(x[0], 2, 3);
}

static kn_tensor *run_conv1d(kn_tensor *const *x)
{
    return kn_conv1d(x[0], x[1], x[2]);
}
static kn_tensor *run_conv1d_groups(kn_tensor *const *x)
{
    return kn_conv1d(x[0], x[1], x[2], .stride = 2, .pad = 2, .dilation = 2, .groups = 2);
}
static kn_tensor *run_transposed(kn_tensor *const *x)
{
    return kn_conv_transpose2d(x[0], x[1], x[2]);
}
static kn_tensor *run_transposed_strided(kn_tensor *const *x)
{
    return kn_conv_transpose2d(x[0], x[1], x[2], .strides = { 2, 3 }, .pad = 1,
                               .output_pads = { 1, 2 });
}
static kn_tensor *run_transposed_groups(kn_tensor *const *x)
{
    return kn_conv_transpose2d(kn_channels_last(x[0]), x[1], x[2], .groups = 2, .dilation = 2,
                               .output_pads = { 0, 1 });
}
static kn_tensor *run_transposed1d(kn_tensor *const *x)
{
    return kn_conv_transpose1d(x[0], x[1], x[2], .stride = 3, .pad = 1, .output_pad = 2,
                               .groups = 2);
}
static kn_tensor *run_group_norm(kn_tensor *const *x)
{
    return kn_group_norm(x[0], 2, x[1], x[2], 1e-3);
}
static kn_tensor *run_group_norm_last(kn_tensor *const *x)
{
    return kn_group_norm(kn_channels_last(x[0]), 1, x[1], x[2], 1e-3);
}
static kn_tensor *run_group_norm_bias(kn_tensor *const *x)
{
    return kn_group_norm(x[0], 2, NULL, x[1], 1e-3);
}
static kn_tensor *run_instance_norm(kn_tensor *const *x)
{
    return kn_instance_norm(x[0], x[1], x[2], 1e-3);
}
static kn_tensor *run_nearest(kn_tensor *const *x)
{
    return kn_interpolate(x[0], .sizes = { 5, 3 });
}
static kn_tensor *run_bilinear(kn_tensor *const *x)
{
    return kn_interpolate(kn_channels_last(x[0]), .scale = 2, .mode = KN_BILINEAR);
}
static kn_tensor *run_bilinear_corners(kn_tensor *const *x)
{
    return kn_interpolate(x[0], .sizes = { 7, 2 }, .mode = KN_BILINEAR, .align_corners = true);
}

static const op_case image_cases[] = {
    { "conv2d", run_conv, 3, { { 4, { 2, 3, 4, 5 } }, { 4, { 2, 3, 3, 2 } }, { 1, { 2 } } }, 0, 0 },
    { "conv2d",
      run_conv,
      2,
      { { 4, { 1, 2, 3, 4 }, TRANSPOSED }, { 4, { 3, 2, 1, 1 }, SLICED } },
      0,
      0 },
    { "conv2d", run_conv, 2, { { 4, { 0, 2, 3, 4 } }, { 4, { 3, 2, 2, 2 } } }, 0, 0 },
    { "conv2d",
      run_conv_strided,
      3,
      { { 4, { 2, 2, 4, 5 }, STRETCHED }, { 4, { 2, 2, 3, 3 }, TRANSPOSED }, { 1, { 2 } } },
      0,
      0 },
    { "conv2d",
      run_conv_groups,
      3,
      { { 4, { 2, 4, 5, 3 } }, { 4, { 6, 2, 3, 3 } }, { 1, { 6 } } },
      0,
      0 },
    { "batch_norm",
      run_batch_norm,
      3,
      { { 4, { 2, 3, 2, 3 } }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "batch_norm", run_batch_norm, 2, { { 2, { 5, 3 }, TRANSPOSED }, { 1, { 3 } } }, 0, 0 },
    { "batch_norm", run_batch_norm, 1, { { 3, { 3, 1, 4 } } }, 0, 0 },
    { "batch_norm",
      run_batch_norm_last,
      3,
      { { 4, { 2, 3, 2, 3 }, SLICED }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "batch_norm",
      run_batch_norm_eval,
      3,
      { { 4, { 2, 2, 3, 2 }, TRANSPOSED }, { 1, { 2 } }, { 1, { 2 } } },
      0,
      0 },
    { "batch_norm", run_batch_norm_eval, 1, { { 2, { 1, 2 } } }, 0, 0 },
    { "batch_norm_relu",
      run_batch_norm_relu,
      3,
      { { 4, { 2, 3, 2, 3 }, TRANSPOSED }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "batch_norm_relu", run_batch_norm_relu, 2, { { 2, { 5, 3 } }, { 1, { 3 } } }, 0, 0 },
    { "batch_norm_add_relu",
      run_batch_norm_add_relu,
      4,
      { { 4, { 2, 3, 2, 3 } }, { 1, { 3 } }, { 1, { 3 } }, { 4, { 2, 3, 2, 3 }, SLICED } },
      0,
      0 },
    { "batch_norm_add_relu",
      run_batch_norm_relu_eval,
      3,
      { { 4, { 2, 2, 3, 2 } }, { 1, { 2 } }, { 4, { 2, 2, 3, 2 }, TRANSPOSED } },
      0,
      0 },
    { "sync_batch_norm_relu",
      run_sync_batch_norm_relu,
      3,
      { { 4, { 2, 3, 2, 3 } }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "sync_batch_norm_add_relu",
      run_sync_batch_norm_add_relu,
      4,
      { { 4, { 2, 3, 2, 3 } }, { 1, { 3 } }, { 1, { 3 } }, { 4, { 2, 3, 2, 3 } } },
      0,
      0 },
    { "sync_batch_norm",
      run_sync_batch_norm,
      3,
      { { 4, { 2, 3, 2, 3 } }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "sync_batch_norm",
      run_sync_batch_norm,
      2,
      { { 2, { 5, 3 }, TRANSPOSED }, { 1, { 3 } } },
      0,
      0 },
    { "sync_batch_norm", run_sync_batch_norm, 1, { { 3, { 3, 1, 4 } } }, 0, 0 },
    { "sync_batch_norm",
      run_sync_batch_norm_last,
      3,
      { { 4, { 3, 3, 2, 3 }, SLICED }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "max_pool2d", run_max_pool, 1, { { 4, { 2, 2, 4, 5 } } }, 0, 0 },
    { "max_pool2d", run_max_pool, 1, { { 4, { 0, 2, 2, 2 } } }, 0, 0 },
    { "max_pool2d", run_max_pool_over, 1, { { 4, { 2, 3, 4, 5 }, TRANSPOSED } }, 0, 0 },
    { "avg_pool2d", run_avg_pool, 1, { { 4, { 2, 2, 4, 5 } } }, 0, 0 },
    { "avg_pool2d", run_avg_pool_exclude, 1, { { 4, { 1, 2, 3, 4 }, SLICED } }, 0, 0 },
    { "avg_pool2d", run_adaptive, 1, { { 4, { 2, 1, 5, 6 } } }, 0, 0 },
    { "avg_pool2d", run_adaptive, 1, { { 4, { 1, 2, 1, 2 }, TRANSPOSED } }, 0, 0 },
    { "conv1d", run_conv1d, 3, { { 3, { 2, 3, 7 } }, { 3, { 4, 3, 3 } }, { 1, { 4 } } }, 0, 0 },
    { "conv1d", run_conv1d, 2, { { 3, { 0, 3, 7 } }, { 3, { 4, 3, 3 } } }, 0, 0 },
    { "conv1d",
      run_conv1d_groups,
      3,
      { { 3, { 2, 4, 5 }, TRANSPOSED }, { 3, { 2, 2, 3 }, SLICED }, { 1, { 2 } } },
      0,
      0 },
    { "conv_transpose2d",
      run_transposed,
      3,
      { { 4, { 2, 3, 3, 4 } }, { 4, { 3, 2, 3, 2 } }, { 1, { 2 } } },
      0,
      0 },
    { "conv_transpose2d",
      run_transposed,
      2,
      { { 4, { 0, 3, 3, 4 } }, { 4, { 3, 2, 3, 2 } } },
      0,
      0 },
    { "conv_transpose2d",
      run_transposed_strided,
      3,
      { { 4, { 2, 2, 3, 2 }, STRETCHED }, { 4, { 2, 3, 2, 3 }, TRANSPOSED }, { 1, { 3 } } },
      0,
      0 },
    { "conv_transpose2d",
      run_transposed_groups,
      3,
      { { 4, { 2, 4, 3, 2 } }, { 4, { 4, 3, 2, 2 } }, { 1, { 6 } } },
      0,
      0 },
    { "conv_transpose1d",
      run_transposed1d,
      3,
      { { 3, { 2, 4, 3 }, TRANSPOSED }, { 3, { 4, 1, 2 } }, { 1, { 2 } } },
      0,
      0 },
    { "group_norm",
      run_group_norm,
      3,
      { { 4, { 2, 4, 2, 3 } }, { 1, { 4 } }, { 1, { 4 } } },
      0,
      0 },
    { "group_norm", run_group_norm, 2, { { 2, { 3, 6 }, TRANSPOSED }, { 1, { 6 } } }, 0, 0 },
    { "group_norm", run_group_norm, 1, { { 3, { 0, 2, 3 } } }, 0, 0 },
    { "group_norm",
      run_group_norm_last,
      3,
      { { 4, { 2, 3, 2, 3 }, SLICED }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "group_norm", run_group_norm_bias, 2, { { 3, { 2, 4, 3 } }, { 1, { 4 } } }, 0, 0 },
    { "instance_norm",
      run_instance_norm,
      3,
      { { 3, { 2, 3, 4 }, TRANSPOSED }, { 1, { 3 } }, { 1, { 3 } } },
      0,
      0 },
    { "instance_norm", run_instance_norm, 1, { { 4, { 2, 2, 3, 2 }, STRETCHED } }, 0, 0 },
    { "interpolate", run_nearest, 1, { { 4, { 2, 2, 3, 4 } } }, 0, 0 },
    { "interpolate", run_nearest, 1, { { 4, { 0, 2, 3, 4 } } }, 0, 0 },
    { "interpolate", run_bilinear, 1, { { 4, { 2, 3, 2, 3 }, TRANSPOSED } }, 0, 0 },
    { "interpolate", run_bilinear_corners, 1, { { 4, { 1, 2, 4, 5 }, SLICED } }, 0, 0 },
};

#endif
