/* models/run_folder.h: the folder that a training run saves into: one run at a time, complete
 * checkpoints only.
 *
 * A save writes each of its files as <name>.new, state.json.new last; from then on the save counts.
 * It then renames the files; if it is interrupted there, the next run that claims the folder
 * renames them. An interrupted save thus never harms the checkpoint before it. Readers never rename
 * (models/checkpoint.h). */
#ifndef KNAP_MODELS_RUN_FOLDER_H
#define KNAP_MODELS_RUN_FOLDER_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_run_folder kn_run_folder;

/* Makes the folder and those above it, checks that it can be written, and locks it until it is
 * released or the process ends; then finishes an interrupted save or removes its files. NULL with
 * an error, which names the process that holds the lock. On a file system without locks two runs
 * may save at once; readers then still detect files of two saves. */
KN_API kn_run_folder *kn_run_folder_claim(const char *dir);
KN_API void kn_run_folder_release(kn_run_folder *f); /* NULL is fine */
/* True if the folder holds a complete checkpoint. */
KN_API bool kn_run_folder_has_checkpoint(const char *dir);

#ifdef __cplusplus
}
#endif
#endif
