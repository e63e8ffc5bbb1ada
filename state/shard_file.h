/* state/shard_file.h (private): writing one .safetensors file of rectangles, with checksums. The
 * header is written last, when the checksums in it are known: a file that isn't finished has a
 * length of 0 there, and no reader takes it. */
#ifndef KNAP_STATE_SHARD_FILE_H
#define KNAP_STATE_SHARD_FILE_H

#include "state/pieces.h"

#define KN_SHARD_INFO   "DCP_SHARDING_INFO" /* keys of the metadata */
#define KN_SHARD_SUMS   "KNAP_XXH3"
#define KN_SHARD_ID     "KNAP_ID"
#define KN_SHARD_VALUES "knap.values" /* of state_file.c */
#define KN_VALUES_ID    "values-"     /* begins an id that is a hash of them */

typedef struct kn_shard_file kn_shard_file;

typedef struct kn_shard_item {
    const char *name; /* borrowed until the file is freed */
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS]; /* of the whole */
    kn_rectangle part;
} kn_shard_item;

/* Begins dir/name, which must not be there. sharded: the metadata says which part of the whole each
 * item is; without it all items are whole, as in files of other programs. id: NULL or "": none.
 * values: of a state; NULL: none; borrowed until the file is freed. NULL with an error. */
kn_shard_file *kn_shard_file_create(const char *dir, const char *name, const kn_shard_item *item,
                                    int items, bool sharded, const char *id, const char *values);
/* The next bytes of the items, one after another, in portions of any size. */
bool kn_shard_file_append(kn_shard_file *f, const void *data, size_t bytes);
/* Checks that all bytes came, writes the header, syncs and closes. */
bool kn_shard_file_finish(kn_shard_file *f, kn_piece_file *file);
/* Frees f, and unless keep is set removes the file; NULL is fine. */
void kn_shard_file_free(kn_shard_file *f, bool keep);

#endif
