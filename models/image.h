/* models/image.h: pictures of tensors. */
#ifndef KNAP_MODELS_IMAGE_H
#define KNAP_MODELS_IMAGE_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_image_save_options {
    KN_BEGIN_OPTIONS;
    int64_t columns;  /* images a row; 0: the least square that holds all; at most N are used */
    int64_t gap;      /* black pixels between images and around all; 0: 2; KN_ZERO: none */
    double low, high; /* values that become black and white; both 0: 0 and 1; KN_ZERO: 0 */
} kn_image_save_options;
/* Writes x as a PNG (ISO/IEC 15948) of 8 bits a sample: a grid of images[N,C,H,W], row by row, or
 * one image [C,H,W] or [H,W]; C is 1 (grey) or 3 (red, green, blue). Values outside of [low, high]
 * count as the nearer end, NaN as low; the nearest of the 256 steps is stored. x: any float, on any
 * device but meta. The file is written all or nothing. Errors: another shape or dtype, a file that
 * can't be written, a library that was built without libpng. */
KN_API bool kn_image_save_(const char *path, kn_tensor *x, kn_image_save_options o);
#define kn_image_save(path, x, ...)                                                                \
    kn_image_save_(path, x, KN_OPTIONS(kn_image_save_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
