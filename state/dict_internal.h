/* state/dict_internal.h (private): items of state dicts, for the files of this folder. */
#ifndef KNAP_STATE_DICT_INTERNAL_H
#define KNAP_STATE_DICT_INTERNAL_H

#include "state/dict.h"
#include <jansson.h>
#include "optim/optim_internal.h"
#include "state/entries.h"
#include "state/pieces.h"
#include "tensor/names.h"

typedef struct kn_state_item {
    char *name; /* owned; first, for the table */
    kn_state_value type;
    /* a tensor */
    kn_tensor *tensor; /* owned; whole, or this rank's part, 1-d; NULL: it lies elsewhere */
    kn_pieces *files;  /* a reference: there, or nowhere else, as tensor number piece */
    int piece;
    kn_dtype dtype;
    int ndim;
    int64_t shape[KN_MAX_DIMS]; /* of the whole */
    /* a part of it; shards 0: it is whole */
    kn_interval part;
    int ranks, rank, shards; /* of the ranks that took it; this one; how many parts there are */
    bool saver;              /* of the ranks that hold it, this one saves it (KN_STATE_SHARDED) */
    uint64_t split;          /* a hash of all parts, the same on all ranks */
    bool flat;               /* a unit's flat part (KN_STATE_LOCAL): split is that of its layout */
    /* another value */
    int64_t whole_number;
    double number;
    char *text; /* owned */
    int origin; /* in a list of names (kn_loading): the number of the item that it stands for */
} kn_state_item;

struct kn_state {
    kn_state_item *list;
    int count;
    int64_t room;
    kn_name_table table; /* of the list */
};

/* ---- dict.c ---------------------------------------------------------------------------------- */

/* NULL, without an error, where there is none. */
kn_state_item *kn_state_find(const kn_state *s, const char *name);
/* Adds an item of that name, prefix + name, or empties the one that is there; NULL with an error.
 * It stays at its place until the next one is added. */
kn_state_item *kn_state_add(kn_state *s, const char *prefix, const char *name);
/* The same as a tensor, whole or a part of it, which s takes; freed where memory is out. */
kn_state_item *kn_state_add_tensor(kn_state *s, const char *prefix, const char *name,
                                   kn_dtype dtype, int ndim, const int64_t *shape, kn_tensor *t);
/* Sets a whole number, or with KN_STATE_NUMBER another one, by its joined name; finds an item: NULL
 * where there is none, or with an error. */
bool kn_state_add_value(kn_state *s, const char *prefix, const char *name, const char *after,
                        kn_state_value type, int64_t whole, double number);
kn_state_item *kn_state_find_joined(const kn_state *s, const char *prefix, const char *name,
                                    const char *after);
/* The item's tensor, read from its files where it still lies there; NULL with an error. */
kn_tensor *kn_state_item_tensor(kn_state_item *i);
/* Adds the tensors of p, which stay in their files until they are wanted. */
bool kn_state_add_pieces(kn_state *s, kn_pieces *p);
/* prefix + name + (after: "." + after) in memory of the caller's; NULL with an error. */
char *kn_state_join(const char *prefix, const char *name, const char *after);
/* A tensor's bytes for s: row-major host memory; not filled. NULL with an error. */
kn_tensor *kn_state_tensor_new(kn_dtype dtype, int ndim, const int64_t *shape);
/* to[n] of one dtype = from[n] of another, both in host memory. Takes no memory. */
bool kn_state_convert(void *to, kn_dtype to_dtype, const void *from, kn_dtype from_dtype,
                      int64_t n);
/* The name without prefix (NULL: none); NULL where it has another beginning. */
const char *kn_state_below(const char *name, const char *prefix);

/* ---- scope.c --------------------------------------------------------------------------------- */

/* The part of m that a call with these options takes: sets *kind (never the default) and
 * *rank0_only; false with an error where they don't fit. */
