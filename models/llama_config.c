/* models/llama_config.c: a Llama's sizes, and its configuration in a checkpoint, which has the
 * names of Hugging Face's config.json. */
#include "kernels/error.h"
#include "models/llama.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- sizes ----------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int layers, heads, kv_heads;
    int64_t embd, hidden, ctx, vocab;
    double rope_base, factor;
    bool untied;
} preset[] = {
    { "llama2-7b", 32, 32, 32, 4096, 11008, 4096, 32000, 1e4, 0, true },
    { "llama3-8b", 32, 32, 8, 4096, 14336, 8192, 128256, 5e5, 0, true },
    { "llama3-70b", 80, 64, 8, 8192, 28672, 8192, 128256, 5e5, 0, true },
    { "llama3.1-8b", 32, 32, 8, 4096, 14336, 131072, 128256, 5e5, 8, true },
    { "llama3.1-70b", 80, 64, 8, 8192, 28672, 131072, 128256, 5e5, 8, true },
    { "llama3.1-405b", 126, 128, 8, 16384, 53248, 131072, 128256, 5e5, 8, true },
    { "llama3.2-1b", 16, 32, 8, 2048, 8192, 131072, 128256, 5e5, 32, false },
    { "llama3.2-3b", 28, 24, 8, 3072, 8192, 131072, 128256, 5e5, 32, false },
    { "stories15m", 6, 6, 6, 288, 768, 256, 32000, 1e4, 0, false },
    { "stories42m", 8, 8, 8, 512, 1376, 1024, 32000, 1e4, 0, false },
    { "stories110m", 12, 12, 12, 768, 2048, 1024, 32000, 1e4, 0, false },
};
enum { PRESETS = sizeof preset / sizeof *preset };

bool kn_llama_preset(const char *name, kn_llama_config *config)
{
    char list[256] = "";
    if (!config)
        return kn_fail("kn_llama_preset: the place for the configuration is NULL");
    for (int i = 0; i < PRESETS; i++) {
        if (name && strcmp(name, preset[i].name) == 0) {
            *config = (kn_llama_config){ .layers = preset[i].layers,
                                         .heads = preset[i].heads,
                                         .kv_heads = preset[i].kv_heads,
                                         .embd = preset[i].embd,
                                         .hidden = preset[i].hidden,
                                         .ctx = preset[i].ctx,
                                         .vocab = preset[i].vocab,
                                         .norm_eps = 1e-5,
                                         .rope_base = preset[i].rope_base,
                                         .untied = preset[i].untied };
            if (preset[i].factor > 0)
                config->rope_scaling = (kn_rope_scaling){ preset[i].factor, 1, 4, 8192 };
            return true;
        }
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "",
                 preset[i].name);
    }
    return kn_fail("there is no Llama '%s'; there are %s", name ? name : "", list);
}

static void scaling_defaults(kn_rope_scaling *s)
{
    if (s->low_freq_factor == 0)
        s->low_freq_factor = 1;
    if (s->high_freq_factor == 0)
        s->high_freq_factor = 4;
    if (s->original_ctx == 0)
        s->original_ctx = 8192;
}

