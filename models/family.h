/* models/family.h (private): families of models. A family is one table: its names, the fields of
 * its configuration with their ranges, keys and options, its presets, and the functions that make
 * and run a model. From the table follow the text of a configuration and its reading, the checks
 * against the tensors of a checkpoint, the choices and options of the trainers, and their help.
 * The linker collects the tables, so no list of them is kept by hand.
 *
 *   KN_LANGUAGE_FAMILY(gpt, KN_GPT_CONFIG_TEXT, .noun = "GPT", .type = "gpt2", ...)
 *                                                                         models/gpt_config.c */
#ifndef KNAP_MODELS_FAMILY_H
#define KNAP_MODELS_FAMILY_H

#include "state/checkpoint.h"
#include "state/dict.h"
#include "nn/layers.h"

#include <jansson.h>
#include <stddef.h>

/* ---- the table ------------------------------------------------------------------------------- */

typedef enum kn_field_kind {
    KN_FIELD_INT = 1, /* int, from low to high */
    KN_FIELD_SIZE,    /* int64_t, from low to high */
    KN_FIELD_NUMBER,  /* double, from low to high */
    KN_FIELD_FLAG,    /* bool */
    KN_FIELD_NOT,     /* bool, whose opposite the JSON has */
    KN_FIELD_LIST,    /* int[KN_FIELD_LENGTH], each from low to high */
    KN_FIELD_FIXED    /* no field: the JSON of every model has the first of .text */
} kn_field_kind;
enum { KN_FIELD_LENGTH = 4 };

/* A field of a configuration. */
typedef struct kn_config_field {
    const char *name; /* with '-' for '_': of the option, and in messages; one name in all tables */
    const char *key;  /* in the JSON; "model_args.depth": within an object. NULL: .write's */
    /* In the other program's config.json: NULL: .key. "": there is none. "n_positions|n_ctx": is
     * read as the first that is there, and written as each. */
    const char *theirs;
    kn_field_kind kind;
    size_t offset;
    double low, high;
    double zero;   /* the value that 0 stands for; 0: itself, or the one of .fill */
    bool none;     /* 0 is fine, whatever low says */
    bool optional; /* the key may be missing; then the field is .missing */
    double missing;
    const char *text; /* "a|b": JSON, or else strings */
    bool free;        /* presets leave it open: another value is still the same preset */
    /* as an option of the trainer; it has the range of the field */
    bool option;                     /* there is one */
    bool opposite;                   /* it means the opposite of the field, and .name does */
    const char *value, *help, *note; /* of kn_option; several families' help is joined */
    const char *with;                /* the option only counts beside this one */
} kn_config_field;

typedef struct kn_preset {
    const char *name;
    const void *config;
    bool own; /* timm has no such model */
} kn_preset;

struct kn_model_tensors; /* models/model_tensors.h */

/* A parameter in the files of models/formats/: '*' stands for the block's number. */
typedef struct kn_tensor_name {
    const char *name, *gguf;
    enum kn_tensor_form {
        KN_FORM_SAME,
        KN_FORM_TRANSPOSED,
        KN_FORM_HEADS /* rotary pairs are neighbours, in GGUF's architecture "llama" */
    } form;
} kn_tensor_name;

/* A key of config.json and GGUF's for the same, behind its architecture. */
typedef struct kn_key_name {
    const char *key, *gguf;
} kn_key_name;

typedef enum kn_family_kind { KN_LANGUAGE_MODELS, KN_IMAGE_MODELS } kn_family_kind;

typedef struct kn_family {
    kn_family_kind kind;
    const char *noun;             /* in messages: "GPT", "residual net" */
    const char *prefix;           /* KN_FAMILY_TABLE's: "gpt" of kn_gpt_init */
    const char *type;             /* "model_type" of the JSON: "gpt2" */
    const char *block_class;      /* the same: the modules that are units and recompute */
    size_t size;                  /* the same: of a configuration, at most KN_CONFIG_ROOM */
    const kn_config_field *field; /* ended by {0} */
    const kn_preset *preset;      /* ended by {0} */
    /* Sets defaults that depend on other fields, before the ranges are checked; may be NULL. */
    void (*fill)(void *config);
    /* Relations between fields, each of which is in its range. */
    bool (*check)(const void *config);
    /* KN_FAMILY_TABLE's */
    bool (*init)(void *model, const void *config, kn_dtype dtype, kn_device device);
    /* A lower bound of the tensors of a model, before it is made. */
    int64_t (*fewest_tensors)(const void *config);
    /* More than the fields of the JSON, Knap's or the other program's; may be NULL. file names it
     * in errors. */
    bool (*read)(const json_t *object, const char *file, void *config);
    bool (*write)(json_t *object, const void *config);

    /* Language models, whose roots are called by kn_language_loss and its neighbours. */
    const char *custom; /* the choice of --model whose sizes are options: "custom" */
    double (*flops_per_token)(const void *config, int64_t ctx); /* of one that was checked */
    /* Hugging Face's folders: other "model_type"s that it reads, "a|b" (NULL: none); how tensors of
     * the files are called here, ended by {0} (NULL: as there); what may be missing before their
     * names. */
    const char *also;
    const struct kn_rename *renames;
    const char *optional_prefix;
    /* For them: adds keys of the other program that are no fields' to the object of a config.json,
     * and tensors that its models have beside this one's (NULL: none). */
    bool (*export)(json_t *object, const void *config);
    bool (*export_more)(struct kn_model_tensors *t, const void *config);
    const char *architecture; /* the other program's class */
    /* Files of models/formats/, both ended by {0}: the tensors in the order of llm.c's files. */
    const kn_tensor_name *tensors;
    const kn_key_name *keys;
    const char *embedding; /* the parameter that a tied head is */

    /* image models: timm's names of modules, of the way from rows and columns to one vector, and of
     * a model that takes any sizes as arguments (NULL: none does) */
    const char *first_conv, *classifier, *global_pool, *any_sizes;
    const char *optional; /* pattern (fnmatch) of tensors that files may lack; NULL: none */
} kn_family;

