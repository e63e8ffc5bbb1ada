/* tests/models/mnist_test.c: idx files, also hostile ones; what loaders hand to each rank. */
#include "models/mnist.h"
#include "models/text.h"
#include "tests/models/temp.h"

#include <sys/stat.h>
#include <zlib.h>

enum {
    COUNT = 10,
    SIDE = 3,
    PIXELS = SIDE * SIDE,
    IMAGE_BYTES = 16 + COUNT * PIXELS,
    LABEL_BYTES = 8 + COUNT
};

/* Ten images of 3 x 3; every pixel of image i is 20 i, its label is i. */
static void make_idx(unsigned char *images, unsigned char *labels)
{
    memset(images, 0, 16);
    memset(labels, 0, 8);
    images[2] = 8;
    images[3] = 3;
    images[7] = COUNT;
    images[11] = images[15] = SIDE;
    labels[2] = 8;
    labels[3] = 1;
    labels[7] = COUNT;
    for (int i = 0; i < COUNT; i++) {
        memset(images + 16 + i * PIXELS, 20 * i, PIXELS);
        labels[8 + i] = (unsigned char)i;
    }
}

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

static void write_both(const unsigned char *images, size_t n, const unsigned char *labels, size_t m)
{
    write_temp("t10k-images-idx3-ubyte", images, n);
    write_temp("t10k-labels-idx1-ubyte", labels, m);
}

KN_TEST(mnist, plain_and_gzipped)
{
    unsigned char images[IMAGE_BYTES], labels[LABEL_BYTES], packed[512];
    kn_images im;
    int64_t before = kn_ledger_read().live[KN_MEM_DATA];
    make_idx(images, labels);
    for (int gz = 0; gz < 2; gz++) {
        write_both(images, sizeof images, labels, sizeof labels);
        if (gz) {
            size_t n = gzip(images, sizeof images, packed, sizeof packed);
            write_temp("t10k-images-idx3-ubyte.gz", packed, n);
            write_temp("t10k-images-idx3-ubyte", "not read", 8);
        }
        KN_CHECK(kn_images_read(temp_path(""), "test", &im), "%s", kn_error());
        KN_CHECK(im.count == COUNT && im.rows == SIDE && im.cols == SIDE);
        for (int i = 0; i < COUNT; i++)
            KN_CHECK(im.label[i] == i && im.pixel[i * PIXELS + 8] == 20 * i);
        KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] > before);
        kn_images_free(&im);
        KN_CHECK(kn_ledger_read().live[KN_MEM_DATA] == before);
    }
    KN_CHECK(!kn_images_read(temp_path(""), "train", &im));
    KN_CHECK_ERROR("train-images-idx3-ubyte.gz");
    KN_CHECK(!kn_images_read(temp_path(""), "tset", &im));
    KN_CHECK_ERROR("no split 'tset'; splits are train and test");
    remove_temp();
}

KN_TEST(mnist, hostile_headers)
{
    static const struct {
        int at, value; /* one byte of the images' header changed; at < 0: of the labels' */
        const char *says;
    } cases[] = {
        { 3, 1, "no idx file of images: magic 0x00000801" },
        { 0, 0x1f, "no idx file of images" },
        { 7, 0, "says 0 for dimension 1" },
        { 15, 0, "says 0 for dimension 3" },
        { 4, 0x80, "promises 19327352922 bytes" }, /* 2^31 + 10 images */
        { 8, 1, "says 16777219 for dimension 2" },
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
    KN_CHECK(!kn_images_read(temp_path(""), "test", &im));
    KN_CHECK_ERROR("has 11 labels for 10 images");
    remove_temp();
}

/* Cut at every byte, and one byte changed at every place: an error, or (changed bytes that gzip does
 * not protect: file name flags, time) the same images; never a crash or other images. */
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
    remove_temp();
}

