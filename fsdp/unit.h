/* fsdp/unit.h (private): units and what they are made of.
 *
 *   schedule  when: one a tree of units, made by the first call of the outermost one (schedule.c)
 *   unit      what is gathered and released together: modules and their buckets (unit.c)
 *   bucket    the bytes: parameters of one unit with the same dtype, mesh and need of gradients
 *             behind one layout, so that one collective moves them (bucket.c)
 *   mesh      which ranks share what (mesh.c)
 *
 * Buffers of a bucket (layout.h; S shards, R replicas):
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
 *   low      [shard]       the master in param_dtype where that is another (KN_MEM_PARAM, or the store): what
 *                          a gather uploads. The optimizer writes both
 *   down     [shard]       the sum on its way to gshard (KN_MEM_UNREDUCED) */
#ifndef KNAP_FSDP_UNIT_H
#define KNAP_FSDP_UNIT_H

#include "fsdp/fsdp.h"
#include "fsdp/layout.h"
#include "nn/nn_internal.h"

typedef struct kn_unit kn_unit;
typedef struct kn_bucket kn_bucket;
typedef struct kn_schedule_state kn_schedule_state;

/* ---- mesh.c: groups of ranks ------------------------------------------------------------------- */

/* The communicators that buckets of one (tree, number of shards) use; each over a part of the world.
 * gather and reduce are apart, so that a gather and a reduction can run side by side. NULL where the
 * group is one rank. */
typedef struct kn_ranks {
    struct kn_ranks *next;
    int shards, replicas, shard, replica;
    kn_comm *gather, *reduce, *replicate;
} kn_ranks;

/* shards and replicas of options over n ranks; false with a sentence where they don't divide. */
bool kn_mesh_resolve(kn_mesh *mesh, kn_strategy strategy, int n);
/* Made when first asked for: collective. */
kn_ranks *kn_ranks_of(kn_schedule_state *s, int shards);
/* Groups of k consecutive ranks for gathers after reshard_after_forward = k. */
kn_comm *kn_slice_comm(kn_schedule_state *s, int k);
/* Gives the communicators back, for the next tree of the same ranks, and frees the list. No stream uses
 * them any more. */
void kn_ranks_free(kn_schedule_state *s);

/* ---- bucket.c: bytes ---------------------------------------------------------------------------- */

typedef struct kn_bucket_param {
    kn_tensor *tensor; /* the module's handle: a reference */
    kn_tensor *master; /* 1-d view of this rank's part of the master shard; owned */
    kn_tensor *gpart;  /* the same part of the gradient shard; owned */
    kn_tensor *grad;   /* whole, in the unreduced buffer; owned */
    kn_interval part;
    int64_t shape[KN_MAX_DIMS]; /* as wrapped */
    int ndim;
    char *name;   /* canonical */
    bool pending; /* a backward brought it a gradient that ranks have not compared notes on */
    bool owed;    /* a backward without sync may have left some of it, on this rank or another */
    bool arrived; /* some rank's backward did since the last step */
    bool spent;   /* a step consumed what gshard may still hold of it */
} kn_bucket_param;

struct kn_bucket {
    kn_param_source source; /* first: kn_param.source points here */
    kn_unit *unit;
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
    bool unsharded, gathering;   /* full has its bytes / a gather was issued and not waited for */
    bool has_slice;              /* slice holds this rank's part of full */
    bool has_grad;               /* gshard holds gradients since the last step */
    bool has_unsynced, has_partial;
    kn_accum accum; /* of unsynced, partial and gshard */
    void **scratch; /* of the running reduction's hook: pairs of pointer and size */
    size_t *scratch_bytes;
    int scratches;
};

bool kn_bucket_unshard(
    kn_bucket *b); /* takes bytes and issues the gather; nothing if done or issued */
