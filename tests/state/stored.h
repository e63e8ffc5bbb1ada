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

/* ---- one trial a rank ------------------------------------------------------------------------ */

/* A net in one way of sharding, one with other values, and a place for what is kept; they go at the
 * end of the trial. */
typedef struct trial {
    int (*run)(struct trial *t); /* a status, as of a rank */
    const way *w;
    int how;
    const char *dir; /* a folder for a checkpoint; NULL: state dicts */
    kn_comm *world;
    net m, other;
    stored stored;
} trial;

static inline int one_trial(kn_comm *world, void *arg)
{
    trial t = *(const trial *)arg;
    t.world = world;
    EXPECT(net_init(&t.m, KN_META) && net_wrap(&t.m, world, t.w) && net_other(&t.other, world, t.w),
           "init");
    const int failed = t.run(&t);
    stored_free(&t.stored);
    kn_module_free(&t.m), kn_module_free(&t.other);
    return failed || !kn_ok();
}

typedef struct trials {
    int ranks[4];  /* numbers of threads, ended by 0; 0: 1, 2 and 4 */
    unsigned ways; /* bit i: ways[i]; 0: all */
    int hows;      /* .how from 0; 0: one */
    bool folders;  /* as a checkpoint, too */
} trials;
static inline void try_all(int (*run)(trial *t), trials s)
{
    const int each[] = { 1, 2, 4, 0 }, *ranks = s.ranks[0] ? s.ranks : each;
    int number = 0; /* under AddressSanitizer one in 3 */
    for (int k = 0; ranks[k]; k++)
        for (int n = 0; n < WAYS * (s.hows ? s.hows : 1) * (1 + s.folders); n++) {
            const int i = n % WAYS, how = n / WAYS / (1 + s.folders);
            const bool folder = n / WAYS % (1 + s.folders);
            trial t = { .run = run, .w = &ways[i], .how = how };
            if ((s.ways && !(s.ways >> i & 1)) || (t.w->ranks && t.w->ranks != ranks[k]) ||
                number++ % kn_one_in(3))
                continue;
            t.dir = folder ? temp_path("run") : NULL;
            int failed = kn_spawn_threads(ranks[k], one_trial, &t);
            KN_CHECK_OK();
            KN_CHECK(failed == 0, "%d ranks, way %d, how %d%s", ranks[k], i, how,
                     folder ? ", in a folder" : "");
            remove_temp();
        }
}
#define TRY(run, ...) try_all((run), (trials){ __VA_ARGS__ })

#endif
