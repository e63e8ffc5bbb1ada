/* state/merge.h (private): the tensors of shards as files that other programs take: one
 * model.safetensors, or several with an index, as transformers writes them. */
#ifndef KNAP_STATE_MERGE_H
#define KNAP_STATE_MERGE_H

#include "state/pieces.h"

/* Writes all tensors of p into the folder dir, which exists: model.safetensors, or with most > 0,
 * where they have more than `most` bytes, model-00001-of-0000N.safetensors and so on with
 * model.safetensors.index.json; a file has at most `most` bytes of tensors, or one tensor. Takes
 * the memory of the largest tensor; each byte that has a checksum is compared with it. A file that
 * is there already is an error; after an error none of the new files is left. What a merge that was
 * killed left is removed first; two at a time into one folder are an error. files (may be NULL):
 * how many have tensors. progress as in kn_pieces_verify. */
bool kn_pieces_merge(kn_pieces *p, const char *dir, int64_t most, int *files,
                     kn_pieces_progress progress, void *arg);

#endif
