/* data/idx_set.c: sets of images in idx files: MNIST and Fashion-MNIST. */
#include "data/images_internal.h"
#include "data/mnist.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>

static const char *const clothes[] = {
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal",      "shirt",   "sneaker",  "bag",   "ankle boot"
};

static int read_image(const kn_image_set *s, int64_t index, kn_image_room *room, kn_pixels *out)
{
    (void)room;
    const uint8_t *p = kn_array_of(s->bytes).data;
    *out = kn_pixels_planar(p + index * s->record, s->info.height, s->info.width, 1);
    return true;
}

static int64_t label_of(const kn_image_set *s, int64_t index)
{
    return ((const uint8_t *)kn_array_of(s->labels).data)[index];
}

bool kn_idx_set_read(kn_image_set *s, const char *folder, const char *split, bool fashion)
{
    kn_images images;
    if (!kn_images_read(folder, split, &images))
        return false;
    s->bytes = images.images;
    s->labels = images.labels;
    s->record = images.rows * images.cols;
    s->info = (kn_image_set_info){ .kind = fashion ? "Fashion-MNIST" : "MNIST",
                                   .count = images.count,
                                   .classes = 10,
                                   .channels = 1,
                                   .height = images.rows,
                                   .width = images.cols };
    s->read = read_image;
    s->label = label_of;
    s->class_name = kn_host_calloc(10, sizeof *s->class_name);
    bool ok = s->class_name != NULL;
    for (int c = 0; ok && c < 10; c++) {
        char digit[2] = { (char)('0' + c), '\0' };
        ok = (s->class_name[c] = kn_host_strdup(fashion ? clothes[c] : digit)) != NULL;
    }
    return ok;
}
