/* fsdp/summon.c: looking at whole parameters through their own handles.
 *
 * Inside kn_summon .. kn_summon_end each parameter's handle points at a buffer of its own that
 * holds the whole parameter in the master dtype, gathered from the ranks' masters; so what is read
 * and changed there is what the optimizer works on, not the rounded copy that computes. So are the
 * gradients, where asked for. At the end each rank takes its part of what was changed. Units are
 * resharded first, so both never meet. */
#include "fsdp/schedule.h"
#include "fsdp/whole.h"
#include "kernels/memory_internal.h"

/* A bucket whose parameters are whole. */
typedef struct opened {
    kn_whole whole;
    kn_location *old; /* [params]; NULL until the handles were turned */
} opened;

typedef struct kn_summoned {
    kn_unit_list units;
    opened *bucket;
    int buckets;
    int64_t room;
    kn_summon_options o;
    struct kn_summoned *next; /* in the list of open scopes */
} summoned;

static _Thread_local summoned *open_scopes; /* so that a scope that ended is known as such */

/* ---- which units ----------------------------------------------------------------------------- */

static bool add_unit(summoned *s, kn_unit *u)
{
    for (int i = 0; i < s->units.count; i++) /* a group is met once for each of its modules */
        if (s->units.list[i] == u)
            return true;
    return kn_units_add(&s->units, u);
}

/* The units that hold m's own parameters: its own, one around it, or for tied ones another; and
 * the one that casts its buffers. */
static bool add_holders(summoned *s, const kn_module_impl *m)
{
    for (int i = 0; i < m->params; i++) {
        const kn_param p = { .tensor = m->param[i].tensor };
        kn_bucket *b = kn_bucket_of(&p);
        if (b && !add_unit(s, b->unit))
            return false;
    }
    kn_unit *around = kn_unit_around(m);
    for (int i = 0; i < m->buffers && around; i++)
        if (m->buffer[i].tensor->dtypes && !add_unit(s, around))
            return false;
    return true;
}

static bool add_below(summoned *s, kn_module_impl *m)
{
    bool only = s->o.not_recursive && m->unit;
    if (m->unit && !add_unit(s, kn_unit_of(m)))
        return false;
    if (!only && !add_holders(s, m))
        return false;
    for (int i = 0; i < m->children && !only; i++) {
        kn_module_impl *child = m->child[i]->impl;
        if (!(s->o.not_recursive && child->unit) && !add_below(s, child))
            return false;
    }
    return true;
}

bool kn_unit_closed(const kn_unit *u, const char *name, const char *what)
{
    return !u->summoned ||
           kn_fail("%s: '%s' is summoned; end the scope first (kn_summon_end)", what, name);
}

static bool may_summon(const kn_unit *u)
{
    kn_forward_close(u->schedule);
    kn_schedule_recover(u->schedule);
    if (u->summoned)
        return kn_fail("kn_summon: unit '%s' is summoned already; end that scope first",
                       kn_unit_name(u));
    if (u->options.device == KN_META)
        return kn_fail(
            "kn_summon: unit '%s' was wrapped with .device = KN_META: its parameters have "
            "no values to look at",
            kn_unit_name(u));
    if (u->state == KN_UNIT_FORWARD || kn_in_backward())
        return kn_fail("kn_summon: unit '%s' is in the middle of a %s; summon between steps",
                       kn_unit_name(u), kn_in_backward() ? "backward" : "forward");
    return true;
}

/* Gradients that wait on a rank for a reduction are no sums over ranks. */
static bool grads_are_there(const kn_unit *u)
{
    for (int i = 0; i < u->buckets; i++) {
        const kn_bucket *b = u->bucket[i];
        const char *why = b->source.held_back(&(kn_param){ .source = &b->source });
        if (why)
            return kn_fail("kn_summon: .with_grads can't show the gradients of unit '%s': %s",
                           kn_unit_name(u), why);
    }
    return true;
}

/* ---- a scope --------------------------------------------------------------------------------- */

static bool turn_handles(opened *o)
{
    const kn_whole *w = &o->whole;
    kn_bucket *b = w->bucket;
    o->old = kn_host_calloc((size_t)b->params + 1, sizeof *o->old);
    for (int i = 0; o->old && i < b->params; i++) {
        kn_location whole = { kn_storage_ref(w->values), b->layout.offset[i], b->master_dtype };
        o->old[i] = kn_turn_to(b->param[i].tensor, whole);
    }
    for (int i = 0; o->old && w->grads && i < b->params; i++) {
        const kn_bucket_param *p = &b->param[i];
        if (!kn_passes_any(&p->passes))
            continue;
        kn_tensor *g = kn_tensor_on(w->grads, b->layout.offset[i], b->grad_dtype, p->ndim, p->shape,
                                    NULL, false);
        if (!g)
            return false;
        p->tensor->leaf->grad = g;
    }
    return o->old != NULL;
}

