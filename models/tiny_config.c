/* models/tiny_config.c: a family for show: Llamas of heads of 32 channels, by four numbers. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/llama.h"

typedef struct tiny_config {
    int layers;
    int64_t embd, ctx, vocab;
} tiny_config;
#define AT(field) offsetof(tiny_config, field)

static const kn_config_field fields[] = {
    { "layers", "layers", KN_FIELD_INT, AT(layers), 1, 100000, .option = true },
    { "embd", "embd", KN_FIELD_SIZE, AT(embd), 32, 1 << 24, .option = true },
    { "ctx", "ctx", KN_FIELD_SIZE, AT(ctx), 1, 1 << 30 },
    { "vocab", "vocab", KN_FIELD_SIZE, AT(vocab), 1, 1 << 30 },
    { 0 },
};
static const kn_preset presets[] = { { 0 } };

static kn_llama_config llama_of(const void *config)
{
    const tiny_config *c = config;
    return (kn_llama_config){ .layers = c->layers,
                              .heads = (int)(c->embd / 32),
                              .embd = c->embd,
                              .ctx = c->ctx,
                              .vocab = c->vocab };
}

static bool check(const void *config)
{
    return ((const tiny_config *)config)->embd % 32 == 0 ||
           kn_fail("tiny: %lld channels, should be a multiple of 32",
                   (long long)((const tiny_config *)config)->embd);
}

static int64_t fewest_tensors(const void *config)
{
    return 9 * (int64_t)((const tiny_config *)config)->layers;
}

static bool init(void *model, const void *config, kn_dtype dtype, kn_device device)
{
    return kn_llama_init(model, llama_of(config), dtype, device);
}

static double flops_per_token(const void *config, int64_t ctx)
{
    const kn_llama_config c = llama_of(config);
    return kn_llama_flops_per_token(&c, ctx);
}

static kn_tensor *loss(void *model, kn_tensor *ids, kn_tensor *targets)
{
    return kn_llama_loss(model, ids, targets);
}

static kn_tensor *next_logits(void *model, kn_tensor *ids)
{
    return kn_llama_next_logits(model, ids);
}

KN_FAMILY(kn_tiny_family, .noun = "Tiny", .prefix = "tiny", .type = "tiny",
          .block_class = "llama_block", .size = sizeof(tiny_config), .field = fields,
          .preset = presets, .check = check, .init = init, .fewest_tensors = fewest_tensors,
          .custom = "tiny", .flops_per_token = flops_per_token, .loss = loss,
          .next_logits = next_logits);
