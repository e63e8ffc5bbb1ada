/* tests/data/loader_test.c: the batches that loaders of images and texts hand to each rank, in
 * order and shuffled. */
#include "autograd/operations.h"
#include "tests/data/owned.h"
#include "tests/models/owned.h"
#include "tests/owned.h"
#include "tests/data/allocations.h"
#include "data/mnist.h"
#include "models/text.h"
#include "tests/data/idx.h"

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
    IN_SCOPE;
    kn_batch b = kn_next(l);
    KN_CHECK_OK();
    KN_CHECK(kn_ndim(b.x) == 2 && kn_size(b.x, 0) == batch && kn_size(b.x, 1) == PIXELS);
    KN_CHECK(kn_dtype_of(b.x) == KN_F32 && kn_dtype_of(b.y) == KN_I64 && kn_numel(b.y) == batch);
    KN_CHECK(kn_to_host(b.y, y, (size_t)batch * sizeof *y));
    KN_CHECK(kn_to_host(b.x, x, (size_t)(batch * PIXELS) * sizeof *x));
    for (int64_t r = 0; r < batch; r++)
        for (int64_t j = 0; j < PIXELS; j++)
            KN_CHECK(x[r * PIXELS + j] == (float)(20 * y[r]) / 255.0f);
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
}

KN_TEST(loader, every_epoch_is_a_permutation)
{
    int64_t y[2], order[3][COUNT];
    OWNED_LOADER kn_loader *l = small_loader(NULL, 2, true);
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
}

/* Round k of rank r of 2 is micro-batch 2 k + r of one process; the same for texts with accum. */
static int rank_sees_its_share(kn_comm *world, void *arg)
{
    int64_t y[2], whole[2];
    int rank = kn_rank(world), bad = 0;
    OWNED_LOADER kn_loader *mine =
        kn_mnist("test", world, .batch = 2, .shuffle = true, .data = arg);
    OWNED_LOADER kn_loader *all = kn_mnist("test", NULL, .batch = 2, .shuffle = true, .data = arg);
    OWNED_TOKENIZER kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    OWNED_TEXT kn_text *text =
        kn_text_encode(tok, "The quick brown fox jumps over the lazy dog.", 44);
    OWNED_LOADER kn_loader *ours = kn_text_loader(text, world, .batch = 2, .ctx = 4, .accum = 2);
    OWNED_LOADER kn_loader *full = kn_text_loader(text, NULL, .batch = 2, .ctx = 4, .accum = 4);
    for (int64_t k = 0; k < 8 && kn_ok(); k++) {
        int64_t a[8], b[8];
        IN_SCOPE;
        kn_loader_seek(all, 2 * k + rank);
        kn_loader_seek(full, 2 * k + rank);
        bad += !kn_to_host(kn_next(mine).y, y, sizeof y) ||
               !kn_to_host(kn_next(all).y, whole, sizeof whole);
        bad += memcmp(y, whole, sizeof y) != 0;
        bad +=
            !kn_to_host(kn_next(ours).x, a, sizeof a) || !kn_to_host(kn_next(full).x, b, sizeof b);
        bad += memcmp(a, b, sizeof a) != 0;
    }
    bad += !kn_ok();
    return bad;
}

KN_TEST(loader, ranks_share_what_one_process_sees)
{
    kn_loader_free(small_loader(NULL, 1, false)); /* writes the files */
    KN_CHECK(kn_spawn_threads(2, rank_sees_its_share, (void *)(uintptr_t)temp_path("")) == 0);
}

/* Pixels as other floats, on threads, round as a cast does. */
KN_TEST(loader, dtypes_of_pixels)
{
    static const kn_dtype dtypes[] = { KN_BF16, KN_F16, KN_F64 };
    double wide[4 * PIXELS], cast[4 * PIXELS];
    OWNED_LOADER kn_loader *plain = small_loader(NULL, 4, false);
    for (size_t i = 0; i < 3; i++) {
        IN_SCOPE;
        OWNED_LOADER kn_loader *l = kn_mnist("test", NULL, .batch = 4, .data = temp_path(""),
                                             .dtype = dtypes[i], .workers = (int)i);
        kn_loader_seek(plain, 0);
        kn_tensor *x = kn_next(l).x, *f32 = kn_next(plain).x;
        KN_CHECK(x && f32 && kn_dtype_of(x) == dtypes[i]);
        KN_CHECK(kn_to_host(kn_cast(x, KN_F64), wide, sizeof wide));
        KN_CHECK(kn_to_host(kn_cast(kn_cast(f32, dtypes[i]), KN_F64), cast, sizeof cast));
        KN_CHECK(memcmp(wide, cast, sizeof wide) == 0, "%s", kn_dtype_name(dtypes[i]));
    }
}

/* Threads that fill windows of a text draw those that one would. */
KN_TEST(loader, texts_on_threads)
{
    int64_t one[3][2 * 8], x[2 * 8];
    OWNED_TOKENIZER kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    OWNED_TEXT kn_text *text =
        kn_text_encode(tok, "The quick brown fox jumps over the lazy dog.", 44);
    for (int workers = 0; workers < 3; workers++) {
        OWNED_LOADER kn_loader *l = kn_text_loader(text, NULL, .batch = 2, .ctx = 8, .seed = 4,
                                                   .accum = 2, .workers = workers);
        for (int k = 0; k < 3; k++) {
            IN_SCOPE;
            kn_batch b = kn_next(l);
            KN_CHECK(b.x && kn_to_host(b.x, workers ? x : one[k], sizeof x));
            KN_CHECK(!workers || memcmp(x, one[k], sizeof x) == 0);
            KN_CHECK(kn_to_host(b.y, x, sizeof x) && x[0] == one[k][1] && x[8] == one[k][9]);
        }
    }
    REFUSED(kn_text_loader(text, NULL, .batch = 2, .ctx = 8, .shuffle = true),
            "windows are drawn from the whole text; .shuffle and .tail don't apply");
}

KN_TEST(loader, errors)
{
    REFUSED(small_loader(NULL, 0, false),
            "kn_mnist: .batch must lie between 1 and the 10 samples there are, not 0");
    REFUSED(small_loader(NULL, 11, false), "not 11");
    REFUSED(kn_mnist("test", NULL, .batch = 1, .data = temp_path("nothing")),
            "there is no data set, file or folder");
    REFUSED(kn_mnist("test", NULL, .batch = 1, .data = temp_path(""), .dtype = KN_I64),
            "dtype i64 is no float");
    REFUSED(kn_next(NULL).x, "the loader is NULL");
    kn_loader *l = small_loader(NULL, 2, false);
    kn_fail("an earlier error");
    KN_CHECK(kn_next(l).x == NULL && kn_loader_round(l) == 0);
    KN_CHECK_ERROR("an earlier error");
    kn_loader_free(l);
    OWNED_TOKENIZER kn_tokenizer *tok = kn_tokenizer_create("byte", NULL, 0);
    OWNED_TEXT kn_text *text = kn_text_encode(tok, "0123456789", 10);
    REFUSED(kn_text_loader(text, NULL, .batch = 1, .ctx = 9), "a context of 9 tokens");
    REFUSED(kn_text_loader(text, NULL, .batch = 0, .ctx = 1),
            "kn_text_loader: .batch must lie between 1 and");
}

static kn_loader *of_mnist(const char *folder, kn_image_set **set)
{
    return kn_mnist("test", NULL, .batch = 2, .data = folder);
}

KN_TEST(loader, every_allocation_failing)
{
    kn_loader_free(small_loader(NULL, 1, false)); /* writes the files */
    fail_each_allocation(of_mnist, temp_path(""), 100);
}
