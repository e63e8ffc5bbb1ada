/* kernels/cuda/kernels/batch_norm_grad.cu: the backward of batch norm, for what cuDNN doesn't take.
 * With h = (x - mean) rstd: dw = sum dy h, db = sum dy, dx = w rstd (dy - (db + h dw) / M).
 *
 * Floor: dy and x read twice, dx written once; a masked gradient (relu, dadd) is written by a pass
 * of its own. The sums of a channel are folded as in
 * batch_norm.cuh; its parts are added in f64. Without training dx = w rstd dy, and the sums are
 * made only where they are wanted; so are they where the means of a whole batch are given. */
#include "kernels/cuda/kernels/batch_norm.cuh"

/* sum dy h, sum dy */
template <typename A> struct grad_sums {
    struct state {
        A a, b;
    };
    const A *mean, *rstd;
    const A *m, *r; /* of these channels */
    bool last;
    template <int V> __device__ void at(int64_t c, bool of_channels)
    {
        m = mean + c, r = rstd + c, last = of_channels;
    }
    template <int V> __device__ void add(state (&s)[V], const A (&x)[2][V], int) const
    {
#pragma unroll
        for (int v = 0; v < V; v++) {
            int k = last ? v : 0;
            s[v].a = kn_fma_rn(x[0][v], (x[1][v] - m[k]) * r[k], s[v].a);
            s[v].b += x[0][v];
        }
    }
    static __device__ void join(state &s, int, const state &t, int)
    {
        s.a += t.a;
        s.b += t.b;
    }
};

/* What belongs to channels. coefficients: [4][C], mean, w rstd, db / M and rstd dw / M. */
template <typename A> struct batch_norm_total {
    channel_vector w, dw, db, mean_dw, mean_db; /* the means of a whole batch, where given */
    const A *mean, *rstd, *partial;
    A *coefficients;
    int64_t channels, parts;
    double M;
};

/* A warp a channel. */
template <typename A> KN_KERNEL(CHANNEL_THREADS, batch_norm_total_kernel, batch_norm_total<A> f)
{
    int lane = (int)threadIdx.x % 32;
    int64_t c = (int64_t)blockIdx.x * (CHANNEL_THREADS / 32) + threadIdx.x / 32;
    double dw = 0, db = 0;
    if (c >= f.channels)
        return;
    for (int64_t p = lane; p < f.parts; p += 32) {
        dw += (double)f.partial[(p * f.channels + c) * 2];
        db += (double)f.partial[(p * f.channels + c) * 2 + 1];
    }
    dw = kn_warp_sum(dw);
    db = kn_warp_sum(db);
    if (lane > 0)
        return;
    channel_put(f.dw, c, dw);
    channel_put(f.db, c, db);
    f.coefficients[c] = f.mean[c];
    f.coefficients[f.channels + c] = (A)((double)f.rstd[c] * channel_get(f.w, c, 1));
    double M = f.M;
    if (f.mean_dw.data) {
        dw = channel_get(f.mean_dw, c, 0);
        db = channel_get(f.mean_db, c, 0);
        M = 1;
    }
    f.coefficients[2 * f.channels + c] = M > 0 ? (A)(db / M) : (A)0;
    f.coefficients[3 * f.channels + c] = M > 0 ? (A)((double)f.rstd[c] * dw / M) : (A)0;
}

/* dx = scale (dy - less - (x - mean) slope), or scale dy */
template <typename T> struct batch_norm_grad_op {
    typedef typename kn_compute<T>::type A;
    T *dx;
    const T *dy, *x;
    const A *mean, *scale, *less, *slope;
    bool last; /* a vector is of V channels, else of one */
    bool training;

    template <int V> struct in {
        kn_pack<T, V> dy, x;
    };
    template <int V> __device__ void load(const int64_t (&at)[7], const bool *, in<V> &i) const
    {
        i.dy = kn_load<V>(dy + at[1], false);
        if (training)
            i.x = kn_load<V>(x + at[2], false);
    }
    /* The numbers of channels are near, and aren't held while dy and x are on their way. */
    template <int V> __device__ void finish(const int64_t (&at)[7], const in<V> &i, int64_t) const
    {
        A r[V];
        kn_widen(i.dy, r);
        if (training) {
            kn_pack<A, V> m = kn_load<V>(mean + at[3], !last), l = kn_load<V>(less + at[5], !last),
                          k = kn_load<V>(slope + at[6], !last);
            A h[V];
            kn_widen(i.x, h);
#pragma unroll
            for (int v = 0; v < V; v++)
                r[v] -= kn_fma_rn(h[v] - m.x[v], k.x[v], l.x[v]);
        }
        kn_pack<A, V> by = kn_load<V>(scale + at[4], !last);
#pragma unroll
        for (int v = 0; v < V; v++)
            r[v] *= by.x[v];
        kn_save_wide<V>(dx + at[0], r);
    }
};

