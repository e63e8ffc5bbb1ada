/* kernels/cuda/kernels/reduce.cu: sums, means, extremes over any dims.
 *
 * Outputs are the dims that stay, each with `length` elements to fold. Two ways, chosen by which
 * elements are neighbours in memory:
 *   rows     a warp or a block an output, its threads side by side along the folded dims;
 *   columns  threads side by side along the outputs (bias gradients), rows shared among them.
 * Where there are few outputs their elements are folded in parts, which a last kernel joins.
 * Everything that decides the order of additions is a function of shape and layout.
 *
 * Floor: each element is read once, by 16 bytes where aligned. Sums are kept in f64: at most one
 * conversion and addition an element, below the rate of memory. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/reduce.cuh"
#include <stdlib.h>

/* ---- kernels --------------------------------------------------------------------------------- */

struct reduce_call {
    const void *src;
    kn_dtype dtype; /* src's */
    int unit;       /* fold_unit of it */
    kn_walk<2> out;    /* dst, src over the dims that stay */
    kn_walk<1> folded; /* src over the others */
    reduce_out dst;
    int64_t length, parts, each; /* a part is `each` elements */
    void *partial;               /* [parts][outputs] states; NULL where parts == 1 */
};

static __device__ inline int64_t folded_at(const reduce_call &a, int64_t i)
{
    if (a.folded.ndim <= 1)
        return i * a.folded.stride[0][0];
    int64_t at[1];
    kn_walk_at(a.folded, i, at);
    return at[0];
}

template <typename S>
static __device__ inline void reduce_finish(const reduce_call &a, int64_t output, const S &s)
{
    int64_t at[2];
    kn_walk_at(a.out, output, at);
    store_state(a.dst, at[0], s);
}

template <typename S>
static __device__ inline void reduce_store(const reduce_call &a, int64_t output, int64_t part,
                                           const S &s)
{
    if (a.partial)
        ((S *)a.partial)[part * a.out.count + output] = s;
    else
        reduce_finish(a, output, s);
}

static __device__ inline double shuffled(double s, int o)
{
    return __shfl_xor_sync(KN_FULL_WARP, s, o);
}
static __device__ inline int64_t shuffled(int64_t s, int o)
{
    return (int64_t)__shfl_xor_sync(KN_FULL_WARP, (long long)s, o);
}
template <typename V>
static __device__ inline extreme_state<V> shuffled(const extreme_state<V> &s, int o)
{
    return { (V)__shfl_xor_sync(KN_FULL_WARP, s.best, o), shuffled(s.where, o) };
}

/* One element after another into s. */
template <typename F, typename V, int N>
static __device__ inline void fold(typename F::S &s, const V (&x)[N], int n, int64_t at, bool smallest)
{
#pragma unroll
    for (int c = 0; c < N; c++)
        if (c < n)
            F::add(s, x[c], at + c, smallest);
}

/* The group's state becomes that of its first lane. */
template <typename F>
static __device__ inline void reduce_join(const row_group &g, typename F::S &s, typename F::S *buffer)
{
    for (int o = 16; o > 0; o >>= 1)
        F::join(s, shuffled(s, o));
    if (g.mode == ROW_WARP)
        return;
    if (g.lane % 32 == 0)
        buffer[g.lane / 32] = s;
    __syncthreads();
#pragma unroll 1
    for (int w = 1; g.lane == 0 && w < g.lanes / 32; w++)
        F::join(s, buffer[w]);
    __syncthreads();
}

/* A group (ROW_WARP or ROW_BLOCK) an output and part. Every unit is 16 aligned bytes of T. */
template <typename F, typename T> KN_KERNEL(256, reduce_rows_kernel, reduce_call a, int mode)
{
    const int N = 16 / sizeof(T);
    KN_SHARED typename F::S buffer[32];
    row_group g(mode);
    for (int64_t k = g.first; k < a.out.count * a.parts; k += g.step) {
        int64_t output = k / a.parts, part = k - output * a.parts, at[2];
        kn_walk_at(a.out, output, at);
        int64_t end = (part + 1) * a.each < a.length ? (part + 1) * a.each : a.length;
        typename F::S s = F::start();
#pragma unroll 2
        for (int64_t i = part * a.each + g.lane * N; i < end; i += g.lanes * N) {
            float x[N];
            load_unit<T, N>((const T *)a.src + at[1] + folded_at(a, i), x);
            fold<F>(s, x, N, i, a.dst.kind == KN_MIN);
        }
        reduce_join<F>(g, s, buffer);
        if (g.lane == 0)
            reduce_store(a, output, part, s);
    }
}

