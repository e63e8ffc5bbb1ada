/* kernels/cuda/kernels/attention.cuh (private): tiles of attention, forward and backward.
 *
 * A block has G x G threads, (ty, tx); they share tiles of rows of D values in shared memory, as
 * f32 (or f64) and padded by zeros to G * DT columns. Thread (ty, tx) works on rows ty, ty + G, ...
 * and on columns tx, tx + G, ... of whatever the block computes. Tile rows are 16 bytes longer than
 * their values: so neighbouring threads, which read neighbouring rows by 16 bytes, meet different
 * banks. */
#ifndef KNAP_KERNELS_CUDA_ATTENTION_CUH
#define KNAP_KERNELS_CUDA_ATTENTION_CUH

#include "kernels/cuda/kernels/exponentials.cuh"
#include "kernels/cuda/kernels/rows.cuh"

/* One of q, k, v, ...: [B, heads, rows, D]. */
struct attention_array {
    void *data;
    int64_t stride[4];
};

static inline attention_array attention_array_of(const kn_array *a)
{
    return { a->data, { a->stride[0], a->stride[1], a->stride[2], a->stride[3] } };
}

/* What is added to scores, or, of bool, whether a key is seen; data NULL: none. */
struct attention_mask {
    const void *data;
    int64_t stride[4];
    bool adds;
};

/* Shared by forward and backward. */
struct attention_sizes {
    kn_dtype dtype;
    int64_t B, H, G, T, S, D;
    int64_t tiles; /* of the rows that blocks own */
    double scale, kept;
    bool causal, dropout;
    uint32_t threshold;
    uint64_t seed, stream;
    const uint64_t *seed_at;
    int64_t window; /* 0: none */
    attention_mask mask;
};

static inline attention_sizes attention_sizes_of(const kn_array *q, const kn_array *k, double scale,
                                                 bool causal, double p, uint64_t seed,
                                                 uint64_t stream, const uint64_t *seed_at,
                                                 const kn_array *mask, int64_t window)
{
    attention_sizes a = {};
    a.dtype = q->dtype;
    a.B = q->shape[0], a.H = q->shape[1], a.T = q->shape[2], a.D = q->shape[3];
    a.G = k->shape[1], a.S = k->shape[2];
    a.scale = scale;
    a.kept = kn_dropout_scale(p);
    a.causal = causal;
    a.dropout = p > 0;
    a.threshold = kn_dropout_threshold(p);
    a.seed = seed, a.stream = stream, a.seed_at = seed_at;
    a.window = window;
    a.mask.data = mask->data;
    a.mask.adds = mask->dtype != KN_BOOL;
    for (int d = 0; d < 4; d++)
        a.mask.stride[d] = mask->stride[d];
    return a;
}

/* Whether the arrays are of dtypes that kernels take. */
static inline bool attention_takes(const kn_array *q, const kn_array *k, const kn_array *v,
                                   const kn_array *o, const kn_array *lse)
{
    kn_dtype t = q->dtype;
    return k->dtype == t && v->dtype == t && o->dtype == t &&
           lse->dtype == (t == KN_F64 ? KN_F64 : KN_F32) && kn_array_contiguous(lse) &&
           q->shape[3] <= 256;
}

/* Lets a kernel have so many bytes of dynamic shared memory. */
template <typename K> static inline void attention_room(K kernel, size_t bytes)
{
#ifdef KN_CUDA_EMULATE
    kn_emulated_room((const void *)kernel, bytes);
#else
    if (bytes > ROW_CACHE_BYTES)
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
#endif
}

/* m_s of row (b, h, t): element row * S + s of the draw; row = (b H + h) T + t. */
template <typename A>
static __device__ inline A attention_factor(const attention_sizes &a, int64_t row, int64_t s)
{
    if (!a.dropout)
        return 1;
    int64_t at = row * a.S + s;
    kn_philox4 w = kn_philox(kn_seed_of(a.seed, a.seed_at), a.stream, (uint64_t)at / 4);
    return kn_dropout_keeps(kn_philox_word(w, at), a.threshold) ? (A)a.kept : (A)0;
}

/* How many keys query t sees. */
static __device__ inline int64_t attention_visible(const attention_sizes &a, int64_t t)
{
    int64_t n = a.causal ? t + a.S - a.T + 1 : a.S;
    return n < 0 ? 0 : n;
}

/* How many keys lie before the window of query t. */
static __device__ inline int64_t attention_hidden(const attention_sizes &a, int64_t t)
{
    int64_t n = a.window > 0 ? t + a.S - a.T + 1 - a.window : 0;
    return n < 0 ? 0 : n;
}

/* The shape of a block's work: own rows, other rows, columns; and the lengths of rows in memory. */
template <typename A, int G, int R, int C, int DT> struct attention_tile {
    static const int V = 16 / (int)sizeof(A);
    static const int own = G * R, other = G * C, columns = G * DT, threads = G * G;
    static const int row = columns + V, weights_row = other + V;
};

/* Element at of x: f32, bf16 or f16 as f32, f64 as f64. */
static __device__ inline float attention_get(const void *x, kn_dtype t, int64_t at, float)
{
    if (t == KN_F32)
        return ((const float *)x)[at];
    return t == KN_BF16 ? kn_get((const kn_bf16 *)x + at) : kn_get((const kn_f16 *)x + at);
}
static __device__ inline double attention_get(const void *x, kn_dtype, int64_t at, double)
{
    return ((const double *)x)[at];
}

