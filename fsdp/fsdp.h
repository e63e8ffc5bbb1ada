/* fsdp/fsdp.h: fully sharded data parallelism. kn_fsdp_wrap() turns modules into units: their
 * parameters are cut into shards, gathered before use and released after it; gradients are reduced
 * to shards in backward. Contracts, schedule, memory: docs/fsdp.md. */
#ifndef KNAP_FSDP_FSDP_H
#define KNAP_FSDP_FSDP_H

#include "comm/comm.h"
#include "nn/nn.h"
#include "optim/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- options --------------------------------------------------------------------------------- */

typedef enum kn_strategy {
    KN_STRATEGY_DEFAULT = 0, /* FULL_SHARD */
    KN_FULL_SHARD,           /* parameters, gradients and optimizer state sharded (ZeRO-3) */
    KN_SHARD_GRAD_OP, /* the same, parameters stay gathered from forward to backward (ZeRO-2) */
    KN_NO_SHARD,      /* replicated; gradients all-reduced (DDP) */
    KN_HYBRID_SHARD,  /* FULL_SHARD inside groups of .mesh.shards ranks, replicated over them */
    KN_HYBRID_SHARD_GRAD_OP, /* SHARD_GRAD_OP inside the groups */
    KN_STRATEGY_COUNT
} kn_strategy;

/* Ranks as a mesh: rank = replica * shards + shard. One of the two is enough: the other follows
 * from the number of ranks. 0 in both: one replica (1-D); where the strategy is hybrid, the ranks
 * of a machine hold the shards and machines are replicas, as the launcher says
 * (LOCAL_WORLD_SIZE). */
typedef struct kn_mesh {
    int replicas, shards;
} kn_mesh;

typedef enum kn_layout_kind {
    KN_LAYOUT_DEFAULT = 0, /* FLAT */
    KN_LAYOUT_FLAT,        /* concatenated, cut into equal chunks; no copies (FSDP1) */
    KN_LAYOUT_PER_PARAM,   /* each parameter cut along a dim (FSDP2); one copy each way */
    KN_LAYOUT_RAGGED,      /* cut between rows; no copies */
    KN_LAYOUT_COUNT
} kn_layout_kind;

typedef enum kn_backward_prefetch {
    KN_PREFETCH_DEFAULT = 0, /* PRE */
    KN_PREFETCH_PRE,         /* gather the next unit before this one's gradients */
    KN_PREFETCH_POST,        /* after this one's parameters were released */
    KN_PREFETCH_NONE,
    KN_PREFETCH_COUNT
} kn_backward_prefetch;

/* .reshard_after_forward: one of these, or k >= 2: each group of k consecutive ranks keeps one copy
 * of the gathered parameters among them (1/k a rank), and backward gathers within that group. */
#define KN_RESHARD_DEFAULT 0  /* as the strategy says; the root never */
#define KN_RESHARD_NEVER   -1 /* stay gathered until backward is done */
#define KN_RESHARD_ALWAYS  1

typedef enum kn_cast_inputs {
    KN_CAST_DEFAULT = 0, /* ALL */
    KN_CAST_ALL,         /* every unit casts its float inputs to its param_dtype */
    KN_CAST_ROOT,        /* only the root does */
    KN_CAST_NONE,
    KN_CAST_COUNT
} kn_cast_inputs;

typedef enum kn_grad_average {
    KN_REDUCE_OP_DEFAULT = 0, /* AVERAGE */
    KN_REDUCE_AVERAGE,        /* the gradient is the mean over micro-batches and ranks */
    KN_REDUCE_SUM,            /* the mean over micro-batches, summed over ranks */
    KN_REDUCE_OP_COUNT
} kn_grad_average;

typedef struct kn_fsdp_wrap_options kn_fsdp_wrap_options;

/* A wrap policy. recurse: whether to look below m at all. Not recurse: whether m, of whose
 * parameters `unclaimed` elements no unit below claimed, becomes a unit; it may change *o, which is
 * a copy of the options for this unit alone. */
typedef bool (*kn_wrap_policy)(kn_module *m, bool recurse, int64_t unclaimed,
                               kn_fsdp_wrap_options *o, void *arg);
/* Whether calls of m keep only their inputs and compute again in backward (kn_recompute). Each
 * kn_fsdp_wrap asks for each module at and below the wrapped one, children first, that doesn't
 * recompute already. */
