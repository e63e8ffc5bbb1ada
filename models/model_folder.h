/* models/model_folder.h (private): a model's folder for other programs: model.safetensors with a
 * config.json, or in the place of both one file of models/formats/. */
#ifndef KNAP_MODELS_MODEL_FOLDER_H
#define KNAP_MODELS_MODEL_FOLDER_H

#include "models/model_tensors.h"

#define KN_MODEL_FILE  "model.safetensors"
#define KN_CONFIG_FILE "config.json"

/* A JSON object of a stranger, within a limit of values; NULL with an error. The caller decrefs. */
json_t *kn_model_json(const char *path);

/* True if a model may be written into dir, which is made if missing: it holds no run's checkpoint,
 * and no model of another origin. Else an error. */
bool kn_model_may_save(const char *dir);

typedef struct kn_model_saving {
    const char *caller;                /* names it in errors */
    const char *config;                /* the text of config.json */
    const struct kn_file_writer *file; /* writes another file in place of both; NULL: none */
    kn_comm *comm;                     /* the ranks that hold the module; NULL: kn_world() */
    const kn_ema *ema;                 /* made for it: its averages are saved; NULL: none */
    kn_dtype dtype;                    /* of the floats; 0: KN_F32 */
} kn_model_saving;
/* Writes module, a model of c, as kn_pretrained_save does. Collective. */
bool kn_model_save(const char *dir, void *module, const kn_model_config *c, kn_model_saving o);

#endif
