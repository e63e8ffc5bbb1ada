/* nn/buffer.c: buffers of modules: tensors that belong to a module but take no gradient. Some are
 * given by their maker, some declared, with what they begin with. */
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
    m->buffer[m->buffers++] = (kn_buffer_entry){ copy, kn_keep(buffer), false, { 0 } };
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

kn_tensor *kn_module_buffer(const void *module, const char *name)
{
    if (!kn_given(name, "kn_module_buffer", "the name"))
        return NULL;
    kn_module_impl *m = kn_module_holding(module, &name, "kn_module_buffer");
    for (int i = 0; m && i < m->buffers; i++)
        if (strcmp(m->buffer[i].name, name) == 0)
            return m->buffer[i].tensor;
    if (m)
        kn_fail("kn_module_buffer: '%s' (%s) has no buffer '%s'", m->path, m->class_name, name);
    return NULL;
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
    if (i < 0 || i >= m->buffers) {
        kn_fail("kn_module_buffer_at: '%s' (%s) has %d buffers, there is no number %d", m->path,
                m->class_name, m->buffers, i);
        return NULL;
    }
    if (name)
        *name = m->buffer[i].name;
    return m->buffer[i].tensor;
}

/* t keeps its handle, which others hold too, and gets bytes on device. */
static bool move_buffer(kn_tensor *t, kn_device device)
{
    kn_tensor *moved =
        kn_tensor_new(t->dtype, device, NULL, KN_MEM_BUFFER, t->ndim, t->shape, NULL, false);
    bool meta = device == KN_META || kn_device_of(t) == KN_META;
    bool ok = moved && (meta || kn_copy_(moved, t));
    if (ok) {
        kn_storage_unref(t->storage);
        t->storage = kn_storage_ref(moved->storage);
        t->offset = 0;
        kn_row_major(t->ndim, t->shape, t->stride);
    }
    kn_tensor_free(moved);
    return ok;
}

bool kn_buffer_settle(const kn_buffer_entry *b, kn_device device, uint64_t seed, bool again)
{
    bool fill = b->declared && (again || kn_device_of(b->tensor) == KN_META);
    if (kn_device_of(b->tensor) != device && !move_buffer(b->tensor, device))
        return false;
    if (fill && !kn_init_fill(&b->init, seed, b->name, b->tensor, 0))
        return false;
    b->tensor->storage->version++;
    return true;
}
