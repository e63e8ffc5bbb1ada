/* state/load_internal.h (private): one way of loading for state dicts and checkpoints: which names
 * there are (names.c), which goes where (match.c), whether that will do (fits.c), and moving the
 * values (load.c).
 *
 *   list the entries; for each source: kn_source_names
 *   kn_loading_check: all that can fail
 *   ranks agree
 *   kn_loading_write
 *   kn_loading_end: in any case */
#ifndef KNAP_STATE_LOAD_INTERNAL_H
#define KNAP_STATE_LOAD_INTERNAL_H

#include "state/dict_internal.h"

/* Names and values for some of the entries: a state dict, or a part of a checkpoint. */
typedef struct kn_source {
    const kn_state *s; /* the values; NULL: rank 0 has them */
    kn_state *names;   /* as they are looked for, without tensors; .origin is in s; owned */
    bool *used;        /* [names->count] */
    kn_optim *optim;   /* whose states are among the entries; NULL: none's */
    bool rest;         /* among names of optimizers that have names: those of none */
    kn_optim_values values;
    int first, end; /* its entries */
} kn_source;
#define KN_MOST_SOURCES 66 /* the model, what belongs to no optimizer, and so many optimizers */

typedef struct kn_loading {
    const char *what;
    const kn_load_state_dict_options *o;
    const char *prefix; /* before names below the module */
    bool from_root;     /* it makes names from the root of the tree */
    kn_entries all;
    kn_source *source;
    int sources;
    const kn_state_item **item; /* [all.count] of names; NULL: none */
    bool *zero;                 /* [all.count]: a state that the source never had */
    bool *made;                 /* [all.count]: this load made the state */
    kn_names missing, unexpected, mismatched;
    bool reported;
    char first[256];        /* of the first mismatch: both shapes */
    kn_state *header;       /* .from_rank0: rank 0's names, and all values come from it; owned */
    bool parts;             /* some items are parts */
    bool travels;           /* some rank needs other parts than it has */
    bool *sent;             /* [names of the first source]: parts that travel */
    kn_gathering gathering; /* of what travels */
    char *whole, *part, *converted; /* room for values on their way */
} kn_loading;

/* ---- names.c --------------------------------------------------------------------------------- */

/* Sets x's names: those of from, of which optimizer called `optim` ("": those of none; NULL: all),
 * as l's options rename them. */
bool kn_source_names(kn_loading *l, kn_source *x, const kn_state *from, const char *optim);
/* prefix + name, a canonical one; the caller frees it. */
char *kn_loading_name(const kn_loading *l, const char *name, const char *after);

/* ---- match.c --------------------------------------------------------------------------------- */

/* Finds the item of every entry and what doesn't fit. False with an error where that is wrong in
 * itself, strict or not. */
bool kn_loading_match(kn_loading *l);

/* ---- fits.c ---------------------------------------------------------------------------------- */

/* What doesn't fit, in words: "2 missing (a, b), 1 mismatched (c): it is f32[2], not f32[3]"; "":
 * all fits or needn't. */
enum { KN_LOADING_TEXT = 1500 };
const char *kn_loading_tell(const kn_loading *l, char text[KN_LOADING_TEXT]);
/* True where names fit or needn't; else an error that tells some of them. */
bool kn_loading_fits(const kn_loading *l);
/* Hands the lists to the caller's report, or frees them. */
void kn_loading_report(kn_loading *l);

/* ---- load.c ---------------------------------------------------------------------------------- */

/* What of s, in words, kn_load_state_dict wouldn't load into module, which needn't be made; false
 * with another error. Nothing is written or sent. */
bool kn_state_fits(void *module, const kn_state *s, const kn_load_state_dict_options *o,
                   char text[KN_LOADING_TEXT]);
/* The options that are wrong by themselves. */
bool kn_loading_options(const kn_load_state_dict_options *o, const char *what);
/* All that can fail is done here, but reading files and sending: matches, makes states and takes
 * memory. Collective where parts are loaded. */
bool kn_loading_check(kn_loading *l);
bool kn_loading_write(kn_loading *l);
/* Ends the entries, too; where the load failed the states that it made go. */
bool kn_loading_end(kn_loading *l, bool ok);

#endif
