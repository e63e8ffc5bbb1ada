/* state/checkpoint.h: the state of a training run of any module in a folder, to resume or to
 * compute with (docs/checkpoints.md has the files and the guarantees).
 *
 *   RUN/step-00000200/model/shard-*.safetensors      parameters and buffers by canonical name
 *                                                    (averages, where the save was given a kn_ema)
 *   RUN/step-00000200/optimizer/shard-*.safetensors  "<parameter>.<state>": the optimizer's state;
 *                                                    "<parameter>.trained": the training's values
 *                                                    beside averages; "<buffer>.rank<K>": buffers
 *                                                    of ranks that differ from rank 0's
 *   RUN/step-00000200/state.json                     everything else; there once all is complete
 *
 * Each rank writes its own part, in files that PyTorch's distributed checkpoints read, and reads
 * the bytes of its own part: no rank holds the model. Parameters and optimizer state are the same
 * for every number of ranks, strategy and layout, so a checkpoint of one is loaded into any other.
 * Buffers belong to each rank (batch norm's statistics are of the images that the rank saw). A load
 * with an optimizer on as many ranks as saved returns each rank's own buffers; any other load gives
 * those of rank 0 to all. */
#ifndef KNAP_STATE_CHECKPOINT_H
#define KNAP_STATE_CHECKPOINT_H

#include "state/dict.h"
#include "state/folder.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_checkpoint kn_checkpoint;

/* ---- saving ---------------------------------------------------------------------------------- */

/* A file of the program's own beside the tensors: a tokenizer. */
typedef struct kn_checkpoint_file {
    const char *name; /* without a folder */
    const void *data;
    size_t size; /* bytes */
} kn_checkpoint_file;

/* One of several optimizers, for the module or for modules below it, in one checkpoint: a GAN's, an
 * actor's and a critic's. */
typedef struct kn_named_optim {
    const char *name; /* 1 to 64 of a-z, A-Z, 0-9, '_', '-' and '.' */
    kn_optim *optim;
} kn_named_optim;

/* All are borrowed during the call and optional. */
typedef struct kn_checkpoint_save_options {
    KN_BEGIN_OPTIONS;
    kn_comm *comm; /* the ranks that hold module; NULL: those of its units, else .folder's or all */
    int64_t step;  /* steps done, by the caller's count: names the checkpoint */
    kn_optim *optim;              /* made for module, or for one below it */
    const kn_named_optim *optims; /* [optim_count]: others, or all, each by its name */
    int optim_count;
    const kn_scaler *scaler;
    const kn_ema *ema; /* made for module; beside an optimizer */
    /* Patterns of names ("*.lora_a, head.*") of the parameters and buffers to save, with the
     * optimizers' states of them, and of those to leave out; NULL: all, none. */
    const char *only, *except;
    /* Numbers and texts of this rank: the position of its data, a random state (kn_state_put). All
     * ranks give one, or none does. */
    const kn_state *own;
    /* JSON objects as text, which kn_checkpoint_config and kn_checkpoint_record return: sizes and
     * settings to rebuild the module, and anything else; NULL: {}. */
    const char *config, *record;
    const kn_checkpoint_file *files; /* [file_count] */
    int file_count;
    /* Of an evaluation of these weights, the lower the better: a loss. One that isn't finite is
     * none. 0: none; KN_ZERO: 0. */
    double score;
    int keep; /* checkpoints that stay in the folder, the newest; 0: all */
    /* The one of the least score stays as well, and RUN/best is a link to it. Where there is that
     * link already, it is kept without this. */
    bool keep_best;
    kn_run_folder *folder; /* the claim of dir; NULL: the save claims dir, makes it if missing */
    bool async; /* with .folder: returns once this rank's part was copied; a thread writes */
} kn_checkpoint_save_options;
/* Saves module, any struct that begins with a kn_module, as RUN/step-N, where dir is RUN; a
 * checkpoint of the same step is replaced. Collective. Errors: another run has claimed dir; a
 * parameter or state isn't finite; a write failed. After an error the checkpoints saved before are
 * intact; where RUN itself can't be synced at the end, the new one of the same step is in place.
 * Meanwhile no timeout holds in comm's world (kn_comm_suspend_timeout); a dead rank is still
 * noticed.
 *
 * .async: takes memory for a copy of what this rank writes (kn_checkpoint_copy_bytes) until the
 * save is written. A save that fails is no error: it is told on standard error, and the training
 * goes on. The next save waits for this one; kn_checkpoint_wait does so before the program ends. */
KN_API bool kn_checkpoint_save_(const char *dir, void *module, kn_checkpoint_save_options o);
#define kn_checkpoint_save(dir, module, ...)                                                       \
    kn_checkpoint_save_(dir, module, KN_OPTIONS(kn_checkpoint_save_options, __VA_ARGS__))

/* Bytes of the copy of an asynchronous save with these options on this rank: of each parameter,
 * buffer, state of an optimizer and average, the part that this rank writes, rounded up to
 * KN_ALIGN. They stand in the ledger as KN_MEM_CHECKPOINT, on a GPU's rank in page-locked memory.
 * -1 with an error. Collective. */
KN_API int64_t kn_checkpoint_copy_bytes_(void *module, kn_checkpoint_save_options o);
#define kn_checkpoint_copy_bytes(module, ...)                                                      \
    kn_checkpoint_copy_bytes_(module, KN_OPTIONS(kn_checkpoint_save_options, __VA_ARGS__))

/* ---- saves in the background ----------------------------------------------------------------- */

