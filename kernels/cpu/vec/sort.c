/* kernels/cpu/vec/sort.c: the order of elements along a dim, of dtypes of up to 4 bytes. A line's
 * elements become 64-bit numbers, a key in the order of values above the element's place: so equal
 * values keep their order, and sorting by the digits of keys sorts them. */
#include "kernels/cpu/vec/iter.h"

#define DIGITS 4   /* of 8 bits each */
#define FEW    128 /* elements that are merged instead: counting digits takes longer */

/* NaN comes last, zeros are equal. */
static uint32_t key_of(const char *x, kn_dtype t)
{
    if (t == KN_I32)
        return (uint32_t) * (const int32_t *)(const void *)x ^ 1u << 31;
    if (t == KN_U8 || t == KN_BOOL)
        return *(const uint8_t *)x;
    const uint16_t h = t == KN_F32 ? 0 : *(const uint16_t *)(const void *)x;
    const float v = t == KN_F32    ? *(const float *)(const void *)x
                    : t == KN_BF16 ? kn_bf16_to_f32(h)
                                   : kn_f16_to_f32(h);
    const uint32_t bits = kn_f32_bits(v);
    return v != v ? UINT32_MAX : v == 0 ? 1u << 31 : bits >> 31 ? ~bits : bits | 1u << 31;
}

/* n numbers in order, in x or room, whichever is returned. */
static uint64_t *merged(uint64_t *x, uint64_t *room, int64_t n)
{
    for (int64_t run = 1; run < n; run *= 2) {
        for (int64_t begin = 0; begin < n; begin += 2 * run) {
            const int64_t middle = v_min_i64(begin + run, n), end = v_min_i64(middle + run, n);
            int64_t i = begin, j = middle;
            for (int64_t to = begin; to < end; to++)
                room[to] = j == end || (i < middle && x[i] < x[j]) ? x[i++] : x[j++];
        }
        uint64_t *other = x;
        x = room, room = other;
    }
    return x;
}

/* The same for numbers whose lower halves are in order. */
static uint64_t *by_digits(uint64_t *x, uint64_t *room, int64_t n)
{
    uint32_t count[DIGITS][256] = { 0 };
    for (int64_t i = 0; i < n; i++)
        for (int d = 0; d < DIGITS; d++)
            count[d][x[i] >> (32 + 8 * d) & 255]++;
    for (int d = 0; d < DIGITS; d++) {
        if (count[d][x[0] >> (32 + 8 * d) & 255] == n)
            continue; /* all have this digit */
        uint32_t sum = 0;
        for (int v = 0; v < 256; v++) {
            const uint32_t of = count[d][v];
            count[d][v] = sum, sum += of;
        }
        for (int64_t i = 0; i < n; i++)
            room[count[d][x[i] >> (32 + 8 * d) & 255]++] = x[i];
        uint64_t *other = x;
        x = room, room = other;
    }
    return x;
}

typedef struct call {
    const kn_sort_args *a;
    uint64_t *room; /* 2 n of each part */
    int64_t lines, parts;
} call;

/* Where line i of an array begins. */
static int64_t line_at(const kn_array *a, int dim, int64_t i)
{
    int64_t at = 0;
    for (int d = a->ndim - 1; d >= 0; d--) {
        if (d == dim)
            continue;
        at += i % a->shape[d] * a->stride[d];
        i /= a->shape[d];
    }
    return at;
}

static void sort_line(const kn_sort_args *a, int64_t line, uint64_t *x)
{
    const int dim = a->dim;
    const int64_t n = a->src.shape[dim], k = a->values.shape[dim];
    const int64_t size = (int64_t)kn_dtype_size(a->src.dtype), step = a->src.stride[dim] * size;
    const char *from = (const char *)a->src.data + line_at(&a->src, dim, line) * size;
    char *value = (char *)a->values.data + line_at(&a->values, dim, line) * size;
    int64_t *index = (int64_t *)a->indices.data + line_at(&a->indices, dim, line);
    const uint32_t flip = a->descending ? UINT32_MAX : 0;
    for (int64_t i = 0; i < n; i++)
        x[i] = (uint64_t)(key_of(from + i * step, a->src.dtype) ^ flip) << 32 | (uint64_t)i;
    x = n <= FEW ? merged(x, x + n, n) : by_digits(x, x + n, n);
    for (int64_t j = 0; j < k; j++) {
        const int64_t at = (int64_t)(x[j] & UINT32_MAX);
        memcpy(value + j * a->values.stride[dim] * size, from + at * step, (size_t)size);
        index[j * a->indices.stride[dim]] = at;
    }
}

static void some_lines(const void *ctx, int64_t part)
{
    const call *c = ctx;
    for (int64_t i = c->lines * part / c->parts; i < c->lines * (part + 1) / c->parts; i++)
        sort_line(c->a, i, c->room + 2 * part * c->a->src.shape[c->a->dim]);
}

kn_status VEC_FN(vec_sort)(const void *args)
{
    const kn_sort_args *a = args;
    const int64_t numel = kn_array_numel(&a->src), n = a->src.shape[a->dim];
    if (kn_dtype_size(a->src.dtype) > 4 || n >= INT32_MAX)
        return KN_DECLINED;
    if (numel == 0)
        return KN_DONE;
    call c = { a, .lines = numel / n };
    c.parts = v_min_i64(kn_threads_for(numel * 32), c.lines);
    const size_t bytes = (size_t)(2 * n * c.parts) * sizeof *c.room;
    c.room = vec_scratch(bytes);
    if (!c.room)
        return KN_FAILED;
    kn_each_part(c.parts, some_lines, &c);
    vec_scratch_end(c.room, bytes);
    return KN_DONE;
}
