/* tensor/whole_file.h (private to the library): files that are there whole or not at all. The bytes
 * go into a temporary file beside the target, PATH.tmp or PATH.tmp.N, which a commit syncs and
 * renames. Its writer holds a lock of it; one that a dead process left is replaced by the next that
 * writes PATH. */
#ifndef KNAP_TENSOR_WHOLE_FILE_H
#define KNAP_TENSOR_WHOLE_FILE_H

#include "tensor/files.h"

typedef struct kn_whole_file kn_whole_file;

/* NULL with an error. The caller commits or abandons. */
kn_whole_file *kn_whole_file_create(const char *path);
/* Appends; interrupted and short writes go on. */
bool kn_whole_file_write(kn_whole_file *f, const void *data, size_t bytes);
/* Syncs the file, renames it, syncs the folder. Frees f in any case. */
bool kn_whole_file_commit(kn_whole_file *f);
/* Removes the temporary file and frees f; NULL is fine. */
void kn_whole_file_abandon(kn_whole_file *f);

/* Makes the renames in dir durable. File systems that cannot sync a folder are no error, nor is a
 * folder that may be written and not read. */
bool kn_sync_folder(const char *dir);

#endif
