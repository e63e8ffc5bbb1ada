/* state/dict.h: state dicts: the parameters and buffers of a module, and what an optimizer and
 * other objects keep, as a dictionary in host memory: tensors, numbers and texts by name.
 *
 *     kn_state *s = kn_state_dict(&net, .prefix = "model.");          // every rank calls
 *     kn_state_merge(s, kn_optim_state_dict(opt, .prefix = "optim."));
 *     kn_state_put(s, .loader = data, .random = true);
 *     if (kn_rank(kn_world()) == 0)
 *         kn_state_save(s, "run.safetensors");
 *     kn_state_free(s);
 *
 *     kn_state *s = kn_state_open("run.safetensors");                 // on any number of ranks
 *     kn_load_state_dict(&net, s, .prefix = "model.");
 *     kn_load_optim_state_dict(opt, s, .prefix = "optim.");
 *     kn_state_get(s, .loader = data, .random = true);
 *
 * Names and values don't depend on the number of ranks, strategy, layout, device or offload, nor on
 * whether anything is wrapped. A parameter that several modules share comes once, under its first
 * name; a load takes any of its names. A module's names begin below it; an optimizer's at the root
 * of the tree, so that the states of optimizers over parts of a tree make up one dictionary:
 *
 *   h.0.attn.weight              a parameter or buffer
 *   h.0.attn.weight.exp_avg      the optimizer's state of it (kn_optim_state_name_of)
 *   h.0.attn.weight.step         steps taken; .lr, .lr_mul, .weight_decay: as its group has them;
 *                                .beta1 and the like: constants of the method
 *
 * A load that fails changes nothing on any rank, but where a file can't be read to its end. */
#ifndef KNAP_STATE_DICT_H
#define KNAP_STATE_DICT_H

#include "data/loader.h"
#include "fsdp/ema.h"
#include "optim/optim.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_state kn_state;

typedef enum kn_state_kind {
    KN_STATE_DEFAULT = 0, /* what kn_state_dict_type set, else KN_STATE_FULL */
    KN_STATE_FULL,        /* whole tensors on every rank. Collective; buffers are rank 0's */
    /* This rank's part of each tensor, and its own buffers: nothing is sent. Loaded on the ranks
     * that took it, with any strategy and layout; nothing is sent where these are the same. Other
     * ranks load what kn_state_gather makes of it. */
    KN_STATE_SHARDED,
    /* This rank's flat part of each unit as it lies in memory, "<unit>._flat_param", with padding
     * (FSDP1's local state dict); else as sharded. Nothing is sent. Only for the same sharding. */
    KN_STATE_LOCAL,
    KN_STATE_KINDS
} kn_state_kind;

/* ---- taking ---------------------------------------------------------------------------------- */

typedef struct kn_state_dict_options {
    KN_BEGIN_OPTIONS;
    kn_state_kind kind;
    bool rank0_only;    /* full: the other ranks get an empty dictionary */
    const char *prefix; /* before each name */
    /* Patterns of names ("*.bias, head.*"; fnmatch) of the parameters and buffers to take, with an
     * optimizer's state of them, and of those to leave out; NULL: all, none. */
    const char *only, *except;
    kn_dtype dtype;    /* of float tensors; default: that of the masters */
    const kn_ema *ema; /* module: averages in place of the parameters that have one */
    kn_comm *comm;     /* ranks that hold the same; NULL: those of the units, else this one alone */
} kn_state_dict_options;
/* The state of module, any struct that begins with a kn_module, or of an optimizer; between steps.
 * A full one takes as many bytes as the whole tensors (KN_MEM_STATE) on the ranks that get it, and
 * on the others as many as the largest. The caller frees the result; NULL with an error. */
KN_API kn_state *kn_state_dict_(void *module, kn_state_dict_options o);
#define kn_state_dict(module, ...)                                                                 \
    kn_state_dict_(module, KN_OPTIONS(kn_state_dict_options, __VA_ARGS__))
KN_API kn_state *kn_optim_state_dict_(const kn_optim *o, kn_state_dict_options options);
#define kn_optim_state_dict(optim, ...)                                                            \
    kn_optim_state_dict_(optim, KN_OPTIONS(kn_state_dict_options, __VA_ARGS__))

/* A full state from the parts of sharded ones, which ranks hold in memory, for another number of
 * ranks, or for a program that goes on after ranks have left or come:
 *
 *     kn_state *whole = kn_state_gather(part, .comm = old, .rank0_only = true);
 *     kn_load_state_dict(&net, whole, .from_rank0 = true);        // net is sharded over others
 *
 * Together the ranks of .comm hold every element: they are those that took the state, or one
 * replica of a hybrid mesh; others give NULL or an empty state. Values and buffers are those of the
 * first rank that has any. A state of KN_STATE_LOCAL only goes back where it was. It takes memory
 * for the whole tensors on the ranks that get them, and for the largest part. Collective. The
 * caller frees the result, which is empty on the other ranks; NULL with an error. */
