/* models/resnet.h: residual nets for images (He et al., arXiv:1512.03385) with the structure and
 * the names of torchvision's ("layer1.0.conv1.weight"), and the paper's small ones for CIFAR. */
#ifndef KNAP_MODELS_RESNET_H
#define KNAP_MODELS_RESNET_H

#include "state/checkpoint.h"
#include "nn/layers.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_resnet_config {
    int blocks[4];     /* of each stage, at least 1; 0 ends the list (three stages for CIFAR) */
    int64_t classes;   /* required */
    int64_t channels;  /* of the images; 0: 3 */
    int64_t width;     /* channels of the first stage, doubled by each further one; 0: 64, or 16
                        * with .cifar */
    bool bottleneck;   /* blocks of a 1x1, a 3x3 and a 1x1 convolution, the last four times as
                        * wide; else of two 3x3 convolutions */
    bool small_images; /* the first convolution is 3x3 with stride 1, and no pooling follows: the
                        * usual change for images of 32 x 32 */
    bool cifar;        /* the paper's nets for images of 32 x 32: .small_images, and shortcuts
                        * between stages that drop every second row and column and add channels of
                        * zeros, without parameters; not with .bottleneck */
    bool plain_gamma;  /* the last batch norm of each block begins at 1, not at 0 (Goyal et al.,
                        * arXiv:1706.02677, torchvision's zero_init_residual) */
} kn_resnet_config;

/* "resnet18", "resnet34", "resnet50", "resnet101", "resnet152" (1000 classes), and for CIFAR
 * "resnet20", "resnet32", "resnet44", "resnet56", "resnet110" (10 classes). false: unknown name,
 * with an error that lists them. */
KN_API bool kn_resnet_preset(const char *name, kn_resnet_config *config);
/* Fills in the defaults that 0 stands for, as kn_resnet_init does, and checks the sizes. */
KN_API bool kn_resnet_config_check(kn_resnet_config *config);

/* kn_call(&net, x): images x[N, channels, H, W] of any float dtype -> logits[N, classes].
 * Convolutions run on channels-last images, whatever the order of x. Its blocks are of the class
 * "resnet_block", for the .wrap_class of kn_fsdp_wrap. */
typedef struct kn_resnet {
    kn_module base;
} kn_resnet;
/* Declares the net on device (usually KN_META; kn_fsdp_wrap or kn_materialize fills it).
 * Convolutions begin normal with variance 2 / fan_out (He et al., arXiv:1502.01852). Errors name
 * the invalid value. */
KN_API bool kn_resnet_init(kn_resnet *net, kn_resnet_config config, kn_dtype dtype,
                           kn_device device);
/* With the defaults filled in; borrowed. */
KN_API const kn_resnet_config *kn_resnet_config_of(const kn_resnet *net);
/* Writes the configuration as JSON, for kn_checkpoint_save's .config, into
 * buf[KN_RESNET_CONFIG_TEXT] and returns buf; NULL with an error. "architecture", "num_classes",
 * "in_chans" and "num_features" are timm's. */
#define KN_RESNET_CONFIG_TEXT 512
KN_API const char *kn_resnet_config_text(const kn_resnet_config *c,
                                         char buf[KN_RESNET_CONFIG_TEXT]);
/* Reads the configuration that c was saved with. Errors: it isn't a residual net's; its sizes
 * differ from those of the tensors in c (checked before any memory is allocated by them). */
KN_API bool kn_resnet_config_saved(const kn_checkpoint *c, kn_resnet_config *config);
KN_API void kn_resnet_recompute(kn_resnet *net, bool on); /* every block keeps only its input */

#ifdef __cplusplus
}
#endif
#endif
