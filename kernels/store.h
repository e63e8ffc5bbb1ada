/* kernels/store.h (private): a walk over items whose arrays may lie in a store (kn_store_open). A
 * window of items is in memory at a time: while it is worked on, the next one is read, and the one
 * before is written back.
 *
 *     kn_store_walk w = { .spans = spans_of_item, .arg = list, .last = count, .items = count };
 *     while (kn_store_next(&w))
 *         work_on(list + w.begin, w.end - w.begin); */
#ifndef KNAP_KERNELS_STORE_H
#define KNAP_KERNELS_STORE_H

#include "kernels/memory.h"

#define KN_STORE_SPANS 5
#define KN_STORE_WINDOW                                                                            \
    ((size_t)16 << 20) /* bytes of arrays; an item that is larger is a window of its own */

typedef struct kn_span {
    const void *at;
    size_t bytes;
} kn_span;

typedef struct kn_store_walk {
    /* Lists the arrays of an item, at most KN_STORE_SPANS; those outside a store don't matter.
     * Returns how many. */
    int (*spans)(const void *arg, int item, kn_span span[KN_STORE_SPANS]);
    const void *arg;
    int begin, end; /* the window; where the walk starts, both are its first item */
    int last;       /* the walk ends before this item */
    int items; /* those from last on follow in a later walk: the last window reads ahead in them */
} kn_store_walk;

/* The next window, [begin, end). False: there is none left. */
bool kn_store_next(kn_store_walk *w);

#endif
