/* models/gpt.h: the GPT-2 family. Names and shapes are those of the published checkpoints
 * ("transformer.h.0.attn.c_attn.weight", stored [in, out]). */
#ifndef KNAP_MODELS_GPT_H
#define KNAP_MODELS_GPT_H

#include "state/checkpoint.h"
#include "nn/layers.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_gpt_config {
    int layers, heads;
    int64_t embd, ctx, vocab;
    double dropout;
    bool no_bias; /* in linear layers and layer_norms */
} kn_gpt_config;

/* "gpt2" (124M), "gpt2-medium" (355M), "gpt2-large" (774M), "gpt2-xl" (1558M). false: unknown name,
 * with an error that lists them. vocab 50257, ctx 1024. */
KN_API bool kn_gpt_preset(const char *name, kn_gpt_config *config);
/* Checks sizes and dropout, as kn_gpt_init does. */
KN_API bool kn_gpt_config_check(kn_gpt_config *config);

/* Its blocks are of the class "gpt_block", for the .wrap_class of kn_fsdp_wrap. */
typedef struct kn_gpt {
    kn_module base;
} kn_gpt;
/* Declares the model on device (usually KN_META; kn_fsdp_wrap or kn_materialize fills it). Head
 * tied to the token embedding. Errors name the invalid value. */
KN_API bool kn_gpt_init(kn_gpt *g, kn_gpt_config config, kn_dtype dtype, kn_device device);
/* ids[B, T] (i64) -> logits[B, T, vocab]; T <= ctx. */
KN_API kn_tensor *kn_gpt_logits(kn_gpt *g, kn_tensor *ids);
/* ids[B, T] -> logits[B, vocab] of the token after the last one. */
KN_API kn_tensor *kn_gpt_next_logits(kn_gpt *g, kn_tensor *ids);
/* Mean cross-entropy against targets[B, T]; one call of the root module. The logits of all
 * positions never exist at once (kn_linear_cross_entropy). */
KN_API kn_tensor *kn_gpt_loss(kn_gpt *g, kn_tensor *ids, kn_tensor *targets);
/* The same of rows that hold several documents, each of which sees itself only, as if it were a row
 * of its own; its positions count from 0. begin[B,T] (i64): where in the row the token's document
 * begins. */
KN_API kn_tensor *kn_gpt_documents_loss(kn_gpt *g, kn_tensor *ids, kn_tensor *targets,
                                        kn_tensor *begin);
KN_API const kn_gpt_config *kn_gpt_config_of(const kn_gpt *g); /* borrowed */
/* Writes the configuration as JSON, for kn_checkpoint_save's .config, into buf[KN_GPT_CONFIG_TEXT]
 * and returns buf; NULL with an error. */
#define KN_GPT_CONFIG_TEXT 512
KN_API const char *kn_gpt_config_text(const kn_gpt_config *c, char buf[KN_GPT_CONFIG_TEXT]);
/* Reads the configuration that c was saved with. Errors: it isn't a GPT's; its sizes differ from
 * those of the tensors in c (checked before any memory is allocated by them). */
KN_API bool kn_gpt_config_saved(const kn_checkpoint *c, kn_gpt_config *config);
KN_API void kn_gpt_recompute(kn_gpt *g, bool on); /* every block keeps only its input */
/* Floating point operations of one token's forward and backward, causal attention counted once. */
KN_API double kn_gpt_flops_per_token(const kn_gpt_config *c, int64_t ctx);

#ifdef __cplusplus
}
#endif
#endif
