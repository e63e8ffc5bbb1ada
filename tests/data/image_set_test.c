/* tests/data/image_set_test.c: sets of images: batches of CIFAR, idx files, drawn shapes. */
#include "data/data.h"
#include "tests/data/owned.h"
#include "tests/owned.h"
#include "tests/data/idx.h"
#include "tests/data/pictures.h"

#include <math.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

KN_TEST(image_set, cifar10)
{
    int64_t before = kn_ledger_read().live[KN_MEM_DATA];
    const char *folder = write_cifar10(3);
    kn_image_set *s = kn_image_set_open(folder, "train");
    KN_CHECK(s != NULL);
    kn_image_set_info info = kn_image_set_read_info(s);
    KN_CHECK(info.count == 15 && info.classes == 10 && strcmp(info.kind, "CIFAR-10") == 0);
    KN_CHECK(info.channels == 3 && info.height == 32 && info.width == 32 && !info.made);
    KN_CHECK(info.skipped == 0 && info.first_skipped == NULL);
    KN_CHECK(strcmp(kn_image_set_class(s, 9), "truck") == 0);
    for (int64_t i = 0; i < 15; i++) {
        IN_SCOPE;
        kn_tensor *t = kn_image_set_image(s, i);
        KN_CHECK(t && kn_size(t, 0) == 3 && kn_size(t, 1) == 32 && kn_size(t, 2) == 32);
        const uint8_t *p = kn_data(t);
        for (int j = 0; j < 3072; j++)
            KN_CHECK(p[j] == (uint8_t)(i + j));
        KN_CHECK(kn_image_set_label(s, i) == i % 10);
    }
    KN_CHECK(kn_image_set_label(s, 15) == -1);
    KN_CHECK_ERROR("there is no image 15 of 15");
    REFUSED(kn_image_set_image(s, -1), "there is no image -1 of 15");
    REFUSED(kn_image_set_class(s, 10), "there is no class 10 of 10");
    KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] > before);
    kn_image_set_free(s);
    s = kn_image_set_open(folder, "test");
    KN_CHECK(s && kn_image_set_read_info(s).count == 3 && kn_image_set_label(s, 1) == 1);
    kn_image_set_free(s);
    KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before);
}

KN_TEST(image_set, cifar100)
{
    write_batch("train.bin", 0, 130, true);
    write_batch("test.bin", 7, 2, true);
    write_temp("coarse_label_names.txt", "aquatic_mammals\nfish\n", 21);
    for (int coarse = 0; coarse < 2; coarse++) {
        OWNED_SET kn_image_set *s =
            kn_image_set_open(temp_path(""), "train", .coarse_labels = coarse);
        KN_CHECK(s != NULL);
        KN_CHECK(kn_image_set_read_info(s).classes == (coarse ? 20 : 100));
        KN_CHECK(kn_image_set_label(s, 123) == (coarse ? 3 : 23));
        KN_CHECK(strcmp(kn_image_set_class(s, 1), coarse ? "fish" : "class 1") == 0);
        KN_CHECK(strcmp(kn_image_set_class(s, 2), "class 2") == 0);
        IN_SCOPE;
        const uint8_t *p = kn_data(kn_image_set_image(s, 129));
        KN_CHECK(p[0] == 129 && p[3071] == (uint8_t)(129 + 3071));
    }
}

KN_TEST(image_set, idx)
{
    unsigned char images[IMAGE_BYTES], labels[LABEL_BYTES];
    make_idx(images, labels);
    write_both(images, sizeof images, labels, sizeof labels);
    OWNED_SET kn_image_set *s = kn_image_set_open(temp_path(""), "test");
    KN_CHECK(s != NULL);
    kn_image_set_info info = kn_image_set_read_info(s);
    KN_CHECK(info.count == COUNT && info.channels == 1 && info.height == SIDE &&
             info.width == SIDE);
    KN_CHECK(kn_image_set_label(s, 7) == 7 && strcmp(kn_image_set_class(s, 3), "3") == 0);
    IN_SCOPE;
    const uint8_t *p = kn_data(kn_image_set_image(s, 7));
    KN_CHECK(p[0] == 140 && p[PIXELS - 1] == 140);
}

