/* fsdp/bucket.h (private): the bytes. A bucket is the parameters of one unit that have the same
 * dtype, mesh and need of gradients, behind one layout, so that one collective moves them
 * (bucket.c).
 *
 * Its buffers (layout.h; S shards, R replicas):
 *   master   [shard]       this rank's parameters (KN_MEM_PARAM, or the store), always there
 *   full     [full_numel]  gathered parameters in param_dtype (KN_MEM_GATHERED), there while
 *                          UNSHARDED; the modules' handles are views of it. With one shard and no
 *                          cast it is the master.
 *   stage    [S * shard]   what the all-gather makes where the layout isn't zero-copy
 *                          (KN_MEM_GATHERED), until it is copied out
 *   slice    [full / k]    this rank's part of full between forward and backward, where
 *                          reshard_after_forward is k (KN_MEM_GATHERED)
 *   grad     [full_numel]  gradients of one backward in reduce_dtype (KN_MEM_UNREDUCED), from the
 *                          first contribution to the end of their reduction; leaves write there
 *   unsynced [full_numel]  their sum over backwards without sync (KN_MEM_UNREDUCED)
 *   rstage   [S * shard]   what the reduce-scatter takes where the layout isn't zero-copy
 *   partial  [shard]       the shard group's sum on its way to the replicas (KN_MEM_UNREDUCED)
 *   gshard   [shard]       accumulated gradients (KN_MEM_GRAD, or the store), raw sums
 * where masters and gradient shards lie apart from the device that computes (offload.c):
 *   low      [shard] the master in param_dtype where that is another (KN_MEM_PARAM, or the store):
 *            what
 *                          a gather uploads. The optimizer writes both
 *   down     [shard]       the sum on its way to gshard (KN_MEM_UNREDUCED) */
#ifndef KNAP_FSDP_BUCKET_H
#define KNAP_FSDP_BUCKET_H

#include "fsdp/layout.h"
#include "fsdp/mesh.h"
#include "nn/nn_internal.h"

typedef struct kn_unit kn_unit;
typedef struct kn_bucket kn_bucket;

/* Where the whole parameters of a bucket are. */
typedef enum kn_residency {
    KN_SHARDED = 0, /* on no rank: each has its shard */
    KN_GATHERING,   /* full has its bytes, and a gather was issued that nothing waited for */
    KN_UNSHARDED,   /* in full */
    KN_SLICED,      /* among the ranks of a slice group: slice holds this rank's part of full */
} kn_residency;

typedef struct kn_bucket_param {
    kn_tensor *tensor; /* the module's handle: a reference */
    kn_tensor *master; /* 1-d view of this rank's part of the master shard; owned */
    kn_tensor *gpart;  /* the same part of the gradient shard; owned */
    kn_tensor *grad;   /* whole, in the unreduced buffer; owned */
    kn_interval part;
    int64_t shape[KN_MAX_DIMS]; /* as wrapped */
    int ndim;
    char *name;   /* canonical */
    bool pending; /* a backward brought it a gradient that ranks have not agreed on */
    bool owed;    /* a backward without sync may have left some of it, on this rank or another */
    bool arrived; /* some rank's backward did since the last step */
    bool spent;   /* a step consumed what gshard may still hold of it */
} kn_bucket_param;

struct kn_bucket {
    kn_param_source source; /* first: kn_param.source points here */
    kn_unit *unit;
    kn_device device;                                             /* that computes */
    kn_dtype master_dtype, param_dtype, reduce_dtype, grad_dtype; /* grad_dtype: of gshard */
    int shards, replicas, shard;
    bool trainable; /* as wrapped; a frozen bucket takes no gradient bytes */
    kn_layout layout;
    kn_bucket_param *param;
    int params;
    kn_memory *home; /* of master, gshard and optimizer state: the communicator's or the store */
    kn_storage *master, *full, *stage, *slice, *grad, *unsynced, *rstage, *partial, *gshard;
    bool away;              /* home lies apart from the device that computes */
    kn_storage *low, *down; /* NULL where not away, low also where param_dtype is the master's */
    uint32_t low_version;   /* the master's version that low holds */
    bool low_made;          /* low holds any */
    bool whole_way;         /* grad itself is on its way home */
    int64_t turn;           /* when gshard was sent home, counted over the tree */
    kn_ranks *ranks;
    kn_event *gathered, *computed, *reduced;
    kn_event *uploaded, *landed; /* away: the last upload of b is done / gshard is home */
    kn_residency residency;
    bool has_grad; /* gshard holds gradients since the last step */
    bool has_unsynced, has_partial;
    kn_accum accum; /* of unsynced, partial and gshard */
    void **scratch; /* of the running reduction's hook: pairs of pointer and size */
    size_t *scratch_bytes;
    int scratches;
};

