/* kernels/cpu/pieces.h (private): the sum of results that were computed in pieces. */
#ifndef KNAP_KERNELS_CPU_PIECES_H
#define KNAP_KERNELS_CPU_PIECES_H

#include "kernels/team.h"

enum { KN_PIECES_BLOCK = 1024 };

typedef struct kn_pieces_sum {
    float *at; /* [pieces, n] */
    int64_t n, pieces;
} kn_pieces_sum;

static inline void kn_add_blocks(const void *ctx, int64_t begin, int64_t end)
{
    const kn_pieces_sum *s = ctx;
    for (int64_t block = begin; block < end; block++) {
        const int64_t from = block * KN_PIECES_BLOCK, to = from + KN_PIECES_BLOCK;
        for (int64_t i = 1; i < s->pieces; i++)
            for (int64_t j = from; j < (to < s->n ? to : s->n); j++)
                s->at[j] += s->at[i * s->n + j];
    }
}

/* Adds results of n elements each into the first one, in order. */
static inline void kn_add_pieces(float *at, int64_t n, int64_t pieces)
{
    kn_each_range(kn_threads_for(n * pieces), (n + KN_PIECES_BLOCK - 1) / KN_PIECES_BLOCK,
                  kn_add_blocks, &(kn_pieces_sum){ at, n, pieces });
}

#endif
