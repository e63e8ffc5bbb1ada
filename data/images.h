/* data/images.h: sets of images with labels, and loaders that cut, turn and colour them anew in
 * every epoch.
 *
 *   kn_image_set *train = kn_image_set_open("cifar10", "train");
 *   kn_loader *data = kn_image_loader(train, world, .batch = 128, .shuffle = true, .workers = 2,
 *       .augment = { .random_crop = { .size = { 32 }, .padding = 4 },
 *                    .random_horizontal_flip = 0.5,
 *                    .normalize = { { 0.4914, 0.4822, 0.4465 }, { 0.2470, 0.2435, 0.2616 } } });
 *
 * Every random choice is a function of (seed, epoch, index of the sample): neither ranks, nor
 * threads, nor resuming change a sample. docs/data.md tells more. */
#ifndef KNAP_DATA_IMAGES_H
#define KNAP_DATA_IMAGES_H

#include "data/loader.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- sets of images ---------------------------------------------------------------------------
 */

/* Images of 8 bits a channel, in memory or in files, each with a label. Read-only once it is open,
 * so that several loaders and threads may use one. */
typedef struct kn_image_set kn_image_set;

typedef struct kn_image_set_open_options {
    KN_BEGIN_OPTIONS;
    bool coarse_labels; /* CIFAR-100: the 20 superclasses instead of the 100 classes */
    bool allow_empty;   /* classes may be folders without images */
    bool skip_bad;      /* the next image takes the place of one that can't be read; else: error */
    int64_t max_pixels; /* height * width of an image; larger ones can't be read; default 2^26 */
} kn_image_set_open_options;

/* Opens the "train" or "test" part of
 *   "cifar10", "cifar100"       standard binary batches (A. Krizhevsky, 2009), 32 x 32, 3 channels
 *   "mnist", "fashion-mnist"    idx files, plain or gzipped, 28 x 28, 1 channel
 *   "shapes"                    no photographs: ten kinds of figures, drawn by a formula, for
 *                               programs without data: 50000 and 10000 of 32 x 32, 3 channels
 *   a folder                    with data_batch_1.bin (CIFAR-10), train.bin (CIFAR-100),
 *                               *-images-idx3-ubyte[.gz] (idx), or else a folder per class with
 *                               JPEG and PNG files below folder/split ("test": or folder/val);
 *                               split NULL: the classes' folders lie in the folder itself
 * Classes of folders are numbered by name, images by path; both are found when the set is opened,
 * pixels are read by the threads of the loader. Colour images have 3 channels: grey ones are
 * spread, palettes looked up, CMYK converted, 16 bits cut to 8, alpha is left out, and the
 * orientation of EXIF ignored, as torchvision does. Errors: no such data, files cut short, labels
 * out of range, classes without images, a library built without the reader (zlib, libjpeg, libpng).
 * The caller frees it. */
#define kn_image_set_open(data, split, ...)                                                        \
    kn_image_set_open_(data, split, KN_OPTIONS(kn_image_set_open_options, __VA_ARGS__))
KN_API kn_image_set *kn_image_set_open_(const char *data, const char *split,
                                        kn_image_set_open_options o);
/* After the loaders that use it. NULL is fine. */
KN_API void kn_image_set_free(kn_image_set *s);

typedef struct kn_image_set_info {
    const char *kind; /* "CIFAR-10", "a folder of images"; valid as long as the set */
    int64_t count, classes;
    int64_t channels, height, width; /* height and width 0: they differ from image to image */
    bool made;                       /* by a formula: results say nothing about real images */
    int64_t skipped;                 /* attempts so far to read an image that can't (.skip_bad) */
    const char *first_skipped;       /* its path and what is wrong with it; NULL: none was */
} kn_image_set_info;
KN_API kn_image_set_info kn_image_set_read_info(const kn_image_set *s);
/* The name of class c, valid as long as the set; NULL with an error if there is none. */
KN_API const char *kn_image_set_class(const kn_image_set *s, int64_t c);
/* The class of an image, 0 .. classes - 1; -1 with an error if there is no such image. */
KN_API int64_t kn_image_set_label(const kn_image_set *s, int64_t index);
/* A hash of the images: of their bytes where the set holds them, else of the names and sizes of
 * their files; and of their labels, and the names of the classes. It finds sets that were mixed up
 * or changed, not malice. 0 with an error. */
KN_API uint64_t kn_image_set_hash(const kn_image_set *s);
/* The image as it is stored: u8 [C,H,W] on the CPU. Errors: no such image, one that can't be read.
 */
KN_API kn_tensor *kn_image_set_image(const kn_image_set *s, int64_t index);

