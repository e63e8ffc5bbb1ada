/* data/image_set.c: opens sets of images and tells about them. */
#include "data/data.h"
#include "data/images_internal.h"
#include "kernels/error_internal.h"
#include "tensor/checksum.h"
#include "tensor/files.h"
#include "tensor/tensor_internal.h"

#include <string.h>
#include <unistd.h>

/* ---- opening ----------------------------------------------------------------------------------
 */

static bool has_idx(const char *folder)
{
    return kn_is_in(folder, "train-images-idx3-ubyte") ||
           kn_is_in(folder, "train-images-idx3-ubyte.gz") ||
           kn_is_in(folder, "t10k-images-idx3-ubyte") ||
           kn_is_in(folder, "t10k-images-idx3-ubyte.gz");
}

static bool open_files(kn_image_set *s, const char *data, const char *folder, const char *split)
{
    const bool named = strcmp(data, folder) != 0; /* by kn_data_find */
    const bool ten =
        named ? strcmp(data, "cifar10") == 0
              : kn_is_in(folder, "data_batch_1.bin") || kn_is_in(folder, "test_batch.bin");
    const bool hundred = named ? strcmp(data, "cifar100") == 0
                               : kn_is_in(folder, "train.bin") || kn_is_in(folder, "test.bin");
    const bool idx = named || has_idx(folder);
    const bool is_folder = kn_is_in(folder, ".");
    if (!kn_ok()) /* nobody knows what is there */
        return false;
    if (!is_folder)
        return kn_fail("%s is a file; images are mnist, fashion-mnist, cifar10, cifar100, shapes, "
                       "or a folder of images",
                       folder);
    if (!ten && !hundred && !idx)
        return kn_image_folder_open(s, folder, split);
    if (!split || (strcmp(split, "train") != 0 && strcmp(split, "test") != 0))
        return kn_fail("kn_image_set_open: %s has no part '%s'; parts are train and test", data,
                       split ? split : "NULL");
    if (!ten && !hundred)
        return kn_idx_set_read(s, folder, split, strcmp(data, "fashion-mnist") == 0);
    return kn_cifar_read(s, folder, split, !ten);
}

static bool open_set(kn_image_set *s, const char *data, const char *split)
{
    if (strcmp(data, "shapes") == 0)
        return (split && (strcmp(split, "train") == 0 || strcmp(split, "test") == 0) &&
                kn_shapes_open(s, split)) ||
               kn_fail("kn_image_set_open: shapes has no part '%s'; parts are train and test",
                       split ? split : "NULL");
    char *folder = kn_data_find(data);
    bool ok = folder && open_files(s, data, folder, split);
    kn_host_free(folder);
    return ok;
}

kn_image_set *kn_image_set_open_(const char *data, const char *split, kn_image_set_open_options o)
{
    if (!kn_ok() || !kn_given(data, "kn_image_set_open", "the name or folder of the data"))
        return NULL;
    if (o.max_pixels < 0 || o.max_pixels > KN_MOST_PIXELS)
        return kn_fail_null("kn_image_set_open: .max_pixels is %lld, should lie between 1 and 2^32",
                            (long long)o.max_pixels);
    kn_image_set *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    pthread_mutex_init(&s->lock, NULL);
    s->options = o;
    s->options.max_pixels = o.max_pixels ? o.max_pixels : KN_MAX_PIXELS;
    if (open_set(s, data, split))
        return s;
    kn_image_set_free(s);
    return NULL;
}

void kn_image_set_free(kn_image_set *s)
{
    if (!s)
        return;
    for (int64_t c = 0; s->class_name && c < s->info.classes; c++)
        kn_host_free(s->class_name[c]);
    kn_host_free(s->class_name);
    kn_image_folder_free(s);
    kn_tensor_free(s->bytes);
    kn_tensor_free(s->labels);
    pthread_mutex_destroy(&s->lock);
    kn_host_free(s);
}

/* ---- parts of a set ----------------------------------------------------------------------------
 */

int kn_image_set_pixels(const kn_image_set *s, int64_t index, kn_image_room *room, kn_pixels *out)
{
    (void)room;
    const uint8_t *p = kn_array_of(s->bytes).data;
    *out = kn_pixels_planar(p + index * s->record + s->pixel_at, s->info.height, s->info.width,
                            s->info.channels);
    return true;
}

