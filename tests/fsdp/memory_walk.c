/* tests/fsdp/memory_walk.c: the formula of docs/fsdp.md ("Memory"), computed without the schedule.
 * It walks over the units in the order in which a step visits them, forward then backward, adds the
 * bytes of each buffer where a step allocates it and subtracts them where it frees it. It assumes
 * that modules run in order of declaration. */
#include "tests/fsdp/memory_walk.h"
#include "fsdp/schedule.h"
#include "kernels/memory_internal.h"
#include <string.h>

/* The live bytes of one category, and their peak. */
typedef struct level {
    int64_t now, peak;
} level;

static void add(level *l, int64_t bytes)
{
    l->now += bytes;
    if (l->now > l->peak)
        l->peak = l->now;
}

/* A unit on the walk. */
typedef struct stop {
    kn_unit *unit;
    int parent, end;                /* stops of units inside it: (this one, end) */
    const kn_module_impl *again;    /* the outermost module around it that recomputes, or NULL */
    bool reached;                   /* backward reaches it */
    bool full, stage, slice, ahead; /* allocated buffers; gathered ahead */
} stop;

/* Of a forward: it begins or ends. Of a backward: its unit is entered (gathered), its backward
 * begins, it is left (released and reduced). */
typedef enum visit_kind { BEGINS, ENDS, ENTERED, BACKWARD, LEFT } visit_kind;
typedef struct visit {
    int stop;
    visit_kind kind;
} visit;

typedef struct walk {
    stop *stop; /* in the order in which forwards begin */
    int stops;
    int64_t room;
    visit *visit, *turn; /* [2 * stops], [3 * stops] */
    int visits, turns, ahead, downloading;
    int *reducing, reductions; /* [stops]: the oldest first */
    bool overlap;              /* a reduction runs beside the next unit's backward */
    level gathered, unreduced;
} walk;

/* ---- bytes of a bucket's buffers ---------------------------------------------------------- */

static int64_t full_bytes(const kn_bucket *b)
{
    return b->full == b->master ? 0 : kn_bucket_bytes(b->layout.full_numel, b->param_dtype);
}

static int64_t stage_bytes(const kn_bucket *b)
{
    return b->layout.zero_copy ? 0 : kn_bucket_bytes(b->layout.shard * b->shards, b->param_dtype);
}

static int64_t slice_bytes(const kn_bucket *b)
{
    int k = b->unit->options.reshard_after_forward;
    return k > 1 && b->shards > 1 ? kn_bucket_bytes(b->layout.full_numel / k, b->param_dtype) : 0;
}

static int64_t grad_bytes(const kn_bucket *b)
{
    return b->trainable ? kn_bucket_bytes(b->layout.full_numel, b->reduce_dtype) : 0;
}

/* The bytes of a reduction besides the gradient. */
static int64_t reduction_bytes(const kn_bucket *b)
{
    int64_t bytes = 0;
    if (b->trainable && !b->layout.zero_copy)
        bytes += kn_bucket_bytes(b->layout.shard * b->shards, b->reduce_dtype);
    if (b->trainable && b->shards > 1 && b->replicas > 1)
        bytes += kn_bucket_bytes(b->layout.shard, b->grad_dtype);
    return bytes;
}

/* A gradient during its copy to the host: grad itself if nothing was accumulated and there is no
 * reduction. */
static int64_t grad_transfer_bytes(const kn_bucket *b)
{
    return b->trainable && b->offloaded ? kn_bucket_bytes(b->layout.shard, b->grad_dtype) : 0;
}

static int64_t sum(const kn_unit *u, int64_t (*bytes)(const kn_bucket *b))
{
    int64_t n = 0;
    for (int i = 0; i < u->buckets; i++)
        n += bytes(u->bucket[i]);
    return n;
}

/* ---- gathering and releasing -------------------------------------------------------------- */

static void unshard(walk *w, stop *s)
{
    if (s->full)
        return;
    s->full = true;
    s->stage = !s->slice; /* a slice is gathered in place */
    add(&w->gathered, sum(s->unit, full_bytes));
    if (s->stage)
        add(&w->gathered, sum(s->unit, stage_bytes));
}

static void not_ahead(walk *w, stop *s)
{
    w->ahead -= s->ahead;
    s->ahead = false;
}

static void wait_for(walk *w, stop *s)
{
    unshard(w, s);
    if (s->stage)
        add(&w->gathered, -sum(s->unit, stage_bytes));
    if (s->slice)
        add(&w->gathered, -sum(s->unit, slice_bytes));
    s->stage = s->slice = false;
    not_ahead(w, s);
}