/* The same parameter's parts in a buffer of chunks by rank (stage) and in one of whole parameters
 * (full): copies from stage to full (out), or back. */
bool kn_bucket_rearrange(const kn_bucket *b, kn_stream *s, void *stage, void *full, kn_dtype t,
                         bool out);
kn_stream *kn_bucket_compute_stream(const kn_bucket *b);
/* s goes on from where the compute stream is now. */
bool kn_bucket_after_compute(kn_bucket *b, kn_stream *s);
void kn_bucket_free(kn_bucket *b);
/* Of its whole parameters while they are gathered; 0 where they are the master. */
int64_t kn_bucket_gathered_bytes(const kn_bucket *b);
/* Bytes of each buffer as the ledger counts them. */
int64_t kn_bucket_bytes(int64_t numel, kn_dtype t);

/* ---- gather.c -------------------------------------------------------------------------------- */

/* Takes bytes and issues the gather; nothing where that was done. */
bool kn_bucket_unshard(kn_bucket *b);
bool kn_bucket_wait(kn_bucket *b); /* the compute stream waits for the gather */
/* Releases the gathered bytes; keep > 1: keeps 1/keep of them for the next unshard. */
bool kn_bucket_reshard(kn_bucket *b, int keep);
void kn_bucket_drop_slice(kn_bucket *b);

/* ---- reduce.c -------------------------------------------------------------------------------- */

/* Issues the reduction of what backward left in grad; or, without sync, adds it to unsynced. */
bool kn_bucket_reduce(kn_bucket *b, bool sync, bool all_reduce);
bool kn_bucket_finish_reduce(kn_bucket *b); /* waits for it and releases grad */
/* A backward without sync left something in b, on this rank or another. */
bool kn_bucket_owes(const kn_bucket *b);
/* The next backward begins: what the one before brought stays. */
void kn_bucket_settle(kn_bucket *b);
/* The backward failed: what it brought goes, or, where it can't be told from what earlier ones
 * brought, the bucket's gradients are spoiled. */
void kn_bucket_recover(kn_bucket *b);
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
/* kn_reduce_default, where how is NULL. */
bool kn_reduce_in_stages(const kn_grad_reduction *r, const kn_sending *how);

/* ---- param.c --------------------------------------------------------------------------------- */

/* All of taking e over, as parameter i of b, that can fail; the module still has it as it was. */
bool kn_bucket_prepare_param(kn_bucket *b, int i, const kn_param_entry *e);
/* Cannot fail: from here on the parameter is the bucket's. */
void kn_bucket_take_param(kn_bucket *b, int i, kn_param_entry *e);
void kn_bucket_free_param(kn_bucket_param *p);
/* The bucket that holds p, or NULL for a parameter of its own. */
kn_bucket *kn_bucket_of(const kn_param *p);
/* Zeroes, on s, gradients of b that a step consumed while others of b stayed: before more are
 * added. */
bool kn_bucket_drop_spent(kn_bucket *b, kn_stream *s);

/* begin.c: this rank's part of p gets its values. Collective with .sync_from_rank0. */
bool kn_bucket_begin(kn_bucket *b, kn_bucket_param *p, const kn_param_entry *e);

/* ---- offload.c: bytes that lie apart from the device (bucket.away) --------------------------- */

/* .offload_dir is "memory", not a folder. */
bool kn_offloads_to_memory(const kn_fsdp_wrap_options *o);
/* Chooses b->home; takes low and the events. shared: what collectives use. */
bool kn_bucket_find_home(kn_bucket *b, kn_memory *shared);
bool kn_bucket_make_low(kn_bucket *b);
/* What a gather reads: low or the master. */
const kn_storage *kn_bucket_sent(const kn_bucket *b);
/* dst, on the device, = this rank's part in param_dtype; `then` goes on from there. */
bool kn_bucket_upload(kn_bucket *b, void *dst, kn_stream *then);
/* down = what was accumulated at home, if anything was; `then` goes on from there. */
bool kn_bucket_fetch(kn_bucket *b, kn_stream *then);
/* gshard = from, once the event has happened. */
bool kn_bucket_bring_home(kn_bucket *b, const kn_storage *from, kn_event *after);
/* The compute stream waits until down has come home, and down is released. */
bool kn_bucket_land(kn_bucket *b);
/* The host waits until gshard is there and neither the master nor low is read any more. Nothing to
 * do where they don't lie apart. */
bool kn_bucket_arrive(kn_bucket *b);
/* Where the host's work on master, low and gshard goes. */
kn_stream *kn_bucket_home_stream(const kn_bucket *b);
/* kn_param_source.step */
bool kn_offload_step(const kn_step_pieces *s);

#endif
