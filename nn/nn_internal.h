/* nn/nn_internal.h (private): the module record, and the interface through which fsdp/ takes over a
 * module's parameters. */
#ifndef KNAP_NN_INTERNAL_H
#define KNAP_NN_INTERNAL_H

#include "autograd/autograd_internal.h"
#include "nn/nn.h"

typedef struct kn_module_impl kn_module_impl;

/* The pieces of an optimizer's step, for a source that launches each as soon as its gradient is
 * ready. */
typedef struct kn_step_pieces {
    const kn_param *const *param;
    kn_opt_piece *piece; /* of param[i] */
    int count;
    /* Updates pieces on s (NULL: the compute stream of the device where masters lie). */
    bool (*launch)(void *arg, const kn_opt_piece *piece, int count, kn_stream *s);
    void *arg;
} kn_step_pieces;

struct kn_matrix_step;
/* Where a parameter's gradient is kept when not in its leaf. */
typedef struct kn_param_source {
    kn_tensor *(*grad)(const kn_param *p); /* this rank's part, 1-d; NULL: none */
    void (*clear)(const kn_param *p);
    /* Why a step can't use p's gradient yet, and what to do (the end of an error message); NULL: it
     * can. */
    const char *(*held_back)(const kn_param *p);
    bool (*waits)(const kn_param *p); /* gradients wait for a step, held back or not */
    /* Joins the backwards that are summed in p's gradient to *all, on all ranks alike once it is
     * reduced. False with an error. */
    bool (*passes)(const kn_param *p, kn_passes *all);
    /* What a backward's sum is divided by, and what most of the tree's are, alike on all ranks of a
     * norm (0: there is no such number); NULL: 1 for each rank has a gradient of its own. */
    double (*divisor)(const kn_param *p), (*step_divisor)(const kn_param *p);
    /* This and step are NULL without offload. Blocks until the host may read p's gradient and write
     * its master. */
    bool (*sync_host)(const kn_param *p);
    /* Launches all pieces, also those of other sources: each batch as soon as its gradients are
     * ready. */
    bool (*step)(const kn_step_pieces *s);
    bool (*matrices)(const struct kn_matrix_step *s); /* nn/matrices.h; NULL: whole on the rank */
    void (*written)(const kn_param *p);               /* the master */
    /* Of a table whose gradient stays rows: their numbers among the master's rows, i64 [U], whose
     * values grad gives; NULL: there is no gradient, or p is no such table. */
    kn_tensor *(*row_ids)(const kn_param *p);
    /* The master is rows of *run elements, *step apart in the parameter; NULL: it is one row. */
    void (*rows)(const kn_param *p, int64_t *run, int64_t *step);
} kn_param_source;

/* One parameter in a module that holds it. */
typedef struct kn_param_entry {
    char *name;
    kn_tensor *tensor; /* a reference */
    bool declared;     /* here; others share it */
    bool owner;        /* one entry a parameter in each tree (ties.c) */
    bool has_init;     /* init is known though it wasn't declared here */
    bool ignored;      /* by fsdp: .ignore named it */
    bool given;        /* it had values when fsdp claimed or ignored it */
    kn_initializer init;
    /* filled in by fsdp when a unit claims it; source NULL until then */
    const kn_param_source *source;
    void *unit;
    int unit_index;
    kn_tensor *master; /* borrowed from the unit */
    int64_t start;
    bool elsewhere;          /* another rank counts this part in norms */
    kn_memory *state_memory; /* of optimizer state; NULL: the device's pool */
} kn_param_entry;

typedef struct kn_buffer_entry {
    char *name;
    kn_tensor *tensor;
    bool declared; /* by kn_declare_buffer, with the initial values of init */
    bool not_saved;
    kn_initializer init;
} kn_buffer_entry;

/* Callbacks of fsdp on a module. in and out are NULL for a call without tensors (kn_enter). */
typedef struct kn_unit_hooks {
    /* True: the call begins, and post_forward must end it, even if an error stands. */
    bool (*pre_forward)(void *unit, kn_module_impl *m, kn_values *in);
    void (*post_forward)(void *unit, kn_values *out);
    bool (*converts)(const void *unit, const kn_tensor *x); /* it, or a result like it */
    void (*reach)(void *unit);                    /* backward comes to a call of its modules */
    void (*leave)(void *unit, kn_module_impl *m); /* m is being freed */
    kn_group *group;
    void *unit;
} kn_unit_hooks;

/* The record of a whole tree of modules (root.c). */
typedef struct kn_root {
    bool ties; /* a module of the tree, maybe one that left, shares a parameter */
    /* Set by fsdp; NULL: one rank. All-reduces sum[sums] by addition and *max by maximum over the
     * ranks of all units of top's tree; both lie in memory of device d. */
    bool (*scalar_reduce)(kn_module_impl *top, kn_device d, int64_t *sum, int sums, float *max);
    /* Whether this rank is the first of those: it counts the parameters outside units. */
    bool (*first)(kn_module_impl *top);
} kn_root;

