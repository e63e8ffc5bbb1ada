/* nn/buffer.c: buffers: tensors that belong to a module but get no gradient. The program passes a
 * tensor, or declares one with initial values. In a unit of fsdp they may compute in a dtype of
 * less precision; both versions are then kept. */
#include "nn/nn_internal.h"
#include <string.h>

static bool add_buffer(kn_module_impl *m, const char *name, kn_tensor *buffer)
{
    kn_buffer_entry *list = kn_host_realloc(m->buffer, (size_t)(m->buffers + 1) * sizeof *list);
    char *copy = kn_host_strdup(name);
    if (list)
        m->buffer = list;
    if (!list || !copy) {
        kn_host_free(copy);
        return false;
    }
    m->buffer[m->buffers++] = (kn_buffer_entry){ .name = copy, .tensor = kn_keep(buffer) };
    return true;
}

bool kn_buffer(void *module, const char *name, kn_tensor *buffer)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_buffer") : NULL;
    return m && kn_check(buffer, "kn_buffer") && add_buffer(m, name, buffer);
}

kn_tensor *kn_declare_buffer(void *module, const char *name, kn_dtype dtype, kn_device device,
                             kn_initializer init, int ndim, const int64_t *shape)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_declare_buffer") : NULL;
    if (!m)
        return NULL;
    if (!kn_init_resolve(&init, name, ndim, shape))
        return NULL;
    device = kn_device_in(m, device);
    kn_tensor *t = kn_tensor_new(dtype, device, NULL, KN_MEM_BUFFER, ndim, shape, NULL, false);
    bool ok = t && add_buffer(m, name, t);
    kn_tensor_free(t); /* the module's reference stays */
    if (!ok)
        return NULL;
    m->buffer[m->buffers - 1].declared = true;
    m->buffer[m->buffers - 1].init = init;
    return kn_init_fill(&init, 0, name, t, 0) ? t : NULL;
}

/* That of m with the name of so many characters; NULL: none. */
static kn_buffer_entry *find(const kn_module_impl *m, const char *name, size_t length)
{
    for (int i = 0; m && i < m->buffers; i++)
        if (strlen(m->buffer[i].name) == length && strncmp(m->buffer[i].name, name, length) == 0)
            return &m->buffer[i];
    return NULL;
}

bool kn_set_buffer_saved(void *module, const char *name, bool saved)
{
    kn_module_impl *m = kn_ok() ? kn_impl(module, "kn_set_buffer_saved") : NULL;
    if (!m || !kn_given(name, "kn_set_buffer_saved", "the name"))
        return false;
    kn_buffer_entry *b = find(m, name, strlen(name));
    if (!b)
        return kn_fail("kn_set_buffer_saved: '%s' (%s) has no buffer '%s' of its own",
                       kn_module_shown(m), m->class_name, name);
    b->not_saved = !saved;
    return true;
}

bool kn_module_buffer_saved(const void *module, int i)
{
    const kn_module_impl *m = kn_impl(module, "kn_module_buffer_saved");
    return m && kn_module_buffer_at(module, i, NULL) && !m->buffer[i].not_saved;
}

bool kn_is_unsaved_buffer(kn_module_impl *m, const char *name)
{
    const char *rank = strstr(name, ".rank"), *dot = NULL;
    size_t length = rank ? (size_t)(rank - name) : strlen(name);
    for (size_t i = 0; i < length; i++)
        dot = name[i] == '.' ? name + i : dot;
    kn_module_impl *at = dot ? kn_module_at(m, name, (size_t)(dot - name)) : m;
    const char *own = dot ? dot + 1 : name;
    const kn_buffer_entry *b = find(at, own, length - (size_t)(own - name));
    return b && b->not_saved;
}

int kn_module_buffers(const void *module)
{
    const kn_module_impl *m = kn_impl(module, "kn_module_buffers");
    return m ? m->buffers : 0;
}

kn_tensor *kn_module_buffer_at(const void *module, int i, const char **name)
{
    const kn_module_impl *m = kn_impl(module, "kn_module_buffer_at");
    if (!m)
        return NULL;
    if (i < 0 || i >= m->buffers)
        return kn_fail_null("kn_module_buffer_at: '%s' (%s) has %d buffers, there is no number %d",
                            kn_module_shown(m), m->class_name, m->buffers, i);
    if (name)
        *name = m->buffer[i].name;
    return m->buffer[i].tensor;
}

/* ---- other bytes behind the same handle ------------------------------------------------------ */

/* Replaces t's storage; the handle stays, because others hold it too. */
static void turn(kn_tensor *t, kn_storage *s, kn_dtype dtype)
{
    kn_storage *old = t->storage;
    t->storage = kn_storage_ref(s);
    kn_storage_unref(old);
    t->offset = 0;
    t->dtype = dtype;
    kn_row_major(t->ndim, t->shape, t->stride);
}

