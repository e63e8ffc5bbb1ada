/* models/run_folder_internal.h (private): the files of a checkpoint, by name and path. */
#ifndef KNAP_MODELS_RUN_FOLDER_INTERNAL_H
#define KNAP_MODELS_RUN_FOLDER_INTERNAL_H

#include "models/run_folder.h"

#define KN_CHECKPOINT_PATH 4096

/* In the order of renaming. A save counts once state.json.new exists, so that file is last. */
enum { KN_FILE_MODEL, KN_FILE_OPTIMIZER, KN_FILE_TOKENIZER, KN_FILE_STATE, KN_FILES };
extern const char *const kn_checkpoint_file[KN_FILES];

/* dir/name and the suffix into path; false with an error where it is too long. */
bool kn_checkpoint_path(char path[KN_CHECKPOINT_PATH], const char *dir, const char *name,
                        const char *suffix);

/* Renames the files of a complete save (state.json.new exists); else does nothing. */
bool kn_checkpoint_finish_renames(const char *dir);

#endif
