/* tests/data/image_folder_test.c: folders of JPEG and PNG files, a folder per class. */
#include "data/images_internal.h"
#include "tests/data/owned.h"
#include "tests/owned.h"
#include "tests/data/allocations.h"
#include "tests/data/picture_files.h"

#include <sys/stat.h>

#ifdef KN_HAVE_PNG

static int dark(int64_t y, int64_t x, int c, int most)
{
    return (int)(y + x + c);
}

static int light(int64_t y, int64_t x, int c, int most)
{
    return most - dark(y, x, c, most);
}

static void make_folder(const char *name)
{
    KN_CHECK(mkdir(temp_path(name), 0700) == 0, "%s", name);
}

static void write_png(const char *name, int64_t height, int64_t width,
                      int (*sample)(int64_t y, int64_t x, int c, int most))
{
    bytes b = png_of(height, width, PNG_COLOR_TYPE_RGB, 8, false, false, sample);
    write_temp(name, b.data, b.size);
    free(b.data);
}

/* train/{cat,dog,emu}: 3, 2 and 1 images in no order, in folders, with other files beside them. */
static const char *make_set(void)
{
    static const char *const folders[] = { "train",     "train/emu",   "train/dog",
                                           "train/cat", "train/cat/b", "train/.git" };
    for (int i = 0; i < 6; i++)
        make_folder(folders[i]);
    write_png("train/cat/c.PNG", 20, 30, dark);
    write_png("train/cat/b/x.png", 9, 40, dark);
    write_png("train/cat/a.png", 31, 17, dark);
    write_temp("train/cat/notes.txt", "a", 1);
    write_png("train/dog/1.png", 25, 25, light);
    write_png("train/dog/0.png", 50, 10, light);
    write_png("train/emu/e.jpg", 12, 12, light); /* a name says little */
    write_temp("train/.git/x.png", "a", 1);
    write_temp("train/list.txt", "a", 1);
    return temp_path("");
}

KN_TEST(image_folder, classes_and_images_by_name)
{
    static const int64_t sizes[6][3] = { { 31, 17, 0 }, { 9, 40, 0 },  { 20, 30, 0 },
                                         { 50, 10, 1 }, { 25, 25, 1 }, { 12, 12, 2 } };
    static const char *const names[] = { "cat", "dog", "emu" };
    const char *folder = make_set();
    for (int nested = 0; nested < 2; nested++) {
        OWNED_SET kn_image_set *s = nested ? kn_image_set_open(temp_path("train"), NULL)
                                           : kn_image_set_open(folder, "train");
        KN_CHECK(s != NULL);
        kn_image_set_info info = kn_image_set_read_info(s);
        KN_CHECK(info.count == 6 && info.classes == 3 && info.channels == 3 && info.height == 0);
        for (int i = 0; i < 3; i++)
            KN_CHECK(strcmp(kn_image_set_class(s, i), names[i]) == 0);
        for (int i = 0; i < 6; i++) {
            IN_SCOPE;
            kn_tensor *t = kn_image_set_image(s, i);
            KN_CHECK(t && kn_size(t, 1) == sizes[i][0] && kn_size(t, 2) == sizes[i][1], "image %d",
                     i);
            KN_CHECK(kn_image_set_label(s, i) == sizes[i][2]);
        }
    }
}

static kn_loader *loader_of(const kn_image_set *s, int64_t batch, int workers)
{
    return kn_image_loader(s, NULL, .batch = batch, .shuffle = true, .workers = workers,
                           .augment = { .random_resized_crop = { .size = { 16 } },
                                        .random_horizontal_flip = 0.5,
                                        .color_jitter = { 0.2, 0.2, 0.2, 0.1 } });
}

KN_TEST(image_folder, batches_on_any_number_of_threads)
{
    enum { VALUES = 4 * 3 * 16 * 16 };
    static float one[5][VALUES], x[VALUES];
    OWNED_SET kn_image_set *s = kn_image_set_open(make_set(), "train");
    for (int workers = 0; workers < 4; workers++) {
        OWNED_LOADER kn_loader *l = loader_of(s, 4, workers);
        for (int k = 0; k < 5; k++) {
            IN_SCOPE;
            KN_CHECK(kn_to_host(kn_next(l).x, workers ? x : one[k], sizeof x));
            KN_CHECK(!workers || memcmp(x, one[k], sizeof x) == 0, "%d workers", workers);
        }
    }
}

