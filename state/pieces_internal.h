/* state/pieces_internal.h (private): the index of a folder's files. */
#ifndef KNAP_STATE_PIECES_INTERNAL_H
#define KNAP_STATE_PIECES_INTERNAL_H

#include "state/pieces.h"
#include "tensor/names.h"
#include <jansson.h>
#include <sys/stat.h>
#include <sys/types.h>

#define KN_SHARD_INFO   "DCP_SHARDING_INFO" /* keys of the metadata */
#define KN_SHARD_SUMS   "KNAP_XXH3"
#define KN_SHARD_ID     "KNAP_ID"
#define KN_SHARD_VALUES "knap.values" /* of state_file.c */
#define KN_VALUES_ID    "values-"     /* begins an id that is a hash of them */

typedef struct kn_indexed_file {
    kn_piece_file info;
    char *path;
    int fd; /* -1: not open now */
    struct stat identity;
} kn_indexed_file;

/* A tensor's rectangle in a file. */
typedef struct kn_indexed_part {
    int file;
    kn_rectangle r;
    int64_t at; /* bytes from the beginning of the file */
    uint64_t sum;
    bool has_sum;
    kn_piece_form form; /* of the one part of a foreign tensor */
} kn_indexed_part;

typedef struct kn_indexed_tensor {
    kn_piece piece;
    kn_indexed_part *part; /* in order of files; lies in kn_pieces.part */
    int parts;
} kn_indexed_tensor;

struct kn_pieces {
    int refs; /* beside the first */
    char id[KN_CHECKPOINT_ID];
    char *values; /* of the first file that has some */
    kn_indexed_file *file;
    int64_t room_for_files;
    int files, open;           /* how many are open */
    kn_indexed_tensor *tensor; /* in order of their first bytes in the files */
    kn_name_table table;       /* of tensor */
    int tensors;
    kn_indexed_part *part;
    char *room; /* for bytes on their way; NULL before the first */
};

/* Adds dir/name, or name where dir is NULL. */
bool kn_indexed_add(kn_pieces *p, const char *dir, const char *name);
/* pieces_folder.c: adds the files at path: of a folder, an index, or the one. *map: of their index,
 * for the caller to drop, after an error too; NULL: there is none. */
bool kn_indexed_list(kn_pieces *p, const char *path, json_t **map);
/* Whether each tensor of the map lies in its file. */
bool kn_indexed_check(const kn_pieces *p, const char *path, json_t *map);
/* Opens path, takes its identity, and remembers descriptors of the first files. */
int kn_indexed_open(kn_pieces *p, int file);
/* Bytes of kn_pieces.room. They are read, summed and copied to their places while they are in a
 * core's own cache. The system's copies to memory that isn't there take twice as long as all of
 * that. */
#define KN_PORTION (1 << 18)
/* pieces_form.c: reads the rectangle of a tensor that has a form. */
bool kn_formed_read(kn_pieces *p, const kn_indexed_tensor *t, const kn_rectangle *wanted, char *to);
/* A copy of its descriptor, for the caller to close; -1 with an error. */
int kn_indexed_copy(kn_pieces *p, int file);

#endif
