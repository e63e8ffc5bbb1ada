/* fsdp/mesh.h (private): which ranks share what (mesh.c). */
#ifndef KNAP_FSDP_MESH_H
#define KNAP_FSDP_MESH_H

#include "fsdp/fsdp.h"

/* The communicators that buckets of one (tree, number of shards) use; each over a part of the
 * world. gather and reduce are apart, so that a gather and a reduction can run side by side.
 * NULL where the group is one rank. */
typedef struct kn_ranks {
    struct kn_ranks *next;
    int shards, replicas, shard, replica;
    kn_comm *gather, *reduce, *replicate;
    unsigned connected; /* a bit for each dtype: kn_ranks_connect */
} kn_ranks;

/* The groups of one tree's ranks. */
typedef struct kn_rank_groups {
    kn_comm *comm;   /* all of them; borrowed */
    kn_ranks *ranks; /* list; owned */
    kn_comm **slice; /* by k; [ranks + 1]; owned */
} kn_rank_groups;

/* Made when first asked for: collective. */
kn_ranks *kn_ranks_of(kn_rank_groups *g, int shards);
/* On a GPU, once: a few elements of t are reduced, and sums, of that dtype, over the replicas. NCCL
 * connects ranks at their first exchange, for sums in rank order each with each, and takes
 * memory for that, up to GB, which is in no ledger: so before activations have it. Collective. */
bool kn_ranks_connect(kn_ranks *r, kn_device d, kn_dtype t, kn_dtype sums);
/* Groups of k consecutive ranks for gathers after reshard_after_forward = k. */
kn_comm *kn_slice_comm(kn_rank_groups *g, int k);
/* Gives the communicators back, for the next tree of the same ranks, and frees the list. No
 * stream uses them any more. */
void kn_ranks_free(kn_rank_groups *g);

#endif
