/* data/data.h: finding and reading data, random choices. */
#ifndef KNAP_DATA_DATA_H
#define KNAP_DATA_DATA_H

#include "kernels/memory.h"
#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- finding ------------------------------------------------------------------------------- */

/* The path of a data set: a named set ("shakespeare": a text file; "mnist",
 * "fashion-mnist", "cifar10", "cifar100": folders) is searched
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

#ifdef __cplusplus
}
#endif
#endif
