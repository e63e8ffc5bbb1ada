/* models/programs/gpt_settings.h: train_gpt's options. */
#ifndef KNAP_MODELS_PROGRAMS_GPT_SETTINGS_H
#define KNAP_MODELS_PROGRAMS_GPT_SETTINGS_H

#include "models/language.h"
#include "models/programs/settings.h"

typedef struct gpt_settings {
    settings run; /* comes first */
    const char *data, *prompt;
    int tokenizer, model;
    int64_t layers, heads, embd, ctx, kv_heads, hidden, rope_original, sample_tokens;
    double rope_base, rope_factor, dropout;
    bool bias, tied;
} gpt_settings;

/* Makes s->run.table. */
bool gpt_settings_begin(gpt_settings *s);
/* The family of --model. */
const kn_family *gpt_settings_family(const gpt_settings *s);
/* The configuration of --model and the options of its sizes. vocab: that of sizes given one by one,
 * which a preset has of its own. */
bool gpt_settings_model(const gpt_settings *s, int64_t vocab, kn_language_config *c);
/* settings_check, rates left open, and sizes beside a preset or of another family. */
bool gpt_settings_check(gpt_settings *s, kn_options *o, kn_comm *world);
/* The optimizer; weight decay for matrices, none for biases and norms. The caller frees it. */
kn_optim *gpt_settings_optim(const gpt_settings *s, void *model);

#endif
