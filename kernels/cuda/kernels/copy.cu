/* kernels/cuda/kernels/copy.cu: dst = src between any strides and arithmetic dtypes.
 *
 * Four ways: moves (one dtype, any), conversions between f32, bf16 and f16 (8 elements a thread),
 * either of them through a tile of shared memory where the contiguous dims of dst and src differ (a
 * transpose would touch a sector an element otherwise), and everything else as the reference does
 * it, through a double or an i64. Floor: both arrays' bytes once. */
#include "kernels/cuda/kernels/elements.cuh"

namespace
{
template <typename T> struct move_op : kn_of_one<T> {
    T *dst;

    template <int V>
    __device__ void finish(const int64_t (&at)[2], const kn_pack<T, V> &x, int64_t) const
    {
        kn_save<V>(dst + at[0], x);
    }
};

template <typename To, typename From> struct convert_op : kn_of_one<From> {
    To *dst;

    template <int V>
    __device__ void finish(const int64_t (&at)[2], const kn_pack<From, V> &x, int64_t) const
    {
        kn_pack<To, V> y;
#pragma unroll
        for (int v = 0; v < V; v++)
            kn_write(y.x[v], kn_read(x.x[v]));
        kn_save<V>(dst + at[0], y);
    }
};

/* ---- any dtypes ------------------------------------------------------------------------------ */

static __device__ bool is_int(kn_dtype t)
{
    return t == KN_I64 || t == KN_I32 || t == KN_U8 || t == KN_BOOL;
}

static __device__ int64_t get_int(const void *p, kn_dtype t, int64_t at)
{
    switch (t) {
    case KN_I64:
        return ((const int64_t *)p)[at];
    case KN_I32:
        return ((const int32_t *)p)[at];
    case KN_U8:
        return ((const uint8_t *)p)[at];
    default:
        return kn_read(((const kn_bool *)p)[at]);
    }
}

static __device__ void set_int(void *p, kn_dtype t, int64_t at, int64_t x)
{
    switch (t) {
    case KN_I64:
        return kn_write(((int64_t *)p)[at], x);
    case KN_I32:
        return kn_write(((int32_t *)p)[at], x);
    case KN_U8:
        return kn_write(((uint8_t *)p)[at], x);
    default:
        return kn_write(((kn_bool *)p)[at], x);
    }
}

static __device__ double get_double(const void *p, kn_dtype t, int64_t at, bool to_f64)
{
    switch (t) {
    case KN_F32:
        return ((const float *)p)[at];
    case KN_BF16:
        return kn_read(((const kn_bf16 *)p)[at]);
    case KN_F16:
        return kn_read(((const kn_f16 *)p)[at]);
    case KN_F64:
        return ((const double *)p)[at];
    case KN_I64:
        return to_f64 ? (double)get_int(p, t, at) : kn_i64_to_f64_sticky(get_int(p, t, at));
    default:
        return (double)get_int(p, t, at);
    }
}

struct any_op {
    void *dst;
    const void *src;
    kn_dtype to, from;

    template <int V> struct in {
        int64_t from;
    };