int64_t kn_image_set_label_at(const kn_image_set *s, int64_t index)
{
    const uint8_t *p = kn_array_of(s->labels ? s->labels : s->bytes).data;
    return p[s->labels ? index : index * s->record + s->label_at];
}

bool kn_image_set_name(kn_image_set *s, const char *const *name, int64_t classes)
{
    s->class_name = kn_host_calloc((size_t)classes, sizeof *s->class_name);
    s->info.classes = s->class_name ? classes : 0;
    for (int64_t c = 0; c < s->info.classes; c++)
        if (!(s->class_name[c] = kn_host_strdup(name[c])))
            return false;
    return s->class_name != NULL;
}

/* ---- facts ------------------------------------------------------------------------------------
 */

static bool has_index(const char *caller, const kn_image_set *s, int64_t index)
{
    return (index >= 0 && index < s->info.count) ||
           kn_fail("%s: there is no image %lld of %lld", caller, (long long)index,
                   (long long)s->info.count);
}

kn_image_set_info kn_image_set_read_info(const kn_image_set *s)
{
    if (!kn_given(s, "kn_image_set_read_info", "the set of images"))
        return (kn_image_set_info){ 0 };
    kn_image_set_info info = s->info;
    kn_image_set *own = (kn_image_set *)s; /* its lock */
    pthread_mutex_lock(&own->lock);
    info.skipped = s->skipped;
    info.first_skipped = s->first_skipped[0] ? s->first_skipped : NULL;
    pthread_mutex_unlock(&own->lock);
    return info;
}

const char *kn_image_set_class(const kn_image_set *s, int64_t c)
{
    if (!kn_given(s, "kn_image_set_class", "the set of images"))
        return NULL;
    if (c >= 0 && c < s->info.classes)
        return s->class_name[c];
    return kn_fail_null("kn_image_set_class: there is no class %lld of %lld", (long long)c,
                        (long long)s->info.classes);
}

int64_t kn_image_set_label(const kn_image_set *s, int64_t index)
{
    if (!kn_given(s, "kn_image_set_label", "the set of images") ||
        !has_index("kn_image_set_label", s, index))
        return -1;
    return s->label(s, index);
}

static void add_bytes(kn_checksum *sum, const kn_tensor *t)
{
    if (t)
        kn_checksum_add(sum, kn_array_of(t).data, (size_t)kn_numel(t) * kn_dtype_size(t->dtype));
}

uint64_t kn_image_set_hash(const kn_image_set *s)
{
    kn_checksum sum;
    kn_checksum_begin(&sum);
    if (!kn_given(s, "kn_image_set_hash", "the set of images"))
        return 0;
    kn_checksum_add(&sum, &s->info.count, sizeof s->info.count);
    for (int64_t c = 0; c < s->info.classes; c++)
        kn_checksum_add(&sum, s->class_name[c], strlen(s->class_name[c]) + 1);
    for (int64_t i = 0; i < s->info.count; i++) {
        const int64_t label = s->label(s, i);
        kn_checksum_add(&sum, &label, sizeof label);
    }
    add_bytes(&sum, s->bytes);
    add_bytes(&sum, s->labels);
    if (s->files && !kn_image_folder_hash(s, &sum))
        return 0;
    return kn_checksum_end(&sum);
}

kn_tensor *kn_image_set_image(const kn_image_set *s, int64_t index)
{
    kn_image_room room = { 0 };
    kn_pixels p;
    kn_tensor *t = NULL;
    if (!kn_given(s, "kn_image_set_image", "the set of images") ||
        !has_index("kn_image_set_image", s, index))
        return NULL;
    int answer = s->read(s, index, &room, &p);
    if (answer == KN_SAMPLE_SKIP)
        kn_fail("%s", room.problem);
    else if (answer)
        t = kn_pixels_tensor(p);
    kn_room_free(&room);
    return t;
}

kn_tensor *kn_pixels_tensor(kn_pixels p)
{
    kn_tensor *t = kn_empty(KN_U8, KN_CPU, KN_SHAPE(p.channels, p.height, p.width));
    uint8_t *to = t ? kn_array_of(t).data : NULL;
    for (int64_t c = 0; t && c < p.channels; c++)
        for (int64_t y = 0; y < p.height; y++)
            for (int64_t x = 0; x < p.width; x++)
                *to++ = p.pixel[y * p.row + x * p.col + c * p.channel];
    return t;
}
