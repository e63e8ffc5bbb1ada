/* tests/fuzz/data_fuzz.c: the readers of data/: tables, idx files, batches of CIFAR, pictures,
 * folders of pictures. */
#include "tests/fuzz/fuzz.h"
#include "data/csv.h"
#include "data/idx_file.h"
#include "data/images_internal.h"
#include "data/mnist.h"

/* The first line has the options: target|ignore|separator|header|dtype|fill. */
KN_FUZZ(csv, .factor = 64, .extra = 1 << 20)
{
    static const kn_dtype dtypes[] = { KN_F32, KN_F64, KN_I64, KN_I32 };
    fuzz_input rest = { data, size }, line = fuzz_part(&rest, '\n');
    char target[40], ignore[40];
    fuzz_word(&line, '|', target, sizeof target);
    fuzz_word(&line, '|', ignore, sizeof ignore);
    char separator = (char)fuzz_byte(&line);
    int header = fuzz_byte(&line) % 3, kind = fuzz_byte(&line);
    const char *path = fuzz_file("table.csv", rest.data, rest.size);
    kn_csv t;
    if (kn_csv_read(path, &t, .target = *target ? target : NULL, .ignore = *ignore ? ignore : NULL,
                    .separator = separator, .header = (kn_csv_header)header,
                    .dtype = dtypes[kind % 4], .target_dtype = dtypes[kind / 4 % 4],
                    .fill_missing = kind & 16, .fill = kind & 16 ? -1 : 0))
        for (int64_t i = 0; i < t.inputs + t.targets; i++)
            FUZZ_CHECK(t.name[i] && strlen(t.name[i]) <= size + 30, "column %d", (int)i);
    kn_csv_free(&t);
}

/* deflate makes up to 1032 bytes of one; kn_idx_read takes no more. */
KN_FUZZ(idx, .factor = 1100, .extra = 1 << 20)
{
    kn_tensor *t = kn_idx_read(fuzz_file("x", data, size));
    FUZZ_CHECK(!t || kn_numel(t) >= 1);
}

/* The same for both files of a set: images, and after "||" their labels. */
KN_FUZZ(mnist, .factor = 1100, .extra = 1 << 20)
{
    static const char cut[] = "||";
    const uint8_t *at = size ? memmem(data, size, cut, 2) : NULL;
    size_t n = at ? (size_t)(at - data) : size;
    fuzz_file("train-images-idx3-ubyte", data, n);
    fuzz_file("train-labels-idx1-ubyte", at ? at + 2 : data, at ? size - n - 2 : 0);
    kn_images images;
    if (kn_images_read(fuzz_folder(), "train", &images))
        FUZZ_CHECK(images.count > 0 && images.label[images.count - 1] <= 9);
    kn_images_free(&images);
    kn_clear_error();
    kn_image_set *s = kn_image_set_open(fuzz_folder(), "train");
    if (s)
        kn_image_set_image(s, 0);
    kn_image_set_free(s);
}

/* The first byte tells which files there are; records follow after a line of class names. */
KN_FUZZ(cifar, .factor = 8, .extra = 1 << 20)
{
    fuzz_input rest = { data, size };
    uint8_t how = fuzz_byte(&rest);
    fuzz_input names = fuzz_part(&rest, '|');
    bool hundred = how & 1;
    const char *split = how & 2 ? "train" : "test";
    fuzz_file(hundred ? "fine_label_names.txt" : "batches.meta.txt", names.data, names.size);
    if (!hundred)
        fuzz_file("test_batch.bin", rest.data, rest.size);
    else
        fuzz_file(how & 2 ? "train.bin" : "test.bin", rest.data, rest.size);
    for (int i = 1; !hundred && (how & 2) && i <= 5; i++) {
        char name[32];
        snprintf(name, sizeof name, "data_batch_%d.bin", i);
        fuzz_file(name, rest.data, rest.size);
    }
    kn_image_set *s = kn_image_set_open(fuzz_folder(), split, .coarse_labels = how & 4);
    if (s) {
        kn_image_set_info info = kn_image_set_read_info(s);
        FUZZ_CHECK(kn_image_set_label(s, info.count - 1) < info.classes);
        FUZZ_CHECK(kn_image_set_image(s, info.count - 1) && kn_image_set_class(s, 0));
    }
    kn_image_set_free(s);
}

/* Memory is bound by the pixels that the caller allows; a compressed picture says nothing of
 * them. */
enum { PIXELS = 1 << 16 };

static void decode(const uint8_t *data, size_t size)
{
    kn_image_room room = { 0 };
    kn_pixels out;
    int answer = kn_image_decode(data, size, PIXELS, &room, &out);
    FUZZ_CHECK(kn_ok() && (answer == true || answer == KN_SAMPLE_SKIP), "%d", answer);
    FUZZ_CHECK(answer != true || out.height * out.width <= PIXELS);
    unsigned sum = 0; /* the sanitizers see a pixel that doesn't lie in the room */
    for (int64_t y = 0; answer == true && y < out.height; y++)
        sum += out.pixel[y * out.row + (out.width - 1) * out.col + 2 * out.channel];
    FUZZ_CHECK(sum < 256u * PIXELS);
    kn_room_free(&room);
}

#ifdef KN_HAVE_JPEG
KN_FUZZ(jpeg, .factor = 4, .extra = 24 * PIXELS + (1 << 20))
{
    decode(data, size);
}
#endif

#ifdef KN_HAVE_PNG
KN_FUZZ(png, .factor = 4, .extra = 24 * PIXELS + (1 << 20))
{
    decode(data, size);
}
#endif

/* Parts "path\n...bytes...||" are files below train/. */
KN_FUZZ(image_folder, .factor = 32, .extra = 24 * PIXELS + (1 << 20))
{
    fuzz_input rest = { data, size };
    char part[80], name[100];
    for (int files = 0; rest.size && files < 20; files++) {
        fuzz_word(&rest, '\n', part, sizeof part);
        const uint8_t *at = rest.size ? memmem(rest.data, rest.size, "||", 2) : NULL;
        size_t n = at ? (size_t)(at - rest.data) : rest.size;
        bool plain = *part && part[0] != '/' && part[strlen(part) - 1] != '/' &&
                     !strstr(part, "..") && !strstr(part, "//") && !strstr(part, "/./") &&
                     strncmp(part, "./", 2) != 0 && strcmp(part, ".") != 0;
        snprintf(name, sizeof name, "train/%s", part);
        if (plain)
            fuzz_try_file(name, rest.data, n);
        rest = (fuzz_input){ at ? at + 2 : rest.data, at ? rest.size - n - 2 : 0 };
    }
    fuzz_folder();
    kn_image_set *s = kn_image_set_open(fuzz_folder(), "train", .max_pixels = PIXELS,
                                        .allow_empty = size % 2, .skip_bad = size % 3);
    int64_t count = s ? kn_image_set_read_info(s).count : 0;
    for (int64_t i = 0; i < count; i++) {
        kn_image_set_label(s, i);
        kn_image_set_image(s, i);
        if (!kn_ok())
            FUZZ_CHECK(strstr(kn_error(), fuzz_folder()), "%s", kn_error());
        kn_clear_error();
    }
    kn_image_set_free(s);
}