typedef bool (*kn_recompute_policy)(const kn_module *m, void *arg);
/* Fills a rank's part of a parameter declared on meta: part is 1-d, element i of it is element
 * start + i of the flattened parameter. Called once for each run of elements. */
typedef bool (*kn_param_fill)(const char *name, kn_tensor *part, int64_t start, int ndim,
                              const int64_t *shape, void *arg);
/* Initialises a module none of whose own parameters had values: these (not its children's, nor
 * ones that it shares) are whole, in the declared dtype, on the unit's device, and hold what .fill
 * or the declared initialisers give. Ignored ones lie on their own device, hold what the
 * initialisers give, and keep the values of fn. Called on every rank, children first, once a
 * module (and unit, where several hold its parameters); each rank keeps its part, so fn must write
 * the same on all. Draws (kn_randn_like, dropout) are: functions of .seed, the module's path, and
 * kn_seed and its step. */
typedef bool (*kn_module_fill)(kn_module *m, void *arg);
/* The dtype in which a parameter is gathered and computes; KN_DTYPE_DEFAULT: .param_dtype. */
typedef kn_dtype (*kn_param_dtype)(const char *name, int ndim, const int64_t *shape, void *arg);
/* KN_LAYOUT_PER_PARAM: the dim along which a parameter is cut (it must divide by the shards). */
typedef int (*kn_placement)(const char *name, int ndim, const int64_t *shape, void *arg);

struct kn_fsdp_wrap_options {
    KN_BEGIN_OPTIONS;
    /* what is sharded over whom */
    kn_strategy strategy;
    kn_mesh mesh;
    kn_layout_kind layout;
    kn_placement placement; /* NULL: dim 0 */
    void *placement_arg;
    int reshard_after_forward;
    int64_t keep_whole_below; /* parameters with fewer elements are replicated, not sharded */
    /* when */
    kn_backward_prefetch backward_prefetch;
    /* Gather the next unit of the previous iteration's order early; on by default on a GPU with
     * KN_PREFETCH_PRE, and with .offload_dir "memory". */
    bool forward_prefetch;
    /* These two are the outermost unit's: */
    int max_gathers;    /* units gathered ahead of their use at any time (0: 2) */
    int max_reductions; /* units whose reductions run while backward goes on (0: 1) */
    /* which modules are units; several policies: one that says yes suffices */
    const char *wrap_class; /* modules of these classes (comma-separated) */
    /* Modules with the forward function of one of these, which tells apart classes of one name;
     * ends with NULL. */
    kn_module *const *wrap_like;
    int64_t min_params; /* modules with so many parameters not yet claimed; KN_SIZE_POLICY */
    kn_wrap_policy policy;
    void *policy_arg;
    /* which modules recompute (kn_recompute), besides those that do already */
    const char *recompute_class; /* modules of these classes (comma-separated) */
    kn_recompute_policy recompute_policy;
    void *recompute_policy_arg;
    /* what is left alone; the lists end with NULL */
    const char *ignore; /* patterns (fnmatch, comma-separated) of parameters and buffers */
    /* With all below them: parameters, buffers; none of them becomes a unit. */
    kn_module *const *ignored_modules;
    kn_tensor *const *ignored_params; /* of the wrapped module's tree, and not yet in a unit */
    /* precision */
    kn_dtype param_dtype; /* of gathered parameters and computation; default: as declared */
    kn_param_dtype param_dtype_of; /* of single parameters (norm weights in f32) */
    void *param_dtype_of_arg;
    kn_dtype reduce_dtype; /* of unreduced gradients; default: that of the parameter */
    kn_dtype output_dtype; /* float outputs of the unit are cast to it */
    /* Float buffers compute in it; their values stay beside it for files and kn_summon
     * (kn_module_full_buffers). */
    kn_dtype buffer_dtype;
    kn_cast_inputs cast_inputs;
    bool keep_low_precision_grads; /* accumulated gradients stay in reduce_dtype */
    /* Beside .param_dtype: modules of these classes are units of their own that compute in the
     * declared dtype; "batch_norm" and "batchnorm" always are; so is the wrapped module itself.
     * Outputs are cast to .param_dtype, those of the wrapped module to its .output_dtype where
     * that is given. */
    const char *full_precision_class;
    /* where */
    kn_device device; /* where to compute; default: where the parameters are, CPU for meta */
    /* Master parameters, gradient shards and optimizer state lie in an unnamed file in this folder,
     * read ahead by the schedule; "memory": in page-locked host memory, beside .device KN_CUDA (or
     * KN_META, which simulates it). There the optimizer steps on the cpu, bucket by bucket as
     * gradients come. */
    const char *offload_dir;
    /* "memory": ordinary memory, where little may be page-locked: each copy to the host is waited
     * for; the ledger counts it as the host's. */
    bool offload_unpinned;
    /* how parameters begin */
    uint64_t seed;      /* of parameters declared on meta (0: 1337; KN_ZERO: 0) */
    kn_param_fill fill; /* instead of the declared initialiser */
    void *fill_arg;
    /* After that, where a value needs the whole parameter (orthogonal matrices) or the module's
     * kind. */
    kn_module_fill fill_module;
    void *fill_module_arg;
    /* Rank 0's values and buffers become everyone's; .ignored ones don't. The other ranks may
     * declare theirs on meta: they never hold a whole model. */
    bool sync_from_rank0;
    /* gradients */
    kn_grad_average reduce_op;
    double divide_factor;    /* divides the sum over ranks, instead of their number (0) */
    double predivide_factor; /* part of that division that happens before the reduction; 0: 1 */
    double timeout_s; /* for kn_comm_set_timeout of comm (NULL: kn_world()); 0: it keeps its own */
};

