/* models/mnist.h: images and labels in the idx format of the MNIST database (LeCun, Cortes, Burges,
 * http://yann.lecun.com/exdb/mnist/): big-endian u32 magic (0x803 images, 0x801 labels), sizes,
 * then bytes; gzipped or plain. Files of the test half are named t10k-*. */
#ifndef KNAP_MODELS_MNIST_H
#define KNAP_MODELS_MNIST_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_images {
    int64_t count, rows, cols;
    uint8_t *pixel; /* [count, rows, cols] */
    uint8_t *label; /* [count], 0 .. 9 */
} kn_images;

/* Reads folder/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]; split "train" or "test". On an
 * error out is zeroed. Bytes are in the ledger (KN_MEM_DATA); free with kn_images_free. */
KN_API bool kn_images_read(const char *folder, const char *split, kn_images *out);
KN_API void kn_images_free(kn_images *images);

#ifdef __cplusplus
}
#endif
#endif