/* kn_multi_head_attention_init checks the numbers of rope. */
bool kn_llama_config_check(kn_llama_config *c)
{
    if (!c)
        return kn_fail("kn_llama_config_check: the configuration is NULL");
    if (c->kv_heads == 0)
        c->kv_heads = c->heads;
    if (c->hidden == 0 && c->embd > 0 && c->embd < (int64_t)1 << 40)
        c->hidden = (c->embd * 8 / 3 + 63) / 64 * 64;
    if (c->norm_eps == 0)
        c->norm_eps = 1e-5;
    if (c->rope_base == 0)
        c->rope_base = 10000;
    if (c->rope_scaling.factor != 0)
        scaling_defaults(&c->rope_scaling);
    if (c->layers < 1 || c->heads < 1 || c->kv_heads < 1 || c->embd < 1 || c->hidden < 1 ||
        c->ctx < 1 || c->vocab < 1)
        return kn_fail("llama: %d layers, %d heads, %d key-value heads, %lld channels, %lld in the "
                       "MLP, context %lld, vocabulary %lld; all must be at least 1",
                       c->layers, c->heads, c->kv_heads, (long long)c->embd, (long long)c->hidden,
                       (long long)c->ctx, (long long)c->vocab);
    if (c->embd % c->heads || c->embd / c->heads % 2)
        return kn_fail("llama: %d heads don't divide %lld channels into heads of an even size, "
                       "which rope needs; choose another number of heads",
                       c->heads, (long long)c->embd);
    if (c->heads % c->kv_heads)
        return kn_fail("llama: %d key-value heads don't divide %d heads; choose a number that "
                       "divides the heads",
                       c->kv_heads, c->heads);
    return (c->dropout >= 0 && c->dropout < 1 && c->norm_eps > 0 && isfinite(c->norm_eps)) ||
           kn_fail("llama: dropout %g, .norm_eps %g; they must lie in [0, 1) and above 0",
                   c->dropout, c->norm_eps);
}

double kn_llama_flops_per_token(const kn_llama_config *config, int64_t ctx)
{
    if (!config) {
        kn_fail("kn_llama_flops_per_token: the configuration is NULL");
        return 0;
    }
    kn_llama_config c = *config;
    if (!kn_llama_config_check(&c))
        return 0;
    double embd = (double)c.embd, kv = embd / c.heads * c.kv_heads, layers = c.layers;
    double block = 2 * embd * embd + 2 * embd * kv + 3 * embd * (double)c.hidden;
    /* a product is 2 operations a weight, three times over forward and backward; attention: two
     * products of T x C a token, of which causal attention needs half */
    return 6 * (layers * block + embd * (double)c.vocab) + 6 * layers * (double)ctx * embd;
}

/* ---- to text --------------------------------------------------------------------------------- */

static json_t *scaling_json(const kn_rope_scaling *s)
{
    if (s->factor == 0)
        return json_null();
    return json_pack("{s:s, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "factor", s->factor,
                     "low_freq_factor", s->low_freq_factor, "high_freq_factor", s->high_freq_factor,
                     "original_max_position_embeddings", (json_int_t)s->original_ctx);
}

const char *kn_llama_config_text(const kn_llama_config *config, char buf[KN_LLAMA_CONFIG_TEXT])
{
    if (!config || !buf) {
        kn_fail("kn_llama_config_text: the %s is NULL", config ? "buffer" : "configuration");
        return NULL;
    }
    kn_llama_config c = *config;
    if (!kn_llama_config_check(&c))
        return NULL;
    json_t *j = json_pack(
        "{s:s, s:i, s:i, s:i, s:I, s:I, s:I, s:I, s:f, s:f, s:o, s:f, s:b, s:s, s:b, s:b}",
        "model_type", "llama", "num_hidden_layers", c.layers, "num_attention_heads", c.heads,
        "num_key_value_heads", c.kv_heads, "hidden_size", (json_int_t)c.embd, "intermediate_size",
        (json_int_t)c.hidden, "max_position_embeddings", (json_int_t)c.ctx, "vocab_size",
        (json_int_t)c.vocab, "rms_norm_eps", c.norm_eps, "rope_theta", c.rope_base, "rope_scaling",
        scaling_json(&c.rope_scaling), "attention_dropout", c.dropout, "tie_word_embeddings",
        (int)!c.untied, "hidden_act", "silu", "attention_bias", 0, "mlp_bias", 0);
    size_t n = j ? json_dumpb(j, buf, KN_LLAMA_CONFIG_TEXT - 1, 0) : 0;
    json_decref(j);
    if (n == 0 || n >= KN_LLAMA_CONFIG_TEXT) {
        kn_fail("kn_llama_config_text: no memory, or a configuration that isn't finite");
        return NULL;
    }
    buf[n] = '\0';
    return buf;
}

