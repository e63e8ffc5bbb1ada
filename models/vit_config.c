/* models/vit_config.c: the family of vision transformers: their configuration and presets. The JSON
 * has the names of timm's config.json. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/vit.h"

#define AT(field)     offsetof(kn_vit_config, field)
#define MOST_CHANNELS (1 << 24)

static const kn_config_field fields[] = {
    /* timm's sizes all come from model_args; the name chooses the class */
    { .key = "architecture", .kind = KN_FIELD_FIXED, .text = "vit_base_patch16_224" },
    { "classes", "num_classes", NULL, KN_FIELD_SIZE, AT(classes), 1, 1 << 30, .free = true },
    { "dropout", "dropout", NULL, KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999, .optional = true,
      .free = true },
    { "image", "model_args.img_size", NULL, KN_FIELD_SIZE, AT(image), 1, 1 << 20, .free = true },
    { "patch", "model_args.patch_size", NULL, KN_FIELD_SIZE, AT(patch), 1, 1 << 20, .free = true },
    { "channels", "model_args.in_chans", NULL, KN_FIELD_SIZE, AT(channels), 1, MOST_CHANNELS,
      .zero = 3, .free = true },
    { "embd", "model_args.embed_dim", NULL, KN_FIELD_SIZE, AT(embd), 1, MOST_CHANNELS },
    { "layers", "model_args.depth", NULL, KN_FIELD_INT, AT(layers), 1, 10000 },
    { "heads", "model_args.num_heads", NULL, KN_FIELD_INT, AT(heads), 1, MOST_CHANNELS },
    { 0 },
};

static const kn_preset presets[] = {
    { "vit_cifar", &(const kn_vit_config){ 6, 3, 192, 32, 4, 10, 3, 0 }, true },
    { "vit_tiny_patch16_224", &(const kn_vit_config){ 12, 3, 192, 224, 16, 1000, 3, 0 } },
    { "vit_small_patch16_224", &(const kn_vit_config){ 12, 6, 384, 224, 16, 1000, 3, 0 } },
    { "vit_base_patch16_224", &(const kn_vit_config){ 12, 12, 768, 224, 16, 1000, 3, 0 } },
    { "vit_large_patch16_224", &(const kn_vit_config){ 24, 16, 1024, 224, 16, 1000, 3, 0 } },
    { "vit_small_patch32_224", &(const kn_vit_config){ 12, 6, 384, 224, 32, 1000, 3, 0 } },
    { "vit_base_patch32_224", &(const kn_vit_config){ 12, 12, 768, 224, 32, 1000, 3, 0 } },
    { 0 },
};

static bool check(const void *config)
{
    const kn_vit_config *c = config;
    if (c->embd % c->heads)
        return kn_fail("vit: %d heads don't divide %lld channels; choose another number of heads",
                       c->heads, (long long)c->embd);
    return c->image % c->patch == 0 ||
           kn_fail("vit: patches of %lld don't divide images of %lld rows; choose another size",
                   (long long)c->patch, (long long)c->image);
}

static int64_t fewest_tensors(const void *config)
{
    return 12 * (int64_t)((const kn_vit_config *)config)->layers;
}

static bool write(json_t *object, const void *config)
{
    const json_int_t features = ((const kn_vit_config *)config)->embd;
    return json_object_set_new(object, "num_features", json_integer(features)) == 0;
}

/* kn_vit_preset, kn_vit_config_check and the others of models/vit.h */
KN_FAMILY(vit, KN_VIT_CONFIG_TEXT, .kind = KN_IMAGE_MODELS, .noun = "vision transformer",
          .type = "vit", .field = fields, .preset = presets, .check = check,
          .fewest_tensors = fewest_tensors, .write = write, .first_conv = "patch_embed.proj",
          .classifier = "head", .global_pool = "token", .any_sizes = "vit_base_patch16_224")
