/* state/pieces.h (private): tensors in files, each rank's part in files of its own, in the
 * convention of PyTorch's distributed checkpoints for safetensors (HuggingFaceStorageReader reads
 * them as they are, consolidate_safetensors_files merges them):
 *
 *   DIR/shard-00002-model-00001-of-00003.safetensors      rank 1, first piece of three
 *   "__metadata__": { "format": "pt", "DCP_VERSION": "1.0",
 *     "DCP_SHARDING_INFO": {"w": {"saved_offsets": [2, 0], "global_shape": [8, 4]}},    (as text)
 *     "KNAP_ID": the id of the checkpoint,
 *     "KNAP_XXH3": {"w": "9c2f..."} }     XXH3 (64 bits, seed 0) of the bytes of each tensor (text)
 *
 * A file holds at most one rectangle of a tensor, so a rank writes as many files as its most cut up
 * tensor has rectangles (state/rectangles.h); one that would be empty isn't written. Files of other
 * programs, whole tensors with or without an index, are the same with all offsets 0. */
#ifndef KNAP_STATE_PIECES_H
#define KNAP_STATE_PIECES_H

#include "state/rectangles.h"

#define KN_CHECKPOINT_ID 33 /* characters of an id with its end: 32 hex digits at most */

/* A tensor, or the part of it that a rank holds. */
typedef struct kn_piece {
    const char *name; /* borrowed; UTF-8 */
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS]; /* of the whole */
    kn_interval part;           /* .at isn't used; for a tensor of files: all of it */
} kn_piece;

/* A file as it must be found again: kn_pieces_file gives the same numbers. checksum: XXH3 of its
 * header, which holds those of the tensors. */
typedef struct kn_piece_file {
    char name[64]; /* in its folder */
    int64_t bytes;
    uint64_t checksum;
} kn_piece_file;

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct kn_pieces_writer kn_pieces_writer;

/* Begins this rank's files in dir, which exists; a file that is there already is an error. Pieces
 * are borrowed for this call, their names until w is freed. Empty parts take no bytes and appear in
 * no file; a tensor without elements appears: give it to one rank. id: of the checkpoint, the same
 * on all ranks. values: of a kn_state (JSON); NULL: none. Both are borrowed like names. Nothing
 * here is collective; all calls of a writer may come from one other thread. NULL with an error. */
kn_pieces_writer *kn_pieces_create(const char *dir, int rank, const char *id, const char *values,
                                   const kn_piece *piece, int pieces);
/* Begins one file of whole tensors, as other programs have them: dir/name. The rest is the same. */
kn_pieces_writer *kn_pieces_create_whole(const char *dir, const char *name, const kn_piece *piece,
                                         int pieces);
/* The next bytes of the parts, piece after piece, each contiguous (1-d), in portions of any size,
 * which may be freed or changed afterwards. Large portions go to the file as they are, small ones
 * through a buffer. */
bool kn_pieces_append(kn_pieces_writer *w, const void *data, size_t bytes);
/* Checks that all bytes came, writes the headers and syncs the files (not the folder). Frees w in
 * any case; after an error, also one that stands already, none of its files is left. False on
 * NULL. */
bool kn_pieces_commit(kn_pieces_writer *w);
/* Removes the files and frees w; NULL is fine. */
void kn_pieces_abandon(kn_pieces_writer *w);

/* ---- reading --------------------------------------------------------------------------------- */

typedef struct kn_pieces kn_pieces;

/* The tensors of all .safetensors files of a folder, of those that its model.safetensors.index.json
 * names where it has one, of those that an index names, or of one file. Reads headers only.
 * Checked: every header, that all files carry the same id, and that the rectangles of each tensor
 * cover it, each element once. NULL with an error. Caller closes. */
kn_pieces *kn_pieces_open(const char *path);
/* How the elements of a tensor of one or two dims lie in a file that isn't of safetensors. */
typedef struct kn_piece_form {
    bool transposed; /* the file has [shape[1], shape[0]] */
    /* GGUF's Q8_0, of a dtype of f32: 32 elements are an f16 d and 32 bytes q: d q */
    bool blocks;
    /* Rows in a head; 0: rows lie in order. Row k head / 2 + j of a head, k 0 or 1, is its row
     * 2 j + k in the file, for a rotary embedding of neighbours. */
    int64_t head;
} kn_piece_form;

/* The row of the file where row r of the tensor lies. */
int64_t kn_piece_form_row(const kn_piece_form *f, int64_t r);

/* A tensor in a file of any kind: all of piece.part, from byte at on. */
typedef struct kn_foreign_piece {
    kn_piece piece; /* its name is copied */
    int64_t at;
    kn_piece_form form;
} kn_foreign_piece;

struct stat;
/* The same of one file, whose tensors lie as the list says; .part isn't used. Checked: that they
 * lie within the file, and that the file is still the one that seen tells about. */
kn_pieces *kn_pieces_of(const char *path, const struct stat *seen, const kn_foreign_piece *list,
                        int count);
/* The bytes of a tensor in its file; false, without an error, where they are too many, or the form
 * doesn't fit the shape. */
bool kn_foreign_bytes(const kn_foreign_piece *f, int64_t *bytes);
/* Whether there are such files at path: a folder, an index or a file of that ending. */
bool kn_pieces_are_there(const char *path);
kn_pieces *kn_pieces_ref(kn_pieces *p);                      /* one more close is due */
void kn_pieces_close(kn_pieces *p);                          /* NULL is fine */
const char *kn_pieces_values(const kn_pieces *p);            /* of a kn_state (JSON); NULL: none */
const char *kn_pieces_id(const kn_pieces *p);                /* "" where the files have none */
int kn_pieces_count(const kn_pieces *p);                     /* of tensors */
const kn_piece *kn_pieces_tensor(const kn_pieces *p, int i); /* in the order of the files */
int kn_pieces_find(const kn_pieces *p, const char *name);    /* -1: there is none */
int64_t kn_piece_bytes(const kn_piece *t);
int64_t kn_pieces_bytes(const kn_pieces *p); /* of all tensors; NULL: 0 */
int kn_pieces_files(const kn_pieces *p);
const kn_piece_file *kn_pieces_file(const kn_pieces *p, int i); /* by name in order of bytes */

/* A checksum of every header and of the first and last 64 KiB of each file, by which ranks notice
 * that they opened different files. */
bool kn_pieces_glance(kn_pieces *p, uint64_t *sum);

/* Takes the memory that reading needs, so that it takes none. */
bool kn_pieces_ready(kn_pieces *p);
/* Reads the elements of part of tensor i into to, contiguous, in the file's dtype. Only the bytes
 * that are wanted are read, each once. Where all of a file's rectangle is read, and the file has
 * checksums, its bytes must agree with them. */
bool kn_pieces_read(kn_pieces *p, int i, kn_interval part, void *to);
/* Reads all of tensor i into memory of the CPU and gives it to the current scope; NULL with an
 * error. */
kn_tensor *kn_pieces_get(kn_pieces *p, int i);
/* Whether every byte of tensor i has a checksum; files of other programs have none. */
bool kn_pieces_has_sums(const kn_pieces *p, int i);
/* Reads all bytes of tensor i that have a checksum, and compares. progress (may
 * be NULL) is called with the bytes of each portion. */
typedef void (*kn_pieces_progress)(int64_t bytes, void *arg);
bool kn_pieces_verify(kn_pieces *p, int i, kn_pieces_progress progress, void *arg);

#endif
