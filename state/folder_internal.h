/* state/folder_internal.h (private): the checkpoints of a run's folder: their list, and what a save
 * does there. Everything here is rank 0's. */
#ifndef KNAP_STATE_FOLDER_INTERNAL_H
#define KNAP_STATE_FOLDER_INTERNAL_H

#include "comm/values.h"
#include "state/folder.h"
#include "tensor/files.h"
#include <jansson.h>

#define KN_FOLDER_PATH 4096 /* of a kn_path */
#define KN_FOLDER_NAME 48
#define KN_DAMAGED     ".damaged"
#define KN_FOLDER_ID   40
#define KN_STATE_FILE  "state.json"
#define KN_LOCK_FILE   ".lock"

/* Whether the paths of all files of a checkpoint in dir, a run's or a checkpoint's, have room; else
 * an error. */
bool kn_folder_fits(const char *dir);
/* ---- folder_state.c -------------------------------------------------------------------------- */

#define KN_STATE_VERSION 3                  /* of state.json */
#define KN_STATE_MOST    ((size_t)64 << 20) /* bytes: a reader takes no more into memory */

/* Reads dir/state.json: an object of this version with a right checksum; the caller drops it. NULL
 * with an error. */
json_t *kn_folder_state(const char *dir);
/* Writes dir/state.json: text, an object of indented JSON, with its checksum as the last member. */
bool kn_folder_state_write(const char *dir, const char *text);
/* An integer of an object, within bounds; else an error that names dir's state.json. */
bool kn_folder_int(const json_t *object, const char *key, int64_t low, int64_t high, int64_t *value,
                   const char *dir);

/* ---- folder_list.c --------------------------------------------------------------------------- */

#define KN_FOLDER_SAVES ((int64_t)1 << 53) /* in one folder; every reader of JSON has the number */

/* A checkpoint, as its state.json says. */
typedef struct kn_listed {
    char name[KN_FOLDER_NAME]; /* "step-00000200", or with ".saving"; "": the folder itself */
    char id[KN_FOLDER_ID];
    int64_t step;
    int64_t number; /* of the save in this folder, from 1; 0: unknown */
    int64_t order;  /* number; unknown: that of the newest one of a lower step */
    double score;   /* NAN: none */
    char why[256];  /* its state.json can't be read; "": it can */
    int error;      /* just now: errno; 0: it is damaged, or isn't there */
    bool doomed;    /* another one of the list replaces it: it goes */
} kn_listed;
typedef struct kn_listing {
    kn_listed *list;
    int count;
    int64_t room;
    char (*replaced)[KN_FOLDER_ID]; /* ids that the list replaces */
    int replaced_count;
    int64_t replaced_room;
} kn_listing;

/* The checkpoints of dir, the newest first; one whose state.json can't be read has the place that
 * its step gives it. No folder: none. False with an error. The caller frees l, after an error
 * too. */
bool kn_folder_list(kn_listing *l, const char *dir);
void kn_listing_free(kn_listing *l);
/* True if each checkpoint's state.json can be read, or is damaged; else an error: one that can't be
 * read just now may be the newest, or the best. */
bool kn_listing_is_sure(const kn_listing *l);
int64_t kn_listing_number(const kn_listing *l); /* the highest; 0: none is known */
/* Whether l has that checkpoint, as it is: of the same number and id, and step or name. */
bool kn_listing_has(const kn_listing *l, const kn_listed *one, bool by_name);
/* Whether an error of that number (kn_error_number) says that something can't be read just now: it
 * is neither damaged nor missing. */
bool kn_is_passing(int number);
/* "step-00000200" and the suffix into name. */
void kn_folder_name(char name[KN_FOLDER_NAME], int64_t step, const char *suffix);
/* The step of a name exactly as kn_folder_name makes it; -1: another name. */
int64_t kn_folder_step(const char *name, const char *suffix);
/* The step of the checkpoint that a folder of this name is, or was until it was set aside
 * (kn_run_folder_set_aside); -1: another name. */
int64_t kn_folder_checkpoint(const char *name);
/* True where dir, which may not be there yet, isn't a folder that a run makes and removes in its
 * own (step-N and the like, best), nor within one; else an error. */
bool kn_folder_outside(const char *dir);
/* The checkpoint of the least score, the oldest of several; NULL: none has one. */
const kn_listed *kn_listing_best(const kn_listing *l);

/* ---- folder_remove.c ------------------------------------------------------------------------- */

/* Removes path, if it is there, and what is below it; links are removed, not followed, also where
 * another user puts them there meanwhile: in RUN only the folder above path is taken by its name.
 * False with an error, as for a folder that is deeper than any checkpoint's. */
bool kn_folder_remove(const char *path);

/* ---- folder_save.c --------------------------------------------------------------------------- */

struct kn_run_folder {
    char *dir;
    int64_t number; /* the highest that a save there had; rank 0's */
    kn_comm *comm;
    int lock;                 /* -1: the file system has no locks, or this isn't rank 0 */
    bool overwrites;          /* the first complete save replaces what was there; rank 0's */
    json_t *replaces;         /* ids of what the save that was begun last replaces; rank 0's */
    struct kn_saving *saving; /* saving.h: the save in the background; NULL: none */
    bool failed;              /* on this rank, the last one */
};

/* A save of this folder. */
typedef struct kn_folder_save {
    kn_listed saved; /* number is set by kn_folder_begin */
    kn_path path;    /* where its files go: RUN/step-N.saving */
    int keep;        /* checkpoints to keep, 0: all */
    bool keep_best;
} kn_folder_save;

/* Finishes or removes what dead saves left, and what was replaced. A leftover that can't be removed
 * is told on standard error, and no error. Lists what there is. Under the lock. */
bool kn_folder_recover(const char *dir, kn_listing *l);
/* 1: path is there; 0: it isn't; -1 with an error: nobody knows. */
int kn_folder_find(const char *path);
bool kn_folder_rename(const char *from, const char *to);
/* Makes RUN/step-N.saving with the folders model and optimizer. */
bool kn_folder_begin(kn_run_folder *f, kn_folder_save *s);
/* Removes an empty folder of it. */
bool kn_folder_remove_empty(const char *path);
/* All files are there and synced: writes state.json with text, and the checkpoint counts. Then sets
 * the link to the best and removes the checkpoints that aren't kept: if that fails it is told on
 * standard error, and the next save tries again. Any thread. */
bool kn_folder_commit(kn_run_folder *f, const kn_folder_save *s, const char *text);
/* Removes RUN/step-N.saving. Reports nothing. */
void kn_folder_abandon(const kn_folder_save *s);

/* checkpoint.c: gives up the save in the background, if there is one. */
void kn_saving_drop(kn_run_folder *f);

#endif
