/* fsdp/unit.h (private): a unit: parameters that are gathered, released and reduced together.
 *
 * Buffers of a unit (elements of the flat layout, S shards, N ranks):
 *   master [shard]  this rank's parameters, f32 (KN_MEM_PARAM), always there
 *   full   [total]  gathered parameters (KN_MEM_GATHERED), there while UNSHARDED; the modules'
 *                   parameter tensors are views of it. With one shard and no cast it is the master.
 *   grad   [total]  gradients of one backward (KN_MEM_UNREDUCED), from the first contribution to the
 *                   end of their reduction; leaves write straight into it
 *   gshard [shard]  accumulated gradients (KN_MEM_GRAD), raw sums */
#ifndef KNAP_FSDP_UNIT_H
#define KNAP_FSDP_UNIT_H

#include "fsdp/fsdp.h"
#include "fsdp/layout.h"
#include "nn/nn_internal.h"

typedef enum kn_unit_state {
    KN_UNIT_IDLE = 0,      /* between steps */
    KN_UNIT_FORWARD,       /* inside its forward */
    KN_UNIT_PRE_BACKWARD,  /* its backward has begun */
    KN_UNIT_POST_BACKWARD, /* its gradients are reduced or on their way */
} kn_unit_state;

typedef struct kn_unit_param {
    kn_tensor *tensor; /* the module's handle: a reference */
    kn_tensor *master; /* 1-d view of this rank's part of the master shard; owned */
    kn_tensor *gpart;  /* the same part of the gradient shard; owned */
    kn_tensor *grad;   /* whole, in the unreduced buffer; owned */
    kn_interval part;
    char *name; /* canonical */
} kn_unit_param;

typedef struct kn_unit kn_unit;

/* What the units of one tree share; made by the first call of the outermost unit. */
typedef struct kn_schedule_state {
    kn_unit *root;
    kn_stream *gather, *reduce;
    kn_comm *gather_comm, *reduce_comm;
    bool recording;  /* the running forward is one that a backward follows */
    kn_unit **order; /* order in which forwards ended in this iteration */
    int orders, room;
    bool callback_queued;
    kn_unit *reducing; /* whose reduction may still run */
} kn_schedule_state;

struct kn_unit {
    kn_param_source source; /* first: kn_param.source points here */
    kn_module_impl *module;
    kn_comm *comm;
    kn_fsdp_options options;
    kn_dtype param_dtype, reduce_dtype, master_dtype;
    int rank, ranks, shards, shard; /* shard: which one this rank holds */
    kn_layout layout;
    kn_unit_param *param;
    int params;
    kn_storage *master, *full, *grad, *gshard;
    void *cast; /* shard in param_dtype while a gather with a cast runs */
    kn_group group;
    kn_event *gathered, *computed, *reduced;
    kn_unit_state state;
    bool unsharded, gathering;   /* full has its bytes / a gather was issued and not waited for */
    bool has_grad;               /* gshard holds gradients since the last step */
    bool used;                   /* its backward ran in this pass */
    kn_schedule_state *schedule; /* shared; owned by the root unit */
    int order;                   /* place in schedule->order, -1: none yet */
};

kn_unit *kn_unit_of(const kn_module_impl *m); /* NULL if m is none */

/* State changes; each checks what it assumes. */
bool kn_unit_unshard(kn_unit *u); /* takes bytes and issues the gather; nothing if done or issued */
bool kn_unit_wait(kn_unit *u);    /* the compute stream waits for the gather */
bool kn_unit_reshard(kn_unit *u); /* releases the gathered bytes */
bool kn_unit_reduce(kn_unit *u);  /* issues the reduction of what backward left in grad */
bool kn_unit_finish_reduce(kn_unit *u);                    /* waits for it and releases grad */
kn_tensor *kn_unit_grad_dest(void *unit, kn_tensor *leaf); /* kn_leaf.dest */

/* fsdp/schedule.c: the hooks that drive the above. */
kn_unit_hooks *kn_unit_hooks_new(kn_unit *u);
void kn_unit_complete(void *unit);
void kn_schedule_free(kn_schedule_state *s);
void kn_unit_free(void *unit);
/* kn_module_impl.scalar_reduce of a sharded tree (fsdp/access.c). */
bool kn_unit_scalar_reduce(void *unit, int64_t *sum, int sums, float *max);

#endif
