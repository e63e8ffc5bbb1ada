/* autograd/engine.h (private): running a backward from several roots; used by kn_backward and,
 * nested, by recompute. */
#ifndef KNAP_AUTOGRAD_ENGINE_H
#define KNAP_AUTOGRAD_ENGINE_H

#include "autograd/autograd_internal.h"

typedef struct kn_engine kn_engine;

typedef struct end_callback {
    struct end_callback *next;
    void (*ended)(void *arg), (*failed)(void *arg);
    void *arg;
} end_callback;

struct kn_engine {
    kn_engine *outer;
    kn_node **node; /* reachable nodes, by falling seq */
    int64_t nodes, room;
    kn_group **group;
    int64_t groups, group_room;
    /* The outermost pass has all leaves, with references, except passing ones: these belong to
     * their own pass, without references. */
    kn_tensor **leaf;
    int64_t leaves, leaf_room;
    end_callback *callbacks; /* of the outermost pass */
    uint64_t pass;
    bool retain, replays; /* replays: it is the backward of a node that computes again */
    /* The only leaves that keep their gradients, in passes that replay as well; NULL: all. */
    kn_tensor *const *only;
    int onlys;
};

kn_engine *kn_engine_outermost(kn_engine *e);
/* reach.c: lists the nodes behind the roots by falling number; counts the contributions that each
 * waits for. */
bool kn_engine_reach(kn_engine *e, kn_node *const *root, int roots);
bool kn_engine_count(kn_engine *e);

/* Runs the pass e, of which the caller sets retain and only, from roots' outputs with their
 * gradients. Roots may repeat. only: other leaves get no gradient, and their hooks and counts hear
 * nothing, but those of units get theirs. replayed: the node whose backward this pass is, or NULL:
 * for what that node touches, the pass's own counts hold from here on. */
bool kn_engine_run(kn_engine *e, kn_node *const *root, const int *out_index, kn_tensor *const *grad,
                   int roots, kn_node *replayed);

#endif
