/* fsdp/unit.h (private): a unit is what is gathered and released together: modules and their
 * buckets.
 *
 *   schedule.h  when: one a tree of units
 *   unit.h      units and their verbs
 *   bucket.h    the bytes of a unit, and the buffers that hold them
 *   mesh.h      which ranks share what
 *   build.h     how modules become a unit */
#ifndef KNAP_FSDP_UNIT_H
#define KNAP_FSDP_UNIT_H

#include "fsdp/bucket.h"

typedef struct kn_schedule_state kn_schedule_state;

typedef enum kn_unit_state {
    KN_UNIT_IDLE = 0,      /* between steps */
    KN_UNIT_FORWARD,       /* inside its forward */
    KN_UNIT_PRE_BACKWARD,  /* its backward has begun */
    KN_UNIT_LATE,          /* its gradients came out of turn: reduced at the end of backward */
    KN_UNIT_POST_BACKWARD, /* its gradients are reduced or on their way */
} kn_unit_state;

typedef struct kn_unit_list {
    kn_unit **list;
    int count;
    int64_t room;
} kn_unit_list;

/* A user's settings between steps (control.c). A recorded step holds for one set (replay.c). */
typedef struct kn_unit_set {
    bool sync, all_reduce, reshard_after_backward, unshard_in_backward, reduce_unused;
    bool is_last_backward; /* the outermost unit's counts */
    bool full;             /* kn_fsdp_set_full_precision */
    kn_comm_hook hook, all_reduce_hook;
    void *hook_arg, *all_reduce_hook_arg;
    kn_gather_hook gather_hook;
    void *gather_hook_arg;
} kn_unit_set;

struct kn_unit {
    kn_live live;            /* for handles: kn_unshard_wait */
    kn_module_impl **module; /* one, or a group */
    int modules;
    kn_comm *comm;
    kn_fsdp_wrap_options options; /* borrowed strings are NULL */
    int rank, size;               /* of comm */
    kn_bucket **bucket;
    int buckets;
    kn_group *group; /* a reference */
    kn_unit_state state;
    int calls;       /* running forwards of its modules */
    int group_calls; /* modules of a group that ran since it was gathered */
    bool ahead;      /* gathered before its turn, not used yet */
    kn_unit_set set;
    kn_passes open; /* backwards that ranks have to agree on; as many on all ranks */
    bool ran;       /* in a forward since the last backward with sync */
    bool replays;   /* it lies in a call that this backward recomputes */
    bool reducing;  /* its reduction may still run */
    kn_unit *reducing_next;
    bool cast;  /* .param_dtype was given: inputs follow it */
    bool fresh; /* made by a kn_fsdp_wrap that may still be refused (undo.c) */
    kn_fsdp_observer observer;
    void *observer_arg;
    kn_unit_list next_forward, next_backward; /* explicit prefetch lists */
    /* Units as their forwards began in the last outermost call of this one, and in the call
     * before: of calls that no backward follows, and of the others (prefetch.c). */
    kn_unit_list begun[2], last[2];
    kn_schedule_state *schedule; /* shared; owned by the root unit */
    int enter_at, leave_at;      /* its turns in this backward, -1: none */
    int slice_ranks; /* .reshard_after_forward as wrapped where it is a number of ranks, else 0 */
    struct kn_summoned *summoned;
};

static inline kn_unit *kn_unit_of(const kn_module_impl *m) /* NULL if m is none */
{
    return m && m->unit ? m->unit->unit : NULL;
}
/* Path of its first module, or its class for the root. */
static inline const char *kn_unit_name(const kn_unit *u)
{
    return kn_module_shown(u->module[0]);
}

/* False with an error. */
bool kn_units_add(kn_unit_list *l, kn_unit *u);
void kn_units_remove(kn_unit_list *l, const kn_unit *u); /* wherever it is in l */
/* The unit at or around m; NULL: none. */
kn_unit *kn_unit_around(const kn_module_impl *m);
/* Whether m lies in the subtree of one of the modules. */
bool kn_module_inside(const kn_module_impl *m, kn_module_impl *const *module, int modules);
/* fn for each unit at and below root once, children first, until one gives false. what: for the
 * error where there is none; NULL: that is none. */
