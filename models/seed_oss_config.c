/* models/seed_oss_config.c: Seed-OSS (ByteDance Seed, 2025), a family over models/llama.c: heads of
 * 128 channels, and biases of queries, keys and values. The JSON has the names of Hugging Face's
 * config.json. */
#include "models/family.h"
#include "models/llama.h"

#define AT(field) offsetof(kn_llama_config, field)
#define FIXED(name, is)                                                                            \
    {                                                                                              \
        .key = name, .kind = KN_FIELD_FIXED, .text = is                                            \
    }

static const kn_config_field fields[] = {
    { "layers", "num_hidden_layers", NULL, KN_FIELD_INT, AT(layers), 1, 100000, .option = true },
    { "heads", "num_attention_heads", NULL, KN_FIELD_INT, AT(heads), 1, 100000, .option = true },
    { "kv-heads", "num_key_value_heads", NULL, KN_FIELD_INT, AT(kv_heads), 1, 100000,
      .option = true },
    { "embd", "hidden_size", NULL, KN_FIELD_SIZE, AT(embd), 1, 1 << 24, .option = true },
    { "hidden", "intermediate_size", NULL, KN_FIELD_SIZE, AT(hidden), 1, 1 << 26, .option = true },
    { "ctx", "max_position_embeddings", NULL, KN_FIELD_SIZE, AT(ctx), 1, 1 << 30 },
    { "vocab", "vocab_size", NULL, KN_FIELD_SIZE, AT(vocab), 1, 1 << 30 },
    { "norm-eps", "rms_norm_eps", NULL, KN_FIELD_NUMBER, AT(norm_eps), 0, 1e300, .zero = 1e-6,
      .optional = true, .missing = 1e-6 },
    { "dropout", "attention_dropout", NULL, KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999,
      .optional = true, .free = true, .option = true },
    { "tied", "tie_word_embeddings", NULL, KN_FIELD_NOT, AT(untied), .option = true,
      .opposite = true },
    { "rope-base", "rope_theta", NULL, KN_FIELD_NUMBER, AT(rope_base), 1, 1e12, .zero = 1e7,
      .option = true },
    { "head-dim", "head_dim", NULL, KN_FIELD_SIZE, AT(head_dim), 2, 1 << 20 },
    { "qkv-bias", "attention_bias", NULL, KN_FIELD_FLAG, AT(qkv_bias) },
    FIXED("hidden_act", "silu"),
    FIXED("attention_out_bias", "false"),
    FIXED("mlp_bias", "false"),
    { 0 },
};

static const kn_preset presets[] = {
    { "seed-oss-36b",
      &(const kn_llama_config){ 64, 80, 8, 5120, 27648, 524288, 155136, 1e-6, 1e7, .untied = true,
                                .head_dim = 128, .qkv_bias = true } },
    { 0 },
};

static void fill(void *config)
{
    kn_llama_config *c = config;
    c->kv_heads = c->kv_heads ? c->kv_heads : c->heads;
    c->head_dim = c->head_dim ? c->head_dim : 128;
    c->hidden = c->hidden ? c->hidden : 27 * c->embd / 5;
    c->qkv_bias = true;
}

static bool check(const void *config)
{
    kn_llama_config c = *(const kn_llama_config *)config;
    return kn_llama_config_check(&c);
}

static int64_t fewest_tensors(const void *config)
{
    return 12 * (int64_t)((const kn_llama_config *)config)->layers;
}

static double flops_per_token(const void *config, int64_t ctx)
{
    return kn_llama_flops_per_token(config, ctx);
}

KN_FAMILY_TABLE(seed_oss, llama, .noun = "Seed-OSS", .type = "seed_oss", .field = fields,
                .preset = presets, .fill = fill, .check = check, .fewest_tensors = fewest_tensors,
                .custom = "seed-oss", .flops_per_token = flops_per_token,
                .architecture = "SeedOssForCausalLM", .embedding = "model.embed_tokens.weight")
