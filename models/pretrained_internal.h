/* models/pretrained_internal.h (private): image models in files, for the programs and for
 * pretrained_config.c. */
#ifndef KNAP_MODELS_PRETRAINED_INTERNAL_H
#define KNAP_MODELS_PRETRAINED_INTERNAL_H

#include "models/pretrained.h"
#include "models/model_folder.h"
#include "models/vision.h"

/* What kn_pretrained_open found; borrowed. */
const kn_model_config *kn_pretrained_config(const kn_pretrained *p);
const kn_vision_input *kn_pretrained_input(const kn_pretrained *p);
/* kn_pretrained_save of any image family. */
bool kn_vision_save(const char *dir, void *module, const kn_model_config *c,
                    const kn_vision_input *in, kn_pretrained_save_options o);

/* ---- config.json: pretrained_config.c -------------------------------------------------------- */

/* The text of a config.json, for kn_host_free; NULL with an error. */
char *kn_pretrained_config_text(const kn_model_config *c, const kn_vision_input *in);
/* The model that a config.json names, or name, with the sizes of the tensors in f, and its images.
 * All tensors are checked. json may be NULL; in->label is the caller's to free, after an error,
 * too. */
bool kn_pretrained_config_model(const json_t *json, const char *config_path, const char *name,
                                kn_pieces *f, const char *path, kn_model_config *c,
                                kn_vision_input *in);

#endif
