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
    kn_tensor **buffer;          /* [count]: kept; NULL: parameter number i of kn_params */
    int count;
    int64_t entry_room, buffer_room;
} kn_model_tensors;
bool kn_model_tensors_make(kn_model_tensors *t, void *module);
/* Those of a model that isn't made. */
bool kn_model_tensors_of(kn_model_tensors *t, const kn_model_config *c);
/* Adds a tensor of zeros, which the module lacks. */
bool kn_model_tensors_add_zeros(kn_model_tensors *t, const char *name, int64_t size);
void kn_model_tensors_free(kn_model_tensors *t);
/* The number of the tensor of f that is called name in a model of the family; -1: none. */
int kn_model_find(const kn_family *family, const kn_pieces *f, const char *name);
typedef enum kn_model_lax {
    KN_MODEL_EXACT = 0,
    KN_MODEL_NEW_HEAD, /* the classifier may have another number of classes */
    KN_MODEL_OTHERS    /* there may be other tensors */
} kn_model_lax;
/* The files f hold the tensors of t, a model of the family, and no others. Errors name path and the
 * tensors; than: "the module has". */
bool kn_model_match(const kn_model_tensors *t, const kn_family *family, const kn_pieces *f,
                    const char *path, const char *than, kn_model_lax lax);
/* The same for a model that isn't made, in memory within that of f's headers. */
bool kn_model_check(const kn_model_config *c, const kn_pieces *f, const char *path,
                    const char *than, kn_model_lax lax);
/* Copies the tensors of f into module, but for a head of other sizes (NULL: none). Collective. */
bool kn_model_fill(const kn_model_tensors *t, void *module, kn_pieces *f, const char *path,
                   const char *head);
/* Calls put on each rank for every tensor in order (NULL: as t has them), whole and with floats as
 * as[i]. Collective; errors name a value that isn't finite, or isn't in that dtype. */
typedef bool (*kn_model_put)(void *to, int i, kn_tensor *x);
bool kn_model_each(const kn_model_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                   const kn_dtype *as, const int *order, kn_model_put put, void *to);
/* Writes module's tensors, or averages, with floats as dtype. Collective; rank 0 of comm writes. */
bool kn_model_write(const kn_model_tensors *t, void *module, const kn_ema *ema, kn_comm *comm,
                    kn_dtype dtype, const char *path);

#endif
