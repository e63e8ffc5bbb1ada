/* models/gpt_config.c: the family of GPT-2: its configuration, presets and options. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/gpt.h"
#include "models/model_tensors.h"

#include <stdio.h>
#include <string.h>

#define AT(field) offsetof(kn_gpt_config, field)

static const kn_config_field fields[] = {
    { "layers", "layers", KN_FIELD_INT, AT(layers), 1, 100000, .option = true, .value = "4",
      .help = "blocks" },
    { "heads", "heads", KN_FIELD_INT, AT(heads), 1, 100000, .option = true, .value = "4",
      .help = "attention heads a block" },
    { "embd", "embd", KN_FIELD_SIZE, AT(embd), 1, 1 << 24, .option = true, .value = "128",
      .help = "channels" },
    { "ctx", "ctx", KN_FIELD_SIZE, AT(ctx), 1, 1 << 30 },
    { "vocab", "vocab", KN_FIELD_SIZE, AT(vocab), 1, 1 << 30 },
    { "dropout", "dropout", KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999, .optional = true,
      .free = true, .option = true, .value = "0", .help = "dropout probability" },
    { "bias", "no_bias", KN_FIELD_FLAG, AT(no_bias), .free = true, .option = true, .opposite = true,
      .value = "true", .help = "biases in linear layers and norms" },
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

static bool init(void *model, const void *config, kn_dtype dtype, kn_device device)
{
    return kn_gpt_init(model, *(const kn_gpt_config *)config, dtype, device);
}

static double flops_per_token(const void *config, int64_t ctx)
{
    return kn_gpt_flops_per_token(config, ctx);
}

static kn_tensor *loss(void *model, kn_tensor *ids, kn_tensor *targets)
{
    return kn_gpt_loss(model, ids, targets);
}

static kn_tensor *documents_loss(void *model, kn_tensor *ids, kn_tensor *targets, kn_tensor *begin)
{
    return kn_gpt_documents_loss(model, ids, targets, begin);
}

static kn_tensor *next_logits(void *model, kn_tensor *ids)
{
    return kn_gpt_next_logits(model, ids);
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

/* A key must have the value that the GPT here has, or be missing. */
static bool must_be(const json_t *object, const char *file, const char *key, bool is,
                    const char *ours)
{
    return !json_object_get(object, key) || is ||
           kn_fail("%s: its \"%s\" isn't %s, which is what the GPT here computes", file, key, ours);
}

static bool import(const json_t *object, const char *file, void *config)
{
    kn_gpt_config *c = config;
    const kn_json_source s = { object, file };
    int64_t layers, heads;
    const bool old = !json_object_get(object, "n_positions") && json_object_get(object, "n_ctx");
    if (!kn_json_int(s, "n_layer", 1, 100000, &layers) ||
        !kn_json_int(s, "n_head", 1, 100000, &heads) ||
        !kn_json_int(s, "n_embd", 1, 1 << 24, &c->embd) ||
        !kn_json_int(s, old ? "n_ctx" : "n_positions", 1, 1 << 30, &c->ctx) ||
        !kn_json_int(s, "vocab_size", 1, 1 << 30, &c->vocab))
        return false;
    c->layers = (int)layers, c->heads = (int)heads;
    const char *act = json_string_value(json_object_get(object, "activation_function"));
    const json_t *inner = json_object_get(object, "n_inner"),
                 *eps = json_object_get(object, "layer_norm_epsilon");
    return must_be(object, file, "activation_function",
                   act && (strcmp(act, "gelu_new") == 0 || strcmp(act, "gelu_pytorch_tanh") == 0),
                   "gelu_new, the tanh form of GELU") &&
           must_be(object, file, "n_inner",
                   json_is_null(inner) || json_integer_value(inner) == 4 * c->embd,
                   "four times n_embd") &&
           must_be(object, file, "layer_norm_epsilon", json_number_value(eps) == 1e-5, "1e-5") &&
           must_be(object, file, "scale_attn_weights",
                   json_is_true(json_object_get(object, "scale_attn_weights")), "true") &&
           must_be(object, file, "scale_attn_by_inverse_layer_idx",
                   json_is_false(json_object_get(object, "scale_attn_by_inverse_layer_idx")),
                   "false") &&
           must_be(object, file, "add_cross_attention",
                   json_is_false(json_object_get(object, "add_cross_attention")), "false") &&
           must_be(object, file, "tie_word_embeddings",
                   json_is_true(json_object_get(object, "tie_word_embeddings")), "true");
}

