/* models/checkpoint.h: the state of a training run of any module in a folder, to resume or to
 * compute with:
 *
 *   model.safetensors      whole parameters and buffers by canonical name
 *                          (their averages, where the save was given a kn_ema)
 *   optimizer.safetensors  "<parameter>.<state>": the optimizer's state (kn_optim_state_name);
 *                          "<parameter>.trained": the training's values, where model.safetensors
 *                          has averages;
 *                          "<buffer>.rank<K>": buffers of the ranks after the first, where they
 *                          differ from rank 0's
 *   tokenizer.json         models/tokenizer.h
 *   state.json             {"version": 1, "save": NAME, "step": N, "optimizer_steps": M,
 *                          "tokenizer": KIND, "model": {...}, "options": {...}, "scaler": {...},
 *                          "ema_updates": U, "ranks": R}
 *
 * The optimizer's and the tokenizer's files exist if the save was given these objects. All files of
 * one save hold one random name ("save": in JSON, in the metadata of safetensors), so that files of
 * two saves are never combined. models/run_folder.h says how a save replaces the one before it.
 * Tensors pass through one at a time: no rank holds the model.
 *
 * Parameters and optimizer state are the same for every number of ranks, strategy and layout.
 * Buffers belong to each rank (batch norm's statistics are of the images that the rank saw).
 * model.safetensors has those of rank 0. A load with an optimizer on as many ranks as saved returns
 * each rank's own buffers; any other load gives those of rank 0 to all. */
#ifndef KNAP_MODELS_CHECKPOINT_H
#define KNAP_MODELS_CHECKPOINT_H

#include "fsdp/ema.h"
#include "models/options.h"
#include "models/run_folder.h"
#include "models/tokenizer.h"
#include "optim/optim.h"
#include "tensor/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_checkpoint kn_checkpoint;

/* All are borrowed during the call and optional. */
typedef struct kn_checkpoint_save_options {
    size_t _size;
    struct kn_guard *_positional;
    kn_comm *comm;   /* the ranks that hold module; NULL: kn_world() */
    int64_t step;    /* steps done, by the caller's count */
    kn_optim *optim; /* made for module */
    const kn_scaler *scaler;
    const kn_ema *ema; /* made for module; beside .optim */
    /* Sizes and settings to rebuild the module: a JSON object as text; NULL: {}. */
    const char *config;
    const kn_tokenizer *tokenizer;
    kn_options *options; /* recorded for kn_checkpoint_options, without transient ones */
    /* Rank 0's claim of dir; NULL: the save claims dir and makes it if missing. */
    kn_run_folder *folder;
} kn_checkpoint_save_options;
/* Saves module, any struct that begins with a kn_module. Collective; rank 0 writes. Errors: another
 * run has claimed dir; a parameter or state isn't finite; a write failed. After an error the
 * checkpoint saved before is intact. While rank 0 writes, no timeout holds in comm's world
 * (kn_comm_suspend_timeout); a dead rank is still noticed. */
KN_API bool kn_checkpoint_save_(const char *dir, void *module, kn_checkpoint_save_options o);
#define kn_checkpoint_save(dir, module, ...)                                                       \
    kn_checkpoint_save_(                                                                           \
        (dir), (module),                                                                           \
        (kn_checkpoint_save_options){ ._size = sizeof(kn_checkpoint_save_options), __VA_ARGS__ })

/* Opens all files of one save; changes nothing in the folder. If a run saves there meanwhile, it
 * reads the folder again until all files belong to one save, the same on all ranks of comm (NULL:
 * kn_world()). comm must outlive the result. Collective. The caller frees the result; NULL with an
 * error. */
KN_API kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm);
KN_API void kn_checkpoint_free(kn_checkpoint *c); /* NULL is fine */
KN_API int64_t kn_checkpoint_step(const kn_checkpoint *c);
/* The folder, the saved .config (a JSON object as text), and model.safetensors, from which
 * kn_safetensors_get reads single tensors. All borrowed. */
KN_API const char *kn_checkpoint_folder(const kn_checkpoint *c);
KN_API const char *kn_checkpoint_config(const kn_checkpoint *c);
KN_API kn_safetensors *kn_checkpoint_model(const kn_checkpoint *c);
/* The tokenizer of the run; the caller frees it. NULL with an error if none was saved. */
KN_API kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c);
/* Sets each recorded option that wasn't given on the command line. A checkpoint records the options
 * of the training, not those of one run (output paths, ranks): these are an error. */
KN_API bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options);

typedef struct kn_checkpoint_load_options {
    size_t _size;
    struct kn_guard *_positional;
    kn_optim *optim;   /* made for module, with the saved method */
    kn_scaler *scaler; /* only with .optim; keeps its own scale if none was saved */
    /* Only with .optim, and where one was saved: then the module gets the training's values.
     * Without .optim the module gets the averages. */
    kn_ema *ema;
} kn_checkpoint_load_options;
/* Fills module's parameters and buffers, and the optimizer and scaler of the options. All names,
 * shapes and dtypes are checked before anything is written. Collective; no timeout holds in
 * comm's world meanwhile. */
KN_API bool kn_checkpoint_load_(const kn_checkpoint *c, void *module, kn_checkpoint_load_options o);
#define kn_checkpoint_load(c, module, ...)                                                         \
    kn_checkpoint_load_(                                                                           \
        (c), (module),                                                                             \
        (kn_checkpoint_load_options){ ._size = sizeof(kn_checkpoint_load_options), __VA_ARGS__ })

#ifdef __cplusplus
}
#endif
#endif
