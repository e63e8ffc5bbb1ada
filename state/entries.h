/* state/entries.h (private): one list of tensors says of what a state consists. State dicts and
 * checkpoints run over it.
 *
 *   kn_entries e = { 0 };
 *   ok = kn_entries_begin(&e, &net, comm) && kn_entries_add_model(&e, ema) &&
 *        kn_entries_add_optim(&e, opt) && ...;
 *   ok = kn_entries_end(&e) && ok;
 *
 * Every rank has the same names in the same order, up to those of groups (.plain); the part is its
 * own. Nothing here communicates except where "Collective" says so. */
#ifndef KNAP_STATE_ENTRIES_H
#define KNAP_STATE_ENTRIES_H

#include "fsdp/ema.h"
#include "fsdp/unit.h"
#include "optim/optim.h"

typedef enum kn_entry_kind {
    KN_ENTRY_PARAM = 0, /* "<parameter>": what it trains, or its average */
    KN_ENTRY_TRAINED,   /* "<parameter>.trained": what it trains, beside averages */
    KN_ENTRY_STATE,     /* "<parameter>.<state>": a state of the optimizer */
    KN_ENTRY_BUFFER,    /* "<buffer>", or "<buffer>.rank<K>" where ranks differ */
    KN_ENTRY_FLAT,      /* "<unit>._flat_param": a unit's part as it lies in memory */
} kn_entry_kind;

/* One tensor of a state. */
typedef struct kn_entry {
    const char *name; /* canonical: from the root of the module's tree; owned by the list */
    /* Where groups of ranks have a parameter each under one name, .name ends with this rank's
     * (".group0of2"): the length without it. 0 else. */
    size_t plain;
    kn_entry_kind kind;
    kn_dtype dtype; /* of tensor */
    int ndim;
    int64_t shape[KN_MAX_DIMS]; /* of the whole */
    kn_interval part;           /* the elements of the whole that this rank holds; .at is 0 */
    /* Their values: contiguous, borrowed from the module, optimizer or averages. A buffer: whole,
     * in any memory order; NULL where it is another rank's. */
    kn_tensor *tensor;
    bool saver;              /* of the ranks that hold part, this one writes it (kn_entries_deal) */
    const kn_tensor *handle; /* the parameter's or buffer's, by which its other names are known */
    kn_optim *optim;   /* KN_ENTRY_STATE: whose; with .param it makes tensor where that is NULL */
    int param;         /* its number among the optimizer's */
    const char *state; /* which: kn_optim_state_name_of */
    int rank;          /* of a buffer: whose; 0 else */
    bool differs;      /* a buffer that isn't the same on all ranks (kn_entries_compare_buffers) */
    kn_bucket *bucket; /* that cuts it; NULL: it is whole on every rank */
    int index;         /* in bucket; below 0: it is all of it */
    int64_t row;       /* not 0: a state of one element for each row of so many of a table */
} kn_entry;

typedef struct kn_entries {
    kn_entry *list;
    int count;
    int64_t room;
    kn_module *module;
    kn_comm *comm; /* the ranks that hold module; NULL: this process alone */
    size_t below;  /* what names lose to begin below module */
    /* Patterns (kn_matched) of the parameters and buffers to list, and of those to leave out, by
     * their names below; NULL: all, none. */
    const char *only, *except;
    const char *label; /* before the names of what is added next, with a '/'; NULL: nothing */
    bool declared;     /* the model needn't be made: names, shapes and dtypes alone count */
    bool outside;      /* parameters of units are left out: they are listed as they lie in memory */
} kn_entries;

/* The ranks that hold module: those of its units, else otherwise. */
kn_comm *kn_entries_comm(void *module, kn_comm *otherwise);
/* Begins an empty list for module, any struct that begins with a kn_module. comm NULL: the ranks of
 * its units, else this process alone. Until kn_entries_end buffers are in full precision, and no
 * forward may run. The caller ends the list after an error too. */
bool kn_entries_begin(kn_entries *e, void *module, kn_comm *comm);
bool kn_entries_end(kn_entries *e);
/* Adds e, named "before.after", or "before" where after is NULL. */
bool kn_entries_add(kn_entries *all, kn_entry e, const char *before, const char *after);
/* Whether .only and .except want a parameter or buffer of that name from the root of the tree.
 * False with an error where memory is out. */
bool kn_entries_want(const kn_entries *e, const char *name);

/* The parameters (shared ones once, under their first name at or below the module) and then the
 * buffers. With ema, which was made for the module, the averages of those parameters that have
 * one. */
bool kn_entries_add_model(kn_entries *e, const kn_ema *ema);
/* The states of optim's parameters: of trainable ones also where no step needed them yet, of frozen
 * ones where there are some. optim was made for the module or for one at or below it, or around
 * it. */
bool kn_entries_add_optim(kn_entries *e, const kn_optim *optim);
/* All states that optim's parameters can have, to be loaded: .tensor is NULL of those that aren't
 * there yet, and nothing is made. */
bool kn_entries_add_optim_all(kn_entries *e, kn_optim *optim);
/* The trained tensors of parameters and buffers with an average. */
bool kn_entries_add_trained(kn_entries *e, const kn_ema *ema);
/* "<buffer>.rank<K>", K from 1 to ranks - 1, of each buffer in the list that .differs. Rank K holds
 * its own where comm has so many ranks; else nobody does. */
bool kn_entries_add_rank_buffers(kn_entries *e, int ranks);
/* Sets .differs of the buffers that aren't the same on all ranks. Collective. */
bool kn_entries_compare_buffers(kn_entries *e);
/* Chooses the savers of all parts, so that each element has one and ranks write nearly equal bytes.
 * Whole tensors outside of units are rank 0's, also where ranks differ. A tensor without elements
 * has one saver, too. */
bool kn_entries_deal(kn_entries *e);

int64_t kn_entry_numel(const kn_entry *e);     /* of the whole */
size_t kn_entry_bytes(const kn_entry *e);      /* of the whole */
size_t kn_entry_part_bytes(const kn_entry *e); /* of this rank's part */

/* This rank's part, as it lies in memory of the host; NULL, without an error, where it lies on
 * another device or in another order, or is empty: kn_entry_read copies. Nothing writes it until
 * the next launch but the caller, who then gives it to kn_entry_write. */
void *kn_entry_data(const kn_entry *e);
/* Copies this rank's part to host memory of kn_entry_part_bytes. */
bool kn_entry_read(const kn_entry *e, void *host);
/* Reads the whole into host memory of every rank: rank 0's where it is whole on all. Collective. */
bool kn_entry_gather(const kn_entry *e, const kn_entries *all, void *host);
/* True if all entries may be written: nothing is summoned, nothing records. */
bool kn_entries_may_write(const kn_entries *e, const char *what);
/* This rank's part becomes host's kn_entry_part_bytes, in e's dtype; host may be kn_entry_data,
 * which then holds the new values. The gathered values of a parameter are dropped, so ranks with an
 * empty part call it too. Fails only where the device does. */
bool kn_entry_write(const kn_entry *e, const void *host);

#endif
