/* autograd/places.h: the part of places.h, which includes it, for the functions of autograd/. */
#ifndef KNAP_AUTOGRAD_PLACES_H
#define KNAP_AUTOGRAD_PLACES_H

/* autograd/autograd.h */
#define kn_require_grad(...) KN_PLACE(kn_require_grad(__VA_ARGS__))
#define kn_clear_grad(...)   KN_PLACE(kn_clear_grad(__VA_ARGS__))
#define kn_detach(...)       KN_PLACE(kn_detach(__VA_ARGS__))
#define kn_backward_(...)    KN_PLACE(kn_backward_(__VA_ARGS__))

/* autograd/operations.h: elementwise */
#define kn_to_device(...)  KN_PLACE(kn_to_device(__VA_ARGS__))
#define kn_add(...)        KN_PLACE(kn_add(__VA_ARGS__))
#define kn_sub(...)        KN_PLACE(kn_sub(__VA_ARGS__))
#define kn_mul(...)        KN_PLACE(kn_mul(__VA_ARGS__))
#define kn_div(...)        KN_PLACE(kn_div(__VA_ARGS__))
#define kn_maximum(...)    KN_PLACE(kn_maximum(__VA_ARGS__))
#define kn_minimum(...)    KN_PLACE(kn_minimum(__VA_ARGS__))
#define kn_eq(...)         KN_PLACE(kn_eq(__VA_ARGS__))
#define kn_ne(...)         KN_PLACE(kn_ne(__VA_ARGS__))
#define kn_lt(...)         KN_PLACE(kn_lt(__VA_ARGS__))
#define kn_le(...)         KN_PLACE(kn_le(__VA_ARGS__))
#define kn_gt(...)         KN_PLACE(kn_gt(__VA_ARGS__))
#define kn_ge(...)         KN_PLACE(kn_ge(__VA_ARGS__))
#define kn_scale(...)      KN_PLACE(kn_scale(__VA_ARGS__))
#define kn_add_scalar(...) KN_PLACE(kn_add_scalar(__VA_ARGS__))
#define kn_neg(...)        KN_PLACE(kn_neg(__VA_ARGS__))
#define kn_abs(...)        KN_PLACE(kn_abs(__VA_ARGS__))
#define kn_exp(...)        KN_PLACE(kn_exp(__VA_ARGS__))
#define kn_log(...)        KN_PLACE(kn_log(__VA_ARGS__))
#define kn_sqrt(...)       KN_PLACE(kn_sqrt(__VA_ARGS__))
#define kn_rsqrt(...)      KN_PLACE(kn_rsqrt(__VA_ARGS__))
#define kn_tanh(...)       KN_PLACE(kn_tanh(__VA_ARGS__))
#define kn_sigmoid(...)    KN_PLACE(kn_sigmoid(__VA_ARGS__))
#define kn_relu(...)       KN_PLACE(kn_relu(__VA_ARGS__))
#define kn_gelu_tanh(...)  KN_PLACE(kn_gelu_tanh(__VA_ARGS__))
#define kn_gelu(...)       KN_PLACE(kn_gelu(__VA_ARGS__))
#define kn_silu(...)       KN_PLACE(kn_silu(__VA_ARGS__))
#define kn_sin(...)        KN_PLACE(kn_sin(__VA_ARGS__))
#define kn_cos(...)        KN_PLACE(kn_cos(__VA_ARGS__))
#define kn_pow(...)        KN_PLACE(kn_pow(__VA_ARGS__))
#define kn_clamp(...)      KN_PLACE(kn_clamp(__VA_ARGS__))
#define kn_where(...)      KN_PLACE(kn_where(__VA_ARGS__))
#define kn_cast(...)       KN_PLACE(kn_cast(__VA_ARGS__))

/* autograd/operations.h: reductions */
#define kn_sum(...)       KN_PLACE(kn_sum(__VA_ARGS__))
#define kn_mean(...)      KN_PLACE(kn_mean(__VA_ARGS__))
#define kn_amax(...)      KN_PLACE(kn_amax(__VA_ARGS__))
#define kn_amin(...)      KN_PLACE(kn_amin(__VA_ARGS__))
#define kn_argmax(...)    KN_PLACE(kn_argmax(__VA_ARGS__))
#define kn_argmin(...)    KN_PLACE(kn_argmin(__VA_ARGS__))
#define kn_logsumexp(...) KN_PLACE(kn_logsumexp(__VA_ARGS__))
#define kn_prod(...)      KN_PLACE(kn_prod(__VA_ARGS__))
#define kn_norm(...)      KN_PLACE(kn_norm(__VA_ARGS__))
#define kn_any(...)       KN_PLACE(kn_any(__VA_ARGS__))
#define kn_all(...)       KN_PLACE(kn_all(__VA_ARGS__))
#define kn_var_(...)      KN_PLACE(kn_var_(__VA_ARGS__))
#define kn_std_(...)      KN_PLACE(kn_std_(__VA_ARGS__))

