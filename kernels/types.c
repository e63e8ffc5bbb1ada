/* kernels/types.c: dtypes, device names and arrays: small facts for everything else. */
#include "kernels/error.h"
#include "kernels/trace.h"
#include "kernels/context.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

/* ---- dtypes ------------------------------------------------------------------------------ */

static const struct {
    const char *name;
    size_t size;
} dtypes[KN_DTYPE_COUNT] = {
    [KN_DTYPE_DEFAULT] = { "default", 0 },
    [KN_F32] = { "f32", 4 },
    [KN_BF16] = { "bf16", 2 },
    [KN_F16] = { "f16", 2 },
    [KN_F64] = { "f64", 8 },
    [KN_I64] = { "i64", 8 },
    [KN_I32] = { "i32", 4 },
    [KN_U8] = { "u8", 1 },
    [KN_BOOL] = { "bool", 1 },
    [KN_I8] = { "i8", 1 },
    [KN_I16] = { "i16", 2 },
    [KN_U16] = { "u16", 2 },
    [KN_U32] = { "u32", 4 },
    [KN_U64] = { "u64", 8 },
    [KN_F8_E4M3] = { "f8_e4m3", 1 },
    [KN_F8_E5M2] = { "f8_e5m2", 1 },
};

static bool known(kn_dtype t)
{
    return (unsigned)t < KN_DTYPE_COUNT;
}

size_t kn_dtype_size(kn_dtype t)
{
    return known(t) ? dtypes[t].size : 0;
}

const char *kn_dtype_name(kn_dtype t)
{
    return known(t) ? dtypes[t].name : "unknown";
}

kn_dtype kn_dtype_parse(const char *name)
{
    for (int t = KN_DTYPE_DEFAULT + 1; name && t < KN_DTYPE_COUNT; t++)
        if (strcmp(name, dtypes[t].name) == 0)
            return (kn_dtype)t;
    return KN_DTYPE_DEFAULT;
}

bool kn_dtype_is_float(kn_dtype t)
{
    return t == KN_F32 || t == KN_BF16 || t == KN_F16 || t == KN_F64;
}

/* ---- arrays ------------------------------------------------------------------------------ */

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

/* ---- time -------------------------------------------------------------------------------- */

double kn_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
