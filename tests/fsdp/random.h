/* tests/fsdp/random.h: random programs. A seed gives a program: a tree of modules, options of fsdp,
 * an optimizer, and events between micro-batches (evaluation, summon, passes that fail). Ranks
 * train it, and so does a plain process that adds the same gradients in the same grouping; losses,
 * norms and parameters must be equal bit for bit (docs/fsdp.md, "The same bits").
 *
 *   random_draw.c       programs: drawing, text, shrinking, counting values
 *   random_settle.c     resolving conflicts between values
 *   random_net.c        the modules of a program
 *   random_step.c       code shared by ranks and reference
 *   random_wrap.c       its options of fsdp
 *   random_ranks.c      training on ranks
 *   random_state.c      moving the state
 *   random_reference.c  plain training
 *   random_check.c      comparing, reporting, counting occurrences
 *
 * A program is a list of small numbers, each with a name and names of its values; 0 is always the
 * simplest value, and a module of kind 0 doesn't exist. So text, shrinking and coverage are loops
 * over one table. */
#ifndef KNAP_TESTS_RANDOM_H
#define KNAP_TESTS_RANDOM_H

#include "knap.h"
#include "tests/comm/comm_test.h"
#include "tests/fsdp/optimizers.h"

enum {
    RANDOM_NODES = 10,
    RANDOM_EVENTS = 2,
    RANDOM_RANKS = 8,
    RANDOM_STEPS = 4,
    RANDOM_ROUNDS = 4
};
enum { RANDOM_PARAMS = 64, RANDOM_ELEMENTS = 6144 };

enum { /* options */
       O_RANKS,
       O_STEPS,
       O_ROUNDS,
       O_DIM,
       O_BATCH,
       O_HEAD,
       O_STRATEGY,
       O_MESH,
       O_LAYOUT,
       O_PLACEMENT,
       O_WHOLE_BELOW,
       O_WRAP,
       O_WRAP_LIKE,
       O_BACKWARD_PREFETCH,
       O_FORWARD_PREFETCH,
       O_LISTS,
       O_GATHERS,
       O_REDUCTIONS,
       O_RESHARD,
       O_KEEP_GATHERED,
       O_PARAM_DTYPE,
       O_PARAM_DTYPE_OF,
       O_REDUCE_DTYPE,
       O_KEEP_LOW,
       O_CAST_INPUTS,
       O_OUTPUT_DTYPE,
       O_BUFFER_DTYPE,
       O_FULL_PRECISION,
       O_RECOMPUTE_BY,
       O_OFFLOAD,
       O_INIT,
       O_IGNORED_AS,
       O_REDUCE_OP,
       O_DIVIDE,
       O_PREDIVIDE,
       O_COMM_HOOK,
       O_SUM_HOOK,
       O_GATHER_HOOK,
       O_EMBEDDING,
       O_UNUSED,
       O_LAST,
       O_DATA,
       O_USES,
       O_SKIP_SYNC,
       O_SKIP_ALL_REDUCE,
       O_PAIRS,
       O_LEAF_HOOK,
       O_OPTIMIZER,
       O_OPTIMIZERS,
       O_CLIP,
       O_SCALER,
       O_WORKERS,
       O_THREADS,
       O_SYNC_NORMS,
       O_OPTIONS
};

enum { STRATEGY_FULL, STRATEGY_GRAD_OP, STRATEGY_NONE, STRATEGY_HYBRID, STRATEGY_HYBRID_GRAD_OP };
enum { HEAD_MSE, HEAD_EMBED, HEAD_TIED };
enum {
    WRAP_ROOT,
    WRAP_LINEAR,
    WRAP_PARTS,
    WRAP_SEQ,
    WRAP_SIZE,
    WRAP_POLICY,
    WRAP_HAND,
    WRAP_GROUPS,
    WRAP_UNWRAPPED
};
enum { SUM_HOOK_NONE, SUM_HOOK_SEES, SUM_HOOK_HALVES };
enum { EMBEDDING_IN_ROOT, EMBEDDING_UNIT, EMBEDDING_STAYS_SHARDED };
enum { RANDOM_FACTOR = 8 }; /* of EVENT_DIVIDE */
enum { RECOMPUTE_BY_HAND, RECOMPUTE_PARTS, RECOMPUTE_SEQS, RECOMPUTE_BOTH, RECOMPUTE_POLICY };
enum { INIT_META, INIT_CPU, INIT_FILL, INIT_RANK0, INIT_MODULE };
enum { IGNORED_AS_NAMES, IGNORED_AS_MODULES, IGNORED_AS_PARAMS };
enum { LEAF_HOOK_NONE, LEAF_HOOK_PARAM, LEAF_HOOK_INPUT };
enum { SYNC_NOT, SYNC_BEFORE, SYNC_AFTER }; /* wrapping */
enum { CLIP_HALF, CLIP_NONE, CLIP_MEASURE, CLIP_SMALL, CLIP_P1, CLIP_P3, CLIP_MAX };

