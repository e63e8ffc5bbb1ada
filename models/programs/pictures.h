/* models/programs/pictures.h: a training of an image model as pictures: SVG files that any browser
 * shows, and a PNG of images. */
#ifndef KNAP_MODELS_PROGRAMS_PICTURES_H
#define KNAP_MODELS_PROGRAMS_PICTURES_H

#include "models/programs/image_eval.h"
#include "models/vision.h"

/* The values of one evaluation. */
typedef struct curve_point {
    double epoch, train_loss, val_loss, accuracy;
} curve_point;

/* Losses and accuracy over epochs. */
bool picture_curves(const char *path, const curve_point *point, int n);
/* Shares of each class's images (row) by the class they were taken for (column). */
bool picture_confusion(const char *path, const image_eval *e, const kn_vision_input *in);
/* The images of e's worst mistakes as the model saw them, and a text file beside the PNG that names
 * them. */
bool picture_mistakes(const char *path, const char *text_path, const image_eval *e,
                      const kn_image_set *set, const kn_vision_input *in, kn_augment augment);

#endif
