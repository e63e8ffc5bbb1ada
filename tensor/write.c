/* tensor/write.c: writes in place (never on the tape) and reads into host memory. Every write
 * raises the version of the storage, or of its part; autograd compares versions to detect that a
 * saved tensor was overwritten. */
#include "kernels/graph_internal.h"
#include "tensor/tensor_internal.h"
#include <math.h>
#include <string.h>

/* Whether two elements of t have bytes in common: with dims in ascending order of strides, each
 * stride must be larger than the reach of the dims before it. */
static bool shares_bytes(const kn_tensor *t)
{
    int64_t reach = 0;
    uint32_t seen = 0;
    for (int i = 0; i < t->ndim; i++) {
        int next = -1;
        for (int d = 0; d < t->ndim; d++)
            if (!(seen >> d & 1) && t->shape[d] > 1 && (next < 0 || t->stride[d] < t->stride[next]))
                next = d;
        if (next < 0)
            return false;
        if (t->stride[next] <= reach)
            return true;
        reach += (t->shape[next] - 1) * t->stride[next];
        seen |= 1u << next;
    }
    return false;
}

/* May t be written now? Refuses elements that share bytes, and tensors that autograd protects. */
static bool writable(kn_tensor *t, const char *what)
{
    if (!kn_ok() || !kn_check(t, what))
        return false;
    if (kn_numel(t) > 0 && shares_bytes(t))
        return kn_fail("%s: %s is expanded, or windows that overlap: its elements share bytes; "
                       "write to the tensor it was made from",
                       what, KN_SHOWN(t));
    return !kn_tensor_before_write || kn_tensor_before_write(t, what);
}

bool kn_storage_divide(kn_storage *s, const int64_t *offset, int n)
{
    s->part = kn_host_calloc((size_t)n + 1, sizeof *s->part);
    s->parts = s->part ? n : 0;
    for (int i = 0; i < s->parts; i++)
        s->part[i].offset = offset[i];
    return s->part != NULL;
}

/* The part in which t begins: no view goes beyond one. */
static kn_storage_part *part_of(const kn_tensor *t)
{
    const kn_storage *s = t->storage;
    kn_storage_part *found = NULL;
    for (int i = 0; i < s->parts; i++)
        if (s->part[i].offset <= t->offset && (!found || s->part[i].offset >= found->offset))
            found = &s->part[i];
    return found;
}

void kn_written(const kn_tensor *t)
{
    kn_storage_part *p = part_of(t);
    if (p)
        p->version++;
    else
        t->storage->version++;
}

uint32_t kn_version_of(const kn_tensor *t)
{
    const kn_storage_part *p = part_of(t);
    return t->storage->version + (p ? p->version : 0);
}

void kn_bump_version(kn_tensor *t)
{
    if (!kn_check(t, "kn_bump_version"))
        return;
    if (kn_tensor_before_write)
        kn_tensor_before_write(t, "kn_bump_version");
    kn_written(t);
}

static bool reads(const kn_tensor *t)
{
    if (kn_tensor_before_read)
        kn_tensor_before_read(t);
    return kn_ok();
}

/* t = value everywhere. */
bool kn_fill_(kn_tensor *t, double value)
{
    if (!writable(t, "fill_"))
        return false;
    if (!kn_array_fill(t, kn_array_of(t), value, 0))
        return false;
    kn_written(t);
    return true;
}

/* Do the two arrays share bytes without being the same view? */
static bool overlaps(const kn_array *a, const kn_array *b)
{
    uintptr_t begin[2], end[2];
    const kn_array *both[2] = { a, b };
    bool same = a->data == b->data && a->dtype == b->dtype && a->ndim == b->ndim;
    for (int d = 0; same && d < a->ndim; d++)
        same = a->shape[d] == b->shape[d] && a->stride[d] == b->stride[d];
    if (same)
        return false;
    for (int i = 0; i < 2; i++) {
        int64_t last = 0;
        for (int d = 0; d < both[i]->ndim; d++) {
            if (both[i]->shape[d] == 0)
                return false;
            last += (both[i]->shape[d] - 1) * both[i]->stride[d];
        }
        begin[i] = (uintptr_t)both[i]->data;
        end[i] = begin[i] + (uintptr_t)(last + 1) * kn_dtype_size(both[i]->dtype);
    }
    return begin[0] < end[1] && begin[1] < end[0];
}

static bool convertible(kn_dtype to, kn_dtype from)
{
    return to == from || (to <= KN_BOOL && from <= KN_BOOL);
}

bool kn_array_pack(kn_array *a, kn_dtype dtype, kn_device device, kn_tensor **made)
{
    *made = kn_tensor_new(dtype, device, NULL, KN_MEM_WORKSPACE, a->ndim, a->shape, NULL, false);
    if (!*made)
        return false;
    const kn_array from = *a;
    *a = kn_array_of(*made);
    return kn_array_copy(*made, *a, from);
}

/* dst = src, which has its shape. From another device the source packs and converts rows, and the
 * destination spreads them out. */
