/* tensor/make.c: tensors with content: filled, counted, copied from the host, random. */
#include "tensor/tensor_internal.h"
#include <math.h>

/* The ledger category of new tensors: the context's, else activations. */
static kn_mem_category category(void)
{
    kn_mem_category c = kn_context_get()->alloc_category;
    return c ? c - 1 : KN_MEM_ACTIVATION;
}

/* A tensor with bytes of undefined content, row-major. Given to the current scope. */
kn_tensor *kn_empty(kn_dtype dtype, kn_device device, int ndim, const int64_t *shape)
{
    return kn_tensor_new(dtype, device, NULL, category(), ndim, shape, NULL, true);
}

bool kn_array_fill(const kn_tensor *on, kn_array to, double value, double step)
{
    return KN_LAUNCH(kn_compute_stream(kn_device_of(on)), KN_K_FILL,
                     ((kn_fill_args){ to, value, step }));
}

bool kn_array_copy(const kn_tensor *on, kn_array to, kn_array from)
{
    return KN_LAUNCH(kn_compute_stream(kn_device_of(on)), KN_K_COPY, ((kn_copy_args){ to, from }));
}

/* t[i] = value + i * step, of a fresh tensor, which is used nowhere else yet. */
static kn_tensor *filled(kn_tensor *t, double value, double step)
{
    return t && kn_array_fill(t, kn_array_of(t), value, step) ? t : NULL;
}

kn_tensor *kn_full(kn_dtype dtype, kn_device device, double value, int ndim, const int64_t *shape)
{
    return filled(kn_empty(dtype, device, ndim, shape), value, 0);
}

kn_tensor *kn_zeros(kn_dtype dtype, kn_device device, int ndim, const int64_t *shape)
{
    return kn_full(dtype, device, 0, ndim, shape);
}

kn_tensor *kn_ones(kn_dtype dtype, kn_device device, int ndim, const int64_t *shape)
{
    return kn_full(dtype, device, 1, ndim, shape);
}

kn_tensor *kn_empty_like(const kn_tensor *t)
{
    if (!kn_check(t, "empty_like"))
        return NULL;
    return kn_empty(t->dtype, t->storage->device, t->ndim, t->shape);
}

kn_tensor *kn_zeros_like(const kn_tensor *t)
{
    if (!kn_check(t, "zeros_like"))
        return NULL;
    return kn_zeros(t->dtype, t->storage->device, t->ndim, t->shape);
}

kn_tensor *kn_full_like(const kn_tensor *t, double value)
{
    if (!kn_check(t, "full_like"))
        return NULL;
    return kn_full(t->dtype, t->storage->device, value, t->ndim, t->shape);
}

kn_tensor *kn_ones_like(const kn_tensor *t)
{
    if (!kn_check(t, "ones_like"))
        return NULL;
    return kn_ones(t->dtype, t->storage->device, t->ndim, t->shape);
}

kn_tensor *kn_arange_(kn_dtype dtype, kn_device device, double end, kn_arange_options o)
{
    const double start = o.start, step = o.step == 0 ? 1 : o.step;
    const double n = (end - start) / step;
    if (!(n >= 0 && n < 0x1p62) || !isfinite(start) || !isfinite(step))
        return kn_fail_null(
            "arange: from %g to %g by steps of %g; needs finite numbers, and steps that "
            "lead from one to the other",
            start, end, step);
    return filled(kn_empty(dtype, device, 1, (int64_t[]){ (int64_t)ceil(n) }), start, step);
}

kn_tensor *kn_linspace(kn_dtype dtype, kn_device device, double start, double end, int64_t n)
{
    if (n < 0 || !isfinite(start) || !isfinite(end - start))
        return kn_fail_null("linspace: %lld elements from %g to %g; needs at least 0 elements and "
                            "finite numbers",
                            (long long)n, start, end);
    kn_tensor *t =
        filled(kn_empty(dtype, device, 1, &n), start, n > 1 ? (end - start) / (double)(n - 1) : 0);
    if (!t || n < 2)
        return t;
    kn_array last = kn_array_of(t);
    if (last.data)
        last.data = (char *)last.data + (size_t)(n - 1) * kn_dtype_size(t->dtype);
    last.shape[0] = 1;
    return kn_array_fill(t, last, end, 0) ? t : NULL;
}

