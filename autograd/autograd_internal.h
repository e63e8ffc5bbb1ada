/* autograd/autograd_internal.h (private): operations, nodes, leaves, frames, groups.
 *
 * An operation is one kn_op object. kn_apply() runs its shape rule, makes the outputs, runs forward
 * and, if a gradient is needed, leaves a node that holds attributes, saved tensors and edges. A
 * node is owned by its outputs and by the nodes that consume them. */
#ifndef KNAP_AUTOGRAD_INTERNAL_H
#define KNAP_AUTOGRAD_INTERNAL_H

#include "autograd/autograd.h"
#include "autograd/passes.h"
#include "tensor/tensor_internal.h"

/* An option's value: KN_ZERO is a real zero, 0 stands for otherwise. */
static inline double kn_value_or(double given, double otherwise)
{
    return given == KN_ZERO ? 0 : given != 0 ? given : otherwise;
}

#define KN_MAX_IN  16 /* inputs of an operation (cat takes as many) */
#define KN_MAX_OUT 8

typedef struct kn_op kn_op;
typedef struct kn_node kn_node;
typedef struct kn_leaf kn_leaf;
typedef struct kn_frame kn_frame;
typedef struct kn_group kn_group;

/* Dtype and shape of an output: filled in by the shape rule. */
typedef struct kn_spec {
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    kn_device device; /* 0: that of the first input */
    const int *order; /* memory order of the dims (kn_order_of); NULL: row-major */
    int64_t stride[KN_MAX_DIMS], offset; /* views: how the output lies in input 0 */
} kn_spec;

typedef struct kn_op_call {
    const kn_op *op;
    int nin, nout;
    kn_tensor *in[KN_MAX_IN]; /* borrowed; NULL if optional and not given */
    kn_tensor *out[KN_MAX_OUT];
    kn_spec spec[KN_MAX_OUT];
    void *attr;
} kn_op_call;

typedef struct kn_op_grad {
    kn_node *node;
    const void *attr;
    int nin, nout;
    kn_tensor *dout[KN_MAX_OUT];                /* NULL: no gradient arrived */
    kn_tensor *in[KN_MAX_IN], *out[KN_MAX_OUT]; /* saved ones, else NULL */
    kn_tensor *kept[KN_MAX_OUT];                /* what a user's function saved */
    const kn_spec *in_spec, *out_spec;          /* shapes and dtypes, always */
    bool want[KN_MAX_IN];
    bool alone;                /* it may not go on through another operation (kn_grad_through) */
    kn_tensor *din[KN_MAX_IN]; /* to be set for each wanted input; NULL counts as zero */
} kn_op_grad;

struct kn_op {
    const char *name;
    size_t attr_size;
    bool view;                      /* outputs are views of input 0 */
    bool slice;                     /* it is a kn_slice: attr is a kn_slice_attr */
    bool collective;                /* its backward calls the other ranks, or may */
    bool may_fill;                  /* outputs may hold a value of attr, which may be infinite */
    uint32_t save_in, save_out;     /* bit i: input / output i is saved for backward */
    uint32_t const_in;              /* bit i: input i never gets a gradient (indices, ...) */
    bool (*shape)(kn_op_call *c);   /* shape rule and checks: fills spec[] */
    bool (*forward)(kn_op_call *c); /* computes out[]; NULL for views */
    bool makes; /* forward makes further tensors: off the tape, and they go at its end */
    bool (*backward)(kn_op_grad *g); /* NULL: no gradient */
    /* The same made of operations, for gradients that are differentiated in turn (.create_graph): g
     * has tensors with their graphs. NULL: the operation refuses. autograd/second.h has those of
     * operations that are linear, bilinear or composed. */
    bool (*on_tape)(kn_op_grad *g);
    /* For KN_MAP (ops.h): to = L(from), or back, the gradient of L's input from its output's. */
    bool (*map)(kn_tensor *to, kn_tensor *from, const void *attr, bool back);
    /* Of kn_composed_on_tape: outputs made of operations on g's inputs and saved outputs; those
     * left NULL have no gradient. */
    bool (*composed)(kn_op_grad *g, kn_tensor **y);
    /* Of a view that shows no element twice: as shape, for another tensor of input 0's shape, but
     * false without an error where its strides don't allow the view (parts.c). Else NULL. */
    bool (*part)(kn_op_call *c);
};

/* Defines operations, whole: KN_OP(kn_op_where, .name = "where", ...), or an array of them,
 * KN_OPS(id, { ... }, ...). The linker puts the entries of all files side by side in one section,
 * so no list of them is kept by hand. */
typedef struct kn_op_entry {
    const kn_op *op;
    int64_t count;
} kn_op_entry;
#define KN_OP_ENTRY(id, op, count)                                                                 \
    static const kn_op_entry id##_entry                                                            \
        __attribute__((section("kn_ops"), used, aligned(sizeof(kn_op_entry)))) = { op, count }