template <typename T>
static kn_status batch_norm_grad_apply(const kn_batch_norm_grad_args *a,
                                       typename kn_compute<T>::type *k)
{
    const kn_array *const images[3] = { &a->dx, &a->dy, &a->x };
    bool last = channel_last(images);
    int64_t C = a->x.shape[1];
    kn_array dx = channel_order(&a->dx, last), dy = channel_order(&a->dy, last),
             x = channel_order(&a->x, last), v[4];
    for (int i = 0; i < 4; i++)
        v[i] = channel_spread(&x, last, k + i * C);
    const kn_array *const all[7] = { &dx, &dy, &x, &v[0], &v[1], &v[2], &v[3] };
    batch_norm_grad_op<T> op = { (T *)dx.data, (const T *)dy.data, (const T *)x.data, k,
                                 k + C,        k + 2 * C,          k + 3 * C,         last,
                                 a->training };
    return kn_each<16 / (int)sizeof(T)>(all, op, op);
}

/* dadd = dy, or 0 where relu gave 0: where y is 0 or less, or without it what batch_norm_op
 * computed of x, to the bit. */
template <typename T> struct batch_norm_mask_op {
    typedef typename kn_compute<T>::type A;
    T *dadd;
    const T *dy, *seen; /* seen: y or x */
    const A *mean, *rstd;
    channel_vector w, b;
    bool last; /* a vector is of V channels, else of one */
    bool relu, from_x;

    template <int V> struct in {
        kn_pack<T, V> dy, seen;
    };
    template <int V> __device__ void load(const int64_t (&at)[4], const bool *, in<V> &i) const
    {
        i.dy = kn_load<V>(dy + at[1], false);
        i.seen = kn_load<V>(seen + at[2], false);
    }
    template <int V> __device__ void finish(const int64_t (&at)[4], const in<V> &i, int64_t) const
    {
        A r[V], y[V];
        kn_widen(i.dy, r);
        kn_widen(i.seen, y);
#pragma unroll
        for (int v = 0; v < V; v++) {
            int64_t c = at[3] + (last ? v : 0);
            if (relu && from_x)
                y[v] = kn_fma_rn(y[v] - mean[c], kn_mul_rn(rstd[c], (A)channel_get(w, c, 1)),
                                 (A)channel_get(b, c, 0));
            r[v] = relu && y[v] <= 0 ? 0 : r[v]; /* NaN passes */
        }
        kn_save_wide<V>(dadd + at[0], r);
    }
};

template <typename T>
static kn_status batch_norm_mask(const kn_batch_norm_grad_args *a, const kn_array *masked)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *y = a->y.data ? &a->y : &a->x;
    const kn_array *const images[3] = { masked, &a->dy, y };
    bool last = channel_last(images);
    kn_array to = channel_order(masked, last), dy = channel_order(&a->dy, last),
             seen = channel_order(y, last), c = channel_spread(&seen, last, a->mean.data);
    const kn_array *const all[4] = { &to, &dy, &seen, &c };
    batch_norm_mask_op<T> op = { (T *)to.data,
                                 (const T *)dy.data,
                                 (const T *)seen.data,
                                 (const A *)a->mean.data,
                                 (const A *)a->rstd.data,
                                 channel_vector_of(&a->w),
                                 channel_vector_of(&a->b),
                                 last,
                                 a->relu,
                                 !a->y.data };
    return kn_each<16 / (int)sizeof(T)>(all, op, op);
}

/* An array like x, packed, that has no memory yet; channels-last where x is. */
static kn_array batch_norm_like(const kn_array *x)
{
    const kn_array *const one[1] = { x };
    kn_array r = kn_array_make(NULL, x->dtype, x->ndim, x->shape);
    int64_t step = x->shape[1];
    if (channel_last(one)) {
        r.stride[1] = 1;
        for (int d = x->ndim - 1; d >= 2; d--) {
            r.stride[d] = step;
            step *= x->shape[d];
        }
        r.stride[0] = step;
    }
    return r;
}

