/* fsdp/control.c: what a user changes between steps, and moves by hand. */
#include "fsdp/build.h"
#include "fsdp/schedule.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

/* ---- what may change between steps ----------------------------------------------------------- */

static kn_unit *unit_at(void *module, const char *what)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    kn_unit *u = kn_unit_of(m);
    if (m && !u)
        kn_fail("%s: '%s' (%s) is not a unit of fsdp; wrap it first, or name a module that "
                "kn_fsdp_units lists",
                what, kn_module_shown(m), m->class_name);
    return u;
}

/* A change of a field of units. */
typedef struct change {
    size_t at, bytes; /* of kn_unit */
    const void *to;
    const char *alike; /* all ranks must give this argument alike, which is number; NULL: needn't */
    double number;
    const char *what;
    const kn_comm *compared; /* whose ranks have compared it */
} change;

static bool change_unit(kn_unit *u, void *arg)
{
    change *c = arg;
    if (c->alike && u->comm != c->compared &&
        !kn_numbers_agree(c->number, u->comm, c->what, c->alike))
        return false;
    c->compared = u->comm;
    memcpy((char *)u + c->at, c->to, c->bytes);
    return true;
}

static bool apply(void *module, bool recurse, bool (*fn)(kn_unit *u, void *arg), void *arg,
                  const char *what)
{
    kn_unit *u = recurse ? NULL : unit_at(module, what);
    return recurse ? kn_ok() && kn_apply_units(module, fn, arg, what) : u && fn(u, arg);
}

/* The function that calls it sets the field of module's unit; recurse: of all units below, too. */
#define SET(module, recurse, field, value, ...)                                                    \
    apply(module, recurse, change_unit,                                                            \
          &(change){ .at = offsetof(kn_unit, field),                                               \
                     .bytes = sizeof((kn_unit *)NULL)->field,                                      \
                     .to = &(value),                                                               \
                     .what = __func__,                                                             \
                     __VA_ARGS__ },                                                                \
          __func__)

bool kn_fsdp_set_gradient_sync(void *module, bool on, bool recurse)
{
    return SET(module, recurse, set.sync, on);
}

bool kn_fsdp_set_all_reduce(void *module, bool on, bool recurse)
{
    return SET(module, recurse, set.all_reduce, on);
}

bool kn_fsdp_set_reshard_after_backward(void *module, bool on, bool recurse)
{
    return SET(module, recurse, set.reshard_after_backward, on);
}

bool kn_fsdp_set_unshard_in_backward(void *module, bool on, bool recurse)
{
    return SET(module, recurse, set.unshard_in_backward, on);
}

bool kn_fsdp_set_reduce_unused(void *module, bool on, bool recurse)
{
    return SET(module, recurse, set.reduce_unused, on, .alike = "on", .number = on);
}

/* Gradients that wait are divided by it as well. */
bool kn_fsdp_set_divide_factor(void *module, double factor, bool recurse)
{
    if (kn_ok() && !(factor >= 0 && isfinite(factor)))
        return kn_fail("%s: the factor is %g; it must be finite and positive, or 0 for the number "
                       "of ranks",
                       __func__, factor);
    return SET(module, recurse, options.divide_factor, factor, .alike = "the factor",
               .number = factor);
}

/* Of u's whole tree: a backward is one for all of it. */
static bool set_last(kn_unit *u, void *on)
{
    kn_unit_outermost(u)->set.is_last_backward = *(bool *)on;
    return true;
}

bool kn_fsdp_set_is_last_backward(void *module, bool on)
{
    return apply(module, true, set_last, &on, "kn_fsdp_set_is_last_backward");
}

static bool set_after_forward(kn_unit *u, void *value)
{
    return kn_unit_set_reshard(u, *(int *)value);
}

bool kn_fsdp_set_reshard_after_forward(void *module, int value, bool recurse)
{
    return apply(module, recurse, set_after_forward, &value, "kn_fsdp_set_reshard_after_forward");
}

