/* fsdp/calls.c: which forwards of units run. A unit is gathered for the first of its calls and
 * released after the last: its modules may call each other, and a group's modules run one after
 * another. */
#include "fsdp/schedule.h"

/* Whether a backward may follow the forward that begins. */
static bool recorded(void)
{
    const kn_context *c = kn_context_get();
    bool yes = !c->no_grad;
    for (const kn_frame *f = c->frame; f && !yes; f = f->parent)
        yes = f->recorded;
    return yes;
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

static bool may_begin(const kn_unit *u)
{
    if (!kn_unit_closed(u, kn_unit_name(u), "fsdp: a forward"))
        return false;
    if (u->state != KN_UNIT_IDLE && u->state != KN_UNIT_FORWARD)
        return kn_fail("fsdp: unit '%s' is %s, so a forward cannot happen now; a backward begins "
                       "when all calls of its units are over",
                       kn_unit_name(u),
                       u->state == KN_UNIT_PRE_BACKWARD ? "in backward" : "done with backward");
    return same_shapes(u);
}

bool kn_unit_is_inside(const kn_unit *u)
{
    for (const kn_frame *f = kn_context_get()->frame; f; f = f->parent) {
        const kn_unit *outer = kn_unit_of(kn_frame_module(f));
        if (outer && outer != u && outer->schedule == u->schedule)
            return true;
    }
    return false;
}

/* Whether this call of u, by its module m, goes on with u's group. */
static bool group_goes_on(const kn_unit *u, const kn_module_impl *m)
{
    return u == u->schedule->outermost && u->group_calls > 0 && m != u->module[0];
}

/* A forward of u begins that isn't part of another one: mostly of the root. */
static void begin_outermost(kn_unit *u, bool recording)
{
    kn_schedule_state *s = u->schedule;
    s->outermost = u;
    s->recording = recording;
    kn_prefetch_begin(u);
    if (!s->recording)
        return;
    kn_order_forward(&s->order, s->units, s->settled);
    s->settled = false;
}

bool kn_unit_call_begin(kn_unit *u, const kn_module_impl *m)
{
    kn_schedule_state *s = u->schedule;
    bool outermost = u->calls == 0 && !kn_unit_is_inside(u) && !group_goes_on(u, m);
    outermost |= !s->outermost;
    if (outermost) {
        kn_forward_close(s);
        kn_schedule_recover(s);
    }
    if (!may_begin(u))
        return false;
    bool records = recorded();
    if (outermost)
        begin_outermost(u, records);
    u->state = KN_UNIT_FORWARD;
    records = records && s->recording;
    u->ran |= records;
    if (u->calls++ == 0 && records)
        kn_order_begin(&s->order, u); /* the call ends where it fails */
    return true;
}

bool kn_unit_call_end(kn_unit *u)
{
    kn_schedule_state *s = u->schedule;
    if (--u->calls > 0)
        return false;
    u->state = KN_UNIT_IDLE;
    if (s->recording)
        kn_order_end(&s->order, u);
    if (!kn_ok()) {
        kn_schedule_drop_forward(u);
        return false;
    }
    if (++u->group_calls < u->modules) { /* a group goes on */
        u->state = u == s->outermost ? KN_UNIT_FORWARD : KN_UNIT_IDLE;
        return false;
    }
    u->group_calls = 0;
    return true;
}

void kn_forward_end(kn_schedule_state *s)
{
    s->outermost = NULL;
    for (int i = 0; i < s->units; i++) {
        kn_unit *u = s->unit[i];
        if (u->group_calls == 0 && !u->ahead)
            continue;
        u->group_calls = 0;
        kn_unit_reshard_after_forward(u, KN_WHY("the outermost forward ended"));
    }
}

void kn_forward_close(kn_schedule_state *s)
{
    kn_unit *u = s ? s->outermost : NULL;
    if (!u || u->calls > 0)
        return;
    u->state = KN_UNIT_IDLE;
    kn_forward_end(s);
}