static bool open_unit(summoned *s, kn_unit *u)
{
    if (!may_summon(u) || (s->o.with_grads && !grads_are_there(u)) ||
        !kn_unit_reshard(u, KN_WHY("kn_summon")) ||
        (u->schedule && !kn_unit_finish_reduce(u, KN_WHY("kn_summon"))))
        return false;
    u->summoned = s;
    if (!kn_unit_show_buffers(u, true))
        return false;
    for (int i = 0; i < u->buckets; i++) {
        if (!kn_host_grow(&s->bucket, &s->room, s->buckets + 1, sizeof *s->bucket))
            return false;
        opened *o = &s->bucket[s->buckets++];
        *o = (opened){ .whole = { .bucket = u->bucket[i],
                                  .place = s->o.offload_to_cpu ? KN_CPU : u->options.device,
                                  .rank0_only = s->o.rank0_only } };
        if (!kn_whole_gather(&o->whole, s->o.with_grads) || !turn_handles(o))
            return false;
    }
    return true;
}

/* ---- the end --------------------------------------------------------------------------------- */

static void return_handles(opened *o)
{
    kn_bucket *b = o->whole.bucket;
    for (int i = 0; o->old && i < b->params; i++) {
        kn_tensor *t = b->param[i].tensor;
        if (o->whole.grads) {
            kn_tensor_free(t->leaf->grad);
            t->leaf->grad = NULL;
        }
        kn_turn_back(t, o->old[i]);
    }
    kn_host_free(o->old);
    kn_storage_unref(o->whole.values);
    kn_storage_unref(o->whole.grads);
}

static bool end(summoned *s)
{
    bool ok = kn_ok();
    for (int i = 0; i < s->buckets; i++) {
        if (ok && !s->o.read_only)
            ok = kn_whole_write_back(&s->bucket[i].whole);
        return_handles(&s->bucket[i]);
    }
    for (int i = 0; i < s->units.count; i++)
        if (s->units.list[i]->summoned == s) {
            ok = kn_unit_show_buffers(s->units.list[i], false) && ok;
            s->units.list[i]->summoned = NULL;
        }
    kn_host_free(s->bucket);
    kn_host_free(s->units.list);
    kn_host_free(s);
    return ok && kn_ok();
}

void kn_summon_forget(kn_unit *u)
{
    summoned *s = u->summoned;
    int left = 0;
    if (!s)
        return;
    for (int i = 0; i < s->buckets; i++) {
        if (s->bucket[i].whole.bucket->unit == u)
            return_handles(&s->bucket[i]);
        else
            s->bucket[left++] = s->bucket[i];
    }
    s->buckets = left;
    kn_units_remove(&s->units, u);
    u->summoned = NULL;
}

static bool begin(summoned *s)
{
    for (int i = 0; i < s->units.count; i++)
        if (!open_unit(s, s->units.list[i]))
            return false;
    return true;
}

/* ---- the public face ------------------------------------------------------------------------- */

kn_summon_scope kn_summon_(void *module, kn_summon_options o)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_summon") : NULL;
    summoned *s = m ? kn_host_calloc(1, sizeof *s) : NULL;
    if (!s)
        return (kn_summon_scope){ NULL };
    s->o = o;
    if (add_below(s, m) && begin(s)) {
        s->next = open_scopes;
        open_scopes = s;
        return (kn_summon_scope){ s };
    }
    end(s);
    return (kn_summon_scope){ NULL };
}

bool kn_summon_end(kn_summon_scope scope)
{
    summoned **at = &open_scopes;
    if (!scope.s) /* kn_summon failed */
        return false;
    while (*at && *at != scope.s)
        at = &(*at)->next;
    if (!*at)
        return kn_fail(
            "kn_summon_end: this scope has ended already, or was begun by another thread");
    *at = scope.s->next;
    return end(scope.s);
}

/* ---- kn_fsdp_apply --------------------------------------------------------------------------- */

typedef struct application {
    bool (*fn)(kn_module *m, void *arg);
    void *arg;
    summoned *s; /* stays open while the next module's parameters lie in the same units */
} application;

static bool covers(const summoned *s, const summoned *needed)
{
    for (int i = 0; i < needed->units.count; i++)
        if (needed->units.list[i]->summoned != s || !s)
            return false;
    return true;
}

static bool apply_one(kn_module *m, void *arg)
{
    application *a = arg;
    summoned *needed = kn_host_calloc(1, sizeof *needed);
    if (!needed)
        return false;
    bool ok = add_holders(needed, m->impl);
    if (ok && !covers(a->s, needed)) {
        ok = !a->s || end(a->s);
        a->s = needed;
        needed = NULL;
        ok = ok && begin(a->s);
    }
    if (needed) {
        kn_host_free(needed->units.list);
        kn_host_free(needed);
    }
    if (ok && !a->fn(m, a->arg) && kn_ok())
        kn_fail(
            "kn_fsdp_apply: the function failed for '%s' (%s) without saying why; call kn_fail in "
            "it, so that the other ranks stop as well",
            kn_module_shown(m->impl), m->impl->class_name);
    return ok && kn_ok();
}

bool kn_fsdp_apply(void *root, bool (*fn)(kn_module *m, void *arg), void *arg)
{
    application a = { fn, arg, NULL };
    if (!kn_ok() || !kn_impl(root, "kn_fsdp_apply"))
        return false;
    if (!fn)
        return kn_fail("kn_fsdp_apply: the function to apply is NULL");
    bool grad = kn_set_grad_mode(false); /* parameters may be written in place */
    bool ok = kn_apply_modules(root, apply_one, &a);
    if (a.s)
        ok = end(a.s) && ok;
    kn_set_grad_mode(grad);
    return ok;
}
