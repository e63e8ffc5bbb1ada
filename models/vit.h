/* models/vit.h: vision transformers (Dosovitskiy et al., arXiv:2010.11929) with the structure and
 * the names of timm's ("blocks.0.attn.qkv.weight"). */
#ifndef KNAP_MODELS_VIT_H
#define KNAP_MODELS_VIT_H

#include "state/checkpoint.h"
#include "nn/layers.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_vit_config {
    int layers, heads; /* heads divide embd */
    int64_t embd;      /* channels of a patch's vector; four times as many inside the MLP */
    int64_t image;     /* rows and columns of the images; a multiple of patch */
    int64_t patch;     /* rows and columns of a patch */
    int64_t classes;
    int64_t channels; /* of the images; 0: 3 */
    double dropout;   /* of the results of attention and MLP, of the MLP's inside, and of the
                       * embedded patches */
} kn_vit_config;

/* "vit_tiny_patch16_224", "vit_small_patch16_224", "vit_base_patch16_224",
 * "vit_large_patch16_224", "vit_small_patch32_224", "vit_base_patch32_224" (1000 classes), and
 * "vit_cifar": 6 layers of 192 channels, images of 32 x 32, patches of 4 x 4, 10 classes. false:
 * unknown name, with an error that lists them. */
KN_API bool kn_vit_preset(const char *name, kn_vit_config *config);
/* Fills in the defaults that 0 stands for, as kn_vit_init does, and checks sizes and dropout. */
KN_API bool kn_vit_config_check(kn_vit_config *config);

/* kn_call(&vit, x): images x[N, channels, image, image] of any float dtype -> logits[N, classes].
 * Its blocks are of the class "vit_block", for the .wrap_class of kn_fsdp_wrap. */
typedef struct kn_vit {
    kn_module base;
} kn_vit;
/* Declares the model on device (usually KN_META; kn_fsdp_wrap or kn_materialize fills it). Errors
 * name the invalid value. */
KN_API bool kn_vit_init(kn_vit *v, kn_vit_config config, kn_dtype dtype, kn_device device);
/* With the defaults filled in; borrowed. */
KN_API const kn_vit_config *kn_vit_config_of(const kn_vit *v);
/* Writes the configuration as JSON, for kn_checkpoint_save's .config, into buf[KN_VIT_CONFIG_TEXT]
 * and returns buf; NULL with an error. "architecture", "num_classes", "num_features" and
 * "model_args" are timm's. */
#define KN_VIT_CONFIG_TEXT 512
KN_API const char *kn_vit_config_text(const kn_vit_config *c, char buf[KN_VIT_CONFIG_TEXT]);
/* Reads the configuration that c was saved with. Errors: it isn't a vision transformer's; its sizes
 * differ from those of the tensors in c (checked before any memory is allocated by them). */
KN_API bool kn_vit_config_saved(const kn_checkpoint *c, kn_vit_config *config);
KN_API void kn_vit_recompute(kn_vit *v, bool on); /* every block keeps only its input */

#ifdef __cplusplus
}
#endif
#endif
