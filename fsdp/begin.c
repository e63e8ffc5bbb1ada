/* fsdp/begin.c: the values that a unit's parameters and buffers begin with. Each rank fills its
 * shard only: by the declared initialiser, by the user's functions, from the module's own values,
 * or from rank 0's. */
#include "fsdp/build.h"

enum { CHUNK = 1 << 20 }; /* bytes of rank 0's values that are on their way at once */

static bool shares(const kn_unit *u)
{
    return u->options.sync_from_rank0 && u->size > 1 && u->options.device != KN_META;
}

/* Whether rank 0 has values of t; the same answer on all ranks. */
static bool rank0_has(const kn_unit *u, bool mine, const char *name, bool *has)
{
    int64_t say = mine;
    bool ok = kn_hosts_broadcast(u->comm, &say, sizeof say, 0, name);
    *has = say != 0;
    return ok;
}

/* ---- parameters from rank 0 ------------------------------------------------------------------ */

/* Elements [at, at + n) of the parameter have come to chunk: those of this rank's part are
 * copied. */
static bool take_chunk(kn_bucket_param *p, const char *chunk, int64_t at, int64_t n)
{
    kn_array to = kn_array_of(p->master);
    kn_device device = kn_device_of(p->master);
    size_t size = kn_dtype_size(to.dtype);
    bool ok = to.data != NULL;
    for (int64_t k = 0; ok && k < p->part.blocks; k++) {
        int64_t first = p->part.start + k * p->part.stride, last = first + p->part.count;
        int64_t begin = first > at ? first : at, end = last < at + n ? last : at + n;
        if (begin >= end)
            continue;
        char *dst = (char *)to.data + (size_t)(k * p->part.count + begin - first) * size;
        const char *src = chunk + (size_t)(begin - at) * size;
        size_t bytes = (size_t)(end - begin) * size;
        ok = kn_transfer(kn_compute_stream(device), dst, src, bytes, KN_TO_DEVICE, false);
    }
    return ok;
}

