/* optim/reduce.c: sums and maxima of scalars over ranks, through the function that fsdp leaves at
 * the root of a sharded tree (optim/ uses no communicator). */
#include "optim/optim_internal.h"

bool kn_reduce_over_ranks(const kn_root *root, int64_t *limbs, float *absmax)
{
    if (!root->scalar_reduce)
        return true;
    return root->scalar_reduce(root->scalar_reduce_arg, limbs, limbs ? KN_SQSUM_LIMBS : 0, absmax);
}
