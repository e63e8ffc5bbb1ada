/* state/folder.h: the folder of a training run: one run at a time saves there, and its checkpoints
 * are complete or not there (docs/checkpoints.md).
 *
 *   RUN/.lock                 held by the run that saves there
 *   RUN/step-00000200/        a checkpoint (state/checkpoint.h)
 *   RUN/step-00000400.saving/ one that is being saved; it counts once it has its state.json
 *   RUN/best                  a link to the checkpoint of the least score, where it is kept
 *
 * A save writes all files of all ranks into step-N.saving, synced, then state.json, synced; then it
 * renames the folder. If it is interrupted after state.json, the next run that claims the folder
 * renames it; if it is interrupted before, that run removes it. */
#ifndef KNAP_STATE_FOLDER_H
#define KNAP_STATE_FOLDER_H

#include "comm/comm.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_run_folder kn_run_folder;

/* Of a save in the background (state/checkpoint.h). */
typedef enum kn_save_state {
    KN_SAVE_NONE = 0, /* no save waits for the other ranks */
    KN_SAVE_RUNNING,
    KN_SAVE_WRITTEN, /* this rank's files are on the disk; the checkpoint doesn't count yet */
    KN_SAVE_FAILED
} kn_save_state;

typedef struct kn_run_folder_options {
    KN_BEGIN_OPTIONS;
    kn_comm *comm; /* the ranks of the run; NULL: kn_world(). It must outlive the result */
    /* The first complete save removes the checkpoints that are there now. From when it counts
     * nobody takes one of them for this run's, also where the process ends before they are gone:
     * then the next claim removes them. */
    bool overwrite;
} kn_run_folder_options;
/* Makes the folder and those above it, checks that it can be written, and locks it until it is
 * released or the process of rank 0 ends; then finishes an interrupted save or removes its files.
 * NULL with an error, which names the process that holds the lock, or where dir is a checkpoint's
 * in the folder of a run, or lies in one. On a file system without locks
 * two runs may save at once. Collective; the caller releases the result. */
KN_API kn_run_folder *kn_run_folder_claim_(const char *dir, kn_run_folder_options o);
#define kn_run_folder_claim(dir, ...)                                                              \
    kn_run_folder_claim_(dir, KN_OPTIONS(kn_run_folder_options, __VA_ARGS__))
/* NULL is fine. Not collective: a save that runs in the background is given up, unless
 * kn_checkpoint_wait came first. */
KN_API void kn_run_folder_release(kn_run_folder *f);
/* The checkpoint of the least .score that a save in the background doesn't still write: its step,
 * and its score; -1 without an error where there is none. Waits for a save that
 * kn_checkpoint_finish ended to count. Collective. */
KN_API int64_t kn_run_folder_best(const kn_run_folder *f, double *score);
/* True if there is a checkpoint in the folder, or the folder is one. Says nothing of whether it is
 * damaged. */
KN_API bool kn_run_folder_has_checkpoint(const char *dir);

#ifdef __cplusplus
}
#endif
#endif
