/* nn/nn.h: modules and their parameters. (Layers: nn/layers.h.)
 *
 * A module is a node of a tree with dotted names. A user's module is a struct whose first member is
 * kn_module base; it is called with kn_call(). A root module is freed with kn_module_free(), which
 * frees what its whole tree holds (not the user's structs themselves). */
#ifndef KNAP_NN_NN_H
#define KNAP_NN_NN_H

#include "comm/comm.h"
#include "autograd/autograd.h"
#include "autograd/function.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_module {
    struct kn_module_impl *impl; /* private */
} kn_module;

typedef kn_tensor *(*kn_forward1)(kn_module *self, kn_tensor *x);
/* arg: the caller's arguments besides tensors; copied for recompute; may be NULL. It may point at
 * tensors, which the caller must keep until backward: a unit of fsdp moves and casts only those of
 * in. */
typedef kn_values (*kn_forward_n)(kn_module *self, kn_values in, const void *arg);

/* ---- tree ------------------------------------------------------------------------------------ */

/* Begins a module. Its class name is the forward function's without "_forward" ("mlp"). The struct
 * must stay where it is until kn_module_free: don't copy it, return it by value, or let realloc
 * move it. */
#define kn_module_init(m, forward)   kn_module_init_((m), (forward), NULL, #forward)
#define kn_module_init_n(m, forward) kn_module_init_((m), NULL, (forward), #forward)
KN_API bool kn_module_init_(kn_module *m, kn_forward1 f1, kn_forward_n fn, const char *class_name);
/* Adds child to parent as "name" (unique, without dots). After an error child is freed unless it
 * has a parent already, so a failing chain of inits leaks nothing. */
KN_API bool kn_module_add(void *parent, const char *name, void *child);
/* A module that only holds children (ModuleList): add with names "0", "1", ... */
KN_API bool kn_module_list_init(kn_module *m, kn_module *parent, const char *name);
KN_API void kn_module_free(void *m); /* what its tree holds; m leaves the tree around it */
KN_API const char *kn_module_path(const void *m);  /* dotted, "" for the root; borrowed */
KN_API const char *kn_module_class(const void *m); /* borrowed */
KN_API int kn_module_children(const void *m);
KN_API kn_module *kn_module_child(const void *m, int i);
KN_API kn_module *kn_module_find(void *root, const char *path); /* NULL and an error if absent */
/* Whether path names a module, a parameter or a buffer below m ("" is m itself); no error if
 * not. */
KN_API bool kn_module_has(const void *m, const char *path);
/* Takes the module at path out of m's tree: it becomes the root of a tree of its own, which the
 * caller frees. Its parameters keep values and gradients; their names begin at it from now on, also
 * for initial values that are yet to come. What modules that stay share with it stays theirs, too.
 * Optimizers of the tree are to be made anew. NULL with an
 * error if there is no such module, if it is sharded or a part of a layer (the projections of an
 * attention), or in a call or a backward. */
KN_API kn_module *kn_module_remove(void *m, const char *path);
/* Puts child, which has no parent, in the place of the module at path, under its name, and returns
 * that one as kn_module_remove does (for a wrapper around it, say, which may then add it as its own
 * child). Calls of the old module (kn_call(&net.fc1, x)) run the new one from now on, except where
 * the new one makes them; inside of a forward of the tree so do calls of an old one that was freed.
 * The old one is freed with the new one unless it has a parent again or its caller frees it before.
 * After an error child is freed unless it has a parent already. */
KN_API kn_module *kn_module_replace(void *m, const char *path, void *child);
/* Calls fn on m's whole subtree, children first; stops at false. */
KN_API bool kn_apply_modules(void *m, bool (*fn)(kn_module *m, void *arg), void *arg);
KN_API void kn_train(void *m, bool on); /* on at first; the whole subtree */
KN_API bool kn_training(const void *m);
KN_API void kn_freeze(void *m,
                      bool frozen); /* requires_grad of all parameters below; at any time */
