/* kernels/cuda/kernels/gather.cu: elements along dim picked by an index of their own each. A thread
 * an element. Floor: index read and dst written once; src is read where index points. */
#include "kernels/cuda/kernels/index.cuh"

namespace
{
template <typename E> struct gather_arrays {
    E *dst;
    const E *src;
    int64_t step, n; /* of src's dim: stride and size */
    kn_indices index;
};

template <typename E> KN_KERNEL(256, gather_kernel, const kn_walk<3> walk, const gather_arrays<E> a)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    for (; i < walk.count; i += n) {
        int64_t at[3];
        kn_walk_at(walk, i, at);
        int64_t from = kn_index_at(a.index, at[2]);
        if (from < 0 || from >= a.n)
            kn_index_flag(a.index, i, from);
        else
            a.dst[at[0]] = a.src[at[1] + from * a.step];
    }
}

template <typename E> kn_status gather(const kn_gather_args *a)
{
    kn_array lines = kn_lines_of(&a->src, &a->dst, a->dim);
    const kn_array *const arrays[] = { &a->dst, &lines, &a->index };
    kn_walk<3> walk = kn_walk_make(arrays);
    gather_arrays<E> g = { (E *)a->dst.data, (const E *)a->src.data, a->src.stride[a->dim],
                           a->src.shape[a->dim], kn_indices_of_elements(&a->index) };
    if (!g.index.flags)
        return KN_FAILED;
    if (walk.count == 0)
        return KN_DONE;
    return KN_RUN_FLAT(gather_kernel<E>, kn_blocks(walk.count, 256, 1), 256, walk, g);
}
} // namespace

extern "C" kn_status kn_cuda_gather(const void *args)
{
    const kn_gather_args *a = (const kn_gather_args *)args;
    KN_SIZES(a->src.dtype, gather, a);
}