/* The state of this rank's part. Sends nothing and doesn't wait. Tells on standard error of a
 * finished save whose checkpoint couldn't be completed. */
KN_API kn_save_state kn_checkpoint_poll(kn_run_folder *f);
/* Ends a save whose part no rank is still writing, where ranks have told each other so along with
 * something else: written says whether all ranks' states were KN_SAVE_WRITTEN. All ranks call it at
 * the same point; it sends nothing itself and doesn't wait for the disk. The checkpoint counts soon
 * afterwards; a failure is told on standard error, at the next call of any function here. */
KN_API void kn_checkpoint_finish(kn_run_folder *f, bool written);
/* Waits until the save in the background has ended on all ranks. False where it, or the one before
 * it that kn_checkpoint_finish ended, failed; that is no error. Collective. */
KN_API bool kn_checkpoint_wait(kn_run_folder *f);

/* ---- opening --------------------------------------------------------------------------------- */

/* Opens a checkpoint: RUN, whose newest whole one it takes, RUN/step-N or RUN/best. Where RUN's
 * newest isn't whole, it says so on standard error and takes the one before. Another program's
 * tensors are a checkpoint of step 0 with a model alone: a folder of .safetensors files (a Hugging
 * Face model), with its model.safetensors.index.json or without, such an index, or one file.
 * Changes nothing in the folder; a run may save there meanwhile. The same on all ranks of comm
 * (NULL: kn_world()), which must outlive the result. Collective. The caller frees the result; NULL
 * with an error. */
KN_API kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm);
/* The same, but a checkpoint is whole only if every byte of its tensors has the checksum that was
 * saved with it. The ranks share the reading, tensor by tensor; kn_checkpoint_open reads none. */
KN_API kn_checkpoint *kn_checkpoint_open_checked(const char *dir, kn_comm *comm);
/* Sets aside what isn't whole, where the run that claimed f goes on from c: newer checkpoints of
 * f's folder that c's opening passed over become step-N.damaged (or step-N.damaged-2, and so on),
 * and standard error says so. As such no reader takes them, and no save counts, replaces or removes
 * them. Without this they count among those that .keep keeps, and a save of their step replaces
 * them. Comes once c is loaded, and not beside a save in the background. Does
 * nothing where c is of another folder. Collective. */
KN_API bool kn_run_folder_set_aside(kn_run_folder *f, const kn_checkpoint *c);
KN_API void kn_checkpoint_free(kn_checkpoint *c); /* NULL is fine */
KN_API int64_t kn_checkpoint_step(const kn_checkpoint *c);
/* The folder of the checkpoint, RUN/step-N; the saved .config and .record (JSON objects as text).
 * All borrowed. */
KN_API const char *kn_checkpoint_folder(const kn_checkpoint *c);
KN_API const char *kn_checkpoint_config(const kn_checkpoint *c);
KN_API const char *kn_checkpoint_record(const kn_checkpoint *c);
/* The bytes of one of the saved .files; *size is their number. Borrowed. NULL
 * without an error if there is no such file. */
KN_API const void *kn_checkpoint_file_data(const kn_checkpoint *c, const char *name, size_t *size);
/* The .own of rank `rank` of those that saved, of kn_checkpoint_own_ranks (0: nothing). The
 * caller frees it; NULL with an error. Not collective. */
KN_API kn_state *kn_checkpoint_own(const kn_checkpoint *c, int rank);
KN_API int kn_checkpoint_own_ranks(const kn_checkpoint *c);
/* Whether the model has a tensor of that name; its dtype, ndim and shape. */
KN_API bool kn_checkpoint_has(const kn_checkpoint *c, const char *name);
KN_API bool kn_checkpoint_describe(const kn_checkpoint *c, const char *name, kn_array *array);
/* Reads a whole tensor of the model into memory of the CPU and gives it to the current scope. NULL
 * with an error. Not collective. */
KN_API kn_tensor *kn_checkpoint_get(const kn_checkpoint *c, const char *name);

/* ---- loading --------------------------------------------------------------------------------- */

/* .prefix: NULL where names begin at the root of module's tree, as kn_checkpoint_save writes them;
 * "": below module. */
typedef struct kn_checkpoint_load_options {
    KN_BEGIN_OPTIONS;
    KN_LOAD_OPTIONS;              /* state/dict.h */
    kn_optim *optim;              /* made for module, or for one below it, with the saved method */
    const kn_named_optim *optims; /* [optim_count]: those saved by their names; others are left */
    int optim_count;
    kn_scaler *scaler; /* only with an optimizer; keeps its own scale if none was saved */
    /* Only with an optimizer, and where one was saved: then the module gets the training's values.
     * Without an optimizer the module gets the averages. */
    kn_ema *ema;
} kn_checkpoint_load_options;
/* Fills module, the whole or a part of what was saved, its optimizers and scaler, as
 * kn_load_state_dict does from a state: floats are converted, a checkpoint may have any sharding,
 * and names, shapes, dtypes and memory are checked on all ranks before anything is written. Each
 * rank reads the bytes of its own parts. A checksum that differs is an error where a rank reads all
 * that one file has of a tensor, as on the saved number of ranks with the saved layout; where ranks
 * read parts of it, only kn_checkpoint_open_checked compares. Such an error, or a file that can't
 * be read, may come after some values were written. Collective; no timeout holds in comm's world
 * meanwhile. */
KN_API bool kn_checkpoint_load_(const kn_checkpoint *c, void *module, kn_checkpoint_load_options o);
#define kn_checkpoint_load(c, module, ...)                                                         \
    kn_checkpoint_load_(c, module, KN_OPTIONS(kn_checkpoint_load_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