KN_TEST(image_set, batches_that_are_damaged)
{
    uint8_t record[3073] = { 10 };
    write_cifar10(2);
    write_temp("data_batch_3.bin", record, 3072);
    REFUSED(kn_image_set_open(temp_path(""), "train"),
            "data_batch_3.bin has 3072 bytes, should be a multiple of 3073");
    write_temp("data_batch_3.bin", record, 0);
    REFUSED(kn_image_set_open(temp_path(""), "train"), "data_batch_3.bin has 0 bytes");
    write_temp("data_batch_3.bin", record, 3073);
    REFUSED(kn_image_set_open(temp_path(""), "train"),
            "label 4 is 10; labels are 0 to 9: these are no batches of CIFAR-10");
    remove(temp_path("data_batch_3.bin"));
    REFUSED(kn_image_set_open(temp_path(""), "train"), "cannot open");
    REFUSED(kn_image_set_open(temp_path(""), "valid"),
            "has no part 'valid'; parts are train and test");
    REFUSED(kn_image_set_open(temp_path(""), NULL), "has no part 'NULL'");
    REFUSED(kn_image_set_open(temp_path("test_batch.bin"), "train"),
            "test_batch.bin is a file; images are mnist, fashion-mnist, cifar10");
    REFUSED(kn_image_set_open(temp_path(""), "test", .max_pixels = -1), ".max_pixels is -1");
    KN_CHECK(mkdir(temp_path("batches.meta.txt"), 0777) == 0); /* reading it fails */
    REFUSED(kn_image_set_open(temp_path(""), "test"), "batches.meta.txt is not a regular file");
    KN_CHECK(rmdir(temp_path("batches.meta.txt")) == 0);
    remove_temp();
    REFUSED(kn_image_set_open("cifar11", "test"), "did you mean cifar10?");
    REFUSED(kn_image_set_open("shapes", "dev"), "shapes has no part 'dev'");
}

/* The whole of CIFAR-10, where it is on this machine: counts, and the mean that its users know. */
KN_TEST(image_set, real_cifar10)
{
    char *folder = kn_data_find_quietly("cifar10");
    if (!folder)
        KN_SKIP("CIFAR-10 is not on this machine (scripts/get-data cifar10)");
    kn_host_free(folder);
    OWNED_SET kn_image_set *s = kn_image_set_open("cifar10", "train");
    KN_CHECK(s && kn_image_set_read_info(s).count == 50000);
    int64_t of_class[10] = { 0 };
    for (int64_t i = 0; i < 50000; i++)
        of_class[kn_image_set_label(s, i)]++;
    for (int c = 0; c < 10; c++)
        KN_CHECK(of_class[c] == 5000);
    KN_CHECK(kn_image_set_label(s, 0) == 6); /* a frog */
}

/* ---- shapes
 * -------------------------------------------------------------------------------------- */

KN_TEST(image_set, shapes)
{
    OWNED_SET kn_image_set *train = kn_image_set_open("shapes", "train"),
                           *test = kn_image_set_open("shapes", "test");
    kn_image_set_info info = kn_image_set_read_info(train);
    KN_CHECK(info.made && info.count == 50000 && info.classes == 10);
    KN_CHECK(kn_image_set_read_info(test).count == 10000);
    IN_SCOPE;
    const uint8_t *a = kn_data(kn_image_set_image(train, 17)),
                  *b = kn_data(kn_image_set_image(train, 17)),
                  *c = kn_data(kn_image_set_image(test, 17)),
                  *d = kn_data(kn_image_set_image(train, 27));
    KN_CHECK(memcmp(a, b, 3072) == 0 && memcmp(a, c, 3072) != 0 && memcmp(a, d, 3072) != 0);
    KN_CHECK(kn_image_set_label(train, 17) == kn_image_set_label(train, 27));
}

