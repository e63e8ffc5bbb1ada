/* models/gpt_config.c: the family of GPT-2: its configuration, presets and options. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/gpt.h"
#include "models/model_tensors.h"
#include "tensor/files.h"

#include <stdio.h>
#include <string.h>

#define AT(field) offsetof(kn_gpt_config, field)
#define FIXED(key, is, ...)                                                                        \
    {                                                                                              \
        .theirs = key, .kind = KN_FIELD_FIXED, .text = is, __VA_ARGS__                             \
    }

static const kn_config_field fields[] = {
    { "layers", "layers", "n_layer", KN_FIELD_INT, AT(layers), 1, 100000, .option = true,
      .value = "4", .help = "blocks" },
    { "heads", "heads", "n_head", KN_FIELD_INT, AT(heads), 1, 100000, .option = true, .value = "4",
      .help = "attention heads a block" },
    { "embd", "embd", "n_embd", KN_FIELD_SIZE, AT(embd), 1, 1 << 24, .option = true, .value = "128",
      .help = "channels" },
    { "ctx", "ctx", "n_positions|n_ctx", KN_FIELD_SIZE, AT(ctx), 1, 1 << 30 },
    { "vocab", "vocab", "vocab_size", KN_FIELD_SIZE, AT(vocab), 1, 1 << 30 },
    { "dropout", "dropout", "", KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999, .optional = true,
      .free = true, .option = true, .value = "0", .help = "dropout probability" },
    { "bias", "no_bias", "", KN_FIELD_FLAG, AT(no_bias), .free = true, .option = true,
      .opposite = true, .value = "true", .help = "biases in linear layers and norms" },
    /* what transformers' GPT-2 may have otherwise; GELU in its tanh form */
    FIXED("activation_function", "gelu_new|gelu_pytorch_tanh"),
    FIXED("layer_norm_epsilon", "1e-5"),
    FIXED("tie_word_embeddings", "true"),
    FIXED("scale_attn_weights", "true", .optional = true),
    FIXED("scale_attn_by_inverse_layer_idx", "false", .optional = true),
    FIXED("add_cross_attention", "false", .optional = true),
    { 0 },
};

static const kn_preset presets[] = {
    { "gpt2", &(const kn_gpt_config){ 12, 12, 768, 1024, 50257, 0, false } },
    { "gpt2-medium", &(const kn_gpt_config){ 24, 16, 1024, 1024, 50257, 0, false } },
    { "gpt2-large", &(const kn_gpt_config){ 36, 20, 1280, 1024, 50257, 0, false } },
    { "gpt2-xl", &(const kn_gpt_config){ 48, 25, 1600, 1024, 50257, 0, false } },
    { 0 },
};

static bool check(const void *config)
{
    const kn_gpt_config *c = config;
    return c->embd % c->heads == 0 ||
           kn_fail("gpt: %d heads don't divide %lld channels; choose a number of heads that "
                   "divides the channels",
                   c->heads, (long long)c->embd);
}

static int64_t fewest_tensors(const void *config)
{
    return 6 * (int64_t)((const kn_gpt_config *)config)->layers;
}

/* a product is 2 operations a weight, three times over forward and backward; attention: two
 * products of T x C a token, of which causal attention needs half */
static double flops_per_token(const void *config, int64_t ctx)
{
    const kn_gpt_config *c = config;
    const double embd = (double)c->embd, layers = c->layers,
                 weights = 12 * embd * embd * layers + embd * (double)c->vocab;
    return 6 * weights + 6 * layers * (double)ctx * embd;
}

/* ---- Hugging Face's files -------------------------------------------------------------------- */

/* Masks of attention, which older files have, are left out. */
static const kn_rename renames[] = { { "transformer.h.*.attn.bias", NULL },
                                     { "transformer.h.*.attn.masked_bias", NULL },
                                     { "h.*.attn.bias", NULL },
                                     { "h.*.attn.masked_bias", NULL },
                                     { "transformer.*", "transformer.*" },
                                     { "*", "transformer.*" },
                                     { 0 } };

