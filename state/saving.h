/* state/saving.h (private): one save on this rank: from the module, or from a copy of this rank's
 * part of the state, which a thread writes.
 *
 *   begun on all ranks -> each writes and syncs its files -> all agree -> rank 0 commits
 *
 * In the background the ranks agree later, where the program lets them (kn_checkpoint_finish). */
#ifndef KNAP_STATE_SAVING_H
#define KNAP_STATE_SAVING_H

#include "state/attempt.h"
#include "state/entries.h"
#include "state/folder_internal.h"
#include "state/pieces.h"
#include <stdatomic.h>

/* The folders of a checkpoint's tensors. */
enum { KN_PART_MODEL, KN_PART_OPTIMIZER, KN_PARTS };
extern const char *const kn_part_name[KN_PARTS];
/* state.json's entry of a file: its name, with a folder or "", size and checksum; of all files of
 * open parts, which may be NULL. The caller drops it; NULL where memory is out. */
json_t *kn_saved_file(const char *folder, const char *name, int64_t bytes, uint64_t checksum);
json_t *kn_saved_files(kn_pieces *const part[KN_PARTS]);

/* This rank's part of one of them. */
typedef struct kn_saving_part {
    kn_piece *piece;
    const kn_entry **entry; /* borrowed; NULL once the bytes were copied */
    bool *finite;           /* it must be: no buffer, which may be a mask of -inf */
    int count;
    int tensors; /* of all ranks */
} kn_saving_part;

typedef struct kn_saving {
    kn_run_folder *folder;
    kn_comm *holders;     /* of the module: the folder's ranks, maybe in another order */
    kn_folder_save place; /* on ranks after the first only .path and .saved.step */
    char id[KN_CHECKPOINT_ID];
    int rank;
    kn_saving_part part[KN_PARTS];
    json_t *state; /* rank 0's: state.json, without its list of files */
    /* of a save in the background */
    char *copy; /* the parts' bytes, one after another, each at a multiple of KN_ALIGN */
    kn_memory *memory;
    size_t bytes;
    pthread_t thread;
    bool (*run)(struct kn_saving *s);
    bool disk_full;    /* a fault that was asked for: the thread's writes fail (kernels/faults.h) */
    bool threaded;     /* the thread wasn't joined yet */
    bool finished;     /* all ranks know of each other's end: it is committed, or given up */
    atomic_bool stop;  /* the thread ends as soon as it can */
    atomic_int result; /* kn_save_state: this rank's files, then the commit */
    char error[KN_ATTEMPT_TEXT];
} kn_saving;

/* Lists what this rank writes of all, whose first models entries are the model's. Borrows all.
 * Collective where groups of ranks have parameters of their own. */
bool kn_saving_list(kn_saving *s, const kn_entries *all, int models);
/* Copies this rank's parts, after which nothing of the module is needed. */
bool kn_saving_copy(kn_saving *s);
/* Frees the copy. */
void kn_saving_give(kn_saving *s);
/* Writes and syncs this rank's files. */
bool kn_saving_write(kn_saving *s);
/* Rank 0: reads back which files there are, writes state.json; the checkpoint counts. */
bool kn_saving_commit(kn_saving *s);
/* Runs write or commit on a thread. The result is in .result and .error. */
bool kn_saving_start(kn_saving *s, bool (*run)(kn_saving *s));
/* Waits for the thread, if there is one. */
void kn_saving_join(kn_saving *s);
/* Frees s. On rank 0 the files of a save that wasn't committed go. */
void kn_saving_free(kn_saving *s, bool committed);

#endif
