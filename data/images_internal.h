/* data/images_internal.h (private): pixels on their way from a set to a batch. image_set.c opens
 * sets of cifar.c, idx_set.c, shapes.c and image_folder.c (jpeg.c, png.c); augment_plan.c checks
 * what shall happen to an image, augment.c does it, with resize.c and jitter.c; mix.c mixes two. */
#ifndef KNAP_DATA_IMAGES_INTERNAL_H
#define KNAP_DATA_IMAGES_INTERNAL_H

#include "data/images.h"
#include "tensor/checksum.h"

#include <pthread.h>

#define KN_MAX_PIXELS  ((int64_t)1 << 26) /* of an image, unless the user says otherwise */
#define KN_MOST_PIXELS ((int64_t)1 << 32) /* that the user may allow */

bool kn_names_images(const char *name); /* whether a data set of images has it (files.c) */

/* A view of an image of 8 bits a channel: value (y, x, c) is at pixel[y * row + x * col + c *
 * channel]. A negative step mirrors. */
typedef struct kn_pixels {
    const uint8_t *pixel;
    int64_t height, width, channels;
    int64_t row, col, channel;
} kn_pixels;

/* A view of contiguous [H,W,C] and [C,H,W]. */
kn_pixels kn_pixels_interleaved(const uint8_t *pixel, int64_t height, int64_t width,
                                int64_t channels);
kn_pixels kn_pixels_planar(const uint8_t *pixel, int64_t height, int64_t width, int64_t channels);

/* ---- memory of a thread -----------------------------------------------------------------------
 */

/* Buffers that grow to the largest image that their thread has seen. */
#define KN_PROBLEM 512
enum {
    KN_ROOM_FILE,
    KN_ROOM_DECODED,
    KN_ROOM_NARROW,
    KN_ROOM_RESIZED,
    KN_ROOM_PADDED,
    KN_ROOM_COLOURED,
    KN_ROOM_WEIGHTS,
    KN_ROOMS
};
typedef struct kn_image_room {
    void *at[KN_ROOMS];
    size_t size[KN_ROOMS];
    char problem[KN_PROBLEM]; /* of the last image that can't be read */
} kn_image_room;

/* p as [H,W,C] in the room; NULL with an error. */
uint8_t *kn_pixels_gather(kn_pixels p, kn_image_room *room, int which);

/* At least size bytes, whose old contents are lost; NULL with an error. */
void *kn_room_take(kn_image_room *r, int which, size_t size);
void kn_room_free(kn_image_room *r);

/* ---- sets -------------------------------------------------------------------------------------
 */

struct kn_image_set {
    kn_image_set_info info; /* without skipped and first_skipped */
    kn_image_set_open_options options;
    /* The pixels of an image, in the set's memory or the room: true, false with an error, or
     * KN_SAMPLE_SKIP for an image that can't be read, with room->problem. */
    int (*read)(const kn_image_set *s, int64_t index, kn_image_room *room, kn_pixels *out);
    int64_t (*label)(const kn_image_set *s, int64_t index);
    struct kn_image_files *files; /* of a folder */
    char **class_name;            /* info.classes of them */
    kn_tensor *bytes;             /* records of CIFAR, pixels of idx */
    kn_tensor *labels;            /* of idx: u8 */
    int64_t record;               /* bytes of a record */
    int64_t pixel_at, label_at;
    uint64_t seed;        /* of shapes */
    pthread_mutex_t lock; /* of the two below */
    int64_t skipped;
    char first_skipped[KN_PROBLEM]; /* "": none was */
};

/* The pixels as u8 [C,H,W], scoped. */
kn_tensor *kn_pixels_tensor(kn_pixels p);

/* Of a set in memory: images are records of .bytes, labels a byte of theirs or of .labels. */
int kn_image_set_pixels(const kn_image_set *s, int64_t index, kn_image_room *room, kn_pixels *out);
int64_t kn_image_set_label_at(const kn_image_set *s, int64_t index);
/* The classes, whose names are copied. */
bool kn_image_set_name(kn_image_set *s, const char *const *name, int64_t classes);

bool kn_image_folder_open(kn_image_set *s, const char *folder, const char *split);
void kn_image_folder_free(kn_image_set *s);
/* Adds names and sizes of the files. */
bool kn_image_folder_hash(const kn_image_set *s, kn_checksum *sum);
bool kn_cifar_read(kn_image_set *s, const char *folder, const char *split, bool hundred);
bool kn_idx_set_read(kn_image_set *s, const char *folder, const char *split, bool fashion);
bool kn_shapes_open(kn_image_set *s, const char *split);

/* ---- files --------------------------------------------------------------------------------------
 */

/* The pixels [H,W,3] of a file in memory, in the room: true, false with an error (no memory), or
 * KN_SAMPLE_SKIP for a file that can't be read, with room->problem. */
int kn_image_decode(const uint8_t *file, size_t size, int64_t max_pixels, kn_image_room *room,
                    kn_pixels *out);
int kn_jpeg_decode(const uint8_t *file, size_t size, int64_t max_pixels, kn_image_room *room,
                   kn_pixels *out);
int kn_png_decode(const uint8_t *file, size_t size, int64_t max_pixels, kn_image_room *room,
                  kn_pixels *out);
/* The same of a file; the problem names its path. */
int kn_image_file_read(const char *path, int64_t max_pixels, kn_image_room *room, kn_pixels *out);
/* An image of this size is within the limit; else false with room->problem. */
bool kn_image_fits(kn_image_room *room, int64_t height, int64_t width, int64_t max_pixels);

/* ---- augmentation ------------------------------------------------------------------------------
 */

/* The changes of an image, checked, with the defaults filled in. */
typedef struct kn_augment_plan {
    kn_augment a;
    kn_dtype dtype;
    int64_t channels, height, width;   /* of the result; height and width 0: as the image */
    int64_t max_pixels;                /* of an image in between */
    _Alignas(8) char table[3][256][8]; /* the value of a pixel, in dtype */
} kn_augment_plan;

/* height and width 0: unknown. Errors name caller. */
bool kn_augment_plan_make(kn_augment_plan *p, const char *caller, const kn_augment *a,
                          kn_dtype dtype, int64_t channels, int64_t height, int64_t width);
/* Cuts, resizes, flips and colours: all that is done in 8 bits. s draws. */
bool kn_augment_pixels(const kn_augment_plan *p, kn_pixels *image, kn_data_sample *s,
                       kn_image_room *room);
/* The pixels as out[C,H,W] of the plan's dtype, normalized; erases. */
void kn_augment_store(const kn_augment_plan *p, kn_pixels image, kn_data_sample *s, void *out);

/* in at another size, in the room. */
bool kn_resize(kn_pixels in, int64_t height, int64_t width, bool cubics, kn_image_room *room,
               kn_pixels *out);
/* Colours pixels[H,W,C] in place. */
void kn_jitter(const kn_augment *a, uint8_t *pixels, int64_t count, int64_t channels,
               kn_data_sample *s);

/* Mixes two images[C,H,W] and their labels[classes] (f32), with the random numbers of s. */
typedef struct kn_mix {
    double mixup_alpha, cutmix_alpha;
    kn_dtype dtype;
    int64_t channels, height, width, classes;
} kn_mix;
void kn_mix_pair(const kn_mix *m, kn_data_sample *s, void *a, void *b, float *label_a,
                 float *label_b);

#endif
