/* optim/reduce.c: sums and maxima of scalars over ranks, through the function that fsdp leaves at
 * the root of a sharded tree (optim/ uses no communicator). */
#include "optim/optim_internal.h"

bool kn_reduce_over_ranks(kn_module_impl *m, const kn_param *p, int64_t *limbs, float *absmax)
{
    kn_module_impl *top = kn_impl_root(m);
    const kn_root *root = top->root;
    return !root->scalar_reduce ||
           root->scalar_reduce(top, kn_norms_device(p), limbs, limbs ? KN_SQSUM_LIMBS : 0, absmax);
}