static bool read(const json_t *object, const char *file, void *config)
{
    const int64_t four = 4 * ((kn_gpt_config *)config)->embd;
    const json_t *inner = json_object_get(object, "n_inner");
    return !inner || json_is_null(inner) || json_integer_value(inner) == four ||
           kn_fail(
               "%s: \"n_inner\" of the model isn't four times n_embd, which is what the GPT here "
               "computes",
               file);
}

static bool export(json_t *object, const void *config)
{
    const kn_gpt_config *c = config;
    json_t *keys =
        json_pack("{s:I, s:f, s:f, s:f}", "n_inner", (json_int_t)(4 * c->embd), "embd_pdrop",
                  c->dropout, "attn_pdrop", c->dropout, "resid_pdrop", c->dropout);
    bool ok = keys && json_object_update(object, keys) == 0;
    json_decref(keys);
    return ok;
}

/* GPT-2 has biases everywhere: zeros, where there are none here. */
static bool export_more(kn_model_tensors *t, const void *config)
{
    const kn_gpt_config *c = config;
    const int count = t->count;
    bool ok = true;
    for (int i = 0; c->no_bias && ok && i < count; i++) {
        const kn_safetensors_entry *e = &t->entry[i];
        char name[256];
        const size_t n = strlen(e->name);
        const int64_t size = e->shape[e->ndim - 1]; /* of products [in, out], and of norms */
        if (kn_ends_in(e->name, ".wte.weight") || kn_ends_in(e->name, ".wpe.weight"))
            continue;
        snprintf(name, sizeof name, "%.*sbias", (int)(n - strlen("weight")), e->name);
        ok = kn_model_tensors_add_zeros(t, name, size);
    }
    return ok;
}

/* ---- files of llm.c and GGUF ----------------------------------------------------------------- */

#define BOTH(name, gguf, form)                                                                     \
    { name ".weight", gguf ".weight", form },                                                      \
    {                                                                                              \
        name ".bias", gguf ".bias", KN_FORM_SAME                                                   \
    }

static const kn_tensor_name tensors[] = {
    { "transformer.wte.weight", "token_embd.weight", KN_FORM_SAME },
    { "transformer.wpe.weight", "position_embd.weight", KN_FORM_SAME },
    BOTH("transformer.h.*.ln_1", "blk.*.attn_norm", KN_FORM_SAME),
    BOTH("transformer.h.*.attn.c_attn", "blk.*.attn_qkv", KN_FORM_TRANSPOSED),
    BOTH("transformer.h.*.attn.c_proj", "blk.*.attn_output", KN_FORM_TRANSPOSED),
    BOTH("transformer.h.*.ln_2", "blk.*.ffn_norm", KN_FORM_SAME),
    BOTH("transformer.h.*.mlp.c_fc", "blk.*.ffn_up", KN_FORM_TRANSPOSED),
    BOTH("transformer.h.*.mlp.c_proj", "blk.*.ffn_down", KN_FORM_TRANSPOSED),
    BOTH("transformer.ln_f", "output_norm", KN_FORM_SAME),
    { 0 },
};

static const kn_key_name keys[] = { { "n_layer", "block_count" },
                                    { "n_head", "attention.head_count" },
                                    { "n_embd", "embedding_length" },
                                    { "n_positions", "context_length" },
                                    { "n_inner", "feed_forward_length" },
                                    { "layer_norm_epsilon", "attention.layer_norm_epsilon" },
                                    { 0 } };

/* kn_gpt_preset, kn_gpt_config_check, kn_gpt_loss and the others of models/gpt.h */
KN_LANGUAGE_FAMILY(gpt, KN_GPT_CONFIG_TEXT, .noun = "GPT", .type = "gpt2", .field = fields,
                   .preset = presets, .check = check, .fewest_tensors = fewest_tensors,
                   .read = read, .custom = "custom", .flops_per_token = flops_per_token,
                   .renames = renames, .optional_prefix = "transformer.", .export = export,
                   .export_more = export_more, .architecture = "GPT2LMHeadModel",
                   .tensors = tensors, .keys = keys, .embedding = "transformer.wte.weight")
