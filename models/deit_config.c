/* models/deit_config.c: the family of DeiT (Touvron et al., arXiv:2012.12877): vision transformers
 * with the presets of timm's deit_*, and one for small images. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/vit.h"

#define AT(field) offsetof(kn_vit_config, field)

static const kn_config_field fields[] = {
    { .key = "architecture", .kind = KN_FIELD_FIXED, .text = "deit_base_patch16_224" },
    { "classes", "num_classes", NULL, KN_FIELD_SIZE, AT(classes), 1, 1 << 30, .free = true },
    { "dropout", "dropout", NULL, KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999, .optional = true,
      .free = true },
    { "image", "model_args.img_size", NULL, KN_FIELD_SIZE, AT(image), 1, 1 << 20, .free = true },
    { "patch", "model_args.patch_size", NULL, KN_FIELD_SIZE, AT(patch), 1, 1 << 20, .free = true },
    { "channels", "model_args.in_chans", NULL, KN_FIELD_SIZE, AT(channels), 1, 1 << 24, .zero = 3,
      .free = true },
    { "embd", "model_args.embed_dim", NULL, KN_FIELD_SIZE, AT(embd), 1, 1 << 24 },
    { "layers", "model_args.depth", NULL, KN_FIELD_INT, AT(layers), 1, 10000 },
    { "heads", "model_args.num_heads", NULL, KN_FIELD_INT, AT(heads), 1, 1 << 24 },
    { 0 },
};

static const kn_preset presets[] = {
    { "deit_cifar", &(const kn_vit_config){ 2, 2, 64, 32, 8, 10, 3, 0 }, true },
    { "deit_tiny_patch16_224", &(const kn_vit_config){ 12, 3, 192, 224, 16, 1000, 3, 0 } },
    { "deit_small_patch16_224", &(const kn_vit_config){ 12, 6, 384, 224, 16, 1000, 3, 0 } },
    { 0 },
};

static bool check(const void *config)
{
    const kn_vit_config *c = config;
    return (c->embd % c->heads == 0 && c->image % c->patch == 0) ||
           kn_fail("deit: %d heads and patches of %lld must divide %lld channels and images of "
                   "%lld rows",
                   c->heads, (long long)c->patch, (long long)c->embd, (long long)c->image);
}

static int64_t fewest_tensors(const void *config)
{
    return 12 * (int64_t)((const kn_vit_config *)config)->layers;
}

KN_FAMILY_TABLE(deit, vit, .kind = KN_IMAGE_MODELS, .noun = "DeiT", .type = "deit", .field = fields,
                .preset = presets, .check = check, .fewest_tensors = fewest_tensors,
                .first_conv = "patch_embed.proj", .classifier = "head", .global_pool = "token",
                .any_sizes = "deit_base_patch16_224")
