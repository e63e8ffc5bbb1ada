/* autograd/registry.c: the list of all operations. The registry test walks it: each needs a shape
 * rule, a gradient check and a case that runs every layer against the reference. */
#include "autograd/ops.h"

const kn_op *const kn_ops[] = {
    &kn_op_neg,         &kn_op_abs,           &kn_op_exp,        &kn_op_log,       &kn_op_sqrt,
    &kn_op_rsqrt,       &kn_op_tanh,          &kn_op_sigmoid,    &kn_op_relu,      &kn_op_gelu_tanh,
    &kn_op_gelu,        &kn_op_silu,          &kn_op_sin,        &kn_op_cos,       &kn_op_affine,
    &kn_op_pow,         &kn_op_clamp,         &kn_op_add,        &kn_op_sub,       &kn_op_mul,
    &kn_op_div,         &kn_op_maximum,       &kn_op_minimum,    &kn_op_compare,   &kn_op_where,
    &kn_op_cast,        &kn_op_sum,           &kn_op_mean,       &kn_op_max,       &kn_op_min,
    &kn_op_argmax,      &kn_op_reshape,       &kn_op_permute,    &kn_op_slice,     &kn_op_expand,
    &kn_op_split,       &kn_op_cat,           &kn_op_matmul,     &kn_op_linear,    &kn_op_softmax,
    &kn_op_log_softmax, &kn_op_cross_entropy, &kn_op_layer_norm, &kn_op_rms_norm,  &kn_op_dropout,
    &kn_op_embedding,   &kn_op_index,         &kn_op_attention,  &kn_op_rope,      &kn_op_conv2d,
    &kn_op_batch_norm,  &kn_op_max_pool2d,    &kn_op_avg_pool2d, &kn_op_to_device, NULL,
};
