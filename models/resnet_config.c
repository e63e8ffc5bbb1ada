/* models/resnet_config.c: the family of residual nets: their configuration and presets. The JSON
 * has the names of timm's config.json where that has one. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/resnet.h"

#define AT(field)     offsetof(kn_resnet_config, field)
#define MOST_CHANNELS (1 << 24)

static const kn_config_field fields[] = {
    { "blocks", "blocks", NULL, KN_FIELD_LIST, AT(blocks), 0, 10000 },
    { "classes", "num_classes", NULL, KN_FIELD_SIZE, AT(classes), 1, 1 << 30, .free = true },
    { "channels", "in_chans", NULL, KN_FIELD_SIZE, AT(channels), 1, MOST_CHANNELS, .zero = 3,
      .free = true },
    { "width", "width", NULL, KN_FIELD_SIZE, AT(width), 1, MOST_CHANNELS },
    { "bottleneck", "bottleneck", NULL, KN_FIELD_FLAG, AT(bottleneck) },
    { "small-images", "small_images", NULL, KN_FIELD_FLAG, AT(small_images), .free = true },
    { "cifar", "cifar", NULL, KN_FIELD_FLAG, AT(cifar) },
    { "plain-gamma", "plain_gamma", NULL, KN_FIELD_FLAG, AT(plain_gamma), .free = true },
    { 0 },
};

/* Table 1 of arXiv:1512.03385; its nets for CIFAR have 6 n + 2 layers. */
#define CIFAR(n)                                                                                   \
    &(const kn_resnet_config){ { n, n, n }, 10, 3, 16, .small_images = true, .cifar = true }, true
#define IMAGENET(bottlenecks, ...)                                                                 \
    &(const kn_resnet_config)                                                                      \
    {                                                                                              \
        { __VA_ARGS__ }, 1000, 3, 64, .bottleneck = bottlenecks                                    \
    }

static const kn_preset presets[] = {
    { "resnet20", CIFAR(3) },
    { "resnet32", CIFAR(5) },
    { "resnet44", CIFAR(7) },
    { "resnet56", CIFAR(9) },
    { "resnet110", CIFAR(18) },
    { "resnet18", IMAGENET(false, 2, 2, 2, 2) },
    { "resnet34", IMAGENET(false, 3, 4, 6, 3) },
    { "resnet50", IMAGENET(true, 3, 4, 6, 3) },
    { "resnet101", IMAGENET(true, 3, 4, 23, 3) },
    { "resnet152", IMAGENET(true, 3, 8, 36, 3) },
    { 0 },
};

static void fill(void *config)
{
    kn_resnet_config *c = config;
    if (c->width == 0)
        c->width = c->cifar ? 16 : 64;
    c->small_images = c->small_images || c->cifar;
}

static int count_stages(const kn_resnet_config *c)
{
    int n = 0;
    for (int k = 0; k < KN_FIELD_LENGTH; k++)
        n += c->blocks[k] > 0;
    return n;
}

static bool check(const void *config)
{
    const kn_resnet_config *c = config;
    const int stages = count_stages(c);
    for (int k = stages; k < KN_FIELD_LENGTH; k++)
        if (c->blocks[k] > 0)
            return kn_fail("resnet: stage %d has %d blocks behind a stage without any; a 0 ends "
                           "the list",
                           k + 1, c->blocks[k]);
    if (stages == 0)
        return kn_fail("resnet: .blocks is {0}, should hold 1 to 4 numbers of blocks, such as {2, "
                       "2, 2, 2}");
    return !c->cifar || !c->bottleneck ||
           kn_fail("resnet: .cifar and .bottleneck contradict each other: shortcuts without "
                   "parameters are for blocks of two convolutions");
}

static int64_t fewest_tensors(const void *config)
{
    int64_t n = 0;
    for (int k = 0; k < KN_FIELD_LENGTH; k++)
        n += 10 * (int64_t)((const kn_resnet_config *)config)->blocks[k];
    return n;
}

static bool write(json_t *object, const void *config)
{
    const kn_model_config c = kn_config_of(&kn_resnet_family, config);
    const kn_resnet_config *r = config;
    const kn_preset *preset = r->small_images ? NULL : kn_config_preset(&c);
    const int64_t features = (r->width << (count_stages(r) - 1)) * (r->bottleneck ? 4 : 1);
    return json_object_set_new(object, "num_features", json_integer(features)) == 0 &&
           (!preset || json_object_set_new(object, "architecture", json_string(preset->name)) == 0);
}

/* kn_resnet_preset, kn_resnet_config_check and the others of models/resnet.h */
KN_FAMILY(resnet, KN_RESNET_CONFIG_TEXT, .kind = KN_IMAGE_MODELS, .noun = "residual net",
          .type = "resnet", .field = fields, .preset = presets, .fill = fill, .check = check,
          .fewest_tensors = fewest_tensors, .write = write, .first_conv = "conv1",
          .classifier = "fc", .global_pool = "avg",
          .optional = "*.num_batches_tracked") /* torch before 0.4.1 has none */
