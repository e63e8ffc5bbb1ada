/* fsdp/fsdp.h: fully sharded data parallelism. kn_fsdp_wrap() turns modules into units: their
 * parameters are flattened, cut into one shard a rank, gathered before use and released after it;
 * gradients are reduced to shards in backward. Contracts: docs/fsdp.md. */
#ifndef KNAP_FSDP_FSDP_H
#define KNAP_FSDP_FSDP_H

#include "fsdp/comm/comm.h"
#include "nn/nn.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kn_strategy {
    KN_STRATEGY_DEFAULT = 0, /* FULL_SHARD */
    KN_FULL_SHARD,           /* parameters, gradients and optimizer state sharded (ZeRO-3) */
    KN_NO_SHARD              /* replicated; gradients all-reduced (DDP) */
} kn_strategy;

typedef enum kn_backward_prefetch {
    KN_PREFETCH_DEFAULT = 0, /* PRE */
    KN_PREFETCH_PRE,         /* gather the next unit before this one's gradients */
    KN_PREFETCH_POST,        /* after this one's parameters were released */
    KN_PREFETCH_NONE
} kn_backward_prefetch;

typedef struct kn_fsdp_options {
    size_t _size;
    struct kn_guard *_positional;
    kn_strategy strategy;
    kn_backward_prefetch prefetch;
    const char *wrap_class;  /* policy: each module of these classes (comma-separated) is a unit */
    int64_t min_params;      /* policy: modules with at least so many parameters not yet claimed */
    uint64_t seed;           /* of parameters declared on meta (0: 1337) */
    kn_device device;        /* where to compute; default CPU */
    bool keep_after_forward; /* don't release parameters between forward and backward */
    kn_dtype param_dtype;    /* of gathered parameters and computation; default: as declared */
    kn_dtype reduce_dtype;   /* of unreduced gradients; default: param_dtype */
} kn_fsdp_options;

/* Makes module (with what no unit below it claimed) a unit of comm's ranks; with a policy, modules
 * below it first. Parameters on meta are filled from (seed, name), each rank its shard only; others
 * are taken from this rank's values (they must agree over the ranks). Collective. */
KN_API bool kn_fsdp_wrap_(void *module, kn_comm *comm, kn_fsdp_options o);
#define kn_fsdp_wrap(module, comm, ...)                                                            \
    kn_fsdp_wrap_((module), (comm),                                                                \
                  (kn_fsdp_options){ ._size = sizeof(kn_fsdp_options), __VA_ARGS__ })

KN_API bool kn_fsdp_is_unit(const void *module);
/* The units of root in forward order of declaration; returns their number. */
KN_API int kn_fsdp_units(void *root, kn_module **list, int max);
/* The sharded tree: units, elements, shard sizes, state. */
KN_API bool kn_fsdp_print(FILE *out, void *root);

/* Predicted bytes a rank by category for a step of root (docs/fsdp.md has the formula): parameters,
 * gradients, optimizer (AdamW), gathered and unreduced peaks. */
typedef struct kn_fsdp_memory {
    int64_t param, grad, optim, gathered, unreduced;
} kn_fsdp_memory;
KN_API kn_fsdp_memory kn_fsdp_predict(void *root);

/* Reads a whole parameter (collective; every rank gets it, row-major f32/master dtype) into host
 * memory of numel elements, and writes one from host memory (each rank keeps its part). Works for
 * modules without units too. index: into kn_params(root). */
KN_API bool kn_param_read(void *root, int index, void *host);
KN_API bool kn_param_write(void *root, int index, const void *host);
/* The same for a state tensor of an optimizer that is cut like the parameter. */
KN_API bool kn_shard_read(void *root, int index, kn_tensor *shard, void *host);
KN_API bool kn_shard_write(void *root, int index, kn_tensor *shard, const void *host);

#ifdef __cplusplus
}
#endif
#endif
