/* models/checkpoint.h: the state of a training run of any module in a folder, to resume or to
 * compute with:
 *
 *   model.safetensors      whole parameters and buffers by canonical name
 *   optimizer.safetensors  "<parameter>.<state>": what the optimizer keeps (kn_optim_state_name);
 *                          "<buffer>.rank<K>": buffers of the ranks after the first, where they
 *                          differ from rank 0's
 *   tokenizer.json         models/tokenizer.h
 *   state.json             {"version": 1, "save": NAME, "step": N, "optimizer_steps": M,
 *                          "tokenizer": KIND, "model": {...}, "options": {...}, "scaler": {...},
 *                          "ranks": R}
 *
 * The optimizer's and the tokenizer's file are there where the save was given one. The files of one
 * save bear one random name ("save": in JSON, in the metadata of safetensors), so that those of two
 * saves are never taken together. models/run_folder.h says how a save replaces the one before it.
 * Tensors pass through one at a time: no rank holds the model.
 *
 * Parameters and optimizer state are the same for every number of ranks, strategy and layout.
 * Buffers belong to each rank (batch norm's statistics are of the images that the rank saw).
 * model.safetensors has those of rank 0. A load with an optimizer on as many ranks as saved gives
 * each rank its own back; any other load gives those of rank 0 to all. */
#ifndef KNAP_MODELS_CHECKPOINT_H
#define KNAP_MODELS_CHECKPOINT_H

#include "fsdp/fsdp.h"
#include "models/options.h"
#include "models/run_folder.h"
#include "models/tokenizer.h"
#include "optim/optim.h"
#include "tensor/safetensors.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_checkpoint kn_checkpoint;

/* All are borrowed during the call and may be left out. */
typedef struct kn_checkpoint_save_options {
    size_t _size;
    struct kn_guard *_positional;
    kn_comm *comm;   /* the ranks that hold module; NULL: kn_world() */
    int64_t step;    /* steps that were made, by the caller's count */
    kn_optim *optim; /* made for module */
    const kn_scaler *scaler;
    const char
        *config; /* sizes and the like that rebuild the module: a JSON object as text; NULL: {} */
    const kn_tokenizer *tokenizer;
    kn_options *options; /* recorded but for the transient ones, for kn_checkpoint_options */
    kn_run_folder
        *folder; /* rank 0's claim of dir; NULL: the save claims dir, which is made where missing */
} kn_checkpoint_save_options;
/* Saves module, any struct that begins with a kn_module. Collective; rank 0 writes. An error:
 * another run has claimed dir, a parameter or state is not finite, a write failed; what was saved
 * before stays. The timeout of comm's world doesn't hold while rank 0 writes, however slow the disk
 * is, though deaths are noticed. */
KN_API bool kn_checkpoint_save_(const char *dir, void *module, kn_checkpoint_save_options o);
#define kn_checkpoint_save(dir, module, ...)                                                       \
    kn_checkpoint_save_(                                                                           \
        (dir), (module),                                                                           \
        (kn_checkpoint_save_options){ ._size = sizeof(kn_checkpoint_save_options), __VA_ARGS__ })

/* Opens all files of one save; changes nothing in the folder. Where a run saves there meanwhile, it
 * looks again until the files are those of one save, the same on all ranks of comm (NULL:
 * kn_world()), which must outlive the result. Collective. NULL with an error. The caller frees
 * it. */
KN_API kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm);
KN_API void kn_checkpoint_free(kn_checkpoint *c); /* NULL is fine */
KN_API int64_t kn_checkpoint_step(const kn_checkpoint *c);
/* The folder, the .config that was saved (a JSON object as text), and model.safetensors, from which
 * kn_safetensors_get reads single tensors. All borrowed. */
KN_API const char *kn_checkpoint_folder(const kn_checkpoint *c);
KN_API const char *kn_checkpoint_config(const kn_checkpoint *c);
KN_API kn_safetensors *kn_checkpoint_model(const kn_checkpoint *c);
/* The tokenizer it was trained with; the caller frees it. NULL with an error where none was
 * saved. */
KN_API kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c);
/* Sets each recorded option that was not given on the command line. Only what is trained can be
 * recorded: options of a run (paths that are written, ranks) are refused. */
KN_API bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options);

typedef struct kn_checkpoint_load_options {
    size_t _size;
    struct kn_guard *_positional;
    kn_optim *optim;   /* made for module, with the method that was saved */
    kn_scaler *scaler; /* only with .optim; keeps its own scale where none was saved */
} kn_checkpoint_load_options;
/* Fills module's parameters and buffers, and what the options name. All names, shapes and dtypes
 * are checked before anything is written. Collective; the timeout of comm's world doesn't hold. */
KN_API bool kn_checkpoint_load_(const kn_checkpoint *c, void *module, kn_checkpoint_load_options o);
#define kn_checkpoint_load(c, module, ...)                                                         \
    kn_checkpoint_load_(                                                                           \
        (c), (module),                                                                             \
        (kn_checkpoint_load_options){ ._size = sizeof(kn_checkpoint_load_options), __VA_ARGS__ })

#ifdef __cplusplus
}
#endif
#endif
