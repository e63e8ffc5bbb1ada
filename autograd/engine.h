/* autograd/engine.h (private): running a backward from several roots; used by kn_backward and
 * kn_grad_of, which a hook may call inside of another.
 *
 * Four numbers keep things apart. kn_node.seq is a node's place on the tape. A pass is one run of
 * the engine; each has a number of its own (kn_engine.pass), and mark, of a node or a module call,
 * is that of the pass which came to it last. kn_engine.number counts the backwards that add to
 * gradients: those in hooks share that of the one around them, and kn_grad_of has none. It goes
 * with the gradients (kn_passes), so a step knows how many micro-batches are summed in them. */
#ifndef KNAP_AUTOGRAD_ENGINE_H
#define KNAP_AUTOGRAD_ENGINE_H

#include "autograd/autograd_internal.h"

typedef struct kn_engine kn_engine;

typedef struct end_callback {
    struct end_callback *next;
    void (*ended)(void *arg), (*failed)(void *arg);
    void *arg;
} end_callback;

/* A leaf or an operation's result whose gradient a pass catches. */
typedef struct kn_catch {
    const kn_tensor *input;
    kn_tensor *grad; /* a reference; NULL: none came */
} kn_catch;

struct kn_engine {
    kn_engine *outer;
    kn_node **node; /* reachable nodes, by falling seq */
    int64_t nodes, room;
    int64_t at,
        collective;       /* the first node that isn't done; the first such that is a collective */
    struct kn_lent *lent; /* lend.c */
    int64_t lents, lent_room;
    kn_group **group;
    int64_t groups, group_room;
    kn_tensor **leaf; /* the outermost pass has all leaves, with references */
    int64_t leaves, leaf_room;
    struct kn_record **record; /* the same of records whose calls were replayed */
    int64_t records, record_room;
    end_callback *callbacks; /* of the outermost pass */
    uint64_t pass;
    int64_t number;   /* kn_backward_number */
    kn_tensor *scale; /* kn_backward_scale; a reference */
    bool retain;
    bool graph;     /* gradients are made of operations that are recorded */
    uint64_t after; /* nodes up to this seq are no further than the pass goes */
    /* Not NULL: the pass computes only what leads to these, catches their gradients, and adds
     * nothing to any leaf's. */
    kn_catch *caught;
    int catches;
    const kn_frame
        *running; /* of those, the innermost call that runs around it, outside of others */
};

/* To be called before a collective: in a backward the groups that it comes to are told
 * (kn_group.before_collective). False with an error. */
bool kn_collective_begins(void);
/* The number of the next node of the running backward that is a collective; 0: none will be. */
uint64_t kn_collective_next(void);

kn_engine *kn_engine_outermost(kn_engine *e);
void kn_engine_call_back(kn_engine *e); /* the pass is over: runs its callbacks */
/* reach.c: lists the nodes behind the roots by falling number, those that lead to a gradient that
 * is wanted; counts the contributions that each waits for. */
bool kn_engine_reach(kn_engine *e, kn_node *const *root, int roots);
bool kn_engine_count(kn_engine *e);
/* scale.c: finds e->scale. False with an error where it isn't that of all gradients. */
bool kn_engine_find_scale(kn_engine *e, kn_node *const *root, int roots);
/* lend.c: before e marks n; at the end of e, when nodes become what they were for passes around. */
bool kn_engine_lend(kn_engine *e, kn_node *n);
void kn_engine_give_back(kn_engine *e);
/* f still runs around the pass: its parameters are there, and its backward hasn't begun. */
bool kn_engine_call_runs(const kn_engine *e, const kn_frame *f);
/* second.c: the operations of a pass with a graph have one, in calls whose values are there. False
 * with an error. */
bool kn_engine_has_graphs(const kn_engine *e);
/* The first catch of a leaf, of a node's output; NULL if there is none. */
bool kn_engine_catches(const kn_engine *e);
kn_catch *kn_engine_catch(const kn_engine *e, const kn_tensor *leaf, const kn_node *n, int out);
/* Does a gradient along edge i of n lead to one that is wanted? */
bool kn_engine_wants(const kn_engine *e, const kn_node *n, int i);

/* Runs the pass e, of which the caller sets retain and caught, from roots' outputs with their
 * gradients. Roots may repeat. */
bool kn_engine_run(kn_engine *e, kn_node *const *root, const int *out_index, kn_tensor *const *grad,
                   int roots);

/* give.c. The gradient of n's output i, or of the leaf t, grows by g. own: nothing else holds on to
 * g, so the leaf may keep it and add into it. */
bool kn_give_node(kn_node *n, int i, kn_tensor *g);
bool kn_give_leaf(kn_tensor *t, kn_tensor *g, bool own);
/* The same in a pass with a graph: sums are operations. */
bool kn_give_on_tape(const kn_edge *to, kn_tensor *g);
/* All contributions of this pass have come: hooks run, and kn_grad grows. */
bool kn_leaf_complete(kn_leaf *leaf);
/* parts.c. While edges are counted: n uses an output. */
void kn_engine_uses(kn_node *n, struct kn_home *h);
/* Before n runs: gives it the gradients that its slices wrote to one place. */
bool kn_engine_settle(kn_node *n);

#endif