/* The same of any strides, addresses and dtypes. */
template <typename F, typename V>
KN_KERNEL_RESIDENT(256, 1, reduce_rows_any_kernel, reduce_call a, int mode)
{
    KN_SHARED typename F::S buffer[32];
    row_group g(mode);
    bool smallest = a.dst.kind == KN_MIN;
    for (int64_t k = g.first; k < a.out.count * a.parts; k += g.step) {
        int64_t output = k / a.parts, part = k - output * a.parts, at[2];
        kn_walk_at(a.out, output, at);
        int64_t end = (part + 1) * a.each < a.length ? (part + 1) * a.each : a.length;
        typename F::S s = F::start();
        for (int64_t i = part * a.each + g.lane * a.unit; i < end; i += g.lanes * a.unit) {
            int n = end - i > a.unit ? a.unit : (int)(end - i), once = a.folded.ndim <= 1 ? n : 1;
            V x[MOST_UNIT];
#pragma unroll 1
            for (int c = 0; c < n; c += once) {
                load_any(a.src, a.dtype, at[1] + folded_at(a, i + c), a.folded.stride[0][0], once, x);
                fold<F>(s, x, once, i + c, smallest);
            }
        }
        reduce_join<F>(g, s, buffer);
        if (g.lane == 0)
            reduce_store(a, output, part, s);
    }
}

#define WIDE_BLOCK 32

/* A thread N outputs; blockDim.y threads share their elements, gridDim.y parts. */
template <typename F, typename V, int N, typename L>
static __device__ inline void reduce_columns(const reduce_call &a, typename F::S (*buffer)[WIDE_BLOCK][N], L load)
{
    int64_t part = blockIdx.y,
            end = (part + 1) * a.each < a.length ? (part + 1) * a.each : a.length;
    int64_t units = a.out.count / N, deep = blockDim.y;
    int64_t unit = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    typename F::S s[N];
#pragma unroll
    for (int c = 0; c < N; c++)
        s[c] = F::start();
    if (unit < units) {
        int64_t at[2];
        kn_walk_at(a.out, unit * N, at);
#pragma unroll 2
        for (int64_t i = part * a.each + threadIdx.y; i < end; i += deep) {
            V x[N];
            load(at[1] + folded_at(a, i), x);
#pragma unroll
            for (int c = 0; c < N; c++)
                F::add(s[c], x[c], i, a.dst.kind == KN_MIN);
        }
    }
    if (deep > 1) { /* then blockDim.x is WIDE_BLOCK */
#pragma unroll
        for (int c = 0; c < N; c++)
            buffer[threadIdx.y][threadIdx.x][c] = s[c];
        __syncthreads();
#pragma unroll 1
        for (int y = 1; threadIdx.y == 0 && y < deep; y++)
#pragma unroll
            for (int c = 0; c < N; c++)
                F::join(s[c], buffer[y][threadIdx.x][c]);
    }
    if (threadIdx.y > 0 || unit >= units)
        return;
#pragma unroll 1
    for (int c = 0; c < N; c++) { /* s turns round instead of being indexed, and stays in
                                   * registers */
        reduce_store(a, unit * N + c, part, s[0]);
#pragma unroll
        for (int k = 0; k + 1 < N; k++)
            s[k] = s[k + 1];
    }
}

/* 16 aligned bytes of T at once. */
template <typename F, typename T> KN_KERNEL(256, reduce_columns_kernel, reduce_call a)
{
    const int N = 16 / sizeof(T);
    KN_SHARED typename F::S buffer[8][WIDE_BLOCK][N];
    const T *src = (const T *)a.src;
    reduce_columns<F, float, N>(a, buffer,
                                [=](int64_t at, float (&x)[N]) { load_unit<T, N>(src + at, x); });
}