bool kn_bucket_wait(kn_bucket *b); /* the compute stream waits for the gather */
/* Releases the gathered bytes; keep > 1: keeps 1/keep of them for the next unshard. */
bool kn_bucket_reshard(kn_bucket *b, int keep);
void kn_bucket_drop_slice(kn_bucket *b);
/* Issues the reduction of what backward left in grad; or, without sync, adds it to unsynced. */
bool kn_bucket_reduce(kn_bucket *b, bool sync, bool all_reduce);
bool kn_bucket_finish_reduce(kn_bucket *b); /* waits for it and releases grad */
/* A backward without sync left something in b, on this rank or another. */
bool kn_bucket_owes(const kn_bucket *b);
/* The next backward begins: what the one before brought stays. */
void kn_bucket_settle(kn_bucket *b);
/* The backward failed: what it brought goes, or, where it can't be told from what earlier ones brought, the
 * bucket's gradients are spoiled. */
void kn_bucket_recover(kn_bucket *b);
kn_tensor *kn_bucket_grad_dest(void *bucket, kn_tensor *leaf); /* kn_leaf.dest */
/* access.c: kn_param_source.held_back and .waits, and kn_leaf.clear: */
const char *kn_bucket_held_back(const kn_param *p);
bool kn_bucket_waits(const kn_param *p);
void kn_bucket_clear_grad(void *bucket, kn_tensor *leaf);
/* The bucket that holds p, or NULL for a parameter of its own. */
kn_bucket *kn_bucket_of(const kn_param *p);
void kn_bucket_free(kn_bucket *b);
/* Bytes of each buffer as the ledger counts them (access.c, predict.c). */
int64_t kn_bucket_bytes(int64_t numel, kn_dtype t);

/* ---- offload.c: bytes that lie apart from the device (bucket.away) -------------------------------- */

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
/* The host waits until gshard is there and neither the master nor low is read any more. Nothing to do where
 * they don't lie apart. */
bool kn_bucket_arrive(kn_bucket *b);
/* Where the host's work on master, low and gshard goes. */
kn_stream *kn_bucket_home_stream(const kn_bucket *b);
/* kn_param_source.home, .arrive and .stepped: */
bool kn_bucket_home(const kn_param *p, kn_param_home *h);
bool kn_bucket_arrive_param(const kn_param *p);
void kn_bucket_stepped(const kn_param *p);

/* ---- unit.c, schedule.c -------------------------------------------------------------------------- */

typedef enum kn_unit_state {
    KN_UNIT_IDLE = 0,     /* between steps */
    KN_UNIT_FORWARD,      /* inside its forward */
    KN_UNIT_PRE_BACKWARD, /* its backward has begun */
    KN_UNIT_LATE, /* its gradients came out of turn: they are reduced at the end of backward */
    KN_UNIT_POST_BACKWARD, /* its gradients are reduced or on their way */
} kn_unit_state;

/* Where the tree is with a backward. */
typedef enum kn_phase {
    KN_PHASE_OUTSIDE = 0,
    KN_PHASE_BACKWARD,
    KN_PHASE_FAILED, /* what the backward left half done has not gone yet */
} kn_phase;

typedef struct kn_unit_list {
    kn_unit **list;
    int count, room;
} kn_unit_list;

/* order.c: the calls of units in forward, and the turns of the running backward that follow from them. */
typedef enum kn_visit_kind { KN_VISIT_BEGIN, KN_VISIT_END } kn_visit_kind;
typedef struct kn_visit {
    kn_unit *unit;
    kn_frame *frame; /* the call, or the outermost one around it that recomputes; a reference */
    kn_visit_kind kind;
} kn_visit;
typedef enum kn_turn_kind { KN_TURN_NONE, KN_TURN_ENTER, KN_TURN_LEAVE } kn_turn_kind;
typedef struct kn_turn {
    kn_unit *unit;
    kn_turn_kind kind;
} kn_turn;
typedef struct kn_order {
    kn_visit *visit; /* of the forwards since the last backward */
    int visits, visit_room;
    int open;                 /* calls that have begun and not ended */
    int forwards, forward_at; /* how many; the first visit of the last one */
    unsigned char *reached;   /* by visit */
    int reached_room;
    kn_turn *turn;
    int turns, turn_room, at; /* at: the next one to take */
} kn_order;

