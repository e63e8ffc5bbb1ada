/* fsdp/schedule.c: when a unit is gathered, released and reduced. Read top to bottom, this is a sharded
 * step:
 *
 *   forward   pre:   gather the unit, wait            post: release it (not the root)
 *   backward  pre:   gather the unit, wait; gather the next one that backward will need (PRE)
 *             done:  release it; (POST: gather the next one); reduce its gradients
 *   end              wait for reductions, release what is left, back to IDLE
 *
 * The order of backward is taken from the forward just run, walked from its end. A prefetch of the wrong
 * unit costs memory until the end, never correctness. */
#include "fsdp/unit.h"

static const char *const state_name[] = { "idle", "in forward", "in backward",
                                          "done with backward" };

static bool expect(const kn_unit *u, kn_unit_state a, kn_unit_state b, const char *what)
{
    return u->state == a || u->state == b ||
           kn_fail("fsdp: unit '%s' is %s, so %s cannot happen now; every forward that backward "
                   "should reach "
                   "must run through the wrapped root module",
                   u->module->path, state_name[u->state], what);
}

/* The outermost unit that is being called, with its streams. */
static kn_schedule_state *find_schedule(kn_unit *u)
{
    if (u->schedule)
        return u->schedule;
    kn_unit *root = u;
    for (kn_module_impl *m = u->module->parent; m; m = m->parent)
        if (m->unit)
            root = m->unit->unit;
    if (!root->schedule) {
        kn_schedule_state *s = kn_calloc(1, sizeof *s);
        if (!s)
            return NULL;
        s->root = root;
        s->gather =
            kn_stream_create(KN_CPU, "gather", u->ranks > 1 ? KN_STREAM_AUTO : KN_STREAM_INLINE);
        s->reduce =
            kn_stream_create(KN_CPU, "reduce", u->ranks > 1 ? KN_STREAM_AUTO : KN_STREAM_INLINE);
        /* communicators of their own, so that a gather and a reduction can run side by side */
        s->gather_comm = u->ranks > 1 ? kn_comm_dup(root->comm, "gather") : root->comm;
        s->reduce_comm = u->ranks > 1 ? kn_comm_dup(root->comm, "reduce") : root->comm;
        if (!s->gather || !s->reduce || !kn_ok()) {
            kn_schedule_free(s);
            return NULL;
        }
        root->schedule = s;
    }
    if (u->comm != root->comm) {
        kn_fail("fsdp: unit '%s' was wrapped with another communicator than the root; wrap all "
                "units of a tree "
                "with the same one",
                u->module->path);
        return NULL;
    }
    u->schedule = root->schedule;
    return u->schedule;
}

void kn_schedule_free(kn_schedule_state *s)
{
    if (!s)
        return;
    if (s->gather)
        kn_stream_destroy(s->gather);
    if (s->reduce)
        kn_stream_destroy(s->reduce);
    kn_free_host(s->order);
    kn_free_host(s);
}

/* ---- forward ------------------------------------------------------------------------------------------ */

static void pre_forward(void *unit)
{
    kn_unit *u = unit;
    kn_schedule_state *s = find_schedule(u);
    if (!s)
        return;
    if (!kn_in_backward() && s->root == u) {
        s->recording = kn_grad_mode();
        for (int i = 0; i < s->orders && s->recording;
             i++) /* a new iteration: the order is recorded afresh */
            s->order[i]->order = -1;
        s->orders = s->recording ? 0 : s->orders;
    }
    if (!kn_in_backward()) {
        if (u != s->root && s->root->state != KN_UNIT_FORWARD) {
            kn_fail("fsdp: unit '%s' was called outside the wrapped root '%s'; call the root "
                    "module (or "
                    "kn_enter it) so that its parameters are gathered",
                    u->module->path, s->root->module->class_name);
            return;
        }
        if (!expect(u, KN_UNIT_IDLE, KN_UNIT_FORWARD, "a forward"))
            return;
        u->state = KN_UNIT_FORWARD;
    }
    kn_unit_wait(u);
}

