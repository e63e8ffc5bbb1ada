/* kernels/types.c: names and sizes of dtypes. */
#include "kernels/types.h"

#include <string.h>

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