struct kn_schedule_state {
    kn_unit *root;
    kn_comm *comm;
    kn_stream *gather, *reduce;
    kn_stream *upload, *download; /* NULL where no bucket is away */
    kn_stream *host;              /* the host's own clock beside meta; else NULL */
    kn_ranks *ranks;              /* list; owned */
    kn_comm **slice;              /* by k; [ranks + 1] */
    bool recording;               /* the running forward is one that a backward follows */
    kn_unit **unit;               /* all units of the tree, children first */
    int units;
    kn_order order;
    kn_unit_list begun,
        last; /* units as their forwards began in this iteration, and in the one before */
    kn_phase phase;
    bool settled;            /* a backward ended since the last forward began */
    kn_unit *reducing;       /* whose reduction may still run */
    kn_unit *landing;        /* whose gradients may still be on their way home */
    int64_t turns;           /* gradients sent home so far */
    int ahead;               /* units gathered ahead of their use */
    unsigned char *arrivals; /* scratch of arrivals.c */
    int params;
};

struct kn_unit {
    kn_module_impl **module; /* one, or a group */
    int modules;
    kn_comm *comm;
    kn_fsdp_wrap_options options; /* borrowed strings are NULL */
    kn_device home;               /* where masters and gradient shards lie */
    int rank, size;               /* of comm */
    kn_bucket **bucket;
    int buckets;
    kn_group group;
    kn_unit_state state;
    int calls;  /* running forwards of its modules */
    int seen;   /* modules of a group that ran since it was gathered */
    bool ahead; /* gathered before its turn, not used yet */
    bool sync, all_reduce, reshard_after_backward;
    bool cast; /* .param_dtype was given: inputs follow it */
    kn_comm_hook hook;
    void *hook_arg;
    kn_unit **next_forward, **next_backward; /* explicit prefetch lists */
    int nexts_forward, nexts_backward;
    kn_schedule_state *schedule; /* shared; owned by the root unit */
    int enter_at, leave_at;      /* its turns in this backward, -1: none */
    int slice_ranks; /* .reshard_after_forward as wrapped where it is a number of ranks, else 0 */
    struct kn_summoned *summoned;
};

kn_unit *kn_unit_of(const kn_module_impl *m); /* NULL if m is none */
const char *
kn_unit_name(const kn_unit *u); /* path of its first module, or its class for the root */
bool kn_unit_unshard(kn_unit *u);
bool kn_unit_wait(kn_unit *u);
bool kn_unit_reshard(kn_unit *u); /* all of it, slices too */
bool kn_unit_reshard_after_forward(kn_unit *u);
bool kn_unit_reduce(kn_unit *u);
bool kn_unit_finish_reduce(kn_unit *u); /* NULL is fine */
bool kn_unit_land(kn_unit *u);          /* NULL is fine */
bool kn_unit_is_unsharded(const kn_unit *u);
/* Backwards without sync left something, on this rank or another. */
bool kn_unit_owes(const kn_unit *u);
/* Whether the strategy keeps parameters gathered between forward and backward. */
bool kn_unit_keeps(const kn_unit *u);
/* What the sum over ranks that a backward leaves in gshard is to be divided by. */
double kn_unit_divisor(const kn_unit *u);
/* Sets .reshard_after_forward; a sentence where k does not fit the ranks (wrap.c). */
bool kn_unit_set_reshard(kn_unit *u, int value);
void kn_unit_free(void *unit);
/* summon.c: u is being freed; an open scope goes on without it, and what was changed there is lost. */
void kn_summon_forget(kn_unit *u);
/* Takes a reference to the unit from one of its modules (a group has several). */
void kn_unit_leave(void *unit, kn_module_impl *m);

/* Hooks of modules (nn_internal.h): */
kn_unit_hooks *kn_unit_hooks_new(kn_unit *u);
void kn_unit_complete(void *unit);
/* The schedule of u's tree, made when first asked for. NULL with an error. */
kn_schedule_state *kn_schedule_of(kn_unit *u);
void kn_schedule_free(kn_schedule_state *s);
/* What a backward that failed left half done goes: before anything of the tree is used again. */
void kn_schedule_recover(kn_schedule_state *s);
/* Two turns of backward: gathers u, and the next unit ahead; releases and reduces u. */
bool kn_unit_enter(kn_unit *u);
bool kn_unit_post_backward(kn_unit *u);

