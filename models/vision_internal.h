/* models/vision_internal.h (private): configurations of image models as JSON, and their tensors in
 * files. */
#ifndef KNAP_MODELS_VISION_INTERNAL_H
#define KNAP_MODELS_VISION_INTERNAL_H

#include "models/vision.h"
#include "state/pieces.h"
#include "tensor/safetensors.h"

#include <jansson.h>

/* ---- sizes: vision_config.c ------------------------------------------------------------------ */

/* An object that is read, and its file for errors. */
typedef struct kn_json_source {
    const json_t *object;
    const char *file;
} kn_json_source;

/* A whole number of the object in [low, high]; else an error. */
bool kn_json_int(kn_json_source s, const char *key, int64_t low, int64_t high, int64_t *value);
/* What kn_resnet_config_text and kn_vit_config_text wrote. */
bool kn_resnet_config_read(kn_json_source s, kn_resnet_config *c);
bool kn_vit_config_read(kn_json_source s, kn_vit_config *c);
/* kn_vision_family's .name. */
const char *kn_resnet_name(const kn_resnet_config *c);
const char *kn_vit_name(const kn_vit_config *c);

/* ---- images: vision_input.c ------------------------------------------------------------------ */

/* "label_names" (NULL: unknown) and "pretrained_cfg", new; NULL with an error. */
json_t *kn_vision_labels_json(const kn_vision_input *in);
json_t *kn_vision_images_json(const kn_vision_config *c, const kn_vision_input *in);
/* Reads both for a model whose tensors were checked. own: everything must be there; else timm's
 * defaults count. The caller frees in->label. */
bool kn_vision_input_read(kn_json_source s, const kn_vision_config *c, bool own,
                          kn_vision_input *in);

/* ---- tensors: vision_tensors.c --------------------------------------------------------------- */

/* Parameters and buffers of a module as they are in a file. */
typedef struct kn_vision_tensors {
    kn_safetensors_entry *entry; /* [count]: names (owned), dtypes of this module, shapes */
    kn_tensor **buffer;          /* [count]: borrowed; NULL: parameter number i of kn_params */
    int count;
} kn_vision_tensors;
bool kn_vision_tensors_make(kn_vision_tensors *t, void *module);
void kn_vision_tensors_free(kn_vision_tensors *t);

/* The files f hold the tensors of t, and no others. head: a classifier of which the number of
 * classes may differ; NULL: none. Errors name path and the tensors; than: "the module has". */
bool kn_vision_match(const kn_vision_tensors *t, const kn_pieces *f, const char *path,
                     const char *than, const char *head);
/* The same for a model that isn't made, in memory within that of f's headers. */
bool kn_vision_check(const kn_vision_config *c, const kn_pieces *f, const char *path,
                     const char *than);
/* Copies the tensors of f into module; collective. */
bool kn_vision_fill(const kn_vision_tensors *t, void *module, kn_pieces *f, const char *path,
                    const char *head);
/* Writes module's tensors, or averages, with floats as dtype. Collective; rank 0 of comm writes. */
bool kn_vision_write(const kn_vision_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                     kn_dtype dtype, const char *path);

#endif