enum { /* kinds of modules */
       KIND_NONE,
       KIND_LINEAR,
       KIND_MLP,
       KIND_NORM,
       KIND_RMSNORM,
       KIND_BATCHNORM,
       KIND_OWN,     /* scale [D], one [1], scalar [], and a buffer [1] */
       KIND_UNUSED,  /* unused parameters */
       KIND_PARTLY,  /* its data decide which parameters are used */
       KIND_SHARED,  /* the weight of an earlier linear module */
       KIND_DROPOUT, /* no parameters */
       KIND_SEQ,
       KIND_RESIDUAL,
       KIND_CONV, /* a block of a ResNet, with convolutions, a batch norm and a pool */
       KINDS
};
enum { /* when a module runs */
       WHEN_ALWAYS,
       WHEN_ROUND,      /* in every other micro-batch of a rank, the same on all */
       WHEN_LOSS_ROUND, /* it runs always, but the loss uses it in every other one only */
       WHEN_LOSS_MICRO, /* the same by data (O_USES): ranks differ */
       WHEN_RUN_MICRO   /* runs by data: ranks differ; not where it holds units */
};
enum { ENTERED_NOT, ENTERED_BY_HAND /* kn_enter */, ENTERED_AS_METHOD /* kn_call_method */ };
typedef struct random_node {
    int kind, parent, when, twice, unit, other, recompute, entered, frozen, ignored, hidden;
} random_node;

enum { /* events before a micro-batch */
       EVENT_NONE,
       EVENT_EVALUATE,
       EVENT_ABANDON, /* a forward without backward */
       EVENT_SUMMON,
       EVENT_SUMMON_WRITE,
       EVENT_SUMMON_RANK0,
       EVENT_APPLY,
       EVENT_READ,
       EVENT_UNSHARD,
       EVENT_UNSHARD_RESHARD,
       EVENT_RESHARD,
       EVENT_CLEAR, /* kn_clear_grad of every parameter */
       EVENT_ZERO,  /* kn_zero_grad */
       EVENT_NEVER_RESHARD,
       EVENT_ALWAYS_RESHARD,
       EVENT_DIVIDE,        /* by another factor, from now on */
       EVENT_FREEZE,        /* of a module, from now on */
       EVENT_RETAIN,        /* an extra forward with two backwards */
       EVENT_CALL,          /* a unit is called directly: a forward alone */
       EVENT_CALL_BACKWARD, /* the same as an extra micro-batch */
       EVENT_FAIL_FORWARD,  /* an extra pass fails; its error is cleared and training continues */
       EVENT_FAIL_PRE_FORWARD,
       EVENT_FAIL_POST_FORWARD,
       EVENT_FAIL_INPUT,
       EVENT_FAIL_LOSS,
       EVENT_FAIL_PRE_BACKWARD,
       EVENT_FAIL_POST_BACKWARD,
       EVENT_FAIL_GRAD,
       EVENT_FAIL_COMM_HOOK,
       EVENT_FAIL_STALE, /* the backward of a forward before the last step */
       EVENTS
};
typedef struct random_event {
    int kind, step, round, node, who; /* who: 0: all ranks, else rank who - 1 */
} random_event;

typedef struct random_program {
    int option[O_OPTIONS];
    random_node node[RANDOM_NODES]; /* 0 is the root */
    random_event event[RANDOM_EVENTS];
} random_program;

/* ---- random_draw.c --------------------------------------------------------------------------- */

random_program random_draw(uint64_t seed);
/* The number behind an option's value: 3 steps, a bit mask, ... */
int random_number(const random_program *p, int option);
/* "ranks=3 strategy=hybrid_shard m1.kind=linear ...": the values that aren't 0. */
const char *random_text(const random_program *p, char *buf, size_t size);
/* Parses such a text; false, with a message on standard error, for an unknown word. */
bool random_parse(const char *text, random_program *p);
/* The i-th of the simpler neighbours of p; false after the last. */
bool random_simpler(const random_program *p, int i, random_program *simpler);
/* Counts the values in p; with p NULL prints the counts and returns how many values never
 * occurred. */
int random_coverage(const random_program *p);
bool random_fails(const random_program *p); /* holds a pass that fails */

/* ---- random_settle.c ------------------------------------------------------------------------ */

