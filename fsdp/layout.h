/* fsdp/layout.h (private): which elements of which parameter lie where in which rank's shard. Gather,
 * reduce, files, optimizer state and clipping know only this map (architecture, idea 8). */
#ifndef KNAP_FSDP_LAYOUT_H
#define KNAP_FSDP_LAYOUT_H

#include "kernels/base.h"

#define KN_LAYOUT_ALIGN                                                                            \
    16 /* elements: parameters begin, and shards are cut, at multiples of this */

/* The flat layout (FSDP1): parameters one after another, each beginning at a multiple of
 * KN_LAYOUT_ALIGN, padded at the end so that `shards` equal chunks come out. Gathering and reducing
 * need no copies: a parameter is a view of the gathered buffer. */
typedef struct kn_layout {
    int params, shards;
    int64_t *numel;  /* [params] */
    int64_t *offset; /* [params] in the flat buffer, elements */
    int64_t total;   /* elements of the flat buffer: shards * shard */
    int64_t shard;   /* elements a rank */
} kn_layout;

/* Part of a parameter on a rank: elements [start, start + count) of the flattened parameter lie at
 * [at, at + count) of that rank's shard. count may be 0. */
typedef struct kn_interval {
    int64_t start, count, at;
} kn_interval;

bool kn_layout_flat(kn_layout *l, const int64_t *numel, int params, int shards);
void kn_layout_free(kn_layout *l);
kn_interval kn_layout_part(const kn_layout *l, int param, int shard);

#endif