static bool record_order(kn_schedule_state *s, kn_unit *u)
{
    if (s->orders == s->room) {
        int room = s->room ? 2 * s->room : 32;
        kn_unit **list = kn_realloc(s->order, (size_t)room * sizeof *list);
        if (!list)
            return false;
        s->order = list;
        s->room = room;
    }
    u->order = s->orders;
    s->order[s->orders++] = u;
    return true;
}

static void post_forward(void *unit)
{
    kn_unit *u = unit;
    kn_schedule_state *s = u->schedule;
    if (!s || kn_in_backward()) /* a recompute: backward needs the parameters now */
        return;
    u->state = KN_UNIT_IDLE;
    if (s->recording && !record_order(s, u))
        return;
    bool keep = s->recording && (u == s->root || u->options.keep_after_forward);
    if (!keep)
        kn_unit_reshard(u);
}

/* ---- backward ------------------------------------------------------------------------------------------- */

static void end_of_backward(void *arg)
{
    kn_schedule_state *s = arg;
    s->callback_queued = false;
    if (!kn_unit_finish_reduce(s->reducing))
        return;
    for (int i = 0; i < s->orders; i++) {
        kn_unit *u = s->order[i];
        if (!kn_unit_reshard(u))
            return;
        u->state = KN_UNIT_IDLE;
        u->used = false;
    }
    kn_unit_reshard(s->root);
    s->root->state = KN_UNIT_IDLE;
    kn_module_round(s->root->module, s->root->ranks);
}

/* The unit whose forward ended just before u's. */
static kn_unit *next_in_backward(const kn_unit *u)
{
    const kn_schedule_state *s = u->schedule;
    for (int i = u->order - 1; i >= 0; i--)
        if (!s->order[i]->used && s->order[i] != u)
            return s->order[i];
    return NULL;
}

static void pre_backward(void *unit)
{
    kn_unit *u = unit;
    kn_schedule_state *s = u->schedule;
    if (!s) {
        kn_fail("fsdp: backward reached unit '%s', which has had no forward", u->module->path);
        return;
    }
    if (!s->callback_queued) {
        if (!kn_on_backward_end(end_of_backward, s))
            return;
        s->callback_queued = true;
    }
    if (u->state == KN_UNIT_PRE_BACKWARD) { /* a second call of the module, or a recompute */
        kn_unit_wait(u);
        return;
    }
    if (!expect(u, KN_UNIT_IDLE, KN_UNIT_POST_BACKWARD, "a backward"))
        return;
    if (u->order < 0 &&
        !record_order(s, u)) /* its forward wasn't seen: the end must still find it */
        return;
    u->state = KN_UNIT_PRE_BACKWARD;
    u->used = true;
    if (!kn_unit_wait(u))
        return;
    kn_unit *next = next_in_backward(u);
    if (next && u->options.prefetch == KN_PREFETCH_PRE)
        kn_unit_unshard(next);
}

/* kn_group.complete: the last gradient of the unit's parameters has arrived. */
void kn_unit_complete(void *unit)
{
    kn_unit *u = unit;
    u->state = KN_UNIT_POST_BACKWARD;
    u->used = true;
    if (!kn_unit_reshard(u))
        return;
    kn_unit *next = u->order >= 0 ? next_in_backward(u) : NULL;
    if (next && u->options.prefetch == KN_PREFETCH_POST)
        kn_unit_unshard(next);
    /* at most one reduction runs while the next unit computes: memory stays bounded */
    if (kn_unit_finish_reduce(u->schedule->reducing))
        kn_unit_reduce(u);
}

kn_unit_hooks *kn_unit_hooks_new(kn_unit *u)
{
    kn_unit_hooks *h = kn_calloc(1, sizeof *h);
    if (h)
        *h = (kn_unit_hooks){ pre_forward, post_forward, pre_backward, kn_unit_free, &u->group, u };
    return h;
}
