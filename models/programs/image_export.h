/* models/programs/image_export.h: --export of train_resnet. */
#ifndef KNAP_MODELS_PROGRAMS_IMAGE_EXPORT_H
#define KNAP_MODELS_PROGRAMS_IMAGE_EXPORT_H

#include "models/programs/training.h"
#include "models/pretrained_internal.h"

/* Before the training, once t has its folder: dir (NULL: none) may be written, and is none of the
 * run's own. Collective. */
bool image_export_check(const training *t, const char *dir);
/* Writes the best model of the run, where one was kept, else the last one; nothing, said aloud, if
 * the run was stopped. t's model may change. Collective. */
bool image_export(training *t, const char *dir, const kn_model_config *c,
                  const kn_vision_input *in);

#endif