/* ---- from text ------------------------------------------------------------------------------- */

/* The object that is read, and the file's name for errors. */
typedef struct source {
    const json_t *object;
    const char *folder;
} source;

static bool read_int(source s, const char *key, int64_t otherwise, int64_t high, int64_t *value)
{
    const json_t *v = json_object_get(s.object, key);
    *value = v ? json_integer_value(v) : otherwise;
    if ((!v || json_is_integer(v)) && *value >= 1 && *value <= high)
        return true;
    return kn_fail("%s/state.json: \"%s\" of the model is missing or not a whole number from 1 to "
                   "%lld; the checkpoint is damaged",
                   s.folder, key, (long long)high);
}

static bool read_number(source s, const char *key, double otherwise, double *value)
{
    const json_t *v = json_object_get(s.object, key);
    *value = v ? json_number_value(v) : otherwise;
    if ((!v || json_is_number(v)) && *value >= 0)
        return true;
    return kn_fail(
        "%s/state.json: \"%s\" of the model isn't a number of at least 0; the checkpoint "
        "is damaged",
        s.folder, key);
}

/* Numbers of rope: rope_theta and rope_scaling, or both in rope_parameters (transformers 5). */
static bool read_rope(source s, kn_llama_config *c)
{
    const json_t *both = json_object_get(s.object, "rope_parameters");
    bool one = json_is_object(both);
    source of = { one ? both : s.object, s.folder };
    source scaling = { one ? both : json_object_get(s.object, "rope_scaling"), s.folder };
    if (!read_number(of, "rope_theta", 10000, &c->rope_base))
        return false;
    const json_t *kind = json_object_get(scaling.object, "rope_type");
    const char *type = json_string_value(kind ? kind : json_object_get(scaling.object, "type"));
    if (!scaling.object || json_is_null(scaling.object) || (type && strcmp(type, "default") == 0))
        return true;
    if (!type || strcmp(type, "llama3") != 0)
        return kn_fail("%s/state.json: rope_type '%s' of the model; the Llama here has \"default\" "
                       "and \"llama3\"",
                       s.folder, type ? type : "");
    kn_rope_scaling *r = &c->rope_scaling;
    if (!read_number(scaling, "factor", 0, &r->factor))
        return false;
    if (!(r->factor >= 1)) /* 0 would be no scaling */
        return kn_fail("%s/state.json: \"factor\" of the model's rope is missing or below 1; the "
                       "checkpoint is damaged",
                       s.folder);
    return read_number(scaling, "low_freq_factor", 0, &r->low_freq_factor) &&
           read_number(scaling, "high_freq_factor", 0, &r->high_freq_factor) &&
           read_int(scaling, "original_max_position_embeddings", 0, 1 << 30, &r->original_ctx);
}

/* Settings of Hugging Face's Llama that kn_llama doesn't have. */
static bool read_foreign(source s, const kn_llama_config *c)
{
    const char *act = json_string_value(json_object_get(s.object, "hidden_act"));
    const json_t *size = json_object_get(s.object, "head_dim");
    if (json_is_true(json_object_get(s.object, "attention_bias")) ||
        json_is_true(json_object_get(s.object, "mlp_bias")))
        return kn_fail("%s/state.json: the model has biases, the Llama here has none", s.folder);
    if (act && strcmp(act, "silu") != 0)
        return kn_fail("%s/state.json: hidden_act '%s' of the model; the Llama here has \"silu\"",
                       s.folder, act);
    return !json_is_integer(size) || json_integer_value(size) * c->heads == c->embd ||
           kn_fail("%s/state.json: head_dim %lld of the model; the Llama here has hidden_size / "
                   "num_attention_heads, %lld",
                   s.folder, (long long)json_integer_value(size), (long long)c->embd / c->heads);
}

