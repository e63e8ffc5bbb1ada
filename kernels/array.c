/* kernels/array.c: strided blocks of elements (kn_array in types.h). */
#include "kernels/error_internal.h"

#include <stdio.h>

int64_t kn_array_numel(const kn_array *a)
{
    if (!kn_given(a, "kn_array_numel", "the array"))
        return 0;
    int64_t n = 1;
    for (int i = 0; i < a->ndim; i++)
        n *= a->shape[i];
    return n;
}

bool kn_array_contiguous(const kn_array *a)
{
    if (!kn_given(a, "kn_array_contiguous", "the array"))
        return false;
    int64_t expected = 1;
    if (kn_array_numel(a) == 0)
        return true;
    for (int i = a->ndim - 1; i >= 0; i--) {
        if (a->shape[i] == 1)
            continue;
        if (a->stride[i] != expected)
            return false;
        expected *= a->shape[i];
    }
    return true;
}

kn_array kn_array_make(void *data, kn_dtype dtype, int ndim, const int64_t *shape)
{
    kn_array a = { .data = data, .dtype = dtype, .ndim = ndim };
    int64_t step = 1;
    if (ndim < 0 || ndim > KN_MAX_DIMS) {
        kn_fail("kn_array_make: %d dims; 0 to %d are supported", ndim, KN_MAX_DIMS);
        return (kn_array){ 0 };
    }
    if (ndim > 0 && !kn_given(shape, "kn_array_make", "the shape"))
        return (kn_array){ 0 };
    for (int i = ndim - 1; i >= 0; i--) {
        a.shape[i] = shape[i];
        a.stride[i] = step;
        step *= shape[i];
    }
    return a;
}

char *kn_array_describe(const kn_array *a, char *buf, size_t size)
{
    if (!kn_given(a, "kn_array_describe", "the array") ||
        !kn_given(buf, "kn_array_describe", "the buffer"))
        return buf;
    size_t used = 0;
    for (int i = -1; i <= a->ndim && used < size; i++) {
        int n;
        if (i < 0)
            n = snprintf(buf + used, size - used, "%s[", kn_dtype_name(a->dtype));
        else if (i < a->ndim)
            n = snprintf(buf + used, size - used, i ? ",%lld" : "%lld", (long long)a->shape[i]);
        else
            n = snprintf(buf + used, size - used, "]");
        used += n > 0 ? (size_t)n : 0;
    }
    return buf;
}
