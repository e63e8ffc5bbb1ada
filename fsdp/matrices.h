/* fsdp/matrices.h (private): whole matrices for a step. */
#ifndef KNAP_FSDP_MATRICES_H
#define KNAP_FSDP_MATRICES_H

#include "fsdp/bucket.h"
#include "nn/matrices.h"

/* kn_param_source.matrices */
bool kn_step_matrices(const kn_matrix_step *s);

#endif