static void reshard(walk *w, stop *s, bool keep_slice)
{
    if (s->stage || (s->slice && s->full)) /* gathered but not used */
        wait_for(w, s);
    for (int i = 0; s->full && i < s->unit->buckets; i++) {
        const kn_bucket *b = s->unit->bucket[i];
        if (keep_slice)
            add(&w->gathered, slice_bytes(b));
        add(&w->gathered, -full_bytes(b));
    }
    s->slice |= s->full && keep_slice;
    s->full = false;
    not_ahead(w, s);
}

static void release(walk *w, stop *s)
{
    reshard(w, s, false);
    if (s->slice)
        add(&w->gathered, -sum(s->unit, slice_bytes));
    s->slice = false;
}

static void gather_ahead(walk *w, stop *s)
{
    if (s->ahead || s->full || w->ahead >= w->stop[0].unit->options.max_gathers)
        return;
    unshard(w, s);
    s->ahead = true;
    w->ahead++;
}

static void gather_list(walk *w, kn_unit *const *list, int n, bool (*which)(const stop *))
{
    for (int i = 0; i < n; i++)
        for (int k = 0; k < w->stops; k++)
            if (w->stop[k].unit == list[i] && which(&w->stop[k]))
                gather_ahead(w, &w->stop[k]);
}

static bool each(const stop *s)
{
    return s != NULL;
}

/* Backward reads its parameters, or runs its forward again. */
static bool needed(const stop *s)
{
    return s->unit->set.unshard_in_backward || s->again;
}

/* ---- the walk ----------------------------------------------------------------------------- */

static void forward(walk *w, int at)
{
    stop *s = &w->stop[at];
    kn_unit *u = s->unit;
    w->visit[w->visits++] = (visit){ at, BEGINS };
    wait_for(w, s);
    if (u->next_forward.count)
        gather_list(w, u->next_forward.list, u->next_forward.count, each);
    else if (u->options.forward_prefetch && at + 1 < w->stops)
        gather_ahead(w, s + 1);
    for (int i = at + 1; i < s->end; i = w->stop[i].end)
        forward(w, i);
    w->visit[w->visits++] = (visit){ at, ENDS };
    int how = u->options.reshard_after_forward;
    if (how == KN_RESHARD_DEFAULT)
        how = at == 0 || kn_unit_keeps(u) ? KN_RESHARD_NEVER : KN_RESHARD_ALWAYS;
    if (how != KN_RESHARD_NEVER)
        reshard(w, s, how > 1);
    for (int i = 1; at == 0 && i < w->stops; i++)
        if (w->stop[i].ahead)
            release(w, &w->stop[i]);
}

/* Prefetches the next unit that is entered from turn `at` on. */
static void prefetch(walk *w, const kn_unit *u, kn_backward_prefetch when, int at)
{
    if (u->next_backward.count && when == KN_PREFETCH_PRE)
        gather_list(w, u->next_backward.list, u->next_backward.count, needed);
    if (u->next_backward.count || u->options.backward_prefetch != when)
        return;
    while (at < w->turns && !(w->turn[at].kind == ENTERED && needed(&w->stop[w->turn[at].stop])))
        at++;
    if (at < w->turns)
        gather_ahead(w, &w->stop[w->turn[at].stop]);
}

static void land(walk *w)
{
    if (w->downloading >= 0)
        add(&w->unreduced, -sum(w->stop[w->downloading].unit, grad_transfer_bytes));
    w->downloading = -1;
}

static void finish_reduction(walk *w)
{
    const kn_unit *u = w->stop[w->reducing[0]].unit;
    land(w);
    add(&w->unreduced, -sum(u, grad_bytes) - sum(u, reduction_bytes));
    w->downloading = w->reducing[0];
    memmove(w->reducing, w->reducing + 1, (size_t)--w->reductions * sizeof *w->reducing);
}

static void finish_reductions(walk *w, int running)
{
    while (w->reductions > running)
        finish_reduction(w);
}

/* Its gradient of the backward before. */
static void finish_reduction_of(walk *w, int at)
{
    int i = w->reductions - 1;
    while (i >= 0 && w->reducing[i] != at)
        i--;
    finish_reductions(w, w->reductions - i - 1);
}

static bool trains(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (u->bucket[i]->trainable)
            return true;
    return false;
}

static void leave(walk *w, int turn)
{
    int at = w->turn[turn].stop;
    stop *s = &w->stop[at];
    kn_unit *u = s->unit;
    if (u->set.reshard_after_backward)
        release(w, s);
    prefetch(w, u, KN_PREFETCH_POST, turn + 1);
    if (!trains(u))
        return;
    finish_reductions(w, w->stop[0].unit->options.max_reductions - 1);
    add(&w->unreduced, sum(u, reduction_bytes) + sum(u, grad_transfer_bytes));
    w->reducing[w->reductions++] = at;
    if (w->overlap)
        return;
    finish_reductions(w, 0);
    land(w);
}

