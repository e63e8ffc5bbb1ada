/* models/checkpoint_internal.h (private): shared by saving and reading a checkpoint. */
#ifndef KNAP_MODELS_CHECKPOINT_INTERNAL_H
#define KNAP_MODELS_CHECKPOINT_INTERNAL_H

#include "models/checkpoint.h"
#include "data/data.h"
#include "models/run_folder_internal.h"
#include "tensor/safetensors.h"
#include <jansson.h>

/* The key of a save's random name: in the metadata of .safetensors, at the top of JSON files. */
#define KN_SAVE_KEY "save"

/* One tensor of a file: a parameter, the optimizer's state of it, or a buffer. */
typedef struct kn_saved_item {
    int param;         /* number in kn_params; of a buffer -1 */
    const char *state; /* kn_optim_state_name; NULL: the parameter itself, or part */
    kn_tensor *part;   /* cut as the parameter: of its averages or training values; borrowed */
    kn_tensor *buffer; /* borrowed; NULL: a parameter */
    int rank;          /* the buffer's rank */
    bool differs;      /* a buffer of rank 0 that isn't the same on all ranks */
} kn_saved_item;

typedef struct kn_saved_items {
    kn_saved_item *list;
    kn_safetensors_entry *entry;
    int count;
    int64_t room;   /* in both */
    size_t largest; /* bytes */
} kn_saved_items;

/* Lists the tensors of model.safetensors: averages, where ema isn't NULL. The caller frees s, after
 * an error too. */
bool kn_saved_items_make(kn_saved_items *s, void *module, const kn_ema *ema);
/* Lists the tensors of optimizer.safetensors, with ema the parameters in training. Buffers of model
 * that differ between ranks occur once for each rank but the first. */
bool kn_saved_items_make_state(kn_saved_items *s, void *module, const kn_optim *optim,
                               const kn_ema *ema, const kn_saved_items *model, int ranks);
void kn_saved_items_free(kn_saved_items *s);
/* Finds out which buffers differ between ranks. Collective. */
bool kn_saved_items_compare(kn_saved_items *s, kn_comm *comm);

/* True where averages of module, or none, go with an optimizer; else an error. */
bool kn_checkpoint_ema(const kn_ema *ema, void *module, bool optim, const char *what);
size_t kn_saved_item_bytes(const kn_saved_items *s, int i);
/* Reads the whole tensor into host memory of every rank. Collective. */
bool kn_saved_item_read(const kn_saved_items *s, int i, kn_comm *comm, void *module,
                        const kn_optim *optim, void *host);
/* Writes t, the whole tensor on the CPU, into module or optim. */
bool kn_saved_item_write(const kn_saved_item *it, void *module, const kn_optim *optim,
                         kn_tensor *t);
/* "<buffer>.rank<K>", the name of another rank's buffer; into name. */
bool kn_saved_buffer_name(char *name, size_t size, const char *buffer, int rank);

#endif
