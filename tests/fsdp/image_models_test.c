/* tests/fsdp/image_models_test.c: residual nets and vision transformers over ranks. Each rank's
 * batch norms see its own micro-batches, as the plain reference's do, so that parameters are equal
 * bit for bit in every strategy and layout. */
#include "models/resnet.h"
#include "models/vit.h"
#include "tests/fsdp/matrix.h"

enum { IMAGES = 3, SIDE = 8, CLASSES = 5 };

static bool declare_resnet(void *own)
{
    const kn_resnet_config c = {
        .blocks = { 1, 1 }, .classes = CLASSES, .width = 4, .small_images = true
    };
    return kn_resnet_init(own, c, KN_F32, KN_META);
}

static bool declare_bottlenecks(void *own)
{
    const kn_resnet_config c = {
        .blocks = { 1, 1 }, .classes = CLASSES, .width = 2, .bottleneck = true, .plain_gamma = true
    };
    return kn_resnet_init(own, c, KN_F32, KN_META);
}

static bool declare_cifar(void *own)
{
    const kn_resnet_config c = {
        .blocks = { 1, 1, 1 }, .classes = CLASSES, .width = 3, .cifar = true
    };
    return kn_resnet_init(own, c, KN_F32, KN_META);
}

static bool declare_vit(void *own)
{
    const kn_vit_config c = { .layers = 2,
                              .heads = 2,
                              .embd = 8,
                              .image = SIDE,
                              .patch = 4,
                              .classes = CLASSES,
                              .dropout = 0.1 };
    return kn_vit_init(own, c, KN_F32, KN_META);
}

static kn_tensor *loss(void *own, int step, int micro)
{
    float x[IMAGES * 3 * SIDE * SIDE];
    int64_t y[IMAGES];
    for (int i = 0; i < IMAGES * 3 * SIDE * SIDE; i++)
        x[i] = (float)((i * 37 + micro * 29 + step * 17 + i / 64 * 5) % 101) / 50 - 1;
    for (int i = 0; i < IMAGES; i++)
        y[i] = (i * 2 + micro + step) % CLASSES;
    kn_tensor *images = kn_from(KN_F32, KN_CPU, x, KN_SHAPE(IMAGES, 3, SIDE, SIDE));
    kn_tensor *labels = kn_from(KN_I64, KN_CPU, y, KN_SHAPE(IMAGES));
    return kn_cross_entropy(kn_call(own, images), labels);
}

static const struct {
    bool (*declare)(void *own);
    size_t bytes;
    const char *block;
} kind[] = { { declare_resnet, sizeof(kn_resnet), "resnet_block" },
             { declare_bottlenecks, sizeof(kn_resnet), "resnet_block" },
             { declare_cifar, sizeof(kn_resnet), "resnet_block" },
             { declare_vit, sizeof(kn_vit), "vit_block" } };
enum { KINDS = sizeof kind / sizeof *kind };

/* The setting s of model k, in 2 steps. */
static matrix_spec of_kind(int k, matrix_spec s)
{
    s.model = MATRIX_OWN;
    s.bytes = kind[k].bytes;
    s.declare = kind[k].declare;
    s.loss = loss;
    s.o.wrap_class = s.whole ? NULL : kind[k].block;
    s.steps = 2;
    return s;
}

static void check(int k, matrix_spec s)
{
    s = of_kind(k, s);
    matrix_check(&s);
}

KN_TEST(image_models, give_the_bits_of_one_process)
{
    for (int i = 0; i < KINDS * 3 * 3; i += kn_one_in(5)) {
        const int k = i % KINDS, ranks = 1 << i / KINDS % 3;
        check(k, (matrix_spec){ .ranks = ranks,
                                .rounds = 4 / ranks,
                                .threads = true,
                                .workers = k % 2,
                                .whole = i % 5 == 4,
                                .offload = i % 3 == 1,
                                .evaluate = i % 3 == 2,
                                .optimizer = i % OPTIMIZER_KINDS,
                                .o = { .strategy = KN_FULL_SHARD + i / KINDS / 3,
                                       .layout = KN_LAYOUT_FLAT + i % 3,
                                       .recompute_class = i % 7 < 3 ? kind[k].block : NULL } });
    }
}

static void check_16_bits(int k, int ranks, kn_dtype dtype)
{
    matrix_check_16_bits(of_kind(k, (matrix_spec){ .ranks = ranks, .threads = true }), dtype,
                         kind[k].block);
}

KN_TEST(image_models, have_equal_bits_in_16_bits_in_every_strategy_and_layout)
{
    for (int k = 0; k < KINDS; k++)
        check_16_bits(k, k % 2 ? 4 : 2, KN_BF16);
    check_16_bits(0, 2, KN_F16);
}
