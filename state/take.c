/* state/take.c: takes the state of a module or an optimizer. What may fail for want of memory does
 * so first; then the ranks gather one tensor after the other. */
#include "kernels/error_internal.h"
#include "state/dict_internal.h"

typedef struct taking {
    kn_entries all;
    kn_state *s;
    kn_state_kind kind;
    bool here; /* this rank gets the tensors */
    const char *prefix;
    kn_dtype dtype; /* of floats; KN_DTYPE_DEFAULT: their own */
    void *room;     /* for a tensor on its way */
} taking;

static kn_dtype dtype_of(const taking *t, const kn_entry *e)
{
    return t->dtype && kn_dtype_is_float(e->dtype) ? t->dtype : e->dtype;
}

static bool add_item(taking *t, const kn_entry *e)
{
    const bool full = t->kind == KN_STATE_FULL;
    const int64_t count = kn_interval_numel(e->part);
    const int before = t->s->count;
    const kn_dtype dtype = dtype_of(t, e);
    kn_tensor *tensor = kn_state_tensor_new(dtype, full ? e->ndim : 1, full ? e->shape : &count);
    if (!tensor)
        return false;
    kn_state_item *i = kn_state_add_tensor(t->s, t->prefix, e->name + t->all.below, dtype, e->ndim,
                                           e->shape, tensor);
    if (!i || t->s->count == before)
        return i && kn_fail("state: two tensors are called '%s'", i->name);
    if (!full) {
        i->part = e->part;
        i->ranks = kn_comm_size(t->all.comm);
        i->rank = kn_rank(t->all.comm);
        i->shards = e->bucket ? e->bucket->shards : 1;
        i->saver = e->saver;
        i->split = kn_entry_split(e);
        i->flat = e->kind == KN_ENTRY_FLAT;
    }
    return true;
}

/* Room for the largest tensor that doesn't go to its place at once. */
static bool make_room(taking *t)
{
    size_t most = 0;
    for (int i = 0; i < t->all.count; i++) {
        const kn_entry *e = &t->all.list[i];
        const size_t bytes = t->kind == KN_STATE_FULL ? kn_entry_bytes(e) : kn_entry_part_bytes(e);
        if ((!t->here || dtype_of(t, e) != e->dtype) && bytes > most)
            most = bytes;
    }
    t->room = kn_host_alloc(most + 1);
    return t->room != NULL;
}

static bool fill(const taking *t, const kn_entry *e, int *item)
{
    kn_state_item *i = t->here ? &t->s->list[(*item)++] : NULL;
    void *values = i ? kn_array_of(i->tensor).data : NULL;
    const bool straight = i && i->dtype == e->dtype;
    void *to = straight ? values : t->room;
    if (t->kind == KN_STATE_FULL ? !kn_entry_gather(e, &t->all, to) : !kn_entry_read(e, to))
        return false;
    return !i || straight || kn_state_convert(values, i->dtype, to, e->dtype, kn_numel(i->tensor));
}

/* A rank that can't says so before the others begin to gather. */
static bool run(taking *t)
{
    bool ok = t->kind != KN_STATE_SHARDED || kn_entries_deal(&t->all);
    for (int i = 0; ok && t->here && i < t->all.count; i++)
        ok = add_item(t, &t->all.list[i]);
    ok = ok && make_room(t);
    if (t->kind == KN_STATE_FULL)
        ok = kn_agree(t->all.comm, ok) && ok;
    int item = 0;
    for (int i = 0; ok && i < t->all.count; i++)
        ok = fill(t, &t->all.list[i], &item);
    return ok && kn_ok();
}

static kn_state *end(taking *t, bool ok)
{
    ok = kn_entries_end(&t->all) && ok && kn_ok();
    kn_host_free(t->room);
    if (ok)
        return t->s;
    kn_state_free(t->s);
    return NULL;
}

static bool begin(taking *t, const kn_module_impl *m, const kn_state_dict_options *o, bool optim,
                  const char *what)
{
    bool rank0_only;
    if (!kn_state_kind_for(m, o, optim, &t->kind, &rank0_only, what))
        return false;
    if (o->dtype && ((unsigned)o->dtype >= KN_DTYPE_COUNT || !kn_dtype_is_float(o->dtype)))
        return kn_fail("%s: .dtype is %s; it is that of float tensors", what,
                       kn_dtype_name(o->dtype));
    t->dtype = o->dtype;
    t->prefix = o->prefix;
    t->s = kn_state_new();
    bool ok = t->s && kn_entries_begin(&t->all, m->self, o->comm);
    t->all.only = o->only;
    t->all.except = o->except;
    t->all.below = optim ? 0 : t->all.below;
    t->here = !rank0_only || kn_rank(t->all.comm) == 0;
    return ok;
}

kn_state *kn_state_dict_(void *module, kn_state_dict_options o)
{
    static const char what[] = "kn_state_dict";
    const kn_module_impl *m = kn_ok() ? kn_impl(module, what) : NULL;
    taking t = { 0 };
    bool ok = m && begin(&t, m, &o, false, what);
    t.all.outside = t.kind == KN_STATE_LOCAL;
    if (ok && t.all.outside && (o.only || o.except))
        ok = kn_fail("%s: .only and .except aren't for local states, which hold whole units", what);
    ok = ok && kn_entries_add_model(&t.all, o.ema) &&
         (!t.all.outside || kn_entries_add_flat(&t.all));
    if (ok && o.ema && t.all.count > 0 && t.all.list[t.all.count - 1].kind == KN_ENTRY_FLAT)
        ok = kn_fail("%s: .ema isn't for local states, which hold units as they lie in memory",
                     what);
    ok = ok && run(&t);
    return end(&t, ok);
}

kn_state *kn_optim_state_dict_(const kn_optim *optim, kn_state_dict_options o)
{
    static const char what[] = "kn_optim_state_dict";
    taking t = { 0 };
    bool ok = kn_ok() && kn_given(optim, what, "the optimizer");
    const kn_module *m = ok ? kn_optim_module(optim) : NULL;
    ok = m && (!o.ema || kn_fail("%s: .ema is for kn_state_dict", what)) &&
         begin(&t, m->impl, &o, true, what) && kn_entries_add_optim(&t.all, optim) && run(&t) &&
         (!t.here || kn_optim_values_take(t.s, optim, o.prefix, &t.all));
    return end(&t, ok);
}