/* Whether query t of head (b H + h) sees key s, and what the mask adds to their score. */
template <typename A>
static __device__ inline bool attention_sees(const attention_sizes &a, int64_t head, int64_t t,
                                             int64_t s, A &bias)
{
    const attention_mask &m = a.mask;
    bias = 0;
    if (t >= a.T || s >= attention_visible(a, t) || s < attention_hidden(a, t))
        return false;
    if (!m.data)
        return true;
    int64_t at =
        head / a.H * m.stride[0] + head % a.H * m.stride[1] + t * m.stride[2] + s * m.stride[3];
    if (!m.adds)
        return ((const unsigned char *)m.data)[at] != 0;
    bias = attention_get(m.data, a.dtype, at, (A)0);
    return bias != -row_infinity<A>();
}

/* Sum and maximum over the threads of one ty. */
template <typename A, int G> static __device__ inline A lanes_sum(A x)
{
    for (int o = G / 2; o > 0; o >>= 1)
        x += __shfl_xor_sync(KN_FULL_WARP, x, o);
    return x;
}
template <typename A, int G> static __device__ inline A lanes_max(A x)
{
    for (int o = G / 2; o > 0; o >>= 1) {
        A y = __shfl_xor_sync(KN_FULL_WARP, x, o);
        x = x != x || x > y ? x : y;
    }
    return x;
}

/* Rows first, ... of head h of batch b, zeros beyond the array's rows and columns. */
template <typename A, int ROWS, int COLUMNS>
static __device__ inline void tile_load(A *tile, const attention_array &x, kn_dtype t, int64_t b,
                                        int64_t h, int64_t first, int64_t rows, int64_t D)
{
    const int length = COLUMNS + 16 / (int)sizeof(A);
    int64_t at = b * x.stride[0] + h * x.stride[1];
#pragma unroll 4
    for (int e = (int)threadIdx.x; e < ROWS * COLUMNS; e += (int)blockDim.x) {
        int r = e / COLUMNS, d = e % COLUMNS;
        bool inside = first + r < rows && d < D;
        tile[r * length + d] =
            inside
                ? attention_get(x.data, t, at + (first + r) * x.stride[2] + d * x.stride[3], (A)0)
                : (A)0;
    }
}

/* Stores x at element d of a row. */
template <typename A>
static __device__ inline void attention_put(const attention_array &y, kn_dtype t, int64_t b,
                                            int64_t h, int64_t r, int64_t d, A x)
{
    int64_t at = b * y.stride[0] + h * y.stride[1] + r * y.stride[2] + d * y.stride[3];
    if (sizeof(A) == 8)
        ((double *)y.data)[at] = (double)x;
    else if (t == KN_F32)
        ((float *)y.data)[at] = (float)x;
    else if (t == KN_BF16)
        kn_put((kn_bf16 *)y.data + at, (float)x);
    else
        kn_put((kn_f16 *)y.data + at, (float)x);
}

/* z[i][j] = own row ty + i G times other row tx + j G. */
template <typename A, int G, int R, int C, int DT>
static __device__ inline void tile_dot(A (&z)[R][C], const A *own, const A *other, int ty, int tx)
{
    typedef attention_tile<A, G, R, C, DT> tile;
    typedef row_chunk<A> chunk;
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < C; j++)
            z[i][j] = 0;
#pragma unroll 4
    for (int d = 0; d < tile::columns; d += tile::V) {
        chunk x[R], y[C];
#pragma unroll
        for (int i = 0; i < R; i++)
            x[i] = *(const chunk *)(own + (ty + i * G) * tile::row + d);
#pragma unroll
        for (int j = 0; j < C; j++)
            y[j] = *(const chunk *)(other + (tx + j * G) * tile::row + d);
#pragma unroll
        for (int v = 0; v < tile::V; v++)
#pragma unroll
            for (int i = 0; i < R; i++)
#pragma unroll
                for (int j = 0; j < C; j++)
                    z[i][j] = kn_fma_rn(x[i].at[v], y[j].at[v], z[i][j]);
    }
}

/* sum[i][c] += sum_s weights[ty + i G][s] other[s][tx + c G]. */
template <typename A, int G, int R, int C, int DT>
static __device__ inline void tile_accumulate(A (&sum)[R][DT], const A *weights, const A *other,
                                              int ty, int tx)
{
    typedef attention_tile<A, G, R, C, DT> tile;
    typedef row_chunk<A> chunk;
#pragma unroll 2
    for (int s = 0; s < tile::other; s += tile::V) {
        chunk w[R];
#pragma unroll
        for (int i = 0; i < R; i++)
            w[i] = *(const chunk *)(weights + (ty + i * G) * tile::weights_row + s);
#pragma unroll
        for (int v = 0; v < tile::V; v++)
#pragma unroll
            for (int c = 0; c < DT; c++) {
                A y = other[(s + v) * tile::row + tx + c * G];
#pragma unroll
                for (int i = 0; i < R; i++)
                    sum[i][c] = kn_fma_rn(w[i].at[v], y, sum[i][c]);
            }
    }
}

#endif
