/* tests/fsdp/acts.h: random sequences of calls, where the mechanisms that gradients pass through
 * meet: parts of a tree that are units, trees or plain modules, on all ranks or on pairs of them,
 * built apart, wrapped before or after the root, frozen, replaced; backwards of some parts with
 * sync and without, of scaled losses and plain ones; several optimizers; clips, edits, overflows,
 * measurements. random.h draws the options of one training loop, this draws the loop.
 *
 *   acts_draw.c   programs: drawing, text, shrinking
 *   acts_net.c    the modules
 *   acts_plain.c  the reference: sums, counts, means and steps by their definitions, in arrays of
 *   acts_sums.c   its own; it takes nothing but each micro-batch's gradient from the library
 *   acts_scale.c  the reference's scaler
 *   acts_ranks.c  the same acts on ranks, compared one by one
 *
 * The reference runs first and decides which acts make sense where they come: so any list of acts
 * is a program, and shrinking drops acts. */
#ifndef KNAP_TESTS_ACTS_H
#define KNAP_TESTS_ACTS_H

#include "knap.h"
#include "tests/comm/comm_test.h"

enum { ACTS_PARTS = 3, ACTS_MOST = 20, ACTS_RANKS = 4, ACTS_DIM = 3 };
/* Parameters: weight and bias of two linears a part, then the root's gain. */
enum { ACTS_GAIN = 4 * ACTS_PARTS, ACTS_PARAMS, ACTS_NUMEL = ACTS_DIM * ACTS_DIM };
/* Modules: the root, the parts, their linears. */
enum {
    AT_ROOT,
    AT_PART,
    AT_LINEAR = AT_PART + ACTS_PARTS,
    ACTS_PLACES = AT_LINEAR + 2 * ACTS_PARTS
};

enum { STYLE_UNIT, STYLE_UNITS /* one a linear */, STYLE_PLAIN };
/* Of a part: its groups of ranks. */
enum { RANKS_ALL, RANKS_PAIRS, RANKS_EVERY_OTHER, RANKS_FIRST_ALONE, RANKS_EACH_ALONE, RANKS_WAYS };
enum { ROOT_PLAIN, ROOT_FIRST, ROOT_LATE /* ACT_ROOT */ };
typedef struct acts_part {
    int style, ranks;
    int apart; /* until ACT_MERGE */
    int early; /* it has gradients before it is wrapped */
} acts_part;

enum {
    ACT_NONE,
    ACT_BACKWARD, /* parts, mode, whether the root is called, ranks whose loss leaves out the last
                     part, what comes between forward and backward, at which place, 1: a loss
                     without scale */
    ACT_STEP,     /* of the first optimizer from this place on, 1: never by the scaler */
    ACT_CLIP,     /* place, p, how far, whether it is measured again */
    ACT_FREEZE,   /* place or parameter, off again */
    ACT_ZERO,     /* place or parameter */
    ACT_EDIT,     /* parameter, which factor or an overflow, whether it is summoned */
    ACT_REDUCE,   /* place */
    ACT_ROOT,
    ACT_MERGE,   /* part */
    ACT_REPLACE, /* part */
    ACT_FREE,    /* part */
    ACT_UPDATE,  /* of the scaler */
    /* These change nothing. */
    ACT_EVALUATE, /* parts, 0, whether the root is called, 0, whether in reverse order */
    ACT_MEASURE,  /* place, p */
    ACT_SAMPLE,
    ACTS
};
enum { MODE_SYNC, MODE_NO_SYNC, MODE_NOT_LAST, MODE_NO_ALL_REDUCE };
enum { BETWEEN_NOTHING, BETWEEN_FREEZE, BETWEEN_UNFREEZE, BETWEEN_EVALUATE, BETWEEN_SAMPLE };
enum { ACT_ARGS = 7 };
typedef struct act {
    int kind, arg[ACT_ARGS];
} act;

typedef struct acts_program {
    int ranks; /* one less */
    int root, optims, strategy, layout, prefetch, forward_prefetch;
    int order;  /* of wrapping the parts */
    int unused; /* kn_fsdp_set_reduce_unused: zeros move nothing without decay */
    int recompute;
    int dropout; /* only whether what changes nothing does */
    acts_part part[ACTS_PARTS];
    int keep;    /* kn_fsdp_set_reshard_after_backward */
    int whole;   /* .keep_whole_below: biases and gain */
    int hook;    /* of the reduction, or after the all-reduce */
    int several; /* .max_reductions */
    int factor;  /* .divide_factor, of part 1 */
    int store;   /* .offload_dir */
    int cold;    /* part 2 is frozen when it is wrapped */
    int scaler;  /* of the root; for several optimizers where optims isn't 0 */
    act act[ACTS_MOST];
} acts_program;