#define KN_OP(id, ...)                                                                             \
    static const kn_op id = { __VA_ARGS__ };                                                       \
    KN_OP_ENTRY(id, &id, 1)
#define KN_OPS(id, ...)                                                                            \
    static const kn_op id[] = { __VA_ARGS__ };                                                     \
    KN_OP_ENTRY(id, id, sizeof id / sizeof *id)

/* Operation i of all, in no particular order; NULL past the last. Tests hold each to have a
 * gradient check. */
const kn_op *kn_op_at(int i);

/* Applies op. Returns false with an error; outputs are scoped. attr is copied. Any NULL input that
 * the operation does not list as optional (in optional, bit i) is an error. */
bool kn_apply(const kn_op *op, int nin, kn_tensor *const *in, uint32_t optional, const void *attr,
              int nout, kn_tensor **out);
kn_tensor *kn_apply1(const kn_op *op, int nin, kn_tensor *const *in, uint32_t optional,
                     const void *attr);

/* For backward functions: the tensor to write the gradient of input i to: a leaf's own place (flat
 * buffer, reduce dtype) for its first contribution, else a new tensor of the input's shape. The
 * content is undefined. It is din[i], too. */
kn_tensor *kn_grad_out(kn_op_grad *g, int i);
/* As kn_grad_out, but for operations that add into it (embedding): *fresh is set if it must be
 * zeroed first. Doesn't set din. */
kn_tensor *kn_grad_into(kn_op_grad *g, int i, bool *fresh);
/* Sums t down to spec's shape (undoing a broadcast), into input i's place. */
kn_tensor *kn_grad_unbroadcast(kn_op_grad *g, int i, kn_tensor *t);

typedef struct kn_edge {
    kn_node *node; /* producer; NULL for leaves and constants; a reference */
    int out_index;
    kn_tensor *leaf; /* a reference to the leaf that requires grad, or NULL */
} kn_edge;

typedef struct kn_saved {
    kn_tensor *tensor; /* reference without node (an alias for outputs, to break cycles) */
    uint32_t version;
    struct kn_record *record; /* not NULL: tensor is there once its call was replayed (record.h) */
    int64_t index;            /* in record */
} kn_saved;

typedef struct kn_hook_entry {
    struct kn_hook_entry *next;
    kn_hook id; /* 0: taken off while a backward ran */
    int out_index;
    kn_tensor_hook hook;
    kn_node_hook pre, post;
    kn_leaf_hook accumulated;
    void *arg;
} kn_hook_entry;

struct kn_node {
    int refs;
    const kn_op *op;
    void *attr;
    uint64_t seq; /* position on the tape */
    int nin, nout;
    kn_edge *edge; /* [nin] */
    kn_spec *in_spec, *out_spec;
    kn_saved *saved_in, *saved_out; /* [nin], [nout] */
    kn_saved kept[KN_MAX_OUT];      /* any others (function.c) */
    bool freed;                     /* saved tensors were let go of by a backward */
    kn_frame *frame;                /* the module call that made it; a reference, or NULL */
    kn_tensor *scale;               /* multiplied its output, a loss (kn_scaled_by); a reference */
    kn_place place;                 /* the user's line that called the operation */
    kn_hook_entry *hooks;
    void (*free_attr)(void *attr); /* frees the references in attr */
    /* The node's outputs stand for its inputs: unless hooks replace the sum of an output's
     * gradients, each of them is passed on alone, so that sums have the bits that they would have
     * without the node. */
    bool apart;
    /* during a backward; a nested one sets it aside (lend.c) */
    uint64_t mark;
    bool passed; /* the gradient that comes is its input's already (kn_grad_through) */
    kn_tensor *dout[KN_MAX_OUT];
    struct kn_home {        /* where the gradient of an output is to lie (parts.c) */
        kn_tensor *place;   /* NULL: anywhere; a reference */
        int users;          /* edges to the output in this pass */
        int came;           /* slices of it whose gradients lie in place */
        bool sliced, uncut; /* its users are slices, each element once; they aren't */
        kn_node *cut;       /* its first slice in this pass; each has the next_cut */
    } home[KN_MAX_OUT];
    kn_node *next_cut;
    kn_tensor *whole; /* of a view: its input's place, in which those of its outputs lie */
    bool has_grad, bare, scaled; /* the last two: by what its gradients were scaled (scale.c) */
    bool leads; /* to a gradient that is wanted; else its own is caught, and it doesn't run */
    bool lent;  /* a pass around this one goes on with the node, and needs its saved tensors */
    struct kn_part {
        kn_tensor *grad; /* a reference */
        int out;
    } * part; /* of a node apart: its outputs' gradients in their order */
    int64_t parts, part_room;
};

