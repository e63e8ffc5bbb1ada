/* kernels/cuda/kernels/batch_norm.cuh (private): what batch norm and its gradient fold of each
 * channel, in one pass.
 *
 * A block takes a part of the elements of one channel, or of `lanes` times V channels where
 * channels are neighbours in memory (channels-last): either way threads read 16 bytes each,
 * neighbours next to each other. A thread folds into V states; they are joined in a fixed order.
 * The parts are joined by who asked for them. How elements are given to parts and threads depends
 * on shapes and strides alone. */
#ifndef KNAP_KERNELS_CUDA_BATCH_NORM_CUH
#define KNAP_KERNELS_CUDA_BATCH_NORM_CUH

#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/elements.cuh"
#include "kernels/cuda/kernels/norm.cuh"

#define CHANNEL_THREADS 256
#define CHANNEL_BLOCKS  2048 /* as many as keep a GPU busy */

/* ---- the fold -------------------------------------------------------------------------------- */

/* N arrays of one shape; a fold's states are two numbers. */
template <typename T, int N> struct channel_call {
    typedef typename kn_compute<T>::type A;
    const T *p[N];
    kn_span<N> span;        /* of one channel's elements */
    int64_t stride[N];      /* from channel to channel */
    int64_t channels, each; /* each: units (vectors) of a part */
    bool last;              /* a vector is V channels, else V elements of one */
    int lanes;              /* of threads side by side, for channels */
    A *partial;             /* [parts][channels][2] */
};

/* Units of the given part; how many elements of a channel they are. */
static inline KN_HD int64_t channel_part(int64_t part, int64_t each, int64_t units)
{
    int64_t left = units - part * each;
    return left < 0 ? 0 : left < each ? left : each;
}

/* Fold: at(c, v) prepares for the V channels from c; add(v, x, n) folds the n-th element, x[k] of
 * array k, into state v; join(a, na, b, nb) gives the state of na + nb elements. */
template <typename T, int V, int N, typename Fold>
KN_KERNEL(CHANNEL_THREADS, channel_kernel, const channel_call<T, N> c, Fold fold)
{
    typedef typename kn_compute<T>::type A;
    typedef typename Fold::state state;
    const int TWICE = 2; /* so many vectors on their way */
    KN_SHARED state states[V][CHANNEL_THREADS];
    KN_SHARED int counts[CHANNEL_THREADS];
    int id = (int)threadIdx.x, row = id / c.lanes, rows = CHANNEL_THREADS / c.lanes;
    int64_t channel = ((int64_t)blockIdx.x * c.lanes + id % c.lanes) * (c.last ? V : 1);
    int64_t first = blockIdx.y * c.each,
            end = first + channel_part(blockIdx.y, c.each, c.span.vectors);
    int live = c.last ? V : 1, n = 0;
    if (channel >= c.channels)
        end = first;
    else
        fold.template at<V>(channel, c.last);
    state s[V] = {};
    for (int64_t i = first + row; i < end; i += TWICE * rows) {
        kn_pack<T, V> from[TWICE][N];
        for (int u = 0; u < TWICE; u++) {
            int64_t at[N];
            if (i + u * rows >= end)
                break;
            kn_span_at(c.span, i + u * rows, at);
            for (int k = 0; k < N; k++)
                from[u][k] = kn_load<V>(c.p[k] + at[k] + channel * c.stride[k], false);
        }
        for (int u = 0; u < TWICE && i + u * rows < end; u++) {
            A x[N][V];
            for (int k = 0; k < N; k++)
                kn_widen(from[u][k], x[k]);
            fold.template add<V>(s, x, ++n);
        }
    }
    if (!c.last) {
#pragma unroll
        for (int v = 1; v < V; v++)
            Fold::join(s[0], v * n, s[v], n);
        n *= V;
    }
#pragma unroll
    for (int v = 0; v < V; v++)
        states[v][id] = s[v];
    counts[id] = n;
    for (int half = rows / 2; half > 0; half /= 2) {
        int other = id + half * c.lanes;
        __syncthreads();
        if (row < half) {
            for (int v = 0; v < live; v++)
                Fold::join(states[v][id], counts[id], states[v][other], counts[other]);
            counts[id] += counts[other];
        }
    }
    for (int v = 0; v < live && row == 0 && channel < c.channels; v++) {
        A *out = c.partial + (blockIdx.y * c.channels + channel + v) * 2;
        out[0] = states[v][id].a;
        out[1] = states[v][id].b;
    }
}

/* ---- vectors of channels --------------------------------------------------------------------- */

/* Element c of a vector of any float dtype, or `absent` where there is none. */
struct channel_vector {
    void *data;
    kn_dtype dtype;
    int64_t stride;
};

static inline channel_vector channel_vector_of(const kn_array *v)
{
    return { v->data, v->dtype, v->data && v->ndim > 0 ? v->stride[0] : 1 };
}

static __device__ inline double channel_get(const channel_vector &v, int64_t c, double absent)
{
    if (!v.data)
        return absent;
    int64_t at = c * v.stride;
    switch (v.dtype) {
    case KN_F32:
        return ((const float *)v.data)[at];
    case KN_BF16:
        return kn_get((const kn_bf16 *)v.data + at);
    case KN_F16:
        return kn_get((const kn_f16 *)v.data + at);
    default:
        return ((const double *)v.data)[at];
    }
}