typedef struct kn_state_gather_options {
    KN_BEGIN_OPTIONS;
    kn_comm *comm;   /* NULL: kn_world() */
    bool rank0_only; /* of .comm */
} kn_state_gather_options;
KN_API kn_state *kn_state_gather_(const kn_state *s, kn_state_gather_options o);
#define kn_state_gather(s, ...)                                                                    \
    kn_state_gather_(s, KN_OPTIONS(kn_state_gather_options, __VA_ARGS__))

/* ---- loading --------------------------------------------------------------------------------- */

/* Names that didn't fit: lists that end with NULL; NULL where there are none. */
typedef struct kn_load_report {
    char **missing;    /* wanted, but not in the dictionary */
    char **unexpected; /* tensors with the prefix that nothing wants */
    char **mismatched; /* of another shape, or floats where none are wanted, or reversely */
} kn_load_report;
KN_API void kn_load_report_free(kn_load_report *r); /* NULL is fine */

/* Another name for tensors of a dictionary or file: what matches .from, in which each '*' is any
 * text, is looked for as .to, in which the k-th '*' is that of the k-th in .from. NULL: it is left
 * out. */
typedef struct kn_rename {
    const char *from, *to;
} kn_rename;

/* The part that a load takes, among the options of kn_load_state_dict and kn_checkpoint_load.
 * prefix: before the names below module; NULL: state dicts have nothing there, a checkpoint has the
 * names from the root of module's tree. Other names are left alone.
 *
 * only, except: patterns of names below module, as of kn_state_dict: the others stay as they are.
 *
 * renames: the first that matches counts; before .prefix. rename, in its place: the name as which
 * this one is looked for, in memory of the program's; NULL: it is left out. The same on all ranks.
 *
 * not_strict: loads the names that fit; without a .report at least one must. Else one that doesn't
 * is an error. skip_mismatched: what has another shape, or isn't of floats where floats are wanted,
 * or reversely, stays as it is; else that is an error, also with .not_strict. report is filled in,
 * also where the load fails; kn_load_report_free.
 *
 * keep_options: an optimizer's rate, groups and constants stay as they are. Its steps are loaded
 * where all of its parameters have as many. */
#define KN_LOAD_OPTIONS                                                                            \
    const char *prefix;                                                                            \
    const char *only, *except;                                                                     \
    const kn_rename *renames; /* [rename_count] */                                                 \
    int rename_count;                                                                              \
    const char *(*rename)(const char *name, void *arg);                                            \
    void *rename_arg;                                                                              \
    bool not_strict, skip_mismatched;                                                              \
    kn_load_report *report;                                                                        \
    bool keep_options

typedef struct kn_load_state_dict_options {
    KN_BEGIN_OPTIONS;
    KN_LOAD_OPTIONS;
    /* Rank 0's whole tensors are dealt out, one at a time; the others give NULL as the state. */
    bool from_rank0;
    kn_ema *ema;   /* module: fills the averages, and the parameters without one */
    kn_comm *comm; /* as of kn_state_dict */
} kn_load_state_dict_options;
/* Fills module or optim, made with any sharding, from s, which stays the caller's. Floats are
 * converted to the dtype of the masters. A frozen parameter's state is loaded where s has it. Each
 * rank cuts its part of whole tensors. An optimizer for a part of a tree takes the names of that
 * part. Ranks agree before anything is written, so every rank calls it. */
KN_API bool kn_load_state_dict_(void *module, const kn_state *s, kn_load_state_dict_options o);
#define kn_load_state_dict(module, s, ...)                                                         \
    kn_load_state_dict_(module, s, KN_OPTIONS(kn_load_state_dict_options, __VA_ARGS__))
KN_API bool kn_load_optim_state_dict_(kn_optim *optim, const kn_state *s,
                                      kn_load_state_dict_options o);
#define kn_load_optim_state_dict(optim, s, ...)                                                    \
    kn_load_optim_state_dict_(optim, s, KN_OPTIONS(kn_load_state_dict_options, __VA_ARGS__))

/* ---- a kind for a scope ---------------------------------------------------------------------- */

typedef struct kn_state_dict_type_options {
    KN_BEGIN_OPTIONS;
    kn_state_kind optim_kind; /* default: kind */
    bool rank0_only;          /* of full ones */
    bool optim_rank0_only;
} kn_state_dict_type_options;
typedef struct kn_state_dict_scope {
    struct kn_state_scoped *type;
} kn_state_dict_scope;
/* From here to kn_state_dict_type_end: the kind, and with it .rank0_only, of the state dicts of the
 * modules at and below module, and of their optimizers, that give no kind of their own; on the
 * calling thread. The innermost scope that holds a module counts. */
KN_API kn_state_dict_scope kn_state_dict_type_(void *module, kn_state_kind kind,
                                               kn_state_dict_type_options o);
