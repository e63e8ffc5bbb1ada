/* models/record.h: what the programs keep in a checkpoint beside the model's state: their options
 * and the tokenizer. */
#ifndef KNAP_MODELS_RECORD_H
#define KNAP_MODELS_RECORD_H

#include "models/options.h"
#include "models/tokenizer.h"
#include "state/checkpoint.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The name of the tokenizer among the files of a checkpoint. */
#define KN_TOKENIZER_FILE "tokenizer.json"

/* All options of KN_OF_TRAINING as text for kn_checkpoint_save's .record, or for "options" in it: a
 * JSON object. The caller frees it (kn_host_free). NULL with an error. */
KN_API char *kn_options_text(kn_options *o);
/* Restores each recorded option (kn_options_restore). A checkpoint records the options of the
 * training, not those of one run (output paths, ranks): these are an error. */
KN_API bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options);

/* The recorded text of one option into buf; false, without an error, where none was recorded. */
KN_API bool kn_checkpoint_option(const kn_checkpoint *c, const char *name, char *buf, size_t size);

/* The text of tokenizer.json, for kn_checkpoint_save's .files. The caller frees it (kn_host_free).
 * NULL with an error. */
KN_API char *kn_tokenizer_text(const kn_tokenizer *t);
/* The tokenizer of the run; the caller frees it. NULL with an error if none was saved. */
KN_API kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c);

#ifdef __cplusplus
}
#endif
#endif
