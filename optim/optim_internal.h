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
/* The gradients of m's parameters p[n] are all there and go with one factor; else a sentence. */
bool kn_may_step(const kn_module_impl *m, const kn_param *p, int n, const char *what);
/* m, or the nearest module around it, whose gradients were clipped as they are now, or NULL. */
const kn_module_impl *kn_clipped(const kn_module_impl *m);
/* Not only a part of m was clipped; else a sentence. */
bool kn_clipped_whole(const kn_module_impl *m, const char *what);
/* What ends a step, done or skipped: gradients are gone, m's micro-batches count from 0 again. */
void kn_consume_grads(kn_module_impl *m, const kn_param *p, int n);
kn_module_impl *kn_optim_module(const kn_optim *o);

#endif