/* autograd/operations.h: shape */
#define kn_reshape(...)          KN_PLACE(kn_reshape(__VA_ARGS__))
#define kn_view(...)             KN_PLACE(kn_view(__VA_ARGS__))
#define kn_transpose(...)        KN_PLACE(kn_transpose(__VA_ARGS__))
#define kn_permute(...)          KN_PLACE(kn_permute(__VA_ARGS__))
#define kn_slice(...)            KN_PLACE(kn_slice(__VA_ARGS__))
#define kn_expand(...)           KN_PLACE(kn_expand(__VA_ARGS__))
#define kn_contiguous(...)       KN_PLACE(kn_contiguous(__VA_ARGS__))
#define kn_channels_last(...)    KN_PLACE(kn_channels_last(__VA_ARGS__))
#define kn_is_channels_last(...) KN_PLACE(kn_is_channels_last(__VA_ARGS__))
#define kn_squeeze(...)          KN_PLACE(kn_squeeze(__VA_ARGS__))
#define kn_unsqueeze(...)        KN_PLACE(kn_unsqueeze(__VA_ARGS__))
#define kn_flatten(...)          KN_PLACE(kn_flatten(__VA_ARGS__))
#define kn_unflatten(...)        KN_PLACE(kn_unflatten(__VA_ARGS__))
#define kn_movedim(...)          KN_PLACE(kn_movedim(__VA_ARGS__))
#define kn_diagonal(...)         KN_PLACE(kn_diagonal(__VA_ARGS__))
#define kn_unfold(...)           KN_PLACE(kn_unfold(__VA_ARGS__))
#define kn_split(...)            KN_PLACE(kn_split(__VA_ARGS__))
#define kn_chunk(...)            KN_PLACE(kn_chunk(__VA_ARGS__))
#define kn_cat(...)              KN_PLACE(kn_cat(__VA_ARGS__))

/* autograd/operations.h: products */
#define kn_matmul(...)  KN_PLACE(kn_matmul(__VA_ARGS__))
#define kn_linear_(...) KN_PLACE(kn_linear_(__VA_ARGS__))

/* autograd/functional.h: neural networks */
#define kn_softmax_(...)     KN_PLACE(kn_softmax_(__VA_ARGS__))
#define kn_log_softmax_(...) KN_PLACE(kn_log_softmax_(__VA_ARGS__))
#define kn_layer_norm_(...)  KN_PLACE(kn_layer_norm_(__VA_ARGS__))
#define kn_rms_norm_(...)    KN_PLACE(kn_rms_norm_(__VA_ARGS__))
#define kn_embedding_(...)   KN_PLACE(kn_embedding_(__VA_ARGS__))
#define kn_index_select(...) KN_PLACE(kn_index_select(__VA_ARGS__))
#define kn_dropout_(...)     KN_PLACE(kn_dropout_(__VA_ARGS__))
#define kn_scaled_dot_product_attention_(...)                                                      \
    KN_PLACE(kn_scaled_dot_product_attention_(__VA_ARGS__))
#define kn_rope(...) KN_PLACE(kn_rope(__VA_ARGS__))

/* autograd/functional.h: losses */
#define kn_cross_entropy_(...)        KN_PLACE(kn_cross_entropy_(__VA_ARGS__))
#define kn_mse_loss_(...)             KN_PLACE(kn_mse_loss_(__VA_ARGS__))
#define kn_l1_loss_(...)              KN_PLACE(kn_l1_loss_(__VA_ARGS__))
#define kn_huber_loss_(...)           KN_PLACE(kn_huber_loss_(__VA_ARGS__))
#define kn_smooth_l1_loss_(...)       KN_PLACE(kn_smooth_l1_loss_(__VA_ARGS__))
#define kn_binary_cross_entropy_(...) KN_PLACE(kn_binary_cross_entropy_(__VA_ARGS__))
#define kn_binary_cross_entropy_with_logits_(...)                                                  \
    KN_PLACE(kn_binary_cross_entropy_with_logits_(__VA_ARGS__))
#define kn_kl_div_(...)                KN_PLACE(kn_kl_div_(__VA_ARGS__))
#define kn_nll_loss_(...)              KN_PLACE(kn_nll_loss_(__VA_ARGS__))
#define kn_normalize_(...)             KN_PLACE(kn_normalize_(__VA_ARGS__))
#define kn_cosine_similarity_(...)     KN_PLACE(kn_cosine_similarity_(__VA_ARGS__))
#define kn_cosine_embedding_loss_(...) KN_PLACE(kn_cosine_embedding_loss_(__VA_ARGS__))

/* autograd/functional.h: images */
#define kn_conv2d_(...)             KN_PLACE(kn_conv2d_(__VA_ARGS__))
#define kn_conv1d_(...)             KN_PLACE(kn_conv1d_(__VA_ARGS__))
#define kn_conv_transpose2d_(...)   KN_PLACE(kn_conv_transpose2d_(__VA_ARGS__))
#define kn_conv_transpose1d_(...)   KN_PLACE(kn_conv_transpose1d_(__VA_ARGS__))
#define kn_batch_norm_(...)         KN_PLACE(kn_batch_norm_(__VA_ARGS__))
#define kn_group_norm_(...)         KN_PLACE(kn_group_norm_(__VA_ARGS__))
#define kn_instance_norm_(...)      KN_PLACE(kn_instance_norm_(__VA_ARGS__))
#define kn_max_pool2d_(...)         KN_PLACE(kn_max_pool2d_(__VA_ARGS__))
#define kn_avg_pool2d_(...)         KN_PLACE(kn_avg_pool2d_(__VA_ARGS__))
#define kn_adaptive_avg_pool2d(...) KN_PLACE(kn_adaptive_avg_pool2d(__VA_ARGS__))

/* autograd/function.h */
#define kn_function_call_n(...)    KN_PLACE(kn_function_call_n(__VA_ARGS__))
#define kn_function_call_(...)     KN_PLACE(kn_function_call_(__VA_ARGS__))
#define kn_save_for_backward_(...) KN_PLACE(kn_save_for_backward_(__VA_ARGS__))
#define kn_read_data(...)          KN_PLACE(kn_read_data(__VA_ARGS__))
#define kn_write_data(...)         KN_PLACE(kn_write_data(__VA_ARGS__))

/* autograd/gradcheck.h */
#define kn_gradcheck_(...) KN_PLACE(kn_gradcheck_(__VA_ARGS__))

#endif