/* One broken image of six: an error that names it, or the next one in its place. */
KN_TEST(image_folder, images_that_can_not_be_read)
{
    const char *folder = make_set();
    write_temp("train/dog/0.png", "\x89PNG\r\n\x1a\n", 8);
    for (int skip = 0; skip < 2; skip++)
        for (int workers = 0; workers < 3; workers += 2) {
            OWNED_SET kn_image_set *s = kn_image_set_open(folder, "train", .skip_bad = skip);
            OWNED_LOADER kn_loader *l = kn_image_loader(s, NULL, .batch = 6, .workers = workers,
                                                        .augment = { .resize = { 8, 8 } });
            IN_SCOPE;
            kn_batch b = kn_next(l);
            if (skip) {
                int64_t y[6];
                KN_CHECK(kn_to_host(b.y, y, sizeof y));
                KN_CHECK(y[2] == 0 && y[3] == 1 && y[4] == 1 && y[5] == 2);
                KN_CHECK(kn_loader_read_stats(l).replaced >= 1);
                kn_image_set_info info = kn_image_set_read_info(s);
                KN_CHECK(info.skipped >= 1 && strstr(info.first_skipped, "train/dog/0.png: libpng"),
                         "%s", info.first_skipped);
            } else {
                KN_CHECK(!b.x);
                KN_CHECK_ERROR("cannot read the image");
            }
            REFUSED(kn_image_set_image(s, 3),
                    "train/dog/0.png: libpng says: the file is cut short");
        }
}

KN_TEST(image_folder, limits)
{
    OWNED_SET kn_image_set *s = kn_image_set_open(make_set(), "train", .max_pixels = 520);
    kn_scope scope = kn_scope_begin();
    KN_CHECK(!kn_image_set_image(s, 0)); /* 31 x 17 = 527 */
    KN_CHECK_ERROR("a.png: it has 31 x 17 pixels; the limit is 520 pixels (.max_pixels)");
    KN_CHECK(kn_image_set_image(s, 1) != NULL);
    kn_loader *l = kn_image_loader(s, NULL, .batch = 1, .augment = { .resize = { 24, 24 } });
    kn_loader_seek(l, 1);
    REFUSED(kn_next(l).x, "an image becomes 24 x 24 pixels; the limit is 520 pixels");
    kn_scope_end(scope);
    kn_loader_free(l);
    REFUSED(kn_image_loader(s, NULL, .batch = 2),
            "the images differ in size; give them one by .random_resized_crop");
    REFUSED(kn_image_loader(s, NULL, .batch = 2, .augment = { .resize = { 8 } }),
            "the images differ in size");
}

KN_TEST(image_folder, folders_that_do_not_fit)
{
    char folder[256]; /* temp_path gives few at a time */
    snprintf(folder, sizeof folder, "%s", make_set());
    REFUSED(kn_image_set_open(folder, "valid"), "/valid with a folder for each class; where");
    make_folder("val");
    REFUSED(kn_image_set_open(folder, "test"),
            "val has no folders, should have one for each class of images");
    make_folder("val/none");
    REFUSED(kn_image_set_open(folder, "test", .allow_empty = true), "val has no images");
    make_folder("train/fox");
    write_temp("train/fox/f.gif", "GIF", 3);
    REFUSED(kn_image_set_open(folder, "train"),
            "train/fox has no .jpg, .jpeg or .png files (but 1 others)");
    kn_image_set *s = kn_image_set_open(folder, "train", .allow_empty = true);
    KN_CHECK(s && kn_image_set_read_info(s).classes == 4 && kn_image_set_read_info(s).count == 6);
    kn_image_set_free(s);
    KN_CHECK(symlink("..", temp_path("train/fox/up")) == 0); /* without end */
    REFUSED(kn_image_set_open(folder, "train"), "more than 16 folders in each other");
    remove(temp_path("train/fox/up"));
}

static kn_loader *of_folder(const char *folder, kn_image_set **set)
{
    *set = kn_image_set_open(folder, "train", .skip_bad = true);
    return *set ? loader_of(*set, 2, 0) : NULL;
}

KN_TEST(image_folder, every_allocation_failing)
{
    const char *folder = make_set();
    fail_each_allocation(of_folder, folder, 300);
}

#endif
