/* autograd/collectives.h: collectives on tensors, with gradients.
 *
 * Each is a function of the tensors of all ranks of c (NULL: kn_world()), linear, and its backward
 * is the transposed one: a gradient is that of the sum of all ranks' losses. Where all ranks
 * compute the same loss, that is the loss times their number, which the mean of fsdp divides away.
 * They add in the order of ranks, in f32 (f64 for f64), rounded once, so bits repeat; on GPUs as
 * kn_all_reduce does. They run on the compute stream, in forward and once more in backward.
 *
 * The rules, as for any collective (comm/comm.h): all ranks make the same calls in the same order,
 * on tensors of one shape and dtype. The tensor requires a gradient on all ranks or on none, and
 * the backwards of all ranks reach the result or none does: a rank that has nothing to say adds the
 * sum of the result times 0 to its loss. A rank that does otherwise is an error on every rank that
 * names the calls of two. Inside of modules that recompute they run once more, in the replay. */
#ifndef KNAP_AUTOGRAD_COLLECTIVES_H
#define KNAP_AUTOGRAD_COLLECTIVES_H

#include "comm/comm.h"
#include "tensor/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The ranks' x, one behind the other along dim (-1: the last): [..., d, ...] -> [..., ranks d,
 * ...]. Any dtype. Backward: kn_reduce_scatter_tensor. */
KN_API kn_tensor *kn_all_gather_tensor(kn_comm *c, kn_tensor *x, int dim);
/* Part rank, of as many as there are ranks, along dim of the sum of all ranks' x: [..., ranks d,
 * ...] -> [..., d, ...]. Floats. Backward: kn_all_gather_tensor. */
KN_API kn_tensor *kn_reduce_scatter_tensor(kn_comm *c, kn_tensor *x, int dim);
/* The sum of all ranks' x. Floats and i64. Backward: the sum of the gradients. */
KN_API kn_tensor *kn_all_reduce_tensor(kn_comm *c, kn_tensor *x);
/* Their mean: the sum in f32 (f64 for f64), times 1 / ranks, then rounded. Floats. Backward: the
 * mean of the gradients. */
KN_API kn_tensor *kn_mean_tensor(kn_comm *c, kn_tensor *x);
/* Rank root's x; of the others' only the shape counts. Any dtype. Backward: the sum of the
 * gradients on root, zeros elsewhere. */
KN_API kn_tensor *kn_broadcast_tensor(kn_comm *c, kn_tensor *x, int root);
/* Rows of x for each rank, in the order of ranks, and in the result rows from each: rows[r] of them
 * (rows of all ranks add up to x's size in dim 0), or with NULL as many for each. received[r], of
 * as many as there are ranks, becomes the number of rows that came from rank r (NULL: nobody asks);
 * as rows of another call it sends them back. Any dtype. Backward sends the gradients back.
 *
 * With rows, ranks tell each other their numbers first, on the host, and where these aren't all the
 * same, every part moves with zeros behind it up to the largest. On meta among simulated ranks
 * (kn_comm_simulated) as many rows come from a rank as go to it. */
KN_API kn_tensor *kn_all_to_all_tensor(kn_comm *c, kn_tensor *x, const int64_t *rows,
                                       int64_t *received);

#ifdef __cplusplus
}
#endif
#endif
