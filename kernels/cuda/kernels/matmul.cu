/* kernels/cuda/kernels/matmul.cu: products of matrices of any strides, batches, dtypes; cuBLASLt
 * comes first, this takes the cases that it declines.
 *
 * A block makes a tile of TILE x TILE outputs, each thread EACH x EACH of them in registers; slices
 * of DEEP columns of a and rows of b pass through shared memory as f32 (f64). Every output is one
 * sum over ascending k, so no bits depend on the grid. The floor of f32 on ordinary cores is 2 M N
 * K over their rate; a slice costs 2 * EACH loads from shared memory for EACH^2 multiply-adds. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/cuda.cuh"

#define TILE 64
#define DEEP 16
#define EACH 4

template <typename T> struct matmul_call {
    void *dst; /* T, or f32 */
    const T *a, *b;
    const void *bias; /* T, or f32; NULL: none */
    bool dst_f32, bias_f32, add;
    kn_walk<3> batch;
    int64_t M, N, K, tiles; /* tiles: in a row of tiles */
    int64_t dm, dn, am, ak, bk, bn, bias_stride;
};

/* tile[k][i] = p[(first + i) * si + (k0 + k) * sk], 0 outside [rows, K]: neighbours in memory are
 * read by neighbouring threads. */
template <typename T, typename A>
static __device__ inline void matmul_slice(A (*tile)[TILE + 1], const T *p, int64_t first,
                                           int64_t rows, int64_t si, int64_t k0, int64_t K,
                                           int64_t sk)
{
    bool along_k = sk == 1 && si != 1;
    for (int e = (int)threadIdx.x; e < TILE * DEEP; e += (int)blockDim.x) {
        int k = along_k ? e % DEEP : e / TILE, i = along_k ? e / DEEP : e % TILE;
        bool inside = first + i < rows && k0 + k < K;
        tile[k][i] = inside ? (A)kn_get(p + (first + i) * si + (k0 + k) * sk) : (A)0;
    }
}

template <typename T>
static __device__ inline void matmul_put(const matmul_call<T> &c, int64_t at,
                                         typename kn_compute<T>::type x)
{
    typedef typename kn_compute<T>::type A;
    if (c.dst_f32) {
        float *to = (float *)c.dst + at;
        *to = (float)(c.add ? (A)*to + x : x);
    } else {
        T *to = (T *)c.dst + at;
        kn_put(to, c.add ? kn_get(to) + x : x);
    }
}

template <typename T>
static __device__ inline typename kn_compute<T>::type matmul_bias(const matmul_call<T> &c,
                                                                  int64_t n)
{
    typedef typename kn_compute<T>::type A;
    if (!c.bias)
        return 0;
    return c.bias_f32 ? (A)((const float *)c.bias)[n * c.bias_stride]
                      : kn_get((const T *)c.bias + n * c.bias_stride);
}

template <typename T>
KN_KERNEL_RESIDENT((TILE / EACH) * (TILE / EACH), sizeof(T) == 8 ? 1 : 3, matmul_kernel,
                   matmul_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    KN_SHARED A left[DEEP][TILE + 1], right[DEEP][TILE + 1];
    int tx = (int)threadIdx.x % (TILE / EACH), ty = (int)threadIdx.x / (TILE / EACH);
    int64_t m0 = blockIdx.x / c.tiles * TILE, n0 = blockIdx.x % c.tiles * TILE;
    for (int64_t z = blockIdx.z; z < c.batch.count; z += gridDim.z) {
        int64_t at[3];
        kn_walk_at(c.batch, z, at);
        A sum[EACH][EACH] = {};
        for (int64_t k0 = 0; k0 < c.K; k0 += DEEP) {
            matmul_slice(left, c.a + at[1], m0, c.M, c.am, k0, c.K, c.ak);
            matmul_slice(right, c.b + at[2], n0, c.N, c.bn, k0, c.K, c.bk);
            __syncthreads();
#pragma unroll
            for (int k = 0; k < DEEP; k++) {
                A x[EACH], y[EACH];
#pragma unroll
                for (int i = 0; i < EACH; i++)
                    x[i] = left[k][ty + i * (TILE / EACH)];
#pragma unroll
                for (int j = 0; j < EACH; j++)
                    y[j] = right[k][tx + j * (TILE / EACH)];
#pragma unroll
                for (int i = 0; i < EACH; i++)
#pragma unroll
                    for (int j = 0; j < EACH; j++)
                        sum[i][j] = kn_fma_rn(x[i], y[j], sum[i][j]);
            }
            __syncthreads();
        }
#pragma unroll
        for (int i = 0; i < EACH; i++)
#pragma unroll
            for (int j = 0; j < EACH; j++) {
                int64_t m = m0 + ty + i * (TILE / EACH), n = n0 + tx + j * (TILE / EACH);
                if (m < c.M && n < c.N)
                    matmul_put(c, at[0] + m * c.dm + n * c.dn, sum[i][j] + matmul_bias(c, n));
            }
    }
}

template <typename T> static kn_status matmul_run(const kn_matmul_args *p)
{
    const kn_array *dst = &p->dst, *a = &p->a, *b = &p->b, *bias = &p->bias;
    int row = dst->ndim - 2, col = dst->ndim - 1;
    kn_array lead[3] = { *dst, *a, *b };
    for (int k = 0; k < 3; k++)
        lead[k].ndim = row;
    const kn_array *const arrays[3] = { &lead[0], &lead[1], &lead[2] };
    matmul_call<T> c = {};
    c.dst = dst->data;
    c.a = (const T *)a->data;
    c.b = (const T *)b->data;
    c.bias = bias->data;
    c.dst_f32 = dst->dtype == KN_F32;
    c.bias_f32 = bias->dtype == KN_F32;
    c.add = p->add;
    c.batch = kn_walk_make(arrays);
    c.M = dst->shape[row], c.N = dst->shape[col], c.K = a->shape[col];
    c.dm = dst->stride[row], c.dn = dst->stride[col];
    c.am = a->stride[row], c.ak = a->stride[col];
    c.bk = b->stride[row], c.bn = b->stride[col];
    c.bias_stride = bias->data ? bias->stride[0] : 0;
    if (c.M == 0 || c.N == 0 || c.batch.count == 0)
        return KN_DONE;
    c.tiles = (c.N + TILE - 1) / TILE;
    int64_t tiles = (c.M + TILE - 1) / TILE * c.tiles;
    int64_t batches = c.batch.count < 65535 ? c.batch.count : 65535;
    if (tiles > INT32_MAX)
        return KN_DECLINED; /* more than 2^43 outputs */
    return KN_RUN(matmul_kernel<T>, dim3((unsigned)tiles, 1, (unsigned)batches),
                  (TILE / EACH) * (TILE / EACH), 0, c);
}

extern "C" kn_status kn_cuda_matmul(const void *args)
{
    const kn_matmul_args *p = (const kn_matmul_args *)args;
    const kn_dtype t = p->a.dtype, to = p->dst.dtype, bias = p->bias.dtype;
    if (p->b.dtype != t || (to != t && (to != KN_F32 || t == KN_F64)) ||
        (p->bias.data && bias != t && bias != KN_F32))
        return KN_DECLINED;
    KN_FLOATS(t, matmul_run, p);
}
