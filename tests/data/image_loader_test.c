/* tests/data/image_loader_test.c: batches of images: the same samples whatever the ranks, threads
 * and the round from which a run goes on; images mixed in pairs. */
#include "data/images_internal.h"
#include "tests/data/owned.h"
#include "tests/owned.h"
#include "tests/data/allocations.h"
#include "tests/data/pictures.h"

#include <math.h>

enum { EACH = 5, SAMPLES = 5 * EACH, MOST = 8, VALUES = 3 * 32 * 32 };

static const kn_augment usual = {
    .random_crop = { { 32 }, 4, false },
    .random_horizontal_flip = 0.5,
    .color_jitter = { 0.4, 0.4, 0.4, 0.1 },
    .normalize = { { 0.5, 0.4, 0.3 }, { 0.2, 0.3, 0.4 } },
    .random_erasing = { .p = 0.5, .random = true },
};

static kn_loader *loader_of(const kn_image_set *s, const kn_comm *world, int64_t batch,
                            int64_t accum, int workers, bool mix)
{
    return kn_image_loader(s, world, .batch = batch, .accum = accum, .shuffle = true, .seed = 11,
                           .workers = workers, .augment = usual, .mixup_alpha = mix ? 0.3 : 0,
                           .cutmix_alpha = mix ? 1 : 0);
}

/* Takes a batch; its bytes, labels behind the images. */
static bool take(kn_loader *l, int64_t batch, bool mix, float *x)
{
    IN_SCOPE;
    kn_batch b = kn_next(l);
    bool ok = b.x && kn_to_host(b.x, x, (size_t)(batch * VALUES) * sizeof *x) &&
              kn_to_host(mix ? b.y : kn_cast(b.y, KN_F32), x + batch * VALUES,
                         (size_t)(batch * (mix ? 10 : 1)) * sizeof *x);
    return ok;
}

enum { ROOM = MOST * (VALUES + 10) };

KN_TEST(image_loader, any_number_of_workers)
{
    static float one[6][ROOM], other[ROOM];
    OWNED_SET kn_image_set *s = kn_image_set_open(write_cifar10(EACH), "train");
    for (int mix = 0; mix < 2; mix++)
        for (int workers = 0; workers < 4; workers++) {
            OWNED_LOADER kn_loader *l = loader_of(s, NULL, 6, 1, workers, mix);
            for (int k = 0; k < 6; k++) {
                memset(workers ? other : one[k], 0, sizeof other);
                KN_CHECK(take(l, 6, mix, workers ? other : one[k]));
                KN_CHECK(!workers || memcmp(other, one[k], sizeof other) == 0, "%d workers",
                         workers);
            }
            KN_CHECK(kn_loader_read_stats(l).waiting <= 1);
        }
}

/* A sample is what kn_augment_image makes of its image with its numbers. */
KN_TEST(image_loader, samples_are_functions_of_seed_epoch_and_index)
{
    static float x[ROOM], y[VALUES];
    OWNED_SET kn_image_set *s = kn_image_set_open(write_cifar10(EACH), "train");
    OWNED_LOADER kn_loader *l = kn_image_loader(s, NULL, .batch = 5, .seed = 11, .augment = usual);
    for (int k = 0; k < 10; k++) {
        KN_CHECK(take(l, 5, false, x));
        for (int64_t r = 0; r < 5; r++) {
            IN_SCOPE;
            int64_t index = (5 * k + r) % SAMPLES, epoch = (5 * k + r) / SAMPLES;
            kn_tensor *t = kn_augment_image(kn_image_set_image(s, index), .augment = usual,
                                            .seed = 11, .epoch = epoch, .index = index);
            KN_CHECK(kn_to_host(t, y, sizeof y));
            KN_CHECK(memcmp(y, x + r * VALUES, sizeof y) == 0);
            KN_CHECK(x[5 * VALUES + r] == (float)(index % 10));
        }
    }
}

/* ---- ranks ----------------------------------------------------------------------------------- */

/* Round k of rank r is micro-batch k N + r of one process, also behind a jump, and also where
 * images are mixed. */
