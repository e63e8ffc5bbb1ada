/* fsdp/bucket.h (private): the bytes. A bucket is the parameters of one unit that have the same
 * dtype, mesh and need of gradients, behind one layout, so that collectives move them together;
 * those of a unit that the same ranks share go in one (bucket.c).
 *
 * Its buffers (layout.h; S shards, R replicas):
 *   master        [shard]       this rank's parameters (KN_MEM_PARAM, or the store), always there
 *   full          [full_numel]  gathered parameters in full_dtype (KN_MEM_GATHERED), there while
 *                               UNSHARDED; the modules' handles are views of it. With one shard and
 *                               no cast it is the master
 *   gather_stage  [S * shard]   the all-gather's result where the layout isn't zero-copy
 *                               (KN_MEM_GATHERED), until it is copied out
 *   slice         [full / k]    this rank's part of full between forward and backward, where
 *                               reshard_after_forward is k (KN_MEM_GATHERED)
 *   grad          [full_numel]  gradients of one backward in reduce_dtype (KN_MEM_UNREDUCED), from
 *                               the first contribution to the end of their reduction; leaves write
 *                               there
 *   unsynced      [full_numel]  their sum over backwards without sync (KN_MEM_UNREDUCED)
 *   reduce_stage  [S * shard]   the reduce-scatter's source where the layout isn't zero-copy
 *   partial       [shard]       the shard group's sum on its way to the replicas (KN_MEM_UNREDUCED)
 *   flags         [params]      which parameters a backward brought a gradient (agree.c)
 *   grad_shard    [shard]       accumulated gradients (KN_MEM_GRAD, or the store), raw sums
 * A bucket of a table whose gradient stays rows (rows) has that one parameter, cut by rows over all
 * ranks of the unit, and only its master: it is never gathered, and its gradient lies in its leaf
 * (autograd/rows.h), where the owners of rows get theirs in each backward.
 * where the bucket is offloaded: masters and gradient shards lie on the host, apart from the device
 * that computes (offload.c):
 *   cast_master   [shard]       the master in param_dtype where that is another (KN_MEM_PARAM, or
 *                               the store): a gather uploads it. The optimizer writes both
 *   grad_transfer [shard]       the sum on its way to grad_shard (KN_MEM_UNREDUCED) */
#ifndef KNAP_FSDP_BUCKET_H
#define KNAP_FSDP_BUCKET_H

#include "comm/values.h"
#include "fsdp/layout.h"
#include "fsdp/mesh.h"
#include "nn/nn_internal.h"

typedef struct kn_unit kn_unit;
typedef struct kn_bucket kn_bucket;

/* Where a tensor's values are; storage: a reference, NULL: it was left alone (bucket.c). */
typedef struct kn_location {
    kn_storage *storage;
    int64_t offset;
    kn_dtype dtype;
} kn_location;
/* t's values are there from now on; gives where they were. Each keeps its reference. */
kn_location kn_turn_to(kn_tensor *t, kn_location to);
/* t's values are there again, and what it turned to goes. Nothing where it was left alone. */
void kn_turn_back(kn_tensor *t, kn_location was);

/* Where the whole parameters of a bucket are. */
typedef enum kn_residency {
    KN_SHARDED = 0, /* on no rank: each has its shard */
    KN_GATHERING,   /* full has its bytes, and a gather was issued that nothing waited for */
    KN_UNSHARDED,   /* in full */
    KN_SLICED,      /* among the ranks of a slice group: slice holds this rank's part of full */
} kn_residency;

/* Where gradients are that no step may take: a backward on some rank may have left one there. */
typedef enum kn_held {
    KN_HELD_ON_RANK = 1,  /* unsynced: the backward ran without sync */
    KN_HELD_IN_GROUP = 2, /* partial: without all-reduce */
    KN_HELD_OPEN = 4,     /* any of them: it was not the last before a step */
    KN_HELD_ANYWHERE = 7,
} kn_held;

