/* fsdp/schedule.h (private): when. A tree of units has one schedule, made by the first call of its
 * outermost unit (schedule.c). */
#ifndef KNAP_FSDP_SCHEDULE_H
#define KNAP_FSDP_SCHEDULE_H

#include "autograd/engine.h"
#include "fsdp/unit.h"

/* Where the tree is with a backward. */
typedef enum kn_phase {
    KN_PHASE_OUTSIDE = 0,
    KN_PHASE_BACKWARD,
    KN_PHASE_FAILED, /* what the backward left half done has not gone yet */
} kn_phase;

/* order.c: the calls of units in forward, and the turns of the running backward that follow from
 * them. */
typedef enum kn_visit_kind { KN_VISIT_BEGIN, KN_VISIT_END } kn_visit_kind;
typedef struct kn_visit {
    kn_unit *unit;
    kn_frame *frame; /* the call, or the outermost one around it that recomputes; a reference */
    kn_visit_kind kind;
    int64_t forward; /* number of the root's */
    uint64_t node;   /* number of the last node on the tape then */
    bool spent;      /* a backward has come to the call, on any rank */
} kn_visit;
typedef enum kn_turn_kind { KN_TURN_NONE, KN_TURN_ENTER, KN_TURN_LEAVE } kn_turn_kind;
typedef struct kn_turn {
    kn_unit *unit;
    kn_turn_kind kind;
    uint64_t node; /* it comes after the backward of later ones, and before that of earlier ones */
} kn_turn;
typedef struct kn_order {
    kn_visit *visit; /* of the forwards since the last backward (kn_fsdp_set_is_last_backward) */
    int visits;
    int64_t visit_room;
    int open;                 /* calls that have begun and not ended */
    int forwards, forward_at; /* how many; the first visit of the last one */
    int64_t forward;          /* its number */
    unsigned char *reached;   /* by visit */
    int64_t reached_room;
    kn_turn *turn;
    int turns, at; /* at: the next one to take */
    int64_t turn_room;
} kn_order;

/* Streams, and the communicators of what runs on them: one set for all trees beside each other
 * below one module, of the same ranks and device (lanes.c). */
typedef struct kn_lanes {
    int trees;
    kn_device device;
    kn_stream *gather, *reduce;
    kn_stream *upload, *download; /* NULL where no bucket is offloaded */
    kn_stream *host;              /* the host's own clock beside meta; else NULL */
    kn_rank_groups groups;
} kn_lanes;

struct kn_schedule_state {
    kn_unit *root;
    kn_comm *tables; /* of tables whose gradients stay rows; NULL: there are none */
    kn_lanes *lanes;
    bool inline_reduce; /* a reduction is over before the next unit computes */
    kn_unit *outermost; /* whose call runs in no other unit's, or whose group's goes on; or NULL */
    bool recording;     /* the running forward is one that a backward follows */
    kn_unit **unit;     /* all units of the tree, children first */
    int units;
    int64_t unit_room;
    int64_t changes; /* of the tree's modules when it was last looked through */
    kn_order order;
    kn_phase phase;
    bool settled;         /* the last backward ended since the last forward began */
    kn_unit *reducing;    /* whose reductions may still run, the oldest first (reducing_next) */
    int reductions;       /* so many */
    kn_unit *downloading; /* whose gradients may still be on their way to the host */
    int64_t downloads;    /* of gradients, so far */
    int ahead;            /* units gathered ahead of their use */
};

/* schedule.c: hooks of u's modules (nn_internal.h), the two kinds of turns, and the end. */
kn_unit_hooks *kn_unit_hooks_new(kn_unit *u);
bool kn_pre_backward(kn_unit *u);
bool kn_post_backward(kn_unit *u);
void kn_end_of_backward(void *schedule);

/* verbs.c: waits for the oldest reductions until at most so many run. */
bool kn_finish_reductions(kn_schedule_state *s, int running, kn_cause why);