/* A copy of t's values; on meta, or from there, there are none. NULL with an error. */
static kn_storage *copied(kn_tensor *t, kn_device device, kn_dtype dtype)
{
    kn_tensor *to =
        kn_tensor_new(dtype, device, NULL, KN_MEM_BUFFER, t->ndim, t->shape, NULL, false);
    bool meta = device == KN_META || kn_device_of(t) == KN_META;
    bool mode = kn_set_grad_mode(false);
    bool ok = to && (meta || kn_numel(t) == 0 || kn_copy_(to, t));
    kn_set_grad_mode(mode);
    kn_storage *s = ok ? kn_storage_ref(to->storage) : NULL;
    kn_tensor_free(to);
    return s;
}

static bool move_buffer(kn_tensor *t, kn_device device)
{
    kn_storage *s = copied(t, device, t->dtype);
    if (s)
        turn(t, s, t->dtype);
    kn_storage_unref(s);
    return s != NULL;
}

static bool settle(kn_buffer_entry *b, kn_device device, uint64_t seed, bool fill)
{
    if (kn_device_of(b->tensor) != device && !move_buffer(b->tensor, device))
        return false;
    if (fill && !kn_init_fill(&b->init, seed, b->name, b->tensor, 0))
        return false;
    b->tensor->storage->version++;
    return true;
}

bool kn_buffer_settle(kn_buffer_entry *b, kn_device device, uint64_t seed, bool again)
{
    kn_tensor *t = b->tensor;
    bool fill = b->declared && (again || kn_device_of(t) == KN_META);
    kn_dtype computes = t->dtypes ? t->dtypes->dtype[1] : t->dtype;
    return kn_buffer_uncast(t) && settle(b, device, seed, fill) && kn_buffer_cast(t, computes);
}

/* ---- two dtypes ------------------------------------------------------------------------------ */

static void note_versions(kn_dtypes *d)
{
    for (int i = 0; i < 2; i++)
        d->version[i] = d->storage[i]->version;
}

bool kn_buffer_cast(kn_tensor *t, kn_dtype dtype)
{
    if (!kn_dtype_is_float(t->dtype) || t->dtype == dtype)
        return true;
    kn_device device = kn_device_of(t);
    bool plain = t->offset == 0 && kn_is_contiguous(t);
    kn_dtypes *d = kn_host_calloc(1, sizeof *d);
    kn_storage *full = !d ? NULL : plain ? kn_storage_ref(t->storage) : copied(t, device, t->dtype);
    kn_storage *cast = full ? copied(t, device, dtype) : NULL;
    if (!cast) {
        kn_storage_unref(full);
        kn_host_free(d);
        return false;
    }
    *d = (kn_dtypes){ { full, cast }, { t->dtype, dtype }, { 0 }, 0 };
    note_versions(d);
    t->dtypes = d;
    turn(t, cast, dtype);
    return true;
}

bool kn_buffer_uncast(kn_tensor *t)
{
    bool ok = kn_buffer_show(t, true);
    for (int i = 0; i < 2 && t->dtypes; i++)
        kn_storage_unref(t->dtypes->storage[i]);
    kn_host_free(t->dtypes);
    t->dtypes = NULL;
    return ok;
}

/* Copies t's values to the other storage. */
static bool convert(kn_tensor *t, int to)
{
    const kn_dtypes *d = t->dtypes;
    kn_tensor *dst = kn_tensor_on(d->storage[to], 0, d->dtype[to], t->ndim, t->shape, NULL, false);
    bool mode = kn_set_grad_mode(false);
    bool ok = dst && (kn_numel(t) == 0 || kn_device_of(t) == KN_META || kn_copy_(dst, t));
    kn_set_grad_mode(mode);
    kn_tensor_free(dst);
    return ok && kn_ok();
}

/* An unchanged buffer is not written: a backward may have saved it. */
bool kn_buffer_show(kn_tensor *t, bool full)
{
    kn_dtypes *d = t->dtypes;
    if (!d)
        return true;
    d->shown += full ? 1 : d->shown > 0 ? -1 : 0;
    int to = d->shown > 0 ? 0 : 1;
    if (t->storage == d->storage[to])
        return true;
    bool changed = d->storage[!to]->version != d->version[!to];
    bool ok = !changed || convert(t, to);
    if (changed && ok)
        note_versions(d);
    turn(t, d->storage[to], d->dtype[to]);
    return ok;
}

/* All are counted, also after an error. */
bool kn_module_full_buffers(void *module, bool full)
{
    kn_module_impl *top = kn_impl(module, "kn_module_full_buffers");
    for (kn_module_impl *m = top; m; m = kn_impl_next(m, top))
        for (int i = 0; i < m->buffers; i++)
            kn_buffer_show(m->buffer[i].tensor, full);
    return top && kn_ok();
}
