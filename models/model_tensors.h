/* models/model_tensors.h (private): the tensors of a model in files: compared, read, written. */
#ifndef KNAP_MODELS_MODEL_TENSORS_H
#define KNAP_MODELS_MODEL_TENSORS_H

#include "fsdp/ema.h"
#include "models/family.h"
#include "state/pieces.h"
#include "tensor/safetensors.h"

/* Parameters and buffers of a module as they are in a file. */
typedef struct kn_model_tensors {
    kn_safetensors_entry *entry; /* [count]: names (owned), dtypes of this module, shapes */
    int count;
    int64_t room;
} kn_model_tensors;
bool kn_model_tensors_make(kn_model_tensors *t, void *module);
/* Those of a model that isn't made. */
bool kn_model_tensors_of(kn_model_tensors *t, const kn_model_config *c);
/* Adds a tensor of zeros, which the module lacks. */
bool kn_model_tensors_add_zeros(kn_model_tensors *t, const char *name, int64_t size);
void kn_model_tensors_free(kn_model_tensors *t);
/* The files f hold the tensors of a model of c, and no others; in memory within that of f's
 * headers. theirs: by the names of the other program. Errors name path and the tensors; than:
 * "config.json gives". */
bool kn_model_check(const kn_model_config *c, kn_pieces *f, bool theirs, const char *path,
                    const char *than);
/* t is of a model of c. */
bool kn_model_is(const kn_model_tensors *t, const kn_model_config *c, const char *than);
/* Loads the tensors of f into module, a model of c's family: of language by the names of the other
 * program, of images only if all values are finite. new_head: a classifier of another number of
 * classes stays as it is. Collective. */
bool kn_model_load(const kn_model_config *c, void *module, kn_pieces *f, const char *path,
                   bool new_head, kn_comm *comm);
/* Calls put on each rank for every tensor in order (NULL: as t has them), whole and with floats as
 * as[i]. Collective; errors name a value that isn't finite, or isn't in that dtype. */
typedef bool (*kn_model_put)(void *to, int i, kn_tensor *x);
bool kn_model_each(const kn_model_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                   const kn_dtype *as, const int *order, kn_model_put put, void *to);
/* Writes module's tensors, or averages, with floats as dtype. Collective; rank 0 of comm writes. */
bool kn_model_write(const kn_model_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                    kn_dtype dtype, const char *path);

#endif
