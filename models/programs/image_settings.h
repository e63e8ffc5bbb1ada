/* models/programs/image_settings.h: train_resnet's options. */
#ifndef KNAP_MODELS_PROGRAMS_IMAGE_SETTINGS_H
#define KNAP_MODELS_PROGRAMS_IMAGE_SETTINGS_H

#include "data/images.h"
#include "models/programs/settings.h"
#include "models/pretrained_internal.h"

typedef struct image_settings {
    settings run; /* comes first */
    const char *data, *grid, *pictures, *init, *export, *model, *schedule, *stem;
    int augment;
    int64_t image, workers, patch, eval_epochs, pad;
    double epochs, dropout;
    double jitter, erase, mixup, cutmix, smoothing;
    bool flip, sync_bn, skip_bad;
} image_settings;

/* Makes the table of s, which is that of the program. */
bool image_settings_begin(settings *s);
/* settings_check, and what the options of images and model must hold among themselves. samples:
 * of the training set; their number and --epochs make s->run.steps, before which so many samples
 * were trained. */
bool image_settings_check(image_settings *s, kn_options *o, kn_comm *world, int64_t samples,
                          int64_t before);
/* The configuration of --model for images of such a set. */
bool image_settings_model(const image_settings *s, const kn_vision_input *in, kn_model_config *c);
/* Opens --init; the options of the model and its images become those of its weights, and those that
 * were given must agree. The caller frees it; NULL with an error. Collective. */
kn_pretrained *image_settings_init(image_settings *s, kn_options *o, kn_comm *world);
/* Whether both sets have the same classes, by their names. */
bool image_settings_classes(const char *data, const kn_image_set *train, const kn_image_set *test);
/* Whether the classes have the names that they had when from was saved, NULL: nothing was. Labels
 * are numbers in the order of the names, so that another name may shift them. */
bool image_settings_names(const image_settings *s, const kn_image_set *train,
                          const kn_checkpoint *from);
/* Rows and columns of the model's images. */
int64_t image_settings_side(const image_settings *s, const kn_image_set_info *set);
/* The changes of training (train) and of evaluation images. */
kn_augment image_settings_augment(const image_settings *s, const kn_image_set_info *set,
                                  const kn_vision_input *in, bool train);
/* The rates of --schedule over s->run.steps. It borrows from s. */
kn_schedule image_settings_rates(const image_settings *s);

#endif
