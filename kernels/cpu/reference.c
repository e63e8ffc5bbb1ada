/* kernels/cpu/reference.c: the provider table of the reference, and the three things its kernels
 * are written with: loading and storing an element, walking strided arrays, checking indices. */
#include "kernels/cpu/reference.h"
#include <stdarg.h>
#include <math.h>

#define ENTRY(entry, name, ...) [KN_K_##entry] = kn_ref_##name,
const kn_provider kn_cpu_reference = { .name = "reference", .run = { KN_KERNELS(ENTRY) } };

/* ---- elements ------------------------------------------------------------------------------ */

double kn_ref_get(const kn_array *a, int64_t offset)
{
    switch (a->dtype) {
    case KN_F32:
        return ((const float *)a->data)[offset];
    case KN_BF16:
        return kn_bf16_to_f32(((const uint16_t *)a->data)[offset]);
    case KN_F16:
        return kn_f16_to_f32(((const uint16_t *)a->data)[offset]);
    case KN_F64:
        return ((const double *)a->data)[offset];
    default:
        return (double)kn_ref_get_int(a, offset);
    }
}

/* Truncates toward zero into [lo, hi]. Comparing before converting keeps the cast defined. */
static int64_t saturate(double x, int64_t lo, int64_t hi)
{
    if (isnan(x))
        return 0;
    if (x <= (double)lo)
        return lo;
    return x >= (double)hi ? hi : (int64_t)x;
}

void kn_ref_set(const kn_array *a, int64_t offset, double x)
{
    switch (a->dtype) {
    case KN_F32:
        ((float *)a->data)[offset] = (float)x;
        break;
    case KN_BF16:
        ((uint16_t *)a->data)[offset] = kn_f64_to_bf16(x);
        break;
    case KN_F16:
        ((uint16_t *)a->data)[offset] = kn_f64_to_f16(x);
        break;
    case KN_F64:
        ((double *)a->data)[offset] = x;
        break;
    case KN_I64:
        ((int64_t *)a->data)[offset] = saturate(x, INT64_MIN, INT64_MAX);
        break;
    case KN_I32:
        ((int32_t *)a->data)[offset] = (int32_t)saturate(x, INT32_MIN, INT32_MAX);
        break;
    case KN_U8:
        ((uint8_t *)a->data)[offset] = (uint8_t)saturate(x, 0, UINT8_MAX);
        break;
    case KN_BOOL:
        ((uint8_t *)a->data)[offset] = x != 0;
        break;
    default:
        break;
    }
}

void kn_ref_set_computed(const kn_array *a, int64_t offset, double x)
{
    kn_ref_set(a, offset, a->dtype == KN_F64 ? x : (double)(float)x);
}

int64_t kn_ref_get_int(const kn_array *a, int64_t offset)
{
    switch (a->dtype) {
    case KN_I64:
        return ((const int64_t *)a->data)[offset];
    case KN_I32:
        return ((const int32_t *)a->data)[offset];
    case KN_U8:
        return ((const uint8_t *)a->data)[offset];
    case KN_BOOL:
        return ((const uint8_t *)a->data)[offset] != 0;
    default:
        return 0;
    }
}

void kn_ref_set_int(const kn_array *a, int64_t offset, int64_t x)
{
    switch (a->dtype) {
    case KN_I64:
        ((int64_t *)a->data)[offset] = x;
        break;
    case KN_I32:
        ((int32_t *)a->data)[offset] = (int32_t)x;
        break;
    case KN_U8:
        ((uint8_t *)a->data)[offset] = (uint8_t)x;
        break;
    case KN_BOOL:
        ((uint8_t *)a->data)[offset] = x != 0;
        break;
    default:
        break;
    }
}

/* ---- walking ------------------------------------------------------------------------------- */

kn_ref_walk kn_ref_walk_shape(int ndim, const int64_t *shape, int n, const kn_array *const *arrays)
{
    kn_ref_walk w = { .more = true, .ndim = ndim, .arrays = n };
    for (int d = 0; d < ndim; d++) {
        w.shape[d] = shape[d];
        if (shape[d] == 0)
            w.more = false;
    }
    for (int k = 0; k < n; k++)
        w.stride[k] = arrays[k]->stride;
    return w;
}

kn_ref_walk kn_ref_walk_over(const kn_array *first, ...)
{
    const kn_array *arrays[KN_REF_WALK_ARRAYS];
    int n = 0;
    va_list list;
    va_start(list, first);
    for (const kn_array *a = first; a && n < KN_REF_WALK_ARRAYS; a = va_arg(list, const kn_array *))
        arrays[n++] = a;
    va_end(list);
    return kn_ref_walk_shape(first->ndim, first->shape, n, arrays);
}

/* Like an odometer: the last dim counts up; a dim that is full returns to 0 and carries. */
void kn_ref_walk_next(kn_ref_walk *w)
{
    w->i++;
    for (int d = w->ndim - 1; d >= 0; d--) {
        int64_t back = ++w->at[d] == w->shape[d] ? w->shape[d] : 0;
        w->at[d] -= back;
        for (int k = 0; k < w->arrays; k++)
            w->off[k] += (1 - back) * w->stride[k][d];
        if (!back)
            return;
    }
    w->more = false;
}

bool kn_ref_check_index(const char *op, const kn_array *index, const kn_array *full, int dim)
{
    for (kn_ref_walk w = kn_ref_walk_over(index, NULL); w.more; kn_ref_walk_next(&w)) {
        const int64_t at = kn_ref_get_int(index, w.off[0]);
        if (at < 0 || at >= full->shape[dim])
            return kn_fail("%s: index %lld at position %lld is outside [0, %lld) of dim %d", op,
                           (long long)at, (long long)w.i, (long long)full->shape[dim], dim);
    }
    return true;
}