kn_node *kn_node_new(const kn_op *op, int nin, int nout);
void kn_node_unref(kn_node *n);
/* Saves t for backward, with its version: as a bare view, because the edges hold the graph. In a
 * call that recomputes s only gets its place in the call's record. s must stay where it is. */
bool kn_save(kn_saved *s, const kn_tensor *t);
bool kn_save_bare(kn_saved *s, const kn_tensor *t); /* that view, without a record */
void kn_saved_drop(kn_saved *s);
void kn_node_free_saved(kn_node *n); /* lets go of saved tensors; sets freed */
void kn_node_free_again(kn_node *n); /* of those that a replay computes again */
/* *t, which was saved: again the output of node, or the leaf that it was a view of. NULL stays. */
bool kn_with_graph(kn_tensor **t, kn_node *node, int out, kn_tensor *leaf);
char *kn_spec_describe(const kn_spec *s, char *text, size_t size); /* "f32[2,3]"; returns text */
void kn_node_drop_parts(kn_node *n);
void kn_node_drop_places(kn_node *n);                     /* home and whole, with their counts */
void kn_node_set_output(kn_node *n, int i, kn_tensor *t); /* t becomes output i of n */
bool kn_node_set_input(kn_node *n, int i, kn_tensor *t);

/* The part of the last backward in an accumulated gradient: if that backward fails, it must go. */
typedef enum kn_accum {
    KN_ACCUM_SETTLED = 0,
    KN_ACCUM_BEGUN,   /* all that is there is the backward's */
    KN_ACCUM_GROWN,   /* the backward added to earlier ones */
    KN_ACCUM_SPOILED, /* it did, and failed: the two can't be separated */
} kn_accum;
/* The reason in an error message: the gradient of "w" can't be used: ... */
#define KN_SPOILED_GRAD                                                                            \
    "a part is of a backward that failed after it had begun to add to those before it; drop them " \
    "(kn_zero_grad) and run their micro-batches again"

/* A leaf's gradient. Without a destination: fresh is allocated, then becomes or is added to grad.
 * With one (fsdp): contributions go to dest(); grad stays NULL and the group's owner takes over. */
struct kn_leaf {
    kn_tensor *tensor; /* back pointer */
    uint64_t id;       /* no other leaf's, ever */
    kn_tensor *grad;   /* accumulated; owned */
    kn_tensor *fresh;  /* gradient of the running backward; owned */
    kn_accum accum;    /* of grad */
    int64_t pending;   /* contributions still to come in the running backward */
    kn_tensor *(*dest)(void *arg, kn_tensor *leaf); /* borrowed tensor of the leaf's shape */
    void *dest_arg;
    /* Drops the contents of dest; true where there were any. */
    bool (*clear)(void *dest_arg, kn_tensor *leaf);
    bool filled;      /* dest holds contributions of the running backward */
    kn_group *group;  /* borrowed; the group that waits for this leaf, or NULL */
    kn_passes passes; /* whose gradients are summed in grad (dest: where it leads counts them) */
    int64_t consumed; /* the newest backward when a step last consumed the gradient */
    kn_hook_entry *hooks; /* on the complete fresh gradient, and after it was accumulated */
    struct kn_rows *rows; /* rows.h: its gradient stays rows there; owned; NULL: it doesn't */
};

/* A set of leaves and module calls whose backward is done together (a unit of fsdp). complete runs
 * when the last reachable node of its module's calls has run and the last contribution to its
 * leaves has arrived. Calls on the tape hold references. */
struct kn_group {
    int refs;
    int64_t pending;
    bool active;                 /* seen in the running backward */
    void (*complete)(void *arg); /* NULL: arg is gone */
    /* Optional: a collective on a tensor is about to run, behind those of the group's owner that
     * belong to later nodes. False with an error. */
    bool (*before_collective)(void *arg);
    void *arg;
};
kn_group *kn_group_new(void (*complete)(void *arg), void *arg);
kn_group *kn_group_ref(kn_group *g); /* g may be NULL, here and below */
void kn_group_unref(kn_group *g);
void kn_group_end(kn_group *g); /* its arg goes; drops the caller's reference */

/* Something (a module) that its calls on the tape may outlive. */
typedef struct kn_life {
    int refs;
    uint64_t id;
    void *of; /* NULL: it was freed */
} kn_life;
kn_life *kn_life_new(void *of);
kn_life *kn_life_ref(kn_life *l); /* l may be NULL, here and below */
void kn_life_unref(kn_life *l);
void kn_life_end(kn_life *l); /* of goes; drops the caller's reference */