static void add_turn(walk *w, int at, visit_kind kind)
{
    if (w->stop[at].reached)
        w->turn[w->turns++] = (visit){ at, kind };
}

/* The visits [first, last] backwards: where a forward ended, its unit is entered and its backward
 * begins; where it began, it is left. Units of a module that recomputes are entered before, as its
 * replay needs them. */
static void add_turns(walk *w, int first, int last)
{
    bool replay = w->stop[w->visit[last].stop].again;
    for (int i = first; i <= last && replay; i++)
        if (w->visit[i].kind == BEGINS)
            add_turn(w, w->visit[i].stop, ENTERED);
    for (int i = last; i >= first; i--) {
        int at = w->visit[i].stop;
        if (w->visit[i].kind == ENDS && !replay)
            add_turn(w, at, ENTERED);
        add_turn(w, at, w->visit[i].kind == ENDS ? BACKWARD : LEFT);
    }
}

static void take_turn(walk *w, int turn)
{
    stop *s = &w->stop[w->turn[turn].stop];
    switch (w->turn[turn].kind) {
    case ENTERED:
        if (needed(s))
            wait_for(w, s);
        prefetch(w, s->unit, KN_PREFETCH_PRE, turn + 1);
        break;
    case BACKWARD:
        finish_reduction_of(w, w->turn[turn].stop);
        add(&w->unreduced, sum(s->unit, grad_bytes));
        break;
    default:
        leave(w, turn);
    }
}

static void backward(walk *w)
{
    for (int last = w->visits - 1, first; last >= 0; last = first - 1) {
        const kn_module_impl *again = w->stop[w->visit[last].stop].again;
        first = last;
        while (first > 0 && again && w->stop[w->visit[first - 1].stop].again == again)
            first--;
        add_turns(w, first, last);
    }
    for (int i = 0; i < w->turns; i++)
        take_turn(w, i);
}

/* One step, with the order of the step before known. */
static void walk_step(walk *w)
{
    w->visits = w->turns = 0;
    forward(w, 0);
    backward(w);
    if (w->stop[0].unit->set.is_last_backward)
        finish_reductions(w, 0);
}

/* ---- the tree -------------------------------------------------------------------------------- */

/* Units in order of declaration; a group stands at its first module. */
static bool list_units(walk *w, kn_module_impl *m, int parent, const kn_module_impl *again)
{
    again = !again && m->recompute ? m : again;
    kn_unit *u = kn_unit_of(m);
    int at = parent;
    if (u) {
        for (at = w->stops - 1; at >= 0 && w->stop[at].unit != u; at--)
            ;
    }
    if (u && at < 0) {
        if (!kn_host_grow(&w->stop, &w->room, w->stops + 1, sizeof *w->stop))
            return false;
        at = w->stops++;
        w->stop[at] = (stop){ .unit = u, .parent = parent, .again = again };
    }
    for (int i = 0; i < m->children; i++)
        if (!list_units(w, m->child[i]->impl, at, again))
            return false;
    if (at >= 0)
        w->stop[at].end = w->stops;
    return true;
}

/* Backward reaches a unit that trains, the units whose forward came after it, and the units around
 * it. */
static void mark_reached(walk *w)
{
    bool any = false;
    for (int i = 0; i < w->stops; i++) {
        any |= trains(w->stop[i].unit);
        w->stop[i].reached = any;
    }
    for (int i = w->stops - 1; i > 0; i--)
        if (w->stop[i].reached && w->stop[i].parent >= 0)
            w->stop[w->stop[i].parent].reached = true;
    for (int i = w->stops - 2; i >= 0; i--) /* a replay runs everything inside it */
        w->stop[i].reached |=
            w->stop[i].again && w->stop[i].again == w->stop[i + 1].again && w->stop[i + 1].reached;
}

memory_peaks memory_walk(void *root)
{
    walk w = { .downloading = -1 };
    kn_module_impl *m = ((kn_module *)root)->impl;
    if (list_units(&w, m, -1, NULL) &&
        (w.reducing = kn_host_calloc((size_t)w.stops + 1, sizeof *w.reducing)) &&
        (w.visit = kn_host_calloc(5 * (size_t)w.stops, sizeof *w.visit))) {
        w.turn = w.visit + 2 * w.stops;
        w.overlap = !kn_schedule_of(w.stop[0].unit)->inline_reduce;
        mark_reached(&w);
        walk_step(&w);
        if (!w.stop[0].unit->set.is_last_backward) /* one more begins beside the end of the first */
            walk_step(&w);
    }
    kn_host_free(w.stop);
    kn_host_free(w.visit);
    kn_host_free(w.reducing);
    return (memory_peaks){ w.gathered.peak, w.unreduced.peak };
}
