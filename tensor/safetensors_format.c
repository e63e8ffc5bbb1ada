/* tensor/safetensors_format.c: names of dtypes and checked sizes for .safetensors files. */
#include "tensor/safetensors_format.h"
#include "tensor/tensor_internal.h"
#include <string.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error                                                                                             \
    "safetensors data is little-endian and is mapped as it is: this needs a little-endian machine"
#endif

static const char *const names[KN_DTYPE_COUNT] = {
    [KN_F32] = "F32", [KN_BF16] = "BF16",       [KN_F16] = "F16",         [KN_F64] = "F64",
    [KN_I64] = "I64", [KN_I32] = "I32",         [KN_U8] = "U8",           [KN_BOOL] = "BOOL",
    [KN_I8] = "I8",   [KN_I16] = "I16",         [KN_U16] = "U16",         [KN_U32] = "U32",
    [KN_U64] = "U64", [KN_F8_E4M3] = "F8_E4M3", [KN_F8_E5M2] = "F8_E5M2",
};

const char *kn_safetensors_dtype_name(kn_dtype t)
{
    return (unsigned)t < KN_DTYPE_COUNT ? names[t] : NULL;
}

kn_dtype kn_safetensors_dtype_parse(const char *name)
{
    for (int t = 1; t < KN_DTYPE_COUNT; t++)
        if (strcmp(names[t], name) == 0)
            return (kn_dtype)t;
    return KN_DTYPE_DEFAULT;
}

bool kn_safetensors_bytes(kn_dtype t, int ndim, const int64_t *shape, int64_t *bytes)
{
    return kn_shape_count(ndim, shape, (int64_t)kn_dtype_size(t), bytes);
}
