/* models/llama.h: the Llama family (Touvron et al., arXiv:2302.13971; Llama Team,
 * arXiv:2407.21783), with what Mistral, Qwen2 and Qwen3 have beside it. Names and shapes are those
 * of Hugging Face's checkpoints ("model.layers.0.self_attn.q_proj.weight", stored [out, in]). */
#ifndef KNAP_MODELS_LLAMA_H
#define KNAP_MODELS_LLAMA_H

#include "state/checkpoint.h"
#include "nn/layers.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_llama_config {
    int layers, heads;
    int kv_heads;   /* of keys and values, each used by heads / kv_heads queries; 0: heads */
    int64_t embd;   /* channels; heads of an even size */
    int64_t hidden; /* channels inside the MLP; 0: 8/3 embd, rounded up to a multiple of 64 */
    int64_t ctx, vocab;
    double norm_eps;              /* 0: 1e-5 */
    double rope_base;             /* 0: 10000 */
    kn_rope_scaling rope_scaling; /* none by default */
    double dropout;               /* of attention's probabilities */
    bool untied;                  /* a head of its own, lm_head.weight, not the token embedding */
    int64_t head_dim;             /* channels of an attention head; 0: embd / heads */
    int64_t window;               /* attention sees the last so many positions (Mistral); 0: all */
    bool qkv_bias;                /* queries, keys and values have biases (Qwen2) */
    bool qk_norm;                 /* RMS norms of queries and keys by head (Qwen3) */
} kn_llama_config;

/* The published sizes: "llama2-7b", "llama3-8b", "llama3-70b" (context 8192), "llama3.1-8b",
 * "llama3.1-70b", "llama3.1-405b" (context 131072), "llama3.2-1b", "llama3.2-3b", and the small
 * "stories15m", "stories42m", "stories110m". false: unknown name, with an error that lists
 * them. */
KN_API bool kn_llama_preset(const char *name, kn_llama_config *config);
/* Fills in the defaults that 0 stands for, as kn_llama_init does, and checks sizes and dropout. */
KN_API bool kn_llama_config_check(kn_llama_config *config);

/* Its blocks are of the class "llama_block", for the .wrap_class of kn_fsdp_wrap. */
typedef struct kn_llama {
    kn_module base;
} kn_llama;
/* Declares the model on device (usually KN_META; kn_fsdp_wrap or kn_materialize fills it). Errors
 * name the invalid value. */
KN_API bool kn_llama_init(kn_llama *g, kn_llama_config config, kn_dtype dtype, kn_device device);
/* ids[B, T] (i64) -> logits[B, T, vocab]; T <= ctx. */
KN_API kn_tensor *kn_llama_logits(kn_llama *g, kn_tensor *ids);
/* ids[B, T] -> logits[B, vocab] of the token after the last one. */
KN_API kn_tensor *kn_llama_next_logits(kn_llama *g, kn_tensor *ids);
/* Mean cross-entropy against targets[B, T]; one call of the root module. The logits of all
 * positions never exist at once (kn_linear_cross_entropy): with .untied the call of lm_head gives
 * the loss, which its hooks see. */
KN_API kn_tensor *kn_llama_loss(kn_llama *g, kn_tensor *ids, kn_tensor *targets);
/* The same of rows that hold several documents, each of which sees itself only, as if it were a row
 * of its own. begin[B,T] (i64): where in the row the token's document begins. */
KN_API kn_tensor *kn_llama_documents_loss(kn_llama *g, kn_tensor *ids, kn_tensor *targets,
                                          kn_tensor *begin);
/* With the defaults filled in; borrowed. */
KN_API const kn_llama_config *kn_llama_config_of(const kn_llama *g);
/* Writes the configuration as JSON with the names of Hugging Face's config.json, for
 * kn_checkpoint_save's .config, into buf[KN_LLAMA_CONFIG_TEXT] and returns buf; NULL with an
 * error. */
#define KN_LLAMA_CONFIG_TEXT 1024
KN_API const char *kn_llama_config_text(const kn_llama_config *c, char buf[KN_LLAMA_CONFIG_TEXT]);
/* Reads the configuration that c was saved with. Errors: it isn't a Llama's; it asks for something
 * that kn_llama doesn't compute (biases, another rope_type); its sizes differ from those of the
 * tensors in c (checked before any memory is allocated by them). */
KN_API bool kn_llama_config_saved(const kn_checkpoint *c, kn_llama_config *config);
KN_API void kn_llama_recompute(kn_llama *g, bool on); /* every block keeps only its input */
/* Floating point operations of one token's forward and backward, causal attention counted once. */
KN_API double kn_llama_flops_per_token(const kn_llama_config *c, int64_t ctx);

#ifdef __cplusplus
}
#endif
#endif
