/* fsdp/schedule.c: when a unit is gathered, released and reduced. Read top to bottom, this is a sharded
 * step:
 *
 *   forward   pre:   gather the unit, wait            post: release it (not the root)
 *   backward  pre:   gather the unit, wait; gather the next one that backward will need (PRE)
 *             done:  release it; (POST: gather the next one); reduce its gradients
 *   end              wait for reductions, release what is left, back to IDLE
 *
 * The order of backward is taken from the forward just run, walked from its end (order.c); the order of a
 * forward, where it is gathered ahead, from the forward before. There a prefetch of the wrong unit costs memory
 * until the end, never correctness; at most .max_gathers units are gathered ahead of their use. */
#include "fsdp/build.h"
#include "fsdp/schedule.h"

static const char *const state_name[] = { "idle", "in forward", "in backward", "done with backward",
                                          "done with backward" };

static bool expect(const kn_unit *u, kn_unit_state a, kn_unit_state b, const char *what)
{
    return u->state == a || u->state == b ||
           kn_fail("fsdp: unit '%s' is %s, so %s cannot happen now; every forward that backward "
                   "should reach must run through the wrapped root module",
                   kn_unit_name(u), state_name[u->state], what);
}

static bool append(kn_unit_list *l, kn_unit *u)
{
    if (l->count == l->room) {
        int room = l->room ? 2 * l->room : 32;
        kn_unit **list = kn_host_realloc(l->list, (size_t)room * sizeof(kn_unit *));
        if (!list)
            return false;
        l->list = list;
        l->room = room;
    }
    l->list[l->count++] = u;
    return true;
}

/* ---- the schedule of a tree ---------------------------------------------------------------------------- */

static bool check_claimed(kn_module_impl *m)
{
    for (int i = 0; i < m->params; i++)
        if (m->param[i].owner && !m->param[i].source && !m->param[i].ignored)
            return kn_fail("fsdp: parameter '%s.%s' belongs to no unit: it was declared after "
                           "wrapping, or is shared with a module outside; wrap a module around all "
                           "its users as well (the root)",
                           m->path, m->param[i].name);
    return true;
}

/* Finds the units of the tree and what belongs to no unit though it should. */
static bool collect(kn_module *module, void *arg)
{
    kn_schedule_state *s = arg;
    kn_unit *u = kn_unit_of(module->impl);
    if (!check_claimed(module->impl))
        return false;
    if (!u || u->module[0] != module->impl)
        return true;
    kn_unit **list = kn_unit_same_place(u, s->root) && kn_unit_same_factors(u, s->root)
                         ? kn_host_realloc(s->unit, (size_t)(s->units + 1) * sizeof(kn_unit *))
                         : NULL;
    if (!list)
        return false;
    s->unit = list;
    s->unit[s->units++] = u;
    return true;
}

/* Every unit joins; its buckets get their communicators (collective, in the same order everywhere). */
static bool join(kn_schedule_state *s)
{
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        u->schedule = s;
        for (int k = 0; k < u->buckets; k++)
            if (!(u->bucket[k]->ranks = kn_ranks_of(s, u->bucket[k]->shards)))
                return false;
        int keep = u->slice_ranks;
        if (keep > 1 && u->size > 1 && !kn_slice_comm(s, keep))
            return false;
    }
    return true;
}

static bool any_away(const kn_schedule_state *s)
{
    for (int i = 0; i < s->units; i++)
        for (int k = 0; k < s->unit[i]->buckets; k++)
            if (s->unit[i]->bucket[k]->away)
                return true;
    return false;
}

static bool make_ways_home(kn_schedule_state *s, kn_device d, kn_stream_kind kind)
{
    if (!any_away(s))
        return true;
    s->upload = kn_stream_create(d, "upload", kind);
    s->download = kn_stream_create(d, "download", kind);
    s->host = d == KN_META ? kn_stream_create(d, "host", KN_STREAM_HOST) : NULL;
    return s->upload && s->download && (s->host || d != KN_META);
}

kn_schedule_state *kn_schedule_of(kn_unit *u)
{
    if (u->schedule)
        return u->schedule;
    kn_unit *root = u;
    for (kn_module_impl *m = u->module[0]->parent; m; m = m->parent)
        if (m->unit)
            root = m->unit->unit;
    kn_schedule_state *s = kn_ok() ? kn_host_calloc(1, sizeof *s) : NULL;
    if (!s)
        return NULL;
    kn_device d = root->options.device;
    kn_stream_kind kind = root->size > 1 ? KN_STREAM_AUTO : KN_STREAM_INLINE;
    s->root = root;
    s->comm = root->comm;
    s->gather = kn_stream_create(d, "gather", kind);
    s->reduce = kn_stream_create(d, "reduce", kind);
    s->slice = kn_host_calloc((size_t)root->size + 1, sizeof(kn_comm *));
    bool ok = s->gather && s->reduce && s->slice;
    for (int i = 0; ok && i < root->modules; i++)
        ok = kn_apply_modules(root->module[i]->self, collect, s);
    if (ok && make_ways_home(s, d, kind) && join(s))
        return s;
    kn_schedule_free(s);
    return NULL;
}

