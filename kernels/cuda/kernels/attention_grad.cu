/* kernels/cuda/kernels/attention_grad.cu: the backward of attention; P is computed again from lse.
 *
 * With dP_s = m_s dout . v_s and delta = dout . o of each query:
 *   dz = P (dP - delta),  dq_t = scale sum_s dz k_s, dk_s = scale sum_t dz q_t, dv_s = sum_t m P
 *                         dout_t, and dmask = dz.
 * Where P of a key is above one half, dP - delta is a small difference of large numbers; so from
 * that dz the sum of the row's dz is taken, which should be 0.
 * One pass finds delta; in one, blocks own queries and go over the keys for dq and those sums; in
 * one, blocks own keys and go over the queries of their heads for dk and dv. Nothing is added by
 * two blocks, so the order of all sums is fixed. Floor: 7 products of T S D multiply-adds a head
 * (half if causal) on f32 cores. */
#include "kernels/cuda/kernels/attention.cuh"
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/lse.h"

template <typename A> struct attention_grad_call {
    attention_sizes size;
    attention_array q, k, v, o, dout, dq, dk, dv, dmask;
    const A *lse;
    /* scratch [B, H, T]: delta, the sum of dz, the key with more than half of the weight or -1 */
    A *delta, *sum, *share; /* share: what weights are multiplied by (row_share) */
    int64_t *heavy;
};

/* A thread's part of the sums of dz of its rows; its last key with more than half of a row's
 * weight, or -1, and that key's dz. */
template <typename A, int R> struct attention_rest {
    A sum[R], dz[R];
    int64_t key[R];
};

/* 1, or of a row whose lse is coarse one over the sum of its weights. Each lane takes keys; scores
 * are added up as tile_dot does. */
template <typename T, typename A>
static __device__ inline A row_share(const attention_grad_call<A> &p, int64_t b, int64_t h,
                                     int64_t t, int lane)
{
    const attention_sizes &a = p.size;
    const int64_t head = b * a.H + h, *sq = p.q.stride, *sk = p.k.stride;
    const A lse = p.lse[head * a.T + t];
    if (!kn_lse_is_coarse(lse))
        return 1;
    const T *q = (const T *)p.q.data + b * sq[0] + h * sq[1] + t * sq[2];
    const T *k = (const T *)p.k.data + b * sk[0] + h / (a.H / a.G) * sk[1];
    A sum = 0, bias;
    for (int64_t s = attention_hidden(a, t) + lane; s < attention_visible(a, t); s += 32) {
        A z = 0;
        for (int64_t d = 0; d < a.D; d++)
            z = kn_fma_rn((A)kn_get(q + d * sq[3]), (A)kn_get(k + s * sk[2] + d * sk[3]), z);
        if (attention_sees<A>(a, head, t, s, bias))
            sum += kn_exp((A)a.scale * z + bias - lse);
    }
    return 1 / kn_warp_sum(sum);
}

/* A warp a row of [B, H, T]: delta and share. */
template <typename T, typename A>
KN_KERNEL_RESIDENT(32 * ROW_WARPS, sizeof(A) == 8 ? 1 : 0, attention_delta_kernel,
                   attention_grad_call<A> p)
{
    const attention_sizes &a = p.size;
    row_group g(ROW_WARP);
    for (int64_t r = g.first; r < a.B * a.H * a.T; r += g.step) {
        int64_t t = r % a.T, h = r / a.T % a.H, b = r / a.T / a.H;
        const int64_t *so = p.o.stride, *sd = p.dout.stride;
        const T *o = (const T *)p.o.data + b * so[0] + h * so[1] + t * so[2];
        const T *dout = (const T *)p.dout.data + b * sd[0] + h * sd[1] + t * sd[2];
        A sum = 0;
        for (int64_t d = g.lane; d < a.D; d += 32)
            sum += kn_get(o + d * so[3]) * kn_get(dout + d * sd[3]);
        sum = kn_warp_sum(sum);
        A share = row_share<T>(p, b, h, t, g.lane);
        if (g.lane == 0)
            p.delta[r] = sum, p.share[r] = share;
    }
}

/* A tile of own rows against one of other rows. KEYS: own are keys from s0, other are queries from
 * t0; else the other way round, and rest takes what they add. z becomes scale dz, d (dout . v)
 * becomes m P; both 0 where nothing is seen. */
