/* kernels/graph_state.h (private): the recordings of a thread (kn_context.graph). */
#ifndef KNAP_KERNELS_GRAPH_STATE_H
#define KNAP_KERNELS_GRAPH_STATE_H

#include "kernels/types.h"

typedef struct kn_graph_state {
    struct kn_graph *all;       /* graphs of this context */
    struct kn_graph *recording; /* the one that is being recorded, or NULL */
    kn_device rehearsing;       /* for which device; 0: for none */
    char refused[512]; /* the first thing that a rehearsed recording couldn't take; "": nothing */
    uint64_t changes;  /* calls of kn_changed() */
} kn_graph_state;

#endif