#define KN_SIZE_POLICY 100000000 /* FSDP1's default size for .min_params */

/* ---- wrapping -------------------------------------------------------------------------------- */

/* Makes module (with what no unit below it claimed) a unit of comm's ranks; with a policy, modules
 * below it first. Parameters that are on meta, or that were never read or written, are filled from
 * (seed, name), each rank its shard only; the others keep this rank's values (which agree over the
 * ranks, else each gets an error, or .sync_from_rank0). A parameter shared by several units belongs
 * to the nearest unit around all of them. comm NULL: kn_world(), every rank (one, where kn_init was
 * not called); kn_comm_self(): this rank alone. All ranks give the same options and have the same
 * parameters: where one differs each rank gets an error that names it, before anything is changed;
 * a .policy is compared by its units, once they are made. Only .device, .offload_dir,
 * .offload_unpinned, .timeout_s, lists and arguments aren't compared. Collective. */
KN_API bool kn_fsdp_wrap_(void *module, kn_comm *comm, kn_fsdp_wrap_options o);
#define kn_fsdp_wrap(module, comm, ...)                                                            \
    kn_fsdp_wrap_(module, comm, KN_OPTIONS(kn_fsdp_wrap_options, __VA_ARGS__))
/* One unit of several modules that are called one after another: gathered before the first of them
 * runs, released after the last. None may contain another. */
KN_API bool kn_fsdp_wrap_group_(kn_module *const *modules, int n, kn_comm *comm,
                                kn_fsdp_wrap_options o);
#define kn_fsdp_wrap_group(modules, n, comm, ...)                                                  \
    kn_fsdp_wrap_group_(modules, n, comm, KN_OPTIONS(kn_fsdp_wrap_options, __VA_ARGS__))

/* Fills in *mesh (as .mesh) as wrapping over comm's ranks does; comm as there. False with an error
 * where it doesn't fit them; *mesh stays. Collective where the machines decide. */
KN_API bool kn_fsdp_mesh(kn_mesh *mesh, kn_strategy strategy, kn_comm *comm);

KN_API bool kn_fsdp_is_unit(const void *module);
/* Modules that are units, children first, a group by its first module; returns their number, which
 * may be more than max, for which list has room. */
KN_API int kn_fsdp_units(void *root, kn_module **list, int max);
/* The same, without units that lie in another unit: the roots of the trees of units at and below
 * module. */
KN_API int kn_fsdp_roots(void *module, kn_module **list, int max);
/* The device on which module computes, and to which its inputs move: that of the nearest unit at or
 * around it. KN_DEVICE_DEFAULT with an error where there is none. */
KN_API kn_device kn_fsdp_device(const void *module);
/* The sharded tree: units, elements, shard sizes, dtypes, state; a line that says so where there is
 * no unit. */
KN_API bool kn_fsdp_print(FILE *out, void *root);