/* The same of those parameters of root whose full names match one of the patterns (fnmatch,
 * comma-separated: "*.bias, *.ln_?.weight"). Returns their number; 0 with an error, and none
 * is changed, where a pattern matches none. */
KN_API int kn_freeze_matching(void *root, const char *patterns, bool frozen);
/* The tree with classes, parameters and buffers, a line each, and the total number of elements of
 * parameters. */
KN_API bool kn_module_print(FILE *out, const void *m);

/* Gives m a copy of data[size], or size zero bytes where data is NULL, for what its struct has no
 * room for (a number of blocks that is known at run time: models/gpt.c). kn_module_data points at
 * it, aligned for any type; it belongs to m and is freed with it, after m's children, which may lie
 * in it. A module takes data once: the layers below keep their settings there. Errors: m has data
 * already, size is 0, out of memory. */
KN_API bool kn_module_set_data(void *m, const void *data, size_t size);
/* What kn_module_set_data copied; the caller may write into it. NULL without an error where m has
 * none. */
KN_API void *kn_module_data(const void *m);

/* ---- calling --------------------------------------------------------------------------------- */

/* Calls m, any struct that begins with a kn_module: opens a scope and a frame, and runs the hooks
 * around forward. The results belong to the scope around the call. kn_call_n copies arg[arg_size]
 * where a recomputed call needs it later. NULL, or no values, with an error. */
KN_API kn_tensor *kn_call(void *m, kn_tensor *x);
/* A NULL among the tensors reaches a forward that takes several, as an input that isn't given. */
KN_API kn_values kn_call_n(void *m, kn_values in, const void *arg, size_t arg_size);
/* kn_call_n without arg, for one result: kn_call_with(&unet, x, time). NULL with an error. */
KN_API kn_tensor *kn_call_with_(void *m, kn_values in);
#define kn_call_with(m, ...) kn_call_with_((m), KN_VALUES(__VA_ARGS__))
/* The same with method in place of m's forward: another entry point of m ("encode", "generate"). It
 * is a call of m like any other: m's hooks run, kn_recompute applies, and a unit of fsdp is
 * gathered, moves and casts its inputs, and casts its outputs. */
KN_API kn_tensor *kn_call_method(void *m, kn_forward1 method, kn_tensor *x);
KN_API kn_values kn_call_method_n(void *m, kn_forward_n method, kn_values in, const void *arg,
                                  size_t arg_size);
/* Make any C code a call of m: the operations between kn_enter and kn_leave belong to m. Inputs and
 * results aren't cast (kn_call_method casts them). kn_leave hands results[n] to the scope around.
 * It must follow each kn_enter that succeeded, also when an error stands; a kn_enter that failed
 * returns an empty kn_entered, which kn_leave ignores. */
typedef struct kn_entered {
    kn_scope scope;
    struct kn_frame *frame;
    kn_module *module;
} kn_entered;
KN_API kn_entered kn_enter(void *m);
KN_API void kn_leave(kn_entered e, kn_tensor *const *results, int n);

/* Activation checkpointing (Chen et al., arXiv:1604.06174): m's calls keep only their inputs and
 * run forward again in backward, with the same results to the bit, hooks and gradients as without.
 *
 * - A call that runs again sees what its forward saw: draws (also after other steps and seeds),
 *   train mode, frozen or not, and the old values of what forward writes in place, a buffer or an
 *   input. That is written once: it is as before once backward is over.
 * - Backward refuses where it can't: a parameter, buffer or other tensor that forward read was
 *   written since; modules below m came, went or were freed; forward does something else when it
 *   runs again.
 * - Forward must keep nothing else, or ask kn_recomputing: a counter in the module's struct would
 *   count twice. A tensor that it reads from elsewhere (a mask that arg points at) must stay until
 *   backward. */
