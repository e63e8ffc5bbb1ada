/* kernels/cuda/table.c: the layer table of Knap's own CUDA kernels. They take every case that the reference
 * takes, so they come last; cuBLASLt and cuDNN come before them. */
#include "kernels/cuda/cuda_internal.h"

const kn_layer kn_cuda_kernels = {
    .name = "cuda",
    .run = {
        [KN_K_COPY] = kn_cuda_copy,
        [KN_K_FILL] = kn_cuda_fill,
        [KN_K_UNARY] = kn_cuda_unary,
        [KN_K_UNARY_GRAD] = kn_cuda_unary_grad,
        [KN_K_BINARY] = kn_cuda_binary,
        [KN_K_WHERE] = kn_cuda_where,
        [KN_K_REDUCE] = kn_cuda_reduce,
        [KN_K_MATMUL] = kn_cuda_matmul,
        [KN_K_SOFTMAX] = kn_cuda_softmax,
        [KN_K_SOFTMAX_GRAD] = kn_cuda_softmax_grad,
        [KN_K_CROSS_ENTROPY] = kn_cuda_cross_entropy,
        [KN_K_CROSS_ENTROPY_GRAD] = kn_cuda_cross_entropy_grad,
        [KN_K_NORM] = kn_cuda_norm,
        [KN_K_NORM_GRAD] = kn_cuda_norm_grad,
        [KN_K_INDEX_SELECT] = kn_cuda_index_select,
        [KN_K_INDEX_ADD] = kn_cuda_index_add,
        [KN_K_DROPOUT] = kn_cuda_dropout,
        [KN_K_ATTENTION] = kn_cuda_attention,
        [KN_K_ATTENTION_GRAD] = kn_cuda_attention_grad,
        [KN_K_ROPE] = kn_cuda_rope,
        [KN_K_RANDOM] = kn_cuda_random,
        [KN_K_SUM_N] = kn_cuda_sum_n,
        [KN_K_ADAMW] = kn_cuda_adamw,
        [KN_K_SGD] = kn_cuda_sgd,
        [KN_K_ABSMAX] = kn_cuda_absmax,
        [KN_K_SQSUM] = kn_cuda_sqsum,
        [KN_K_POWSUM] = kn_cuda_powsum,
        [KN_K_CLIP] = kn_cuda_clip,
        [KN_K_LOSS_SCALE] = kn_cuda_loss_scale,
    },
};