typedef struct acts_values {
    float of[ACTS_PARAMS][ACTS_NUMEL];
} acts_values;

/* The reference's answer to an act. */
typedef struct act_outcome {
    bool run, zero_first;
    bool scaled, bare, skipped; /* a backward's loss, or a step is the scaler's; a step that one
                                   refuses; a step that it skips */
    double loss_scale;          /* the scaler's after it */
    int place;                  /* of a step's optimizer */
    double loss[ACTS_RANKS], norm[ACTS_RANKS], scale[ACTS_RANKS]; /* scale 0: none for all */
    acts_values values[ACTS_RANKS];                               /* after it */
} act_outcome;

typedef struct acts_job {
    acts_program p;
    bool without; /* the acts that change nothing */
    acts_values begin;
    act_outcome want[ACTS_MOST];
    acts_values end[2][ACTS_RANKS]; /* on ranks: with the acts that change nothing, without */
    char where[500];                /* first difference */
} acts_job;

/* ---- acts_draw.c ----------------------------------------------------------------------------- */

acts_program acts_draw(uint64_t seed);
const char *acts_text(const acts_program *p, char *buf, size_t size);
bool acts_parse(const char *text, acts_program *p);
/* The i-th of the simpler neighbours of p; false after the last. */
bool acts_simpler(const acts_program *p, int i, acts_program *simpler);
/* Prints how often the acts of p ran; with NULL all. */
void acts_count(const acts_job *job);

/* ---- acts_net.c ------------------------------------------------------------------------------ */

typedef struct acts_module {
    kn_module base;
    kn_linear fc[2];
    bool dropout;
} acts_module;

typedef struct acts_net {
    kn_module base;
    acts_module *part[ACTS_PARTS]; /* in room */
    acts_module room[ACTS_PARTS + ACTS_MOST];
    int rooms;
    kn_tensor *gain;
    bool gains;      /* the root's forward uses it */
    int calls, uses; /* bits of the parts that the next forward calls, and whose results it uses */
    bool reverse;    /* their order */
    bool whole;      /* the reference: nothing of it is sharded, or recomputes */
} acts_net;

bool acts_net_init(acts_net *n, const acts_program *p, bool whole);
/* A new module for part k, without a parent. */
acts_module *acts_part_new(acts_net *n, const acts_program *p, int k, kn_device device);
/* The loss of a micro-batch; scoped. */
kn_tensor *acts_loss(acts_net *n, uint64_t micro, bool by_root);
void *acts_place(acts_net *n, int place);
kn_tensor *acts_tensor(acts_net *n, int param);
/* The place around a place or, from ACTS_PLACES on, a parameter; -1: none. */
int acts_above(int place);
bool acts_under(int param, int place);
/* The part of a place or a parameter; -1: none. */
int acts_part_of(int place);
static inline int acts_numel(int param)
{
    return param < ACTS_GAIN && param % 2 == 0 ? ACTS_NUMEL : ACTS_DIM;
}
/* The number of the parameter p of part k's tree, k < 0: of the root's. */
int acts_param(const kn_param *p, int k);
/* Values of part k, or of the gain. */
void acts_fill(acts_values *v, int k, uint64_t seed);
bool acts_has_optim(const acts_program *p, int place);
/* How part k's ranks are split; which group a rank is of, and how many share that. */
int acts_split(const acts_program *p, int k);
int acts_color(int split, int rank);
int acts_group(const acts_program *p, int k, int rank);
int acts_ranks_of(const acts_program *p, int k, int rank);
/* The divisor of a backward's sum in part k, or in the gain. */
int acts_factor(const acts_program *p, int k, int rank);
/* The parts whose results this rank's loss uses. */
int acts_uses(const act *a, int rank);
bool acts_changes_nothing(const act *a);
/* The scaler's options. */
enum { ACTS_FIRST_SCALE = 2, ACTS_INTERVAL = 2 };

int acts_plain(kn_comm *world, void *job);
int acts_ranks(kn_comm *world, void *job);

/* Programs of seeds [seed, seed + count): fails with the first that differs, shrunk. */
void acts_check(uint64_t seed, uint64_t count);
/* False where one of its acts makes no sense where it comes. */
bool acts_check_program(const char *text);

#endif
