/* fsdp/order.c: the order in which all ranks make the collectives of a backward, whatever branches
 * their data chose.
 *
 * Ranks run the same units in forward, but their backwards may reach different ones. So the engine
 * doesn't say what comes next. A list does, of turns: a unit is entered (gathered) or left
 * (released and reduced). It is the forward walked from its end: where a call of a unit ended, the
 * unit is entered, and where its first one began, it is left. Units inside a call that recomputes
 * are all entered first, in forward order, because its replay needs them so. The turns are taken
 * one after the other. What the engine tells only says how far they may go: they rest at a unit
 * that the engine still has to visit, and pass over those that this rank's backward doesn't reach:
 * there its gradients are zeros. Where the engine comes to a unit behind one for which gradients
 * are still to come, that one isn't left in turn, but at the end of the backward
 * (kn_order_come_to): a call outside its turn brings them, or a use outside any call, and all ranks
 * must have it alike. A collective on a tensor (autograd/collectives.h), or of a table's rows,
 * has a place among the turns, by its number on the tape: those before it are taken when it comes,
 * those behind it rest.
 *
 * Each call that trains has its turns. Where a call may be reached by no rank (its unit is frozen,
 * or more than one forward waits for a backward), ranks agree first on the calls that any of them
 * reaches. */
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"

/* So many forwards, of all units of a tree, are remembered that no backward followed. */
enum { MOST_FORWARDS = 64 };

/* ---- forward: what ran ----------------------------------------------------------------------- */

static void forget_from(kn_order *o, int first)
{
    while (o->visits > first)
        kn_frame_unref(o->visit[--o->visits].frame);
    o->open = 0;
}

/* Calls that a backward has come to go; those of forwards that wait for theirs stay. */
static void forget_spent(kn_order *o)
{
    int left = 0;
    o->forwards = 0;
    for (int i = 0; i < o->visits; i++) {
        kn_visit v = o->visit[i];
        if (v.spent) {
            kn_frame_unref(v.frame);
            continue;
        }
        o->forwards += left == 0 || o->visit[left - 1].forward != v.forward;
        o->visit[left++] = v;
    }
    o->visits = left;
}

void kn_order_forward(kn_order *o, int units, bool after_last_backward)
{
    if (after_last_backward || o->forwards >= units * MOST_FORWARDS) {
        forget_from(o, 0);
        o->forwards = 0;
    } else {
        forget_spent(o);
    }
    o->forwards++;
    o->forward++;
    o->forward_at = o->visits;
}

void kn_order_forget_forward(kn_order *o)
{
    forget_from(o, o->forward_at);
    o->forwards -= o->forwards > 0;
}

/* The running call; where calls around it recompute, the outermost of those. */
static kn_frame *frame_of_call(void)
{
    kn_frame *own = kn_context_get()->frame, *f = own;
    for (kn_frame *p = own; p; p = p->parent)
        f = p->recorded ? p : f;
    return f;
}

static void push(kn_order *o, kn_unit *u, kn_visit_kind kind)
{
    kn_frame *f = frame_of_call();
    f->refs++;
    o->visit[o->visits++] = (kn_visit){ u, f, kind, o->forward, kn_context_get()->node_seq, false };
}

/* Backward brings gradients to what requires them now, also if it is frozen by then. */
static void note_wanted(const kn_order *o, const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        for (int k = 0; k < u->bucket[i]->params; k++) {
            kn_bucket_param *p = &u->bucket[i]->param[k];
            p->wanted = p->tensor->requires_grad || (p->wanted && o->forwards > 1);
        }
}

bool kn_order_begin(kn_order *o, kn_unit *u)
{
    note_wanted(o, u);
    if (u->buckets == 0) /* it has no collectives */
        return true;
    /* the ends of open calls have their places, so that they can't fail */
    if (!kn_host_grow(&o->visit, &o->visit_room, o->visits + o->open + 2, sizeof *o->visit))
        return false;
    push(o, u, KN_VISIT_BEGIN);
    o->open++;
    return true;
}

void kn_order_end(kn_order *o, kn_unit *u)
{
    int i = o->visits - 1;
    while (i >= o->forward_at && o->visit[i].unit != u)
        i--;
    if (i < o->forward_at || o->visit[i].kind == KN_VISIT_END)
        return; /* its beginning wasn't recorded */
    push(o, u, KN_VISIT_END);
    o->open--;
}

void kn_order_free(kn_order *o)
{
    forget_from(o, 0);
    kn_host_free(o->visit);
    kn_host_free(o->reached);
    kn_host_free(o->turn);
}

/* ---- backward: the turns --------------------------------------------------------------------- */

static bool trains(const kn_unit *u)
{
    bool any = false;
    for (int i = 0; i < u->buckets; i++)
        any |= kn_bucket_trains(u->bucket[i]);
    return any;
}

