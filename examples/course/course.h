/* examples/course/course.h: what the exercises of docs/course and their checkers share: a small net
 * whose layers are units, its data, and ranks that report to the checker. */
#ifndef COURSE_H
#define COURSE_H

#include <knap.h>
#include <stdlib.h>

/* ---- exercise 1 ------------------------------------------------------------------------------ */

/* A value on the tape: given (LEAF), or made of the values number a and, for ADD and MUL, b, which
 * stand before it. The last one is the result. */
typedef enum node_kind { LEAF, ADD, MUL, TANH } node_kind;
typedef struct node {
    node_kind kind;
    int a, b;
    double value, grad;
    int left; /* yours */
} node;

/* ---- a net of units, and its numbers --------------------------------------------------------- */

enum { UNITS = 3, IN = 12, HIDDEN = 15, OUT = 7, BATCH = 8, MAX_RANKS = 4, PADDING = 8 };
enum { TOTAL = HIDDEN * (IN + 1) + HIDDEN * (HIDDEN + 1) + OUT * (HIDDEN + 1) }; /* elements */
#define LR       0.25F
#define MOMENTUM 0.5F  /* of exercise 3 */
#define CLIP     0.02F /* of exercise 8 */

typedef struct unit unit;

/* What an exercise does at the four moments of a unit. */
typedef struct verbs {
    void (*before_forward)(unit *u), (*after_forward)(unit *u), (*before_backward)(unit *u);
    void (*whole)(unit *u); /* the gradients of weight and bias are complete */
} verbs;

/* A layer, y = x weight^T + bias. Its parameters lie one after the other in full: weight and bias
 * are tensors on that memory, leaves of the tape, and stay there for good. */
struct unit {
    kn_module base;
    const char *name;
    int index;
    kn_dtype dtype;           /* of full and of the gradients: f32, in exercise 6 bf16 */
    int64_t numel;            /* of weight and bias together */
    void *full;               /* [numel], and room for PADDING more elements */
    kn_tensor *weight, *bias; /* [out, in], [out] */
    const float *first;       /* [numel]: the values to begin with */

    /* kn_take of room always gives full, and kn_give fills it with NaN, so that nobody uses by
     * mistake what was given back. grad_room is for the gradients, one after the other. */
    kn_memory room, grad_room;

    /* The fields below are yours; all are 0 at first, but for the events of exercise 5. */
    kn_comm *ranks, *reducers;
    int64_t part;    /* elements of a shard: the same on all ranks, so the last has padding */
    float *shard;    /* [part]: this rank's values */
    float *grad;     /* [part]: the sum over ranks of their gradients */
    float *momentum; /* [part] */
    void *sum;       /* gradients on their way */
    bool gathered;   /* full holds the values of all ranks, or a gather is on its way */
    int missing;     /* leaves whose gradient isn't complete */
    kn_event *arrived, *computed, *reduced;
    verbs verbs;
};

typedef struct net {
    kn_module base;
    unit unit[UNITS]; /* "in", "middle", "out" */
} net;

/* The mean loss of micro-batch number micro. */
kn_tensor *net_loss(void *net, int64_t micro);
/* Zeroed memory that the ledger counts in that category. */
void *take_zeros(int64_t bytes, kn_mem_category category);
/* Of full, or of all gradients, with padding: part times the number of ranks, in dtype. */
size_t bytes_of(const unit *u);
/* dst[bytes_of(u)] = the gradients of weight and bias, which are then dropped, and zeros. */
void pack_grads(unit *u, void *dst);

/* Sets ranks and part, and takes shard and grad, with this rank's part of first: the cut of
 * exercise 3. */
void cut(unit *u, kn_comm *ranks);

/* ---- what you write in exercise 4, for the later ones ---------------------------------------- */

void gather(unit *u);
void release(unit *u);
void reduce(unit *u, const float *acc);
void attach(unit *u, verbs v);

/* ---- of the checkers ------------------------------------------------------------------------- */

/* What a rank saw. */
typedef struct report {
    char error[1000]; /* the library's first error, or "" */
    char lacks[300];  /* what the checker found missing, or "" */
    char events[600]; /* g gather, F forward, B backward, s gradients reduced, r release */
    bool ended;
    float value[TOTAL], first[TOTAL], param[TOTAL]; /* before and after the first step; at last */
    kn_ledger ledger, before;                       /* at the end; after the last backward */
    double seconds[2]; /* the shortest forward, the shortest backward */
} report;

/* A training over so many ranks: its steps begin with number from; micros micro-batches make a step
 * (0: one on each rank). */
typedef struct training {
    int ranks, from, steps, micros;
    kn_dtype dtype;
    bool twice;           /* the second unit is called two times */
    bool sharded;         /* parameters are in shards */
    float momentum, clip; /* of the reference; 0: none */
    float differ;         /* rank r begins with values that are larger by r times this */
    double slow;          /* seconds that a layer and a collective take */
    kn_backward_prefetch prefetch;
    void (*begin)(unit *u, kn_comm *ranks);
    void (*begun)(net *n, report *r); /* looks at what begin did */
    void (*end_of_backward)(void);
    void (*step)(unit *u);
    void (*whole_step)(net *n, kn_comm *ranks, int step); /* instead of backwards and step */
    void (*ended)(net *n, report *r);
} training;

/* Each returns the ranks' reports, or says what is wrong and ends the program: a rank crashed, hung
 * or fell out of step, an error, a lack. reference: in one process without shards, which does what
 * t says; knaps_own: by kn_fsdp_wrap, each layer a unit. */
report *train(training t);
report *reference(training t);
report *knaps_own(training t);
/* Say in a sentence what is not right yet, or that all is, and end the program. */
#define wrong(...) (printf("not yet: "), printf(__VA_ARGS__), puts(""), exit(1))
#define right(...) (printf("right: "), printf(__VA_ARGS__), puts(""), exit(0))
/* The rank notes what is missing. */
#define lacking(r, ...) snprintf((r)->lacks, sizeof((r)->lacks), __VA_ARGS__)
/* Plain SGD on this rank's shard. */
void sgd_step(unit *u);
/* Wrong where a and b, parameters of the net, differ: "WHEN element 3 of in.weight is x, and y in
 * one process", and the hint. */
void same(const float *got, const float *want, const char *when, const char *hint);
/* The same for how far they moved since before, in "the first step". */
void moved_alike(const report *got, const report *want, const char *hint);
/* Wrong where a rank's peak of a category is above most bytes. */
void at_most(const report *r, kn_mem_category category, int64_t most, const char *hint);

#endif
