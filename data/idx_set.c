/* data/idx_set.c: sets of images in idx files: MNIST and Fashion-MNIST. */
#include "data/images_internal.h"
#include "data/mnist.h"

static const char *const clothes[] = {
    "T-shirt/top", "trouser", "pullover", "dress", "coat",
    "sandal",      "shirt",   "sneaker",  "bag",   "ankle boot"
};

static const char *const digits[] = { "0", "1", "2", "3", "4", "5", "6", "7", "8", "9" };

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
                                   .channels = 1,
                                   .height = images.rows,
                                   .width = images.cols };
    s->read = kn_image_set_pixels;
    s->label = kn_image_set_label_at;
    return kn_image_set_name(s, fashion ? clothes : digits, 10);
}
