/* tests/data/mnist_test.c: idx files, gzipped or not, damaged ones among them. */
#include "data/data.h"
#include "data/mnist.h"
#include "tensor/tensor_internal.h"
#include "tests/owned.h"
#include "tests/data/idx.h"

#include <sys/resource.h>
#include <sys/stat.h>

#ifdef KN_HAVE_ZLIB
#include <zlib.h>

enum { GZIPPED = 2 }; /* files are read plain and gzipped */

/* data gzipped into out; returns its size. */
static size_t gzip(const unsigned char *data, size_t size, unsigned char *out, size_t room)
{
    z_stream z = { 0 };
    KN_CHECK(deflateInit2(&z, 9, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK);
    z.next_in = (unsigned char *)(uintptr_t)data;
    z.avail_in = (unsigned)size;
    z.next_out = out;
    z.avail_out = (unsigned)room;
    KN_CHECK(deflate(&z, Z_FINISH) == Z_STREAM_END);
    deflateEnd(&z);
    return z.total_out;
}
#else
enum { GZIPPED = 1 };

static size_t gzip(const unsigned char *data, size_t size, unsigned char *out, size_t room)
{
    return 0;
}

KN_TEST(mnist, gzipped_files_without_zlib)
{
    const unsigned char begin[] = { 0x1f, 0x8b, 8, 0 };
    IN_SCOPE;
    REFUSED(kn_idx_read(write_temp("some.idx.gz", begin, sizeof begin)),
            "is gzipped, but zlib wasn't found when Knap was built");
}
#endif

KN_TEST(mnist, plain_and_gzipped)
{
    unsigned char images[IMAGE_BYTES], labels[LABEL_BYTES], packed[512];
    kn_images im;
    int64_t before = kn_ledger_read().live[KN_MEM_DATA];
    make_idx(images, labels);
    for (int gz = 0; gz < GZIPPED; gz++) {
        write_both(images, sizeof images, labels, sizeof labels);
        if (gz) {
            size_t n = gzip(images, sizeof images, packed, sizeof packed);
            write_temp("t10k-images-idx3-ubyte.gz", packed, n);
            write_temp("t10k-images-idx3-ubyte", "not read", 8);
        }
        KN_CHECK(kn_images_read(temp_path(""), "test", &im));
        KN_CHECK(im.count == COUNT && im.rows == SIDE && im.cols == SIDE);
        for (int i = 0; i < COUNT; i++)
            KN_CHECK(im.label[i] == i && im.pixel[i * PIXELS + 8] == 20 * i);
        KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] > before);
        kn_images_free(&im);
        KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before);
    }
    REFUSED(kn_images_read(temp_path(""), "train", &im), "train-images-idx3-ubyte.gz");
    REFUSED(kn_images_read(temp_path(""), "tset", &im),
            "no split 'tset'; splits are train and test");
}

KN_TEST(mnist, hostile_headers)
{
    static const struct {
        int at, value; /* one byte of the images' header changed; at < 0: of the labels' */
        const char *says;
    } cases[] = {
        { 3, 1, "no idx file of images: magic 0x00000801" },
        { 0, 0x1f, "no idx file of images" },
        { 7, 0, "gives 0 for dimension 1" },
        { 15, 0, "gives 0 for dimension 3" },
        { 4, 0x80, "promises 19327352922 bytes" }, /* 2^31 + 10 images */
        { 8, 1, "gives 16777219 for dimension 2" },
        { 7, 11, "is cut short (9 bytes are missing)" },
        { 7, 9, "holds more bytes than its header says" },
        { 15, 4, "is cut short" },
        { -3, 3, "no idx file of labels: magic 0x00000803" },
        { -7, 9, "has 9 labels for 10 images" },
        { -12, 10, "label 4 is 10; labels are 0 to 9" },
    };
    unsigned char images[IMAGE_BYTES], labels[LABEL_BYTES];
    int64_t before = kn_ledger_read().live[KN_MEM_DATA];
    kn_images im;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        make_idx(images, labels);
        if (cases[i].at >= 0)
            images[cases[i].at] = (unsigned char)cases[i].value;
        else
            labels[-cases[i].at] = (unsigned char)cases[i].value;
        write_both(images, sizeof images, labels, sizeof labels);
        KN_CHECK(!kn_images_read(temp_path(""), "test", &im), "case %zu is taken", i);
        KN_CHECK(im.pixel == NULL && im.label == NULL);
        KN_CHECK_ERROR(cases[i].says);
        KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before, "case %zu leaks", i);
    }
    make_idx(images, labels);
    labels[7] = 11;
    write_both(images, sizeof images, labels, sizeof labels);
    REFUSED(kn_images_read(temp_path(""), "test", &im), "has 11 labels for 10 images");
}

