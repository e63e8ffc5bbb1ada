/* kernels/kinds.c: the rows of kernels/kinds.h as arrays, and the dtypes that compute. */
#include "kernels/kinds.h"

enum { LINE = 0, NONZERO = 0, POSITIVE = 1 };
enum { LIGHT = 0, HEAVY = 1 };

#define UNARY_ROW(kind, name, function, reads, dtypes, domain, work)                               \
    [KN_##kind] = { #name, KN_READS_##reads, KN_##dtypes, domain, work },
#define BINARY_ROW(kind, name, function, reads, dtypes, domain)                                    \
    [KN_##kind] = { #name, KN_READS_##reads, KN_##dtypes, domain, LIGHT },

static const kn_kind_row unary_rows[] = { KN_UNARY_KINDS(UNARY_ROW) };
static const kn_kind_row binary_rows[] = { KN_BINARY_KINDS(BINARY_ROW) };
static const kn_kind_row unknown = { .name = "unknown" };

const kn_kind_row *kn_unary_row(kn_unary kind)
{
    return (unsigned)kind < KN_UNARY_COUNT ? &unary_rows[kind] : &unknown;
}

const kn_kind_row *kn_binary_row(kn_binary kind)
{
    return (unsigned)kind < KN_BINARY_COUNT ? &binary_rows[kind] : &unknown;
}

bool kn_dtype_is_int(kn_dtype t)
{
    return t == KN_I64 || t == KN_I32 || t == KN_U8 || t == KN_BOOL;
}

bool kn_dtype_is_arithmetic(kn_dtype t)
{
    return kn_dtype_is_float(t) || kn_dtype_is_int(t);
}
