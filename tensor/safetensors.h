/* tensor/safetensors.h: reading and writing .safetensors files (little-endian u64 header length, a
 * JSON header, raw row-major data). Opening reads the header, getting a tensor reads its bytes.
 * Every header is taken as hostile: lengths, overlaps, gaps, dtypes, shapes, duplicate names and
 * JSON are checked before anything is used; each refusal is one error message that names the
 * file. */
#ifndef KNAP_TENSOR_SAFETENSORS_H
#define KNAP_TENSOR_SAFETENSORS_H

#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_safetensors kn_safetensors;

/* Opens and checks path. NULL with an error. Caller closes; tensors that were got stay valid after
 * closing. The file stays open: one that is renamed or removed meanwhile is read on. */
KN_API kn_safetensors *kn_safetensors_open(const char *path);
/* The same for a descriptor, which the result closes (and an error, at once); path names it in
 * errors. */
KN_API kn_safetensors *kn_safetensors_open_fd(const char *path, int fd);
KN_API void kn_safetensors_close(kn_safetensors *f);                    /* NULL is fine */
KN_API int kn_safetensors_count(const kn_safetensors *f);               /* of tensors */
KN_API const char *kn_safetensors_name(const kn_safetensors *f, int i); /* in file order */
KN_API bool kn_safetensors_has(const kn_safetensors *f, const char *name);
/* dtype, ndim and shape of a tensor, without its bytes. */
KN_API bool kn_safetensors_describe(const kn_safetensors *f, const char *name, kn_array *array);
/* Reads a tensor into memory of the CPU and gives it to the current scope. NULL with an error: no
 * such tensor, no memory, or the file was cut since it was opened. */
KN_API kn_tensor *kn_safetensors_get(kn_safetensors *f, const char *name);
/* A string of __metadata__, or NULL. Borrowed. */
KN_API const char *kn_safetensors_meta(const kn_safetensors *f, const char *key);

/* One tensor to write. data is row-major host memory of the whole tensor. */
typedef struct kn_safetensors_entry {
    const char *name;
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    const void *data;
} kn_safetensors_entry;

typedef struct kn_safetensors_pair {
    const char *key, *value;
} kn_safetensors_pair;

/* Writes all entries to path: first to a temporary file beside it, synced, then renamed, so that an
 * interrupted save leaves the old file whole. Data begins 64-byte aligned. */
KN_API bool kn_safetensors_save(const char *path, const kn_safetensors_entry *entry, int entries,
                                const kn_safetensors_pair *meta, int metas);

/* Streaming form: the header is written at once, then each entry's bytes in order, in pieces of any
 * size, so that no rank needs the whole model in memory. data in the entries is ignored. */
typedef struct kn_safetensors_writer kn_safetensors_writer;
KN_API kn_safetensors_writer *kn_safetensors_create(const char *path,
                                                    const kn_safetensors_entry *entry, int entries,
                                                    const kn_safetensors_pair *meta, int metas);
KN_API bool kn_safetensors_append(kn_safetensors_writer *w, const void *data, size_t bytes);
/* Checks that all bytes came, syncs, renames; frees w in any case. */
KN_API bool kn_safetensors_commit(kn_safetensors_writer *w);
KN_API void kn_safetensors_abandon(kn_safetensors_writer *w); /* removes the temporary file */

#ifdef __cplusplus
}
#endif
#endif
