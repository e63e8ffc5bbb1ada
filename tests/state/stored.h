/* tests/state/stored.h: what a test keeps of a module and its optimizer: state dicts, or a
 * checkpoint's folder. The same options load both. */
#ifndef KNAP_TESTS_STATE_STORED_H
#define KNAP_TESTS_STATE_STORED_H

#include "tests/models/temp.h"
#include "tests/state/moving.h"

typedef struct stored {
    kn_state *s, *so;
    kn_checkpoint *c;
} stored;

/* In a folder where dir isn't NULL; optim may be NULL. More are options of both. */
#define STORE(t, dir, world, module, opt, ...)                                                     \
    (*(t) = (stored){ 0 },                                                                         \
     (dir) ? kn_checkpoint_save((dir), (module), .optim = (opt), .step = 1,                        \
                                .comm = kn_entries_comm((module), (world)), __VA_ARGS__) &&        \
                 ((t)->c = kn_checkpoint_open((dir), (world))) != NULL                             \
           : ((t)->s = kn_state_dict((module), __VA_ARGS__)) != NULL &&                            \
                 (!(opt) || ((t)->so = kn_optim_state_dict((opt), __VA_ARGS__)) != NULL))
#define LOAD(t, module, opt, ...)                                                                  \
    ((t)->c ? kn_checkpoint_load((t)->c, (module), .optim = (opt), __VA_ARGS__)                    \
            : kn_load_state_dict((module), (t)->s, __VA_ARGS__) &&                                 \
                  (!(opt) || kn_load_optim_state_dict((opt), (t)->so, __VA_ARGS__)))

static inline void stored_free(stored *t)
{
    kn_state_free(t->s);
    kn_state_free(t->so);
    kn_checkpoint_free(t->c);
}

/* Modules with the same state, and the optimizers, which may be NULL. Collective. */
static inline bool same_modules(void *a, void *b, kn_optim *oa, kn_optim *ob)
{
    kn_state *x = kn_state_dict(a), *y = kn_state_dict(b);
    bool same = x && y && same_states(x, y);
    kn_state_free(x), kn_state_free(y);
    x = oa ? kn_optim_state_dict(oa) : NULL, y = oa ? kn_optim_state_dict(ob) : NULL;
    same = same && (!oa || (x && y && same_states(x, y)));
    kn_state_free(x), kn_state_free(y);
    return same;
}

#endif
