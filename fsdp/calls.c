/* fsdp/calls.c: which forwards of units run. A unit is gathered for the first of its calls and
 * released after the last: its modules may call each other, and a group's modules run one after
 * another. */
#include "fsdp/schedule.h"

/* Whether a backward may follow the forward that begins. */
static bool recorded(void)
{
    bool yes = kn_grad_mode();
    for (const kn_frame *f = kn_context_get()->frame; f && !yes; f = f->parent)
        yes = f->recorded;
    return yes;
}

bool kn_call_is_inside(const kn_unit *u)
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
static void begin_outermost(kn_unit *u)
{
    kn_schedule_state *s = u->schedule;
    s->outermost = u;
    s->recording = recorded();
    kn_prefetch_begin(u);
    if (!s->recording)
        return;
    kn_order_forward(&s->order, s->units, s->settled);
    s->settled = false;
}

bool kn_call_begin(kn_unit *u, const kn_module_impl *m)
{
    kn_schedule_state *s = u->schedule;
    bool outermost = u->calls == 0 && !kn_call_is_inside(u) && !group_goes_on(u, m);
    outermost |= !s->outermost;
    if (outermost) {
        kn_forward_close(s);
        kn_schedule_recover(s);
    }
    if (!kn_check_forward(u))
        return false;
    if (outermost)
        begin_outermost(u);
    u->state = KN_UNIT_FORWARD;
    u->ran |= s->recording && recorded();
    if (u->calls++ == 0 && s->recording && recorded() && !kn_order_begin(&s->order, u))
        return true;
    kn_prefetch_note(u);
    return true;
}

bool kn_call_end(kn_unit *u)
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
        kn_unit_reshard_after_forward(u);
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