template <typename A, int G, int R, bool KEYS>
static __device__ inline void attention_dz(const attention_grad_call<A> &p, A (&z)[R][R],
                                           A (&d)[R][R], attention_rest<A, R> &rest, int64_t head,
                                           int64_t t0, int64_t s0, int ty, int tx)
{
    const attention_sizes &a = p.size;
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) {
            int64_t t = t0 + (KEYS ? tx + j * G : ty + i * G),
                    s = s0 + (KEYS ? ty + i * G : tx + j * G);
            A P = 0, factor = 0, dz = 0;
            A bias;
            if (attention_sees<A>(a, head, t, s, bias)) {
                int64_t row = head * a.T + t;
                P = kn_exp((A)a.scale * z[i][j] + bias - p.lse[row]) * p.share[row];
                factor = attention_factor<A>(a, row, s);
                dz = P * (factor * d[i][j] - p.delta[row]);
                if (KEYS && s == p.heavy[row])
                    dz -= p.sum[row];
                if (!KEYS) {
                    rest.sum[i] += dz;
                    if (P > (A)0.5)
                        rest.key[i] = s, rest.dz[i] = dz;
                }
                if (!KEYS && p.dmask.data)
                    attention_put(p.dmask, a.dtype, head / a.H, head % a.H, t, s, dz);
            }
            z[i][j] = (A)a.scale * dz;
            d[i][j] = factor * P;
        }
}

/* sum += weights x other, where every thread has its part of the weights in w. */
template <typename A, int G, int R, int DT>
static __device__ inline void weigh(A (&sum)[R][DT], const A (&w)[R][R], A *weights, const A *other,
                                    int ty, int tx)
{
    typedef attention_tile<A, G, R, R, DT> tile;
    __syncwarp(); /* the rows of one ty belong to one warp */
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++)
            weights[(ty + i * G) * tile::weights_row + tx + j * G] = w[i][j];
    __syncwarp();
    tile_accumulate<A, G, R, R, DT>(sum, weights, other, ty, tx);
}

template <typename A, int G, int R, int DT>
static __device__ inline void store_sums(const attention_sizes &a, const attention_array &y,
                                         const A (&sum)[R][DT], int64_t b, int64_t h, int64_t first,
                                         int64_t rows, int ty, int tx)
{
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int c = 0; c < DT; c++) {
            int64_t r = first + ty + i * G, d = tx + c * G;
            if (r < rows && d < a.D)
                attention_put(y, a.dtype, b, h, r, d, sum[i][c]);
        }
}

/* The four tiles of a block: two of own rows, two of the others. */
template <typename A, int G, int R, int DT> struct attention_tiles {
    typedef attention_tile<A, G, R, R, DT> tile;
    A *own[2], *other[2], *weights;
    __device__ attention_tiles(A *room)
    {
        const int each = tile::own * tile::row;
        own[0] = room, own[1] = room + each;
        other[0] = room + 2 * each, other[1] = room + 3 * each;
        weights = room + 4 * each;
    }
};

/* dk and dv: a block a tile of keys of one group. */
template <typename A, int G, int R, int DT>
KN_KERNEL_RESIDENT(G *G, sizeof(A) == 8 ? 1 : 2, attention_keys_kernel, attention_grad_call<A> p)
{
    typedef attention_tile<A, G, R, R, DT> tile;
    KN_DYNAMIC(A, room);
    attention_tiles<A, G, R, DT> m(room);
    const attention_sizes &a = p.size;
    int tx = (int)threadIdx.x % G, ty = (int)threadIdx.x / G;
    int64_t groups = a.B * a.G, b = blockIdx.x % groups / a.G, g = blockIdx.x % a.G,
            heads = a.H / a.G;
    int64_t s0 = blockIdx.x / groups * tile::own, first = a.causal ? s0 - (a.S - a.T) : 0;
    first = first < 0 ? 0 : first / tile::other * tile::other; /* no query before sees these keys */
    int64_t end = s0 + tile::own - 1 + a.window - (a.S - a.T); /* nor one from here on */
    end = a.window > 0 && end < a.T ? end : a.T;
    A z[R][R], d[R][R], dk[R][DT] = {}, dv[R][DT] = {};
    attention_rest<A, R> rest; /* unused */
    tile_load<A, tile::own, tile::columns>(m.own[0], p.k, a.dtype, b, g, s0, a.S, a.D);
    tile_load<A, tile::own, tile::columns>(m.own[1], p.v, a.dtype, b, g, s0, a.S, a.D);
    for (int64_t h = g * heads; h < (g + 1) * heads; h++)
        for (int64_t t0 = first; t0 < end; t0 += tile::other) {
            __syncthreads();
            tile_load<A, tile::other, tile::columns>(m.other[0], p.q, a.dtype, b, h, t0, a.T, a.D);
            tile_load<A, tile::other, tile::columns>(m.other[1], p.dout, a.dtype, b, h, t0, a.T,
                                                     a.D);
            __syncthreads();
            tile_dot<A, G, R, R, DT>(z, m.own[0], m.other[0], ty, tx);
            tile_dot<A, G, R, R, DT>(d, m.own[1], m.other[1], ty, tx);
            attention_dz<A, G, R, true>(p, z, d, rest, b * a.H + h, t0, s0, ty, tx);
            weigh<A, G, R, DT>(dv, d, m.weights, m.other[1], ty, tx);
            weigh<A, G, R, DT>(dk, z, m.weights, m.other[0], ty, tx);
        }
    store_sums<A, G, R, DT>(a, p.dk, dk, b, g, s0, a.S, ty, tx);
    store_sums<A, G, R, DT>(a, p.dv, dv, b, g, s0, a.S, ty, tx);
}

