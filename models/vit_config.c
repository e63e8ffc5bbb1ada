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
    { "classes", "num_classes", KN_FIELD_SIZE, AT(classes), 1, 1 << 30, .free = true },
    { "dropout", "dropout", KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999, .optional = true,
      .free = true },
    { "image", "model_args.img_size", KN_FIELD_SIZE, AT(image), 1, 1 << 20, .free = true },
    { "patch", "model_args.patch_size", KN_FIELD_SIZE, AT(patch), 1, 1 << 20, .free = true },
    { "channels", "model_args.in_chans", KN_FIELD_SIZE, AT(channels), 1, MOST_CHANNELS, .zero = 3,
      .free = true },
    { "embd", "model_args.embed_dim", KN_FIELD_SIZE, AT(embd), 1, MOST_CHANNELS },
    { "layers", "model_args.depth", KN_FIELD_INT, AT(layers), 1, 10000 },
    { "heads", "model_args.num_heads", KN_FIELD_INT, AT(heads), 1, MOST_CHANNELS },
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

static bool init(void *model, const void *config, kn_dtype dtype, kn_device device)
{
    return kn_vit_init(model, *(const kn_vit_config *)config, dtype, device);
}

KN_FAMILY(kn_vit_family, .noun = "vision transformer", .prefix = "vit", .type = "vit",
          .block_class = "vit_block", .size = sizeof(kn_vit_config), .field = fields,
          .preset = presets, .check = check, .init = init, .fewest_tensors = fewest_tensors,
          .write = write, .first_conv = "patch_embed.proj", .classifier = "head",
          .global_pool = "token", .any_sizes = "vit_base_patch16_224");

/* ---- functions ------------------------------------------------------------------------------- */

bool kn_vit_preset(const char *name, kn_vit_config *config)
{
    return kn_family_preset(&kn_vit_family, name, config);
}

bool kn_vit_config_check(kn_vit_config *config)
{
    return kn_family_check(&kn_vit_family, config);
}

const char *kn_vit_config_text(const kn_vit_config *config, char buf[KN_VIT_CONFIG_TEXT])
{
    return kn_family_text(&kn_vit_family, config, buf, KN_VIT_CONFIG_TEXT);
}

bool kn_vit_config_saved(const kn_checkpoint *c, kn_vit_config *config)
{
    return kn_family_saved(&kn_vit_family, c, config);
}

const kn_vit_config *kn_vit_config_of(const kn_vit *v)
{
    return kn_family_config_of(&kn_vit_family, v);
}

void kn_vit_recompute(kn_vit *v, bool on)
{
    kn_family_recompute(&kn_vit_family, v, on);
}