KN_API bool kn_recompute(void *m, bool on);
/* Whether the running forward is one that kn_recompute runs again in backward. */
KN_API bool kn_recomputing(void);

/* ---- parameters and buffers ------------------------------------------------------------------ */

/* How a parameter begins. Element i of a parameter is a function of (seed, canonical name, i)
 * alone: the same for every world size, layout and device. */
typedef enum kn_init_kind {
    KN_INIT_DEFAULT = 0, /* zeros */
    KN_INIT_ZEROS,
    KN_INIT_ONES,
    KN_INIT_CONSTANT,         /* a */
    KN_INIT_NORMAL,           /* mean a, deviation b */
    KN_INIT_UNIFORM,          /* in [a, b) */
    KN_INIT_TRUNCATED_NORMAL, /* mean a, deviation b, drawn again beyond 2 deviations */
    /* By the fans of a shape [out, in, ...] (of a kn_linear with .in_out: [in, out]): fan_in =
     * in ..., fan_out = out ...; a: gain. Xavier (Glorot and Bengio, 2010): deviation a sqrt(2 /
     * (fan_in + fan_out)). Kaiming (He et al., arXiv:1502.01852): deviation a / sqrt(fan_in), or
     * fan_out where b is 1. */
    KN_INIT_XAVIER_NORMAL,
    KN_INIT_XAVIER_UNIFORM, /* in +- sqrt(3) deviations */
    KN_INIT_KAIMING_NORMAL,
    KN_INIT_KAIMING_UNIFORM,
    /* Of a shape [out, in, ...], seen as the matrix [out, the rest]: orthonormal rows, or columns
     * where those are fewer, times the gain a (Saxe et al., arXiv:1312.6120; torch's orthogonal_).
     * A rank that holds a part of it computes the whole on the host: for a while 12 bytes an
     * element, and 8 of its part, one parameter at a time; about 2 min(out, rest)^2 max(out, rest)
     * operations. */
    KN_INIT_ORTHOGONAL
} kn_init_kind;
typedef struct kn_initializer {
    kn_init_kind kind;
    double a, b;
    int64_t _rows, _cols;    /* private */
    int64_t _blank, _blanks; /* private: elements that are 0 instead, from which on, how many */
} kn_initializer;
#define KN_INITIALIZER_(k, first, second)                                                          \
    ((kn_initializer){ .kind = (k), .a = (first), .b = (second) })
#define KN_CONSTANT_INIT(value)       KN_INITIALIZER_(KN_INIT_CONSTANT, (value), 0)
#define KN_NORMAL_INIT(dev)           KN_INITIALIZER_(KN_INIT_NORMAL, 0, (dev))
#define KN_UNIFORM_INIT(lo, hi)       KN_INITIALIZER_(KN_INIT_UNIFORM, (lo), (hi))
#define KN_TRUNCATED_NORMAL_INIT(dev) KN_INITIALIZER_(KN_INIT_TRUNCATED_NORMAL, 0, (dev))
/* gain: 1, or sqrt(2) before a relu. */
#define KN_XAVIER_NORMAL_INIT(gain)   KN_INITIALIZER_(KN_INIT_XAVIER_NORMAL, (gain), 0)
#define KN_XAVIER_UNIFORM_INIT(gain)  KN_INITIALIZER_(KN_INIT_XAVIER_UNIFORM, (gain), 0)
#define KN_KAIMING_NORMAL_INIT(gain)  KN_INITIALIZER_(KN_INIT_KAIMING_NORMAL, (gain), 0)
#define KN_KAIMING_UNIFORM_INIT(gain) KN_INITIALIZER_(KN_INIT_KAIMING_UNIFORM, (gain), 0)
#define KN_ORTHOGONAL_INIT(gain)      KN_INITIALIZER_(KN_INIT_ORTHOGONAL, (gain), 0)
#define KN_ONES_INIT                  KN_INITIALIZER_(KN_INIT_ONES, 0, 0)
#define KN_ZEROS_INIT                 KN_INITIALIZER_(KN_INIT_ZEROS, 0, 0)