void kn_schedule_free(kn_schedule_state *s)
{
    if (!s)
        return;
    for (int i = 0; i < s->units; i++)
        if (s->unit[i]->schedule == s) {
            s->unit[i]->schedule = NULL;
            s->unit[i]->ahead = false;
        }
    kn_stream *stream[] = { s->gather, s->reduce, s->upload, s->download, s->host };
    for (size_t i = 0; i < sizeof stream / sizeof *stream; i++)
        kn_stream_destroy(stream[i]);
    kn_ranks_free(s);
    kn_host_free(s->arrivals);
    kn_host_free(s->unit);
    kn_order_free(&s->order);
    kn_host_free(s->begun.list);
    kn_host_free(s->last.list);
    kn_host_free(s);
}

/* ---- gathering ahead ------------------------------------------------------------------------------------- */

static bool ahead(kn_unit *u)
{
    kn_schedule_state *s = u->schedule;
    int most = s->root->options.max_gathers;
    if (u->ahead || kn_unit_is_unsharded(u) || s->ahead >= most)
        return true;
    if (!kn_unit_unshard(u))
        return false;
    u->ahead = true;
    s->ahead++;
    return true;
}

static bool ahead_of_list(const kn_unit *u, kn_unit *const *list, int n)
{
    for (int i = 0; i < n; i++)
        if (list[i]->schedule == u->schedule && !ahead(list[i]))
            return false;
    return true;
}

/* The unit that began after u in the iteration before: looked for from where this one has got to. */
static kn_unit *next_in_forward(const kn_unit *u)
{
    const kn_schedule_state *s = u->schedule;
    int here = s->begun.count - 1;
    for (int i = here < 0 ? 0 : here; i + 1 < s->last.count; i++)
        if (s->last.list[i] == u && s->last.list[i + 1] != u)
            return s->last.list[i + 1];
    return NULL;
}

static bool prefetch_forward(kn_unit *u)
{
    if (u->nexts_forward)
        return ahead_of_list(u, u->next_forward, u->nexts_forward);
    kn_unit *next = u->options.forward_prefetch ? next_in_forward(u) : NULL;
    return !next || ahead(next);
}

static bool prefetch_backward(kn_unit *u, kn_backward_prefetch when)
{
    if (u->nexts_backward)
        return when != KN_PREFETCH_PRE || ahead_of_list(u, u->next_backward, u->nexts_backward);
    kn_unit *next =
        u->options.backward_prefetch == when ? kn_order_next(&u->schedule->order) : NULL;
    return !next || ahead(next);
}

static bool replay(kn_unit *u);

/* ---- forward ------------------------------------------------------------------------------------------ */

void kn_schedule_recover(kn_schedule_state *s)
{
    if (!s || s->phase != KN_PHASE_FAILED || !kn_ok())
        return;
    s->phase = KN_PHASE_OUTSIDE;
    s->settled = true;
    kn_unit_finish_reduce(s->reducing);
    kn_unit_land(s->landing);
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        u->state = KN_UNIT_IDLE;
        for (int k = 0; k < u->buckets; k++)
            kn_bucket_recover(u->bucket[k]);
        kn_unit_reshard(u);
    }
}

/* Whether a backward may follow the forward that begins. */
static bool recorded(void)
{
    bool yes = kn_grad_mode();
    for (const kn_frame *f = kn_context_get()->frame; f && !yes; f = f->parent)
        yes = f->recorded;
    return yes;
}

static void begin_iteration(kn_schedule_state *s)
{
    kn_schedule_recover(s);
    s->recording = recorded();
    kn_unit_list recycled = s->last;
    s->last = s->begun;
    s->begun = recycled;
    s->begun.count = 0;
    if (!s->recording)
        return;
    kn_order_forward(&s->order, s->settled);
    s->settled = false;
}

static bool same_shapes(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++) {
        for (int k = 0; k < u->bucket[i]->params; k++) {
            const kn_bucket_param *p = &u->bucket[i]->param[k];
            bool same = p->tensor->ndim == p->ndim;
            for (int d = 0; same && d < p->ndim; d++)
                same = p->tensor->shape[d] == p->shape[d];
            if (!same)
                return kn_fail("fsdp: the shape of parameter '%s' was changed after its unit was "
                               "wrapped; change shapes before kn_fsdp_wrap",
                               p->name);
        }
    }
    return true;
}