/* First member of an object that a floor above keeps with a module; freed with the module. */
typedef struct kn_module_extra kn_module_extra;
struct kn_module_extra {
    void (*free)(kn_module_extra *self);
};

/* The function of a call; the other field is NULL. */
typedef struct kn_method {
    kn_forward1 f1;
    kn_forward_n fn;
} kn_method;

struct kn_module_impl {
    kn_module_impl *next_live; /* module.c */
    kn_module *self;
    kn_life *life; /* of this record, for its calls on the tape */
    kn_module_impl *parent;
    int at; /* its number among the parent's children */
    char *name, *path, *class_name;
    kn_method forward;
    kn_module **child;
    int children;
    kn_param_entry *param;
    int params;
    kn_buffer_entry *buffer;
    int buffers;
    struct kn_hooks_entry *hook; /* hooks.c */
    int hooks;
    int hooks_running; /* depth; none is freed meanwhile */
    bool training, recompute;
    bool averaged;      /* its parameters hold averages (kn_ema_swap), which no step may change */
    kn_dtype dtype;     /* default of parameters declared here or below; 0: the parent's */
    kn_device device;   /* the same */
    bool is_list;       /* a list of modules, never called itself */
    bool running_stats; /* kn_running_stats declared its buffers */
    bool widens; /* computes bf16 and f16 inputs in f32, beside its f32 parameters, and rounds
                       * once: casts around a call would change no bit */
    /* kn_module_replace: the module in this one's place, which calls of this one run, and back */
    kn_module_impl *replaced_by, *stands_for;
    const void *place; /* the struct by which forwards call it, maybe of a freed one; NULL: self */
    void *data;        /* a layer's own settings; freed with the module */
    size_t data_size;
    kn_unit_hooks *unit;       /* owned; NULL without fsdp */
    kn_root *root;             /* owned by the module on top; NULL in all others (kn_root_of) */
    int optims;                /* optimizers that were made for it */
    kn_module_extra *clipping; /* optim/clip.c; owned; NULL: gradients were never measured */
    kn_param *list;            /* cache of kn_params(); names are owned by it */
    int list_count;
    bool list_valid;
    int64_t changes; /* of the parameters and modules at and below it, so far */
};

kn_module_impl *kn_impl(const void *m, const char *what); /* m begins with kn_module, or an error */
const char *kn_module_shown(const kn_module_impl *m); /* in messages: its path, else its class */
kn_module_impl *kn_impl_root(kn_module_impl *m);      /* the module on top of m's tree */
/* A walk over top and what is below it, modules before those below them; the tree must not change
 * meanwhile:
 *     for (kn_module_impl *m = top; m; m = kn_impl_next(m, top)) */
kn_module_impl *kn_impl_next(const kn_module_impl *m, const kn_module_impl *top);
/* The same, modules after those below them, as kn_apply_modules comes to them:
 *     for (kn_module_impl *m = kn_impl_lowest(top); m; m = kn_impl_next_up(m, top)) */
kn_module_impl *kn_impl_lowest(kn_module_impl *top);
kn_module_impl *kn_impl_next_up(const kn_module_impl *m, const kn_module_impl *top);
kn_root *kn_root_of(const kn_module_impl *m); /* of m's tree; never NULL */
/* Makes the record of m's own tree; frees it; merges it into the record of the tree that m was
 * added to. */
bool kn_root_begin(kn_module_impl *m);
void kn_root_end(kn_module_impl *m);
void kn_root_merge(kn_module_impl *m);
/* False with an error (of what) where one step couldn't treat the gradients of m and to's tree. */
bool kn_root_may_merge(kn_module_impl *to, kn_module_impl *m, const char *what);
/* Sets the paths of m's subtree by its parent and its name. */
bool kn_module_set_paths(kn_module_impl *top);
/* Walks over a comma-separated list of names: *name[*length] without blanks around it; false at the
 * end. */
bool kn_next_name(const char **list, const char **name, size_t *length);
/* "a*, b" has a pattern (fnmatch) that matches name. False with an error where memory is out. */
bool kn_matched(const char *list, const char *name);
/* The module at path[length] below m; NULL without an error if there is none. */
kn_module_impl *kn_module_at(kn_module_impl *m, const char *path, size_t length);
/* Full dotted name of an entry of m, owned by the caller. */
char *kn_param_path(const kn_module_impl *m, const kn_param_entry *p);
/* The module that holds the dotted *name, relative to module; *name becomes its last part. NULL
 * with an error. */
