/* data/cifar.c: the binary batches of CIFAR-10 and CIFAR-100 (A. Krizhevsky, "Learning multiple
 * layers of features from tiny images", 2009). A record is the label (CIFAR-100: coarse label,
 * label) and 3 x 32 x 32 bytes: red, green, blue. */
#include "data/images_internal.h"
#include "tensor/files.h"
#include "tensor/tensor_internal.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define PIXELS     ((int64_t)3 * 32 * 32)
#define MOST       ((int64_t)1 << 32) /* bytes of a file */
#define MOST_NAMES (1 << 16)          /* of one with the names of classes */

static const char *const classes_of_10[] = { "airplane", "automobile", "bird",  "cat",  "deer",
                                             "dog",      "frog",       "horse", "ship", "truck" };

/* Opens a file of whole records; *size becomes its bytes. */
static int open_batch(const char *path, int64_t record, int64_t *size)
{
    struct stat st;
    const int fd = kn_open_regular(path, &st);
    *size = fd >= 0 ? st.st_size : 0;
    if (fd < 0 || (*size > 0 && *size % record == 0 && *size <= MOST))
        return fd;
    close(fd);
    return kn_fail("the batch %s has %lld bytes, should be a multiple of %lld, the bytes of an "
                   "image with its label; download it again",
                   path, (long long)*size, (long long)record),
           -1;
}

static bool check_labels(const kn_image_set *s, const char *folder)
{
    const uint8_t *p = kn_array_of(s->bytes).data;
    for (int64_t i = 0; i < s->info.count; i++)
        if (p[i * s->record + s->label_at] >= s->info.classes)
            return kn_fail("%s: label %lld is %d; labels are 0 to %lld: these are no batches of %s",
                           folder, (long long)i, p[i * s->record + s->label_at],
                           (long long)s->info.classes - 1, s->info.kind);
    return true;
}

static bool read_all(kn_image_set *s, const char *folder, const char *const *name, int files)
{
    kn_path path[6];
    int fd[6] = { -1, -1, -1, -1, -1, -1 };
    int64_t size[6], total = 0, at = 0;
    bool ok = true;
    for (int i = 0; ok && i < files; i++) {
        path[i] = kn_path_of(folder, name[i], "");
        ok = (fd[i] = open_batch(path[i].text, s->record, &size[i])) >= 0;
        total += ok ? size[i] : 0;
    }
    if (ok) {
        s->info.count = total / s->record;
        s->bytes = kn_tensor_new(KN_U8, KN_CPU, NULL, KN_MEM_DATA, KN_SHAPE(total), NULL, false);
        ok = s->bytes != NULL;
    }
    for (int i = 0; ok && i < files; at += size[i++])
        ok = kn_read_whole(fd[i], path[i].text, (uint8_t *)kn_array_of(s->bytes).data + at,
                           (size_t)size[i], 0);
    for (int i = 0; i < files; i++)
        if (fd[i] >= 0)
            close(fd[i]);
    return ok && check_labels(s, folder);
}

/* Names from the lines of a file, which need not be there. */
static bool name_classes(kn_image_set *s, const char *folder, const char *file)
{
    char made[32];
    struct stat st;
    size_t size;
    const kn_path path = kn_path_of(folder, file, "");
    const int there = kn_look(path.text, &st);
    char *text = there > 0 ? kn_file_read(path.text, MOST_NAMES, &size) : NULL, *line = text;
    bool ok = there == 0 || text; /* else made-up names would be the wrong ones */
    for (int64_t c = 0; ok && c < s->info.classes; c++) {
        char *end = line ? strchr(line, '\n') : NULL;
        const char *name = made;
        if (end && line[0] > ' ')
            name = line, line[strcspn(line, "\r\n")] = '\0';
        else if (s->info.classes == 10)
            name = classes_of_10[c];
        else
            snprintf(made, sizeof made, "class %d", (int)c);
        ok = (s->class_name[c] = kn_host_strdup(name)) != NULL;
        line = end ? end + 1 : NULL;
    }
    kn_host_free(text);
    return ok && kn_ok();
}

bool kn_cifar_read(kn_image_set *s, const char *folder, const char *split, bool hundred)
{
    static const char *const train_of_10[] = { "data_batch_1.bin", "data_batch_2.bin",
                                               "data_batch_3.bin", "data_batch_4.bin",
                                               "data_batch_5.bin" };
    bool train = strcmp(split, "train") == 0, coarse = hundred && s->options.coarse_labels;
    const char *one = hundred ? train ? "train.bin" : "test.bin" : "test_batch.bin";
    const char *names =
        hundred ? coarse ? "coarse_label_names.txt" : "fine_label_names.txt" : "batches.meta.txt";
    s->info = (kn_image_set_info){ .kind = coarse    ? "CIFAR-100 with its 20 superclasses"
                                           : hundred ? "CIFAR-100"
                                                     : "CIFAR-10",
                                   .classes = coarse    ? 20
                                              : hundred ? 100
                                                        : 10,
                                   .channels = 3,
                                   .height = 32,
                                   .width = 32 };
    s->pixel_at = hundred ? 2 : 1;
    s->label_at = hundred && !coarse ? 1 : 0;
    s->record = PIXELS + s->pixel_at;
    s->read = kn_image_set_pixels;
    s->label = kn_image_set_label_at;
    s->class_name = kn_host_calloc((size_t)s->info.classes, sizeof *s->class_name);
    return s->class_name && name_classes(s, folder, names) &&
           (train && !hundred ? read_all(s, folder, train_of_10, 5) : read_all(s, folder, &one, 1));
}
