/* autograd/ops.h (private): the operation objects, and what their files share. */
#ifndef KNAP_AUTOGRAD_OPS_H
#define KNAP_AUTOGRAD_OPS_H

#include "autograd/autograd_internal.h"

/* Launches a kernel on the compute stream of t's device. */
#define KN_RUN(t, kernel, ...) KN_LAUNCH(kn_compute_stream(kn_device_of(t)), kernel, __VA_ARGS__)

/* Shape and dtype of t, row-major. */
kn_spec kn_spec_like(const kn_tensor *t);
/* A new tensor of t's shape, dtype, device and order. */
kn_tensor *kn_empty_as(const kn_tensor *t);
/* As kn_grad_out, where what isn't a leaf's place has the order of like. */
kn_tensor *kn_grad_as(kn_op_grad *g, int i, const kn_tensor *like);
/* An option for rows and columns: each, where one of them isn't 0, or both for both, or otherwise. */
void kn_by_dim(int64_t out[2], int64_t both, const int64_t each[2], int64_t otherwise);
/* A dim counted from the end where negative; -1 with an error where out of range. */
int kn_dim(const char *op, const kn_tensor *t, int dim);

extern const kn_op kn_op_neg, kn_op_abs, kn_op_exp, kn_op_log, kn_op_sqrt, kn_op_rsqrt, kn_op_tanh,
    kn_op_sigmoid, kn_op_relu, kn_op_gelu_tanh, kn_op_gelu, kn_op_silu, kn_op_sin, kn_op_cos,
    kn_op_affine, kn_op_pow, kn_op_clamp;
extern const kn_op kn_op_add, kn_op_sub, kn_op_mul, kn_op_div, kn_op_maximum, kn_op_minimum,
    kn_op_compare, kn_op_where, kn_op_cast, kn_op_to_device;
extern const kn_op kn_op_sum, kn_op_mean, kn_op_max, kn_op_min, kn_op_argmax;
extern const kn_op kn_op_reshape, kn_op_permute, kn_op_slice, kn_op_expand, kn_op_split, kn_op_cat;
extern const kn_op kn_op_matmul, kn_op_linear;
extern const kn_op kn_op_softmax, kn_op_log_softmax, kn_op_cross_entropy, kn_op_layer_norm,
    kn_op_rms_norm, kn_op_dropout;
extern const kn_op kn_op_embedding, kn_op_index;
extern const kn_op kn_op_attention, kn_op_rope;
extern const kn_op kn_op_conv2d, kn_op_batch_norm, kn_op_max_pool2d, kn_op_avg_pool2d;

#endif
