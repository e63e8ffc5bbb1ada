/* fsdp/control.c: what a user changes between steps, and moves by hand. */
#include "fsdp/build.h"
#include "fsdp/schedule.h"
#include <math.h>

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

typedef struct change {
    bool (*set)(kn_unit *u, const struct change *c);
    bool on;
    int value, *units;
    double factor;
    kn_comm **compared; /* whose ranks have compared on or factor */
    kn_comm_hook hook;
    kn_gather_hook gather_hook;
    kn_fsdp_observer observer;
    void *arg;
} change;

static bool change_one(kn_module *m, void *arg)
{
    const change *c = arg;
    kn_unit *u = kn_unit_of(m->impl);
    *c->units += u != NULL;
    return !u || c->set(u, c);
}

static bool apply(void *module, bool recurse, const char *what, change c)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    if (!m)
        return false;
    int units = 0;
    c.units = &units;
    if (recurse)
        return kn_apply_modules(module, change_one, &c) &&
               (units > 0 ||
                kn_fail("%s: there is no unit of fsdp at or below '%s' (%s); wrap it first", what,
                        kn_module_shown(m), m->class_name));
    kn_unit *u = unit_at(module, what);
    return u && c.set(u, &c);
}

static bool set_sync(kn_unit *u, const change *c)
{
    u->sync = c->on;
    return true;
}

static bool set_all_reduce(kn_unit *u, const change *c)
{
    u->all_reduce = c->on;
    return true;
}

static bool set_in_backward(kn_unit *u, const change *c)
{
    u->unshard_in_backward = c->on;
    return true;
}

static bool set_unused(kn_unit *u, const change *c)
{
    if (u->comm != *c->compared &&
        !kn_numbers_agree(c->on, u->comm, "kn_fsdp_set_reduce_unused", "on"))
        return false;
    *c->compared = u->comm;
    u->reduce_unused = c->on;
    return true;
}

/* Of u's whole tree: a backward is one for all of it. */
static bool set_last(kn_unit *u, const change *c)
{
    kn_unit_outermost(u)->is_last_backward = c->on;
    return true;
}

static bool set_after_backward(kn_unit *u, const change *c)
{
    u->reshard_after_backward = c->on;
    return true;
}

/* Gradients that wait are divided by it as well. */
static bool set_factor(kn_unit *u, const change *c)
{
    if (u->comm != *c->compared &&
        !kn_numbers_agree(c->factor, u->comm, "kn_fsdp_set_divide_factor", "the factor"))
        return false;
    *c->compared = u->comm;
    u->options.divide_factor = c->factor;
    return true;
}

static bool set_hook(kn_unit *u, const change *c)
{
    u->hook = c->hook;
    u->hook_arg = c->arg;
    return true;
}

static bool set_all_reduce_hook(kn_unit *u, const change *c)
{
    u->all_reduce_hook = c->hook;
    u->all_reduce_hook_arg = c->arg;
    return true;
}

static bool set_gather_hook(kn_unit *u, const change *c)
{
    u->gather_hook = c->gather_hook;
    u->gather_hook_arg = c->arg;
    return true;
}

static bool set_observer(kn_unit *u, const change *c)
{
    u->observer = c->observer;
    u->observer_arg = c->arg;
    return true;
}

static bool set_after_forward(kn_unit *u, const change *c)
{
    return kn_unit_set_reshard(u, c->value);
}

bool kn_fsdp_set_gradient_sync(void *module, bool on, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_gradient_sync", (change){ set_sync, .on = on });
}

bool kn_fsdp_set_all_reduce(void *module, bool on, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_all_reduce", (change){ set_all_reduce, .on = on });
}

bool kn_fsdp_set_reshard_after_backward(void *module, bool on, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_reshard_after_backward",
                 (change){ set_after_backward, .on = on });
}

bool kn_fsdp_set_unshard_in_backward(void *module, bool on, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_unshard_in_backward",
                 (change){ set_in_backward, .on = on });
}

bool kn_fsdp_set_is_last_backward(void *module, bool on)
{
    return apply(module, true, "kn_fsdp_set_is_last_backward", (change){ set_last, .on = on });
}

bool kn_fsdp_set_reduce_unused(void *module, bool on, bool recurse)
{
    kn_comm *compared = NULL;
    return apply(module, recurse, "kn_fsdp_set_reduce_unused",
                 (change){ set_unused, .on = on, .compared = &compared });
}

bool kn_fsdp_set_reshard_after_forward(void *module, int value, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_reshard_after_forward",
                 (change){ set_after_forward, .value = value });
}

bool kn_fsdp_set_divide_factor(void *module, double factor, bool recurse)
{
    if (kn_ok() && !(factor >= 0 && isfinite(factor)))
        return kn_fail(
            "kn_fsdp_set_divide_factor: the factor is %g; it must be finite and positive, "
            "or 0 for the number of ranks",
            factor);
    kn_comm *compared = NULL;
    return apply(module, recurse, "kn_fsdp_set_divide_factor",
                 (change){ set_factor, .factor = factor, .compared = &compared });
}