/* Rank 0's whole parameter goes round chunk by chunk, so no other rank ever holds more than one. */
static bool take_from_rank0(kn_bucket *b, kn_bucket_param *p, kn_tensor *whole)
{
    kn_unit *u = b->unit;
    kn_memory *pool = kn_comm_memory(u->comm);
    size_t size = kn_dtype_size(b->master_dtype);
    int64_t numel = kn_numel(whole), most = CHUNK / (int64_t)size;
    most = numel < most ? numel : most;
    size_t room = (size_t)most * size;
    char *chunk = room ? kn_take(pool, room, KN_MEM_COMM) : NULL;
    bool ok = chunk || !room;
    for (int64_t at = 0; ok && at < numel; at += most) {
        int64_t n = numel - at < most ? numel - at : most;
        size_t bytes = (size_t)n * size;
        if (u->rank == 0) {
            kn_scope scope = kn_scope_begin();
            kn_tensor *run = kn_tensor_alias(whole, at, 1, &n, (int64_t[]){ 1 });
            ok = run && kn_to_host(run, chunk, bytes);
            kn_scope_end(scope);
        }
        ok = ok && kn_hosts_broadcast(u->comm, chunk, bytes, 0, p->name) &&
             take_chunk(p, chunk, at, n);
    }
    if (chunk)
        kn_give(pool, chunk, room, KN_MEM_COMM);
    return ok && kn_ok();
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* run, which is elements from start on, gets what they are declared to begin with. */
static bool fill_run(const kn_fsdp_wrap_options *o, const kn_param_entry *e, const char *name,
                     kn_tensor *run, int64_t start)
{
    const kn_tensor *t = e->tensor;
    if (!run || !o->fill)
        return run && kn_init_fill(&e->init, o->seed, name, run, start);
    return o->fill(name, run, start, t->ndim, t->shape, o->fill_arg) ||
           (kn_ok() &&
            kn_fail("fsdp: .fill failed for '%s' without saying why; call kn_fail in it", name));
}

static bool fill_runs(const kn_bucket *b, const kn_bucket_param *p, const kn_param_entry *e,
                      const kn_tensor *from);

/* Each run of an orthogonal matrix would take all of it. */
static bool fill_from_whole(const kn_bucket *b, const kn_bucket_param *p, const kn_param_entry *e)
{
    int64_t n = kn_numel(e->tensor);
    kn_scope scope = kn_scope_begin();
    kn_tensor *whole = kn_empty(b->master_dtype, kn_device_of(p->master), 1, &n);
    bool ok = whole && kn_init_fill(&e->init, b->unit->options.seed, p->name, whole, 0) &&
              fill_runs(b, p, e, whole);
    kn_scope_end(scope);
    return ok;
}

/* Runs of this rank's part: from a whole tensor, or (from NULL) as declared. */
static bool fill_runs(const kn_bucket *b, const kn_bucket_param *p, const kn_param_entry *e,
                      const kn_tensor *from)
{
    kn_interval part = p->part;
    if (!from && part.blocks > 1 && e->init.kind == KN_INIT_ORTHOGONAL && !b->unit->options.fill)
        return fill_from_whole(b, p, e);
    for (int64_t k = 0; k < part.blocks && part.count > 0; k++) {
        int64_t one = 1, start = part.start + k * part.stride;
        kn_tensor *view = kn_tensor_alias(p->master, k * part.count, 1, &part.count, &one);
        if (!from && !fill_run(&b->unit->options, e, p->name, view, start))
            return false;
        kn_tensor *src = from ? kn_tensor_alias(from, start, 1, &part.count, &one) : NULL;
        if (from && !(view && src && kn_copy_(view, src)))
            return false;
    }
    return true;
}

/* has: there are values, on rank 0 where the others take its. */
static bool begin_param(const kn_claim *c, bool has)
{
    kn_bucket *b = c->bucket;
    kn_bucket_param *p = &b->param[c->at];
    const kn_param_entry *e = &c->module->param[c->index];
    if (has && !kn_is_contiguous(e->tensor))
        return kn_fail("kn_fsdp_wrap: parameter '%s' doesn't lie in one piece; replace it by its "
                       "kn_contiguous",
                       p->name);
    return has && shares(b->unit) ? take_from_rank0(b, p, e->tensor)
                                  : fill_runs(b, p, e, has ? e->tensor : NULL);
}

/* ---- parameters by a function of their module ------------------------------------------------ */

bool kn_has_values(const kn_tensor *t)
{
    return kn_device_of(t) != KN_META && !kn_param_unfilled(t);
}

static bool is_ignored(const kn_claims *c, const kn_module_impl *m, int i)
{
    for (int k = 0; k < c->ignores; k++)
        if (c->ignored[k].module == m && c->ignored[k].index == i)
            return true;
    return false;
}

/* The handle of m's parameter i, which had no values when it was wrapped, gets bytes for the whole
 * parameter, as declared. An ignored one keeps them. */
static bool make_whole(const kn_unit *u, const kn_claims *c, kn_module_impl *m, int i,
                       kn_location *old)
{
    const kn_param_entry *e = &m->param[i];
    const kn_bucket *b = e->unit;
    kn_tensor *t = e->tensor;
    int64_t n = kn_numel(t), one = 1;
    if (!e->owner)
        return true;
    if (is_ignored(c, m, i) && kn_param_unfilled(t))
        return kn_param_fill_whole(m, i, u->options.seed);
    kn_dtype dtype = b ? b->master_dtype : t->dtype;
    kn_storage *s =
        kn_storage_create(kn_device_memory(u->options.device), (size_t)n * kn_dtype_size(dtype),
                          KN_MEM_GATHERED, kn_unit_name(u));
    if (!s)
        return false;
    *old = kn_turn_to(t, (kn_location){ s, 0, dtype });
    char *name = kn_param_path(m, e);
    bool ok =
        name && (n == 0 || fill_run(&u->options, e, name, kn_tensor_alias(t, 0, 1, &n, &one), 0));
    kn_host_free(name);
    return ok;
}

/* Draws in fn are the module's own: the same on all ranks and however the tree is cut into units;
 * training's are as without it. */
static bool call_fill(const kn_unit *u, kn_module_impl *m)
{
    kn_draws draws = kn_draws_begin((int64_t)kn_hash64(u->options.seed, kn_hash_string(m->path)));
    bool ok = u->options.fill_module(m->self, u->options.fill_module_arg);
    kn_draws_end(draws);
    return ok || (kn_ok() && kn_fail("fsdp: .fill_module failed for '%s' (%s) without saying why; "
                                     "call kn_fail in it",
                                     kn_module_shown(m), m->class_name));
}

/* The claims of one module, from the first on: it is whole, then filled, and its claimed parts are
 * cut. */
static bool begin_module(const kn_unit *u, const kn_claims *claims, int first, int end)
{
    const kn_claim *c = &claims->list[first];
    int count = end - first;
    kn_module_impl *m = c->module;
    kn_location *old = kn_host_calloc((size_t)m->params, sizeof *old);
    kn_scope scope = kn_scope_begin();
    bool ok = old != NULL;
    for (int i = 0; ok && i < m->params; i++)
        ok = make_whole(u, claims, m, i, &old[i]);
    ok = ok && call_fill(u, m) && kn_ok();
    for (int i = 0; ok && i < count; i++) {
        const kn_param_entry *e = &m->param[c[i].index];
        ok = fill_runs(c[i].bucket, &c[i].bucket->param[c[i].at], e, e->tensor);
    }
    for (int i = 0; old && i < m->params; i++)
        kn_turn_back(m->param[i].tensor, old[i]);
    kn_scope_end(scope);
    kn_host_free(old);
    return ok;
}

/* Which of m's own parameters had values before a unit claimed or ignored them: has[m->params]; the
 * same answer on all ranks that take rank 0's. Those that c doesn't claim count only where a
 * function may fill the module. */
static bool find_values(const kn_unit *u, const kn_claim *c, int count, bool *has, bool *any)
{
    kn_module_impl *m = c->module;
    *any = false;
    for (int i = 0, k = 0; i < m->params; i++) {
        kn_param_entry *e = &m->param[i];
        bool claimed = k < count && c[k].index == i;
        k += claimed;
        if (!e->owner || !(claimed || u->options.fill_module))
            continue;
        has[i] = e->source || e->ignored ? e->given : kn_has_values(e->tensor);
        if (shares(u) && !rank0_has(u, has[i], e->name, &has[i]))
            return false;
        e->given = has[i];
        *any = *any || has[i];
    }
    return true;
}

/* The claims from the first to end, all of one module. */
static bool begin_claims(const kn_unit *u, const kn_claims *c, int first, int end)
{
    const kn_claim *list = &c->list[first];
    bool any, *has = kn_host_calloc((size_t)list->module->params, sizeof *has);
    bool ok = has && find_values(u, list, end - first, has, &any);
    if (ok && u->options.fill_module && !any)
        ok = begin_module(u, c, first, end);
    else
        for (int k = 0; ok && k < end - first; k++)
            ok = begin_param(&list[k], has[list[k].index]);
    kn_host_free(has);
    return ok;
}

bool kn_unit_begin_params(kn_unit *u, const kn_claims *c)
{
    bool ok = true;
    if (u->options.device == KN_META)
        return true;
    for (int i = 0; i < c->ignores; i++) {
        kn_param_entry *e = &c->ignored[i].module->param[c->ignored[i].index];
        e->given = kn_has_values(e->tensor);
    }
    for (int i = 0, end; ok && i < c->count; i = end) {
        for (end = i; end < c->count && c->list[end].module == c->list[i].module;)
            end++;
        ok = begin_claims(u, c, i, end);
    }
    return ok && kn_ok();
}

/* ---- buffers --------------------------------------------------------------------------------- */

static bool buffer_from_rank0(const kn_unit *u, kn_tensor *t, const char *name)
{
    size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(t->dtype);
    if (bytes == 0)
        return true;
    if (!kn_is_contiguous(t))
        return kn_fail(
            "kn_fsdp_wrap: .sync_from_rank0 needs buffer '%s' to lie in one piece; replace "
            "it by its kn_contiguous",
            name);
    kn_array a = kn_array_of(t);
    t->storage->version++;
    return a.data && kn_broadcast(u->comm, a.data, (int64_t)bytes, 0,
                                  kn_compute_stream(kn_device_of(t)), name);
}

/* One buffer moves to where the unit computes, gets rank 0's values where asked, and its dtype. */
static bool begin_buffer(const kn_unit *u, kn_buffer_entry *b, const char *name)
{
    const kn_fsdp_wrap_options *o = &u->options;
    if (b->tensor->dtypes && kn_device_of(b->tensor) == o->device)
        return true; /* it began in another module */
    bool has = b->declared || kn_device_of(b->tensor) != KN_META;
    if (shares(u) && !rank0_has(u, has, name, &has))
        return false;
    if (!has && o->device != KN_META)
        return kn_fail(
            "kn_fsdp_wrap: buffer '%s' is on meta, where it has no values%s, but its unit "
            "'%s' computes on %s; make it there, or declare it with kn_declare_buffer",
            name, shares(u) ? ", on rank 0 too" : "", kn_unit_name(u), kn_device_name(o->device));
    return kn_buffer_settle(b, o->device, o->seed, false) &&
           (!shares(u) || buffer_from_rank0(u, b->tensor, name)) &&
           (!o->buffer_dtype || kn_buffer_cast(b->tensor, o->buffer_dtype));
}

static bool begin_buffers(const kn_unit *u, kn_module_impl *m)
{
    bool ok = true;
    for (int i = 0; ok && i < m->buffers && !kn_ignores_module(&u->options, m); i++) {
        char *name = kn_param_path(m, &(kn_param_entry){ .name = m->buffer[i].name });
        ok = name &&
             (kn_matched(u->options.ignore, name) || begin_buffer(u, &m->buffer[i], name)) &&
             kn_ok();
        kn_host_free(name);
    }
    return ok;
}

bool kn_unit_begin_buffers(kn_unit *u)
{
    bool ok = true;
    for (int i = 0; i < u->modules; i++)
        for (kn_module_impl *m = u->module[i]; ok && m; m = kn_impl_next(m, u->module[i]))
            ok = kn_unit_around(m) || begin_buffers(u, m); /* u isn't there yet */
    return ok;
}

bool kn_unit_show_buffers(kn_unit *u, bool full)
{
    bool ok = true;
    for (int i = 0; i < u->modules; i++)
        for (kn_module_impl *m = u->module[i]; m; m = kn_impl_next(m, u->module[i]))
            for (int k = 0; k < m->buffers && kn_unit_around(m) == u; k++)
                ok = kn_buffer_show(m->buffer[k].tensor, full) && ok;
    return ok;
}
