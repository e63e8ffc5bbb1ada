/* fsdp/layout.h (private): which elements of which parameter lie where in which rank's shard.
 * Gather, reduce, files, optimizer state and clipping know only this map (architecture, idea 8).
 *
 * Two buffers are described, in elements:
 *   full    every parameter whole and row-major, parameter i at offset[i]; full_numel elements
 *   shards  `shards` equal chunks of `shard` elements, one a rank, one after another: what an
 *           all-gather makes and a reduce-scatter takes
 * Where zero_copy holds the two are the same buffer. */
#ifndef KNAP_FSDP_LAYOUT_H
#define KNAP_FSDP_LAYOUT_H

#include "fsdp/fsdp.h"

#define KN_LAYOUT_ALIGN                                                                            \
    16 /* elements: where it is free to, a parameter begins at a multiple of this */

/* A parameter as a layout sees it. */
typedef struct kn_layout_param {
    int ndim;
    const int64_t *shape;
    int dim; /* KN_LAYOUT_PER_PARAM: the dim that is cut */
} kn_layout_param;

/* Part of a parameter on a rank: `blocks` runs of `count` elements; run b is the elements
 * [start + b * stride, start + b * stride + count) of the flattened parameter, and lies at
 * [at + b * count, ...) of that rank's shard. One run, except where a dim other than the first is
 * cut. An empty part has blocks 0 and count 0. */
typedef struct kn_interval {
    int64_t start, count, blocks, stride, at;
} kn_interval;

typedef struct kn_layout {
    kn_layout_kind kind;
    int params, shards;
    bool zero_copy;
    int64_t *numel, *offset; /* [params] */
    int64_t full_numel;      /* elements of the full buffer, a multiple of shards */
    int64_t shard;           /* elements a rank */
    kn_interval *part;       /* [shards * params] */
} kn_layout;

int64_t kn_shape_numel(int ndim, const int64_t *shape); /* 1 for no dims */

/* Flat (FSDP1): one after another, aligned, padded at the end, cut into equal chunks. Zero-copy.
 * Per parameter (FSDP2): ceil(rows / shards) rows of each parameter a rank, trailing ranks fewer or
 * none; a dim other than 0 divides by shards (build.c sees to it). Ragged: as flat, but no row (dim
 * 0) is split between ranks: parameters are placed, and the chunk size is chosen, so that every cut
 * falls between rows; zero-copy. numel 0 parameters are fine. */
bool kn_layout_make(kn_layout *l, kn_layout_kind kind, const kn_layout_param *param, int params,
                    int shards);
void kn_layout_free(kn_layout *l);
/* Elements of param on rank shard. */
kn_interval kn_layout_part(const kn_layout *l, int param, int shard);
kn_interval kn_interval_whole(int64_t numel); /* all elements of a parameter */
int64_t kn_interval_numel(kn_interval i);     /* blocks * count */
kn_interval kn_interval_of_rows(kn_interval i, int64_t row); /* whole rows: their numbers */
/* The same elements, as many as given by part, between a whole row-major parameter and its part in
 * a contiguous buffer. bytes: of an element. */
void kn_interval_cut(kn_interval i, void *part, const void *whole, size_t bytes);
void kn_interval_paste(kn_interval i, void *whole, const void *part, size_t bytes);

#endif
