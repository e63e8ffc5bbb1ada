/* models/run_folder.h: a folder that a training run saves into: one run at a time, and whole
 * checkpoints only.
 *
 * A save writes each of its files as <name>.new, state.json.new last; from then on it counts.
 * Renaming them is what is left, and the next run that claims the folder finishes it. So an
 * interrupted save leaves the checkpoint that was there whole. Readers never rename
 * (models/checkpoint.h). */
#ifndef KNAP_MODELS_RUN_FOLDER_H
#define KNAP_MODELS_RUN_FOLDER_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_run_folder kn_run_folder;

/* Makes the folder and those above it, checks that it can be written, and locks it until it is
 * released or the process ends; then finishes an interrupted save or removes what is left of it.
 * NULL with an error, which names the process that holds the lock. File systems without locks give
 * none: there nothing keeps two runs apart, but the files of two saves are told from each other
 * when they are read. */
KN_API kn_run_folder *kn_run_folder_claim(const char *dir);
KN_API void kn_run_folder_release(kn_run_folder *f); /* NULL is fine */
/* Does the folder hold a checkpoint that counts? */
KN_API bool kn_run_folder_has_checkpoint(const char *dir);

#ifdef __cplusplus
}
#endif
#endif