static bool read_config(source s, kn_llama_config *c)
{
    int64_t layers, heads, kv_heads;
    if (!read_int(s, "num_hidden_layers", 0, 100000, &layers) ||
        !read_int(s, "num_attention_heads", 0, 100000, &heads) ||
        !read_int(s, "num_key_value_heads", heads, 100000, &kv_heads) ||
        !read_int(s, "hidden_size", 0, 1 << 24, &c->embd) ||
        !read_int(s, "intermediate_size", 0, 1 << 26, &c->hidden) ||
        !read_int(s, "max_position_embeddings", 0, 1 << 30, &c->ctx) ||
        !read_int(s, "vocab_size", 0, 1 << 30, &c->vocab) ||
        !read_number(s, "rms_norm_eps", 1e-6, &c->norm_eps) ||
        !read_number(s, "attention_dropout", 0, &c->dropout) || !read_rope(s, c))
        return false;
    c->layers = (int)layers;
    c->heads = (int)heads;
    c->kv_heads = (int)kv_heads;
    c->untied = !json_is_true(json_object_get(s.object, "tie_word_embeddings"));
    return read_foreign(s, c) && kn_llama_config_check(c);
}

/* A tensor of name in f has shape [rows, columns]. */
static bool is(const kn_checkpoint *c, const char *name, int64_t rows, int64_t columns)
{
    kn_array a;
    return kn_checkpoint_has(c, name) && kn_checkpoint_describe(c, name, &a) && a.ndim == 2 &&
           a.shape[0] == rows && a.shape[1] == columns;
}

/* Compares the sizes in state.json with the tensors before memory is allocated by them. */
static bool check_sizes(const kn_checkpoint *c, const kn_llama_config *g)
{
    char last[64], after[64];
    snprintf(last, sizeof last, "model.layers.%d.input_layernorm.weight", g->layers - 1);
    snprintf(after, sizeof after, "model.layers.%d.input_layernorm.weight", g->layers);
    if (is(c, "model.embed_tokens.weight", g->vocab, g->embd) &&
        is(c, "model.layers.0.self_attn.k_proj.weight", g->embd / g->heads * g->kv_heads,
           g->embd) &&
        is(c, "model.layers.0.mlp.gate_proj.weight", g->hidden, g->embd) &&
        kn_checkpoint_has(c, "lm_head.weight") == g->untied && kn_checkpoint_has(c, last) &&
        !kn_checkpoint_has(c, after))
        return true;
    return kn_fail("%s/state.json gives %d layers, %lld channels, %d of %d heads for keys, %lld "
                   "channels in the MLP, vocabulary %lld, a head of %s; it holds a "
                   "model of other sizes; the checkpoint is damaged",
                   kn_checkpoint_folder(c), g->layers, (long long)g->embd, g->kv_heads, g->heads,
                   (long long)g->hidden, (long long)g->vocab,
                   g->untied ? "its own" : "the embedding");
}

static bool read_saved(const kn_checkpoint *c, const json_t *m, kn_llama_config *config)
{
    const char *type = json_string_value(json_object_get(m, "model_type"));
    source s = { m, kn_checkpoint_folder(c) };
    if (!type || strcmp(type, "llama") != 0)
        return kn_fail("%s/state.json: the model is %s%s, not a Llama", s.folder,
                       type ? "a " : "of an unknown kind", type ? type : "");
    return read_config(s, config) && check_sizes(c, config);
}

bool kn_llama_config_saved(const kn_checkpoint *c, kn_llama_config *config)
{
    const char *text = kn_checkpoint_config(c);
    if (!text || !config)
        return kn_ok() && kn_fail("kn_llama_config_saved: the place for the configuration is NULL");
    kn_llama_config read = { 0 };
    json_t *m = json_loads(text, 0, NULL);
    bool ok = m ? read_saved(c, m, &read) : kn_fail("kn_llama_config_saved: no memory");
    json_decref(m);
    if (ok)
        *config = read;
    return ok;
}