kn_module_impl *kn_module_holding(const void *module, const char **name, const char *what);
/* Invalidates the parameter lists of the modules above and below m. */
void kn_params_changed(kn_module_impl *m);
void kn_params_free(kn_module_impl *m); /* drops the list */
/* A gradient of a module at or below it waits for a step, held back or not. */
bool kn_grads_wait(void *module);
/* Joins the backwards that are summed in gradients of the module. */
bool kn_grads_passes(void *module, kn_passes *all);
/* Dtype and device of a parameter or buffer declared in m: the given one, else the default of the
 * nearest module from m up (kn_module_defaults). */
kn_dtype kn_dtype_in(const kn_module_impl *m, kn_dtype given);
kn_device kn_device_in(const kn_module_impl *m, kn_device given);
/* True if t was declared on a device with bytes but never filled: it has no bytes yet. */
bool kn_param_unfilled(const kn_tensor *t);
/* Allocates m's i-th parameter and fills it with its initial values. */
bool kn_param_fill_whole(const kn_module_impl *m, int i, uint64_t seed);
/* An optimizer's tensor for p: as many elements as p's master, of its dtype and on its device.
 * Owned by the caller; not filled. NULL with an error. */
kn_tensor *kn_param_state_new(const kn_param *p);
/* Checks an initializer; one by fans becomes the normal or uniform one of shape. */
bool kn_init_resolve(kn_initializer *i, const char *name, int ndim, const int64_t *shape);
/* Fills dst (this rank's part: elements [start, start + count) of the parameter) with its initial
 * values. */
bool kn_init_fill(const kn_initializer *init, uint64_t seed, const char *name, kn_tensor *dst,
                  int64_t start);
/* Moves b to device. Fills a declared buffer with its initial values if it was on meta, or if
 * again. The handle stays. */
bool kn_buffer_settle(kn_buffer_entry *b, kn_device device, uint64_t seed, bool again);
/* name, dotted below m, maybe with ".rank<K>" behind it, is a buffer that isn't saved. */
bool kn_is_unsaved_buffer(kn_module_impl *m, const char *name);
/* Makes a float buffer compute in dtype and keeps its values in full precision beside it. The
 * handle stays, also in other modules that hold it. */
bool kn_buffer_cast(kn_tensor *t, kn_dtype dtype);
/* Undoes it: the buffer has one dtype, in full precision. */
bool kn_buffer_uncast(kn_tensor *t);
/* Makes the handle show the values in full precision, or those in the computing dtype, converted
 * where the others were written since. Calls nest: each true, also one that fails, has its false,
 * and the last false switches back. Does nothing for a buffer with one dtype. With an error
 * standing it only switches the handle. */
bool kn_buffer_show(kn_tensor *t, bool full);
/* batch_norm.c: m's buffers are of this rank's own batches; running_mean and so on are made. */
bool kn_buffers_are_own(const kn_module_impl *m);
bool kn_running_stats(void *layer, int64_t channels, kn_dtype dtype, kn_device device);
/* Gives an initialised layer a copy of settings[size] and adds it to parent, which may be NULL; on
 * an error frees it. */
bool kn_layer_place(void *m, kn_module *parent, const char *name, const void *settings,
                    size_t size);
/* The same, and initialises it first. */
bool kn_layer_begin(void *m, kn_module *parent, const char *name, kn_forward1 f,
                    const char *class_name, const void *settings, size_t size);
/* Whether a norm over so many channels can be; its weight and, where wanted, bias of zeros. */
bool kn_norm_fits(const char *class_name, const char *name, int64_t channels, double eps);
bool kn_norm_params(void *m, int64_t channels, kn_dtype dtype, kn_device device,
                    kn_initializer weight, bool bias);
kn_tensor *kn_layer_param(const kn_module *m, int i); /* its i-th parameter, or NULL */
kn_initializer kn_init_or(kn_initializer i, kn_initializer otherwise);

/* live.c. The beginning of what a user makes for a module and frees before or after it: averages,
 * optimizers. (What a module's calls on the tape refer to after it was freed is its kn_life; which
 * structs hold a module at all, module.c knows.) */
typedef struct kn_live {
    struct kn_live *next;   /* of all that live */
    kn_module_impl *module; /* NULL: it was freed */
} kn_live;
void kn_live_begin(kn_live *l, kn_module_impl *m);
/* For both: thing is a noun for l; l NULL: false alone. kn_live_end: l lived until now; else an
 * error. kn_lives: l lives, and so does its module; else an error that says which doesn't. */
bool kn_live_end(const kn_live *l, const char *thing, const char *what);
bool kn_is_live(const kn_live *l); /* without an error; l may be anything that was one */
bool kn_lives(const kn_live *l, const char *thing, const char *what);
void kn_live_module_dies(const kn_module_impl *m);

/* A call that recomputes; see nn/recompute.c. */
kn_values kn_recompute_call(kn_module_impl *m, kn_method method, kn_frame *frame, kn_values in,
                            const void *arg, size_t size);
/* Runs the hooks, and the method between them. */
kn_values kn_module_run(kn_module_impl *m, kn_method method, kn_values in, const void *arg);

#endif
