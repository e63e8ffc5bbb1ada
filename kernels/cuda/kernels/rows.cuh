/* kernels/cuda/kernels/rows.cuh (private): what kernels that work on rows along the last dim share.
 *
 * A row belongs to a thread (very short rows), a warp, or a block; its elements are walked in units
 * of 16 bytes, one load where the row is dense and aligned (VEC), else element by element: so the
 * order of additions, and every bit, is the same wherever the row lies. A thread returns to the
 * units that it read itself, so a row kept in shared memory needs no barrier and an output may be
 * the input. */
#ifndef KNAP_KERNELS_CUDA_ROWS_CUH
#define KNAP_KERNELS_CUDA_ROWS_CUH

#include "kernels/cuda/kernels/cuda.cuh"

#define ROW_CACHE_BYTES (48 << 10) /* shared memory that every GPU gives a block */
#define ROW_WARPS       4          /* rows a block where a row belongs to a warp */
#define ROW_MOST        512        /* threads of a block */

enum { ROW_THREAD = 0, ROW_WARP, ROW_BLOCK };

/* 16 bytes moved at once. */
template <typename T> struct alignas(16) row_chunk {
    T at[16 / sizeof(T)];
};

/* Elements of a unit. */
template <typename T> struct row_unit {
    static const int size = 16 / (int)sizeof(T);
};

/* How many elements unit u of a row has: rows that are VEC consist of whole ones. */
template <bool VEC, int N> static __device__ inline int row_live(int64_t u, int64_t length)
{
    int64_t left = length - u * N;
    return VEC || left >= N ? N : (int)left;
}

/* Unit u of a row, its first n elements. */
template <bool VEC, int N, typename T>
static __device__ inline void row_load(const T *p, int64_t stride, int64_t u, int n,
                                       typename kn_compute<T>::type (&x)[N])
{
    if (!VEC) {
        for (int i = 0; i < N; i++)
            x[i] = i < n ? kn_get(p + (u * N + i) * stride) : 0;
        return;
    }
    const int each = row_unit<T>::size;
    for (int c = 0; c < N / each; c++) {
        row_chunk<T> chunk = *(const row_chunk<T> *)(p + u * N + c * each);
        for (int i = 0; i < each; i++)
            x[c * each + i] = kn_get(chunk.at + i);
    }
}

template <bool VEC, int N, typename T>
static __device__ inline void row_store(T *p, int64_t stride, int64_t u, int n,
                                        const typename kn_compute<T>::type (&x)[N])
{
    if (!VEC) {
        for (int i = 0; i < N; i++)
            if (i < n)
                kn_put(p + (u * N + i) * stride, x[i]);
        return;
    }
    const int each = row_unit<T>::size;
    for (int c = 0; c < N / each; c++) {
        row_chunk<T> chunk;
        for (int i = 0; i < each; i++)
            kn_put(chunk.at + i, x[c * each + i]);
        *(row_chunk<T> *)(p + u * N + c * each) = chunk;
    }
}

/* Unit u of a row that row_each has seen. */
template <bool VEC, int N, typename T>
static __device__ inline void row_again(const T *p, int64_t stride, int64_t u, int n,
                                        const T *cache, typename kn_compute<T>::type (&x)[N])
{
    if (cache)
        row_load<VEC, N>(cache, 1, u, n, x);
    else
        row_load<VEC, N>(p, stride, u, n, x);
}

/* The threads of a row: this thread is number `lane` of `lanes`; rows first, first + step, ... The
 * mode is a value at run time: a kernel for each takes the compiler's time, and saves the GPU
 * none. */
struct row_group {
    int mode, lane, lanes;
    int64_t first, step;
    __device__ row_group(int how) : mode(how)
    {
        int64_t thread = threadIdx.x, block = blockIdx.x;
        if (mode == ROW_THREAD) {
            lane = 0, lanes = 1;
            first = block * blockDim.x + thread, step = (int64_t)gridDim.x * blockDim.x;
        } else if (mode == ROW_WARP) {
            lane = (int)thread % 32, lanes = 32;
            first = block * ROW_WARPS + thread / 32, step = (int64_t)gridDim.x * ROW_WARPS;
        } else {
            lane = (int)thread, lanes = (int)blockDim.x;
            first = block, step = gridDim.x;
        }
    }
};

