/* kernels/cuda/kernels/scatter.cu: elements put where an index of their own each says along dim, or
 * joined there. No atomics: positions are sorted by their place in dst (radix.cuh), and one thread
 * does all that go to one place, in their order. So the result depends on nothing else, and the
 * last one stays where they aren't joined. An element of dst that takes r of them costs r loads in a
 * row. */
#include "kernels/cuda/kernels/index.cuh"
#include "kernels/cuda/kernels/radix.cuh"

namespace
{
/* The key is the row-major place in dst, of n elements; that of an index out of range is n. */
struct places {
    kn_walk<2> walk; /* index, and the place of its line's first element */
    int64_t step, size, n;
    kn_indices index;
};

KN_KERNEL(256, places_kernel, pair *out, const places a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            step = (int64_t)gridDim.x * blockDim.x;
    for (; i < a.walk.count; i += step) {
        int64_t at[2];
        kn_walk_at(a.walk, i, at);
        int64_t to = kn_index_at(a.index, at[0]), key = at[1] + to * a.step;
        if (to < 0 || to >= a.size) {
            kn_index_flag(a.index, i, to);
            key = a.n; /* sorted to the end and left out */
        }
        out[i] = { (uint32_t)key, (uint32_t)i };
    }
}

/* Sorted pairs of place and position, in scratch. NULL with an error. */
const pair *sorted(const kn_scatter_args *a)
{
    kn_array dense = kn_array_make(nullptr, a->dst.dtype, a->dst.ndim, a->dst.shape);
    kn_array lines = kn_lines_of(&dense, &a->index, a->dim);
    const kn_array *const arrays[] = { &a->index, &lines };
    places p = { kn_walk_make(arrays), dense.stride[a->dim], a->dst.shape[a->dim],
                 kn_array_numel(&a->dst), kn_indices_of_elements(&a->index) };
    radix r = radix_make(p.walk.count);
    bool ok = r.a && p.index.flags &&
              KN_RUN_FLAT(places_kernel, kn_blocks(p.walk.count, 256, 1), 256, r.a, p) == KN_DONE &&
              radix_sort(r, (uint64_t)p.n);
    return ok ? r.a : nullptr;
}

struct scatter_call {
    kn_walk<1> to, from; /* dst and src */
    int64_t count, n;
    const pair *order;
    kn_join by;
};

/* Whether sorted position i is the first of a place in dst. */
static __device__ inline bool begins(const scatter_call &c, int64_t i)
{
    uint32_t key = c.order[i].key;
    return key < c.n && (i == 0 || c.order[i - 1].key != key);
}

template <typename E> KN_KERNEL(128, put_kernel, E *dst, const E *src, const scatter_call c)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            step = (int64_t)gridDim.x * blockDim.x;
    for (; i < c.count; i += step) {
        uint32_t key = c.order[i].key;
        if (key >= c.n || (i + 1 < c.count && c.order[i + 1].key == key))
            continue; /* not the last of its place */
        int64_t to[1], from[1];
        kn_walk_at(c.to, key, to);
        kn_walk_at(c.from, c.order[i].position, from);
        dst[to[0]] = src[from[0]];
    }
}

template <typename A>
KN_KERNEL(128, join_kernel, const kn_any_at<A> dst, const kn_any_at<A> src, const scatter_call c)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            step = (int64_t)gridDim.x * blockDim.x;
    for (; i < c.count; i += step) {
        if (!begins(c, i))
            continue;
        uint32_t key = c.order[i].key;
        int64_t to[1], from[1];
        kn_walk_at(c.to, key, to);
        A joined = kn_any_get(dst + to[0]);
        for (int64_t p = i; p < c.count && c.order[p].key == key; p++) {
            kn_walk_at(c.from, c.order[p].position, from);
            joined = kn_join_of(c.by, joined, kn_any_get(src + from[0]));
        }
        kn_any_put(dst + to[0], joined);
    }
}

template <typename A> kn_status join(const kn_scatter_args *a, const scatter_call &c)
{
    return KN_RUN_FLAT(join_kernel<A>, kn_blocks(c.count, 128, 1), 128,
                       kn_kept<kn_any<A>>::of(&a->dst), kn_kept<kn_any<A>>::of(&a->src), c);
}

kn_status join_any(const kn_scatter_args *a, const scatter_call &c)
{
    if (kn_dtype_is_int(a->dst.dtype))
        return join<int64_t>(a, c);
    return a->dst.dtype == KN_F64 || a->src.dtype == KN_F64 ? join<double>(a, c) : join<float>(a, c);
}

template <typename T> kn_status put(const kn_scatter_args *a, const scatter_call &c)
{
    return KN_RUN_FLAT(put_kernel<T>, kn_blocks(c.count, 128, 1), 128, (T *)a->dst.data,
                       (const T *)a->src.data, c);
}

bool scatter_fits(const kn_scatter_args *a)
{
    long long count = kn_array_numel(&a->index), n = kn_array_numel(&a->dst);
    return (count <= INT32_MAX && n <= INT32_MAX) ||
           kn_fail("scatter: %lld elements into %lld; up to 2^31 - 1 of each are supported", count,
                   n);
}
} // namespace

extern "C" kn_status kn_cuda_scatter(const void *args)
{
    const kn_scatter_args *a = (const kn_scatter_args *)args;
    if (!scatter_fits(a))
        return KN_FAILED;
    const kn_array *const dst[] = { &a->dst }, *const src[] = { &a->src };
    scatter_call c = { kn_walk_make(dst), kn_walk_make(src), kn_array_numel(&a->index),
                       kn_array_numel(&a->dst), nullptr, a->by };
    if (c.count == 0)
        return KN_DONE;
    c.order = sorted(a);
    if (!c.order)
        return KN_FAILED;
    if (a->join)
        return join_any(a, c);
    KN_SIZES(a->dst.dtype, put, a, c);
}
