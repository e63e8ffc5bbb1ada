/* fsdp/unit.c: a unit's buckets move together; and the functions by which a user moves them. */
#include "fsdp/schedule.h"

kn_unit *kn_unit_of(const kn_module_impl *m)
{
    return m && m->unit ? m->unit->unit : NULL;
}

const char *kn_unit_name(const kn_unit *u)
{
    const kn_module_impl *m = u->module[0];
    return *m->path ? m->path : m->class_name;
}

bool kn_unit_is_unsharded(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (u->bucket[i]->residency != KN_UNSHARDED)
            return false;
    return true;
}

bool kn_unit_unshard(kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (!kn_bucket_unshard(u->bucket[i]))
            return false;
    return kn_ok();
}

bool kn_unit_wait(kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (!kn_bucket_wait(u->bucket[i]))
            return false;
    if (u->ahead) {
        u->ahead = false;
        u->schedule->ahead--;
    }
    return kn_ok();
}

static bool reshard(kn_unit *u, int keep)
{
    bool ok = true;
    for (int i = 0; i < u->buckets; i++)
        ok = kn_bucket_reshard(u->bucket[i], keep) && ok;
    if (u->ahead) {
        u->ahead = false;
        if (u->schedule)
            u->schedule->ahead--;
    }
    return ok;
}

bool kn_unit_reshard(kn_unit *u)
{
    bool ok = reshard(u, 1);
    for (int i = 0; i < u->buckets; i++)
        kn_bucket_drop_slice(u->bucket[i]);
    return ok;
}

bool kn_unit_owes(const kn_unit *u)
{
    bool any = false;
    for (int i = 0; i < u->buckets; i++)
        any |= kn_bucket_owes(u->bucket[i]);
    return any;
}

bool kn_unit_keeps(const kn_unit *u)
{
    kn_strategy s = u->options.strategy;
    return s == KN_SHARD_GRAD_OP || s == KN_HYBRID_SHARD_GRAD_OP;
}

double kn_unit_divisor(const kn_unit *u)
{
    const kn_fsdp_wrap_options *o = &u->options;
    double all = o->divide_factor > 0            ? o->divide_factor
                 : o->reduce_op == KN_REDUCE_SUM ? 1
                                                 : u->size;
    return o->predivide_factor > 0 ? all / o->predivide_factor : all;
}

bool kn_unit_reshard_after_forward(kn_unit *u)
{
    bool root = u == u->schedule->root;
    int how = u->options.reshard_after_forward;
    if (how == KN_RESHARD_DEFAULT)
        how = root || kn_unit_keeps(u) ? KN_RESHARD_NEVER : KN_RESHARD_ALWAYS;
    return how == KN_RESHARD_NEVER || reshard(u, how);
}

bool kn_unit_reduce(kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++)
        if (!kn_bucket_reduce(u->bucket[i], u->sync, u->all_reduce))
            return false;
    if (!u->sync)
        return true;
    u->schedule->reducing = u;
    return !kn_stream_is_inline(u->schedule->reduce) ||
           (kn_unit_finish_reduce(u) && kn_unit_land(u));
}

bool kn_unit_land(kn_unit *u)
{
    bool ok = true;
    for (int i = 0; u && i < u->buckets; i++)
        ok = kn_bucket_land(u->bucket[i]) && ok;
    if (u && u->schedule->landing == u)
        u->schedule->landing = NULL;
    return ok;
}

/* Two units' gradients may be on their way home: u's from now on, and those of the next reduction. */
bool kn_unit_finish_reduce(kn_unit *u)
{
    if (!u)
        return true;
    bool ok = u->schedule->landing == u || kn_unit_land(u->schedule->landing);
    u->schedule->landing = u;
    for (int i = 0; i < u->buckets; i++)
        ok = kn_bucket_finish_reduce(u->bucket[i]) && ok;
    if (u->schedule->reducing == u)
        u->schedule->reducing = NULL;
    return ok && kn_ok();
}

void kn_unit_free(void *unit)
{
    kn_unit *u = unit;
    if (!u)
        return;
    kn_summon_forget(u);
    kn_schedule_free(u->schedule); /* which speaks of all its units */
    for (int i = 0; i < u->buckets; i++)
        kn_bucket_free(u->bucket[i]);
    kn_host_free(u->bucket);
    kn_host_free(u->module);
    kn_host_free(u->next_forward);
    kn_host_free(u->next_backward);
    kn_host_free(u);
}

void kn_unit_leave(void *unit, kn_module_impl *m)
{
    kn_unit *u = unit;
    int left = 0;
    if (u->schedule) { /* what runs still reads the unit's bytes and m's path */
        kn_stream_sync(u->schedule->gather);
        kn_stream_sync(u->schedule->reduce);
        if (u->schedule->upload) {
            kn_stream_sync(u->schedule->upload);
            kn_stream_sync(u->schedule->download);
        }
    }
    for (int i = 0; i < u->modules; i++)
        if (u->module[i] != m)
            u->module[left++] = u->module[i];
    u->modules = left;
    if (left == 0)
        kn_unit_free(u);
}

/* ---- what may change between steps ------------------------------------------------------------------ */

static kn_unit *unit_at(void *module, const char *what)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    kn_unit *u = kn_unit_of(m);
    if (m && !u)
        kn_fail("%s: '%s' (%s) is not a unit of fsdp; wrap it first, or name a module that "
                "kn_fsdp_units lists",
                what, m->path, m->class_name);
    return u;
}

typedef struct change {
    bool (*set)(kn_unit *u, const struct change *c);
    bool on;
    int value, *units;
    kn_comm_hook hook;
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
                        m->path, m->class_name));
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

static bool set_after_backward(kn_unit *u, const change *c)
{
    u->reshard_after_backward = c->on;
    return true;
}

static bool set_hook(kn_unit *u, const change *c)
{
    u->hook = c->hook;
    u->hook_arg = c->arg;
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

bool kn_fsdp_set_reshard_after_forward(void *module, int value, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_reshard_after_forward",
                 (change){ set_after_forward, .value = value });
}

bool kn_fsdp_set_comm_hook(void *module, kn_comm_hook hook, void *arg, bool recurse)
{
    return apply(module, recurse, "kn_fsdp_set_comm_hook",
                 (change){ set_hook, .hook = hook, .arg = arg });
}

/* ---- moving by hand --------------------------------------------------------------------------------- */

/* Units that may be gathered when u's turn begins: of the same model, so that they live as long. Those that turn
 * out to belong to another tree of units in it are left out when the time comes. */
static kn_unit *listed(const kn_unit *u, void *module, const char *what)
{
    kn_unit *next = unit_at(module, what);
    if (!next || kn_impl_root(next->module[0]) == kn_impl_root(u->module[0]))
        return next;
    kn_fail("%s: unit '%s' (%s) belongs to another model than '%s'; list units of the same model",
            what, kn_unit_name(next), next->module[0]->class_name, kn_unit_name(u));
    return NULL;
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
    return kn_unit_unshard(h.unit) && kn_unit_wait(h.unit); /* may have been released since */
}

bool kn_fsdp_reshard(void *module)
{
    kn_unit *u = unit_at(module, "kn_fsdp_reshard");
    if (!u)
        return false;
    kn_schedule_recover(u->schedule);
    if (u->state != KN_UNIT_IDLE)
        return kn_fail("kn_fsdp_reshard: unit '%s' is in a forward or backward and needs its "
                       "parameters",
                       kn_unit_name(u));
    return kn_unit_reshard(u);
}