/* Cut at every byte, and one byte changed at every place: an error, or (changed bytes that gzip
 * does not protect: file name flags, time) the same images; never a crash or other images. */
KN_TEST(mnist, truncated_and_flipped_files)
{
    unsigned char images[IMAGE_BYTES], labels[LABEL_BYTES], packed[512];
    kn_images im;
    make_idx(images, labels);
    size_t n = gzip(images, sizeof images, packed, sizeof packed);
    write_both(images, sizeof images, labels, sizeof labels);
    for (size_t i = 0; i < n; i++) {
        write_temp("t10k-images-idx3-ubyte.gz", packed, i);
        KN_CHECK(!kn_images_read(temp_path(""), "test", &im), "%zu of %zu bytes are taken", i, n);
        KN_CHECK(!kn_ok());
        kn_clear_error();
    }
    for (size_t i = 0; i < n; i++) {
        packed[i] ^= 0x15;
        write_temp("t10k-images-idx3-ubyte.gz", packed, n);
        bool ok = kn_images_read(temp_path(""), "test", &im);
        KN_CHECK(ok == kn_ok());
        KN_CHECK(!ok || (i < 10 && memcmp(im.pixel, images + 16, COUNT * PIXELS) == 0),
                 "byte %zu changes the images unnoticed", i);
        kn_images_free(&im);
        kn_clear_error();
        packed[i] ^= 0x15;
    }
    remove(temp_path("t10k-images-idx3-ubyte.gz"));
    for (size_t i = 0; i < sizeof images; i++) {
        write_both(images, i, labels, sizeof labels);
        KN_CHECK(!kn_images_read(temp_path(""), "test", &im), "%zu bytes of images are taken", i);
        KN_CHECK_ERROR("images-idx3-ubyte");
    }
    for (size_t i = 0; i < sizeof labels; i++) {
        write_both(images, sizeof images, labels, i);
        KN_CHECK(!kn_images_read(temp_path(""), "test", &im), "%zu bytes of labels are taken", i);
        KN_CHECK_ERROR("labels-idx1-ubyte");
    }
}

