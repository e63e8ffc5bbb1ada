/* models/language.h (private): the families of language models behind one interface, for the
 * trainer, generate and whatever reads a checkpoint of any of them. Each family has a public header
 * of its own; its row in language.c is all that the rest needs. */
#ifndef KNAP_MODELS_LANGUAGE_H
#define KNAP_MODELS_LANGUAGE_H

#include "models/gpt.h"
#include "models/llama.h"

/* Names of --model, for a kn_option's choices: sizes given one by one, then the published ones. */
#define KN_GPT_CHOICES "custom|gpt2|gpt2-medium|gpt2-large|gpt2-xl"
#define KN_LLAMA_CHOICES                                                                           \
    "llama|stories15m|stories42m|stories110m|llama2-7b|llama3-8b|llama3-70b|llama3.1-8b|"          \
    "llama3.1-70b|llama3.1-405b|llama3.2-1b|llama3.2-3b"

typedef struct kn_family kn_family;

typedef struct kn_language_config {
    const kn_family *family;
    union {
        kn_gpt_config gpt;
        kn_llama_config llama;
    };
} kn_language_config;

typedef struct kn_language_model {
    union {
        kn_module base; /* comes first */
        kn_gpt gpt;
        kn_llama llama;
    };
    const kn_family *family; /* NULL: not made */
} kn_language_model;

/* The sizes that every family has. */
typedef struct kn_language_sizes {
    int layers, heads, kv_heads;
    int64_t embd, hidden, ctx, vocab;
} kn_language_sizes;

struct kn_family {
    const char *name;        /* in messages: "GPT" */
    const char *type;        /* "model_type" of a checkpoint's configuration: "gpt2" */
    const char *block_class; /* the modules that are units and recompute */
    const char *choices;     /* KN_GPT_CHOICES */
    bool (*preset)(const char *name, kn_language_config *c);
    kn_language_sizes (*sizes)(const kn_language_config *c);
    double (*flops_per_token)(const kn_language_config *c, int64_t ctx);
    bool (*init)(kn_language_model *m, const kn_language_config *c, kn_dtype dtype,
                 kn_device device);
    kn_tensor *(*loss)(kn_language_model *m, kn_tensor *ids, kn_tensor *targets);
    kn_tensor *(*next_logits)(kn_language_model *m, kn_tensor *ids);
    const char *(*text)(const kn_language_config *c, char *buf);
    bool (*saved)(const kn_checkpoint *c, kn_language_config *config);
};
extern const kn_family kn_gpt_family, kn_llama_family;

/* The family that has this choice; NULL: none. Without an error. */
const kn_family *kn_family_of_choice(const char *choice);
/* True for the choice whose sizes are given one by one. */
bool kn_family_is_own_size(const kn_family *f, const char *choice);

/* Declares the model on device; m is zeros. */
bool kn_language_init(kn_language_model *m, const kn_language_config *c, kn_dtype dtype,
                      kn_device device);
/* A kn_logits_fn. */
kn_tensor *kn_language_next_logits(void *model, kn_tensor *ids);

/* A configuration as JSON and back, of any family; kn_llama_config_text says more. */
#define KN_LANGUAGE_CONFIG_TEXT KN_LLAMA_CONFIG_TEXT
const char *kn_language_config_text(const kn_language_config *c, char buf[KN_LANGUAGE_CONFIG_TEXT]);
bool kn_language_config_saved(const kn_checkpoint *c, kn_language_config *config);

#endif