static bool copy(const kn_array *dst, kn_device to, const kn_array *src, kn_device from)
{
    if (to == from)
        return KN_LAUNCH(kn_compute_stream(to), KN_K_COPY, ((kn_copy_args){ *dst, *src }));
    kn_tensor *sent = NULL, *arrived = NULL;
    kn_array a = *src, b = *dst;
    kn_stream *s = kn_compute_stream(to == KN_CPU ? from : to);
    size_t bytes = (size_t)kn_array_numel(dst) * kn_dtype_size(dst->dtype);
    bool ok = s && ((src->dtype == dst->dtype && kn_array_contiguous(src)) ||
                    kn_array_pack(&a, dst->dtype, from, &sent));
    if (ok && !kn_array_contiguous(dst)) {
        arrived = kn_tensor_new(dst->dtype, to, NULL, KN_MEM_WORKSPACE, dst->ndim, dst->shape, NULL,
                                false);
        ok = arrived != NULL;
        b = ok ? kn_array_of(arrived) : b;
    }
    ok = ok && kn_transfer(s, b.data, a.data, bytes, to == KN_CPU ? KN_TO_HOST : KN_TO_DEVICE,
                           to == KN_CPU || sent);
    if (to == KN_CPU || sent) /* the CPU's stream runs on at once; a copy aside is given back */
        ok = ok && kn_stream_sync(s);
    ok = ok && (!arrived || kn_array_copy(arrived, *dst, b));
    kn_tensor_free(sent);
    kn_tensor_free(arrived);
    return ok;
}

/* May t be written from x, whose shape broadcasts to t's, across: from another device? */
static bool can_take(kn_tensor *t, const kn_tensor *x, bool across, const char *what)
{
    int ndim;
    int64_t shape[KN_MAX_DIMS];
    if (!writable(t, what) || !kn_check(x, what) || !reads(x))
        return false;
    const kn_device to = t->storage->device, from = x->storage->device;
    if (to != from && (!across || to == KN_META || from == KN_META))
        return kn_fail("%s: %s on %s and %s on %s: both must be on one device", what, KN_SHOWN(t),
                       kn_device_name(to), KN_SHOWN(x), kn_device_name(from));
    return (kn_broadcast_shape(t->ndim, t->shape, x->ndim, x->shape, &ndim, shape) &&
            ndim == t->ndim && memcmp(shape, t->shape, (size_t)ndim * sizeof *shape) == 0) ||
           kn_fail("%s: %s does not expand to %s", what, KN_SHOWN(x), KN_SHOWN(t));
}

/* x for a write of t, in a dtype: where it has another or overlaps t it is copied aside first, so
 * that the result is as if all of x were read before. *aside is to be freed. */
static bool source_of(const kn_tensor *t, const kn_array *to, const kn_tensor *x, kn_dtype dtype,
                      kn_array *from, kn_tensor **aside)
{
    *from = kn_array_of(x);
    const bool fits = x->dtype == dtype && (t->storage != x->storage || !overlaps(to, from));
    const bool ok = kn_ok() && (fits || kn_array_pack(from, dtype, t->storage->device, aside));
    *from = kn_array_expand(*from, t->ndim, t->shape);
    return ok;
}

/* dst = src, src broadcast to dst's shape and converted to its dtype. */
bool kn_copy_(kn_tensor *dst, const kn_tensor *src)
{
    if (!can_take(dst, src, true, "copy_"))
        return false;
    if (!convertible(dst->dtype, src->dtype))
        return kn_fail("copy_: %s to %s: storage-only dtypes copy to the same dtype only",
                       KN_SHOWN(src), KN_SHOWN(dst));
    kn_tensor *aside = NULL;
    kn_array to = kn_array_of(dst), from;
    bool ok = source_of(dst, &to, src, src->dtype, &from, &aside) &&
              copy(&to, dst->storage->device, &from, src->storage->device);
    kn_tensor_free(aside);
    if (ok)
        kn_written(dst);
    return ok;
}

/* ---- arithmetic in place --------------------------------------------------------------------- */

static bool can_update(kn_tensor *t, const kn_tensor *x, const char *what)
{
    if (!can_take(t, x, false, what) || !reads(t))
        return false;
    if (!kn_dtype_is_arithmetic(t->dtype) || !kn_dtype_is_arithmetic(x->dtype) ||
        (kn_dtype_is_float(x->dtype) && !kn_dtype_is_float(t->dtype)))
        return kn_fail("%s: %s can't hold a result of it and %s; kn_cast one of them", what,
                       KN_SHOWN(t), KN_SHOWN(x));
    return true;
}

/* t = t op x, with x in t's dtype. */
static bool update(kn_tensor *t, const kn_tensor *x, kn_binary kind, double p0, const char *what)
{
    if (!can_update(t, x, what))
        return false;
    kn_array dst = kn_array_of(t), src;
    kn_tensor *aside = NULL;
    bool ok = source_of(t, &dst, x, t->dtype, &src, &aside);
    kn_binary_args args = { dst, dst, src, kind, p0 };
    ok = ok && KN_LAUNCH(kn_compute_stream(t->storage->device), KN_K_BINARY, args);
    kn_tensor_free(aside);
    if (ok)
        kn_written(t);
    return ok;
}