KN_TEST(mnist, real_files)
{
    kn_images im;
    char *folder = kn_data_find_quietly("mnist");
    if (!folder)
        KN_SKIP("MNIST is not on this machine (KNAP_DATA)");
    static const struct {
        const char *split;
        int64_t count, first_label, zeros;
    } halves[] = { { "train", 60000, 5, 5923 }, { "test", 10000, 7, 980 } };
    for (int h = 0; h < 2; h++) {
        int64_t zeros = 0;
        KN_CHECK(kn_images_read(folder, halves[h].split, &im), "%s", kn_error());
        KN_CHECK(im.count == halves[h].count && im.rows == 28 && im.cols == 28);
        KN_CHECK(im.label[0] == halves[h].first_label);
        for (int64_t i = 0; i < im.count; i++)
            zeros += im.label[i] == 0;
        KN_CHECK(zeros == halves[h].zeros);
        kn_images_free(&im);
    }
    kn_host_free(folder);
}

/* ---- loaders ------------------------------------------------------------------------------- */

static kn_loader *small_loader(const kn_comm *world, int64_t batch, bool shuffle)
{
    unsigned char images[IMAGE_BYTES], labels[LABEL_BYTES];
    make_idx(images, labels);
    write_both(images, sizeof images, labels, sizeof labels);
    return kn_mnist("test", world, .batch = batch, .shuffle = shuffle, .seed = 3,
                    .data = temp_path(""));
}

/* Takes a batch and copies its labels; checks that x goes with y. */
static void take(kn_loader *l, int64_t batch, int64_t *y)
{
    float x[COUNT * PIXELS];
    kn_scope scope = kn_scope_begin();
    kn_batch b = kn_next(l);
    KN_CHECK_OK();
    KN_CHECK(kn_ndim(b.x) == 2 && kn_size(b.x, 0) == batch && kn_size(b.x, 1) == PIXELS);
    KN_CHECK(kn_dtype_of(b.x) == KN_F32 && kn_dtype_of(b.y) == KN_I64 && kn_numel(b.y) == batch);
    KN_CHECK(kn_to_host(b.y, y, (size_t)batch * sizeof *y));
    KN_CHECK(kn_to_host(b.x, x, (size_t)(batch * PIXELS) * sizeof *x));
    for (int64_t r = 0; r < batch; r++)
        for (int64_t j = 0; j < PIXELS; j++)
            KN_CHECK(x[r * PIXELS + j] == (float)(20 * y[r]) / 255.0f);
    kn_scope_end(scope);
}

KN_TEST(loader, in_order_and_around)
{
    int64_t y[4];
    int64_t live = kn_live_tensors();
    kn_loader *l = small_loader(NULL, 4, false);
    KN_CHECK_OK();
    KN_CHECK(kn_loader_rounds(l) == 2 && kn_loader_round(l) == 0);
    for (int round = 0; round < 6; round++) {
        take(l, 4, y);
        for (int r = 0; r < 4; r++)
            KN_CHECK(y[r] == (4 * round + r) % COUNT);
    }
    KN_CHECK(kn_loader_round(l) == 6);
    kn_loader_seek(l, 1);
    take(l, 4, y);
    KN_CHECK(y[0] == 4);
    kn_loader_free(l);
    KN_CHECK(kn_live_tensors() == live);
    remove_temp();
}

KN_TEST(loader, every_epoch_is_a_permutation)
{
    int64_t y[2], order[3][COUNT];
    kn_loader *l = small_loader(NULL, 2, true);
    for (int e = 0; e < 3; e++) {
        int seen = 0;
        for (int i = 0; i < COUNT; i += 2) {
            take(l, 2, y);
            order[e][i] = y[0];
            order[e][i + 1] = y[1];
            seen |= 1 << y[0] | 1 << y[1];
        }
        KN_CHECK(seen == (1 << COUNT) - 1, "epoch %d", e);
    }
    KN_CHECK(memcmp(order[0], order[1], sizeof order[0]) != 0);
    KN_CHECK(memcmp(order[1], order[2], sizeof order[0]) != 0);
    kn_loader_free(l);
    remove_temp();
}

