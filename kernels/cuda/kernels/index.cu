/* kernels/cuda/kernels/index.cu: dst's slices along dim are src's, picked by index (an embedding
 * where dim is 0). A thread moves 16 bytes of a slice where strides allow. Floor: the picked slices
 * read and written once; the index comes from the cache. */
#include "kernels/cuda/kernels/index.cuh"

namespace
{
template <typename E> struct select_arrays {
    E *dst;
    const E *src;
    int64_t dst_stride, src_stride; /* of dim */
    int64_t picks, n;               /* length of index, and of src's dim */
    kn_indices index;
    bool picks_first; /* neighbouring threads take neighbouring picks (dim is the contiguous one) */
};

template <typename E, int V>
KN_KERNEL(256, select_kernel, const kn_span<2> lanes, const select_arrays<E> a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    int64_t inner = a.picks_first ? a.picks : lanes.vectors, count = a.picks * lanes.vectors, at[2];
    bool small = count < INT32_MAX;
    for (; i < count; i += n) {
        int64_t q = small ? (uint32_t)i / (uint32_t)inner : i / inner, r = i - q * inner;
        int64_t pick = a.picks_first ? r : q, lane = a.picks_first ? q : r;
        int64_t from = kn_index_at(a.index, pick);
        if (from < 0 || from >= a.n) {
            if (lane == 0)
                kn_index_flag(a.index, pick, from);
            continue;
        }
        kn_span_at(lanes, lane, at);
        kn_save<V>(a.dst + at[0] + pick * a.dst_stride,
                   kn_load<V>(a.src + at[1] + from * a.src_stride, lanes.repeat[1]));
    }
}

template <typename E> kn_status select(const kn_index_select_args *a)
{
    const int V = 16 / sizeof(E);
    kn_array dst = kn_without_dim(&a->dst, a->dim), src = kn_without_dim(&a->src, a->dim);
    select_arrays<E> s = { (E *)dst.data, (const E *)src.data, a->dst.stride[a->dim],
                           a->src.stride[a->dim], a->index.shape[0], a->src.shape[a->dim],
                           kn_indices_make(&a->index), false };
    const kn_array *const arrays[] = { &dst, &src };
    kn_span<2> lanes;
    bool wide = s.dst_stride % V == 0 && s.src_stride % V == 0;
    int v = kn_span_make(lanes, arrays, wide ? V : 1, true);
    if (!s.index.flags)
        return KN_FAILED;
    if (s.picks * lanes.count == 0)
        return KN_DONE;
    s.picks_first = s.dst_stride == 1;
    unsigned grid = kn_blocks(s.picks * lanes.vectors, 256, 1);
    if (V > 1 && v > 1)
        return KN_RUN_FLAT((select_kernel<E, V>), grid, 256, lanes, s);
    return KN_RUN_FLAT((select_kernel<E, 1>), grid, 256, lanes, s);
}
} // namespace

extern "C" kn_status kn_cuda_index_select(const void *args)
{
    const kn_index_select_args *a = (const kn_index_select_args *)args;
    KN_SIZES(a->src.dtype, select, a);
}