/* Defines kn_<id>_family, a family of kn_<model>s, which the linker puts beside those of other
 * files. */
#define KN_FAMILY_TABLE(id, model, ...)                                                            \
    static bool id##_init(void *m, const void *config, kn_dtype dtype, kn_device device)           \
    {                                                                                              \
        return kn_##model##_init(m, *(const kn_##model##_config *)config, dtype, device);          \
    }                                                                                              \
    const kn_family kn_##id##_family = { .prefix = #model,                                         \
                                         .block_class = #model "_block",                           \
                                         .size = sizeof(kn_##model##_config),                      \
                                         .init = id##_init,                                        \
                                         __VA_ARGS__ };                                            \
    static const kn_family *const id##_entry __attribute__((section("kn_families"), used)) =       \
        &kn_##id##_family;
/* The family of kn_<id>s, and the functions that every model has: kn_<id>_preset, _config_check,
 * _config_text, _config_saved, _config_of and _recompute. text: room for the configuration's. */
#define KN_FAMILY(id, text, ...)                                                                   \
    KN_FAMILY_TABLE(id, id, __VA_ARGS__)                                                           \
    bool kn_##id##_preset(const char *name, kn_##id##_config *config)                              \
    {                                                                                              \
        return kn_family_preset(&kn_##id##_family, name, config);                                  \
    }                                                                                              \
    bool kn_##id##_config_check(kn_##id##_config *config)                                          \
    {                                                                                              \
        return kn_family_check(&kn_##id##_family, config);                                         \
    }                                                                                              \
    const char *kn_##id##_config_text(const kn_##id##_config *config, char buf[text])              \
    {                                                                                              \
        return kn_family_text(&kn_##id##_family, config, buf, text);                               \
    }                                                                                              \
    bool kn_##id##_config_saved(const kn_checkpoint *c, kn_##id##_config *config)                  \
    {                                                                                              \
        return kn_family_saved(&kn_##id##_family, c, config);                                      \
    }                                                                                              \
    const kn_##id##_config *kn_##id##_config_of(const kn_##id *model)                              \
    {                                                                                              \
        return kn_family_config_of(&kn_##id##_family, model);                                      \
    }                                                                                              \
    void kn_##id##_recompute(kn_##id *model, bool on)                                              \
    {                                                                                              \
        kn_family_recompute(&kn_##id##_family, model, on);                                         \
    }
/* The same of a language model: kn_<id>_logits, _next_logits, _loss, _documents_loss and
 * _flops_per_token, too. */
#define KN_LANGUAGE_FAMILY(id, text, ...)                                                          \
    KN_FAMILY(id, text, .kind = KN_LANGUAGE_MODELS, __VA_ARGS__)                                   \
    kn_tensor *kn_##id##_logits(kn_##id *model, kn_tensor *ids)                                    \
    {                                                                                              \
        return kn_language_logits(model, ids);                                                     \
    }                                                                                              \
    kn_tensor *kn_##id##_next_logits(kn_##id *model, kn_tensor *ids)                               \
    {                                                                                              \
        return kn_language_next_logits(model, ids);                                                \
    }                                                                                              \
    kn_tensor *kn_##id##_loss(kn_##id *model, kn_tensor *ids, kn_tensor *targets)                  \
    {                                                                                              \
        return kn_language_loss(model, ids, targets);                                              \
    }                                                                                              \
    kn_tensor *kn_##id##_documents_loss(kn_##id *model, kn_tensor *ids, kn_tensor *targets,        \
                                        kn_tensor *begin)                                          \
    {                                                                                              \
        return kn_language_documents_loss(model, ids, targets, begin);                             \
    }                                                                                              \
    double kn_##id##_flops_per_token(const kn_##id##_config *config, int64_t ctx)                  \
    {                                                                                              \
        return kn_family_flops(&kn_##id##_family, config, ctx);                                    \
    }
extern const kn_family kn_gpt_family, kn_llama_family, kn_resnet_family, kn_vit_family;

/* Whether f's models are those of another table, which may be f itself or one over its model. */
bool kn_family_makes(const kn_family *f, const kn_family *other);
/* Family number i of a kind, from 0; NULL past the last. */
const kn_family *kn_family_at(kn_family_kind kind, int i);
/* That of a "model_type", of a choice of --model (a preset, or .custom); NULL, without an error:
 * there is none. */
const kn_family *kn_family_typed(kn_family_kind kind, const char *type);
const kn_family *kn_family_of_choice(kn_family_kind kind, const char *choice);
/* All choices, as kn_option has them: "custom|gpt2|...". */
#define KN_CHOICES 1024
const char *kn_family_choices(kn_family_kind kind, char buf[KN_CHOICES]);
/* All "model_type"s, "gpt2, llama". The others' add .also; of GGUF, families without keys lack. */
typedef enum kn_types_of { KN_TYPES_OWN, KN_TYPES_THEIRS, KN_TYPES_GGUF } kn_types_of;
const char *kn_family_types(kn_family_kind kind, kn_types_of of, char buf[KN_CHOICES]);

/* ---- a configuration of any family ----------------------------------------------------------- */

enum { KN_CONFIG_ROOM = 256 };
typedef struct kn_model_config {
    const kn_family *family;
    _Alignas(16) unsigned char of[KN_CONFIG_ROOM]; /* the family's own struct */
} kn_model_config;

/* Of the family's own struct a copy. */
kn_model_config kn_config_of(const kn_family *f, const void *config);
const kn_config_field *kn_family_field(const kn_family *f, const char *name); /* NULL: none */
/* A field by name as a number (a flag as its name means it); otherwise, where there is none. */
double kn_config_get(const kn_model_config *c, const char *name, double otherwise);
/* Sets it; without effect where there is none. */
void kn_config_set(kn_model_config *c, const char *name, double value);
/* The preset with these sizes, whatever the fields that presets leave open; NULL: none. */
const kn_preset *kn_config_preset(const kn_model_config *c);
/* Behind the public functions with the prefix of a family. */
bool kn_family_preset(const kn_family *f, const char *name, void *config);
bool kn_family_check(const kn_family *f, void *config);
const char *kn_family_text(const kn_family *f, const void *config, char *buf, size_t size);
bool kn_family_saved(const kn_family *f, const kn_checkpoint *c, void *config);
/* A model's data begin with its configuration; NULL with an error. */
const void *kn_family_config_of(const kn_family *f, const void *model);
void kn_family_recompute(const kn_family *f, void *model, bool on);
double kn_family_flops(const kn_family *f, const void *config, int64_t ctx);

/* The root of a language model takes ids [B,T], and gives logits [B,T,V]; or takes targets [B,T],
 * too, and gives the loss; or takes also where in its row each token's document begins, [B,T]. Its
 * argument beside these is a bool: logits of the last position alone, [B,V]. */
kn_tensor *kn_language_logits(void *model, kn_tensor *ids);
kn_tensor *kn_language_next_logits(void *model, kn_tensor *ids);
kn_tensor *kn_language_loss(void *model, kn_tensor *ids, kn_tensor *targets);
kn_tensor *kn_language_documents_loss(void *model, kn_tensor *ids, kn_tensor *targets,
                                      kn_tensor *begin);

/* The configuration as JSON, which the caller drops; NULL with an error. */
json_t *kn_config_json(const kn_model_config *c);
/* The same with the keys of the other program's config.json beside its own. */
json_t *kn_config_json_theirs(const kn_model_config *c);
/* As text, for kn_checkpoint_save's .config; the caller frees it (kn_host_free). */
char *kn_config_text(const kn_model_config *c);
/* Reads what kn_config_json wrote. file names it in errors. */
bool kn_config_read(const json_t *object, const char *file, kn_model_config *c);
/* Reads the other program's config.json. */
bool kn_config_read_theirs(const json_t *object, const char *file, kn_model_config *c);
/* Reads the configuration of a checkpoint, of a family of this kind, and compares it with the
 * tensors before memory is allocated by it. json: its JSON, which the caller drops; NULL: not
 * wanted. */
bool kn_config_saved(const kn_checkpoint *c, kn_family_kind kind, kn_model_config *config,
                     json_t **json);
/* Declares a model; m is zeros. */
bool kn_config_init(kn_module *m, const kn_model_config *c, kn_dtype dtype, kn_device device);

/* An object that is read, and its file for errors. */
typedef struct kn_json_source {
    const json_t *object;
    const char *file;
} kn_json_source;
/* A whole number of the object in [low, high], or a number of at least low; else an error. */
bool kn_json_int(kn_json_source s, const char *key, int64_t low, int64_t high, int64_t *value);
bool kn_json_number(kn_json_source s, const char *key, double low, double *value);

#endif