/* The same of any strides, addresses and dtypes. */
template <typename F, typename V>
KN_KERNEL_RESIDENT(256, 1, reduce_columns_any_kernel, reduce_call a)
{
    KN_SHARED typename F::S buffer[8][WIDE_BLOCK][1];
    reduce_columns<F, V, 1>(a, buffer, [&](int64_t at, V (&x)[1]) {
        V y[MOST_UNIT];
        load_any(a.src, a.dtype, at, 0, 1, y);
        x[0] = y[0];
    });
}

#define PARTS_DEEP  16 /* threads that share an output's parts, where there are so many parts */
#define PARTS_AHEAD 8  /* loads of a thread that are on their way at once */

/* Joins the parts of each output: thread y of `deep` takes the parts y, y + deep, ... in order, and
 * their results are joined in order of y. deep depends on the number of parts only, and that
 * on the shape. Six blocks that add 340 parts of a bias' gradient one after the other would wait for
 * memory longer than the sums over the rows take. */
template <typename F> KN_KERNEL(WIDE_BLOCK *PARTS_DEEP, reduce_parts_kernel, reduce_call a)
{
    typedef typename F::S S;
    KN_SHARED S buffer[PARTS_DEEP][WIDE_BLOCK];
    int64_t deep = blockDim.y, k = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    const S *partial = (const S *)a.partial + k;
    S s = F::start();
    for (int64_t p = threadIdx.y; k < a.out.count && p < a.parts; p += PARTS_AHEAD * deep) {
        S next[PARTS_AHEAD]; /* the start joined changes nothing */
#pragma unroll
        for (int i = 0; i < PARTS_AHEAD; i++)
            next[i] = p + i * deep < a.parts ? partial[(p + i * deep) * a.out.count] : F::start();
#pragma unroll
        for (int i = 0; i < PARTS_AHEAD; i++)
            F::join(s, next[i]);
    }
    if (deep > 1) { /* then blockDim.x is WIDE_BLOCK */
        buffer[threadIdx.y][threadIdx.x] = s;
        __syncthreads();
#pragma unroll 1
        for (int y = 1; threadIdx.y == 0 && y < deep; y++)
            F::join(s, buffer[y][threadIdx.x]);
    }
    if (threadIdx.y == 0 && k < a.out.count)
        reduce_finish(a, k, s);
}

