/* tensor/safetensors_format.h (private to the library): shared by readers and writers of
 * .safetensors.
 *
 *   bytes 0..7      N, u64 little-endian: length of the header
 *   bytes 8..8+N    header: one JSON object, begins with '{', may end in spaces
 *       "name": { "dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end] }, ...
 *       "__metadata__": { "key": "value", ... }       (optional; strings only)
 *   the rest        data, row-major, little-endian; offsets count from its start. Taken in order of
 *                   their offsets the tensors cover it without gap and overlap.
 *
 * The format: https://github.com/huggingface/safetensors (README, "Format"). */
#ifndef KNAP_TENSOR_SAFETENSORS_FORMAT_H
#define KNAP_TENSOR_SAFETENSORS_FORMAT_H

#include "tensor/safetensors.h"

#define SAFETENSORS_MAX_HEADER 100000000u /* bytes; the published limit */
#define SAFETENSORS_METADATA   "__metadata__"
#define SAFETENSORS_DTYPES                                                                         \
    "BOOL, U8, I8, F8_E5M2, F8_E4M3, I16, U16, F16, BF16, I32, U32, F32, F64, I64 and U64"

/* "F32" and so on; NULL or KN_DTYPE_DEFAULT for dtypes that the format does not list. */
const char *kn_safetensors_dtype_name(kn_dtype t);
kn_dtype kn_safetensors_dtype_parse(const char *name);

/* bytes = product of the shape * element size; false if a size is negative or it overflows. */
bool kn_safetensors_bytes(kn_dtype t, int ndim, const int64_t *shape, int64_t *bytes);

/* Length and header of a file of these entries (their data is ignored), padded so that the data
 * begins at a multiple of KN_ALIGN. size: bytes; data: bytes of all entries. Caller frees; NULL
 * with an error that names path. */
char *kn_safetensors_header(const char *path, const kn_safetensors_entry *entry, int entries,
                            const kn_safetensors_pair *meta, int metas, size_t *size,
                            int64_t *data);

/* dtype, ndim and shape of the i-th tensor; where its bytes begin in the file is returned. */
int64_t kn_safetensors_place(const kn_safetensors *f, int i, kn_array *array);
int64_t kn_safetensors_size(const kn_safetensors *f); /* of the file, bytes */
/* The checksum (tensor/checksum.h) of length and header. */
uint64_t kn_safetensors_header_sum(const kn_safetensors *f);

#endif