bool kn_apply_units(void *root, bool (*fn)(kn_unit *u, void *arg), void *arg, const char *what);

/* Why a verb is called, in words, by which line: for its event. */
typedef struct kn_cause {
    const char *why, *source;
    const kn_unit *of; /* the words end with its name; NULL: they don't */
} kn_cause;
#define KN_WHY_OF(words, unit) ((kn_cause){ (words), __FILE__ ":" KN_TEXT(__LINE__), (unit) })
#define KN_WHY(words)          KN_WHY_OF(words, NULL)
#define KN_TEXT(x)             KN_TEXT_(x)
#define KN_TEXT_(x)            #x

/* The verbs of the schedule. Each emits its event (fsdp.h) where it moved bytes. */
bool kn_unit_unshard(kn_unit *u, kn_cause why); /* issues the gather, unless that was done */
/* The compute stream waits for the gather, if one was issued. */
bool kn_unit_wait(kn_unit *u, kn_cause why);
bool kn_unit_gather(kn_unit *u, kn_cause why);  /* both */
bool kn_unit_reshard(kn_unit *u, kn_cause why); /* releases whole parameters, slices too */
bool kn_unit_reshard_after_forward(kn_unit *u, kn_cause why); /* as strategy and options say */
bool kn_unit_reshard_after_backward(kn_unit *u, kn_cause why);
/* The unit is there for its backward; not where its backward needs no parameters. */
bool kn_unit_unshard_in_backward(kn_unit *u, kn_cause why);
/* Issues the reduction of the gradients. Where .max_reductions run, the oldest is done first. */
bool kn_unit_reduce(kn_unit *u, kn_cause why);
/* Waits for it, if it runs, and releases the gradients. */
bool kn_unit_finish_reduce(kn_unit *u, kn_cause why);
/* offload: waits until they are in host memory; NULL is fine. */
bool kn_unit_end_download(kn_unit *u);

/* Whether u has gradients, of any rank, that are held in one of `where` (kn_held). */
bool kn_unit_holds(const kn_unit *u, unsigned where);
/* agree.c: the running backward came to u: ranks have to agree on it later where gradients wait. */
bool kn_unit_note_backward(kn_unit *u);
/* Whether backward needs the whole parameters. */
static inline bool kn_unit_needed_in_backward(const kn_unit *u)
{
    return u->set.unshard_in_backward || u->replays;
}
/* The unit around all of u's tree. */
kn_unit *kn_unit_outermost(kn_unit *u);
/* Whether the strategy keeps parameters gathered between forward and backward. */
bool kn_unit_keeps(const kn_unit *u);
/* The divisor of the sum over ranks that a backward leaves in grad_shard. */
double kn_unit_divisor(const kn_unit *u);
/* Sets .reshard_after_forward; a sentence where k does not fit the ranks (wrap.c). */
bool kn_unit_set_reshard(kn_unit *u, int value);
void kn_unit_free(void *unit);
/* summon.c: u isn't summoned; else false with an error in the name of what, about name. */
bool kn_unit_closed(const kn_unit *u, const char *name, const char *what);
/* u is being freed; an open scope goes on without it, and what was changed there is
 * lost. */
void kn_summon_forget(kn_unit *u);
/* Takes a reference to the unit from one of its modules (a group has several). */
void kn_unit_leave(void *unit, kn_module_impl *m);

/* begin.c: buffers of u's modules, and of those below outside other units, show their values in
 * full precision, or again those that compute. */
bool kn_unit_show_buffers(kn_unit *u, bool full);

/* A backward, or a forward that one follows, finds u in the precision in which it trains; else an
 * error (full.c). */
bool kn_unit_may_train_in_full(const kn_unit *u);
static inline bool kn_unit_may_train(const kn_unit *u)
{
    return !u->set.full || kn_unit_may_train_in_full(u);
}

/* precision.c */
bool kn_unit_cast_inputs(kn_unit *u, kn_values *in);
bool kn_unit_cast_outputs(kn_unit *u, kn_values *out);
bool kn_unit_converts(const void *unit, const kn_tensor *x); /* of kn_unit_hooks */

#endif
