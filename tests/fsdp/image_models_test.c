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

static void check(int k, matrix_spec s)
{
    s.model = MATRIX_OWN;
    s.bytes = kind[k].bytes;
    s.declare = kind[k].declare;
    s.loss = loss;
    s.o.wrap_class = s.whole ? NULL : kind[k].block;
    s.steps = 2;
    matrix_check(&s);
}

KN_TEST(image_models, give_the_bits_of_one_process_in_every_strategy_and_layout)
{
    const kn_layout_kind layout[] = { KN_LAYOUT_FLAT, KN_LAYOUT_PER_PARAM, KN_LAYOUT_RAGGED };
    const kn_strategy strategy[] = { KN_FULL_SHARD, KN_SHARD_GRAD_OP, KN_NO_SHARD };
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < 9; i++)
            check(k,
                  (matrix_spec){ .ranks = i % 2 ? 4 : 2,
                                 .threads = true,
                                 .optimizer = i % OPTIMIZER_KINDS,
                                 .o = { .strategy = strategy[i / 3], .layout = layout[i % 3] } });
}

KN_TEST(image_models, give_the_bits_of_one_process_with_the_other_options)
{
    for (int k = 0; k < KINDS; k++) {
        check(k, (matrix_spec){ .ranks = 1, .o = { .layout = KN_LAYOUT_FLAT } });
        check(k,
              (matrix_spec){ .ranks = 4, .o = { .strategy = KN_HYBRID_SHARD, .mesh = { 2, 2 } } });
        check(k, (matrix_spec){ .ranks = 2, .whole = true });
        check(k, (matrix_spec){ .ranks = 2, .offload = true });
        check(k, (matrix_spec){ .ranks = 3, .skip_sync = 1, .optimizer = OPTIMIZER_MOMENTUM });
        check(k,
              (matrix_spec){ .ranks = 2,
                             .workers = true,
                             .o = { .recompute_class = kind[k].block, .forward_prefetch = true } });
    }
}
