/* kernels/cuda/kernels/cumsum.cu: running sums (or products, extrema) along dim, in f64. A
 * block a line, which it walks in pieces of its threads: each piece is scanned in shared memory and
 * begins with the sum of those before. The order of joining depends on the line's length alone. */
#include "kernels/cuda/kernels/index.cuh"

namespace
{
enum { PIECE = 256 };

template <typename A> struct cumsum_call {
    kn_any_at<A> y, x;
    kn_walk<2> lines;
    int64_t n, sy, sx; /* size and strides of dim */
    bool reverse;
    kn_join by;
    A neutral;
};

template <typename A> KN_KERNEL(PIECE, cumsum_kernel, const cumsum_call<A> a)
{
    KN_SHARED A sums[PIECE];
    for (int64_t line = blockIdx.x; line < a.lines.count; line += gridDim.x) {
        int64_t at[2];
        kn_walk_at(a.lines, line, at);
        A before = a.neutral;
        for (int64_t first = 0; first < a.n; first += PIECE) {
            int64_t j = first + threadIdx.x, i = a.reverse ? a.n - 1 - j : j;
            sums[threadIdx.x] = j < a.n ? kn_any_get(a.x + (at[1] + i * a.sx)) : a.neutral;
            __syncthreads();
            for (int step = 1; step < PIECE; step *= 2) {
                A more = (int)threadIdx.x >= step ? sums[threadIdx.x - step] : a.neutral;
                __syncthreads();
                sums[threadIdx.x] = kn_join_of(a.by, more, sums[threadIdx.x]);
                __syncthreads();
            }
            if (j < a.n)
                kn_any_put(a.y + (at[0] + i * a.sy), kn_join_of(a.by, before, sums[threadIdx.x]));
            before = kn_join_of(a.by, before, sums[PIECE - 1]);
            __syncthreads();
        }
    }
}

template <typename A> kn_status cumsum(const kn_cumsum_args *a, A neutral)
{
    kn_array y = kn_without_dim(&a->y, a->dim), x = kn_without_dim(&a->x, a->dim);
    const kn_array *const arrays[] = { &y, &x };
    cumsum_call<A> c = { kn_kept<kn_any<A>>::of(&a->y),
                         kn_kept<kn_any<A>>::of(&a->x),
                         kn_walk_make(arrays),
                         a->x.shape[a->dim],
                         a->y.stride[a->dim],
                         a->x.stride[a->dim],
                         a->reverse,
                         a->by,
                         neutral };
    if (c.lines.count * c.n == 0)
        return KN_DONE;
    return KN_RUN(cumsum_kernel<A>, kn_blocks(c.lines.count, 1, 1), PIECE, 0, c);
}
} // namespace

extern "C" kn_status kn_cuda_cumsum(const void *args)
{
    const kn_cumsum_args *a = (const kn_cumsum_args *)args;
    return kn_dtype_is_int(a->x.dtype) ? cumsum<int64_t>(a, kn_join_neutral_int(a->by))
                                      : cumsum<double>(a, kn_join_neutral(a->by));
}
