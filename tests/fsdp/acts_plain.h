/* tests/fsdp/acts_plain.h: the reference's state: arrays of sums and sets of backwards for each
 * parameter and each group of ranks that shares it; what divides them, and norms (acts_sums.c); its
 * scaler (acts_scale.c). */
#ifndef KNAP_TESTS_ACTS_PLAIN_H
#define KNAP_TESTS_ACTS_PLAIN_H

#include "tests/fsdp/acts.h"

typedef uint32_t set; /* of backwards: the numbers of their acts */

typedef struct gradient {
    double sum[ACTS_NUMEL];
    set passes;
} gradient;

typedef struct plain {
    const acts_program *p;
    acts_net net;
    int ranks;
    acts_values value[ACTS_RANKS];                 /* of each group */
    gradient of[ACTS_PARAMS][ACTS_RANKS];          /* reduced: of each group */
    gradient held[ACTS_PARAMS][ACTS_RANKS];        /* of each rank */
    bool frozen[ACTS_PARAMS], pending[ACTS_PARTS]; /* a part's tree waits for a reduction */
    bool merged[ACTS_PARTS], root;                 /* the root is wrapped */
    bool gone[ACTS_PARTS];
    double coef[ACTS_PLACES][ACTS_RANKS];              /* of a clip; 0: none */
    double then[ACTS_PLACES][ACTS_PARAMS][ACTS_RANKS]; /* what divided when it was clipped */
    struct {
        double scale, of[ACTS_MOST + 1];      /* now; of each number that gradients carry */
        int good, carried, number[ACTS_MOST]; /* the newest number; of each backward, 0: plain */
        bool found, moved, stepped, turned[ACTS_PLACES]; /* in this iteration */
    } scaler;
} plain;

static inline int part_of(int param)
{
    return param / 4;
}

static inline bool is_plain(const plain *s, int k)
{
    return k < ACTS_PARTS && s->p->part[k].style == STYLE_PLAIN;
}

static inline int group_of(const plain *s, int param, int rank)
{
    return acts_group(s->p, part_of(param), rank);
}

/* param lies in the tree at and below place. */
bool plain_under(const plain *s, int param, int place);
bool plain_place_under(const plain *s, int place, int top);
/* Two parts, or a part and the gain, are in one tree of units. */
bool plain_one_tree(const plain *s, int a, int b);
bool plain_pends(const plain *s, int place);
void plain_clear(plain *s, int place);
void plain_unclip(plain *s, int place);
/* The place whose optimizer steps a parameter; -1: none. */
int plain_stepped_at(const plain *s, int param);
/* The divisor of param's gradient on a rank, where those of place are looked at. */
double plain_divisor(const plain *s, int param, int place, int rank);
/* The backwards that it counts. */
set plain_passes(const plain *s, int param, int place, int rank);
/* Each group's part counts once; plain ones on the first rank, in a maximum on all. */
double plain_norm(const plain *s, int place, int rank, int order);
bool plain_has_gradient(const plain *s, int place);
/* Refused: one clip or the other doesn't hold for all of place. */
bool plain_has_odd_clip(const plain *s, int place);

/* The number of the scale that divides the gradients of place; 0: none does, -1: several. */
int plain_scale(const plain *s, int place);
/* The backward of this number has a scaled loss. */
void plain_scale_loss(plain *s, int backward);
bool plain_may_scaler_step(const plain *s, int place, int scale);
void plain_scaler_stepped(plain *s, int place, bool overflow);
bool plain_scaler_update(plain *s);

#endif
