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

/* ---- hadamard: a thread an element ----------------------------------------------------------- */

namespace
{
template <typename T>
KN_KERNEL(256, hadamard_kernel, T *y, const T *x, const kn_walk<2> lines, int64_t n, int64_t sy, int64_t sx)
{
    typedef typename kn_compute<T>::type A;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < lines.count * n;
         i += (int64_t)gridDim.x * blockDim.x) {
        int64_t at[2], j = i % n;
        kn_walk_at(lines, i / n, at);
        A sum = 0;
        for (int64_t k = 0; k < n; k++) {
            uint64_t both = (uint64_t)(j & k), odd = 0;
            for (; both; both &= both - 1)
                odd ^= 1;
            A v = kn_get(x + at[1] + k * sx);
            sum += odd ? -v : v;
        }
        kn_put(y + at[0] + j * sy, sum);
    }
}

template <typename T> kn_status hadamard(const kn_hadamard_args *a)
{
    const int last = a->x.ndim - 1;
    kn_array y = kn_without_dim(&a->y, last), x = kn_without_dim(&a->x, last);
    const kn_array *const arrays[] = { &y, &x };
    const kn_walk<2> lines = kn_walk_make(arrays);
    const int64_t n = a->x.shape[last];
    if (lines.count * n == 0)
        return KN_DONE;
    return KN_RUN_FLAT(hadamard_kernel<T>, kn_blocks(lines.count * n, 256, 1), 256, (T *)a->y.data,
                       (const T *)a->x.data, lines, n, a->y.stride[last], a->x.stride[last]);
}
} // namespace

extern "C" kn_status kn_cuda_hadamard(const void *args)
{
    const kn_hadamard_args *a = (const kn_hadamard_args *)args;
    KN_FLOATS(a->x.dtype, hadamard, a);
}