bool kn_fsdp_set_comm_hook(void *module, kn_comm_hook hook, void *arg, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_comm_hook",
                 (change){ set_hook, .hook = hook, .arg = arg });
}

bool kn_fsdp_set_all_reduce_hook(void *module, kn_comm_hook hook, void *arg, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_all_reduce_hook",
                 (change){ set_all_reduce_hook, .hook = hook, .arg = arg });
}

bool kn_fsdp_set_gather_hook(void *module, kn_gather_hook hook, void *arg, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_gather_hook",
                 (change){ set_gather_hook, .gather_hook = hook, .arg = arg });
}

bool kn_fsdp_on_event(void *module, kn_fsdp_observer fn, void *arg)
{
    return apply(module, true, "kn_fsdp_on_event",
                 (change){ set_observer, .observer = fn, .arg = arg });
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

static bool set_list(const kn_unit *u, kn_unit ***to, int *count, kn_module *const *list, int n,
                     const char *what)
{
    if (n < 0 || (n > 0 && !list))
        return kn_fail(
            "%s: the list of modules is NULL or has %d entries; pass the units to gather, "
            "or 0 entries for the schedule's own choice",
            what, n);
    kn_unit **units = n > 0 ? kn_host_calloc((size_t)n, sizeof(kn_unit *)) : NULL;
    bool ok = n == 0 || units;
    for (int i = 0; i < n && ok; i++)
        ok = (units[i] = listed(u, list[i], what)) != NULL;
    if (!ok) {
        kn_host_free(units);
        return false;
    }
    kn_host_free(*to);
    *to = units;
    *count = n;
    return true;
}

bool kn_fsdp_prefetch_forward(void *module, kn_module *const *list, int n)
{
    kn_unit *u = unit_at(module, "kn_fsdp_prefetch_forward");
    return u &&
           set_list(u, &u->next_forward, &u->nexts_forward, list, n, "kn_fsdp_prefetch_forward");
}

bool kn_fsdp_prefetch_backward(void *module, kn_module *const *list, int n)
{
    kn_unit *u = unit_at(module, "kn_fsdp_prefetch_backward");
    return u &&
           set_list(u, &u->next_backward, &u->nexts_backward, list, n, "kn_fsdp_prefetch_backward");
}

kn_unshard_handle kn_fsdp_unshard(void *module)
{
    kn_unit *u = unit_at(module, "kn_fsdp_unshard");
    if (u && u->summoned)
        kn_fail(
            "kn_fsdp_unshard: the parameters of unit '%s' are summoned; call kn_summon_end first",
            kn_unit_name(u));
    if (!u || !kn_ok() || !kn_schedule_of(u) || !kn_unit_unshard(u))
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
    return kn_schedule_of(h.unit) && kn_unit_unshard(h.unit) &&
           kn_unit_wait(h.unit); /* may have been released since */
}

/* The end of a backward that reached nothing, as if all of s's units had sync, all-reduce and the
 * last backward on. */
static bool reduce_held(kn_schedule_state *s)
{
    bool settled = s->settled, last = s->root->is_last_backward;
    kn_schedule_recover(s);
    if (s->phase != KN_PHASE_OUTSIDE)
        return kn_fail("kn_fsdp_reduce_grads: a backward of '%s' runs; call it after that",
                       kn_unit_name(s->root));
    bool *was = kn_host_calloc(2 * (size_t)s->units, sizeof *was);
    for (int i = 0; was && i < s->units; i++) {
        was[2 * i] = s->unit[i]->sync;
        was[2 * i + 1] = s->unit[i]->all_reduce;
        s->unit[i]->sync = s->unit[i]->all_reduce = true;
    }
    s->root->is_last_backward = true;
    if (was)
        kn_end_of_backward(s);
    for (int i = 0; was && i < s->units; i++) {
        s->unit[i]->sync = was[2 * i];
        s->unit[i]->all_reduce = was[2 * i + 1];
    }
    s->root->is_last_backward = last;
    s->settled = settled;
    kn_host_free(was);
    return kn_ok();
}

static bool reduce_tree(kn_module *m, void *arg)
{
    kn_unit *u = kn_unit_of(m->impl);
    bool *any = arg;
    *any |= u != NULL;
    if (!u || m->impl != u->module[0] || kn_unit_outermost(u) != u)
        return true;
    kn_schedule_state *s = kn_schedule_of(u);
    return s && reduce_held(s);
}

bool kn_fsdp_reduce_grads(void *module)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_fsdp_reduce_grads") : NULL;
    kn_unit *u = kn_unit_of(m);
    bool any = false;
    if (!m)
        return false;
    if (u && kn_unit_outermost(u) != u)
        return kn_fail("kn_fsdp_reduce_grads: '%s' lies in the tree of unit '%s'; name that one",
                       kn_unit_name(u), kn_unit_name(kn_unit_outermost(u)));
    return kn_apply_modules(module, reduce_tree, &any) &&
           (any || kn_fail("kn_fsdp_reduce_grads: there is no unit of fsdp at or below '%s' (%s); "
                           "wrap it first",
                           kn_module_shown(m), m->class_name));
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
    return kn_unit_reshard(u);
}
