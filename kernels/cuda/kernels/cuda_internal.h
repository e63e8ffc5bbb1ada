/* kernels/cuda/kernels/cuda_internal.h (private): the CUDA kernels as entries of the table, by
 * name. */
#ifndef KNAP_KERNELS_CUDA_INTERNAL_H
#define KNAP_KERNELS_CUDA_INTERNAL_H

#include "kernels/kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Each takes its entry's struct (kernels.h) and works on kn_cuda_stream(). */
kn_status kn_cuda_copy(const void *args);
kn_status kn_cuda_fill(const void *args);
kn_status kn_cuda_unary(const void *args);
kn_status kn_cuda_unary_grad(const void *args);
kn_status kn_cuda_binary(const void *args);
kn_status kn_cuda_where(const void *args);
kn_status kn_cuda_reduce(const void *args);
kn_status kn_cuda_matmul(const void *args); /* tiled, any strides; cuBLASLt comes first */
kn_status kn_cuda_softmax(const void *args);
kn_status kn_cuda_softmax_grad(const void *args);
kn_status kn_cuda_cross_entropy(const void *args);
kn_status kn_cuda_cross_entropy_grad(const void *args);
kn_status kn_cuda_norm(const void *args);
kn_status kn_cuda_norm_grad(const void *args);
kn_status kn_cuda_index_select(const void *args);
kn_status kn_cuda_index_add(const void *args);
kn_status kn_cuda_gather(const void *args);
kn_status kn_cuda_scatter(const void *args);
kn_status kn_cuda_sort(const void *args);
kn_status kn_cuda_cumsum(const void *args);
kn_status kn_cuda_dropout(const void *args);
kn_status kn_cuda_attention(const void *args); /* flash style; cuDNN comes first */
kn_status kn_cuda_attention_grad(const void *args);
kn_status kn_cuda_rope(const void *args);
kn_status kn_cuda_random(const void *args);
kn_status kn_cuda_round(const void *args);
/* For a generator of another library: *to, a function of the draw (seed, stream) alone, and an
 * offset of 0, both in device memory. seed_at as in kn_random_args. */
kn_status kn_cuda_draw_key(uint64_t *to, uint64_t *offset, uint64_t seed, const uint64_t *seed_at,
                           uint64_t stream);
kn_status kn_cuda_sum_n(const void *args);
kn_status kn_cuda_adamw(const void *args);
kn_status kn_cuda_sgd(const void *args);
kn_status kn_cuda_lion(const void *args);
kn_status kn_cuda_absmax(const void *args);
kn_status kn_cuda_loss_scale(const void *args);
kn_status kn_cuda_sqsum(const void *args);
kn_status kn_cuda_powsum(const void *args);
kn_status kn_cuda_clip(const void *args);
kn_status kn_cuda_conv(const void *args); /* any strides and groups; cuDNN comes first */
kn_status kn_cuda_conv_grad_x(const void *args);
kn_status kn_cuda_conv_grad_w(const void *args);
kn_status kn_cuda_batch_norm(const void *args);
kn_status kn_cuda_batch_norm_grad(const void *args);
kn_status kn_cuda_batch_norm_join(const void *args);
kn_status kn_cuda_pool(const void *args);
kn_status kn_cuda_pool_grad(const void *args);
kn_status kn_cuda_interpolate(const void *args);
kn_status kn_cuda_interpolate_grad(const void *args);

/* All of them: the last provider of the device (table.c). Shown to programs where it is the
 * emulator's. */
#ifdef KN_EMULATED_TABLE
KN_API
#endif
extern const kn_provider kn_cuda_kernels;

#ifdef __cplusplus
}
#endif
#endif
