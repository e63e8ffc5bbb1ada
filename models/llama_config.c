/* models/llama_config.c: the family of Llama: its configuration, presets and options. The JSON has
 * the names of Hugging Face's config.json. */
#include "models/family.h"
#include "kernels/error.h"
#include "models/llama.h"

#include <string.h>

#define AT(field) offsetof(kn_llama_config, field)

static const kn_config_field fields[] = {
    { "layers", "num_hidden_layers", NULL, KN_FIELD_INT, AT(layers), 1, 100000, .option = true },
    { "heads", "num_attention_heads", NULL, KN_FIELD_INT, AT(heads), 1, 100000, .option = true },
    { "kv-heads", "num_key_value_heads", NULL, KN_FIELD_INT, AT(kv_heads), 1, 100000,
      .optional = true, .option = true, .help = "heads of keys and values", .note = "heads" },
    { "embd", "hidden_size", NULL, KN_FIELD_SIZE, AT(embd), 1, 1 << 24, .option = true },
    { "hidden", "intermediate_size", NULL, KN_FIELD_SIZE, AT(hidden), 1, 1 << 26, .option = true,
      .help = "channels inside the MLP", .note = "8/3 embd, up to a multiple of 64" },
    { "ctx", "max_position_embeddings", NULL, KN_FIELD_SIZE, AT(ctx), 1, 1 << 30 },
    { "vocab", "vocab_size", NULL, KN_FIELD_SIZE, AT(vocab), 1, 1 << 30 },
    { "norm-eps", "rms_norm_eps", NULL, KN_FIELD_NUMBER, AT(norm_eps), 0, 1e300, .zero = 1e-5,
      .optional = true, .missing = 1e-6 },
    { "dropout", "attention_dropout", NULL, KN_FIELD_NUMBER, AT(dropout), 0, 0.99999999,
      .optional = true, .free = true, .option = true, .help = "of attention's probabilities" },
    { "tied", "tie_word_embeddings", NULL, KN_FIELD_NOT, AT(untied), .option = true,
      .opposite = true, .value = "true", .help = "the token embedding is the head, too" },
    { "rope-base", NULL, NULL, KN_FIELD_NUMBER, AT(rope_base), 1, 1e12, .zero = 10000,
      .option = true, .value = "10000", .help = "base of the rotary embedding" },
    { "rope-factor", NULL, NULL, KN_FIELD_NUMBER, AT(rope_scaling.factor), 1, 1e6, .none = true,
      .option = true, .help = "Llama 3's scaling of it to a context so many times as long",
      .note = "no scaling" },
    { "rope-original", NULL, NULL, KN_FIELD_SIZE, AT(rope_scaling.original_ctx), 1, 1 << 30,
      .none = true, .option = true, .value = "8192", .with = "rope-factor",
      .help = "the context before --rope-factor" },
    { "head-dim", "head_dim", NULL, KN_FIELD_SIZE, AT(head_dim), 1, 1 << 20, .none = true,
      .optional = true, .free = true },
    { "window", NULL, NULL, KN_FIELD_SIZE, AT(window), 1, 1 << 30, .none = true },
    { "qkv-bias", "qkv_bias", NULL, KN_FIELD_FLAG, AT(qkv_bias) },
    { "qk-norm", "qk_norm", NULL, KN_FIELD_FLAG, AT(qk_norm) },
    { .key = "hidden_act", .kind = KN_FIELD_FIXED, .text = "silu" },
    { .key = "attention_bias", .kind = KN_FIELD_FIXED, .text = "false" },
    { .key = "mlp_bias", .kind = KN_FIELD_FIXED, .text = "false" },
    { 0 },
};

/* ---- presets --------------------------------------------------------------------------------- */

#define LLAMA(layers, heads, kv_heads, embd, hidden, ctx, vocab, base, untied, ...)                \
    &(const kn_llama_config)                                                                       \
    {                                                                                              \
        layers, heads, kv_heads, embd, hidden, ctx, vocab, 1e-5, base, { __VA_ARGS__ }, 0, untied  \
    }