typedef struct kn_bucket_param {
    kn_tensor *tensor;    /* the module's handle: a reference */
    kn_tensor *master;    /* 1-d view of this rank's part of the master shard; owned */
    kn_tensor *grad_part; /* the same part of the gradient shard; owned */
    kn_tensor *grad;      /* whole, in the unreduced buffer; owned */
    kn_interval part;
    int64_t shape[KN_MAX_DIMS]; /* as wrapped */
    int ndim;
    int dim;       /* along which it is cut, where .placement chose it */
    char *name;    /* canonical */
    bool wanted;   /* it required a gradient in a forward that a backward may follow */
    bool consumed; /* a step used what grad_shard may still hold of it */
    /* Its gradient is the sum over the backwards in a set, and there is none where the set is empty
     * (kn_passes_any): those of this rank that ranks have not agreed on; those of all ranks, in
     * grad_shard, since the last step. At the end of a backward the first joins the second. */
    kn_passes mine, passes;
    unsigned held; /* kn_held: why it isn't whole yet; the same on all ranks */
} kn_bucket_param;

/* Memory of hooks for the running reduction (stages.c). */
typedef struct kn_scratch_bytes {
    void *data;
    size_t bytes;
} kn_scratch_bytes;
typedef struct kn_scratch {
    kn_scratch_bytes *list;
    int count;
    int64_t room;
} kn_scratch;

/* A bucket whose masters and gradient shards lie apart from the device that computes
 * (offload.c). */
typedef struct kn_away {
    kn_storage *cast_master; /* NULL also where param_dtype is the master's */
    uint32_t cast_version;   /* the master's version that cast_master holds */
    bool has_cast;           /* cast_master holds any */
    kn_storage *grad_transfer;
    bool downloads_grad;  /* grad itself is on its way to grad_shard */
    int64_t download_at;  /* when grad_shard's download was issued: a count over the tree */
    kn_event *uploaded;   /* the last upload is done */
    kn_event *downloaded; /* grad_shard is there */
} kn_away;

struct kn_bucket {
    kn_param_source source; /* first: kn_param.source points here */
    kn_unit *unit;
    kn_device device;                                             /* that computes */
    kn_dtype master_dtype, param_dtype, reduce_dtype, grad_dtype; /* grad_dtype: of grad_shard */
    kn_dtype full_dtype; /* param_dtype, or the masters' while it evaluates in it (full.c) */
    int shards, replicas, shard;
    bool trainable; /* as wrapped; kn_bucket_trains: now */
    kn_layout layout;
    kn_bucket_param *param;
    int params;
    /* Of master, grad_shard and optimizer state: the communicator's or the store. */
    kn_memory *memory;
    kn_storage *master, *full, *gather_stage, *slice, *grad, *unsynced, *reduce_stage, *partial,
        *grad_shard;
    bool rows;      /* a table whose gradient stays rows */
    bool offloaded; /* memory lies apart from the device that computes */
    bool stored;    /* memory is a store's, in a file */
    kn_away away;
    kn_storage *flags; /* NULL until a reduction carries them */
    bool flags_came;   /* with a reduction, and nobody looked at them yet */
    kn_ranks *ranks;
    kn_event *gathered; /* full is there */
    kn_event *computed; /* the compute stream got as far as the last gather or reduction needs */
    kn_event *reduced;  /* the last reduction is done */
    kn_residency residency;
    bool has_grad;  /* grad_shard holds gradients since the last step */
    kn_accum accum; /* of unsynced, partial and grad_shard */
    kn_scratch scratch;
};

/* The same parameter's parts in a buffer of chunks by rank (stage) and in one of whole parameters
 * (full): copies from stage to full (out), or back. */
bool kn_bucket_rearrange(const kn_bucket *b, kn_stream *s, void *stage, void *full, kn_dtype t,
                         bool out);
