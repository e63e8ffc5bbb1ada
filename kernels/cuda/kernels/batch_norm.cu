/* kernels/cuda/kernels/batch_norm.cu: batch normalisation (Ioffe and Szegedy, arXiv:1502.03167),
 * for cases that cuDNN doesn't take; the backward is in batch_norm_grad.cu.
 *
 * Floor: x read twice, what is added once, y written once. Mean and variance come from one pass,
 * by Welford's recurrence (1962) in each thread, joined as Chan, Golub and LeVeque (1979) do; the
 * parts of a channel are joined in f64. */
#include "kernels/cuda/kernels/batch_norm.cuh"

/* mean, and the sum of squares around it. */
template <typename A> struct moments {
    struct state {
        A a, b;
    };
    template <int V> __device__ void at(int64_t, bool)
    {
    }
    template <int V> __device__ void add(state (&s)[V], const A (&x)[1][V], int n) const
    {
        A share = 1 / (A)n;
#pragma unroll
        for (int v = 0; v < V; v++) {
            A d = x[0][v] - s[v].a;
            s[v].a = kn_fma_rn(d, share, s[v].a);
            s[v].b = kn_fma_rn(d, x[0][v] - s[v].a, s[v].b);
        }
    }
    static __device__ void join(state &s, int n, const state &t, int m)
    {
        if (m == 0)
            return;
        A d = t.a - s.a, share = (A)m / (A)(n + m);
        s.a = n == 0 ? t.a : kn_fma_rn(d, share, s.a);
        s.b += t.b + d * d * share * (A)n;
    }
};

/* What belongs to channels. coefficients: [3][C], mean, rstd w and b. */
template <typename A> struct batch_norm_finish {
    channel_vector w, b, running_mean, running_var;
    A *mean, *rstd, *coefficients;
    const A *partial;
    int64_t channels, parts, each, units, unit; /* unit: elements of a channel in one of units */
    double eps, momentum;
    bool training;
};

/* A warp a channel. */
template <typename A> KN_KERNEL(CHANNEL_THREADS, batch_norm_finish_kernel, batch_norm_finish<A> f)
{
    int lane = (int)threadIdx.x % 32;
    int64_t c = (int64_t)blockIdx.x * (CHANNEL_THREADS / 32) + threadIdx.x / 32;
    double M = (double)(f.units * f.unit), mean, var = 0;
    if (c >= f.channels)
        return;
    if (f.training) {
        const A *partial = f.partial + c * 2;
        double sum = 0;
        for (int64_t p = lane; p < f.parts; p += 32)
            sum += (double)(channel_part(p, f.each, f.units) * f.unit) *
                   (double)partial[p * f.channels * 2];
        mean = M > 0 ? kn_warp_sum(sum) / M : 0;
        for (int64_t p = lane; p < f.parts; p += 32) {
            double d = (double)partial[p * f.channels * 2] - mean;
            var += (double)partial[p * f.channels * 2 + 1] +
                   d * d * (double)(channel_part(p, f.each, f.units) * f.unit);
        }
        var = M > 0 ? kn_warp_sum(var) / M : 0;
    } else {
        mean = channel_get(f.running_mean, c, 0);
        var = channel_get(f.running_var, c, 1);
    }
    if (lane > 0)
        return;
    double rstd = 1 / sqrt(var + f.eps);
    f.mean[c] = (A)mean;
    f.rstd[c] = (A)rstd;
    f.coefficients[c] = (A)mean;
    /* from rstd as stored, so that the backward can make the same scale, and relu's mask with it */
    f.coefficients[f.channels + c] = kn_mul_rn((A)rstd, (A)channel_get(f.w, c, 1));
    f.coefficients[2 * f.channels + c] = (A)channel_get(f.b, c, 0);
    if (f.training && M > 1) {
        double kept = 1 - f.momentum;
        channel_put(f.running_mean, c,
                    kept * channel_get(f.running_mean, c, 0) + f.momentum * mean);
        channel_put(f.running_var, c,
                    kept * channel_get(f.running_var, c, 0) + f.momentum * (var * M / (M - 1)));
    }
}

