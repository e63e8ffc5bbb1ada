/* tensor/tensor.c: tensors on storages: making handles, views of the same bytes, looking at
 * them. */
#include "tensor/tensor_internal.h"
#include "kernels/kernels_internal.h"
#include <string.h>

bool (*kn_tensor_before_write)(kn_tensor *t, const char *what);
void (*kn_tensor_before_read)(const kn_tensor *t);

/* ---- making -------------------------------------------------------------------------------- */

/* Checks dtype and shape; elements = the product of the sizes, and must fit with their bytes. */
static bool check_shape(kn_dtype dtype, int ndim, const int64_t *shape, int64_t *bytes)
{
    char text[128];
    int64_t nonzero = (int64_t)kn_dtype_size(dtype);
    bool empty = false;
    if (nonzero == 0)
        return kn_fail("tensor: %d is not a dtype", (int)dtype);
    if (ndim < 0 || ndim > KN_MAX_DIMS)
        return kn_fail("tensor: %d dims; 0 to %d are supported", ndim, KN_MAX_DIMS);
    if (ndim > 0 && !shape)
        return kn_fail("tensor: %d dims but no shape", ndim);
    for (int d = 0; d < ndim; d++) {
        empty |= shape[d] == 0;
        if (shape[d] >= 0 &&
            !__builtin_mul_overflow(nonzero, shape[d] > 0 ? shape[d] : 1, &nonzero) &&
            nonzero <= INT64_MAX / 2)
            continue;
        kn_array a = { .dtype = dtype, .ndim = ndim };
        memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
        kn_array_describe(&a, text, sizeof text);
        return shape[d] < 0 ? kn_fail("tensor: size of dim %d is negative in %s", d, text)
                            : kn_fail("tensor: %s has more bytes than a machine can address", text);
    }
    *bytes = empty ? 0 : nonzero;
    return true;
}

/* The last element's place must lie inside the storage. Strides are >= 0. */
static bool check_view(const kn_storage *s, int64_t offset, kn_dtype dtype, int ndim,
                       const int64_t *shape, const int64_t *stride)
{
    int64_t room = (int64_t)(s->bytes / kn_dtype_size(dtype)), last = offset;
    bool empty = false, bad = offset < 0 || offset > room;
    for (int d = 0; d < ndim; d++) {
        int64_t span = 0;
        empty |= shape[d] == 0;
        bad |= stride[d] < 0;
        if (shape[d] > 1)
            bad |= __builtin_mul_overflow(shape[d] - 1, stride[d], &span) ||
                   __builtin_add_overflow(last, span, &last);
    }
    if (!bad && (empty || last < room))
        return true;
    char text[128];
    kn_array a = { .dtype = dtype, .ndim = ndim };
    memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
    return kn_fail("view: %s at element %lld leaves the storage%s%s of %zu bytes",
                   kn_array_describe(&a, text, sizeof text), (long long)offset, s->label ? " " : "",
                   s->label ? s->label : "", s->bytes);
}

kn_tensor *kn_tensor_on(kn_storage *s, int64_t offset, kn_dtype dtype, int ndim,
                        const int64_t *shape, const int64_t *stride, bool scoped)
{
    int64_t bytes, row_major[KN_MAX_DIMS];
    if (!kn_ok() || !check_shape(dtype, ndim, shape, &bytes))
        return NULL;
    if (!stride) {
        kn_row_major(ndim, shape, row_major);
        stride = row_major;
    }
    if (!check_view(s, offset, dtype, ndim, shape, stride))
        return NULL;
    kn_tensor *t = kn_handle_new();
    if (!t)
        return NULL;
    t->storage = kn_storage_ref(s);
    t->offset = offset;
    t->dtype = dtype;
    t->ndim = ndim;
    for (int d = 0; d < ndim; d++) {
        t->shape[d] = shape[d];
        t->stride[d] = stride[d];
    }
    return scoped ? kn_scope_adopt(t) : t;
}

/* Row-major strides of the dims taken in the given order, outermost first. */
static bool ordered_strides(int ndim, const int64_t *shape, const int *order, int64_t *stride)
{
    int64_t step = 1;
    unsigned seen = 0;
    for (int i = ndim - 1; i >= 0; i--) {
        int d = order ? order[i] : i;
        if (d < 0 || d >= ndim || (seen >> d & 1))
            return kn_fail("tensor: stride_order[%d] = %d is no permutation of %d dims", i, d,
                           ndim);
        seen |= 1u << d;
        stride[d] = step;
        step *= shape[d] > 0 ? shape[d] : 1;
    }
    return true;
}

