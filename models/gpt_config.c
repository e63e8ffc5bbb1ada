/* models/gpt_config.c: a GPT's configuration in a checkpoint. */
#include "kernels/error.h"
#include "models/gpt.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *kn_gpt_config_text(const kn_gpt_config *c, char buf[KN_GPT_CONFIG_TEXT])
{
    if (!c || !buf) {
        kn_fail("kn_gpt_config_text: the %s is NULL", c ? "buffer" : "configuration");
        return NULL;
    }
    json_t *j = json_pack("{s:s, s:i, s:i, s:I, s:I, s:I, s:f, s:b}", "model_type", "gpt2",
                          "layers", c->layers, "heads", c->heads, "embd", (json_int_t)c->embd,
                          "ctx", (json_int_t)c->ctx, "vocab", (json_int_t)c->vocab, "dropout",
                          c->dropout, "no_bias", (int)c->no_bias);
    size_t n = j ? json_dumpb(j, buf, KN_GPT_CONFIG_TEXT - 1, 0) : 0;
    json_decref(j);
    if (n == 0 || n >= KN_GPT_CONFIG_TEXT) {
        kn_fail("kn_gpt_config_text: no memory, or a configuration that isn't finite");
        return NULL;
    }
    buf[n] = '\0';
    return buf;
}

static bool read_int(const json_t *object, const char *key, int64_t high, int64_t *value,
                     const char *folder)
{
    const json_t *v = json_object_get(object, key);
    *value = json_integer_value(v);
    if (json_is_integer(v) && *value >= 1 && *value <= high)
        return true;
    return kn_fail(
        "%s/state.json: \"%s\" of the model is missing or not a whole number from 1 to %lld; the "
        "checkpoint is damaged, or of another model than a GPT",
        folder, key, (long long)high);
}

static bool read_config(const json_t *m, kn_gpt_config *config, const char *folder)
{
    int64_t layers, heads;
    const json_t *type = json_object_get(m, "model_type"); /* the first checkpoints had none */
    if (type && (!json_is_string(type) || strcmp(json_string_value(type), "gpt2") != 0))
        return kn_fail("%s/state.json: the model is a %s, not a GPT", folder,
                       json_is_string(type) ? json_string_value(type) : "thing without a name");
    if (!read_int(m, "layers", 100000, &layers, folder) ||
        !read_int(m, "heads", 100000, &heads, folder) ||
        !read_int(m, "embd", 1 << 24, &config->embd, folder) ||
        !read_int(m, "ctx", 1 << 30, &config->ctx, folder) ||
        !read_int(m, "vocab", 1 << 30, &config->vocab, folder))
        return false;
    config->layers = (int)layers;
    config->heads = (int)heads;
    config->dropout = json_number_value(json_object_get(m, "dropout"));
    config->no_bias = json_is_true(json_object_get(m, "no_bias"));
    return true;
}

/* Compares the sizes in state.json with the tensors before memory is allocated by them. */
static bool check_sizes(const kn_checkpoint *c, const kn_gpt_config *g)
{
    char last[64], after[64];
    kn_array wte, wpe;
    snprintf(last, sizeof last, "transformer.h.%d.ln_1.weight", g->layers - 1);
    snprintf(after, sizeof after, "transformer.h.%d.ln_1.weight", g->layers);
    if (!kn_checkpoint_describe(c, "transformer.wte.weight", &wte) ||
        !kn_checkpoint_describe(c, "transformer.wpe.weight", &wpe))
        return false;
    if (wte.ndim == 2 && wpe.ndim == 2 && wte.shape[0] == g->vocab && wpe.shape[0] == g->ctx &&
        wte.shape[1] == g->embd && wpe.shape[1] == g->embd && kn_checkpoint_has(c, last) &&
        !kn_checkpoint_has(c, after))
        return true;
    return kn_fail("%s/state.json gives %d layers, %lld channels, context %lld, vocabulary %lld; "
                   "it holds a model of other sizes; the checkpoint is damaged",
                   kn_checkpoint_folder(c), g->layers, (long long)g->embd, (long long)g->ctx,
                   (long long)g->vocab);
}

bool kn_gpt_config_saved(const kn_checkpoint *c, kn_gpt_config *config)
{
    const char *text = kn_checkpoint_config(c);
    if (!text || !config)
        return kn_ok() && kn_fail("kn_gpt_config_saved: the place for the configuration is NULL");
    kn_gpt_config read = { 0 };
    json_t *m = json_loads(text, 0, NULL);
    bool ok = m ? read_config(m, &read, kn_checkpoint_folder(c)) && check_sizes(c, &read)
                : kn_fail("kn_gpt_config_saved: no memory");
    json_decref(m);
    if (ok)
        *config = read;
    return ok;
}