/* Whether the ranks hold alike what several of them have a copy of; else each gets an error that
 * names the tensor and two ranks. Compared are names, shapes, dtypes and need of gradients of all
 * parameters at and below root; the values of those that are whole on several ranks (of units that
 * aren't cut, or of no unit: ignored, plain) and of the shards of a hybrid mesh; buffers, but not a
 * batch norm's of its rank's own batches (kn_sync_batch_norm joins them); with optim its numbers
 * and its states of such parameters, with ema their averages. A pass over these values, and one
 * small message for each group of ranks. Collective. */
typedef struct kn_fsdp_check_options {
    KN_BEGIN_OPTIONS;
    const kn_optim *optim;
    const struct kn_ema *ema;
    const char *ignore; /* patterns (fnmatch, comma-separated) of what is each rank's own */
} kn_fsdp_check_options;
KN_API bool kn_fsdp_check_(void *root, kn_fsdp_check_options o);
#define kn_fsdp_check(root, ...)                                                                   \
    kn_fsdp_check_(root, KN_OPTIONS(kn_fsdp_check_options, __VA_ARGS__))

/* ---- what may change between steps ----------------------------------------------------------- */

/* Each applies to the unit of module, or, recurse, to all units below as well. */

/* off: backward keeps whole gradients on the rank and adds them up; the next backward with it on
 * reduces the sum (no_sync). */
KN_API bool kn_fsdp_set_gradient_sync(void *module, bool on, bool recurse);
/* Hybrid: off: backward reduces inside the shard group only; the next with it on adds replicas. */
KN_API bool kn_fsdp_set_all_reduce(void *module, bool on, bool recurse);
/* off: parameters stay gathered after backward, until a step changes them. */
KN_API bool kn_fsdp_set_reshard_after_backward(void *module, bool on, bool recurse);
/* off: backward doesn't gather the units: for those whose gradients need no whole parameters, like
 * an embedding's. If backward reads one after all, that is an error that names the unit. Units that
 * recompute are gathered for it. */
KN_API bool kn_fsdp_set_unshard_in_backward(void *module, bool on, bool recurse);
/* off: more backwards follow before the next step (schedules of pipelines, several losses): their
 * trees' backwards end without waiting for the reductions that run, and leave it to the last one to
 * find out which parameters got a gradient. Forwards whose backward is still to come keep their
 * order. A step needs a backward with it on. For the whole trees of units at and below module. */
KN_API bool kn_fsdp_set_is_last_backward(void *module, bool on);
/* Reduces the gradients that backwards without sync, without all-reduce, or before the last one
 * left on this rank or another, of all trees of units at and below module, without a backward.
 * Collective; false with an error, or while a backward runs. */
KN_API bool kn_fsdp_reduce_grads(void *module);
/* on: the units at and below module gather their parameters in the masters' dtype and compute in
 * it, as do their buffers; float inputs become it, and outputs stay in it: an evaluation in full
 * precision of a model that trains in bf16. Gathers and activations take its memory. A forward then
 * needs grad mode off. off: back to .param_dtype, with the same bits as without. Not inside of a
 * forward, a backward or a summon. */
KN_API bool kn_fsdp_set_full_precision(void *module, bool on);
/* on: trainable parameters that no rank's backward reached get a gradient of zeros where their unit
 * ran in forward, so that a step decays them and moves by their moments. off: they have none. All
 * ranks give the same, else each gets an error. Collective. */
KN_API bool kn_fsdp_set_reduce_unused(void *module, bool on, bool recurse);
/* As .reshard_after_forward. */
KN_API bool kn_fsdp_set_reshard_after_forward(void *module, int value, bool recurse);
/* Divides the sum over ranks by factor instead of their number; 0 goes back to what .reduce_op
 * says. It counts for all gradients that the next step reads, also those that wait already. All
 * ranks give the same, else each gets an error. Collective. */
KN_API bool kn_fsdp_set_divide_factor(void *module, double factor, bool recurse);
/* Units of the same model to gather when module's forward (backward) begins, instead of the
 * schedule's choice. The list is copied; n 0 goes back to the schedule's. */
KN_API bool kn_fsdp_prefetch_forward(void *module, kn_module *const *list, int n);
KN_API bool kn_fsdp_prefetch_backward(void *module, kn_module *const *list, int n);

/* Gathers module's unit now, on the gather stream; kn_unshard_wait makes the compute stream wait,
 * and is an error where the unit was freed. Not one of the .max_gathers that the schedule is bound
 * to. Refused while the unit is summoned. */
