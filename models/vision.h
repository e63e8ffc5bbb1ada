/* models/vision.h (private): what image models have beside the table of their family
 * (models/family.h): images and labels. */
#ifndef KNAP_MODELS_VISION_H
#define KNAP_MODELS_VISION_H

#include "data/images.h"
#include "models/family.h"

/* What the data and the options say of a preset's images. */
typedef struct kn_vision_sizes {
    int64_t channels, side, classes; /* side: rows and columns; 0: any */
    bool small_stem;                 /* residual nets: .small_images */
    int64_t patch;                   /* vision transformers; 0: the preset's */
    double dropout;                  /* the same */
} kn_vision_sizes;

/* The configuration of a preset, as it is and for such images. Errors: an unknown name; sizes that
 * don't fit. */
bool kn_vision_preset(const char *name, kn_model_config *c);
bool kn_vision_fit(kn_model_config *c, const kn_vision_sizes *s);
/* The sizes in a configuration. */
kn_vision_sizes kn_vision_sizes_of(const kn_model_config *c);

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
/* The images that a model takes where nothing else is known of them; means and others are zeros. */
kn_vision_input kn_vision_input_of(const kn_model_config *c);
/* They are some that a model of c takes; else an error, which begins by where. */
bool kn_vision_input_check(const kn_vision_input *in, const kn_model_config *c, const char *where);
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

/* "label_names" (NULL: unknown) and "pretrained_cfg", new; NULL with an error. */
json_t *kn_vision_labels_json(const kn_vision_input *in);
json_t *kn_vision_images_json(const kn_model_config *c, const kn_vision_input *in);
/* Reads both for a model whose tensors were checked. own: everything must be there; else timm's
 * defaults count. The caller frees in->label. */
bool kn_vision_input_read(kn_json_source s, const kn_model_config *c, bool own,
                          kn_vision_input *in);
/* A configuration as JSON, for kn_checkpoint_save's .config; the caller frees it with
 * kn_host_free. */
char *kn_vision_config_text(const kn_model_config *c, const kn_vision_input *in);
/* Reads both back, for any family. in may be NULL; its .label is the caller's to free. */
bool kn_vision_config_saved(const kn_checkpoint *c, kn_model_config *config, kn_vision_input *in);

#endif