static bool check_factor(const kn_tensor *t, double factor, const char *what)
{
    if (!kn_ok() || !kn_check(t, what))
        return false;
    if (!isfinite(factor))
        return kn_fail("%s: the factor %g should be finite", what, factor);
    return true;
}

bool kn_add_(kn_tensor *t, const kn_tensor *x, double factor)
{
    if (!check_factor(t, factor, "add_"))
        return false;
    if (factor != 1 && !kn_dtype_is_float(t->dtype))
        return kn_fail("add_: the factor of integers should be 1, not %g", factor);
    return update(t, x, factor == 1 ? KN_ADD : KN_ADD_SCALED, factor, "add_");
}

bool kn_mul_(kn_tensor *t, const kn_tensor *x)
{
    return update(t, x, KN_MUL, 0, "mul_");
}

bool kn_lerp_(kn_tensor *t, const kn_tensor *x, double weight)
{
    if (!check_factor(t, weight, "lerp_"))
        return false;
    if (!kn_dtype_is_float(t->dtype))
        return kn_fail("lerp_: needs a float tensor, got %s", kn_dtype_name(t->dtype));
    return update(t, x, KN_LERP, weight, "lerp_");
}

bool kn_scale_(kn_tensor *t, double factor)
{
    if (!check_factor(t, factor, "scale_") || !can_update(t, t, "scale_"))
        return false;
    if (!kn_dtype_is_float(t->dtype) && factor != floor(factor))
        return kn_fail("scale_: the factor of integers should be whole, not %g", factor);
    if (!kn_dtype_is_float(t->dtype) && fabs(factor) >= 0x1p63)
        return kn_fail("scale_: the factor of integers is %g, which no i64 can be", factor);
    const kn_array a = kn_array_of(t);
    kn_unary_args args = { a, a, KN_AFFINE, factor, 0 };
    if (!KN_LAUNCH(kn_compute_stream(t->storage->device), KN_K_UNARY, args))
        return false;
    kn_written(t);
    return true;
}

/* ---- reading -------------------------------------------------------------------------------- */

static bool readable(const kn_tensor *t, const char *what)
{
    if (!kn_ok() || !kn_check(t, what))
        return false;
    if (t->storage->device == KN_META)
        return kn_fail("%s: %s is on meta, where tensors have no values", what, KN_SHOWN(t));
    return reads(t) && kn_array_of(t).data != NULL;
}

bool kn_to_host(const kn_tensor *t, void *host, size_t bytes)
{
    if (!readable(t, "to") ||
        kn_unrecordable(t->storage->device,
                        "kn_item, kn_to_host: the host reads a tensor's values"))
        return false;
    size_t need = (size_t)kn_numel(t) * kn_dtype_size(t->dtype);
    if (bytes != need)
        return kn_fail("to: %s is %zu bytes, the host buffer has %zu", KN_SHOWN(t), need, bytes);
    if (bytes == 0)
        return true;
    if (!host)
        return kn_fail("to: the host buffer is NULL");
    const kn_array to = kn_array_make(host, t->dtype, t->ndim, t->shape), from = kn_array_of(t);
    return copy(&to, KN_CPU, &from, t->storage->device) &&
           kn_stream_sync(kn_compute_stream(KN_CPU));
}

bool kn_from_host(kn_tensor *t, const void *host)
{
    const kn_device to = t->storage->device, at = to == KN_META ? KN_META : KN_CPU;
    const kn_array dst = kn_array_of(t),
                   src = kn_array_make((void *)(uintptr_t)host, t->dtype, t->ndim, t->shape);
    return dst.data == host || (copy(&dst, to, &src, at) && kn_stream_sync(kn_compute_stream(at)));
}

double kn_item(const kn_tensor *t)
{
    uint64_t element = 0;
    if (!readable(t, "item"))
        return 0;
    if (kn_numel(t) != 1) {
        kn_fail("item: %s has %lld elements, not 1", KN_SHOWN(t), (long long)kn_numel(t));
        return 0;
    }
    return kn_to_host(t, &element, kn_dtype_size(t->dtype)) ? kn_element(t->dtype, &element) : 0;
}

void *kn_data(const kn_tensor *t)
{
    if (!readable(t, "data"))
        return NULL;
    kn_device d = t->storage->device;
    if (d != KN_CPU)
        return kn_fail_null("data: %s is on %s; only CPU tensors have host bytes: use kn_to_host",
                            KN_SHOWN(t), kn_device_name(d));
    if (!kn_is_contiguous(t))
        return kn_fail_null("data: %s is not contiguous: use kn_to_host, or copy it first",
                            KN_SHOWN(t));
    return kn_stream_sync(kn_compute_stream(d)) ? kn_array_of(t).data : NULL;
}
