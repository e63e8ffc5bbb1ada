/* comm/sum.c: sums in rank order over any number of ranks, by the kernel KN_K_SUM_N, inside a host
 * function of the stream that is given; sums and maxima of scalars, whose order doesn't matter. */
#include "comm/comm_internal.h"
#include "kernels/kernels_internal.h"
#include <math.h>
#include <string.h>

/* Of terms that begin skip bytes into each src. */
static bool sum_n(kn_stream *s, void *dst, const void *acc, const void *const *src, size_t skip,
                  int n, int64_t count, kn_dtype dst_dtype, kn_dtype src_dtype)
{
    kn_sum_n_args args = { .dst = dst,
                           .acc = acc,
                           .n = n,
                           .count = count,
                           .dst_dtype = dst_dtype,
                           .src_dtype = src_dtype };
    for (int j = 0; j < n; j++)
        args.src[j] = (const char *)src[j] + skip;
    return kn_run_providers(s, KN_K_SUM_N, &args);
}

static bool convert(kn_stream *s, void *dst, kn_dtype dst_dtype, const void *src,
                    kn_dtype src_dtype, int64_t count)
{
    kn_copy_args args = { kn_array_make(dst, dst_dtype, 1, &count),
                          kn_array_make((void *)(uintptr_t)src, src_dtype, 1, &count) };
    return kn_run_providers(s, KN_K_COPY, &args);
}

/* More terms than one kernel call takes: blocks of the sum are kept unrounded in between. */
enum { BLOCK = 2048 };

static bool sum_block(kn_stream *s, void *dst, const void *acc, const void *const *src, size_t skip,
                      int n, int64_t count, kn_dtype dst_dtype, kn_dtype src_dtype)
{
    _Alignas(KN_ALIGN) double room[BLOCK];
    kn_dtype wide = dst_dtype == KN_F64 ? KN_F64 : KN_F32;
    if (acc && !convert(s, room, wide, acc, dst_dtype, count))
        return false;
    for (int at = 0; at < n; at += KN_SUM_N_MAX) {
        int some = n - at < KN_SUM_N_MAX ? n - at : KN_SUM_N_MAX;
        const void *so_far = acc || at > 0 ? room : NULL;
        if (!sum_n(s, room, so_far, src + at, skip, some, count, wide, src_dtype))
            return false;
    }
    return convert(s, dst, dst_dtype, room, wide, count);
}

/* The maximum, a NaN if there is one: the same bits whichever comes first. */
static float larger(float a, float b)
{
    uint32_t of_a, of_b;
    memcpy(&of_a, &a, sizeof a);
    memcpy(&of_b, &b, sizeof b);
    if (isnan(a) && isnan(b))
        return of_a > of_b ? a : b;
    if (isnan(a) || isnan(b))
        return isnan(a) ? a : b;
    return a > b || (a == b && of_a < of_b) ? a : b; /* 0, not -0 */
}

void kn_comm_combine(kn_comm_kind kind, void *data, const void *other, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        if (kind == KN_CALL_MAX_F32)
            ((float *)data)[i] = larger(((float *)data)[i], ((const float *)other)[i]);
        else /* wraps like the machine does */
            ((uint64_t *)data)[i] += ((const uint64_t *)other)[i];
}

bool kn_comm_sum(kn_stream *s, void *dst, const void *acc, const void *const *src, int n,
                 int64_t count, kn_dtype dst_dtype, kn_dtype src_dtype)
{
    if (count == 0)
        return true;
    if (n <= KN_SUM_N_MAX)
        return sum_n(s, dst, acc, src, 0, n, count, dst_dtype, src_dtype);
    size_t dst_size = kn_dtype_size(dst_dtype), src_size = kn_dtype_size(src_dtype);
    for (int64_t at = 0; at < count; at += BLOCK) {
        int64_t some = count - at < BLOCK ? count - at : BLOCK;
        const void *start = acc ? (const char *)acc + (size_t)at * dst_size : NULL;
        if (!sum_block(s, (char *)dst + (size_t)at * dst_size, start, src, (size_t)at * src_size, n,
                       some, dst_dtype, src_dtype))
            return false;
    }
    return true;
}
