/* state/load_internal.h (private): loading a state dict: which item goes where (match.c), and
 * moving the values (load.c). */
#ifndef KNAP_STATE_LOAD_INTERNAL_H
#define KNAP_STATE_LOAD_INTERNAL_H

#include "state/dict_internal.h"

typedef struct kn_loading {
    const char *what;
    const kn_load_state_dict_options *o;
    kn_optim *optim; /* NULL: a module is loaded */
    kn_entries all;
    kn_flats flats; /* units of a local state */
    bool local;
    size_t below;                       /* length of the path that names lose */
    const kn_state *s;                  /* the values; NULL: rank 0 has them */
    const kn_state *names;              /* s, or rank 0's without bytes */
    kn_state *header;                   /* those; owned */
    const kn_state_item **item, **flat; /* [all.count], [flats.count] of names; NULL: none */
    bool *used;                         /* [names->count] */
    kn_names missing, unexpected, mismatched;
    bool reported;
    char first[256]; /* of the first mismatch: both shapes */
    kn_optim_values values;
    bool dealt;   /* .from_rank0, among several ranks: values come from rank 0 */
    bool parts;   /* some items are parts */
    bool travels; /* some rank needs other parts than it has */
    char *whole, *sent, *part, *converted; /* room for values on their way */
} kn_loading;

/* Finds the item of every entry and what doesn't fit. False with an error where that is wrong in
 * itself, strict or not. */
bool kn_loading_match(kn_loading *l);
/* True where names fit or needn't; else an error that tells some of them. */
bool kn_loading_fits(const kn_loading *l);
/* Hands the lists to the caller's report, or frees them. */
void kn_loading_report(kn_loading *l);

#endif
