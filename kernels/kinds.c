/* kernels/kinds.c: the rows of kernels/kinds.h as arrays, and the dtypes that compute. */
#include "kernels/kinds.h"

enum { LINE = 0, NONZERO = 0, POSITIVE = 1, UNIT = 0, ABOVE = 0 };

#define KIND_ROW(kind, name, function, reads, dtypes, domain, work, ...)                           \
    [KN_##kind] = { #name, KN_READS_##reads, KN_##dtypes, domain, KN_##work },

static const kn_kind_row unary_rows[] = { KN_UNARY_KINDS(KIND_ROW) };
static const kn_kind_row binary_rows[] = { KN_BINARY_KINDS(KIND_ROW) };
static const kn_kind_row unknown = { .name = "unknown" };

const kn_kind_row *kn_unary_row(kn_unary kind)
{
    return (unsigned)kind < KN_UNARY_COUNT ? &unary_rows[kind] : &unknown;
}

const kn_kind_row *kn_binary_row(kn_binary kind)
{
    return (unsigned)kind < KN_BINARY_COUNT ? &binary_rows[kind] : &unknown;
}

bool kn_kind_takes(const kn_kind_row *row, kn_dtype t)
{
    switch (row->dtypes) {
    case KN_FLOATS:
        return kn_dtype_is_float(t);
    case KN_NUMBERS:
        return kn_dtype_is_arithmetic(t);
    case KN_BOOLS:
        return t == KN_BOOL;
    default:
        return false;
    }
}

bool kn_binary_takes(kn_binary kind, kn_dtype t, kn_dtype to)
{
    return to == (kind >= KN_EQ ? KN_BOOL : t) && kn_kind_takes(kn_binary_row(kind), t);
}

bool kn_dtype_is_int(kn_dtype t)
{
    return t == KN_I64 || t == KN_I32 || t == KN_U8 || t == KN_BOOL;
}

bool kn_dtype_is_arithmetic(kn_dtype t)
{
    return kn_dtype_is_float(t) || kn_dtype_is_int(t);
}