/* tree.c: the schedule of u's tree, made when first asked for. NULL with an error. */
kn_schedule_state *kn_schedule_of(kn_unit *u);
void kn_schedule_free(kn_schedule_state *s);

/* lanes.c: those of s's tree (collective where it is the first of them); away: with streams for
 * what is offloaded. Leaving them waits for what the tree has launched. */
bool kn_lanes_join(kn_schedule_state *s, bool away);
void kn_lanes_leave(kn_schedule_state *s);
void kn_lanes_sync(kn_lanes *l); /* the host waits for all of its streams */

/* calls.c: m of u is called. False where the call may not begin: what was before is over then
 * (kn_forward_close, kn_schedule_recover), and nothing else has changed. */
bool kn_unit_call_begin(kn_unit *u, const kn_module_impl *m);
/* The call is over. False while others of the unit run, or are to come, and where it failed. */
bool kn_unit_call_end(kn_unit *u);
/* Whether the running call, or one of u from it, lies in a call of another unit of u's tree. */
bool kn_unit_is_inside(const kn_unit *u);
/* The outermost call is over: units that a group or a prefetch left gathered are released. */
void kn_forward_end(kn_schedule_state *s);
/* Something else begins though not all modules of the outermost unit's group were called: their
 * forward is over, unless a call still runs. NULL is fine. */
void kn_forward_close(kn_schedule_state *s);

/* prefetch.c: issues the gather of the units after u, as lists, options and .max_gathers say; a
 * forward of u begins, which the order of forwards notes. */
bool kn_prefetch_forward(kn_unit *u);
bool kn_prefetch_backward(kn_unit *u, kn_backward_prefetch when);
/* The order of forwards in an outermost call: a call of u begins, the order isn't known, freed. */
void kn_prefetch_begin(kn_unit *u);
void kn_prefetch_forget(kn_unit *u);
void kn_prefetch_free(kn_unit *u);

/* turns.c: backward reached u (kn_unit_hooks), runs u's forward again, or brought u's last
 * gradient (kn_group). */
void kn_turns_reach(void *unit);
bool kn_turns_come_to(kn_unit *u);
/* A collective on a tensor is about to run, with which the tree's must keep their order. */
bool kn_turns_before_collective(void *unit);
void kn_turns_complete(void *unit);

/* recover.c: nothing stays of a forward of u that failed; nor, of what a backward that failed left
 * half done, before anything of the tree is used again. */
void kn_schedule_drop_forward(kn_unit *u);
void kn_schedule_recover(kn_schedule_state *s);

/* agree.c: a parameter that any rank's backward brought a gradient has one on all, once it is
 * reduced, and counts the same backwards. */
bool kn_agree_on_grads(kn_schedule_state *s);
/* flag[i] becomes 1 on all ranks where it isn't 0 on any. of: a hash of what the flags are; ranks
 * with another are out of step. what: for messages. Collective. */
bool kn_agree_on_any(kn_schedule_state *s, unsigned char *flag, int n, uint64_t of,
                     const char *what);

/* order.c. An outermost forward begins, or failed: nothing of it stays. */
void kn_order_forward(kn_order *o, int units, bool after_last_backward); /* units: of the tree */
void kn_order_forget_forward(kn_order *o);
/* A call of u begins or ends. */
bool kn_order_begin(kn_order *o, kn_unit *u);
void kn_order_end(kn_order *o, kn_unit *u);
/* A backward begins: lists its turns. Collective. */
bool kn_order_start(kn_schedule_state *s);
/* Takes turns up to the next unit that the engine still has to visit. */
bool kn_order_go_on(kn_order *o);
/* Takes turns until u has been entered, where it has a turn. */
bool kn_order_come_to(kn_order *o, const kn_unit *u);
/* The next unit to be entered that is needed whole there, or NULL. */
kn_unit *kn_order_next(const kn_order *o);
void kn_order_free(kn_order *o);

#endif