/* Takes the sum of each row's dz from that of its heavy key: in dq and dmask; keeps both for dk. */
template <typename A, int G, int R, int DT>
static __device__ inline void attention_take_sums(const attention_grad_call<A> &p, A (&dq)[R][DT],
                                                  const attention_rest<A, R> &rest, int64_t head,
                                                  int64_t t0, int ty, int tx)
{
    const attention_sizes &a = p.size;
    int64_t b = head / a.H, h = head % a.H, g = h / (a.H / a.G);
#pragma unroll
    for (int i = 0; i < R; i++) {
        int64_t t = t0 + ty + i * G, key = lanes_max<int64_t, G>(rest.key[i]);
        A sum = lanes_sum<A, G>(rest.sum[i]);
        if (t < a.T && tx == 0)
            p.sum[head * a.T + t] = sum, p.heavy[head * a.T + t] = key;
        if (t >= a.T || key < 0)
            continue;
        if (p.dmask.data && rest.key[i] == key)
            attention_put(p.dmask, a.dtype, b, h, t, key, rest.dz[i] - sum);
        int64_t at = b * p.k.stride[0] + g * p.k.stride[1] + key * p.k.stride[2];
#pragma unroll
        for (int c = 0; c < DT; c++) {
            int64_t d = tx + c * G;
            if (d < a.D)
                dq[i][c] -= (A)a.scale * sum *
                            attention_get(p.k.data, a.dtype, at + d * p.k.stride[3], (A)0);
        }
    }
}

/* dq: a block a tile of queries of one head. */
template <typename A, int G, int R, int DT>
KN_KERNEL_RESIDENT(G *G, sizeof(A) == 8 ? 1 : 2, attention_queries_kernel, attention_grad_call<A> p)
{
    typedef attention_tile<A, G, R, R, DT> tile;
    KN_DYNAMIC(A, room);
    attention_tiles<A, G, R, DT> m(room);
    const attention_sizes &a = p.size;
    int tx = (int)threadIdx.x % G, ty = (int)threadIdx.x / G;
    int64_t heads = a.B * a.H, head = blockIdx.x % heads, b = head / a.H, h = head % a.H;
    int64_t t0 = (a.tiles - 1 - blockIdx.x / heads) * tile::own, g = h / (a.H / a.G);
    int64_t last = t0 + tile::own < a.T ? t0 + tile::own : a.T,
            keys = attention_visible(a, last - 1);
    int64_t first = attention_hidden(a, t0) / tile::other * tile::other;
    A z[R][R], d[R][R], dq[R][DT] = {};
    attention_rest<A, R> rest;
    for (int i = 0; i < R; i++)
        rest.sum[i] = 0, rest.key[i] = -1;
    tile_load<A, tile::own, tile::columns>(m.own[0], p.q, a.dtype, b, h, t0, a.T, a.D);
    tile_load<A, tile::own, tile::columns>(m.own[1], p.dout, a.dtype, b, h, t0, a.T, a.D);
    for (int64_t s0 = first; s0 < keys; s0 += tile::other) {
        __syncthreads();
        tile_load<A, tile::other, tile::columns>(m.other[0], p.k, a.dtype, b, g, s0, a.S, a.D);
        tile_load<A, tile::other, tile::columns>(m.other[1], p.v, a.dtype, b, g, s0, a.S, a.D);
        __syncthreads();
        tile_dot<A, G, R, R, DT>(z, m.own[0], m.other[0], ty, tx);
        tile_dot<A, G, R, R, DT>(d, m.own[1], m.other[1], ty, tx);
        attention_dz<A, G, R, false>(p, z, d, rest, head, t0, s0, ty, tx);
        weigh<A, G, R, DT>(dq, z, m.weights, m.other[0], ty, tx);
    }
    attention_take_sums<A, G, R, DT>(p, dq, rest, head, t0, ty, tx);
    store_sums<A, G, R, DT>(a, p.dq, dq, b, h, t0, a.T, ty, tx);
}