static bool may_begin(const kn_unit *u, const kn_schedule_state *s)
{
    if (u != s->root && s->root->state != KN_UNIT_FORWARD)
        return kn_fail("fsdp: unit '%s' was called outside the wrapped root '%s'; call the root "
                       "module (or kn_enter it) so that its parameters are gathered",
                       kn_unit_name(u), s->root->module[0]->class_name);
    if (u->summoned)
        return kn_fail("fsdp: unit '%s' was called while its parameters are summoned; call "
                       "kn_summon_end first",
                       kn_unit_name(u));
    return expect(u, KN_UNIT_IDLE, KN_UNIT_FORWARD, "a forward") && same_shapes(u);
}

/* False where the call may not begin: nothing has changed then. */
static bool begin_forward(kn_unit *u, kn_schedule_state *s, const kn_module_impl *m)
{
    if (u == s->root && u->calls == 0 && (u->seen == 0 || m == u->module[0])) {
        u->seen = 0;
        begin_iteration(s);
    }
    if (!may_begin(u, s))
        return false;
    u->state = KN_UNIT_FORWARD;
    if (u->calls++ == 0 && s->recording && recorded() && !kn_order_begin(&s->order, u))
        return true; /* an error stands: the call ends with it */
    if (append(&s->begun, u) && kn_unit_unshard(u) && kn_unit_wait(u))
        prefetch_forward(u);
    return true;
}

static bool pre_forward(void *unit, kn_module_impl *m, kn_values *in)
{
    kn_unit *u = unit;
    kn_schedule_state *s = kn_schedule_of(u);
    if (!s || !(kn_in_backward() ? replay(u) : begin_forward(u, s, m)))
        return false;
    if (kn_ok())
        kn_unit_cast_inputs(u, in);
    return true;
}

/* Units that a group or a prefetch left gathered when the forward is over. */
static void end_iteration(kn_schedule_state *s)
{
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        if (u == s->root || (u->seen == 0 && !u->ahead))
            continue;
        u->seen = 0;
        if (s->recording && !u->ahead)
            kn_unit_reshard_after_forward(u);
        else
            kn_unit_reshard(u);
    }
}

/* Nothing of a forward that failed stays: its root's end releases all. */
static void fail_forward(kn_unit *u, kn_schedule_state *s)
{
    u->seen = 0;
    kn_unit_reshard(u);
    if (u != s->root)
        return;
    for (int i = 0; i < s->units; i++) {
        s->unit[i]->seen = 0;
        kn_unit_reshard(s->unit[i]);
    }
    if (s->recording)
        kn_order_forget_forward(&s->order);
    s->begun.count = s->last.count = 0;
}

/* Runs for each call that pre_forward let begin, whether it failed or not. */
static void post_forward(void *unit, kn_values *out)
{
    kn_unit *u = unit;
    kn_schedule_state *s = u->schedule;
    if (kn_ok())
        kn_unit_cast_outputs(u, out);
    if (kn_in_backward()) /* a recompute: backward needs the parameters now */
        return;
    if (--u->calls > 0)
        return;
    bool root = u == s->root;
    u->state = KN_UNIT_IDLE;
    if (s->recording)
        kn_order_end(&s->order, u);
    if (!kn_ok()) {
        fail_forward(u, s);
        return;
    }
    if (++u->seen < u->modules) { /* a group goes on */
        u->state = root ? KN_UNIT_FORWARD : KN_UNIT_IDLE;
        return;
    }
    u->seen = 0;
    if (s->recording)
        kn_unit_reshard_after_forward(u);
    else
        kn_unit_reshard(u);
    if (root)
        end_iteration(s);
}

/* ---- backward ------------------------------------------------------------------------------------------- */

/* Gradients that came out of turn, or that were held back for a unit that this backward did not reach, are
 * reduced now; all that was kept is dropped. */
static bool settle(kn_unit *u, bool *came)
{
    kn_unit_state was = u->state;
    u->seen = 0;
    if (was == KN_UNIT_LATE)
        u->state = KN_UNIT_POST_BACKWARD;
    bool done = was == KN_UNIT_POST_BACKWARD || (was == KN_UNIT_IDLE && !u->sync);
    bool ok = done || kn_unit_reduce(u);
    *came |= was != KN_UNIT_IDLE && kn_unit_owes(u);
    u->state = KN_UNIT_IDLE;
    if (!ok)
        return false;
    bool keep = !u->reshard_after_backward || (!u->sync && kn_unit_keeps(u));
    return (keep && !u->ahead) || kn_unit_reshard(u);
}

