/* models/checkpoint.h: a training run in a folder, to go on from or to generate with:
 *
 *   model.safetensors      whole parameters by canonical name
 *   optimizer.safetensors  "<parameter>.exp_avg" and "<parameter>.exp_avg_sq"
 *   tokenizer.json         models/tokenizer.h
 *   state.json             {"version": 1, "step": N, "optimizer_steps": M, "model": {...},
 *                          "options": {...}, "scaler": {...}}
 *
 * A save writes each as <name>.new, state.json.new last; from then on it counts. Renaming them is
 * what is left, and whoever saves or opens next finishes it. So an interrupted save leaves the
 * checkpoint that was there whole. Tensors pass through one at a time: no rank holds the model. */
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

/* Makes the folder (and those above it) and checks that it can be written. */
KN_API bool kn_checkpoint_prepare(const char *dir);

/* Saves the run as it stands after step steps; scaler may be NULL. Collective; rank 0 of comm writes.
 * What is saved doesn't depend on the ranks, the strategy or the layout. */
KN_API bool kn_checkpoint_save(const char *dir, kn_comm *comm, kn_gpt *model, kn_optim *optim,
                               const kn_scaler *scaler, int64_t step, const kn_tokenizer *tokenizer,
                               kn_options *options);

/* Reads and checks state.json, finishing an interrupted rename. Collective. NULL with an error.
 * The caller frees it. */
KN_API kn_checkpoint *kn_checkpoint_open(const char *dir, kn_comm *comm);
KN_API void kn_checkpoint_free(kn_checkpoint *c); /* NULL is fine */
KN_API int64_t kn_checkpoint_step(const kn_checkpoint *c);
KN_API const kn_gpt_config *kn_checkpoint_config(const kn_checkpoint *c);
/* The tokenizer it was trained with; the caller frees it. */
KN_API kn_tokenizer *kn_checkpoint_tokenizer(const kn_checkpoint *c);
/* Sets each recorded option that was not given on the command line. */
KN_API bool kn_checkpoint_options(const kn_checkpoint *c, kn_options *options);
/* Fills the model's parameters, and where they are not NULL the optimizer's state and the scaler's
 * (which keeps its own where none was saved). All names, shapes
 * and dtypes are checked before anything is written. Collective. */
KN_API bool kn_checkpoint_load(const kn_checkpoint *c, kn_gpt *model, kn_optim *optim,
                               kn_scaler *scaler);

#ifdef __cplusplus
}
#endif
#endif