#define kn_state_dict_type(module, kind, ...)                                                      \
    kn_state_dict_type_(module, kind, KN_OPTIONS(kn_state_dict_type_options, __VA_ARGS__))
KN_API bool kn_state_dict_type_end(kn_state_dict_scope scope);

/* ---- other objects --------------------------------------------------------------------------- */

typedef struct kn_state_objects {
    KN_BEGIN_OPTIONS;
    const char *prefix;
    kn_scaler *scaler;     /* scaler.scale, scaler.good, scaler.skipped */
    kn_schedule *schedule; /* schedule.lr and its other numbers; put: only read */
    kn_ema *ema;           /* ema.updates; the averages: kn_state_dict(.ema) */
    kn_loader *loader;     /* loader.epoch and the rest of its position */
    bool random; /* random.seed, .step and .quiet (how many came with grad mode off), of which all
                  * draws are functions */
} kn_state_objects;
/* Puts their numbers into s, and sets the objects as s has them: all of them or, with an error,
 * none. Nothing is sent. */
KN_API bool kn_state_put_(kn_state *s, kn_state_objects o);
#define kn_state_put(s, ...) kn_state_put_(s, KN_OPTIONS(kn_state_objects, __VA_ARGS__))
KN_API bool kn_state_get_(const kn_state *s, kn_state_objects o);
#define kn_state_get(s, ...) kn_state_get_(s, KN_OPTIONS(kn_state_objects, __VA_ARGS__))

/* ---- the dictionary -------------------------------------------------------------------------- */

KN_API kn_state *kn_state_new(void);    /* empty; the caller frees it */
KN_API void kn_state_free(kn_state *s); /* NULL is fine */
KN_API int kn_state_count(const kn_state *s);
KN_API const char *kn_state_name(const kn_state *s, int i); /* in the order they came; borrowed */
KN_API bool kn_state_has(const kn_state *s, const char *name);
typedef enum kn_state_value {
    KN_STATE_NOTHING = 0, /* the name isn't there */
    KN_STATE_TENSOR,
    KN_STATE_INT,
    KN_STATE_NUMBER,
    KN_STATE_TEXT
} kn_state_value;
KN_API kn_state_value kn_state_type(const kn_state *s, const char *name);
/* Values. Set: a name that is there gets the new value; of tensors a copy. Reading what isn't
 * there, or is of another type, is an error and 0 or NULL. Borrowed. */
KN_API bool kn_state_set_int(kn_state *s, const char *name, int64_t value);
KN_API bool kn_state_set_number(kn_state *s, const char *name, double value);
KN_API bool kn_state_set_text(kn_state *s, const char *name, const char *value);
KN_API bool kn_state_set_tensor(kn_state *s, const char *name, const kn_tensor *value);
KN_API int64_t kn_state_int(const kn_state *s, const char *name);
KN_API double kn_state_number(const kn_state *s, const char *name); /* of an int, too */
KN_API const char *kn_state_text(const kn_state *s, const char *name);
/* On the CPU: whole, or of a sharded or local state this rank's part, 1-d. Of files it is read
 * here. */
KN_API kn_tensor *kn_state_tensor(const kn_state *s, const char *name);
KN_API bool kn_state_remove(kn_state *s, const char *name);
/* Moves all of other into s and frees other. A name in both with another value is an error; then
 * both stay as they are. */
KN_API bool kn_state_merge(kn_state *s, kn_state *other);

typedef enum kn_state_keys { KN_KEYS_DEFAULT = 0, KN_KEYS_NAME, KN_KEYS_INDEX } kn_state_keys;
/* Keys of an optimizer's state: "h.0.attn.weight.exp_avg" becomes "3.exp_avg" and back; 3 is the
 * parameter's number in kn_params(module). prefix (NULL: none) stays before both; names without it
 * stay. A key of no parameter is an error; then s stays as it is. */
KN_API bool kn_state_rekey(kn_state *s, void *module, kn_state_keys keys, const char *prefix);

/* One .safetensors file with all tensors and values, by this process alone: rank 0 has a full
 * state. An interrupted save leaves the old file whole. Of a sharded state path is a folder, made
 * if it isn't there, into which each rank writes files of its part; nothing is sent, so it works
 * after an error, too (docs/fsdp.md). kn_state_open opens them on any number of ranks once all are
 * there, and refuses parts of different steps. Buffers are rank 0's. */
KN_API bool kn_state_save(const kn_state *s, const char *path);
/* The same of any .safetensors file, PyTorch's and Hugging Face's too; of a folder of them, of
 * which model.safetensors.index.json says which belong together where it is there; or of such an
 * index. Reads headers only: a tensor's bytes are read when it is wanted, by a load only this
 * rank's part of them. The files stay as they are until then, and one thread at a time uses the
 * state. The caller frees the result; NULL with an error. */
KN_API kn_state *kn_state_open(const char *path);

#ifdef __cplusplus
}
#endif
#endif