static void end_of_backward(void *arg)
{
    kn_schedule_state *s = arg;
    if (!kn_order_go_on(&s->order) || !kn_unit_finish_reduce(s->reducing))
        return;
    s->settled = true;
    bool synced = false, came = false; /* the same on all ranks */
    for (int i = 0; i < s->units; i++) {
        synced |= s->unit[i]->sync;
        if (!settle(s->unit[i], &came) || !kn_unit_finish_reduce(s->reducing))
            return;
    }
    if (!kn_unit_land(s->landing) || (synced && !kn_schedule_compare_notes(s, &came)))
        return;
    if (came)
        kn_module_round(s->root->module[0], kn_unit_divisor(s->root));
    s->phase = KN_PHASE_OUTSIDE;
}

static void backward_failed(void *arg)
{
    kn_schedule_state *s = arg;
    s->phase = KN_PHASE_FAILED; /* an error stands: it can't be mended now */
}

/* Before anything else that a backward wants of the tree. */
static bool begin_backward(kn_schedule_state *s)
{
    if (s->phase == KN_PHASE_BACKWARD)
        return kn_ok();
    kn_schedule_recover(s);
    if (!kn_on_backward(end_of_backward, backward_failed, s))
        return false;
    s->phase = KN_PHASE_BACKWARD;
    for (int i = 0; i < s->units; i++)
        for (int k = 0; k < s->unit[i]->buckets; k++)
            kn_bucket_settle(s->unit[i]->bucket[k]);
    return kn_order_start(s) && kn_order_go_on(&s->order);
}

bool kn_unit_enter(kn_unit *u)
{
    u->state = KN_UNIT_PRE_BACKWARD;
    return kn_unit_unshard(u) && kn_unit_wait(u) && prefetch_backward(u, KN_PREFETCH_PRE);
}

/* Takes u's turn; without one, gathers it where it is. */
static bool come_to(kn_unit *u)
{
    if (!kn_order_come_to(&u->schedule->order, u))
        return false;
    if (u->state == KN_UNIT_PRE_BACKWARD) /* a second call of the module, or a recompute */
        return kn_unit_unshard(u) && kn_unit_wait(u);
    u->state = KN_UNIT_PRE_BACKWARD;
    u->leave_at = -1;
    return kn_unit_unshard(u) && kn_unit_wait(u);
}

static bool replay(kn_unit *u)
{
    if (begin_backward(u->schedule))
        come_to(u);
    return true;
}

static void pre_backward(void *unit)
{
    kn_unit *u = unit;
    kn_schedule_state *s = u->schedule;
    if (!s) {
        kn_fail("fsdp: backward reached unit '%s', which has had no forward", kn_unit_name(u));
        return;
    }
    if (u->summoned) {
        kn_fail("fsdp: backward reached unit '%s' while its parameters are summoned; call "
                "kn_summon_end first",
                kn_unit_name(u));
        return;
    }
    if (s->root->state == KN_UNIT_FORWARD && s->root->calls == 0) { /* a group some of which ran */
        s->root->state = KN_UNIT_IDLE;
        s->root->seen = 0;
        end_iteration(s);
    }
    if (u->state == KN_UNIT_FORWARD) {
        expect(u, KN_UNIT_IDLE, KN_UNIT_POST_BACKWARD, "a backward");
        return;
    }
    if (begin_backward(s))
        come_to(u);
}

/* At most one reduction runs while the next unit computes: memory stays bounded. */
bool kn_unit_post_backward(kn_unit *u)
{
    u->state = KN_UNIT_POST_BACKWARD;
    bool keep = !u->reshard_after_backward || (!u->sync && kn_unit_keeps(u));
    return (keep || kn_unit_reshard(u)) && prefetch_backward(u, KN_PREFETCH_POST) &&
           kn_unit_finish_reduce(u->schedule->reducing) && kn_unit_reduce(u);
}

static bool got_gradients(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (!u->bucket[i]->grad->released)
            return true;
    return false;
}

/* kn_group.complete: the last gradient of the unit's parameters has arrived. Of a unit that had no turn none may
 * have come: it lies in a call that recomputes, but didn't run. Other ranks may not reach that call at all. */
void kn_unit_complete(void *unit)
{
    kn_unit *u = unit;
    if (!u->schedule) {
        kn_fail("fsdp: backward reached unit '%s', which has had no forward since it was wrapped",
                kn_unit_name(u));
        return;
    }
    if (!begin_backward(u->schedule))
        return;
    if (u->leave_at < 0 && (u->enter_at >= 0 || got_gradients(u)))
        u->state = KN_UNIT_LATE;
    kn_order_go_on(&u->schedule->order);
}

kn_unit_hooks *kn_unit_hooks_new(kn_unit *u)
{
    kn_unit_hooks *h = kn_host_calloc(1, sizeof *h);
    if (h)
        *h =
            (kn_unit_hooks){ pre_forward, post_forward, pre_backward, kn_unit_leave, &u->group, u };
    return h;
}