/* ---- on the host ----------------------------------------------------------------------------- */

template <typename T, typename A> static kn_status attention_delta(const attention_grad_call<A> &c)
{
    int64_t rows = c.size.B * c.size.H * c.size.T;
    return KN_RUN((attention_delta_kernel<T, A>), kn_blocks(rows, ROW_WARPS, 1), 32 * ROW_WARPS, 0,
                  c);
}

template <typename A, int G, int R, int DT>
static kn_status attention_grad_run(attention_grad_call<A> c)
{
    typedef attention_tile<A, G, R, R, DT> tile;
    size_t bytes = (size_t)(4 * tile::own * tile::row + tile::own * tile::weights_row) * sizeof(A);
    attention_sizes &a = c.size;
    int64_t of_keys = (a.S + tile::own - 1) / tile::own * a.B * a.G;
    a.tiles = (a.T + tile::own - 1) / tile::own;
    int64_t of_queries = a.tiles * a.B * a.H;
    if (of_keys > INT32_MAX || of_queries > INT32_MAX)
        return KN_DECLINED;
    attention_room(attention_keys_kernel<A, G, R, DT>, bytes);
    attention_room(attention_queries_kernel<A, G, R, DT>, bytes);
    if (of_queries > 0 && KN_RUN((attention_queries_kernel<A, G, R, DT>), (unsigned)of_queries,
                                 tile::threads, bytes, c) != KN_DONE)
        return KN_FAILED;
    return of_keys > 0 ? KN_RUN((attention_keys_kernel<A, G, R, DT>), (unsigned)of_keys,
                                tile::threads, bytes, c)
                       : KN_DONE;
}

/* Makes the call's struct, with its scratch, and fills delta. */
template <typename A>
static kn_status attention_grad_prepare(const kn_attention_grad_args *p, attention_grad_call<A> *c)
{
    *c = { attention_sizes_of(&p->q, &p->k, p->scale, p->causal, p->dropout_p, p->seed, p->stream,
                              p->seed_at, &p->mask, p->window),
           attention_array_of(&p->q),
           attention_array_of(&p->k),
           attention_array_of(&p->v),
           attention_array_of(&p->o),
           attention_array_of(&p->dout),
           attention_array_of(&p->dq),
           attention_array_of(&p->dk),
           attention_array_of(&p->dv),
           attention_array_of(&p->dmask),
           (const A *)p->lse.data,
           nullptr,
           nullptr,
           nullptr,
           nullptr };
    int64_t rows = c->size.B * c->size.H * c->size.T;
    if (rows == 0)
        return KN_DONE;
    c->heavy = (int64_t *)kn_cuda_scratch((size_t)rows * (sizeof(int64_t) + 3 * sizeof(A)));
    if (!c->heavy)
        return KN_FAILED;
    c->delta = (A *)(c->heavy + rows);
    c->sum = c->delta + rows;
    c->share = c->sum + rows;
    switch (p->q.dtype) {
    case KN_F32:
        return attention_delta<float>(*c);
    case KN_BF16:
        return attention_delta<kn_bf16>(*c);
    case KN_F16:
        return attention_delta<kn_f16>(*c);
    default:
        return attention_delta<double>(*c);
    }
}

extern "C" kn_status kn_cuda_attention_grad(const void *args)
{
    const kn_attention_grad_args *p = (const kn_attention_grad_args *)args;
    kn_dtype t = p->q.dtype;
    if (!attention_takes(&p->q, &p->k, &p->v, &p->o, &p->lse) || p->dout.dtype != t ||
        p->dq.dtype != t || p->dk.dtype != t || p->dv.dtype != t)
        return KN_DECLINED;
    int64_t D = p->q.shape[3];
    if (p->q.dtype == KN_F64) {
        attention_grad_call<double> c;
        if (attention_grad_prepare(p, &c) != KN_DONE)
            return KN_FAILED;
        return D <= 64 ? attention_grad_run<double, 16, 2, 4>(c)
                       : attention_grad_run<double, 8, 1, 32>(c);
    }
    attention_grad_call<float> c;
    if (attention_grad_prepare(p, &c) != KN_DONE)
        return KN_FAILED;
    return D <= 32    ? attention_grad_run<float, 16, 2, 2>(c)
           : D <= 64  ? attention_grad_run<float, 16, 2, 4>(c)
           : D <= 128 ? attention_grad_run<float, 16, 2, 8>(c)
                      : attention_grad_run<float, 16, 1, 16>(c);
}