/* Sets the dtype and the device of parameters and buffers that are declared from now on in m and in
 * the modules below it, where their own options leave these 0. The nearest module around a
 * declaration counts. 0: the setting of the module around m, else KN_F32 and KN_CPU.
 *
 *     kn_module_init(&net.base, net_forward);
 *     kn_module_defaults(&net, .device = KN_META, .dtype = KN_BF16);
 *     kn_linear_init(&net.fc, &net.base, "fc", 784, 10);     // bf16, on meta */
typedef struct kn_module_defaults_options {
    KN_BEGIN_OPTIONS;
    kn_dtype dtype; /* a float */
    kn_device device;
} kn_module_defaults_options;
KN_API bool kn_module_defaults_(void *m, kn_module_defaults_options o);
#define kn_module_defaults(m, ...)                                                                 \
    kn_module_defaults_(m, KN_OPTIONS(kn_module_defaults_options, __VA_ARGS__))

/* Declares m's parameter "name", of shape[ndim], at most KN_MAX_DIMS sizes. It has no bytes yet.
 * Its initial values follow init, from a seed and the parameter's dotted name. The first of these
 * fills it: kn_fsdp_wrap, each rank its own part (.seed); kn_materialize; its first read, for
 * example in a call of the module, with the seed of kn_seed (not on meta). All three have the same
 * default seed. Owned by the module. Errors: a name that is taken or holds a dot, a dtype that is
 * no float, a module that is a unit of fsdp already. */
KN_API kn_tensor *kn_parameter(void *m, const char *name, kn_dtype dtype, kn_device device,
                               kn_initializer init, int ndim, const int64_t *shape);
/* Adds param, a parameter of another module, to m as "name": one parameter in two modules (tied
 * weights). In a tree its names and initial values are those of the module that declared it; where
 * that one leaves the tree, those of the first module there that holds it. A parameter that modules
 * of two trees hold can't be sharded in one of them and used in the other. */
KN_API bool kn_share_parameter(void *m, const char *name, kn_tensor *param);
/* Adds buffer to m as "name": state that is not trained. Takes a reference. */
KN_API bool kn_buffer(void *m, const char *name, kn_tensor *buffer);
/* Declares a buffer with initial values. It follows the parameters to another device; on meta it
 * gets its values when they do. Owned by the module. */
KN_API kn_tensor *kn_declare_buffer(void *m, const char *name, kn_dtype dtype, kn_device device,
                                    kn_initializer init, int ndim, const int64_t *shape);
/* Says whether m's own buffer "name" is in state dicts, checkpoints and files of weights; at first
 * it is. A table of positions, say, which the program makes anew, need not be (torch's
 * persistent=False): states are then loaded whether they have it or not. Sharding treats it as any
 * other buffer. */
KN_API bool kn_set_buffer_saved(void *m, const char *name, bool saved);
/* Whether the i-th buffer that m itself holds is in state dicts and files. */
KN_API bool kn_module_buffer_saved(const void *m, int i);
KN_API kn_tensor *kn_module_buffer(const void *m,
                                   const char *name); /* own or dotted; NULL and error */
/* Number of buffers that m itself holds, and the i-th of them with its name; both borrowed. name
 * may be NULL. kn_apply_modules reaches the buffers of a whole tree. */
KN_API int kn_module_buffers(const void *m);
KN_API kn_tensor *kn_module_buffer_at(const void *m, int i, const char **name);
/* For buffers in m's subtree that compute in another dtype (fsdp's .buffer_dtype): full true makes
 * their handles show the values in full precision; false switches back to the computing dtype,
 * rounding values written meanwhile. m must not run in between. Calls nest: the false of the
 * outermost true, which comes after a true that failed as well, switches back. kn_summon, state
 * dicts and checkpoints call it by themselves. */
