/* kernels/cuda/kernels/index_add.cu: dst's slices along dim += src's, in ascending position of
 * index: an embedding's backward. No atomics on floats: positions are sorted by index (radix.cuh),
 * then a thread adds all the slices that go to one place, a few channels of them, in order.
 *
 * Adding: src is read once (65,536 x 768 bf16: 100 MB, 25 us at 4 TB/s), touched rows of dst once.
 * A row that occurs r times is added by one thread a channel group in r / 8 steps of 8 loads in
 * flight: a word that is 4% of 65,536 tokens takes some 0.2 ms, the longest that a real text asks
 * for. */
#include "kernels/cuda/kernels/index.cuh"
#include "kernels/cuda/kernels/radix.cuh"

namespace
{
KN_KERNEL(256, pairs_kernel, pair *out, const kn_indices index, int64_t count, int64_t n)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, step = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += step) {
        int64_t key = kn_index_at(index, i);
        if (key < 0 || key >= n) {
            kn_index_flag(index, i, key);
            key = n; /* sorted to the end and left out */
        }
        out[i] = { (uint32_t)key, (uint32_t)i };
    }
}

/* Sorted pairs of index and position, in scratch. NULL with an error. */
const pair *sorted(const kn_array *index, int64_t n)
{
    int64_t count = index->shape[0];
    kn_indices from = kn_indices_make(index);
    radix r = radix_make(count);
    bool ok = r.a && from.flags &&
              KN_RUN_FLAT(pairs_kernel, kn_blocks(count, 256, 1), 256, r.a, from, count, n) == KN_DONE &&
              radix_sort(r, (uint64_t)n);
    return ok ? r.a : nullptr;
}

/* ---- adding ---------------------------------------------------------------------------------- */

template <typename D, typename S> struct add_arrays {
    typename kn_kept<D>::type dst;
    typename kn_kept<S>::type src;
    int64_t dst_stride, src_stride; /* of dim */
    int64_t picks, n;
    const pair *order;
};

/* A thread a sorted position and vector of channels; only the first position of an index works. */
template <typename D, typename S, int V>
KN_KERNEL_RESIDENT(128, 4, add_kernel, const kn_span<2> lanes, const add_arrays<D, S> a)
{
    enum { AHEAD = V > 1 ? 8 : 4 };
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    int64_t count = a.picks * lanes.vectors, at[2];
    bool small = count < INT32_MAX;
    for (; i < count; i += n) {
        int64_t p = small ? (uint32_t)i / (uint32_t)lanes.vectors : i / lanes.vectors;
        uint32_t key = a.order[p].key;
        if (key >= a.n || (p > 0 && a.order[p - 1].key == key))
            continue;
        kn_span_at(lanes, i - p * lanes.vectors, at);
        const auto to = a.dst + (at[0] + key * a.dst_stride);
        typename kn_wide<D>::type sum[V];
        kn_widen(kn_load<V>(to, false), sum);
        for (int have = AHEAD; have == AHEAD; p += AHEAD) {
            kn_pack<S, V> x[AHEAD] = {};
            have = 0;
#pragma unroll
            for (int u = 0; u < AHEAD; u++) {
                if (p + u < a.picks && a.order[p + u].key == key) {
                    x[u] = kn_load<V>(a.src + (at[1] + a.order[p + u].position * a.src_stride),
                                      lanes.repeat[1]);
                    have = u + 1;
                }
            }
#pragma unroll
            for (int u = 0; u < AHEAD; u++)
                for (int v = 0; v < V && u < have; v++)
                    sum[v] = kn_added(sum[v], kn_read(x[u].x[v]));
        }
        kn_save_wide<V>(to, sum);
    }
}

/* V elements a thread; KN_DECLINED where strides or addresses don't allow it. */
template <typename D, typename S, int V> kn_status add(const kn_index_add_args *a)
{
    kn_array dst = kn_without_dim(&a->dst, a->dim), src = kn_without_dim(&a->src, a->dim);
    add_arrays<D, S> s = { kn_kept<D>::of(&dst), kn_kept<S>::of(&src), a->dst.stride[a->dim],
                           a->src.stride[a->dim], a->index.shape[0], a->dst.shape[a->dim], nullptr };
    const kn_array *const arrays[] = { &dst, &src };
    kn_span<2> lanes;
    if (s.dst_stride % V != 0 || s.src_stride % V != 0 || kn_span_make(lanes, arrays, V, true) != V)
        return KN_DECLINED;
    if (s.picks * lanes.count == 0)
        return KN_DONE;
    s.order = sorted(&a->index, s.n);
    if (!s.order)
        return KN_FAILED;
    return KN_RUN_FLAT((add_kernel<D, S, V>), kn_blocks(s.picks * lanes.vectors, 128, 1), 128, lanes, s);
}

template <typename A> kn_status add_any(const kn_index_add_args *a)
{
    return add<kn_any<A>, kn_any<A>, 1>(a);
}

/* Vectors of what training adds; nothing else is worth a kernel of its own. */
kn_status add_vectors(const kn_index_add_args *a)
{
    kn_dtype to = a->dst.dtype, from = a->src.dtype;
    if (to == KN_F32 && from == KN_F32)
        return add<float, float, 4>(a);
    if (to == KN_F32 && from == KN_BF16)
        return add<float, kn_bf16, 4>(a);
    if (to == KN_F32 && from == KN_F16)
        return add<float, kn_f16, 4>(a);
    if (to == KN_BF16 && from == KN_BF16)
        return add<kn_bf16, kn_bf16, 8>(a);
    if (to == KN_F16 && from == KN_F16)
        return add<kn_f16, kn_f16, 8>(a);
    return KN_DECLINED;
}
} // namespace

extern "C" kn_status kn_cuda_index_add(const void *args)
{
    const kn_index_add_args *a = (const kn_index_add_args *)args;
    kn_dtype to = a->dst.dtype, from = a->src.dtype;
    if (a->index.shape[0] > INT32_MAX || a->dst.shape[a->dim] > INT32_MAX) {
        kn_fail("index_add: %lld indices into %lld slices; up to 2^31 - 1 of each are supported",
                (long long)a->index.shape[0], (long long)a->dst.shape[a->dim]);
        return KN_FAILED;
    }
    kn_status s = add_vectors(a);
    if (s != KN_DECLINED)
        return s;
    if (kn_dtype_is_int(to))
        return add_any<int64_t>(a);
    return to == KN_F64 || from == KN_F64 ? add_any<double>(a) : add_any<float>(a);
}