/* ---- functions of the user's ----------------------------------------------------------------- */

bool kn_fsdp_set_comm_hook(void *module, kn_comm_hook hook, void *arg, bool recurse)
{
    return SET(module, recurse, set.hook, hook) && SET(module, recurse, set.hook_arg, arg);
}

bool kn_fsdp_set_all_reduce_hook(void *module, kn_comm_hook hook, void *arg, bool recurse)
{
    return SET(module, recurse, set.all_reduce_hook, hook) &&
           SET(module, recurse, set.all_reduce_hook_arg, arg);
}

bool kn_fsdp_set_gather_hook(void *module, kn_gather_hook hook, void *arg, bool recurse)
{
    return SET(module, recurse, set.gather_hook, hook) &&
           SET(module, recurse, set.gather_hook_arg, arg);
}

bool kn_fsdp_on_event(void *module, kn_fsdp_observer fn, void *arg)
{
    return SET(module, true, observer, fn) && SET(module, true, observer_arg, arg);
}

/* ---- news of the schedule -------------------------------------------------------------------- */

kn_fsdp_state kn_fsdp_unit_state(void *module)
{
    static const char *const doing[] = {
        [KN_UNIT_IDLE] = "idle",
        [KN_UNIT_FORWARD] = "forward",
        [KN_UNIT_PRE_BACKWARD] = "backward",
        [KN_UNIT_LATE] = "backward done",
        [KN_UNIT_POST_BACKWARD] = "backward done",
    };
    const kn_unit *u = unit_at(module, "kn_fsdp_unit_state");
    kn_fsdp_state now = { 0 };
    if (!u)
        return now;
    now = (kn_fsdp_state){ .doing = doing[u->state], .ahead = u->ahead, .reducing = u->reducing };
    now.gathered = u->buckets > 0;
    for (int i = 0; i < u->buckets; i++) {
        const kn_bucket *b = u->bucket[i];
        const bool whole = b->full == b->master || b->residency == KN_UNSHARDED;
        now.gathered &= whole;
        now.gathering |= b->residency == KN_GATHERING;
        if (b->full != b->master && !b->full->released)
            now.gathered_bytes += (int64_t)b->full->bytes;
        if (!b->grad->released)
            now.unreduced_bytes += (int64_t)b->grad->bytes;
    }
    return now;
}

/* ---- moving by hand -------------------------------------------------------------------------- */

/* Units that may be gathered when u's turn begins: of the same model, so that they live as long.
 * Those that turn out to belong to another tree of units in it are left out when the time comes. */
static kn_unit *listed(const kn_unit *u, void *module, const char *what)
{
    kn_unit *next = unit_at(module, what);
    if (!next || kn_impl_root(next->module[0]) == kn_impl_root(u->module[0]))
        return next;
    return kn_fail_null(
        "%s: unit '%s' (%s) belongs to another model than '%s'; list units of the same model", what,
        kn_unit_name(next), next->module[0]->class_name, kn_unit_name(u));
}

static bool set_list(kn_unit *u, kn_unit_list *to, kn_module *const *list, int n, const char *what)
{
    if (n < 0 || (n > 0 && !list))
        return kn_fail(
            "%s: the list of modules is NULL or has %d entries; pass the units to gather, "
            "or 0 entries for the schedule's own choice",
            what, n);
    kn_unit_list units = { 0 }, before = *to;
    bool ok = true;
    for (int i = 0; i < n && ok; i++) {
        kn_unit *next = listed(u, list[i], what);
        ok = next && kn_units_add(&units, next);
    }
    *to = ok ? units : before;
    kn_host_free(ok ? before.list : units.list);
    return ok;
}

bool kn_fsdp_prefetch_forward(void *module, kn_module *const *list, int n)
{
    kn_unit *u = unit_at(module, "kn_fsdp_prefetch_forward");
    return u && set_list(u, &u->next_forward, list, n, "kn_fsdp_prefetch_forward");
}

