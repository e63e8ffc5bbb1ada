/* fsdp/summon.c: looking at whole parameters through their own handles.
 *
 * Inside kn_summon .. kn_summon_end each parameter's handle points at a buffer of its own that
 * holds the whole parameter in the master dtype, gathered from the ranks' masters; so what is read
 * and changed there is what the optimizer works on, not the rounded copy that computes. At the end
 * each rank takes its part of what was changed. Units are resharded first, so both never meet. */
#include "fsdp/schedule.h"
#include <string.h>

/* A handle as it was. */
typedef struct handle {
    kn_storage *storage; /* the handle's reference, kept here */
    int64_t offset;
    kn_dtype dtype;
} handle;

/* A bucket whose parameters are whole. */
typedef struct whole {
    kn_bucket *bucket;
    kn_storage *values, *grads; /* [full_numel]; grads NULL without */
    handle *old;                /* [params]; NULL until the handles were turned */
} whole;

typedef struct kn_summoned {
    kn_unit **unit;
    int units;
    whole *whole;
    int wholes;
    kn_summon_options o;
    struct kn_summoned *next; /* in the list of open scopes */
} summoned;

static _Thread_local summoned *open_scopes; /* so that a scope that ended is known as such */

/* ---- which units ----------------------------------------------------------------------------- */

static bool add_unit(summoned *s, kn_unit *u)
{
    for (int i = 0; i < s->units; i++) /* a group is met once for each of its modules */
        if (s->unit[i] == u)
            return true;
    kn_unit **list = kn_host_realloc(s->unit, (size_t)(s->units + 1) * sizeof *list);
    if (!list)
        return false;
    s->unit = list;
    s->unit[s->units++] = u;
    return true;
}

