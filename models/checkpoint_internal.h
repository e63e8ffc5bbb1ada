/* models/checkpoint_internal.h (private): what saving and reading a checkpoint share. */
#ifndef KNAP_MODELS_CHECKPOINT_INTERNAL_H
#define KNAP_MODELS_CHECKPOINT_INTERNAL_H

#include "models/checkpoint.h"
#include "models/data.h"
#include "tensor/safetensors.h"
#include <jansson.h>

#define KN_CHECKPOINT_PATH 4096

/* In the order in which they are renamed: the one that makes a save count is last. */
enum { KN_FILE_MODEL, KN_FILE_OPTIMIZER, KN_FILE_TOKENIZER, KN_FILE_STATE, KN_FILES };
extern const char *const kn_checkpoint_file[KN_FILES];

/* The key of a save's random name: in the metadata of .safetensors, at the top of JSON files. */
#define KN_SAVE_KEY "save"

/* dir/name and the suffix into path; false with an error where it is too long. */
bool kn_checkpoint_path(char path[KN_CHECKPOINT_PATH], const char *dir, const char *name,
                        const char *suffix);

/* Renames the files of a save that counts; nothing where there is none. */
bool kn_checkpoint_finish_renames(const char *dir);

/* One tensor of a file: a parameter, or what the optimizer keeps of it. */
typedef struct kn_saved_item {
    int param;
    const char *what; /* NULL: the parameter itself */
} kn_saved_item;

typedef struct kn_saved_items {
    kn_saved_item *list;
    kn_safetensors_entry *entry;
    int count;
    int64_t largest; /* elements */
} kn_saved_items;

/* What a file holds: the parameters, or (state) the optimizer's tensors. Free it in any case. */
bool kn_saved_items_make(kn_saved_items *s, void *model, bool state);
void kn_saved_items_free(kn_saved_items *s);

#endif
