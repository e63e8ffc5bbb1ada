/* models/programs/pictures.h: a training of an image model as pictures: SVG files that any browser
 * shows, and a PNG of images. */
#ifndef KNAP_MODELS_PROGRAMS_PICTURES_H
#define KNAP_MODELS_PROGRAMS_PICTURES_H

#include "models/programs/image_eval.h"
#include "models/vision.h"

/* Losses and accuracy over epochs. */
bool picture_curves(const char *path, const losses *run);
/* Shares of each class's images (row) by the class they were taken for (column). */
bool picture_confusion(const char *path, const image_eval *e, const kn_vision_input *in);
/* A PNG of x[N,C,H,W], small images enlarged. */
bool picture_grid(const char *path, kn_tensor *x, int64_t columns);
/* The images of e's worst mistakes as the model saw them, into the folder dir: mistakes.svg with
 * their classes, mistakes.png of the images alone, mistakes.tsv with their numbers in the set. */
bool picture_mistakes(const char *dir, const image_eval *e, const kn_image_set *set,
                      const kn_vision_input *in, kn_augment augment);

#endif