/* Simplifies values until they fit together. */
void random_settle(random_program *p);
/* True if the module of a node computes in its declared dtype, independent of its unit. */
bool random_full_precision(const random_program *p, int node);
/* The same of the batch norm inside a node's module, a unit of its own. */
bool random_full_precision_inside(const random_program *p, int node);
/* True if only the parameters of a node's module compute in f32, inside a unit of another dtype. */
bool random_norms_in_f32(const random_program *p, int node);
/* True if the module of a node may be, or hold, a unit. */
bool random_holds_units(const random_program *p, int node);
/* Whether the module of a node surely is a unit, or one of a group, and runs without the others. */
bool random_runs_alone(const random_program *p, int node);

/* ---- random_net.c ---------------------------------------------------------------------------- */

typedef struct random_module {
    kn_module base; /* first */
    struct random_net *net;
    int at; /* its node */
    kn_linear fc[2];
    kn_layer_norm norm;
    kn_rms_norm rms;
    kn_dropout drop;
    kn_batch_norm batch;
    kn_conv2d conv[2];
    kn_tensor *own[3], *buffer;
} random_module;

typedef struct random_net {
    const random_program *p;
    random_module m[RANDOM_NODES];
    kn_embedding embed;
    kn_tensor *gain;
    kn_dtype dtype, input, output, buffer; /* declared; the others: the test's casts, or 0 */
    bool masters;                          /* no losses but the reference's own */
    int step, round, micro; /* of the micro-batch; ranks have other micro, but the same round */
    int failing, fail_node; /* an event, or 0 */
} random_net;

/* Declares the modules. */
bool random_net_init(random_net *n, const random_program *p, kn_dtype dtype, kn_device device);
/* Loss of a micro-batch, f32; scoped. */
kn_tensor *random_loss(random_net *n, int step, int round, int micro);
/* The same of one module alone, called directly; that of the whole for node 0. */
kn_tensor *random_part_loss(random_net *n, int node, int step, int round, int micro);
/* Recomputed calls read these again. */
void random_at(random_net *n, int step, int round, int micro);

/* ---- random_wrap.c --------------------------------------------------------------------------- */

bool random_wrap(random_net *n, kn_comm *world);
/* Shards of a hybrid mesh. */
static inline int random_shards(int ranks, int mesh)
{
    return mesh == 2 ? 1 : ranks < 4 ? ranks : mesh == 1 ? 4 : 2;
}
/* That of an option, KN_DTYPE_DEFAULT where it is left out. */
kn_dtype random_dtype(const random_program *p, int option);

/* ---- training -------------------------------------------------------------------------------- */

typedef struct random_outcome {
    int steps; /* done */
    int params;
    char name[RANDOM_PARAMS][32];
    int64_t begin[RANDOM_PARAMS + 1];
    float loss[RANDOM_STEPS][RANDOM_RANKS * RANDOM_ROUNDS], norm[RANDOM_STEPS];
    float param[RANDOM_STEPS][RANDOM_ELEMENTS]; /* after each step */
    char refused[600];                          /* the error that refused the next step */
} random_outcome;

typedef struct random_job {
    const random_program *p;
    random_outcome *out; /* one a rank; shared */
} random_job;

int random_ranks(kn_comm *world, void *job);
int random_reference(kn_comm *world, void *job);
/* Shared by both (random_step.c). */
typedef struct random_optims {
    kn_optim *o[2];
    kn_module *of[2];
    kn_scaler *scaler;
} random_optims;
void random_begin(const random_program *p);
bool random_optims_make(random_optims *s, random_net *n);
void random_optims_free(random_optims *s);
/* Clips, steps, records the norm. */
bool random_optims_step(random_optims *s, random_net *n, float *norm);
bool random_read_params(random_net *n, random_outcome *o, int step);
/* Draws of the next loss belong to this micro-batch, independent of earlier calls. */
void random_draws_of(int micro);
/* Micro-batches of a rank in the order of their backwards: its first, then two at a time or one. */
int random_turn(const random_program *p, int round, int order[2]);
/* The event before a step's round, from number i on; NULL: no more. */
const random_event *random_event_at(const random_program *p, int step, int round, int *i);
bool random_scale_gain(random_net *n); /* by 3/4, where its bytes are whole */
/* Takes the state of n and its optimizers, overwrites it, and loads it again (random_state.c). */
bool random_move_state(random_net *n, const random_optims *optims, int number);
float random_fill_value(const char *name, int64_t i);

/* ---- random_check.c -------------------------------------------------------------------------- */

/* Programs of seeds [seed, seed + count): fails with the first differing one, shrunk. */
void random_check(uint64_t seed, uint64_t count);
/* One program, by its text. */
void random_check_program(const char *text);

#endif