/* A disc stands near the middle, in another colour than the background, which the corner shows. */
KN_TEST(image_set, shapes_have_figures)
{
    enum { DISCS = 40 };
    OWNED_SET kn_image_set *train = kn_image_set_open("shapes", "train");
    int seen = 0;
    for (int64_t i = 0; i < DISCS; i++) {
        IN_SCOPE;
        const uint8_t *p = kn_data(kn_image_set_image(train, 10 * i));
        int most = 0;
        for (const uint8_t *c = p; c < p + 3072; c += 1024) {
            const uint8_t *m = c + 15 * 32 + 15;
            const int apart = m[0] + m[1] + m[32] + m[33] - c[0] - c[1] - c[32] - c[33];
            most = abs(apart) > most ? abs(apart) : most;
        }
        seen += most > 4 * 45;
    }
    KN_CHECK(seen > DISCS * 3 / 4, "%d of %d", seen, DISCS);
}

/* The class whose mean image is the nearest is seldom the right one: kinds of figures must be seen.
 */
KN_TEST(image_set, shapes_are_no_averages)
{
    enum { EACH = 60, SEEN = 300 };
    static double mean[10][3072];
    OWNED_SET kn_image_set *train = kn_image_set_open("shapes", "train"),
                           *test = kn_image_set_open("shapes", "test");
    memset(mean, 0, sizeof mean);
    for (int64_t i = 0; i < 10 * EACH; i++) {
        IN_SCOPE;
        const uint8_t *p = kn_data(kn_image_set_image(train, i));
        for (int j = 0; j < 3072; j++)
            mean[kn_image_set_label(train, i)][j] += (double)p[j] / EACH;
    }
    int right = 0;
    for (int64_t i = 0; i < SEEN; i++) {
        IN_SCOPE;
        const uint8_t *p = kn_data(kn_image_set_image(test, i));
        int64_t best = 0;
        double least = INFINITY;
        for (int64_t c = 0; c < 10; c++) {
            double far = 0;
            for (int j = 0; j < 3072; j++)
                far += (p[j] - mean[c][j]) * (p[j] - mean[c][j]);
            best = far < least ? c : best;
            least = far < least ? far : least;
        }
        right += best == kn_image_set_label(test, i);
    }
    KN_CHECK(right < SEEN * 35 / 100, "%d of %d", right, SEEN);
}

/* ---- finding --------------------------------------------------------------------------------- */

static void touch(const char *path)
{
    FILE *f = fopen(path, "w");
    KN_CHECK(f != NULL && fclose(f) == 0, "%s", path);
}

static bool finds(const char *name, const char *below)
{
    OWNED_HOST char *path = kn_data_find_quietly(name);
    bool found = below ? path && strstr(path, below) : !path;
    return found;
}

/* A folder of CIFAR counts only with its batches; one of Fashion-MNIST with its training part comes
 * before one without it, and that before none. */
KN_TEST(image_set, folders_of_data)
{
    static const char *const folders[] = { "a",    "a/cifar10", "a/fashion-mnist",
                                           "b",    "b/cifar10", "b/fashion-mnist",
                                           "home", "a/cifar100" };
    char list[600];
    for (int i = 0; i < 8; i++)
        KN_CHECK(mkdir(temp_path(folders[i]), 0700) == 0);
    snprintf(list, sizeof list, "%s:%s", temp_path("a"), temp_path("b"));
    setenv("KNAP_DATA", list, 1); /* of this process: each case has its own */
    setenv("HOME", temp_path("home"), 1);
    KN_CHECK(finds("cifar10", NULL) && finds("cifar100", NULL));
    REFUSED(kn_image_set_open("cifar10", "train"),
            "data set cifar10: there is no cifar10/test_batch.bin below the folders");
    touch(temp_path("b/cifar10/test_batch.bin"));
    touch(temp_path("a/cifar100/test.bin"));
    KN_CHECK(finds("cifar10", "/b/cifar10") && finds("cifar100", "/a/cifar100"));
    KN_CHECK(finds("fashion-mnist", "/a/fashion-mnist"));
    touch(temp_path("b/fashion-mnist/train-images-idx3-ubyte.gz"));
    KN_CHECK(finds("fashion-mnist", "/b/fashion-mnist"));
}