/* Round k of rank r of 2 is micro-batch 2 k + r of one process; the same for texts with accum. */
static int rank_sees_its_share(kn_comm *world, void *arg)
{
    (void)arg;
    int64_t y[2], whole[2];
    int rank = kn_rank(world), bad = 0;
    kn_loader *mine = kn_mnist("test", world, .batch = 2, .shuffle = true, .data = arg);
    kn_loader *all = kn_mnist("test", NULL, .batch = 2, .shuffle = true, .data = arg);
    kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    kn_text *text = kn_text_encode(tok, "The quick brown fox jumps over the lazy dog.", 44);
    kn_loader *ours = kn_text_loader(text, world, .batch = 2, .ctx = 4, .accum = 2);
    kn_loader *full = kn_text_loader(text, NULL, .batch = 2, .ctx = 4, .accum = 4);
    for (int64_t k = 0; k < 8 && kn_ok(); k++) {
        int64_t a[8], b[8];
        kn_scope s = kn_scope_begin();
        kn_loader_seek(all, 2 * k + rank);
        kn_loader_seek(full, 2 * k + rank);
        bad += !kn_to_host(kn_next(mine).y, y, sizeof y) ||
               !kn_to_host(kn_next(all).y, whole, sizeof whole);
        bad += memcmp(y, whole, sizeof y) != 0;
        bad +=
            !kn_to_host(kn_next(ours).x, a, sizeof a) || !kn_to_host(kn_next(full).x, b, sizeof b);
        bad += memcmp(a, b, sizeof a) != 0;
        kn_scope_end(s);
    }
    bad += !kn_ok();
    kn_loader_free(mine);
    kn_loader_free(all);
    kn_loader_free(ours);
    kn_loader_free(full);
    kn_text_free(text);
    kn_tokenizer_free(tok);
    return bad;
}

KN_TEST(loader, ranks_share_what_one_process_sees)
{
    kn_loader_free(small_loader(NULL, 1, false)); /* writes the files */
    KN_CHECK(kn_spawn_threads(2, rank_sees_its_share, (void *)(uintptr_t)temp_path("")) == 0);
    remove_temp();
}

KN_TEST(loader, errors)
{
    KN_CHECK(!small_loader(NULL, 0, false));
    KN_CHECK_ERROR("kn_mnist: .batch must lie between 1 and the 10 samples there are, not 0");
    KN_CHECK(!small_loader(NULL, 11, false));
    KN_CHECK_ERROR("not 11");
    KN_CHECK(!kn_mnist("test", NULL, .batch = 1, .data = temp_path("nothing")));
    KN_CHECK_ERROR("there is no data set or file");
    KN_CHECK(!kn_mnist("test", NULL, .batch = 1, .data = temp_path(""), .dtype = KN_I64));
    KN_CHECK_ERROR("dtype i64 is no float");
    KN_CHECK(kn_next(NULL).x == NULL);
    KN_CHECK_ERROR("the loader is NULL");
    kn_loader *l = small_loader(NULL, 2, false);
    kn_fail("an earlier error");
    KN_CHECK(kn_next(l).x == NULL && kn_loader_round(l) == 0);
    KN_CHECK_ERROR("an earlier error");
    kn_loader_free(l);
    kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    kn_text *text = kn_text_encode(tok, "0123456789", 10);
    KN_CHECK(!kn_text_loader(text, NULL, .batch = 1, .ctx = 9));
    KN_CHECK_ERROR("a context of 9 tokens");
    KN_CHECK(!kn_text_loader(text, NULL, .batch = 0, .ctx = 1));
    KN_CHECK_ERROR("kn_text_loader: .batch must lie between 1 and");
    kn_text_free(text);
    kn_tokenizer_free(tok);
    remove_temp();
}

KN_TEST(loader, every_allocation_failing)
{
    kn_loader_free(small_loader(NULL, 1, false)); /* writes the files, warms the pool */
    const char *folder = temp_path("");
    for (int64_t n = 1;; n++) {
        kn_test_fail_alloc(n);
        kn_scope s = kn_scope_begin();
        kn_loader *l = kn_mnist("test", NULL, .batch = 2, .data = folder);
        kn_batch b = l ? kn_next(l) : (kn_batch){ 0 };
        bool hit = !kn_ok();
        kn_test_fail_alloc(0);
        KN_CHECK((b.x != NULL) == !hit, "allocation %d", (int)n);
        kn_scope_end(s);
        kn_loader_free(l);
        kn_clear_error();
        if (!hit)
            break;
        KN_CHECK(n < 100);
    }
    remove_temp();
}