typedef struct kn_image_read_options {
    KN_BEGIN_OPTIONS;
    int64_t max_pixels; /* height * width; an error for larger images; default 2^26 */
} kn_image_read_options;
/* One JPEG or PNG file as u8 [3,H,W] on the CPU. Errors: no such file, broken, too large, a library
 * built without its reader. */
#define kn_image_read(path, ...)                                                                   \
    kn_image_read_(path, KN_OPTIONS(kn_image_read_options, __VA_ARGS__))
KN_API kn_tensor *kn_image_read_(const char *path, kn_image_read_options o);

/* ---- augmentation -----------------------------------------------------------------------------
 */

/* The changes of an image, in this order. Names, parameters and formulas are those of
 * torchvision.transforms; everything zero: nothing happens. A size { 224 } is the square { 224, 224
 * }, { H, W } a rectangle. Sizes change by the filter of PIL's bilinear, or .bicubic, to the bit
 * (as wide as two pixels of the smaller image, or four: "antialias"). */
typedef struct kn_augment {
    int64_t resize[2]; /* { S }: the shorter side becomes S; { H, W }: exactly */
    /* One of three, or none: a random part (area and aspect ratio drawn from scale, by default
     * 0.08 to 1, and ratio, 3/4 to 4/3) that is resized; a part of the image, with .padding black
     * (or mirrored) pixels on each side; the middle, with black where the image is smaller. */
    struct {
        int64_t size[2];
        double scale[2], ratio[2];
    } random_resized_crop;
    struct {
        int64_t size[2], padding;
        bool reflect;
    } random_crop;
    int64_t center_crop[2];
    bool bicubic; /* the filter of .resize and .random_resized_crop */
    double random_horizontal_flip, random_vertical_flip; /* probabilities */
    /* Factors in [1 - v, 1 + v] of three, a shift in [-hue, hue] of a turn (hue <= 0.5), in a
     * random order. Images with one channel have no saturation and hue. */
    struct {
        double brightness, contrast, saturation, hue;
    } color_jitter;
    /* x = (pixel / 255 - mean) / std of each channel; std all zero: ones. */
    struct {
        double mean[3], std[3];
    } normalize;
    /* With probability p a rectangle becomes value, after .normalize, or normal draws (.random).
     * Its area and ratio are drawn from scale, by default 0.02 to 0.33, and ratio, 0.3 to 3.3. */
    struct {
        double p, scale[2], ratio[2], value;
        bool random;
    } random_erasing;
} kn_augment;

typedef struct kn_augment_image_options {
    KN_BEGIN_OPTIONS;
    kn_augment augment;
    kn_dtype dtype; /* of the result: a float, default f32; or u8, without .normalize and erasing */
    uint64_t seed;
    int64_t epoch, index; /* the random choices are those of this sample */
} kn_augment_image_options;
/* What a loader with .augment and .seed makes of image[C,H,W] (u8, on the CPU, C 1 or 3): a tensor
 * [C,H',W']. */
#define kn_augment_image(image, ...)                                                               \
    kn_augment_image_(image, KN_OPTIONS(kn_augment_image_options, __VA_ARGS__))
KN_API kn_tensor *kn_augment_image_(const kn_tensor *image, kn_augment_image_options o);

/* ---- loaders ----------------------------------------------------------------------------------
 */

typedef struct kn_image_loader_options {
    KN_BEGIN_OPTIONS;
    kn_augment augment;
    /* Mixup (Zhang et al., 2018) and CutMix (Yun et al., 2019) of pairs of rows 2 i, 2 i + 1, which
     * become lambda a + (1 - lambda) b and the other way round, or swap a rectangle, with lambda
     * from Beta(alpha, alpha), drawn for each pair; with both a pair takes one or the other. The
     * labels mix alike. .batch must be even. (torchvision draws one lambda a batch.) */
    double mixup_alpha, cutmix_alpha;
    kn_dtype dtype; /* of x: a float, default f32; or u8 without .normalize, erasing and mixing */
    KN_LOADER_OPTIONS;
} kn_image_loader_options;

/* Batches x[B,C,H,W], images after .augment, and y[B] (i64), their classes; where images are mixed
 * y[B,classes] (f32), probabilities, which kn_cross_entropy takes, too. The set is borrowed. Where
 * its images differ in size, .augment must give them one. world NULL: one rank. Errors of kn_next:
 * images that can't be read (unless .skip_bad) or that are smaller than a .random_crop. */
#define kn_image_loader(set, world, ...)                                                           \
    kn_image_loader_(set, world, KN_OPTIONS(kn_image_loader_options, __VA_ARGS__))
KN_API kn_loader *kn_image_loader_(const kn_image_set *s, const kn_comm *world,
                                   kn_image_loader_options o);

#ifdef __cplusplus
}
#endif
#endif