/* y = (x - mean) scale + shift + more, and relu of it */
template <typename T> struct batch_norm_op {
    typedef typename kn_compute<T>::type A;
    T *y;
    const T *x, *more; /* more: nullptr where nothing is added */
    const A *mean, *scale, *shift;
    bool last; /* a vector is of V channels, else of one */
    bool relu;

    template <int V> struct in {
        kn_pack<T, V> x, more;
    };
    template <int V> __device__ void load(const int64_t (&at)[6], const bool *, in<V> &i) const
    {
        i.x = kn_load<V>(x + at[1], false);
        if (more)
            i.more = kn_load<V>(more + at[2], false);
    }
    /* The numbers of channels are near, and aren't held while x is on its way. */
    template <int V> __device__ void finish(const int64_t (&at)[6], const in<V> &i, int64_t) const
    {
        kn_pack<A, V> m = kn_load<V>(mean + at[3], !last), k = kn_load<V>(scale + at[4], !last),
                      b = kn_load<V>(shift + at[5], !last);
        A r[V], add[V];
        kn_widen(i.x, r);
        if (more)
            kn_widen(i.more, add);
#pragma unroll
        for (int v = 0; v < V; v++) {
            r[v] = kn_fma_rn(r[v] - m.x[v], k.x[v], b.x[v]);
            r[v] += more ? add[v] : 0;
            r[v] = relu && r[v] <= 0 ? 0 : r[v]; /* NaN passes */
        }
        kn_save_wide<V>(y + at[0], r);
    }
};

template <typename T>
static kn_status batch_norm_apply(const kn_batch_norm_args *a, typename kn_compute<T>::type *k)
{
    const kn_array *add = a->add.data ? &a->add : &a->x; /* stands in, and isn't read */
    const kn_array *const images[3] = { &a->y, &a->x, add };
    bool last = channel_last(images);
    int64_t C = a->x.shape[1];
    kn_array y = channel_order(&a->y, last), x = channel_order(&a->x, last),
             more = channel_order(add, last);
    kn_array mean = channel_spread(&x, last, k), scale = channel_spread(&x, last, k + C),
             shift = channel_spread(&x, last, k + 2 * C);
    const kn_array *const all[6] = { &y, &x, &more, &mean, &scale, &shift };
    batch_norm_op<T> op = {
        (T *)y.data, (const T *)x.data, (const T *)a->add.data, k, k + C, k + 2 * C, last, a->relu
    };
    return kn_each<16 / (int)sizeof(T)>(all, op, op);
}

template <typename T> static kn_status batch_norm_run(const kn_batch_norm_args *a)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *const arrays[1] = { &a->x };
    channel_call<T, 1> c = {};
    int64_t parts = 0, C = a->x.shape[1];
    if (C == 0)
        return KN_DONE;
    int V = channel_plan(c, arrays, &parts);
    size_t sums = a->training ? (size_t)(parts * C * 2) : 0, room = (sums + 3) / 4 * 4;
    /* vectors of coefficients are read 16 bytes at once where C is a multiple */
    A *scratch = (A *)kn_cuda_scratch((room + 3 * (size_t)C) * sizeof(A));
    if (!scratch)
        return KN_FAILED;
    c.partial = scratch;
    if (a->training && channel_run(c, V, parts, moments<A>()) != KN_DONE)
        return KN_FAILED;
    batch_norm_finish<A> f = { channel_vector_of(&a->w),
                               channel_vector_of(&a->b),
                               channel_vector_of(&a->running_mean),
                               channel_vector_of(&a->running_var),
                               (A *)a->mean.data,
                               (A *)a->rstd.data,
                               scratch + room,
                               c.partial,
                               C,
                               parts,
                               c.each,
                               c.span.vectors,
                               c.last ? 1 : V,
                               a->eps,
                               a->momentum,
                               a->training };
    const int warps = CHANNEL_THREADS / 32;
    if (KN_RUN(batch_norm_finish_kernel<A>, (unsigned)((C + warps - 1) / warps), CHANNEL_THREADS, 0,
               f) != KN_DONE)
        return KN_FAILED;
    return a->y.data ? batch_norm_apply<T>(a, scratch + room) : KN_DONE;
}

extern "C" kn_status kn_cuda_batch_norm(const void *args)
{
    const kn_batch_norm_args *a = (const kn_batch_norm_args *)args;
    kn_dtype t = a->x.dtype;
    if ((a->y.data && a->y.dtype != t) || (a->add.data && a->add.dtype != t) ||
        !channel_stat_takes(&a->x, &a->mean) || !channel_stat_takes(&a->x, &a->rstd))
        return KN_DECLINED;
    KN_FLOATS(t, batch_norm_run, a);
}