    template <int V> __device__ void load(const int64_t (&at)[2], const bool *, in<V> &x) const
    {
        x.from = at[1];
    }
    template <int V> __device__ void finish(const int64_t (&at)[2], const in<V> &x, int64_t) const
    {
        if (is_int(from) && is_int(to))
            set_int(dst, to, at[0], get_int(src, from, x.from));
        else
            kn_store_as(dst, to, at[0], get_double(src, from, x.from, to == KN_F64));
    }
};

/* ---- transposes ------------------------------------------------------------------------------ */

enum { TILE = 32, ROWS = 8 };

/* dst has stride 1 in dim p (n elements), src in dim q (m elements); `rest` walks the other
 * dims. */
struct transpose {
    int64_t n, m, dst_q, src_p; /* strides of the other side */
    int64_t tiles_p, tiles_q, tiles;
    kn_span<2> rest;
};

template <typename To, typename From> static __device__ To converted(From x)
{
    To y;
    kn_write(y, kn_read(x));
    return y;
}
template <> __device__ uint8_t converted<uint8_t, uint8_t>(uint8_t x)
{
    return x;
}
template <> __device__ uint16_t converted<uint16_t, uint16_t>(uint16_t x)
{
    return x;
}
template <> __device__ uint32_t converted<uint32_t, uint32_t>(uint32_t x)
{
    return x;
}
template <> __device__ uint64_t converted<uint64_t, uint64_t>(uint64_t x)
{
    return x;
}

/* A block of 32 x 8 threads moves tiles of 32 x 32: rows of src in, rows of dst out. */
template <typename To, typename From>
KN_KERNEL(TILE * ROWS, transpose_kernel, To *dst, const From *src, const transpose t)
{
    KN_SHARED To tile[TILE][TILE + 1];
    for (int64_t i = blockIdx.x; i < t.tiles; i += gridDim.x) {
        int64_t batch = i / (t.tiles_p * t.tiles_q), j = i - batch * t.tiles_p * t.tiles_q;
        int64_t p0 = j / t.tiles_q * TILE, q0 = j % t.tiles_q * TILE, at[2];
        kn_span_at(t.rest, batch, at);
        for (int r = threadIdx.y; r < TILE; r += ROWS) {
            int64_t p = p0 + r, q = q0 + threadIdx.x;
            if (p < t.n && q < t.m)
                tile[r][threadIdx.x] = converted<To, From>(src[at[1] + p * t.src_p + q]);
        }
        __syncthreads();
        for (int r = threadIdx.y; r < TILE; r += ROWS) {
            int64_t p = p0 + threadIdx.x, q = q0 + r;
            if (p < t.n && q < t.m)
                dst[at[0] + q * t.dst_q + p] = tile[threadIdx.x][r];
        }
        __syncthreads();
    }
}

/* Whether the copy is a transpose worth a tile; fills t. */
bool transpose_make(transpose &t, const kn_copy_args *a)
{
    const kn_array *const arrays[] = { &a->dst, &a->src };
    kn_walk<2> w = kn_walk_make(arrays);
    int p = -1, q = -1;
    for (int d = 0; d < w.ndim; d++) {
        p = w.stride[0][d] == 1 && w.shape[d] >= 8 ? d : p;
        q = w.stride[1][d] == 1 && w.shape[d] >= 8 ? d : q;
    }
    if (p < 0 || q < 0 || p == q || w.count == 0)
        return false;
    t.n = w.shape[p];
    t.m = w.shape[q];
    t.dst_q = w.stride[0][q];
    t.src_p = w.stride[1][p];
    kn_array rest[2] = {};
    for (int d = 0; d < w.ndim; d++) {
        for (int k = 0; k < 2 && d != p && d != q; k++) {
            rest[k].shape[rest[k].ndim] = w.shape[d];
            rest[k].stride[rest[k].ndim++] = w.stride[k][d];
        }
    }
    const kn_array *const others[] = { &rest[0], &rest[1] };
    kn_span_make(t.rest, others, 1, true);
    t.tiles_p = (t.n + TILE - 1) / TILE;
    t.tiles_q = (t.m + TILE - 1) / TILE;
    t.tiles = t.tiles_p * t.tiles_q * t.rest.count;
    return true;
}

template <typename To, typename From> kn_status run_transpose(const kn_copy_args *a, const transpose &t)
{
    return KN_RUN((transpose_kernel<To, From>), kn_blocks(t.tiles, 1, 1), dim3(TILE, ROWS), 0,
                  (To *)a->dst.data, (const From *)a->src.data, t);
}

template <typename T> kn_status move(const kn_copy_args *a)
{
    const kn_array *const arrays[] = { &a->dst, &a->src };
    transpose t;
    if (transpose_make(t, a))
        return run_transpose<T, T>(a, t);
    const move_op<T> op = { { (T *)a->src.data }, (T *)a->dst.data };
    return kn_each<16 / sizeof(T)>(arrays, op, op);
}

template <typename To, typename From> kn_status convert(const kn_copy_args *a)
{
    const kn_array *const arrays[] = { &a->dst, &a->src };
    transpose t;
    if (transpose_make(t, a))
        return run_transpose<To, From>(a, t);
    const convert_op<To, From> op = { { (From *)a->src.data }, (To *)a->dst.data };
    return kn_each<8>(arrays, op, op);
}
} // namespace

extern "C" kn_status kn_cuda_copy(const void *args)
{
    const kn_copy_args *a = (const kn_copy_args *)args;
    kn_dtype to = a->dst.dtype, from = a->src.dtype;
    const kn_array *const arrays[] = { &a->dst, &a->src };
    if (to == from)
        KN_SIZES(to, move, a);
    if (to == KN_BF16 && from == KN_F32)
        return convert<kn_bf16, float>(a);
    if (to == KN_F32 && from == KN_BF16)
        return convert<float, kn_bf16>(a);
    if (to == KN_F16 && from == KN_F32)
        return convert<kn_f16, float>(a);
    if (to == KN_F32 && from == KN_F16)
        return convert<float, kn_f16>(a);
    return kn_each(arrays, any_op{ a->dst.data, a->src.data, to, from });
}
