/* models/checkpoint.h: a training run in a folder, to go on from or to generate with:
 *
 *   model.safetensors      whole parameters by canonical name
 *   optimizer.safetensors  "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"
 *   tokenizer.json         models/tokenizer.h
 *   state.json             {"version": 1, "save": NAME, "step": N, "optimizer_steps": M,
 *                          "model": {...}, "options": {...}, "scaler": {...}}
 *
 * The files of one save bear one random name ("save": in JSON, in the metadata of safetensors), so that those
 * of two saves are never taken together. models/run_folder.h says how a save replaces the one before it.
 * Tensors pass through one at a time: no rank holds the model. */
#ifndef KNAP_MODELS_CHECKPOINT_H
#define KNAP_MODELS_CHECKPOINT_H

#include "fsdp/fsdp.h"
#include "models/gpt.h"
#include "models/options.h"
#include "models/tokenizer.h"
#include "optim/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_checkpoint kn_checkpoint;

/* Saves the run as it stands after step steps; scaler may be NULL. Collective; rank 0 of comm writes, into a
 * folder that it has claimed (models/run_folder.h). No rank waits for another in vain however slow the disk
 * is: the timeout of comm's world doesn't hold while rank 0 writes, though deaths are noticed. A value that is
 * not finite is an error, and what was saved before stays. What is saved doesn't depend on the ranks, the
 * strategy or the layout, but for the save's random name. */
KN_API bool kn_checkpoint_save(const char *dir, kn_comm *comm, kn_gpt *model, kn_optim *optim,
                               const kn_scaler *scaler, int64_t step, const kn_tokenizer *tokenizer,
                               kn_options *options);

/* Opens all files of one save and checks state.json against them; changes nothing in the folder. Where a
 * running train_gpt saves meanwhile, it looks again until the files are those of one save, the same on all
 * ranks. Collective. NULL with an error. The caller frees it. */
KN_API kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm);
KN_API void kn_checkpoint_free(kn_checkpoint *c); /* NULL is fine */
KN_API int64_t kn_checkpoint_step(const kn_checkpoint *c);
KN_API const kn_gpt_config *kn_checkpoint_config(const kn_checkpoint *c);
/* The tokenizer it was trained with; the caller frees it. */
KN_API kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c);
/* Sets each recorded option that was not given on the command line. Only what is trained can be recorded:
 * options of a run (paths that are written, ranks) are refused. */
KN_API bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options);
/* Fills the model's parameters, and where they are not NULL the optimizer's state and the scaler's
 * (which keeps its own where none was saved). All names, shapes
 * and dtypes are checked before anything is written. Collective; the timeout of comm's world doesn't hold. */
KN_API bool kn_checkpoint_load(const kn_checkpoint *c, kn_comm *comm, kn_gpt *model,
                               kn_optim *optim, kn_scaler *scaler);

#ifdef __cplusplus
}
#endif
#endif