static __device__ inline void channel_put(const channel_vector &v, int64_t c, double x)
{
    if (v.data)
        kn_put_as(v.data, v.dtype, c * v.stride, x);
}

/* ---- on the host ----------------------------------------------------------------------------- */

/* Whether v may belong to the channels of x: any float dtype. */
static inline bool channel_takes(const kn_array *x, const kn_array *v, bool needed)
{
    return v->data ? v->ndim == 1 && v->shape[0] == x->shape[1] && kn_dtype_is_float(v->dtype)
                   : !needed;
}

/* Statistics: contiguous, as wide as sums. */
static inline bool channel_stat_takes(const kn_array *x, const kn_array *v)
{
    return channel_takes(x, v, true) && v->dtype == (x->dtype == KN_F64 ? KN_F64 : KN_F32) &&
           (v->shape[0] < 2 || v->stride[0] == 1);
}

/* Are channels neighbours in memory? */
template <int N> static bool channel_last(const kn_array *const (&a)[N])
{
    bool last = a[0]->shape[1] > 1;
    for (int k = 0; k < N; k++)
        last = last && a[k]->stride[1] == 1;
    return last;
}

/* Can V channels of each position be read at once? */
template <int N> static bool channel_whole(const kn_array *const (&a)[N], int V)
{
    bool whole = a[0]->shape[1] % V == 0;
    for (int k = 0; k < N; k++) {
        whole = whole && (uintptr_t)a[k]->data % 16 == 0;
        for (int d = 0; d < a[k]->ndim; d++)
            whole = whole && (d == 1 || a[k]->shape[d] == 1 || a[k]->stride[d] % V == 0);
    }
    return whole;
}

/* Do all channels begin at 16 bytes? */
template <int N> static bool channel_aligned(const kn_array *const (&a)[N], int V)
{
    bool aligned = true;
    for (int k = 0; k < N; k++)
        aligned = aligned && (a[k]->shape[1] == 1 || a[k]->stride[1] % V == 0);
    return aligned;
}

/* The same elements with the channels at the end where they are neighbours in memory. */
static inline kn_array channel_order(const kn_array *a, bool last)
{
    kn_array r = *a;
    if (last) {
        r = kn_without_dim(a, 1);
        r.ndim++;
        r.shape[r.ndim - 1] = a->shape[1];
        r.stride[r.ndim - 1] = a->stride[1];
    }
    return r;
}

/* A vector [C] of computed numbers, repeated over the shape of x as channel_order made it. */
static inline kn_array channel_spread(const kn_array *x, bool last, void *vector)
{
    kn_array r = *x;
    r.data = vector;
    r.dtype = x->dtype == KN_F64 ? KN_F64 : KN_F32;
    for (int d = 0; d < r.ndim; d++)
        r.stride[d] = d == (last ? r.ndim - 1 : 1);
    return r;
}

/* Plans the fold of arrays; all but partial is filled. V: elements read at once (the result).
 * parts: into how many the elements of a channel are dealt. */
template <typename T, int N>
static int channel_plan(channel_call<T, N> &c, const kn_array *const (&a)[N], int64_t *parts)
{
    const int most = 16 / (int)sizeof(T);
    kn_array rest[N];
    const kn_array *p[N];
    for (int k = 0; k < N; k++) {
        rest[k] = kn_without_dim(a[k], 1);
        p[k] = &rest[k];
        c.p[k] = (const T *)a[k]->data;
        c.stride[k] = a[k]->stride[1];
    }
    const kn_array *const(&q)[N] = (const kn_array *const(&)[N])p;
    c.channels = a[0]->shape[1];
    c.last = channel_last(a);
    int V = c.last && channel_whole(a, most) ? most : 1;
    if (c.last)
        kn_span_make(c.span, q, 1, true);
    else
        V = channel_aligned(a, most) ? kn_span_make(c.span, q, most, true)
                                     : kn_span_make(c.span, q, 1, true);
    int64_t groups = c.last ? (c.channels + V - 1) / V : c.channels;
    c.lanes = 1;
    while (c.last && c.lanes < 32 && c.lanes < groups)
        c.lanes *= 2;
    int64_t blocks = (groups + c.lanes - 1) / c.lanes, rows = CHANNEL_THREADS / c.lanes;
    int64_t some = (c.span.vectors + 8 * rows - 1) / (8 * rows),
            n = CHANNEL_BLOCKS / (blocks > 0 ? blocks : 1);
    n = n < some ? n : some;
    n = n < 1 ? 1 : n;
    c.each = (c.span.vectors + n - 1) / n;
    *parts = c.each > 0 ? (c.span.vectors + c.each - 1) / c.each : 1;
    return V;
}

template <typename T, int N, typename Fold>
static kn_status channel_run(const channel_call<T, N> &c, int V, int64_t parts, const Fold &fold)
{
    const int most = 16 / (int)sizeof(T);
    int64_t groups = c.last ? (c.channels + V - 1) / V : c.channels;
    dim3 grid((unsigned)((groups + c.lanes - 1) / c.lanes), (unsigned)parts);
    if (V > 1)
        return KN_RUN((channel_kernel<T, most, N, Fold>), grid, CHANNEL_THREADS, 0, c, fold);
    return KN_RUN((channel_kernel<T, 1, N, Fold>), grid, CHANNEL_THREADS, 0, c, fold);
}

#endif
