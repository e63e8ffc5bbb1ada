/* models/language.c: the rows of the families, and the choice among them. */
#include "models/language.h"
#include "kernels/error.h"
#include "tensor/json.h"

#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* ---- GPT ------------------------------------------------------------------------------------- */

static bool gpt_preset(const char *name, kn_language_config *c)
{
    return kn_gpt_preset(name, &c->gpt);
}

static kn_language_sizes gpt_sizes(const kn_language_config *c)
{
    const kn_gpt_config *g = &c->gpt;
    return (kn_language_sizes){ g->layers,   g->heads, g->heads, g->embd,
                                4 * g->embd, g->ctx,   g->vocab };
}

static double gpt_flops(const kn_language_config *c, int64_t ctx)
{
    return kn_gpt_flops_per_token(&c->gpt, ctx);
}

static bool gpt_init(kn_language_model *m, const kn_language_config *c, kn_dtype dtype,
                     kn_device device)
{
    return kn_gpt_init(&m->gpt, c->gpt, dtype, device);
}

static kn_tensor *gpt_loss(kn_language_model *m, kn_tensor *ids, kn_tensor *targets)
{
    return kn_gpt_loss(&m->gpt, ids, targets);
}

static kn_tensor *gpt_next_logits(kn_language_model *m, kn_tensor *ids)
{
    return kn_gpt_next_logits(&m->gpt, ids);
}

static const char *gpt_text(const kn_language_config *c, char *buf)
{
    return kn_gpt_config_text(&c->gpt, buf);
}

static bool gpt_saved(const kn_checkpoint *c, kn_language_config *config)
{
    return kn_gpt_config_saved(c, &config->gpt);
}

const kn_family kn_gpt_family = { "GPT",      "gpt2",          "gpt_block", KN_GPT_CHOICES,
                                  gpt_preset, gpt_sizes,       gpt_flops,   gpt_init,
                                  gpt_loss,   gpt_next_logits, gpt_text,    gpt_saved };

/* ---- Llama ----------------------------------------------------------------------------------- */

static bool llama_preset(const char *name, kn_language_config *c)
{
    return kn_llama_preset(name, &c->llama);
}

static kn_language_sizes llama_sizes(const kn_language_config *c)
{
    kn_llama_config g = c->llama;
    kn_llama_config_check(&g);
    return (kn_language_sizes){ g.layers, g.heads, g.kv_heads, g.embd, g.hidden, g.ctx, g.vocab };
}

static double llama_flops(const kn_language_config *c, int64_t ctx)
{
    return kn_llama_flops_per_token(&c->llama, ctx);
}

static bool llama_init(kn_language_model *m, const kn_language_config *c, kn_dtype dtype,
                       kn_device device)
{
    return kn_llama_init(&m->llama, c->llama, dtype, device);
}

static kn_tensor *llama_loss(kn_language_model *m, kn_tensor *ids, kn_tensor *targets)
{
    return kn_llama_loss(&m->llama, ids, targets);
}

static kn_tensor *llama_next_logits(kn_language_model *m, kn_tensor *ids)
{
    return kn_llama_next_logits(&m->llama, ids);
}

static const char *llama_text(const kn_language_config *c, char *buf)
{
    return kn_llama_config_text(&c->llama, buf);
}

static bool llama_saved(const kn_checkpoint *c, kn_language_config *config)
{
    return kn_llama_config_saved(c, &config->llama);
}

const kn_family kn_llama_family = { "Llama",           "llama",      "llama_block",
                                    KN_LLAMA_CHOICES,  llama_preset, llama_sizes,
                                    llama_flops,       llama_init,   llama_loss,
                                    llama_next_logits, llama_text,   llama_saved };

/* ---- any ------------------------------------------------------------------------------------- */

static const kn_family *const families[] = { &kn_gpt_family, &kn_llama_family };
enum { FAMILIES = sizeof families / sizeof *families };

const kn_family *kn_family_of_choice(const char *choice)
{
    size_t n = strlen(choice);
    for (int i = 0; i < FAMILIES; i++)
        for (const char *at = families[i]->choices; *at; at += *at == '|') {
            size_t length = strcspn(at, "|");
            if (length == n && strncmp(at, choice, n) == 0)
                return families[i];
            at += length;
        }
    return NULL;
}

bool kn_family_is_own_size(const kn_family *f, const char *choice)
{
    size_t n = strcspn(f->choices, "|"); /* the first */
    return strlen(choice) == n && strncmp(f->choices, choice, n) == 0;
}

bool kn_language_init(kn_language_model *m, const kn_language_config *c, kn_dtype dtype,
                      kn_device device)
{
    m->family = c->family;
    return c->family->init(m, c, dtype, device);
}

kn_tensor *kn_language_next_logits(void *model, kn_tensor *ids)
{
    kn_language_model *m = model;
    return m->family->next_logits(m, ids);
}

const char *kn_language_config_text(const kn_language_config *c, char buf[KN_LANGUAGE_CONFIG_TEXT])
{
    return c->family->text(c, buf);
}

bool kn_language_config_saved(const kn_checkpoint *c, kn_language_config *config)
{
    const char *text = kn_checkpoint_config(c);
    json_error_t error;
    json_t *m = text ? kn_json_parse(text, strlen(text), 0, "a configuration", &error) : NULL;
    if (!m)
        return kn_ok() && kn_fail("kn_language_config_saved: no memory");
    /* a GPT's had no type at first */
    const char *type = json_string_value(json_object_get(m, "model_type"));
    kn_language_config read = { .family = type ? NULL : &kn_gpt_family };
    char types[64] = "";
    for (int i = 0; type && i < FAMILIES; i++) {
        if (strcmp(type, families[i]->type) == 0)
            read.family = families[i];
        snprintf(types + strlen(types), sizeof types - strlen(types), "%s%s", i ? ", " : "",
                 families[i]->type);
    }
    bool ok = read.family || kn_fail("%s/state.json: the model is a %s; there are %s",
                                     kn_checkpoint_folder(c), type, types);
    json_decref(m);
    if (!ok || !kn_json_watch(text, strlen(text), "a configuration"))
        return false;
    ok = read.family->saved(c, &read);
    ok = kn_json_watched("a configuration") && ok;
    if (ok)
        *config = read;
    return ok;
}