template <typename F> static kn_status reduce_join_parts(const reduce_call &c)
{
    int64_t deep = c.parts < PARTS_DEEP ? 1 : PARTS_DEEP, wide = deep > 1 ? WIDE_BLOCK : 128;
    dim3 grid((unsigned)((c.out.count + wide - 1) / wide)),
        block((unsigned)wide, (unsigned)deep);
    if (deep == 1)
        return KN_RUN_FLAT(reduce_parts_kernel<F>, grid, block, c);
    return KN_RUN(reduce_parts_kernel<F>, grid, block, 0, c);
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* Decides the parts and makes room for their states. */
template <typename F> static bool reduce_parts(reduce_call &c, int64_t parts, int64_t unit)
{
    typedef typename F::S S;
    parts = parts < 1 ? 1 : parts > 65535 ? 65535 : parts;
    c.each = ((c.length + parts - 1) / parts + unit - 1) / unit * unit;
    c.each = c.each < 1 ? 1 : c.each;
    c.parts = c.length > 0 ? (c.length + c.each - 1) / c.each : 1;
    c.partial =
        c.parts > 1 ? kn_cuda_scratch((size_t)(c.parts * c.out.count) * sizeof(S)) : nullptr;
    return c.parts == 1 || c.partial;
}

/* V: what any dtype of F's kind loads to; T: the one that units are read of at once, or void. */
template <typename F, typename V, typename T> struct reduce_kernels {
    static kn_status rows(const reduce_call &c, unsigned grid, unsigned block, int mode)
    {
        return KN_RUN((reduce_rows_kernel<F, T>), grid, block, 0, c, mode);
    }
    static kn_status columns(const reduce_call &c, dim3 grid, dim3 block)
    {
        if (block.y == 1)
            return KN_RUN_FLAT((reduce_columns_kernel<F, T>), grid, block, c);
        return KN_RUN((reduce_columns_kernel<F, T>), grid, block, 0, c);
    }
};
template <typename F, typename V> struct reduce_kernels<F, V, void> {
    static kn_status rows(const reduce_call &c, unsigned grid, unsigned block, int mode)
    {
        return KN_RUN((reduce_rows_any_kernel<F, V>), grid, block, 0, c, mode);
    }
    static kn_status columns(const reduce_call &c, dim3 grid, dim3 block)
    {
        if (block.y == 1)
            return KN_RUN_FLAT((reduce_columns_any_kernel<F, V>), grid, block, c);
        return KN_RUN((reduce_columns_any_kernel<F, V>), grid, block, 0, c);
    }
};

template <typename F, typename V, typename T> static kn_status reduce_rows(reduce_call &c)
{
    int64_t many = 1024 / c.out.count, some = c.length / 8192;
    if (!reduce_parts<F>(c, many < some ? many : some, c.unit))
        return KN_FAILED;
    int64_t groups = c.out.count * c.parts, most = 32 * (int64_t)kn_cuda_multiprocessors();
    bool warps = c.each <= 2048;
    int64_t grid = warps ? (groups + ROW_WARPS - 1) / ROW_WARPS : groups;
    return reduce_kernels<F, V, T>::rows(c, (unsigned)(grid < most ? grid : most),
                                         warps ? 32 * ROW_WARPS : 256, warps ? ROW_WARP : ROW_BLOCK);
}

template <typename F, typename V, typename T> static kn_status reduce_columns(reduce_call &c, int n)
{
    int64_t units = c.out.count / n, each = WIDE_BLOCK * c.unit;
    int64_t many = 1024 / ((c.out.count + each - 1) / each), some = c.length / 64;
    if (!reduce_parts<F>(c, many < some ? many : some, 1))
        return KN_FAILED;
    bool flat = c.length < 32; /* short: a thread an output */
    unsigned wide = flat ? 128 : WIDE_BLOCK;
    dim3 grid((unsigned)((units + wide - 1) / wide), (unsigned)c.parts);
    return reduce_kernels<F, V, T>::columns(c, grid, dim3(wide, flat ? 1 : 8));
}

/* Whether every n elements from a place on are 16 aligned bytes: the walk that has them as
 * neighbours, and the other one, in src's strides. */
template <int A, int B>
static bool units_aligned(const kn_walk<A> &inner, int a, const kn_walk<B> &outer, int b, int64_t n)
{
    int last = inner.ndim - 1;
    bool fits = last >= 0 && inner.stride[a][last] == 1 && inner.shape[last] % n == 0;
    for (int d = 0; fits && d < last; d++)
        fits = inner.stride[a][d] % n == 0;
    for (int d = 0; fits && d < outer.ndim; d++)
        fits = outer.stride[b][d] % n == 0;
    return fits;
}

/* Rows where neighbours in memory are folded, or where there are too few outputs to be side by
 * side. */
static bool reduce_by_rows(const reduce_call &c)
{
    int fo = c.folded.ndim - 1, ou = c.out.ndim - 1;
    int64_t f = fo >= 0 ? llabs(c.folded.stride[0][fo]) : 0;
    int64_t o = ou >= 0 ? llabs(c.out.stride[1][ou]) : 0;
    if (c.length < 32)
        return false;
    return f == 1 || o == 0 || (o != 1 && f < o) || (c.out.count < 16 && c.length >= 1024);
}

template <typename F, typename V, typename T> static kn_status reduce_as(reduce_call &c, bool rows, int n)
{
    kn_status s = rows ? reduce_rows<F, V, T>(c) : reduce_columns<F, V, T>(c, n);
    return s != KN_DONE || c.parts == 1 ? s : reduce_join_parts<F>(c);
}

/* A fold of any dtype of its kind. */
template <typename F, typename V> static kn_status reduce_any(reduce_call &c)
{
    return reduce_as<F, V, void>(c, reduce_by_rows(c), 1);
}

/* Whole: the fold of elements that were read as floats. */
template <typename F, typename WHOLE> static kn_status reduce_floats(reduce_call &c)
{
    bool rows = reduce_by_rows(c);
    bool aligned = (uintptr_t)c.src % 16 == 0 && (rows ? units_aligned(c.folded, 0, c.out, 1, c.unit)
                                                       : units_aligned(c.out, 1, c.folded, 0, c.unit));
    if (aligned && c.dtype == KN_F32)
        return reduce_as<WHOLE, float, float>(c, rows, c.unit);
    if (aligned && c.dtype == KN_BF16)
        return reduce_as<WHOLE, float, kn_bf16>(c, rows, c.unit);
    if (aligned && c.dtype == KN_F16)
        return reduce_as<WHOLE, float, kn_f16>(c, rows, c.unit);
    return reduce_as<F, double, void>(c, rows, 1);
}

/* The dims in which dst and src have equal sizes, and the others; in each those with the smallest
 * strides of src last, so that as many as possible merge. */
static void reduce_split(const kn_reduce_args *a, kn_array *dst, kn_array *out, kn_array *folded)
{
    int order[KN_MAX_DIMS];
    for (int d = 0; d < a->src.ndim; d++) {
        int64_t stride = llabs(a->src.stride[d]);
        int k = d;
        for (; k > 0; k--) {
            int64_t before = llabs(a->src.stride[order[k - 1]]);
            if (before == 0 || (stride != 0 && before >= stride))
                break;
            order[k] = order[k - 1];
        }
        order[k] = d;
    }
    *dst = a->dst;
    *out = *folded = a->src;
    dst->ndim = out->ndim = folded->ndim = 0;
    for (int k = 0; k < a->src.ndim; k++) {
        int d = order[k];
        bool stays = a->dst.shape[d] == a->src.shape[d];
        kn_array *to = stays ? out : folded;
        if (stays) {
            dst->shape[dst->ndim] = a->src.shape[d];
            dst->stride[dst->ndim++] = a->dst.stride[d];
        }
        to->shape[to->ndim] = a->src.shape[d];
        to->stride[to->ndim++] = a->src.stride[d];
    }
}

static reduce_call reduce_call_make(const kn_reduce_args *a)
{
    kn_array dst, out, folded;
    reduce_split(a, &dst, &out, &folded);
    const kn_array *const outs[2] = { &dst, &out }, *const folds[1] = { &folded };
    reduce_call c = {};
    c.src = a->src.data;
    c.dtype = a->src.dtype;
    c.unit = fold_unit(c.dtype);
    c.out = kn_walk_make(outs);
    c.folded = kn_walk_make(folds);
    c.length = c.folded.count;
    c.dst = { a->dst.data, a->dst.dtype, a->kind, !kn_dtype_is_float(a->src.dtype), c.length };
    return c;
}

extern "C" kn_status kn_cuda_reduce(const void *args)
{
    const kn_reduce_args *a = (const kn_reduce_args *)args;
    int reduced = 0;
    bool fits = a->dst.ndim == a->src.ndim;
    for (int d = 0; fits && d < a->src.ndim; d++) {
        fits = a->dst.shape[d] == a->src.shape[d] || a->dst.shape[d] == 1;
        reduced += a->dst.shape[d] != a->src.shape[d];
    }
    bool sum = a->kind == KN_SUM || a->kind == KN_MEAN;
    if (!sum && a->kind != KN_MAX && a->kind != KN_MIN && a->kind != KN_ARGMAX)
        return KN_DECLINED;
    if (!fits || (a->kind == KN_ARGMAX && (a->dst.dtype != KN_I64 || reduced > 1)))
        return KN_DECLINED;
    kn_dtype t = a->src.dtype;
    if (!kn_dtype_is_float(t) && t != KN_I64 && t != KN_I32 && t != KN_U8 && t != KN_BOOL)
        return KN_DECLINED;
    reduce_call c = reduce_call_make(a);
    if (c.out.count == 0)
        return KN_DONE;
    if (kn_dtype_is_float(t))
        return sum ? reduce_floats<sum_floats, sum_floats>(c) : reduce_floats<greatest<double>, greatest<float>>(c);
    return sum ? reduce_any<sum_ints, int64_t>(c) : reduce_any<greatest<int64_t>, int64_t>(c);
}