static bool export(json_t *object, const void *config)
{
    const kn_gpt_config *c = config;
    json_t *keys =
        json_pack("{s:I, s:I, s:I, s:I, s:i, s:i, s:I, s:s, s:f, s:f, s:f, s:f, s:b}", "vocab_size",
                  (json_int_t)c->vocab, "n_positions", (json_int_t)c->ctx, "n_ctx",
                  (json_int_t)c->ctx, "n_embd", (json_int_t)c->embd, "n_layer", c->layers, "n_head",
                  c->heads, "n_inner", (json_int_t)(4 * c->embd), "activation_function", "gelu_new",
                  "layer_norm_epsilon", 1e-5, "embd_pdrop", c->dropout, "attn_pdrop", c->dropout,
                  "resid_pdrop", c->dropout, "tie_word_embeddings", 1);
    bool ok = keys && json_object_update(object, keys) == 0;
    json_decref(keys);
    return ok;
}

/* GPT-2 has biases everywhere: zeros, where there are none here. */
static bool export_more(kn_model_tensors *t, const void *config)
{
    const kn_gpt_config *c = config;
    static const char *const without[] = { ".wte.weight", ".wpe.weight" };
    const int count = t->count;
    bool ok = true;
    for (int i = 0; c->no_bias && ok && i < count; i++) {
        const kn_safetensors_entry *e = &t->entry[i];
        char name[256];
        const size_t n = strlen(e->name);
        const int64_t size = e->shape[e->ndim - 1]; /* of products [in, out], and of norms */
        if (strcmp(e->name + n - strlen(without[0]), without[0]) == 0 ||
            strcmp(e->name + n - strlen(without[1]), without[1]) == 0)
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

KN_FAMILY(kn_gpt_family, .noun = "GPT", .prefix = "gpt", .type = "gpt2", .block_class = "gpt_block",
          .size = sizeof(kn_gpt_config), .field = fields, .preset = presets, .check = check,
          .init = init, .fewest_tensors = fewest_tensors, .custom = "custom",
          .flops_per_token = flops_per_token, .loss = loss, .documents_loss = documents_loss,
          .next_logits = next_logits, .import = import, .renames = renames,
          .optional_prefix = "transformer.", .export = export, .export_more = export_more,
          .architecture = "GPT2LMHeadModel", .tensors = tensors, .keys = keys,
          .embedding = "transformer.wte.weight");

/* ---- functions ------------------------------------------------------------------------------- */

bool kn_gpt_preset(const char *name, kn_gpt_config *config)
{
    return kn_family_preset(&kn_gpt_family, name, config);
}

bool kn_gpt_config_check(kn_gpt_config *config)
{
    return kn_family_check(&kn_gpt_family, config);
}

double kn_gpt_flops_per_token(const kn_gpt_config *c, int64_t ctx)
{
    if (!c) {
        kn_fail("kn_gpt_flops_per_token: the configuration is NULL");
        return 0;
    }
    double embd = (double)c->embd, layers = c->layers;
    double weights = 12 * embd * embd * layers + embd * (double)c->vocab;
    /* a product is 2 operations a weight, three times over forward and backward; attention: two
     * products of T x C a token, of which causal attention needs half */
    return 6 * weights + 6 * layers * (double)ctx * embd;
}

const char *kn_gpt_config_text(const kn_gpt_config *c, char buf[KN_GPT_CONFIG_TEXT])
{
    return kn_family_text(&kn_gpt_family, c, buf, KN_GPT_CONFIG_TEXT);
}

bool kn_gpt_config_saved(const kn_checkpoint *c, kn_gpt_config *config)
{
    return kn_family_saved(&kn_gpt_family, c, config);
}

const kn_gpt_config *kn_gpt_config_of(const kn_gpt *g)
{
    return kn_family_config_of(&kn_gpt_family, g);
}

void kn_gpt_recompute(kn_gpt *g, bool on)
{
    kn_family_recompute(&kn_gpt_family, g, on);
}