bool kn_fsdp_prefetch_backward(void *module, kn_module *const *list, int n)
{
    kn_unit *u = unit_at(module, "kn_fsdp_prefetch_backward");
    return u && set_list(u, &u->next_backward, list, n, "kn_fsdp_prefetch_backward");
}

kn_unshard_handle kn_fsdp_unshard(void *module)
{
    kn_unit *u = unit_at(module, "kn_fsdp_unshard");
    if (!u || !kn_unit_closed(u, kn_unit_name(u), "kn_fsdp_unshard") || !kn_schedule_of(u) ||
        !kn_unit_unshard(u, KN_WHY("kn_fsdp_unshard")))
        return (kn_unshard_handle){ NULL };
    return (kn_unshard_handle){ u };
}

bool kn_unshard_wait(kn_unshard_handle h)
{
    if (!h.unit)
        return kn_ok() ? kn_fail("kn_unshard_wait: the handle is empty: its unshard failed")
                       : false;
    if (!kn_lives(&h.unit->live, "unit", "kn_unshard_wait"))
        return false;
    return kn_schedule_of(h.unit) && /* it may have been released since */
           kn_unit_gather(h.unit, KN_WHY("kn_unshard_wait"));
}

/* The end of a backward that reached nothing, as if all of s's units had sync, all-reduce and the
 * last backward on. */
static bool reduce_held(kn_schedule_state *s)
{
    bool settled = s->settled, last = s->root->set.is_last_backward;
    kn_schedule_recover(s);
    if (s->phase != KN_PHASE_OUTSIDE)
        return kn_fail("kn_fsdp_reduce_grads: a backward of '%s' runs; call it after that",
                       kn_unit_name(s->root));
    bool *was = kn_host_calloc(2 * (size_t)s->units, sizeof *was);
    for (int i = 0; was && i < s->units; i++) {
        was[2 * i] = s->unit[i]->set.sync;
        was[2 * i + 1] = s->unit[i]->set.all_reduce;
        s->unit[i]->set.sync = s->unit[i]->set.all_reduce = true;
    }
    s->root->set.is_last_backward = true;
    if (was)
        kn_end_of_backward(s);
    for (int i = 0; was && i < s->units; i++) {
        s->unit[i]->set.sync = was[2 * i];
        s->unit[i]->set.all_reduce = was[2 * i + 1];
    }
    s->root->set.is_last_backward = last;
    s->settled = settled;
    kn_host_free(was);
    return kn_ok();
}

static bool reduce_tree(kn_unit *u, void *arg)
{
    (void)arg;
    if (kn_unit_outermost(u) != u)
        return true;
    kn_schedule_state *s = kn_schedule_of(u);
    return s && reduce_held(s);
}

bool kn_fsdp_reduce_grads(void *module)
{
    static const char what[] = "kn_fsdp_reduce_grads";
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    kn_unit *u = kn_unit_of(m);
    if (u && kn_unit_outermost(u) != u)
        return kn_fail("%s: '%s' lies in the tree of unit '%s'; name that one", what,
                       kn_unit_name(u), kn_unit_name(kn_unit_outermost(u)));
    return m && kn_apply_units(module, reduce_tree, NULL, what);
}

bool kn_fsdp_reshard(void *module)
{
    kn_unit *u = unit_at(module, "kn_fsdp_reshard");
    if (!u)
        return false;
    kn_forward_close(u->schedule);
    kn_schedule_recover(u->schedule);
    if (u->state != KN_UNIT_IDLE)
        return kn_fail("kn_fsdp_reshard: unit '%s' is in a forward or backward and needs its "
                       "parameters",
                       kn_unit_name(u));
    return kn_unit_reshard(u, KN_WHY("kn_fsdp_reshard"));
}