bool kn_state_kind_for(const kn_module_impl *m, const kn_state_dict_options *o, bool optim,
                       kn_state_kind *kind, bool *rank0_only, const char *what);

/* ---- local.c --------------------------------------------------------------------------------- */

/* Units as they lie in memory: the flat part of each bucket at and below e's module, with its
 * padding. */
bool kn_entries_add_flat(kn_entries *e);
/* A hash of how e is cut, over all its parts; of a flat one, of its layout. */
uint64_t kn_entry_split(const kn_entry *e);

/* ---- gather.c -------------------------------------------------------------------------------- */

/* Whole tensors from what ranks hold of them: set the first fields, begin, take items, end. */
typedef struct kn_gathering {
    const char *what; /* in errors */
    kn_comm *comm;
    const kn_state *s;      /* this rank's; NULL: it has none */
    const kn_state *values; /* has the tensors of s, each at its .origin; NULL: s has them */
    const bool *only;       /* [s->count]: what goes along; NULL: all */
    bool here;              /* this rank gets them */
    kn_state *header;       /* names, shapes and values of the first rank that has any */
    int ranks;
    struct kn_holding *held; /* [ranks * header's count] */
    char *sent;              /* room for a part */
} kn_gathering;
/* All ranks learn who holds what; an error where elements are missing. Collective. */
bool kn_gathering_begin(kn_gathering *g);
/* Fills whole with tensor number item of the header. Collective. */
bool kn_gathering_item(kn_gathering *g, int item, void *whole);
void kn_gathering_end(kn_gathering *g); /* of one that wasn't begun, too */

/* ---- optim_values.c -------------------------------------------------------------------------- */

typedef struct kn_names {
    char **list; /* ends with NULL; owned */
    int count;
    int64_t room;
} kn_names;
bool kn_names_add(kn_names *n, const char *name);
void kn_names_free(kn_names *n);
/* The numbers of an optimizer's dictionary, of each parameter that all wants and that is no frozen
 * group's: "<parameter>.step" (0: no step needed a state of it yet), ".lr", ".lr_mul",
 * ".weight_decay" and the method's constants. */
bool kn_optim_values_take(kn_state *s, const kn_optim *o, const char *prefix,
                          const kn_entries *all);
typedef struct kn_optim_values {
    int64_t steps;                 /* below 0: unknown */
    double lr;                     /* below 0: unknown */
    double *lr_mul, *weight_decay; /* [parameters]; owned */
    double constant[KN_OPTIM_CONSTANTS];
    bool has[KN_OPTIM_CONSTANTS];
} kn_optim_values;
/* Reads them; names that aren't there of a trainable parameter come into missing. False with an
 * error where they contradict each other. keep: only the steps, where all parameters have as
 * many. */
bool kn_optim_values_read(kn_optim_values *v, const kn_state *s, const kn_optim *o,
                          const char *prefix, const kn_entries *all, bool keep, kn_names *missing);
bool kn_optim_values_set(const kn_optim_values *v, kn_optim *o);
void kn_optim_values_free(kn_optim_values *v);
/* Whether s says that no step needed a state yet of param, number i of o. */
bool kn_optim_values_unstepped(const kn_state *s, const char *prefix, const char *param,
                               const kn_optim *o, int i);

/* ---- share.c --------------------------------------------------------------------------------- */

/* Every rank gets root's names, shapes and values, without the bytes of tensors. Collective. The
 * caller frees it. */
kn_state *kn_state_header(const kn_state *s, kn_comm *comm, int root);
/* The values of s as a JSON object, NULL with an error; and back into s. */
json_t *kn_state_values_json(const kn_state *s);
char *kn_state_values_text(const kn_state *s); /* the caller frees it */
bool kn_state_values_parse(kn_state *s, const char *text, size_t size, const char *where);
/* The same of an object that was parsed. */
bool kn_state_values_add(kn_state *s, json_t *object, const char *where);

#endif