/* The units that hold m's own parameters: its own, one around it, or for tied ones another. */
static bool add_holders(summoned *s, const kn_module_impl *m)
{
    for (int i = 0; i < m->params; i++) {
        const kn_param p = { .tensor = m->param[i].tensor };
        kn_bucket *b = kn_bucket_of(&p);
        if (b && !add_unit(s, b->unit))
            return false;
    }
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

static bool may_summon(const kn_unit *u)
{
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

/* An offloaded shard was read or written and isn't needed for a while. */
static void done_with(const kn_bucket *b, const kn_storage *shard)
{
    if (kn_memory_is_store(b->memory))
        kn_store_done(shard->data, shard->bytes);
}

/* ---- bytes, wherever they lie ---------------------------------------------------------------- */

/* Where whole parameters are put together. */
static kn_device place(const kn_bucket *b)
{
    return b->unit->options.device == KN_META ? KN_CPU : b->unit->options.device;
}

static kn_stream *stream_of(const kn_bucket *b)
{
    return kn_compute_stream(place(b));
}

static bool move(const kn_bucket *b, void *dst, kn_device to, const void *src, kn_device from,
                 size_t bytes)
{
    if (place(b) != KN_CPU)
        return kn_transfer(stream_of(b), dst, src, bytes,
                           to == from     ? KN_WITHIN
                           : to == KN_CPU ? KN_TO_HOST
                                          : KN_TO_DEVICE,
                           false);
    memcpy(dst, src, bytes);
    return true;
}

static bool clear(const kn_bucket *b, void *p, kn_dtype t, int64_t count)
{
    kn_fill_args args = { kn_array_make(p, t, 1, &count), 0, 0 };
    if (place(b) != KN_CPU)
        return count == 0 || KN_LAUNCH(stream_of(b), KN_K_FILL, args);
    memset(p, 0, (size_t)count * kn_dtype_size(t));
    return true;
}

/* A part of a parameter, packed, becomes its elements of the whole one (paste), or the other
 * way. */
static bool move_part(const kn_bucket *b, kn_interval part, char *full, char *packed, kn_dtype t,
                      bool paste)
{
    size_t size = kn_dtype_size(t);
    if (place(b) == KN_CPU) {
        if (paste)
            kn_interval_paste(part, full, packed, size);
        else
            kn_interval_cut(part, packed, full, size);
        return true;
    }
    int64_t shape[2] = { part.blocks, part.count };
    kn_array in = kn_array_make(packed, t, 2, shape);
    kn_array out = kn_array_make(full + (size_t)part.start * size, t, 2, shape);
    out.stride[0] = part.stride;
    kn_copy_args args = { paste ? out : in, paste ? in : out };
    return part.blocks == 0 || part.count == 0 || KN_LAUNCH(stream_of(b), KN_K_COPY, args);
}

/* ---- chunks: one rank's shard of a bucket ---------------------------------------------------- */

static size_t chunk_bytes(const kn_bucket *b, kn_dtype t)
{
    return (size_t)b->layout.shard * kn_dtype_size(t);
}

/* Where shard s lies in a whole buffer; NULL where the layout isn't zero-copy. */
static char *chunk_in(const kn_bucket *b, const kn_storage *w, kn_dtype t, int s)
{
    if (!b->layout.zero_copy || w->released)
        return NULL;
    return (char *)w->data + (size_t)s * chunk_bytes(b, t);
}

static bool move_chunk(const kn_bucket *b, const kn_storage *w, kn_dtype t, int s, char *chunk,
                       bool paste)
{
    size_t size = kn_dtype_size(t);
    bool ok = true;
    for (int i = 0; ok && i < b->params; i++) {
        kn_interval part = kn_layout_part(&b->layout, i, s);
        ok = move_part(b, part, (char *)w->data + (size_t)b->layout.offset[i] * size,
                       chunk + (size_t)part.at * size, t, paste);
    }
    return ok;
}

static bool cut_chunk(const kn_bucket *b, const kn_storage *w, kn_dtype t, int s, char *chunk)
{
    return clear(b, chunk, t, b->layout.shard) /* padding */ &&
           move_chunk(b, w, t, s, chunk, false);
}

static bool send(const kn_bucket *b, char *chunk, kn_dtype t, int root)
{
    return b->unit->size == 1 || kn_broadcast(b->unit->comm, chunk, (int64_t)chunk_bytes(b, t),
                                              root, stream_of(b), kn_unit_name(b->unit));
}

/* ---- gathering ------------------------------------------------------------------------------- */

/* w = every shard in its place, where w has bytes. Of the ranks that hold shard s, rank s
 * answers. */
static bool gather_chunks(const kn_bucket *b, kn_storage *w, const kn_storage *shard, kn_dtype t,
                          char *room)
{
    for (int s = 0; s < b->shards; s++) {
        char *chunk = chunk_in(b, w, t, s);
        chunk = chunk ? chunk : room;
        if (b->shard == s &&
            !move(b, chunk, place(b), shard->data, shard->device, chunk_bytes(b, t)))
            return false;
        if (b->shards > 1 && !send(b, chunk, t, s))
            return false;
        if (!b->layout.zero_copy && !w->released && !move_chunk(b, w, t, s, chunk, true))
            return false;
    }
    return true;
}

/* The whole of what the ranks hold in shard; without bytes where the rank isn't to have it. */
static kn_storage *gather(const kn_bucket *b, const kn_storage *shard, kn_dtype t, bool rank0_only)
{
    const kn_unit *u = b->unit;
    kn_memory *pool = kn_device_memory(place(b));
    size_t bytes = (size_t)b->layout.full_numel * kn_dtype_size(t), chunk = chunk_bytes(b, t);
    bool here = !rank0_only || u->rank == 0;
    kn_storage *w = here
                        ? kn_storage_create(pool, bytes, KN_MEM_GATHERED, kn_unit_name(u))
                        : kn_storage_create_released(pool, bytes, KN_MEM_GATHERED, kn_unit_name(u));
    bool ok = w != NULL;
    bool straight = b->layout.zero_copy && (place(b) == KN_CPU || shard->device == place(b));
    if (ok && straight && !rank0_only && b->shards > 1 && b->shards == u->size) {
        ok = kn_all_gather(u->comm, w->data, shard->data, b->layout.shard, t, stream_of(b),
                           kn_unit_name(u));
    } else if (ok) {
        char *room = kn_take(pool, chunk, KN_MEM_GATHERED);
        ok = room && (!here || b->layout.zero_copy || clear(b, w->data, t, b->layout.full_numel)) &&
             gather_chunks(b, w, shard, t, room);
        if (room)
            kn_give(pool, room, chunk, KN_MEM_GATHERED);
    }
    done_with(b, shard);
    if (ok && kn_ok())
        return w;
    kn_storage_unref(w);
    return NULL;
}

static bool turn_handles(whole *w)
{
    kn_bucket *b = w->bucket;
    w->old = kn_host_calloc((size_t)b->params + 1, sizeof *w->old);
    for (int i = 0; w->old && i < b->params; i++) {
        kn_tensor *t = b->param[i].tensor;
        w->old[i] = (handle){ t->storage, t->offset, t->dtype };
        t->storage = kn_storage_ref(w->values);
        t->offset = b->layout.offset[i];
        t->dtype = b->master_dtype;
    }
    for (int i = 0; w->old && w->grads && i < b->params; i++) {
        const kn_bucket_param *p = &b->param[i];
        if (!p->has_grad)
            continue;
        kn_tensor *g = kn_tensor_on(w->grads, b->layout.offset[i], b->grad_dtype, p->ndim, p->shape,
                                    NULL, false);
        if (!g)
            return false;
        p->tensor->leaf->grad = g;
    }
    return w->old != NULL;
}

static bool open_unit(summoned *s, kn_unit *u)
{
    if (!may_summon(u) || !kn_unit_reshard(u) || (u->schedule && !kn_unit_finish_reduce(u)))
        return false;
    u->summoned = s;
    whole *list = kn_host_realloc(s->whole, (size_t)(s->wholes + u->buckets + 1) * sizeof *list);
    if (!list)
        return false;
    s->whole = list;
    for (int i = 0; i < u->buckets; i++) {
        kn_bucket *b = u->bucket[i];
        whole *w = &s->whole[s->wholes++];
        *w = (whole){ .bucket = b };
        w->values = gather(b, b->master, b->master_dtype, s->o.rank0_only);
        if (!w->values)
            return false;
        if (s->o.with_grads && b->has_grad) {
            if (!kn_bucket_sync_transfers(b))
                return false;
            w->grads = gather(b, b->grad_shard, b->grad_dtype, s->o.rank0_only);
            if (!w->grads)
                return false;
        }
        if (!turn_handles(w))
            return false;
    }
    return true;
}

/* ---- the end --------------------------------------------------------------------------------- */

/* p, which lies on device d, or a copy of it on the host; *room is what to free. */
static const void *on_host(const kn_bucket *b, const void *p, kn_device d, size_t bytes,
                           void **room)
{
    *room = NULL;
    if (place(b) == KN_CPU || d == KN_CPU)
        return p;
    *room = kn_host_alloc(bytes + 1);
    bool ok = *room && kn_transfer(stream_of(b), *room, p, bytes, KN_TO_HOST, true) &&
              kn_stream_sync(stream_of(b));
    return ok ? *room : NULL;
}

/* This rank's master becomes chunk; *changed where it was something else. */
static bool take_chunk(kn_bucket *b, const char *chunk, float *changed)
{
    size_t bytes = chunk_bytes(b, b->master_dtype);
    kn_device device = b->master->device;
    void *room[2];
    const void *now = on_host(b, chunk, place(b), bytes, &room[0]);
    const void *was = on_host(b, b->master->data, device, bytes, &room[1]);
    bool ok = now && was;
    if (ok && memcmp(was, now, bytes) != 0) {
        ok = kn_bucket_sync_transfers(b) &&
             move(b, b->master->data, device, chunk, place(b), bytes) &&
             (device == place(b) || kn_stream_sync(stream_of(b)));
        *changed = 1;
    }
    kn_host_free(room[0]);
    kn_host_free(room[1]);
    return ok;
}

static bool write_chunks(const whole *w, bool rank0_only, char *room, float *changed)
{
    kn_bucket *b = w->bucket;
    kn_dtype t = b->master_dtype;
    for (int s = 0; s < b->shards; s++) {
        char *chunk = chunk_in(b, w->values, t, s);
        bool wanted = rank0_only ? !w->values->released : b->shard == s;
        if (!chunk) {
            chunk = room;
            if (wanted && !cut_chunk(b, w->values, t, s, chunk))
                return false;
        }
        if (rank0_only && !send(b, chunk, t, 0))
            return false;
        if (b->shard == s && !take_chunk(b, chunk, changed))
            return false;
    }
    return true;
}

/* Gathered copies that a graph has saved are out of date on every rank if a shard of any
 * changed. */
static bool write_back(const whole *w, bool rank0_only)
{
    kn_bucket *b = w->bucket;
    kn_memory *pool = kn_device_memory(place(b));
    size_t bytes = chunk_bytes(b, b->master_dtype);
    char *room = kn_take(pool, bytes, KN_MEM_GATHERED);
    float changed = 0;
    bool ok = room && write_chunks(w, rank0_only, room, &changed);
    if (room)
        kn_give(pool, room, bytes, KN_MEM_GATHERED);
    done_with(b, b->master);
    if (ok && b->unit->size > 1)
        ok = kn_all_reduce_max(b->unit->comm, &changed, 1, kn_compute_stream(KN_CPU),
                               kn_unit_name(b->unit));
    if (ok && changed > 0) {
        b->master->version++;
        if (b->full != b->master)
            b->full->version++;
    }
    return ok && kn_ok();
}

static void return_handles(whole *w)
{
    kn_bucket *b = w->bucket;
    for (int i = 0; w->old && i < b->params; i++) {
        kn_tensor *t = b->param[i].tensor;
        if (w->grads) {
            kn_tensor_free(t->leaf->grad);
            t->leaf->grad = NULL;
        }
        kn_storage_unref(t->storage);
        t->storage = w->old[i].storage;
        t->offset = w->old[i].offset;
        t->dtype = w->old[i].dtype;
    }
    kn_host_free(w->old);
    kn_storage_unref(w->values);
    kn_storage_unref(w->grads);
}

static bool end(summoned *s)
{
    bool ok = kn_ok();
    for (int i = 0; i < s->wholes; i++) {
        if (ok && !s->o.read_only)
            ok = write_back(&s->whole[i], s->o.rank0_only);
        return_handles(&s->whole[i]);
    }
    for (int i = 0; i < s->units; i++)
        if (s->unit[i]->summoned == s)
            s->unit[i]->summoned = NULL;
    kn_host_free(s->whole);
    kn_host_free(s->unit);
    kn_host_free(s);
    return ok && kn_ok();
}

void kn_summon_forget(kn_unit *u)
{
    summoned *s = u->summoned;
    int left = 0;
    if (!s)
        return;
    for (int i = 0; i < s->wholes; i++) {
        if (s->whole[i].bucket->unit == u)
            return_handles(&s->whole[i]);
        else
            s->whole[left++] = s->whole[i];
    }
    s->wholes = left;
    left = 0;
    for (int i = 0; i < s->units; i++)
        if (s->unit[i] != u)
            s->unit[left++] = s->unit[i];
    s->units = left;
    u->summoned = NULL;
}

static bool begin(summoned *s)
{
    for (int i = 0; i < s->units; i++)
        if (!open_unit(s, s->unit[i]))
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
    for (int i = 0; i < needed->units; i++)
        if (needed->unit[i]->summoned != s || !s)
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
        kn_host_free(needed->unit);
        kn_host_free(needed);
    }
    if (ok && !a->fn(m, a->arg) && kn_ok())
        kn_fail(
            "kn_fsdp_apply: the function failed for '%s' (%s) without saying why; call kn_fail in "
            "it, so that the other ranks stop as well",
            m->impl->path, m->impl->class_name);
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
