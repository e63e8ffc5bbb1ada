/* kernels/cuda/kernels/attention.cu: attention forward with memory linear in T (Dao and others,
 * arXiv:2205.14135); cuDNN's comes first, this one is its reference and takes the cases that it
 * declines: f32, f64, dropout, masks, windows, odd head sizes.
 *
 * A block owns rows of q of one head and goes over the keys a tile at a time. For a row with z_s =
 * scale q . k_s + mask_s of the keys that it sees it keeps the maximum m so far, l = sum exp(z_s -
 * m) and acc = sum m_s exp(z_s - m) v_s; when the maximum grows both are multiplied by exp(old -
 * new). At the end o = acc / l, lse = m + log l.
 *
 * Floor: 4 T S D multiply-adds a head (half if causal) at the rate of ordinary f32 cores; a tile is
 * read from shared memory by 16 bytes, about one read in eight multiply-adds. */
#include "kernels/cuda/kernels/attention.cuh"
#include "kernels/cuda/kernels/cuda_internal.h"

template <typename A> struct attention_call {
    attention_sizes size;
    attention_array q, k, v, o;
    A *lse;
};

/* Rows of z become weights in shared memory; the sums so far are adapted to the new maximum. */
template <typename A, int G, int R, int C, int DT>
static __device__ inline void
attention_weights(const attention_sizes &a, A (&z)[R][C], A (&max)[R], A (&sum)[R], A (&acc)[R][DT],
                  A *weights, int64_t head, int64_t t0, int64_t s0, int ty, int tx)
{
    typedef attention_tile<A, G, R, C, DT> tile;
    const A none = -row_infinity<A>();
#pragma unroll
    for (int i = 0; i < R; i++) {
        int64_t t = t0 + ty + i * G;
        A top = max[i];
        bool sees[C];
#pragma unroll
        for (int j = 0; j < C; j++) {
            A bias;
            sees[j] = attention_sees<A>(a, head, t, s0 + tx + j * G, bias);
            z[i][j] = sees[j] ? (A)a.scale * z[i][j] + bias : none;
            top = z[i][j] > top || z[i][j] != z[i][j] ? z[i][j] : top;
        }
        top = lanes_max<A, G>(top);
        A shrink = top == max[i] ? (A)1 : kn_exp(max[i] - top);
        max[i] = top;
        sum[i] *= shrink;
#pragma unroll
        for (int c = 0; c < DT; c++)
            acc[i][c] *= shrink;
#pragma unroll
        for (int j = 0; j < C; j++) {
            int64_t s = s0 + tx + j * G;
            A p = sees[j] ? kn_exp(z[i][j] - top) : (A)0;
            sum[i] += p;
            if (a.dropout && sees[j])
                p *= attention_factor<A>(a, head * a.T + t, s);
            weights[(ty + i * G) * tile::weights_row + tx + j * G] = p;
        }
    }
}

template <typename A, int G, int R, int C, int DT>
KN_KERNEL_RESIDENT(G *G, sizeof(A) == 8 ? 1 : 2, attention_kernel, attention_call<A> p)
{
    typedef attention_tile<A, G, R, C, DT> tile;
    KN_DYNAMIC(A, room);
    A *own = room, *other = own + tile::own * tile::row, *weights = other + tile::other * tile::row;
    const attention_sizes &a = p.size;
    int tx = (int)threadIdx.x % G, ty = (int)threadIdx.x / G;
    int64_t heads = a.B * a.H, head = blockIdx.x % heads, b = head / a.H, h = head % a.H;
    int64_t t0 = (a.tiles - 1 - blockIdx.x / heads) * tile::own, group = h / (a.H / a.G);
    int64_t last = t0 + tile::own < a.T ? t0 + tile::own : a.T,
            keys = attention_visible(a, last - 1);
    A z[R][C], acc[R][DT] = {}, max[R], sum[R];
    for (int i = 0; i < R; i++)
        max[i] = -row_infinity<A>(), sum[i] = 0;
    tile_load<A, tile::own, tile::columns>(own, p.q, a.dtype, b, h, t0, a.T, a.D);
    int64_t first = attention_hidden(a, t0) / tile::other * tile::other;
    for (int64_t s0 = first; s0 < keys; s0 += tile::other) {
        __syncthreads();
        tile_load<A, tile::other, tile::columns>(other, p.k, a.dtype, b, group, s0, a.S, a.D);
        __syncthreads();
        tile_dot<A, G, R, C, DT>(z, own, other, ty, tx);
        attention_weights<A, G, R, C, DT>(a, z, max, sum, acc, weights, head, t0, s0, ty, tx);
        __syncthreads();
        tile_load<A, tile::other, tile::columns>(other, p.v, a.dtype, b, group, s0, a.S, a.D);
        __syncthreads();
        tile_accumulate<A, G, R, C, DT>(acc, weights, other, ty, tx);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        int64_t t = t0 + ty + i * G;
        A l = lanes_sum<A, G>(sum[i]);
        if (t < a.T && tx == 0)
            p.lse[head * a.T + t] = max[i] + row_log(l);
#pragma unroll
        for (int c = 0; c < DT; c++)
            if (t < a.T && tx + c * G < a.D)
                attention_put(p.o, a.dtype, b, h, t, tx + c * G, l == 0 ? (A)0 : acc[i][c] / l);
    }
}

template <typename A, int R, int C, int DT> static kn_status attention_run(attention_call<A> &c)
{
    typedef attention_tile<A, 16, R, C, DT> tile;
    size_t values = (size_t)((tile::own + tile::other) * tile::row + tile::own * tile::weights_row);
    c.size.tiles = (c.size.T + tile::own - 1) / tile::own;
    int64_t blocks = c.size.tiles * c.size.B * c.size.H;
    if (blocks == 0)
        return KN_DONE;
    if (blocks > INT32_MAX)
        return KN_DECLINED;
    attention_room(attention_kernel<A, 16, R, C, DT>, values * sizeof(A));
    return KN_RUN((attention_kernel<A, 16, R, C, DT>), (unsigned)blocks, tile::threads,
                  values * sizeof(A), c);
}

template <typename A> static attention_call<A> attention_call_make(const kn_attention_args *p)
{
    return { attention_sizes_of(&p->q, &p->k, p->scale, p->causal, p->dropout_p, p->seed, p->stream,
                                p->seed_at, &p->mask, p->window),
             attention_array_of(&p->q),
             attention_array_of(&p->k),
             attention_array_of(&p->v),
             attention_array_of(&p->o),
             (A *)p->lse.data };
}

/* Tiles by head size so that a block stays below 100 KB of shared memory, which every GPU has; f64
 * is for checks, and gets few. */
extern "C" kn_status kn_cuda_attention(const void *args)
{
    const kn_attention_args *p = (const kn_attention_args *)args;
    int64_t D = p->q.shape[3];
    if (!attention_takes(&p->q, &p->k, &p->v, &p->o, &p->lse))
        return KN_DECLINED;
    if (p->q.dtype == KN_F64) {
        attention_call<double> c = attention_call_make<double>(p);
        return D <= 64 ? attention_run<double, 4, 1, 4>(c) : attention_run<double, 1, 1, 16>(c);
    }
    attention_call<float> c = attention_call_make<float>(p);
    return D <= 32    ? attention_run<float, 4, 2, 2>(c)
           : D <= 64  ? attention_run<float, 4, 2, 4>(c)
           : D <= 128 ? attention_run<float, 4, 2, 8>(c)
                      : attention_run<float, 2, 2, 16>(c);
}
