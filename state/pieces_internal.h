/* state/pieces_internal.h (private): the index of a folder's files. */
#ifndef KNAP_STATE_PIECES_INTERNAL_H
#define KNAP_STATE_PIECES_INTERNAL_H

#include "state/pieces.h"
#include <sys/stat.h>
#include <sys/types.h>

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
} kn_indexed_part;

typedef struct kn_indexed_tensor {
    kn_piece piece;
    kn_indexed_part *part; /* in order of files; lies in kn_pieces.part */
    int parts;
} kn_indexed_tensor;

struct kn_pieces {
    char id[KN_CHECKPOINT_ID];
    kn_indexed_file *file;
    int files, open;           /* how many are open */
    kn_indexed_tensor *tensor; /* in order of their first bytes in the files */
    int *by_name;              /* [tensors]: their indices in order of names */
    int tensors;
    kn_indexed_part *part;
    char *room; /* for bytes on their way; NULL before the first */
};

/* Opens path, takes its identity, and remembers descriptors of the first files. */
int kn_indexed_open(kn_pieces *p, int file);
/* A copy of its descriptor, for the caller to close; -1 with an error. */
int kn_indexed_copy(kn_pieces *p, int file);

#endif