static const kn_preset presets[] = {
    { "stories15m", LLAMA(6, 6, 6, 288, 768, 256, 32000, 1e4, false, 0) },
    { "stories42m", LLAMA(8, 8, 8, 512, 1376, 1024, 32000, 1e4, false, 0) },
    { "stories110m", LLAMA(12, 12, 12, 768, 2048, 1024, 32000, 1e4, false, 0) },
    { "llama2-7b", LLAMA(32, 32, 32, 4096, 11008, 4096, 32000, 1e4, true, 0) },
    { "llama3-8b", LLAMA(32, 32, 8, 4096, 14336, 8192, 128256, 5e5, true, 0) },
    { "llama3-70b", LLAMA(80, 64, 8, 8192, 28672, 8192, 128256, 5e5, true, 0) },
    { "llama3.1-8b", LLAMA(32, 32, 8, 4096, 14336, 131072, 128256, 5e5, true, 8, 1, 4, 8192) },
    { "llama3.1-70b", LLAMA(80, 64, 8, 8192, 28672, 131072, 128256, 5e5, true, 8, 1, 4, 8192) },
    { "llama3.1-405b", LLAMA(126, 128, 8, 16384, 53248, 131072, 128256, 5e5, true, 8, 1, 4, 8192) },
    { "llama3.2-1b", LLAMA(16, 32, 8, 2048, 8192, 131072, 128256, 5e5, false, 32, 1, 4, 8192) },
    { "llama3.2-3b", LLAMA(28, 24, 8, 3072, 8192, 131072, 128256, 5e5, false, 32, 1, 4, 8192) },
    { 0 },
};

/* ---- checks ---------------------------------------------------------------------------------- */

static void fill(void *config)
{
    kn_llama_config *c = config;
    kn_rope_scaling *s = &c->rope_scaling;
    if (c->kv_heads == 0)
        c->kv_heads = c->heads;
    if (c->head_dim == 0 && c->heads > 0)
        c->head_dim = c->embd / c->heads;
    if (c->hidden == 0 && c->embd > 0 && c->embd < (int64_t)1 << 40)
        c->hidden = (c->embd * 8 / 3 + 63) / 64 * 64;
    if (s->factor == 0)
        return;
    s->low_freq_factor = s->low_freq_factor == 0 ? 1 : s->low_freq_factor;
    s->high_freq_factor = s->high_freq_factor == 0 ? 4 : s->high_freq_factor;
    s->original_ctx = s->original_ctx == 0 ? 8192 : s->original_ctx;
}

/* kn_multi_head_attention_init checks the other numbers of rope. */
static bool check(const void *config)
{
    const kn_llama_config *c = config;
    if (c->head_dim % 2 || (c->head_dim == c->embd / c->heads && c->embd % c->heads))
        return kn_fail("llama: %d heads don't divide %lld channels into heads of an even size, "
                       "which rope needs; choose another number of heads",
                       c->heads, (long long)c->embd);
    return c->heads % c->kv_heads == 0 ||
           kn_fail("llama: %d key-value heads don't divide %d heads; choose a number that divides "
                   "the heads",
                   c->kv_heads, c->heads);
}

static int64_t fewest_tensors(const void *config)
{
    return 9 * (int64_t)((const kn_llama_config *)config)->layers;
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static bool write(json_t *object, const void *config)
{
    const kn_llama_config *c = config;
    const kn_rope_scaling *s = &c->rope_scaling;
    json_t *scaling =
        s->factor == 0 ? json_null()
                       : json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor",
                                   s->factor, "low_freq_factor", s->low_freq_factor,
                                   "high_freq_factor", s->high_freq_factor,
                                   "original_max_position_embeddings", (json_int_t)s->original_ctx);
    const bool ok = json_object_set_new(object, "rope_theta", json_real(c->rope_base)) == 0;
    return (!c->window || json_object_set_new(object, "window", json_integer(c->window)) == 0) &&
           json_object_set_new(object, "rope_scaling", scaling) == 0 && ok;
}