kn_tensor *kn_eye(kn_dtype dtype, kn_device device, int64_t rows, int64_t columns)
{
    if (rows < 0 || columns < 0)
        return kn_fail_null("eye: %lld rows, %lld columns; both are at least 0", (long long)rows,
                            (long long)columns);
    kn_tensor *t = kn_zeros(dtype, device, 2, (int64_t[]){ rows, columns });
    if (!t)
        return NULL;
    kn_array diagonal = kn_array_of(t);
    diagonal.ndim = 1;
    diagonal.shape[0] = rows < columns ? rows : columns;
    diagonal.stride[0] = columns + 1;
    return kn_array_fill(t, diagonal, 1, 0) ? t : NULL;
}

/* The copy is done when this returns, or at least data has been read: it may go at once. On meta
 * nothing is read. */
kn_tensor *kn_from(kn_dtype dtype, kn_device device, const void *data, int ndim,
                   const int64_t *shape)
{
    kn_tensor *t = kn_empty(dtype, device, ndim, shape);
    if (!t || kn_numel(t) == 0)
        return t;
    if (!data && t->storage->device != KN_META)
        return kn_fail_null("from: data is NULL");
    return kn_from_host(t, data) ? t : NULL;
}

/* bf16 and f16: 1 becomes the number before it. */
static bool keep_below_one(kn_tensor *t)
{
    if (t->dtype != KN_BF16 && t->dtype != KN_F16)
        return true;
    const double below = t->dtype == KN_BF16 ? 1 - 0x1p-8 : 1 - 0x1p-11;
    kn_unary_args args = { kn_array_of(t), kn_array_of(t), KN_CLAMP, 0, below };
    return KN_LAUNCH(kn_compute_stream(t->storage->device), KN_K_UNARY, args);
}

kn_tensor *kn_borrow(kn_dtype dtype, void *data, int ndim, const int64_t *shape)
{
    kn_dtype t = dtype ? dtype : KN_F32;
    size_t bytes = kn_dtype_size(t), align = bytes;
    if (!kn_ok())
        return NULL;
    if (bytes == 0 || ndim < 0 || ndim > KN_MAX_DIMS || (ndim > 0 && !shape))
        return kn_fail_null("borrow: dtype %d with %d dims; at most %d are possible", (int)dtype,
                            ndim, KN_MAX_DIMS);
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0 || __builtin_mul_overflow(bytes, (size_t)shape[d], &bytes) ||
            bytes > INT64_MAX)
            return kn_fail_null("borrow: size %lld in dim %d", (long long)shape[d], d);
    if (!data || (uintptr_t)data % align != 0)
        return kn_fail_null("borrow: the memory at %p is %s", data,
                            data ? "not aligned to its elements" : "NULL");
    kn_storage *s = kn_storage_wrap(KN_CPU, data, bytes, NULL, NULL, "borrowed memory");
    kn_tensor *r = s ? kn_tensor_on(s, 0, t, ndim, shape, NULL, true) : NULL;
    kn_storage_unref(s);
    return r;
}

kn_tensor *kn_drawn(kn_dtype dtype, kn_device device, kn_random_args how, int ndim,
                    const int64_t *shape)
{
    kn_tensor *t = kn_empty(dtype, device, ndim, shape);
    if (!t)
        return NULL;
    how.dst = kn_array_of(t);
    return KN_LAUNCH(kn_compute_stream(t->storage->device), KN_K_RANDOM, how) &&
                   (how.kind == KN_NORMAL || keep_below_one(t))
               ? t
               : NULL;
}

static kn_tensor *drawn(kn_dtype dtype, kn_device device, kn_random kind, uint64_t seed,
                        uint64_t stream, int ndim, const int64_t *shape)
{
    if (dtype != KN_DTYPE_DEFAULT && !kn_dtype_is_float(dtype))
        return kn_fail_null("rand: %s; f32, bf16, f16 and f64 are supported", kn_dtype_name(dtype));
    const kn_random_args how = { .kind = kind, .seed = seed, .stream = stream, .p1 = 1 };
    return kn_drawn(dtype, device, how, ndim, shape);
}

kn_tensor *kn_rand(kn_dtype dtype, kn_device device, uint64_t seed, uint64_t stream, int ndim,
                   const int64_t *shape)
{
    return drawn(dtype, device, KN_UNIFORM, seed, stream, ndim, shape);
}

kn_tensor *kn_randn(kn_dtype dtype, kn_device device, uint64_t seed, uint64_t stream, int ndim,
                    const int64_t *shape)
{
    return drawn(dtype, device, KN_NORMAL, seed, stream, ndim, shape);
}