/* arrivals.c: a parameter that any rank's backward brought a gradient has one on all. *came becomes true where
 * any has. Collective. */
bool kn_schedule_compare_notes(kn_schedule_state *s, bool *came);
/* flag[i] becomes 1 on all ranks where it isn't 0 on any. what: for messages. Collective. */
bool kn_schedule_any(kn_schedule_state *s, unsigned char *flag, int n, const char *what);

/* order.c. A forward of the root begins, or failed: nothing of it stays. */
void kn_order_forward(kn_order *o, bool after_backward);
void kn_order_forget_forward(kn_order *o);
/* A call of u begins or ends. */
bool kn_order_begin(kn_order *o, kn_unit *u);
void kn_order_end(kn_order *o, kn_unit *u);
/* A backward begins: lists its turns. Collective. */
bool kn_order_start(kn_schedule_state *s);
/* Takes turns up to the next unit that the engine still has to visit. */
bool kn_order_go_on(kn_order *o);
/* Takes turns until u has been entered, where it has a turn. */
bool kn_order_come_to(kn_order *o, const kn_unit *u);
/* The next unit to be entered, or NULL. */
kn_unit *kn_order_next(const kn_order *o);
void kn_order_free(kn_order *o);

typedef struct kn_claim {
    kn_module_impl *module;
    int index;
    kn_bucket *bucket; /* that takes it over, as parameter `at` */
    int at;
} kn_claim;
typedef struct kn_claims {
    kn_claim *list, *ignored; /* ignored: named by .ignore; marked once the unit is complete */
    int count, ignores;
    int64_t elements;
} kn_claims;

/* hooks.c: gives back what a hook took for the reduction that is done. */
void kn_reduction_free_scratch(kn_bucket *b);

/* precision.c */
bool kn_unit_cast_inputs(kn_unit *u, kn_values *in);
bool kn_unit_cast_outputs(kn_unit *u, kn_values *out);

/* begin.c: this rank's part of p gets its values. Collective with .sync_from_rank0. */
bool kn_bucket_begin(kn_bucket *b, kn_bucket_param *p, const kn_param_entry *e);
/* Buffers of u's modules, and of those below outside other units, move to u's device, get rank 0's values with
 * .sync_from_rank0 (collective), and .buffer_dtype. Those that .ignore names stay as they are. */
bool kn_unit_begin_buffers(kn_unit *u);

/* build.c: makes one unit of modules, of what they and the modules below hold and no unit claimed. */
bool kn_claims_collect(kn_claims *c, kn_module_impl *const *module, int modules,
                       const kn_fsdp_wrap_options *o);
void kn_claims_free(kn_claims *c);
bool kn_unit_build(kn_module_impl *const *module, int modules, kn_comm *comm,
                   const kn_fsdp_wrap_options *o);
/* Whether u has the root's ranks and device, which one schedule needs; else false with a sentence. */
bool kn_unit_same_place(const kn_unit *u, const kn_unit *root);
/* Whether u divides as the root does, by which one number a step divides; else false with a sentence. */
bool kn_unit_same_factors(const kn_unit *u, const kn_unit *root);
/* Zeroes, on s, gradients of b that a step consumed while others of b stayed: before more are added. */
bool kn_bucket_drop_spent(kn_bucket *b, kn_stream *s);
/* claims.c: "a, b" names name. NULL names nothing. */
bool kn_listed(const char *list, const char *name);
/* "a*, b" has a pattern (fnmatch) that matches name. False with an error where memory is out. */
bool kn_matched(const char *list, const char *name);

/* kn_module_impl.scalar_reduce of a sharded tree (access.c). */
bool kn_unit_scalar_reduce(void *unit, int64_t *sum, int sums, float *max);

#endif