/* Numbers of rope: rope_theta and rope_scaling, or both in rope_parameters (transformers 5). */
static bool read_rope(const json_t *object, const char *file, kn_llama_config *c)
{
    const json_t *both = json_object_get(object, "rope_parameters");
    const bool one = json_is_object(both);
    const kn_json_source base = { one ? both : object, file };
    const json_t *scaling = json_object_get(object, "rope_scaling"); /* counts before both */
    const kn_json_source s = { json_is_object(scaling) ? scaling : one ? both : NULL, file };
    const json_t *kind = json_object_get(s.object, "rope_type");
    const char *type = json_string_value(kind ? kind : json_object_get(s.object, "type"));
    kn_rope_scaling *r = &c->rope_scaling;
    if (json_object_get(base.object, "rope_theta") &&
        !kn_json_number(base, "rope_theta", 0, &c->rope_base))
        return false;
    if (!s.object || json_is_null(s.object) || (type && strcmp(type, "default") == 0))
        return true;
    if (!type || strcmp(type, "llama3") != 0)
        return kn_fail("%s: rope_type '%s' of the model; the Llama here has \"default\" and "
                       "\"llama3\"",
                       file, type ? type : "");
    return kn_json_number(s, "factor", 1, &r->factor) /* 0 would be no scaling */ &&
           kn_json_number(s, "low_freq_factor", 0, &r->low_freq_factor) &&
           kn_json_number(s, "high_freq_factor", 0, &r->high_freq_factor) &&
           kn_json_int(s, "original_max_position_embeddings", 1, 1 << 30, &r->original_ctx);
}

/* Of a Qwen: whether its layers see a window, all of them or none; else an error. */
static bool qwen_window(const json_t *object, const char *file, const kn_llama_config *c,
                        bool *window)
{
    const json_t *types = json_object_get(object, "layer_types"),
                 *most = json_object_get(object, "max_window_layers"), *type;
    const json_int_t whole = json_is_integer(most) ? json_integer_value(most) : 28;
    int64_t seen = json_is_array(types) ? 0 : whole < c->layers ? c->layers - whole : 0;
    size_t i;
    json_array_foreach(types, i, type)
    {
        const char *text = json_string_value(type);
        seen += text && strcmp(text, "sliding_attention") == 0;
    }
    *window = seen > 0;
    return seen == 0 || seen == c->layers ||
           kn_fail(
               "%s: some layers of the model see a window and others don't, which the Llama here "
               "doesn't compute",
               file);
}

/* What the kinds of models that are beside Llama add to it. */
static bool read(const json_t *object, const char *file, void *config)
{
    kn_llama_config *c = config;
    const kn_json_source s = { object, file };
    const char *type = json_string_value(json_object_get(object, "model_type"));
    const json_t *window = json_object_get(object, "sliding_window");
    const bool qwen = type && strncmp(type, "qwen", 4) == 0,
               mistral = type && strcmp(type, "mistral") == 0;
    bool sees = mistral && !json_is_null(window);
    c->qkv_bias |= type && strcmp(type, "qwen2") == 0;
    c->qk_norm |= type && strcmp(type, "qwen3") == 0;
    if (mistral && c->kv_heads == 0)
        c->kv_heads = 8; /* where its configuration says nothing */
    if (qwen && json_is_true(json_object_get(object, "use_sliding_window")) &&
        !qwen_window(object, file, c, &sees))
        return false;
    if (sees && !window)
        c->window = 4096;
    else if (sees && !kn_json_int(s, "sliding_window", 1, 1 << 30, &c->window))
        return false;
    if (json_object_get(object, "window") && !kn_json_int(s, "window", 1, 1 << 30, &c->window))
        return false;
    return read_rope(object, file, c);
}

/* Angles of rope, which older files have, are left out. */
static const kn_rename renames[] = { { "model.layers.*.self_attn.rotary_emb.inv_freq", NULL },
                                     { 0 } };

/* The keys are transformers' already; its version 5 has those of rope in one object. */
static bool export(json_t *object, const void *config)
{
    const kn_llama_config *c = config;
    const json_t *scaling = json_object_get(object, "rope_scaling");
    json_t *rope = json_is_object(scaling) ? json_copy((json_t *)scaling)
                                           : json_pack("{s:s}", "rope_type", "default");
    static const char *const kinds[][2] = { { "qwen3", "Qwen3ForCausalLM" },
                                            { "qwen2", "Qwen2ForCausalLM" },
                                            { "mistral", "MistralForCausalLM" },
                                            { "llama", "LlamaForCausalLM" } };
    const bool qwen = c->qkv_bias || c->qk_norm;
    const char *const *names = kinds[c->qk_norm ? 0 : c->qkv_bias ? 1 : c->window ? 2 : 3];
    json_t *kind =
        json_pack("{s:s, s:[s], s:b, s:i}", "model_type", names[0], "architectures", names[1],
                  "use_sliding_window", qwen && c->window, "max_window_layers", 0);
    bool ok = rope && kind &&
              json_object_set_new(rope, "rope_theta", json_real(c->rope_base)) == 0 &&
              json_object_set_new(object, "rope_parameters", rope) == 0 &&
              json_object_update(object, kind) == 0 &&
              json_object_set_new(object, "sliding_window",
                                  c->window ? json_integer(c->window) : json_null()) == 0;
    json_object_del(object, "window");
    json_decref(kind);
    if (c->qkv_bias && c->qk_norm)
        return kn_fail("a model with .qkv_bias and .qk_norm is none of transformers'");
    return ok;
}