kn_tensor *kn_tensor_new(kn_dtype dtype, kn_device device, kn_memory *memory,
                         kn_mem_category category, int ndim, const int64_t *shape,
                         const int *stride_order, bool scoped)
{
    int64_t bytes, stride[KN_MAX_DIMS];
    if (dtype == KN_DTYPE_DEFAULT)
        dtype = KN_F32;
    if (device == KN_DEVICE_DEFAULT)
        device = memory ? memory->device : kn_default_device;
    if (!kn_ok() || !check_shape(dtype, ndim, shape, &bytes) ||
        !ordered_strides(ndim, shape, stride_order, stride))
        return NULL;
    if (!memory)
        memory = kn_device_memory(device);
    if (!memory)
        return kn_fail_null("tensor: device %s has no memory", kn_device_name(device));
    kn_storage *s = kn_storage_create(memory, (size_t)bytes, category, NULL);
    if (!s)
        return NULL;
    kn_tensor *t = kn_tensor_on(s, 0, dtype, ndim, shape, stride, scoped);
    kn_storage_unref(s);
    return t;
}

kn_tensor *kn_tensor_alias(const kn_tensor *t, int64_t offset, int ndim, const int64_t *shape,
                           const int64_t *stride)
{
    if (!kn_check(t, "view"))
        return NULL;
    int64_t at;
    if (__builtin_add_overflow(t->offset, offset, &at))
        at = -1;
    for (int d = 0; d < ndim && offset > 0; d++)
        if (shape[d] == 0) /* an empty part lies where t does, not past the storage's end */
            at = t->offset;
    return kn_tensor_on(t->storage, at, t->dtype, ndim, shape, stride, true);
}

/* ---- looking ------------------------------------------------------------------------------- */

/* Dtype, shape and strides without the address: doesn't touch the storage. */
static void put_layout(kn_array *a, const kn_tensor *t)
{
    *a = (kn_array){ .dtype = t->dtype, .ndim = t->ndim };
    memcpy(a->shape, t->shape, sizeof a->shape);
    memcpy(a->stride, t->stride, sizeof a->stride);
}

kn_array kn_array_of(const kn_tensor *t)
{
    kn_array a = { 0 };
    if (!kn_check(t, "array"))
        return a;
    put_layout(&a, t);
    if (!kn_storage_settle(t->storage))
        return a;
    if (t->storage->released) {
        char text[128];
        kn_fail("the bytes of %s%s%s are released: unshard (gather) them before they are used",
                t->name             ? t->name
                : t->storage->label ? t->storage->label
                                    : "a tensor",
                " ", kn_array_describe(&a, text, sizeof text));
        return a;
    }
    uintptr_t base = (uintptr_t)t->storage->data;
    a.data = (void *)(base + (uintptr_t)t->offset * kn_dtype_size(t->dtype));
    return a;
}

int kn_ndim(const kn_tensor *t)
{
    return kn_check(t, "ndim") ? t->ndim : 0;
}

int64_t kn_size(const kn_tensor *t, int dim)
{
    if (!kn_check(t, "size"))
        return 0;
    int d = dim < 0 ? dim + t->ndim : dim;
    if (d >= 0 && d < t->ndim)
        return t->shape[d];
    kn_fail("size: dim %d of %s", dim, KN_SHOWN(t));
    return 0;
}

const int64_t *kn_shape(const kn_tensor *t)
{
    return kn_check(t, "shape") ? t->shape : NULL;
}

int64_t kn_numel(const kn_tensor *t)
{
    if (!kn_check(t, "numel"))
        return 0;
    int64_t n = 1;
    for (int d = 0; d < t->ndim; d++)
        n *= t->shape[d];
    return n;
}

kn_dtype kn_dtype_of(const kn_tensor *t)
{
    return kn_check(t, "dtype") ? t->dtype : KN_DTYPE_DEFAULT;
}

kn_device kn_device_of(const kn_tensor *t)
{
    return kn_check(t, "device") ? t->storage->device : KN_DEVICE_DEFAULT;
}

bool kn_is_contiguous(const kn_tensor *t)
{
    if (!kn_check(t, "is_contiguous"))
        return false;
    kn_array a;
    put_layout(&a, t);
    return kn_array_contiguous(&a);
}

char *kn_describe(const kn_tensor *t, char *buf, size_t size)
{
    if (!kn_given(buf, "kn_describe", "the buffer"))
        return buf;
    if (!t || t->magic != KN_TENSOR_MAGIC) {
        snprintf(buf, size, "%s", t ? "freed tensor" : "NULL");
        return buf;
    }
    kn_array a;
    put_layout(&a, t);
    return kn_array_describe(&a, buf, size);
}

void kn_set_name(kn_tensor *t, const char *name)
{
    if (!kn_check(t, "set_name"))
        return;
    char *copy = name && *name ? kn_host_strdup(name) : NULL;
    if (name && *name && !copy)
        return;
    kn_host_free(t->name);
    t->name = copy;
}

const char *kn_name(const kn_tensor *t)
{
    return kn_check(t, "name") && t->name ? t->name : "";
}
