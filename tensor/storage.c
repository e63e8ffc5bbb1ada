/* tensor/storage.c: reference-counted bytes on a device that can be let go of and taken again while
 * tensors refer to them (docs/architecture.md, idea 3). */
#include "tensor/tensor_internal.h"
#include "kernels/memory_internal.h"

static _Atomic uint64_t made;

uint64_t kn_storages_made(void)
{
    return made;
}

static kn_storage *storage_alloc(size_t bytes, kn_mem_category category, const char *label)
{
    kn_storage *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->refs = 1;
    s->born = ++made;
    s->bytes = bytes;
    s->category = category;
    if (label && !(s->label = kn_host_strdup(label))) {
        kn_host_free(s);
        return NULL;
    }
    return s;
}

/* A storage without bytes yet; kn_storage_retake fetches them.
 * memory: the pool, must outlive the storage. Caller owns the one reference. */
kn_storage *kn_storage_create_released(kn_memory *memory, size_t bytes, kn_mem_category category,
                                       const char *label)
{
    if (!memory)
        return kn_fail_null("storage%s%s: no memory to take %zu bytes from", label ? " of " : "",
                            label ? label : "", bytes);
    kn_storage *s = storage_alloc(bytes, category, label);
    if (!s)
        return NULL;
    s->memory = memory;
    s->device = memory->device;
    s->released = true;
    return s;
}

/* A storage with bytes of undefined content. Caller owns the one reference. */
kn_storage *kn_storage_create(kn_memory *memory, size_t bytes, kn_mem_category category,
                              const char *label)
{
    kn_storage *s = kn_storage_create_released(memory, bytes, category, label);
    if (s && !kn_storage_retake(s)) {
        kn_storage_unref(s);
        return NULL;
    }
    return s;
}

/* A storage over foreign bytes, which stay where they are: release and retake leave them alone. */
kn_storage *kn_storage_wrap(kn_device device, void *data, size_t bytes, void (*on_free)(void *),
                            void *arg, const char *label)
{
    kn_storage *s = storage_alloc(bytes, KN_MEM_DATA, label);
    if (!s)
        return NULL;
    s->device = device;
    s->data = data;
    s->on_free = on_free;
    s->on_free_arg = arg;
    return s;
}

kn_storage *kn_storage_ref(kn_storage *s)
{
    s->refs++;
    return s;
}

void kn_storage_unref(kn_storage *s)
{
    if (!s || --s->refs > 0)
        return;
    kn_storage_release(s);
    if (s->on_free)
        s->on_free(s->on_free_arg);
    kn_host_free(s->part);
    kn_host_free(s->label);
    kn_host_free(s);
}

void *kn_storage_at(const kn_storage *s, int64_t element, kn_dtype t)
{
    return (char *)s->data + (size_t)element * kn_dtype_size(t);
}

void kn_storage_release(kn_storage *s)
{
    if (s->released || !s->memory)
        return;
    kn_give_of(s->memory, s->data, s->bytes, s->category, s->label);
    s->data = NULL;
    s->released = true;
}

bool kn_storage_retake(kn_storage *s)
{
    if (!s->released)
        return true;
    s->data = kn_take_for(s->memory, s->bytes, s->category, s->label);
    s->released = s->data == NULL;
    return !s->released;
}

bool kn_storage_settle(kn_storage *s)
{
    bool (*first)(void *arg, kn_storage *s) = s->first;
    if (!first || !kn_storage_retake(s))
        return !first;
    s->first = NULL;
    if (first(s->first_arg, s))
        return true;
    kn_storage_release(s);
    s->first = first; /* the next read tries again */
    return false;
}