/* ---- GGUF ------------------------------------------------------------------------------------ */

#define BLOCK(name, gguf, form)                                                                    \
    {                                                                                              \
        "model.layers.*." name, "blk.*." gguf, form                                                \
    }

static const kn_tensor_name tensors[] = {
    { "model.embed_tokens.weight", "token_embd.weight", KN_FORM_SAME },
    BLOCK("input_layernorm.weight", "attn_norm.weight", KN_FORM_SAME),
    BLOCK("self_attn.q_proj.weight", "attn_q.weight", KN_FORM_HEADS),
    BLOCK("self_attn.q_proj.bias", "attn_q.bias", KN_FORM_SAME),
    BLOCK("self_attn.k_proj.weight", "attn_k.weight", KN_FORM_HEADS),
    BLOCK("self_attn.k_proj.bias", "attn_k.bias", KN_FORM_SAME),
    BLOCK("self_attn.v_proj.weight", "attn_v.weight", KN_FORM_SAME),
    BLOCK("self_attn.v_proj.bias", "attn_v.bias", KN_FORM_SAME),
    BLOCK("self_attn.o_proj.weight", "attn_output.weight", KN_FORM_SAME),
    BLOCK("self_attn.q_norm.weight", "attn_q_norm.weight", KN_FORM_SAME),
    BLOCK("self_attn.k_norm.weight", "attn_k_norm.weight", KN_FORM_SAME),
    BLOCK("post_attention_layernorm.weight", "ffn_norm.weight", KN_FORM_SAME),
    BLOCK("mlp.gate_proj.weight", "ffn_gate.weight", KN_FORM_SAME),
    BLOCK("mlp.up_proj.weight", "ffn_up.weight", KN_FORM_SAME),
    BLOCK("mlp.down_proj.weight", "ffn_down.weight", KN_FORM_SAME),
    { "model.norm.weight", "output_norm.weight", KN_FORM_SAME },
    { "lm_head.weight", "output.weight", KN_FORM_SAME },
    { 0 },
};

static const kn_key_name keys[] = { { "num_hidden_layers", "block_count" },
                                    { "num_attention_heads", "attention.head_count" },
                                    { "num_key_value_heads", "attention.head_count_kv" },
                                    { "hidden_size", "embedding_length" },
                                    { "intermediate_size", "feed_forward_length" },
                                    { "max_position_embeddings", "context_length" },
                                    { "rms_norm_eps", "attention.layer_norm_rms_epsilon" },
                                    { "rope_theta", "rope.freq_base" },
                                    { "head_dim", "attention.key_length" },
                                    { "window", "attention.sliding_window" },
                                    { 0 } };

/* ---- the family ------------------------------------------------------------------------------ */

/* A product is 2 operations a weight, three times over forward and backward; attention: two
 * products of T x C a token, of which causal attention needs half. */
static double flops_per_token(const void *config, int64_t ctx)
{
    const kn_llama_config *c = config;
    const double embd = (double)c->embd, q = (double)(c->head_dim * c->heads),
                 kv = (double)(c->head_dim * c->kv_heads), layers = c->layers,
                 block = 2 * embd * q + 2 * embd * kv + 3 * embd * (double)c->hidden;
    return 6 * (layers * block + embd * (double)c->vocab) + 6 * layers * (double)ctx * q;
}

/* kn_llama_preset, kn_llama_config_check, kn_llama_loss and the others of models/llama.h */
KN_LANGUAGE_FAMILY(llama, KN_LLAMA_CONFIG_TEXT, .noun = "Llama", .type = "llama", .field = fields,
                   .preset = presets, .fill = fill, .check = check,
                   .fewest_tensors = fewest_tensors, .read = read, .write = write,
                   .custom = "llama", .flops_per_token = flops_per_token,
                   .also = "mistral|qwen2|qwen3", .renames = renames, .export = export,
                   .architecture = "LlamaForCausalLM", .tensors = tensors, .keys = keys,
                   .embedding = "model.embed_tokens.weight")