/* The same of one rank's chunk. */
bool kn_bucket_move_chunk(const kn_bucket *b, kn_stream *s, int shard, void *chunk, void *full,
                          kn_dtype t, bool out);
static inline kn_stream *kn_bucket_compute_stream(const kn_bucket *b)
{
    return kn_compute_stream(b->device);
}
void kn_bucket_free(kn_bucket *b);
/* Of its whole parameters while they are gathered; 0 where they are the master. */
static inline int64_t kn_bucket_gathered_bytes(const kn_bucket *b)
{
    return b->full != b->master && !b->rows ? (int64_t)b->full->bytes : 0;
}
/* A backward may bring it a gradient; one of b's. */
bool kn_bucket_param_trains(const kn_bucket_param *p);
bool kn_bucket_trains(const kn_bucket *b);
/* Of a buffer, as the ledger counts them. */
int64_t kn_bucket_bytes(int64_t numel, kn_dtype t);

/* ---- gather.c -------------------------------------------------------------------------------- */

/* s goes on from where the compute stream is now. */
bool kn_bucket_wait_for_compute(kn_bucket *b, kn_stream *s);
/* Takes bytes and issues the gather of n buckets of a unit: one for those that the same ranks
 * share, nothing where that was done. */
bool kn_buckets_unshard(kn_bucket *const *bucket, int n);
bool kn_bucket_wait(kn_bucket *b); /* the compute stream waits for the gather */
/* Releases the gathered bytes; keep > 1: keeps 1/keep of them for the next unshard. */
bool kn_bucket_reshard(kn_bucket *b, int keep);
void kn_bucket_drop_slice(kn_bucket *b);

/* ---- reduce.c -------------------------------------------------------------------------------- */

/* A backward with sync reduces something: gradients, or what earlier backwards held back. */
bool kn_bucket_has_to_reduce(const kn_bucket *b, bool all_reduce);
/* Issues the reductions of what backward left in grad of n buckets of a unit: one for those that
 * the same ranks share; or, without sync, adds it to unsynced. */
bool kn_buckets_reduce(kn_bucket *const *bucket, int n, bool sync, bool all_reduce);
bool kn_bucket_finish_reduce(kn_bucket *b); /* waits for it and releases grad */
/* Whether b has gradients, of any rank, that are held in one of `where` (kn_held). */
bool kn_bucket_holds(const kn_bucket *b, unsigned where);
/* The next backward begins: what the one before brought stays. */
void kn_bucket_keep_grads(kn_bucket *b);
/* The backward failed: its gradient goes, or, where that can't be told from what earlier ones
 * brought, the bucket's gradients are spoiled. */
void kn_bucket_recover(kn_bucket *b);

/* ---- stages.c -------------------------------------------------------------------------------- */

/* The communicator's memory on the unit's device. */
kn_memory *kn_bucket_comm_memory(const kn_bucket *b);
/* Gives back what a hook took for the reduction that is done. */
void kn_reduction_free_scratch(kn_bucket *b);

/* How a hook sends what a stage reads: converted to dtype. */
typedef struct kn_sending kn_sending;
struct kn_sending {
    kn_dtype dtype;
    bool (*convert)(const kn_grad_reduction *r, void *dst, const void *src, int64_t count,
                    kn_dtype src_dtype, const kn_sending *how, int stage);
    uint64_t seed, stream; /* of stochastic rounding */
};
/* n reductions over the same ranks on one stream, at most KN_COMM_PIECES: one collective a stage.
 * how NULL: bytes are sent as they are. */
bool kn_reduce_in_stages(const kn_grad_reduction *r, int n, const kn_sending *how);

/* ---- agree.c --------------------------------------------------------------------------------- */

/* *r becomes the reduction that tells all ranks which parameters of b any of them has a gradient
 * for; goes with that of the gradients. False with an error. */
