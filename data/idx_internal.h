/* data/idx_internal.h (private): idx files for those who know their contents. */
#ifndef KNAP_DATA_IDX_INTERNAL_H
#define KNAP_DATA_IDX_INTERNAL_H

#include "data/idx_file.h"

/* kn_idx_read, but the caller owns the reference; with magic other than 0 the file must begin with
 * it, else it is no idx file of what; with count other than 0 there must be one for each of so many
 * images. */
kn_tensor *kn_idx_read_as(const char *path, uint32_t magic, const char *what, int64_t count);

#endif
