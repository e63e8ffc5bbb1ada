/* models/pretrained_internal.h (private): models in files, for the programs and for
 * pretrained_config.c. */
#ifndef KNAP_MODELS_PRETRAINED_INTERNAL_H
#define KNAP_MODELS_PRETRAINED_INTERNAL_H

#include "models/pretrained.h"
#include "models/model_tensors.h"
#include "models/vision.h"

/* What kn_pretrained_open found; borrowed. */
const kn_model_config *kn_pretrained_config(const kn_pretrained *p);
const kn_vision_input *kn_pretrained_input(const kn_pretrained *p);
/* True if kn_pretrained_save may write into dir, which is made if missing: it holds no run's
 * checkpoint, and no model of another origin. Else an error. */
bool kn_pretrained_may_save(const char *dir);
/* A file of another kind in a folder. */
typedef struct kn_model_file {
    /* Whether it may be written there, on the rank that writes; else an error. */
    bool (*may_save)(const struct kn_model_file *f, const char *dir);
    /* Collective; rank 0 of comm writes. */
    bool (*save)(const struct kn_model_file *f, const char *dir, void *module,
                 const kn_model_tensors *t, kn_comm *comm);
} kn_model_file;
/* Writes module, a model of c, and the text of its config.json, as kn_pretrained_save does, of
 * whose options .comm, .ema and .dtype count; or another file in place of both (NULL: none). caller
 * names it in errors. Collective. */
bool kn_model_save(const char *dir, void *module, const kn_model_config *c, const char *config,
                   const kn_model_file *file, const char *caller, kn_pretrained_save_options o);
/* kn_pretrained_save of any image family. */
bool kn_vision_save(const char *dir, void *module, const kn_model_config *c,
                    const kn_vision_input *in, kn_pretrained_save_options o);

/* ---- config.json: pretrained_config.c -------------------------------------------------------- */

/* A JSON object of a stranger, within a limit of values; NULL with an error. The caller decrefs. */
json_t *kn_pretrained_config_read(const char *path);
/* The text of a config.json, for kn_host_free; NULL with an error. */
char *kn_pretrained_config_text(const kn_model_config *c, const kn_vision_input *in);
/* The model that a config.json names, or name, with the sizes of the tensors in f, and its images.
 * All tensors are checked. json may be NULL; in->label is the caller's to free, after an error,
 * too. */
bool kn_pretrained_config_model(const json_t *json, const char *config_path, const char *name,
                                kn_pieces *f, const char *path, kn_model_config *c,
                                kn_vision_input *in);

#endif