/* Every type of element, in any number of dims. */
KN_TEST(mnist, idx_files)
{
    static const struct {
        unsigned char file[32];
        size_t size;
        kn_dtype dtype;
        int dims;
        double last;
        const char *error;
    } cases[] = {
        { { 0, 0, 8, 1, 0, 0, 0, 2, 5, 200 }, 10, KN_U8, 1, 200, NULL },
        { { 0, 0, 9, 1, 0, 0, 0, 2, 5, 200 }, 10, KN_I8, 1, -56, NULL },
        { { 0, 0, 11, 2, 0, 0, 0, 1, 0, 0, 0, 1, 1, 2 }, 14, KN_I16, 2, 258, NULL },
        { { 0, 0, 12, 1, 0, 0, 0, 1, 255, 255, 255, 254 }, 12, KN_I32, 1, -2, NULL },
        { { 0, 0, 13, 1, 0, 0, 0, 1, 0xc0, 0x20, 0, 0 }, 12, KN_F32, 1, -2.5, NULL },
        { { 0, 0, 14, 1, 0, 0, 0, 1, 0xc0, 4 }, 16, KN_F64, 1, -2.5, NULL },
        { { 0, 0, 10, 1, 0, 0, 0, 1, 0 }, 9, KN_U8, 1, 0, "it begins with 0x00000a01" },
        { { 0, 0, 8, 0, 1 }, 5, KN_U8, 0, 0, "it begins with 0x00000800" },
        { { 0, 0, 8, 9 }, 32, KN_U8, 9, 0, "has 9 dims; at most 8" },
        { { 0, 0, 14, 3, 255, 255, 255, 255, 0, 255, 255, 255, 0, 255, 255, 255 },
          16,
          KN_F64,
          3,
          0,
          "promises 18446744073709551615 bytes" },
        { { 0, 0, 12, 1, 0, 0, 0, 1, 0, 0, 0 }, 11, KN_I32, 1, 0, "cut short (1 bytes" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        IN_SCOPE;
        kn_tensor *t = kn_idx_read(write_temp("some.idx", cases[i].file, cases[i].size));
        if (cases[i].error) {
            KN_CHECK(!t, "case %zu", i);
            KN_CHECK_ERROR(cases[i].error);
        } else {
            KN_CHECK(t && kn_dtype_of(t) == cases[i].dtype && kn_ndim(t) == cases[i].dims);
            kn_array one = kn_array_of(t);
            const char *last =
                (char *)one.data + (size_t)(kn_numel(t) - 1) * kn_dtype_size(one.dtype);
            KN_CHECK(kn_element(one.dtype, last) == cases[i].last, "case %zu", i);
        }
    }
    REFUSED(kn_idx_read(temp_path("")), "is not a regular file");
    /* of fewer bytes than it is said to have, as one that is cut while it is read */
    static const char shorter[] = "/sys/kernel/mm/transparent_hugepage/enabled";
    KN_CHECK(access(shorter, R_OK) != 0 || !kn_idx_read(shorter));
    kn_clear_error();
    REFUSED(kn_idx_read(temp_path("none")), "cannot open");
}

/* Memory for the elements that a header promises isn't used before they come. */
KN_TEST(mnist, promises_of_a_short_file)
{
    const unsigned char header[] = { 0, 0, 14, 1, 2, 0, 0, 0 }; /* 2^25 f64, 256 MiB */
    const char *path = write_temp("short.idx", header, sizeof header);
    struct rusage before, after;
    KN_CHECK(truncate(path, 1 << 18) == 0); /* gzipped it could hold so many */
    getrusage(RUSAGE_SELF, &before);
    kn_scope scope = kn_scope_begin();
    REFUSED(kn_idx_read(path), "is cut short");
    kn_scope_end(scope);
    getrusage(RUSAGE_SELF, &after);
    KN_CHECK(after.ru_maxrss - before.ru_maxrss < 128 << 10, "%ld KiB more",
             after.ru_maxrss - before.ru_maxrss);
}

KN_TEST(mnist, real_files)
{
    kn_images im;
    OWNED_HOST char *folder = kn_data_find_quietly("mnist");
    if (!folder)
        KN_SKIP("MNIST is not on this machine (KNAP_DATA)");
    if (GZIPPED == 1) {
        kn_host_free(folder);
        KN_SKIP("its files are gzipped, and there is no zlib");
    }
    static const struct {
        const char *split;
        int64_t count, first_label, zeros;
    } halves[] = { { "train", 60000, 5, 5923 }, { "test", 10000, 7, 980 } };
    for (int h = 0; h < 2; h++) {
        int64_t zeros = 0;
        KN_CHECK(kn_images_read(folder, halves[h].split, &im));
        KN_CHECK(im.count == halves[h].count && im.rows == 28 && im.cols == 28);
        KN_CHECK(im.label[0] == halves[h].first_label);
        for (int64_t i = 0; i < im.count; i++)
            zeros += im.label[i] == 0;
        KN_CHECK(zeros == halves[h].zeros);
        kn_images_free(&im);
    }
}
