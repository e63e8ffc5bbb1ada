/* kernels/cpu/vec/table.c: the vector overlay as a provider of the CPU, one for each instruction
 * set it is compiled for. Empty entries decline. */
#include "kernels/cpu/vec/vec.h"

#define LAYER VEC_JOIN(cpu_vec, KN_VEC_NAME)

/* The file is also compiled where kernels_internal.h declares fewer providers. */
extern const kn_provider LAYER;

const kn_provider LAYER = {
    .name = VEC_STR(KN_VEC_NAME),
    .run = {
        [KN_K_COPY] = vec_copy,
        [KN_K_FILL] = vec_fill,
        [KN_K_UNARY] = vec_unary,
        [KN_K_UNARY_GRAD] = vec_unary_grad,
        [KN_K_BINARY] = vec_binary,
        [KN_K_WHERE] = vec_where,
        [KN_K_REDUCE] = vec_reduce,
        [KN_K_MATMUL] = vec_matmul,
        [KN_K_SOFTMAX] = vec_softmax,
        [KN_K_SOFTMAX_GRAD] = vec_softmax_grad,
        [KN_K_CROSS_ENTROPY] = vec_cross_entropy,
        [KN_K_CROSS_ENTROPY_GRAD] = vec_cross_entropy_grad,
        [KN_K_NORM] = vec_norm,
        [KN_K_NORM_GRAD] = vec_norm_grad,
        [KN_K_INDEX_SELECT] = vec_index_select,
        [KN_K_INDEX_ADD] = vec_index_add,
        [KN_K_GATHER] = vec_gather,
        [KN_K_SCATTER] = vec_scatter,
        [KN_K_INTERPOLATE] = vec_interpolate,
        [KN_K_INTERPOLATE_GRAD] = vec_interpolate_grad,
        [KN_K_DROPOUT] = vec_dropout,
        [KN_K_ATTENTION] = vec_attention,
        [KN_K_ATTENTION_GRAD] = vec_attention_grad,
        [KN_K_ROPE] = vec_rope,
        [KN_K_RANDOM] = vec_random,
        [KN_K_SUM_N] = vec_sum_n,
        [KN_K_ADAMW] = vec_adamw,
        [KN_K_SGD] = vec_sgd,
        [KN_K_LION] = vec_lion,
        [KN_K_ABSMAX] = vec_absmax,
        [KN_K_SQSUM] = vec_sqsum,
        [KN_K_BATCH_NORM] = vec_batch_norm,
        [KN_K_BATCH_NORM_GRAD] = vec_batch_norm_grad,
        [KN_K_POOL] = vec_pool,
        [KN_K_POOL_GRAD] = vec_pool_grad,
    },
};
