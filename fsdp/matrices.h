/* fsdp/matrices.h (private): whole matrices for a step. */
#ifndef KNAP_FSDP_MATRICES_H
#define KNAP_FSDP_MATRICES_H

#include "fsdp/bucket.h"
#include "nn/matrices.h"

/* kn_param_source.matrices */
bool kn_step_matrices(const kn_matrix_step *s);
/* offload.c. The master's copy in param_dtype holds what the master does; so it stays where each
 * part that a step writes goes there as well. */
bool kn_bucket_casts(const kn_bucket *b);
bool kn_bucket_cast_part(kn_bucket *b, const kn_param *p);

#endif
