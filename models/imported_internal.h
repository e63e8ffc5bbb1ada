/* models/imported_internal.h (private): models of files, for the programs. */
#ifndef KNAP_MODELS_IMPORTED_INTERNAL_H
#define KNAP_MODELS_IMPORTED_INTERNAL_H

#include "models/chat_internal.h"
#include "models/family.h"
#include "models/imported.h"

/* Borrowed. */
const kn_model_config *kn_import_config(const kn_imported *i);
bool kn_import_is_file(const kn_imported *i);              /* one file of another program */
kn_checkpoint *kn_import_checkpoint(const kn_imported *i); /* NULL: another program's files */
/* The template of conversations that it was trained with; NULL: none is known, or with an error one
 * that isn't read. */
const kn_chat *kn_import_chat(const kn_imported *i);
/* kn_export of any family. */
bool kn_language_save(const char *dir, void *module, const kn_model_config *c, kn_export_options o);

#endif
