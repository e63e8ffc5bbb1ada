/* tests/fsdp/matrix.h: the same training in many settings. Four small models, or one of the
 * test's, are trained by N ranks in a setting (matrix_spec) and by a plain process that accumulates
 * the same micro-batches; losses, gradient norms and final parameters must be equal bit for bit
 * (docs/architecture.md, idea 9). Settings that add in another grouping than one process, and pairs
 * of options, are drawn by random.h.
 *
 *   matrix_models.c  the models
 *   matrix_run.c     training on ranks, the plain reference
 *   matrix_check.c   running and comparing them */
#ifndef KNAP_TESTS_MATRIX_H
#define KNAP_TESTS_MATRIX_H

#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/fsdp/optimizers.h"

/* ---- models ---------------------------------------------------------------------------------- */

typedef enum matrix_model {
    MATRIX_GPT,  /* two blocks, dropout, head tied to the embedding in the root */
    MATRIX_ODD,  /* odd sizes, scalars, frozen ones, weights tied across units */
    MATRIX_TURN, /* control flow that changes with every micro-batch's round */
    MATRIX_MODELS,
    MATRIX_LLAMA = MATRIX_MODELS, /* two blocks, grouped queries, scaled rope, dropout */
    MATRIX_BUNDLED,
    MATRIX_OWN = MATRIX_BUNDLED /* the test's: .bytes, .declare, .loss, .o.wrap_class or .whole */
} matrix_model;

/* parts of MATRIX_ODD */
typedef struct odd_embed {
    kn_module base;
    kn_tensor *table, *gain; /* [VOCAB, 7], [7] */
} odd_embed;
typedef struct odd_block {
    kn_module base;
    kn_linear up, down;                     /* 7 -> 11 -> 7 */
    kn_tensor *scale, *one, *gate, *frozen; /* [], [1], [2,7], [7,7] */
} odd_block;
typedef struct odd_head {
    kn_module base;
    kn_tensor *table, *bias; /* table: the embedding's; bias [VOCAB] */
} odd_head;
typedef struct odd_net {
    kn_module base;
    odd_embed embed;
    odd_block block[2];
    odd_head head;
    kn_tensor *shift; /* [7] */
} odd_net;

/* parts of MATRIX_TURN */
typedef struct turn_block {
    kn_module base;
    kn_linear fc;
    kn_tensor *spare; /* used only if use is set; NULL without .spare */
    bool use;
} turn_block;
typedef struct turn_net {
    kn_module base;
    kn_embedding embed;
    turn_block block[4];
    kn_linear head;
    int turn; /* the order of the next forward (TURN_...) */
} turn_net;

/* The orders in which forwards of MATRIX_TURN call its blocks a, b, c, d. */
enum {
    TURN_ALL,     /* a b c d */
    TURN_TWICE,   /* a c a d: b is skipped, a used twice */
    TURN_ENTER,   /* c b a d: another order, d through kn_enter */
    TURN_SWAPPED, /* b a d c */
    TURN_NESTED   /* a(a b) c d: a call of a inside another; only by .only_turn */
};

typedef struct matrix_net {
    matrix_model model;
    bool by_data;
    kn_module *root;
    kn_gpt gpt;
    kn_llama llama;
    odd_net odd;
    turn_net turn;
    void *own; /* MATRIX_OWN: the test's struct; freed after the root */
    kn_tensor *(*loss)(void *own, int step, int micro);
} matrix_net;

struct matrix_spec;
/* Declares the model on meta. */
bool matrix_net_init(matrix_net *n, const struct matrix_spec *s);
/* Classes that are units by default. */
const char *matrix_wrap_class(matrix_model model);
/* Turns on recompute of the blocks. */
void matrix_net_recompute(matrix_net *n);
/* The module of block i (TURN has four, the others two; the test's own are "a" and "b"). */
kn_module *matrix_block(matrix_net *n, int i);
/* Loss of micro-batch micro of a step. */
kn_tensor *matrix_loss(matrix_net *n, int step, int micro);

/* ---- settings -------------------------------------------------------------------------------- */