typedef struct kn_unshard_handle {
    struct kn_unit *unit;
} kn_unshard_handle;
KN_API kn_unshard_handle kn_fsdp_unshard(void *module);
KN_API bool kn_unshard_wait(kn_unshard_handle h);
KN_API bool kn_fsdp_reshard(void *module);

/* ---- watching the schedule ------------------------------------------------------------------- */

typedef enum kn_fsdp_event_kind {
    KN_FSDP_GATHER = 0, /* a unit's gather was issued: its whole parameters take bytes */
    KN_FSDP_GATHERED,   /* the compute stream waits for that gather, then has the parameters */
    KN_FSDP_RELEASE,    /* the whole parameters gave their bytes back */
    KN_FSDP_REDUCE,     /* the reduction of a unit's whole gradients was issued */
    KN_FSDP_REDUCED,    /* it is done: the whole gradients give their bytes back */
    KN_FSDP_EVENT_COUNT
} kn_fsdp_event_kind;
/* "gather", "gathered", "release", "reduce", "reduced". */
KN_API const char *kn_fsdp_event_name(kn_fsdp_event_kind kind);
typedef struct kn_fsdp_event {
    kn_fsdp_event_kind kind;
    /* Path of its first module, the root's class for the root; valid during the call. */
    const char *unit;
    int64_t bytes; /* on this rank: of the whole parameters, or of the whole gradients */
    int rank;      /* this rank, among those of the unit */
} kn_fsdp_event;
typedef void (*kn_fsdp_observer)(const kn_fsdp_event *e, void *arg);
/* From now on fn(event, arg) is called on the training thread for each event of the units at and
 * below module, in the order in which the schedule issues them; the device may be behind. A unit
 * has one observer; NULL: none. fn may look at anything but run, gather or release no unit; it may
 * still be called while the modules are freed, where a reduction runs that no last backward waited
 * for. In a replayed step (kn_replay_step) nothing is issued, so fn isn't called. False where no
 * unit is at or below module. */
KN_API bool kn_fsdp_on_event(void *module, kn_fsdp_observer fn, void *arg);

/* Where the unit at module is with its parameters and gradients on this rank, now. */
typedef struct kn_fsdp_state {
    const char *doing;                       /* "idle", "forward", "backward", "backward done" */
    bool gathering;                          /* a gather was issued that nothing waited for yet */
    bool gathered;                           /* its whole parameters are there */
    bool ahead;                              /* gathered before their use */
    bool reducing;                           /* the reduction of its gradients may still run */
    int64_t gathered_bytes, unreduced_bytes; /* that it holds: whole parameters, whole gradients */
} kn_fsdp_state;
/* Looks, and changes nothing. doing is NULL with an error: module is no unit. */
KN_API kn_fsdp_state kn_fsdp_unit_state(void *module);

/* ---- replacing collectives ------------------------------------------------------------------- */

/* One gather: dst[ranks of shards * count] = every rank's src[count], in order of rank. */
typedef struct kn_param_gather {
    const char *unit;
    kn_comm *shards;   /* ranks that hold different shards, or slices */
    kn_stream *stream; /* where the work must go */
    void *dst;
    const void *src; /* may be this rank's part of dst */
    int64_t count;
    kn_dtype dtype;
} kn_param_gather;
typedef bool (*kn_gather_hook)(const kn_param_gather *g, void *arg);
/* hook(g, arg) is called instead of each gather of the units' whole parameters; NULL: the default.
 * Where one rank has a whole unit, nothing is gathered. */
KN_API bool kn_fsdp_set_gather_hook(void *module, kn_gather_hook hook, void *arg, bool recurse);
KN_API bool kn_gather_default(const kn_param_gather *g, void *arg);

/* One reduction: dst[count] = acc + the sum over ranks of src's chunk for this rank. Where dst is
 * NULL (all-reduce is off in this round): partial[count] = partial_acc + the sum over shards of
 * that chunk. */