/* The n-th kept row of this group in shared memory, or NULL. */
template <typename T>
static __device__ inline T *row_kept(const row_group &g, unsigned char *room, bool cached,
                                     int64_t length, int n, int kept)
{
    int64_t bytes = (length * (int64_t)sizeof(T) + 15) / 16 * 16;
    int group = g.mode == ROW_WARP ? (int)threadIdx.x / 32 : 0;
    return cached ? (T *)(room + (group * kept + n) * bytes) : nullptr;
}

/* The first pass over M rows of one length: calls use(u, n, x) for each of this thread's units, in
 * order, with unit u of row k in x[k]; keeps them where there is a cache. Four loads are on their
 * way before the first is used: a block's 512 threads with one each would leave the memory of a
 * Hopper GPU waiting half of the time. */
template <bool VEC, int N, int M, typename T, typename F>
static __device__ inline void row_each(const row_group &g, const T *const (&p)[M],
                                       const int64_t (&stride)[M], int64_t length,
                                       T *const (&cache)[M], F use)
{
    const int AHEAD = VEC ? 4 / M : 1;
    int64_t units = (length + N - 1) / N;
    for (int64_t first = g.lane; first < units; first += AHEAD * g.lanes) {
        typename kn_compute<T>::type x[M][N];
        row_chunk<T> chunk[AHEAD][M];
#pragma unroll
        for (int c = 0; c < AHEAD && VEC; c++)
#pragma unroll
            for (int k = 0; k < M; k++)
                if (first + c * g.lanes < units)
                    chunk[c][k] = *(const row_chunk<T> *)(p[k] + (first + c * g.lanes) * N);
#pragma unroll
        for (int c = 0; c < AHEAD; c++) {
            int64_t u = first + c * g.lanes;
            if (u >= units)
                break;
            int n = row_live<VEC, N>(u, length);
#pragma unroll
            for (int k = 0; k < M; k++) {
                if (VEC)
                    row_load<true, N>(chunk[c][k].at, 1, 0, N, x[k]);
                else
                    row_load<false, N>(p[k], stride[k], u, n, x[k]);
                if (cache[k])
                    row_store<VEC, N>(cache[k], 1, u, n, x[k]);
            }
            use(u, n, x);
        }
    }
}

/* row_each over one row of any length, where VEC means that the row begins aligned: a last unit
 * that isn't whole goes element by element, to the thread that has it in any case. */
template <bool VEC, int N, typename T, typename F>
static __device__ inline void row_each_of_any_length(const row_group &g, const T *p, int64_t stride,
                                                     int64_t length, F use)
{
    int64_t whole = length / N;
    row_each<VEC, N, 1>(
        g, { p }, { stride }, VEC ? whole * N : length, { (T *)nullptr },
        [&](int64_t u, int n, typename kn_compute<T>::type(&x)[1][N]) { use(u, n, x[0]); });
    int n = (int)(length - whole * N);
    if (VEC && n > 0 && g.lane == whole % g.lanes) {
        typename kn_compute<T>::type x[N];
        row_load<false, N>(p, stride, whole, n, x);
        use(whole, n, x);
    }
}

/* Sum and maximum over a row's threads; every one gets the result. */
template <typename A> static __device__ inline A row_sum(const row_group &g, A x, A *buffer)
{
    if (g.mode == ROW_THREAD)
        return x;
    return g.mode == ROW_WARP ? kn_warp_sum(x) : kn_block_sum(x, buffer);
}
template <typename A> static __device__ inline A row_max(const row_group &g, A x, A *buffer)
{
    if (g.mode == ROW_THREAD)
        return x;
    return g.mode == ROW_WARP ? kn_warp_max(x) : kn_block_max(x, buffer);
}

template <typename A> static __device__ inline A row_infinity(void)
{
    return (A)INFINITY;
}
static __device__ inline float row_log(float x)
{
    return logf(x);
}
static __device__ inline double row_log(double x)
{
    return log(x);
}
static __device__ inline float row_rsqrt(float x)
{
    return 1.0f / sqrtf(x);
}
static __device__ inline double row_rsqrt(double x)
{
    return 1.0 / sqrt(x);
}

