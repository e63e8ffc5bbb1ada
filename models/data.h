/* models/data.h: finding and reading data, and loaders: objects that hand out the batches of a data
 * set, each rank its own.
 *
 *   kn_loader *data = kn_mnist("train", world, .batch = 128, .shuffle = true);
 *   for (...) { kn_scope s = kn_scope_begin(); kn_batch b = kn_next(data); ... kn_scope_end(s); }
 *
 * The samples of a batch are a function of (seed, index of the micro-batch), never of the rank: the
 * k-th call of kn_next on rank r of N gives micro-batch k * N + r. So N ranks with A/N calls a step
 * together see the samples of one rank with A calls (docs/architecture.md, idea 9). */
#ifndef KNAP_MODELS_DATA_H
#define KNAP_MODELS_DATA_H

#include "comm/comm.h"
#include "kernels/types.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- finding ------------------------------------------------------------------------------- */

/* The path of a data set: a named set ("shakespeare": a text file; "mnist": a folder) is searched
 * below each folder of $KNAP_DATA (separated by colons), then ~/.cache/knap; any other name is a
 * path, which must exist. The caller frees the result with kn_host_free. Errors name the folders
 * searched and the command that downloads the set. */
KN_API char *kn_data_find(const char *name_or_path);
/* The same, but NULL without an error if a named set isn't on this machine (tests, fallbacks). */
KN_API char *kn_data_find_quietly(const char *name);

/* ---- files --------------------------------------------------------------------------------- */

/* A file in memory, read-only. Files of up to KN_FILE_COPIED bytes are copied, larger ones mapped:
 * truncating a mapped file while it is read ends the program by SIGBUS. */
#define KN_FILE_COPIED (1 << 24)
typedef struct kn_mapped {
    const unsigned char *data;
    size_t size;
} kn_mapped;

/* Maps a regular file that isn't empty. Errors call it what ("text file"): missing, empty, a
 * folder, unreadable. kn_file_unmap frees the map. */
KN_API bool kn_file_map(const char *path, const char *what, kn_mapped *map);
/* The same for a descriptor, which is closed; path names it in errors. */
KN_API bool kn_file_map_fd(int fd, const char *path, const char *what, kn_mapped *map);
KN_API void kn_file_unmap(kn_mapped *map); /* fine on a zeroed one */
/* Writes the concatenation of count pieces to path: all or nothing, through a temporary file; file
 * and folder are synced to disk. */
KN_API bool kn_file_write(const char *path, const void *const *piece, const size_t *size,
                          int count);

/* ---- random choices ------------------------------------------------------------------------ */

/* The Philox stream (kernels/philox.h) for a purpose, such as "data.train", and two indices. */
KN_API uint64_t kn_random_stream(const char *purpose, int64_t a, int64_t b);
/* A whole number in [0, n) that is a function of (seed, stream, i) alone; uniform up to n /
 * 2^64. */
KN_API int64_t kn_random_below(uint64_t seed, uint64_t stream, uint64_t i, int64_t n);
/* Element i of a permutation of 0 .. n-1 that is a function of (seed, epoch) alone, computed
 * without a table: a Feistel network with Philox as its round function, walked until it lands
 * below n (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). 0 <= i < n. */
KN_API int64_t kn_shuffle(uint64_t seed, int64_t epoch, int64_t n, int64_t i);

/* ---- loaders ------------------------------------------------------------------------------- */

typedef struct kn_loader kn_loader;

/* Tensors of the scope that is open when kn_next is called; NULL both while an error stands. */
typedef struct kn_batch {
    kn_tensor *x, *y;
} kn_batch;

/* The next micro-batch of this rank. After the last sample the next epoch begins, in a new order if
 * shuffled; a batch may span two epochs. */
KN_API kn_batch kn_next(kn_loader *l);
/* Calls of kn_next (rounds) so far; setting it jumps to any round (resume, evaluation). */
KN_API int64_t kn_loader_round(const kn_loader *l);
KN_API void kn_loader_seek(kn_loader *l, int64_t round);
/* Rounds in one pass over the data: samples / (batch * ranks), rounded down; at least 1. */
KN_API int64_t kn_loader_rounds(const kn_loader *l);
KN_API void kn_loader_free(kn_loader *l); /* NULL is fine */

/* ---- MNIST --------------------------------------------------------------------------------- */

typedef struct kn_mnist_options {
    size_t _size;
    struct kn_guard *_positional; /* makes positional use a compile error */
    int64_t batch;                /* images a micro-batch; required */
    bool shuffle;                 /* a new order every epoch */
    uint64_t seed;
    const char *data; /* "mnist" (default), or a folder with the idx files */
    kn_dtype dtype;   /* of x; default f32 */
    kn_device device; /* default the CPU */
} kn_mnist_options;

/* Images of handwritten digits: split "train" (60000) or "test" (10000). A batch is x[B, 784] in
 * [0, 1] and labels y[B] (i64). world NULL: one rank. Files: gzipped idx (see models/mnist.h). */
#define kn_mnist(split, world, ...)                                                                \
    kn_mnist_((split), (world),                                                                    \
              (kn_mnist_options){ ._size = sizeof(kn_mnist_options), __VA_ARGS__ })
KN_API kn_loader *kn_mnist_(const char *split, const kn_comm *world, kn_mnist_options o);

#ifdef __cplusplus
}
#endif
#endif
