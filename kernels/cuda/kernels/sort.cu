/* kernels/cuda/kernels/sort.cu: the first k of each line along dim in order, and their positions.
 *
 * All lines are sorted at once, by radix sorts of pairs of a 32-bit key and a position (radix.cuh):
 * by the bits of the value, lowest word first, then by the line. Each keeps the order of the one
 * before, so what comes out is sorted by line, then value, then position. f32 and narrower: four
 * passes for the value, and one for 256 lines; f64 and i64: eight. */
#include "kernels/cuda/kernels/index.cuh"
#include "kernels/cuda/kernels/radix.cuh"

#include <string.h>

namespace
{
struct sort_call {
    const char *src;
    kn_dtype dtype;
    kn_walk<3> lines; /* values, indices, src without dim */
    int64_t step[3];  /* of dim in each */
    int64_t n, k;     /* sizes of dim in src and values */
    bool descending;
};

/* Unsigned integers in the order of the values: 64 bits of f64 and i64, 32 of others. */
static __device__ uint64_t key_at(const sort_call &a, int64_t offset)
{
    if (a.dtype == KN_F64) {
        uint64_t key;
        double x = ((const double *)a.src)[offset];
        memcpy(&key, &x, sizeof key);
        key = key >> 63 ? ~key : key | 1ULL << 63;
        return x != x ? UINT64_MAX : x == 0 ? 1ULL << 63 : key;
    }
    if (a.dtype == KN_I64)
        return (uint64_t)((const int64_t *)a.src)[offset] ^ 1ULL << 63;
    if (a.dtype == KN_I32)
        return (uint32_t)((const int32_t *)a.src)[offset] ^ 1u << 31;
    if (a.dtype == KN_U8 || a.dtype == KN_BOOL) {
        uint8_t x = ((const uint8_t *)a.src)[offset];
        return a.dtype == KN_BOOL ? x != 0 : x;
    }
    float x =
        kn_any_get(kn_any_at<float>{ (char *)a.src, a.dtype, a.dtype == KN_F32 ? 4 : 2 } + offset);
    uint32_t key = kn_f32_bits(x);
    key = key >> 31 ? ~key : key | 1u << 31;
    return x != x ? UINT32_MAX : x == 0 ? 1u << 31 : key;
}

/* Writes the keys of a word: 0 and 1 of the value, 2 the line. begin: positions are 0, 1, 2, ... */
KN_KERNEL(256, keys_kernel, pair *pairs, const sort_call a, int word, bool begin)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            step = (int64_t)gridDim.x * blockDim.x;
    for (; i < a.lines.count * a.n; i += step) {
        int64_t position = begin ? i : pairs[i].position, line = position / a.n, at[3];
        uint64_t key = (uint64_t)line;
        if (word < 2) {
            kn_walk_at(a.lines, line, at);
            key = key_at(a, at[2] + (position - line * a.n) * a.step[2]);
            key = (a.descending ? ~key : key) >> 32 * word;
        }
        pairs[i] = { (uint32_t)key, (uint32_t)position };
    }
}

template <typename E>
KN_KERNEL(256, store_kernel, E *values, int64_t *indices, const pair *pairs, const sort_call a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            step = (int64_t)gridDim.x * blockDim.x;
    for (; i < a.lines.count * a.k; i += step) {
        int64_t line = i / a.k, j = i - line * a.k, at[3];
        int64_t from = pairs[line * a.n + j].position - line * a.n;
        kn_walk_at(a.lines, line, at);
        values[at[0] + j * a.step[0]] = ((const E *)a.src)[at[2] + from * a.step[2]];
        indices[at[1] + j * a.step[1]] = from;
    }
}

/* The pairs in order, in scratch. NULL with an error. */
const pair *sorted(const sort_call &a)
{
    int64_t count = a.lines.count * a.n;
    bool wide = a.dtype == KN_F64 || a.dtype == KN_I64, ok = true;
    radix r = radix_make(count);
    for (int word = 0; word < 3 && r.a && ok; word++) {
        if ((word == 1 && !wide) || (word == 2 && a.lines.count == 1))
            continue;
        ok = KN_RUN_FLAT(keys_kernel, kn_blocks(count, 256, 1), 256, r.a, a, word, word == 0) ==
                 KN_DONE &&
             radix_sort(r, word < 2 ? UINT32_MAX : (uint64_t)a.lines.count - 1);
    }
    return r.a && ok ? r.a : nullptr;
}

bool sort_fits(const kn_sort_args *a)
{
    return kn_array_numel(&a->src) <= INT32_MAX ||
           kn_fail("sort: %lld elements; up to 2^31 - 1 are supported",
                   (long long)kn_array_numel(&a->src));
}

template <typename T> kn_status store(const kn_sort_args *a, const pair *order, const sort_call &c)
{
    return KN_RUN_FLAT(store_kernel<T>, kn_blocks(c.lines.count * c.k, 256, 1), 256,
                       (T *)a->values.data, (int64_t *)a->indices.data, order, c);
}
} // namespace

extern "C" kn_status kn_cuda_sort(const void *args)
{
    const kn_sort_args *a = (const kn_sort_args *)args;
    if (!kn_dtype_is_arithmetic(a->src.dtype))
        return KN_DECLINED;
    if (!sort_fits(a))
        return KN_FAILED;
    kn_array v = kn_without_dim(&a->values, a->dim), p = kn_without_dim(&a->indices, a->dim),
             x = kn_without_dim(&a->src, a->dim);
    const kn_array *const arrays[] = { &v, &p, &x };
    sort_call c = { (const char *)a->src.data,
                    a->src.dtype,
                    kn_walk_make(arrays),
                    { a->values.stride[a->dim], a->indices.stride[a->dim], a->src.stride[a->dim] },
                    a->src.shape[a->dim],
                    a->values.shape[a->dim],
                    a->descending };
    if (c.lines.count * c.k == 0)
        return KN_DONE;
    const pair *order = sorted(c);
    if (!order)
        return KN_FAILED;
    KN_SIZES(a->src.dtype, store, a, order, c);
}
