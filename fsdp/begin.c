/* fsdp/begin.c: the values that a unit's parameters and buffers begin with. Each rank fills its
 * shard only: by the declared initialiser, by the user's function, from the module's own values, or
 * from rank 0's. */
#include "fsdp/build.h"
#include <string.h>

enum { CHUNK = 1 << 20 }; /* bytes of rank 0's values that are on their way at once */

static bool shares(const kn_unit *u)
{
    return u->options.sync_from_rank0 && u->size > 1 && u->options.device != KN_META;
}

/* Whether rank 0 has values of t; the same answer on all ranks. */
static bool rank0_has(const kn_unit *u, bool mine, const char *name, bool *has)
{
    int64_t say = mine;
    bool ok = kn_broadcast(u->comm, &say, sizeof say, 0, kn_compute_stream(KN_CPU), name);
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
        if (device == KN_CPU)
            memcpy(dst, src, bytes);
        else
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
        ok = ok &&
             kn_broadcast(u->comm, chunk, (int64_t)bytes, 0, kn_compute_stream(KN_CPU), p->name) &&
             take_chunk(p, chunk, at, n);
    }
    if (chunk)
        kn_give(pool, chunk, room, KN_MEM_COMM);
    return ok && kn_ok();
}

/* ---- parameters ------------------------------------------------------------------------------ */

/* Runs of this rank's part: from the module's tensor, or (from NULL) from the initialiser. */
static bool fill_runs(kn_bucket *b, kn_bucket_param *p, const kn_param_entry *e,
                      const kn_tensor *from)
{
    const kn_fsdp_wrap_options *o = &b->unit->options;
    kn_interval part = p->part;
    for (int64_t k = 0; k < part.blocks && part.count > 0; k++) {
        int64_t one = 1, start = part.start + k * part.stride;
        kn_tensor *view = kn_tensor_alias(p->master, k * part.count, 1, &part.count, &one);
        bool ok = view != NULL;
        if (ok && from) {
            kn_tensor *src = kn_tensor_alias(e->tensor, start, 1, &part.count, &one);
            ok = src && kn_copy_(view, src);
        } else if (ok && o->fill) {
            ok = o->fill(p->name, view, start, p->ndim, p->shape, o->fill_arg) ||
                 (kn_ok() && kn_fail("fsdp: .fill failed for '%s' without saying why; call kn_fail "
                                     "in it",
                                     p->name));
        } else if (ok) {
            ok = kn_init_fill(&e->init, o->seed, p->name, view, start);
        }
        if (!ok)
            return false;
    }
    return true;
}

bool kn_bucket_begin(kn_bucket *b, kn_bucket_param *p, const kn_param_entry *e)
{
    kn_tensor *t = e->tensor;
    bool has = kn_device_of(t) != KN_META && !kn_param_unfilled(t), shared = shares(b->unit);
    if (b->unit->options.device == KN_META)
        return true;
    if (has && !kn_is_contiguous(t))
        return kn_fail("kn_fsdp_wrap: parameter '%s' doesn't lie in one piece; replace it by its "
                       "kn_contiguous",
                       p->name);
    if (shared && !rank0_has(b->unit, has, p->name, &has))
        return false;
    return shared && has ? take_from_rank0(b, p, t) : fill_runs(b, p, e, has ? t : NULL);
}

/* ---- buffers --------------------------------------------------------------------------------- */

/* t keeps its handle, which the module's own struct may hold too, and gets other bytes. */
static bool recast(kn_tensor *t, kn_dtype dtype, const char *label)
{
    if (!kn_dtype_is_float(t->dtype) || t->dtype == dtype)
        return true;
    kn_device device = kn_device_of(t);
    size_t bytes = (size_t)kn_numel(t) * kn_dtype_size(dtype);
    kn_storage *s = kn_storage_create(kn_device_memory(device), bytes, KN_MEM_BUFFER, label);
    kn_tensor *cast = s ? kn_tensor_on(s, 0, dtype, t->ndim, t->shape, NULL, false) : NULL;
    bool grad = kn_set_grad_mode(false);
    bool ok = cast && (kn_numel(t) == 0 || kn_copy_(cast, t));
    kn_set_grad_mode(grad);
    if (ok) {
        kn_storage_unref(t->storage);
        t->storage = kn_storage_ref(s);
        t->offset = 0;
        t->dtype = dtype;
        kn_row_major(t->ndim, t->shape, t->stride);
    }
    kn_tensor_free(cast);
    kn_storage_unref(s);
    return ok;
}

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
           (!o->buffer_dtype || recast(b->tensor, o->buffer_dtype, b->name));
}

static bool begin_below(const kn_unit *u, kn_module_impl *m)
{
    for (int i = 0; i < m->buffers; i++) {
        char *name = kn_param_path(m, &(kn_param_entry){ .name = m->buffer[i].name });
        bool ok =
            name && (kn_matched(u->options.ignore, name) || begin_buffer(u, &m->buffer[i], name));
        kn_host_free(name);
        if (!ok || !kn_ok())
            return false;
    }
    for (int i = 0; i < m->children; i++)
        if (!m->child[i]->impl->unit && !begin_below(u, m->child[i]->impl))
            return false;
    return true;
}

bool kn_unit_begin_buffers(kn_unit *u)
{
    for (int i = 0; i < u->modules; i++)
        if (!begin_below(u, u->module[i]))
            return false;
    return true;
}