static bool must_agree(const kn_order *o)
{
    bool ask = o->forwards > 1;
    for (int i = 0; i < o->visits && !ask; i++)
        ask = !trains(o->visit[i].unit);
    return ask;
}

/* A hash of the calls that wait for a backward: which units ran, in which forwards. */
static uint64_t hash_of_visits(const kn_order *o)
{
    uint64_t hash = 0;
    for (int i = 0; i < o->visits; i++) {
        const kn_visit *v = &o->visit[i];
        hash = kn_hash64(hash, kn_hash_string(kn_unit_name(v->unit)));
        hash = kn_hash64(hash, (uint64_t)(v->forward - o->visit[0].forward) << 1 |
                                   (v->kind == KN_VISIT_END));
    }
    return hash;
}

/* o->reached: by visit, whether any rank's backward comes to the call. */
static bool find_reached(kn_schedule_state *s)
{
    kn_order *o = &s->order;
    if (!kn_host_grow(&o->reached, &o->reached_room, o->visits, sizeof *o->reached))
        return false;
    bool ask = s->root->size > 1 && must_agree(o);
    for (int i = 0; i < o->visits; i++)
        o->reached[i] =
            (s->root->size > 1 && !ask) || o->visit[i].frame->mark == kn_backward_pass();
    if (ask && !kn_agree_on_any(s, o->reached, o->visits, hash_of_visits(o),
                                "which units backward reaches"))
        return false;
    for (int i = 0; i < o->visits; i++)
        o->visit[i].spent |= o->reached[i];
    return true;
}

static void add_enter(kn_order *o, kn_unit *u, uint64_t node)
{
    if (u->enter_at >= 0)
        return;
    u->enter_at = o->turns;
    o->turn[o->turns++] = (kn_turn){ u, KN_TURN_ENTER, node };
}

/* The last one counts. */
static void add_leave(kn_order *o, kn_unit *u, uint64_t node)
{
    if (u->leave_at >= 0)
        o->turn[u->leave_at].kind = KN_TURN_NONE;
    u->leave_at = o->turns;
    o->turn[o->turns++] = (kn_turn){ u, KN_TURN_LEAVE, node };
}

static void add_visits(kn_order *o, int first, int last)
{
    bool replay = o->visit[last].frame->recorded;
    for (int i = first; i <= last && replay; i++) {
        if (!o->reached[i])
            continue;
        o->visit[i].unit->replays = true;
        if (o->visit[i].kind == KN_VISIT_BEGIN)
            add_enter(o, o->visit[i].unit, o->visit[last].node);
    }
    for (int i = last; i >= first; i--) {
        if (o->reached[i] && o->visit[i].kind == KN_VISIT_END)
            add_enter(o, o->visit[i].unit, o->visit[i].node);
        else if (o->reached[i])
            add_leave(o, o->visit[i].unit, o->visit[i].node);
    }
}

bool kn_order_start(kn_schedule_state *s)
{
    kn_order *o = &s->order;
    o->turns = o->at = 0;
    for (int i = 0; i < s->units; i++) {
        s->unit[i]->enter_at = s->unit[i]->leave_at = -1;
        s->unit[i]->replays = false;
    }
    if (!find_reached(s) || !kn_host_grow(&o->turn, &o->turn_room, o->visits, sizeof *o->turn))
        return false;
    for (int last = o->visits - 1, first; last >= 0; last = first - 1) {
        first = last;
        while (first > 0 && o->visit[last].frame->recorded &&
               o->visit[first - 1].frame == o->visit[last].frame)
            first--;
        add_visits(o, first, last);
    }
    return true;
}

static bool take_turn(kn_order *o)
{
    kn_turn t = o->turn[o->at++];
    return t.kind == KN_TURN_NONE ||
           (t.kind == KN_TURN_ENTER ? kn_pre_backward(t.unit) : kn_post_backward(t.unit));
}

bool kn_order_go_on(kn_order *o)
{
    while (o->at < o->turns && !o->turn[o->at].unit->group->active &&
           o->turn[o->at].node >= kn_collective_next())
        if (!take_turn(o))
            return false;
    return kn_ok();
}

bool kn_order_come_to(kn_order *o, const kn_unit *u)
{
    if (!kn_order_go_on(o))
        return false;
    while (o->at <= u->enter_at) {
        kn_turn *t = &o->turn[o->at];
        if (t->kind == KN_TURN_LEAVE && t->unit->group->active) { /* it is left at the end */
            t->unit->leave_at = -1;
            t->kind = KN_TURN_NONE;
        }
        if (!take_turn(o))
            return false;
    }
    return true;
}

kn_unit *kn_order_next(const kn_order *o)
{
    for (int i = o->at; i < o->turns; i++)
        if (o->turn[i].kind == KN_TURN_ENTER && kn_unit_needed_in_backward(o->turn[i].unit))
            return o->turn[i].unit;
    return NULL;
}
