/* data/mnist.h: the MNIST database (LeCun, Cortes, Burges, http://yann.lecun.com/exdb/mnist/) and
 * others in its files. */
#ifndef KNAP_DATA_MNIST_H
#define KNAP_DATA_MNIST_H

#include "data/idx_file.h"
#include "data/loader.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Images with their labels. */
typedef struct kn_images {
    int64_t count, rows, cols;
    kn_tensor *images, *labels;   /* u8: [count, rows, cols]; [count], 0 .. 9 */
    const uint8_t *pixel, *label; /* their bytes */
} kn_images;

/* Reads folder/{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]; split "train" or "test". On an
 * error out is zeroed. Bytes are in the ledger (KN_MEM_DATA); free with kn_images_free. */
KN_API bool kn_images_read(const char *folder, const char *split, kn_images *out);
KN_API void kn_images_free(kn_images *images);

typedef struct kn_mnist_options {
    KN_BEGIN_OPTIONS;
    const char *data; /* "mnist" (default), or a folder with the idx files */
    kn_dtype dtype;   /* of x; default f32 */
    KN_LOADER_OPTIONS;
} kn_mnist_options;

/* Images of handwritten digits: split "train" (60000) or "test" (10000). A batch is x[B, 784] in
 * [0, 1] and labels y[B] (i64). world NULL: one rank. */
#define kn_mnist(split, world, ...)                                                                \
    kn_mnist_(split, world, KN_OPTIONS(kn_mnist_options, __VA_ARGS__))
KN_API kn_loader *kn_mnist_(const char *split, const kn_comm *world, kn_mnist_options o);

#ifdef __cplusplus
}
#endif
#endif