/* ---- on the host ----------------------------------------------------------------------------- */

static inline int64_t row_length(const kn_array *a)
{
    return a->ndim > 0 ? a->shape[a->ndim - 1] : 1;
}
static inline int64_t row_stride(const kn_array *a)
{
    return a->ndim > 0 ? a->stride[a->ndim - 1] : 1;
}

/* Whether rows of a are dense and all begin aligned to 16 bytes. */
static inline bool row_begins_aligned(const kn_array *a)
{
    int64_t n = 16 / (int64_t)kn_dtype_size(a->dtype);
    bool fits = (uintptr_t)a->data % 16 == 0 && row_stride(a) == 1;
    for (int d = 0; d < a->ndim - 1; d++)
        fits = fits && (a->shape[d] == 1 || a->stride[d] % n == 0);
    return fits && row_length(a) > 0;
}

/* Whether rows of a can be moved by 16 bytes: dense, aligned, of whole units. */
static inline bool row_aligned(const kn_array *a)
{
    return row_begins_aligned(a) && row_length(a) % (16 / (int64_t)kn_dtype_size(a->dtype)) == 0;
}

/* The leading dims of arrays of one shape. */
template <int N> static inline kn_walk<N> row_walk(const kn_array *const (&a)[N])
{
    kn_array lead[N];
    const kn_array *p[N];
    for (int k = 0; k < N; k++) {
        lead[k] = *a[k];
        lead[k].ndim = a[k]->ndim > 0 ? a[k]->ndim - 1 : 0;
        p[k] = &lead[k];
    }
    const kn_array *const(&q)[N] = (const kn_array *const(&)[N])p;
    return kn_walk_make(q);
}

/* How rows are given out: mode, grid, block, and the bytes of `kept` rows in shared memory (0: they
 * don't fit). Depends on the shape alone but for the grid, whose size no result depends on. */
struct row_plan {
    int mode;
    unsigned grid, block;
    size_t cache;
};

static inline row_plan row_plan_make(int64_t rows, int64_t length, int64_t size, int kept)
{
    row_plan p = {};
    int64_t bytes = length * size, units = bytes / 16,
            most = 32 * (int64_t)kn_cuda_multiprocessors();
    int64_t blocks;
    if (length <= 16) {
        p.mode = ROW_THREAD;
        p.block = 128;
        blocks = (rows + 127) / 128;
    } else if (bytes <= 4096) {
        p.mode = ROW_WARP;
        p.block = 32 * ROW_WARPS;
        blocks = (rows + ROW_WARPS - 1) / ROW_WARPS;
    } else {
        p.mode = ROW_BLOCK;
        p.block = units > 1024 ? ROW_MOST : 256;
        blocks = rows;
    }
    p.grid = (unsigned)(blocks < 1 ? 1 : blocks < most ? blocks : most);
    bytes = (bytes + 15) / 16 * 16 * kept * (p.mode == ROW_WARP ? ROW_WARPS : 1);
    p.cache = p.mode != ROW_THREAD && bytes <= ROW_CACHE_BYTES - 1024 ? (size_t)bytes : 0;
    return p;
}

/* Launches kernel<T, VEC> as planned; its last parameter is the mode. f64 goes element by
 * element. */
#define ROW_RUN(kernel, T, vec, plan, ...)                                                         \
    do {                                                                                           \
        if ((plan).mode == ROW_THREAD)                                                             \
            return KN_RUN_FLAT((kernel<T, false>), (plan).grid, (plan).block, __VA_ARGS__,         \
                               (plan).mode);                                                       \
        return (vec) ? KN_RUN((kernel<T, (sizeof(T) < 8)>), (plan).grid, (plan).block,             \
                              (plan).cache, __VA_ARGS__, (plan).mode)                              \
                     : KN_RUN((kernel<T, false>), (plan).grid, (plan).block, (plan).cache,         \
                              __VA_ARGS__, (plan).mode);                                           \
    } while (0)

#endif