/* A module call. Nodes made inside point to it. */
struct kn_frame {
    int refs;
    kn_frame *parent; /* a reference */
    kn_life *life;    /* of its module; a reference, or NULL */
    const char *path; /* dotted; owned */
    kn_group *group;  /* of the module's unit, or NULL; a reference */
    void (*pre_backward)(void *module, kn_frame *f);
    void (*post_backward)(void *module, kn_frame *f);
    uint64_t key;             /* random key of this call (architecture, idea 7) */
    uint32_t calls;           /* calls made inside so far */
    uint64_t *count;          /* of an outermost call: what counts it, else NULL */
    uint64_t count_before;    /* the count before it */
    uint32_t draws;           /* draws made inside so far */
    bool drew;                /* it, or a call inside */
    const kn_rng_key *rng;    /* in a replay: seed and step of its forward; borrowed */
    bool recorded, hooked;    /* it recomputes; its module had hooks when it began */
    struct kn_record *record; /* record.h; borrowed, NULL: nothing of it was saved */
    kn_group **inside;        /* of a call that recomputes: groups of what its forward used */
    int64_t insides, inside_room;
    struct kn_call_grads *grads; /* nn/hooks.c; NULL: no hook looks at gradients */
    /* during a backward; a nested one sets it aside (lend.c) */
    uint64_t mark;
    int64_t pending;
    bool fired, replayed;
    bool holds; /* the groups inside wait for its replay */
};

/* Around a call of user's code, which may call again; false with an error where calls are nested
 * too deep: one without an end would overflow the stack. name: of the module or function. */
bool kn_nest_begin(const char *name);
void kn_nest_end(void);
/* Enters a call: becomes the context's frame. name is the module's own name (last part of the
 * path). */
kn_frame *kn_frame_enter(kn_life *life, const char *path, const char *name);
/* As enter, with the key of an earlier call (recompute). */
kn_frame *kn_frame_reenter(kn_life *life, const char *path, uint64_t key);
static inline void *kn_frame_module(const kn_frame *f) /* NULL: there is none (any more) */
{
    return f && f->life ? f->life->of : NULL;
}
void kn_frame_leave(kn_frame *f); /* drops the caller's reference */
void kn_frame_unref(kn_frame *f);
/* A step of the optimizer whose *seen is given was taken: counts the step on (kn_get_step) unless
 * another one did since this one's last. */
void kn_step_taken(int64_t *seen);
int64_t kn_steps_seen(void); /* the first value of *seen */
/* Stream id for the next draw of the running module call. */
uint64_t kn_draw_stream(void);
/* Seed of this step's draws: a hash of the run's seed and the step. */
uint64_t kn_draw_seed(void);
/* Where a kernel on d finds the seed of a draw: NULL where it may take the value itself, which is
 * always but in a recorded step; there each replay writes the seeds of its own step (seeds.c). *ok
 * becomes false with an error where a recording can't have the draw: its forward was before. */
const uint64_t *kn_seed_place(kn_device d, uint64_t seed, bool *ok);

/* The pass number of the running (outermost) backward, 0 outside. */
uint64_t kn_backward_pass(void);
/* The number of the running backward that adds to gradients, those in it included: more than that
 * of any before; 0: none runs. The number of the newest one so far. */
int64_t kn_backward_number(void);
int64_t kn_newest_backward(void);
static inline bool kn_in_backward(void)
{
    return kn_context_get()->engine != NULL;
}
bool kn_in_grad_of(void); /* the running pass catches gradients, and leaves get none */
/* The running backward replays r, whose places are emptied when it ends; the groups inside of f
 * wait for its replay no more (record.h). False with an error. */
bool kn_engine_fills(struct kn_record *r);
bool kn_engine_release(kn_frame *f);
bool kn_grad_copy(kn_tensor *dst, const kn_tensor *src);
kn_hook kn_hook_next(void); /* a number that no hook has had */
bool kn_has_shape(const kn_tensor *t, int ndim, const int64_t *shape);
/* Ends the scope of a composition: y, its result, goes on. */
static inline kn_tensor *kn_scope_result(kn_scope s, kn_tensor *y)
{
    kn_scope_end_except(s, &y, 1);
    return y;
}
/* In a backward: once it is over, ended(arg) runs, or, if it failed or one of these did,
 * failed(arg), which must not use devices: an error stands. Either may be NULL. */
bool kn_on_backward(void (*ended)(void *arg), void (*failed)(void *arg), void *arg);
/* Memory order for results computed from t (kn_tensor_new's stride_order): channels-last if t is,
 * else NULL, row-major. */
const int *kn_order_of(const kn_tensor *t);
/* The leaf record of t, made when needed. NULL with an error. */
kn_leaf *kn_leaf_of(kn_tensor *t);
/* module, with the user's function that is running in it, if any: "mlp.act, forward of 'swish'".
 * Valid until the thread's next call. */
const char *kn_function_path(const kn_context *c, const char *module);
void kn_autograd_setup(void); /* installs the hooks of tensor/ and kernels/; idempotent */

#endif