enum {
    MATRIX_RANKS = 8,
    MATRIX_STEPS = 4,
    MATRIX_ROUNDS = 4,
    MATRIX_MICRO = MATRIX_RANKS * MATRIX_ROUNDS,
    MATRIX_PARAMS = 64,
    MATRIX_ELEMENTS = 8192
};

typedef struct matrix_spec {
    matrix_model model;
    int ranks, rounds, steps; /* 0: 2 ranks, 2 rounds, 3 steps */
    bool threads, workers;    /* ranks are threads; side streams are worker threads */
    bool hosts;               /* ranks are processes that speak over TCP */
    kn_fsdp_wrap_options o;   /* .wrap_class NULL and no policy: the model's */
    bool whole;               /* no policy at all: one unit */
    bool offload;             /* .offload_dir is the folder for temporary files */
    bool recompute;
    int optimizer;              /* OPTIMIZER_... */
    bool spare;                 /* MATRIX_TURN: with unused parameters */
    bool by_data;               /* with .spare: one micro-batch in three uses them */
    int only_turn;              /* MATRIX_TURN: 0: changing; else always turn only_turn - 1 */
    bool evaluate;              /* a forward without gradient before each step */
    bool history;               /* parameters are recorded after each step */
    size_t bytes;               /* MATRIX_OWN: of its struct, which begins with the root */
    bool (*declare)(void *own); /* MATRIX_OWN: inits the struct, on meta */
    kn_tensor *(*loss)(void *own, int step, int micro); /* MATRIX_OWN */
    /* may be NULL: instead of wrapping; after wrapping */
    bool (*wrap)(matrix_net *n, kn_comm *world, const struct matrix_spec *s);
    bool (*prepare)(matrix_net *n, const struct matrix_spec *s);
    bool (*between)(matrix_net *n, int step, int round); /* its forward and its backward */
} matrix_spec;

typedef struct matrix_outcome {
    float loss[MATRIX_STEPS][MATRIX_MICRO], norm[MATRIX_STEPS];
    int params;
    char name[MATRIX_PARAMS][48];
    int64_t begin[MATRIX_PARAMS + 1];
    float param[MATRIX_STEPS]
               [MATRIX_ELEMENTS]; /* after each step; without .history the last only */
} matrix_outcome;

/* The setting in one line. */
const char *matrix_describe(const matrix_spec *s, char *buf, size_t size);
/* Trains on ranks and compares every rank's outcome with the plain reference; fails the test with
 * the setting and the first difference. */
void matrix_check(const matrix_spec *spec);
#define MATRIX_CHECK(...) matrix_check(&(matrix_spec){ __VA_ARGS__ })
/* A model of the test's on 1, 2 and 4 ranks, 4 micro-batches a step: fully sharded; recomputing,
 * parameter by parameter; KN_SHARD_GRAD_OP with side streams. */
void matrix_check_own(const matrix_spec *spec);
#define MATRIX_CHECK_OWN(...) matrix_check_own(&(matrix_spec){ .model = MATRIX_OWN, __VA_ARGS__ })
/* Takes steps of o, each with the loss of own's first micro-batch: the last is below part of the
 * first. Frees both. */
void matrix_check_learning(void *own, kn_tensor *(*loss)(void *own, int step, int micro),
                           kn_optim *o, int steps, double part);
/* Two settings with equal outcomes on all ranks. */
void matrix_check_equal(const matrix_spec *a, const matrix_spec *b);
/* a in bf16 or f16 with f32 reduction, in all strategies, which recompute that class (NULL: none),
 * but for the last: no plain process rounds like it. */
void matrix_check_16_bits(matrix_spec a, kn_dtype t, const char *recompute_class);
/* The options of s as matrix_run passes them to kn_fsdp_wrap. */
kn_fsdp_wrap_options matrix_options(const matrix_spec *s);
/* True if recomputing alone, without fsdp, changes the order of additions. */
bool matrix_recompute_regroups(const matrix_spec *s);
/* A rank's part of matrix_run.c, with a matrix_job: kn_rank_fn. The reference is one process. */
typedef struct matrix_job {
    matrix_spec s;
    matrix_outcome *out; /* shared memory: one a rank */
} matrix_job;
int matrix_train(kn_comm *world, void *job);
int matrix_reference(kn_comm *world, void *job);

#endif
