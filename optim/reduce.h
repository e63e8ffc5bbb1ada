/* optim/reduce.h (private): scalars of the norm over the ranks that hold the module's shards. */
#ifndef KNAP_OPTIM_REDUCE_H
#define KNAP_OPTIM_REDUCE_H

#include "nn/nn_internal.h"

/* limbs: KN_SQSUM_LIMBS integers to be added, or NULL; absmax: one float of which the maximum is taken,
 * or NULL. Nothing to do for a module that no one shards. */
bool kn_reduce_over_ranks(kn_module_impl *root, int64_t *limbs, float *absmax);

#endif
