/* tensor/fetch.c: values copied from a device to the host without a wait: a copy into page-locked
 * memory behind all earlier launches, and an event behind the copy. */
#include "kernels/graph_internal.h"
#include "tensor/tensor_internal.h"

#include <string.h>

struct kn_fetch {
    void *values; /* of memory */
    size_t bytes;
    kn_memory *memory;
    kn_event *there; /* NULL: they are */
};

static void fetch_free(kn_fetch *f)
{
    kn_event_destroy(f->there);
    if (f->values)
        kn_give(f->memory, f->values, f->bytes, KN_MEM_WORKSPACE);
    kn_host_free(f);
}

/* Packed copies may be freed at once: the next user of their bytes comes later in the stream. */
static bool begin(kn_fetch *f, const kn_tensor *t)
{
    kn_device d = t->storage->device;
    kn_stream *s = kn_compute_stream(d);
    kn_array from = kn_array_of(t);
    kn_tensor *packed = NULL;
    kn_copy_args copy = { .dst = kn_array_make(f->values, t->dtype, t->ndim, t->shape),
                          .src = from };
    if (!s || !from.data)
        return false;
    if (d == KN_CPU)
        return KN_LAUNCH(s, KN_K_COPY, copy);
    bool ok = (kn_array_contiguous(&from) || kn_array_pack(&from, t->dtype, d, &packed)) &&
              kn_transfer(s, f->values, from.data, f->bytes, KN_TO_HOST, true) &&
              (f->there = kn_event_create(d)) && kn_event_record(f->there, s);
    kn_tensor_free(packed);
    return ok;
}

kn_fetch *kn_fetch_begin(const kn_tensor *t)
{
    if (!kn_ok() || !kn_check(t, "fetch"))
        return NULL;
    if (t->storage->device == KN_META)
        return kn_fail_null("fetch: %s is on meta, where tensors have no values", KN_SHOWN(t));
    if (kn_unrecordable(t->storage->device, "kn_fetch_begin: values on their way to the host"))
        return NULL;
    kn_fetch *f = kn_host_calloc(1, sizeof *f);
    if (!f)
        return NULL;
    f->bytes = (size_t)kn_numel(t) * kn_dtype_size(t->dtype);
    f->memory = kn_pinned_memory(t->storage->device);
    f->values = f->memory ? kn_take(f->memory, f->bytes, KN_MEM_WORKSPACE) : NULL;
    if (f->values && (f->bytes == 0 || begin(f, t)))
        return f;
    fetch_free(f);
    return NULL;
}

bool kn_fetch_ready(const kn_fetch *f)
{
    return !f || kn_event_done(f->there);
}

bool kn_fetch_end(kn_fetch *f, void *host, size_t bytes)
{
    if (!f)
        return kn_ok() && kn_fail("fetch: nothing was begun");
    bool ok = kn_fetch_ready(f) || kn_event_sync(f->there);
    if (ok && host && bytes == f->bytes)
        memcpy(host, f->values, bytes);
    else if (ok && host)
        ok = kn_fail("fetch: the tensor had %zu bytes, the host buffer has %zu", f->bytes, bytes);
    fetch_free(f);
    return ok && kn_ok();
}
