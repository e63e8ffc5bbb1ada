/* models/vision.h (private): the families of image models behind one interface, for the trainer
 * and for predictions. Each family has a public header of its own; its row in vision.c is all that
 * the rest needs. */
#ifndef KNAP_MODELS_VISION_H
#define KNAP_MODELS_VISION_H

#include "data/images.h"
#include "models/resnet.h"
#include "models/vit.h"

/* Names of --model: presets. */
#define KN_RESNET_CHOICES                                                                          \
    "resnet20|resnet32|resnet44|resnet56|resnet110|resnet18|resnet34|resnet50|resnet101|resnet152"
#define KN_VIT_CHOICES                                                                             \
    "vit_cifar|vit_tiny_patch16_224|vit_small_patch16_224|vit_base_patch16_224|"                   \
    "vit_large_patch16_224|vit_small_patch32_224|vit_base_patch32_224"

struct json_t;
typedef struct kn_vision_family kn_vision_family;

typedef struct kn_vision_config {
    const kn_vision_family *family;
    union {
        kn_resnet_config resnet;
        kn_vit_config vit;
    };
} kn_vision_config;

typedef struct kn_vision_model {
    union {
        kn_module base; /* comes first */
        kn_resnet resnet;
        kn_vit vit;
    };
} kn_vision_model;

/* What the data and the options say of a preset's images. */
typedef struct kn_vision_sizes {
    int64_t channels, side, classes; /* side: rows and columns */
    bool small_stem;                 /* residual nets: .small_images */
    int64_t patch;                   /* vision transformers; 0: the preset's */
    double dropout;                  /* the same */
} kn_vision_sizes;

struct kn_vision_family {
    const char *type;        /* "model_type" of a checkpoint's configuration: "resnet" */
    const char *block_class; /* the modules that are units and recompute */
    const char *choices;     /* KN_RESNET_CHOICES */
    bool (*make)(const char *preset, const kn_vision_sizes *s, kn_vision_config *c);
    bool (*init)(kn_vision_model *m, const kn_vision_config *c, kn_dtype dtype, kn_device device);
    const char *(*text)(const kn_vision_config *c, char *buf);
    bool (*saved)(const kn_checkpoint *c, kn_vision_config *config);
    /* From a JSON object (json_t) of file, which .text wrote. */
    bool (*read)(const struct json_t *object, const char *file, kn_vision_config *c);
    /* The preset with these blocks and widths, whatever its images and classes; NULL: there is
     * none. */
    const char *(*name)(const kn_vision_config *c);
    kn_vision_sizes (*sizes)(const kn_vision_config *c); /* side 0: any */
    /* timm's names of modules, and of the way from rows and columns to one vector */
    const char *first_conv, *classifier, *global_pool;
};
extern const kn_vision_family kn_resnet_family, kn_vit_family;
/* The family of a preset; NULL with an error. That of a "model_type"; NULL: there is none. */
const kn_vision_family *kn_vision_family_of(const char *preset);
const kn_vision_family *kn_vision_family_typed(const char *type);

/* The configuration of a preset for such images. Errors: an unknown name, sizes that don't fit. */
bool kn_vision_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c);

/* The images that a model was trained on, and what became of them before they reached it: timm's
 * "label_names" and "pretrained_cfg" of a configuration. */
enum { KN_LABEL_SIZE = 64, KN_MOST_SIDE = 4096 };
typedef struct kn_vision_input {
    int64_t channels, side, classes;
    double mean[3], std[3];
    char (*label)[KN_LABEL_SIZE]; /* [classes]; kn_host_free; NULL: unknown */
    double crop_pct; /* of the sides of a resized image, the middle that is seen; 0: 1 */
    bool squash;     /* resized to a square; else the shorter side, and the longer one is cut */
    bool bicubic;    /* by this filter */
} kn_vision_input;
/* The means, deviations and cuts of images of in->side, where nothing else is known: those of
 * CIFAR-10 up to 64 pixels, of MNIST for one channel, else torchvision's for ImageNet, or (vit)
 * those of timm's presets. */
void kn_vision_input_guess(kn_vision_input *in, bool vit);
/* An image on its way to the model in evaluation, as timm prepares it. */
kn_augment kn_vision_augment(const kn_vision_input *in);
/* The label of class c, or "class 17" in buf[32]. */
const char *kn_vision_class(const kn_vision_input *in, int64_t c, char *buf);

/* Writes the name of a class as a label: text that JSON, XML and a terminal take. Bytes that are no
 * UTF-8 and control characters become '?'; what has no room is left out. */
void kn_vision_label(char label[KN_LABEL_SIZE], const char *name);

/* A configuration as JSON, for kn_checkpoint_save's .config; the caller frees it with
 * kn_host_free. */
char *kn_vision_config_text(const kn_vision_config *c, const kn_vision_input *in);
/* Reads both back, for any family. in may be NULL; its .label is the caller's to free. */
bool kn_vision_config_saved(const kn_checkpoint *c, kn_vision_config *config, kn_vision_input *in);

#endif