KN_API bool kn_module_full_buffers(void *m, bool full);
/* From now on each batch norm (kn_batch_norm_init) at and below m takes, while training, the
 * batches of comm's ranks as one (torch.nn.SyncBatchNorm.convert_sync_batchnorm): .sync of
 * kn_batch_norm, over a communicator made for it. All ranks call it alike, and running statistics
 * stay the same on all. Before the first step, before or after kn_fsdp_wrap, with its comm. NULL:
 * kn_world(), every rank (one, where kn_init was not called); kn_comm_self(): this rank alone
 * again. Returns their number; 0 with an error, also where there is none. Collective. */
KN_API int kn_sync_batch_norm(void *m, kn_comm *comm);
/* Every float buffer of m's subtree becomes its mean over comm's ranks, added in their order in f64
 * and rounded once, so the same bits on all; every other one rank 0's. For running statistics of
 * batches that ranks took apart. In full precision. comm as in kn_sum_over_ranks: NULL is every
 * rank. All ranks have the same buffers; on meta nothing moves. Collective. */
KN_API bool kn_mean_buffers(void *m, kn_comm *comm);
/* The same with rank root's buffers, which become everyone's (before a forward: what
 * DistributedDataParallel's broadcast_buffers does). */
KN_API bool kn_broadcast_buffers(void *m, kn_comm *comm, int root);
KN_API kn_tensor *kn_module_param(const void *m,
                                  const char *name); /* own or dotted; NULL and error */
/* Moves parameters and declared buffers of the tree to device (0: the CPU) and fills them with
 * their initial values, from (seed, name); earlier values are lost. Parameters of fsdp's units stay
 * as they are. */
KN_API bool kn_materialize(void *root, kn_device device, uint64_t seed);

/* A parameter as the optimizer, the clipper and files see it: this rank's part of it. */
typedef struct kn_param {
    const char *name;  /* canonical, dotted; borrowed */
    kn_tensor *tensor; /* the module's handle: full shape */
    kn_tensor *master; /* this rank's master values, 1-d; may have 0 elements */
    int64_t start;     /* index of master's first element in the flattened parameter */
    int64_t numel;     /* of the whole parameter */
    bool trainable;
    bool elsewhere;                       /* another rank counts this part in norms */
    kn_memory *state_memory;              /* private: of optimizer state; NULL: the device's pool */
    const struct kn_param_source *source; /* private: where the gradient lies */
    int index;                            /* private */
    const struct kn_module_impl *owner;   /* private: the module that declared it */
} kn_param;

/* The parameters that modules at and below root hold, in order of declaration, shared ones once:
 * under the name of the module that declared them, else of the first below root that holds them.
 * Borrowed until the tree or its sharding changes. */
KN_API int kn_params(void *root, const kn_param **list);
/* This rank's part of the parameter's accumulated gradient (raw sum); NULL where none arrived. */
KN_API kn_tensor *kn_param_grad(const kn_param *p);
/* The factor that makes means of the raw sums that wait in root's gradients: 1 / (backwards that
 * brought any of them * ranks * scale of their losses (kn_scale_loss)); 1 where none waits. Parts
 * with optimizers or divide factors of their own may differ: an error then, ask for each. Waits for
 * the device where a loss was scaled. */
KN_API double kn_grad_scale(void *root);
/* Drops the gradients of module's parameters, also those that fsdp hasn't reduced yet, together
 * with their count of micro-batches. Call it where the next step must not see them: after a bad
 * batch, or for a discriminator through which the generator's loss went. A step drops the gradients
 * that it used by itself. Where module is sharded, every rank must call it. */
KN_API void kn_zero_grad(void *module);
KN_API int64_t kn_param_count(void *root); /* trainable and frozen elements, shared ones once */

#ifdef __cplusplus
}
#endif
#endif
