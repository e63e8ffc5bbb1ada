/* optim/optim_internal.h (private): what the files of this folder share. */
#ifndef KNAP_OPTIM_INTERNAL_H
#define KNAP_OPTIM_INTERNAL_H

#include "nn/nn_internal.h"
#include "optim/optim.h"

/* limbs: KN_SQSUM_LIMBS integers to be added over the ranks that hold the module's shards, or NULL;
 * absmax: one float of which the maximum is taken, or NULL. Nothing to do for a module that no one
 * shards. */
bool kn_reduce_over_ranks(kn_module_impl *root, int64_t *limbs, float *absmax);
/* The largest magnitude of the raw gradients of all ranks; NaN or infinite where one is. Collective. */
bool kn_grads_absmax(kn_module_impl *root, const kn_param *p, int n, float *absmax);
/* What ends a step, done or skipped: gradients are gone, micro-batches count from 0 again. */
void kn_consume_grads(kn_module_impl *m, const kn_param *p, int n);
kn_module_impl *kn_optim_module(const kn_optim *o);

#endif
