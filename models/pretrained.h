/* models/pretrained.h: image models in files that PyTorch's programs read, and theirs: a folder
 * with
 *
 *   model.safetensors   parameters and buffers by torchvision's names (residual nets) or timm's
 *                       (vision transformers); torch's load_state_dict takes them as they are
 *   config.json         timm's: "architecture", "num_classes", "label_names", "pretrained_cfg" with
 *                       sizes, means and deviations of the images; "knap": the sizes in Knap's
 *                       words
 *
 * which timm.create_model("local-dir:DIR", pretrained=True) opens. Models that timm doesn't have
 * (the nets for CIFAR, a stem for small images) are called "knap_...", which timm refuses. */
#ifndef KNAP_MODELS_PRETRAINED_H
#define KNAP_MODELS_PRETRAINED_H

#include "data/images.h"
#include "fsdp/ema.h"
#include "models/resnet.h"
#include "models/vit.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_pretrained_save_options {
    KN_BEGIN_OPTIONS;
    /* One of the two: the module's sizes (kn_resnet_config_of, kn_vit_config_of). */
    const kn_resnet_config *resnet;
    const kn_vit_config *vit;
    kn_comm *comm;     /* the ranks that hold module; NULL: kn_world() */
    const kn_ema *ema; /* made for module: its averages are saved */
    kn_dtype dtype;    /* of the file's floats: KN_F32 (the default), KN_BF16, KN_F16 or KN_F64 */
    /* What the images are before they reach the module, as in kn_augment. */
    int64_t side;           /* rows and columns; 0: a vision transformer's, else 224, or 32 with
                             * .small_images */
    double mean[3], std[3]; /* of each channel; all zero: ImageNet's, or MNIST's */
    double crop_pct; /* the shorter side becomes side / crop_pct, of which the middle is seen;
                             * in (0, 1]; 0: 1 */
    bool bicubic;
    const char *const *labels; /* [classes]: their names; NULL: none */
} kn_pretrained_save_options;
/* Writes module into the folder dir, which is made if missing; the folder above it must be there.
 * A model that this function wrote there before is replaced by renaming both files at the end: an
 * error or a death before that leaves it whole. One between the two leaves a folder that is refused
 * until it is exported to again: no reader finds a model with the configuration of another.
 * Collective: one tensor at a time passes through each rank, rank 0 writes, and buffers are its
 * own. Errors: module hasn't these sizes; a value isn't finite, or isn't in .dtype; dir holds a
 * run's checkpoint or a model of another origin, or is one of a run's folders or within one; a
 * write failed. */
KN_API bool kn_pretrained_save_(const char *dir, void *module, kn_pretrained_save_options o);
#define kn_pretrained_save(dir, module, ...)                                                       \
    kn_pretrained_save_(dir, module, KN_OPTIONS(kn_pretrained_save_options, __VA_ARGS__))

/* A model in files. */
typedef struct kn_pretrained kn_pretrained;

typedef struct kn_pretrained_open_options {
    KN_BEGIN_OPTIONS;
    const char *model; /* a preset (kn_resnet_preset, kn_vit_preset); NULL: config.json says it */
    kn_comm *comm;     /* the ranks that open it; NULL: kn_world() */
} kn_pretrained_open_options;
/* Opens a model of Knap, timm or torchvision, and compares names, shapes and dtypes of all tensors
 * with those of the model before memory is taken by them. Nothing in the files is trusted. path is
 *   a folder of kn_pretrained_save, of timm (save_for_hf, push_to_hf_hub) or of kn_checkpoint_save
 *   a folder with model.safetensors alone, or a file of safetensors.torch.save_file: a state
 *   dictionary of torchvision or timm, with .model
 * The first rank looks what path is, and all ranks open that. comm must outlive the result, which
 * the caller frees. Collective; NULL with an error, which names the tensor or the key. */
KN_API kn_pretrained *kn_pretrained_open_(const char *path, kn_pretrained_open_options o);
#define kn_pretrained_open(path, ...)                                                              \
    kn_pretrained_open_(path, KN_OPTIONS(kn_pretrained_open_options, __VA_ARGS__))
KN_API void kn_pretrained_free(kn_pretrained *p); /* NULL is fine */
/* The model's sizes; borrowed. NULL, without an error, for a model of the other kind. */
KN_API const kn_resnet_config *kn_pretrained_resnet(const kn_pretrained *p);
KN_API const kn_vit_config *kn_pretrained_vit(const kn_pretrained *p);
/* What an image becomes before it reaches the model (kn_augment_image). Where no file tells it:
 * timm's defaults beside a config.json; else torchvision's for ImageNet (256 pixels, of which 224
 * are seen), and whole images of 32 x 32 for nets with .small_images. */
KN_API kn_augment kn_pretrained_augment(const kn_pretrained *p);
/* The name of class c as printable UTF-8; borrowed. NULL, without an error, where none is known. */
KN_API const char *kn_pretrained_label(const kn_pretrained *p, int64_t c);

typedef struct kn_pretrained_load_options {
    KN_BEGIN_OPTIONS;
    /* A classifier ("fc", "head") of another number of classes keeps its values; else: an error. */
    bool new_head;
} kn_pretrained_load_options;
/* Fills module, materialized or sharded, with the file's parameters and buffers, each cast to its
 * dtype. module may have been made with any sizes; all names and shapes are compared before
 * anything is written. Collective, one tensor at a time. Errors list names that are missing or of
 * another model; a value that isn't finite. */
KN_API bool kn_pretrained_load_(kn_pretrained *p, void *module, kn_pretrained_load_options o);
#define kn_pretrained_load(p, module, ...)                                                         \
    kn_pretrained_load_(p, module, KN_OPTIONS(kn_pretrained_load_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