static int shares(kn_comm *world, void *arg)
{
    const kn_image_set *s = arg;
    static _Thread_local float x[ROOM], y[ROOM];
    int64_t ranks = kn_comm_size(world), bad = 0;
    for (int mix = 0; mix < 2; mix++) {
        OWNED_LOADER kn_loader *mine = loader_of(s, world, 4, 4 / ranks, 1, mix);
        OWNED_LOADER kn_loader *all = loader_of(s, NULL, 4, 4, 0, mix);
        for (int64_t k = 8; k-- > 0;) {
            kn_loader_seek(mine, k);
            kn_loader_seek(all, k * ranks + kn_rank(world));
            bad += !take(mine, 4, mix, x) || !take(all, 4, mix, y) ||
                   memcmp(x, y, (size_t)(4 * VALUES + 4) * sizeof *x) != 0;
        }
    }
    return (int)bad + !kn_ok();
}

KN_TEST(image_loader, ranks_share_what_one_process_sees)
{
    OWNED_SET kn_image_set *s = kn_image_set_open(write_cifar10(EACH), "train");
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        KN_CHECK(kn_spawn_threads(ranks, shares, s) == 0, "%d ranks", ranks);
}

/* Twice as large batches hold the same pairs. */
KN_TEST(image_loader, pairs_do_not_depend_on_the_batch)
{
    static float small[2][ROOM], large[ROOM];
    OWNED_SET kn_image_set *s = kn_image_set_open(write_cifar10(EACH), "train");
    OWNED_LOADER kn_loader *a = loader_of(s, NULL, 4, 2, 0, true),
                           *b = loader_of(s, NULL, 8, 1, 2, true);
    for (int k = 0; k < 7; k++) {
        KN_CHECK(take(a, 4, true, small[0]) && take(a, 4, true, small[1]) &&
                 take(b, 8, true, large));
        for (int h = 0; h < 2; h++) {
            KN_CHECK(memcmp(small[h], large + h * 4 * VALUES, 4 * VALUES * sizeof(float)) == 0);
            KN_CHECK(memcmp(small[h] + 4 * VALUES, large + 8 * VALUES + h * 40,
                            40 * sizeof(float)) == 0);
        }
    }
}

/* ---- mixing ---------------------------------------------------------------------------------- */

typedef struct mixed {
    double sum, squares; /* of lambda */
    int cuts;
} mixed;

/* Two images of ones and zeros: what they become tells lambda, which the labels must tell as well.
 */
static void mix_one(const kn_mix *m, uint64_t stream, mixed *out)
{
    float a[VALUES], b[VALUES], one[2] = { 1, 0 }, two[2] = { 0, 1 };
    kn_data_sample s = { .seed = 5, .stream = stream };
    double sum = 0;
    bool whole = true;
    for (int i = 0; i < VALUES; i++)
        a[i] = 1, b[i] = 0;
    kn_mix_pair(m, &s, a, b, one, two);
    for (int i = 0; i < VALUES; i++) {
        KN_CHECK(fabs((double)(a[i] + b[i]) - 1) < 1e-6);
        sum += (double)a[i] / VALUES;
        whole &= a[i] == 0 || a[i] == 1;
    }
    KN_CHECK(fabs((double)one[0] - sum) < 1e-4 && fabs((double)one[1] - 1 + sum) < 1e-4);
    KN_CHECK(fabs((double)two[1] - sum) < 1e-4 && fabs((double)two[0] - 1 + sum) < 1e-4);
    out->sum += sum;
    out->squares += sum * sum;
    out->cuts += whole;
}

