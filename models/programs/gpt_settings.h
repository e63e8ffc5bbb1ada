/* models/programs/gpt_settings.h: train_gpt's options. */
#ifndef KNAP_MODELS_PROGRAMS_GPT_SETTINGS_H
#define KNAP_MODELS_PROGRAMS_GPT_SETTINGS_H

#include "models/family.h"
#include "models/programs/settings.h"

/* The value of an option of the model's sizes, which the tables of the families list. */
enum { MODEL_OPTIONS = 32 };
typedef union model_size {
    int64_t whole;
    double number;
    bool flag;
} model_size;

typedef struct gpt_settings {
    settings run; /* comes first */
    const char *data, *val_data, *field, *separator, *end, *chat, *tokenizer, *prompt, *init,
        *model;
    int64_t ctx, sample_tokens, vocab;
    bool mask_documents;
    model_size sizes[MODEL_OPTIONS];
} gpt_settings;

/* Makes the table of s, which is that of the program. */
bool gpt_settings_begin(settings *s);
/* Sets the options of the model to those of --init's, c, which must not be given otherwise. */
bool gpt_settings_follow(kn_options *o, const kn_model_config *c);
/* The configuration of --model and the options of its sizes. from: that of the checkpoint or of
 * --init, of which it has what is no option; NULL: a new model. vocab: that of sizes given one by
 * one, which a preset has of its own. */
bool gpt_settings_model(const gpt_settings *s, int64_t vocab, const kn_model_config *from,
                        kn_model_config *c);
/* settings_check, rates left open, and sizes beside a preset or of another family. */
bool gpt_settings_check(gpt_settings *s, kn_options *o, kn_comm *world);

#endif