typedef struct kn_grad_reduction {
    const char *unit;
    kn_comm *shards;   /* ranks that hold different shards; NULL: not sharded */
    kn_comm *replicas; /* ranks that hold the same shard; NULL: one replica, or off in this round */
    kn_stream *stream; /* where the work must go */
    void *dst;         /* NULL: this round goes to partial */
    const void *acc;   /* may be dst or NULL */
    void *src;         /* [shards * count]; may be overwritten */
    int64_t count;
    kn_dtype dst_dtype, src_dtype;
    /* [count] of dst_dtype: what the shard group's sum goes to before the replicas add; NULL where
     * there is one group or no replicas. */
    void *partial;
    const void *partial_acc; /* what earlier rounds without all-reduce left there, or NULL */
    struct kn_bucket *_bucket;
} kn_grad_reduction;
typedef bool (*kn_comm_hook)(const kn_grad_reduction *r, void *arg);
/* NULL: the default. */
KN_API bool kn_fsdp_set_comm_hook(void *module, kn_comm_hook hook, void *arg, bool recurse);
KN_API bool kn_reduce_default(const kn_grad_reduction *r, void *arg);
/* hook(r, arg) sees, and may change, each sum over all ranks before it is added to what earlier
 * backwards left: r->dst[count] of r->dst_dtype, on r->stream; r has no src, acc and ranks. Then
 * the sum is added last, which is another order of additions than without. Beside a comm hook,
 * after it. NULL: none. */
KN_API bool kn_fsdp_set_all_reduce_hook(void *module, kn_comm_hook hook, void *arg, bool recurse);
/* Bytes for a hook, valid until the reduction is done. */
KN_API void *kn_reduction_scratch(const kn_grad_reduction *r, size_t bytes);
/* Send gradients in bf16, in f16, or in bf16 rounded at random (unbiased; arg: NULL or uint64_t
 * seed). */
KN_API bool kn_hook_bf16(const kn_grad_reduction *r, void *arg);
KN_API bool kn_hook_f16(const kn_grad_reduction *r, void *arg);
KN_API bool kn_hook_bf16_stochastic(const kn_grad_reduction *r, void *arg);

/* ---- looking at whole parameters ------------------------------------------------------------- */

typedef struct kn_summon_options {
    KN_BEGIN_OPTIONS;
    bool not_recursive; /* only the unit of module itself */
    bool rank0_only;    /* others see parameters without bytes */
    bool read_only; /* else each rank keeps its part of what was changed (rank 0's, rank0_only) */
    /* kn_grad() of the parameters is the accumulated gradient (raw sum over ranks), where there is
     * one; changes of it are kept as those of values. An error where gradients are held back. */
    bool with_grads;
    /* They are whole in host memory, where the unit computes elsewhere: the device takes no bytes
     * for them. Beside rank0_only, for files. */
    bool offload_to_cpu;
} kn_summon_options;
typedef struct kn_summon_scope {
    struct kn_summoned *s;
} kn_summon_scope;
/* Between begin and end the parameters' handles are whole, in the master dtype. Collective. No
 * forward or backward may run in between. */
KN_API kn_summon_scope kn_summon_(void *module, kn_summon_options o);
#define kn_summon(module, ...) kn_summon_(module, KN_OPTIONS(kn_summon_options, __VA_ARGS__))
KN_API bool kn_summon_end(kn_summon_scope s);
/* kn_apply_modules with whole parameters: each unit is summoned for its own modules in turn. */
KN_API bool kn_fsdp_apply(void *root, bool (*fn)(kn_module *m, void *arg), void *arg);

/* Reads a whole parameter (collective; every rank gets it, row-major, master dtype) into host
 * memory of numel elements, and writes one from host memory (each rank keeps its part). Works for
 * modules without units too. index: into kn_params(root). */
KN_API bool kn_param_read(void *root, int index, void *host);
KN_API bool kn_param_write(void *root, int index, const void *host);
/* The same for a state tensor of an optimizer that is cut like the parameter. */
KN_API bool kn_shard_read(void *root, int index, kn_tensor *shard, void *host);
KN_API bool kn_shard_write(void *root, int index, kn_tensor *shard, const void *host);

/* ---- memory ---------------------------------------------------------------------------------- */

/* Predicted bytes a rank by category for a step of root (docs/fsdp.md has the formula), a unit or a
 * module that calls trees of units one after the other: parameters, gradients, optimizer (AdamW),
 * gathered and unreduced peaks; those offloaded to a file are in store. Of the first three, pinned
 * lie in page-locked memory of the host; the device has the rest. */
typedef struct kn_fsdp_memory {
    int64_t param, grad, optim, gathered, unreduced, store, pinned;
} kn_fsdp_memory;
KN_API kn_fsdp_memory kn_fsdp_predict(void *root);
/* The same of o's module, with the states that o keeps instead of AdamW's. */
KN_API kn_fsdp_memory kn_fsdp_predict_optim(const kn_optim *o);

#ifdef __cplusplus
}
#endif
#endif