template <typename T>
static kn_status batch_norm_total_run(const kn_batch_norm_grad_args *a,
                                      const typename kn_compute<T>::type *partial, int64_t parts,
                                      typename kn_compute<T>::type *coefficients)
{
    typedef typename kn_compute<T>::type A;
    const int64_t C = a->x.shape[1];
    const int warps = CHANNEL_THREADS / 32;
    batch_norm_total<A> f = { channel_vector_of(&a->w),
                              channel_vector_of(&a->dw),
                              channel_vector_of(&a->db),
                              channel_vector_of(&a->mean_dw),
                              channel_vector_of(&a->mean_db),
                              (const A *)a->mean.data,
                              (const A *)a->rstd.data,
                              partial,
                              coefficients,
                              C,
                              parts,
                              (double)(kn_array_numel(&a->x) / C) };
    return KN_RUN(batch_norm_total_kernel<A>, (unsigned)((C + warps - 1) / warps), CHANNEL_THREADS,
                  0, f);
}

/* a: its dy is the gradient to sum, or has no memory: then from's dy is masked into scratch. That
 * is taken once, for [the masked gradient | parts of the sums | coefficients]. */
template <typename T>
static kn_status batch_norm_grad_run(kn_batch_norm_grad_args *a,
                                     const kn_batch_norm_grad_args *from)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *const arrays[2] = { &a->dy, &a->x };
    channel_call<T, 2> c = {};
    int64_t parts = 0, C = a->x.shape[1];
    bool sums = a->dw.data || a->db.data || (a->training && a->dx.data && !a->mean_dw.data);
    int V = channel_plan(c, arrays, &parts); /* scratch is aligned as NULL is */
    parts = sums ? parts : 0;
    size_t room = ((size_t)(parts * C * 2) + 3) / 4 * 4,
           masked = a->dy.data ? 0 : (size_t)kn_array_numel(&a->dy) * sizeof(T);
    masked = (masked + 255) / 256 * 256;
    char *scratch = (char *)kn_cuda_scratch(masked + (room + 4 * (size_t)C) * sizeof(A));
    if (!scratch)
        return KN_FAILED;
    if (masked > 0) {
        a->dy.data = scratch;
        c.p[0] = (const T *)a->dy.data;
        if (batch_norm_mask<T>(from, &a->dy) != KN_DONE)
            return KN_FAILED;
    }
    c.partial = (A *)(void *)(scratch + masked);
    grad_sums<A> fold = { (const A *)a->mean.data, (const A *)a->rstd.data, nullptr, nullptr,
                          false };
    if ((sums && channel_run(c, V, parts, fold) != KN_DONE) ||
        batch_norm_total_run<T>(a, c.partial, parts, c.partial + room) != KN_DONE)
        return KN_FAILED;
    return a->dx.data ? batch_norm_grad_apply<T>(a, c.partial + room) : KN_DONE;
}

/* The masked gradient first, where there is one; then as without. */
template <typename T> static kn_status batch_norm_grad_whole(const kn_batch_norm_grad_args *a)
{
    kn_batch_norm_grad_args rest = *a;
    if (kn_array_numel(&a->x) > 0 && a->dadd.data) {
        rest.dy = a->dadd;
        if (batch_norm_mask<T>(a, &rest.dy) != KN_DONE)
            return KN_FAILED;
    } else if (kn_array_numel(&a->x) > 0 && a->relu) {
        rest.dy = batch_norm_like(&a->x);
    }
    const bool more = a->dx.data || a->dw.data || a->db.data;
    return more && a->x.shape[1] > 0 ? batch_norm_grad_run<T>(&rest, a) : KN_DONE;
}

extern "C" kn_status kn_cuda_batch_norm_grad(const void *args)
{
    const kn_batch_norm_grad_args *a = (const kn_batch_norm_grad_args *)args;
    kn_dtype t = a->x.dtype;
    if (a->dy.dtype != t || (a->dx.data && a->dx.dtype != t) || (a->y.data && a->y.dtype != t) ||
        (a->dadd.data && a->dadd.dtype != t) || !channel_stat_takes(&a->x, &a->mean) ||
        !channel_stat_takes(&a->x, &a->rstd))
        return KN_DECLINED;
    KN_FLOATS(t, batch_norm_grad_whole, a);
}