KN_TEST(image_loader, lambdas)
{
    static const struct {
        double mixup, cutmix;
    } cases[] = { { 0.2, 0 }, { 1, 0 }, { 8, 0 }, { 0, 1 }, { 0.8, 1 }, { 1e-3, 0 }, { 1e4, 0 } };
    enum { TIMES = 400 };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const kn_mix m = { cases[i].mixup, cases[i].cutmix, KN_F32, 3, 32, 32, 2 };
        mixed all = { 0 };
        for (uint64_t stream = 0; stream < TIMES; stream++)
            mix_one(&m, stream, &all);
        double mean = all.sum / TIMES, variance = all.squares / TIMES - mean * mean;
        double alpha = cases[i].mixup,
               wanted = 1 / (4 * (2 * alpha + 1)); /* of Beta(alpha, alpha) */
        if (cases[i].cutmix == 0) {
            KN_CHECK(fabs(mean - 0.5) < 0.08 && fabs(variance - wanted) < 0.02 + 0.1 * wanted,
                     "alpha %g: mean %g, variance %g, not %g", alpha, mean, variance, wanted);
        } else
            KN_CHECK(mean > 0.5 && mean < 0.85, "case %zu: mean %g", i, mean);
        if (cases[i].mixup > 0 && cases[i].cutmix > 0)
            KN_CHECK(all.cuts > 0.4 * TIMES && all.cuts < 0.6 * TIMES, "%d rectangles", all.cuts);
        else if (cases[i].cutmix > 0)
            KN_CHECK(all.cuts == TIMES);
    }
}

/* Labels of a batch are probabilities: each row's sum is 1, at most two classes are left. */
KN_TEST(image_loader, mixed_labels)
{
    static float x[ROOM];
    OWNED_SET kn_image_set *s = kn_image_set_open(write_cifar10(EACH), "train");
    OWNED_LOADER kn_loader *l = loader_of(s, NULL, 6, 1, 0, true);
    for (int k = 0; k < 4; k++) {
        KN_CHECK(take(l, 6, true, x));
        for (int r = 0; r < 6; r++) {
            double sum = 0;
            int classes = 0;
            for (int c = 0; c < 10; c++) {
                sum += (double)x[6 * VALUES + 10 * r + c];
                classes += x[6 * VALUES + 10 * r + c] != 0;
            }
            KN_CHECK(fabs(sum - 1) < 1e-5 && classes >= 1 && classes <= 2);
        }
    }
}

/* ---- errors ---------------------------------------------------------------------------------- */

KN_TEST(image_loader, errors)
{
    OWNED_SET kn_image_set *s = kn_image_set_open(write_cifar10(EACH), "train");
    REFUSED(kn_image_loader(NULL, NULL, .batch = 2), "kn_image_loader: the set of images is NULL");
    REFUSED(kn_image_loader(s, NULL, .batch = 0),
            "kn_image_loader: .batch must lie between 1 and the 25 samples");
    REFUSED(kn_image_loader(s, NULL, .batch = 3, .mixup_alpha = 1),
            ".batch is 3, but images are mixed in pairs; make it even");
    REFUSED(kn_image_loader(s, NULL, .batch = 2, .mixup_alpha = -1), ".mixup_alpha is -1");
    REFUSED(kn_image_loader(s, NULL, .batch = 2, .cutmix_alpha = NAN), ".cutmix_alpha nan");
    REFUSED(kn_image_loader(s, NULL, .batch = 2, .cutmix_alpha = 1, .dtype = KN_U8),
            "images of u8 can't be mixed");
    REFUSED(kn_image_loader(s, NULL, .batch = 2, .dtype = KN_I64),
            "kn_image_loader: .dtype is i64");
    REFUSED(kn_image_loader(s, NULL, .batch = 2, .workers = 100000),
            ".workers must lie between 0 and 256");
    OWNED_LOADER kn_loader *l =
        kn_image_loader(s, NULL, .batch = 2, .augment = { .random_crop = { { 40 } } });
    IN_SCOPE;
    KN_CHECK(l && !kn_next(l).x);
    KN_CHECK_ERROR("an image of 32 x 32 pixels is smaller than the .random_crop of 40 x 40");
}

static kn_loader *of_cifar(const char *folder, kn_image_set **set)
{
    *set = kn_image_set_open(folder, "train");
    return *set ? loader_of(*set, NULL, 2, 1, 0, true) : NULL;
}

KN_TEST(image_loader, every_allocation_failing)
{
    const char *folder = write_cifar10(EACH);
    fail_each_allocation(of_cifar, folder, 200);
}