bool kn_bucket_send_flags(kn_bucket *b, kn_stream *s, kn_grad_reduction *r);
/* The place in flags of how many ranks have one of parameter i, as the last reduction told it. */
int64_t kn_bucket_flag_at(const kn_bucket *b, int i);
/* The running backward brought b's parameter i a gradient. */
bool kn_bucket_note_grad(kn_bucket *b, int i);
/* Whether other ranks may know of gradients that this one doesn't. */
bool kn_bucket_has_peers(const kn_bucket *b);

/* ---- access.c -------------------------------------------------------------------------------- */

/* The master of parameter number index was written: a graph that used it must not go on, others
 * may. */
void kn_bucket_written(kn_bucket *b, int index);
/* It was written (-1: all were) past the schedule: gathered values are out of date, and a graph
 * that used them must not go on. */
bool kn_bucket_drop_gathered(kn_bucket *b, int index);
/* shard, cut as parameter number index (row above 1: with an element for each row of so many): its
 * whole, into host memory of every rank. Collective. */
bool kn_bucket_gather_param(kn_bucket *b, int index, int64_t row, kn_tensor *shard, void *host);

/* ---- param.c --------------------------------------------------------------------------------- */

/* All of taking e over, as parameter i of b, that can fail; the module still has it as it was. */
bool kn_bucket_prepare_param(kn_bucket *b, int i, const kn_param_entry *e);
/* Cannot fail: from here on the parameter is the bucket's. */
void kn_bucket_take_param(kn_bucket *b, int i, kn_param_entry *e);
void kn_bucket_free_param(kn_bucket_param *p);
/* It has no gradient any more, nor the prospect of one. */
void kn_bucket_param_forget(kn_bucket_param *p);
/* None of b's has: no bytes of gradients count. */
void kn_bucket_drop_grads(kn_bucket *b);
/* The bucket that holds p, or NULL for a parameter of its own. */
kn_bucket *kn_bucket_of(const kn_param *p);
/* Zeroes, on s, gradients of b that a step consumed while others of b stayed: before more are
 * added. */
bool kn_bucket_zero_consumed(kn_bucket *b, kn_stream *s);

/* ---- offload.c: bytes that lie apart from the device (bucket.offloaded) ---------------------- */

/* .offload_dir is "memory", not a folder. */
bool kn_offloads_to_memory(const kn_fsdp_wrap_options *o);
/* Chooses b->memory and takes the events. shared: what collectives use. */
bool kn_bucket_choose_memory(kn_bucket *b, kn_memory *shared);
bool kn_bucket_create_cast_master(kn_bucket *b);
/* The source of a gather: cast_master, or the master where that has full's dtype. */
const kn_storage *kn_bucket_gather_source(const kn_bucket *b);
/* dst, on the device, = this rank's part in full_dtype; `then` goes on from there. */
bool kn_bucket_upload(kn_bucket *b, void *dst, kn_stream *then);
/* grad_transfer = what grad_shard accumulated, if anything; `then` goes on from there. */
bool kn_bucket_upload_grad(kn_bucket *b, kn_stream *then);
/* grad_shard = from, once the event has happened. */
bool kn_bucket_download_grad(kn_bucket *b, const kn_storage *from, kn_event *after);
/* The compute stream waits for the download of grad_transfer, which is released. */
bool kn_bucket_end_download(kn_bucket *b);
/* The host waits until grad_shard is there and neither the master nor cast_master is read any more.
 * Nothing to do where the bucket isn't offloaded. */
bool kn_bucket_sync_transfers(kn_bucket *b);
/* The host's work on master, cast_master and grad_shard goes there. */
kn_stream *kn_bucket_host_stream(const kn_bucket *b);
/* The master's copy in param_dtype holds what the master does; so it stays where each part that a
 * step writes goes there as well. */
bool kn_bucket_casts(const kn_bucket *b);
bool kn_bucket_cast_part(kn_bucket *b, const kn_param *p);
/* kn_param_source.step */
bool kn_offload_step(const kn_step_pieces *s);

#endif
