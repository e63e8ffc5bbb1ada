/* kernels/cuda/kernels/norm.cu: layer_norm and rms_norm over the last dim; the backward is in
 * norm_grad.cu.
 *
 * Floor: each row is read once and written once: it stays in shared memory between the passes for
 * the mean, the variance and the output where it fits in 48 KB. Of a sum of two rows these are the
 * passes over what a thread wrote of the sum. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/norm.cuh"

template <typename T> struct norm_call {
    typedef typename kn_compute<T>::type A;
    T *y;
    const T *x;
    kn_walk<4> rows;
    int64_t length, sy, sx;
    norm_vector w, b;
    A *mean, *rstd; /* NULL: not wanted */
    double eps;
    bool rms, cached;
    const T *add; /* NULL: the norm of x alone */
    T *sum;
    int64_t sa, ss; /* strides of add and sum */
};

/* The value that x has once it is stored. */
template <typename T>
static __device__ inline typename kn_compute<T>::type norm_rounded(typename kn_compute<T>::type x)
{
    T stored;
    kn_put(&stored, x);
    return kn_get(&stored);
}

/* SUM: of x + add; without, it takes a quarter less registers. */
template <typename T, bool VEC, bool SUM>
static __device__ inline void norm_rows(const norm_call<T> &a, int mode, unsigned char *room,
                                        typename kn_compute<T>::type *buffer)
{
    typedef typename kn_compute<T>::type A;
    row_group g(mode);
    T *cache = row_kept<T>(g, room, a.cached, a.length, 0, 1);
    const int N = row_unit<T>::size;
    int64_t units = (a.length + N - 1) / N;
    A count = a.length > 0 ? (A)a.length : (A)1;
    for (int64_t r = g.first; r < a.rows.count; r += g.step) {
        int64_t at[4], sx = SUM ? a.ss : a.sx;
        kn_walk_at(a.rows, r, at);
        T *sum = SUM ? a.sum + at[3] : nullptr;
        const T *px = SUM ? sum : a.x + at[1];
        A mean = 0, var = 0, x[N], w[N], b[N];
        auto count_in = [&](const A(&z)[N]) {
            for (int i = 0; i < N; i++)
                if (a.rms)
                    var += z[i] * z[i];
                else
                    mean += z[i];
        };
        if (SUM)
            row_each<VEC, N, 2>(g, { a.x + at[1], a.add + at[2] }, { a.sx, a.sa }, a.length,
                                { (T *)nullptr, (T *)nullptr },
                                [&](int64_t u, int n, const A(&z)[2][N]) {
                                    for (int i = 0; i < N; i++)
                                        x[i] = norm_rounded<T>(z[0][i] + z[1][i]);
                                    row_store<VEC, N>(sum, a.ss, u, n, x);
                                    if (cache)
                                        row_store<VEC, N>(cache, 1, u, n, x);
                                    count_in(x);
                                });
        else
            row_each<VEC, N, 1>(g, { px }, { sx }, a.length, { cache },
                                [&](int64_t, int, const A(&z)[1][N]) { count_in(z[0]); });
        if (!a.rms) {
            mean = row_sum(g, mean, buffer) / count;
            for (int64_t u = g.lane; u < units; u += g.lanes) {
                int n = row_live<VEC, N>(u, a.length);
                row_again<VEC, N>(px, sx, u, n, cache, x);
                for (int i = 0; i < N; i++) {
                    A d = i < n ? x[i] - mean : 0;
                    var += d * d;
                }
            }
        }
        var = row_sum(g, var, buffer) / count;
        A rstd = row_rsqrt(var + (A)a.eps);
        if (g.lane == 0 && a.mean && !a.rms)
            a.mean[r] = mean;
        if (g.lane == 0 && a.rstd)
            a.rstd[r] = rstd;
        for (int64_t u = g.lane; u < units; u += g.lanes) {
            int n = row_live<VEC, N>(u, a.length);
            row_again<VEC, N>(px, sx, u, n, cache, x);
            norm_vector_load<T, VEC, N>(a.w, u, n, 1, w);
            norm_vector_load<T, VEC, N>(a.b, u, n, 0, b);
            for (int i = 0; i < N; i++)
                x[i] = (x[i] - mean) * rstd * w[i] + b[i];
            row_store<VEC, N>(a.y + at[0], a.sy, u, n, x);
        }
    }
}

template <typename T, bool VEC> KN_KERNEL(ROW_MOST, norm_kernel, norm_call<T> a, int mode)
{
    KN_DYNAMIC(unsigned char, room);
    KN_SHARED typename kn_compute<T>::type buffer[33];
    norm_rows<T, VEC, false>(a, mode, room, buffer);
}

template <typename T, bool VEC>
KN_KERNEL_RESIDENT(ROW_MOST, sizeof(T) == 8 ? 1 : 0, norm_sum_kernel, norm_call<T> a, int mode)
{
    KN_DYNAMIC(unsigned char, room);
    KN_SHARED typename kn_compute<T>::type buffer[33];
    norm_rows<T, VEC, true>(a, mode, room, buffer);
}

template <typename T> static kn_status norm_run(const kn_norm_args *a)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *add = a->add.data ? &a->add : &a->x, *sum = a->add.data ? &a->sum : &a->y;
    const kn_array *const arrays[4] = { &a->y, &a->x, add, sum };
    norm_call<T> c = { (T *)a->y.data,
                       (const T *)a->x.data,
                       row_walk(arrays),
                       row_length(&a->x),
                       row_stride(&a->y),
                       row_stride(&a->x),
                       norm_vector_of(&a->w, a->x.dtype),
                       norm_vector_of(&a->b, a->x.dtype),
                       (A *)a->mean.data,
                       (A *)a->rstd.data,
                       a->eps,
                       a->rms,
                       false,
                       (const T *)a->add.data,
                       (T *)a->sum.data,
                       row_stride(add),
                       row_stride(sum) };
    if (c.rows.count == 0)
        return KN_DONE;
    bool vec = row_aligned(&a->x) && row_aligned(&a->y) && row_aligned(add) && row_aligned(sum) &&
               norm_vector_aligned(&a->w) && norm_vector_aligned(&a->b);
    row_plan p = row_plan_make(c.rows.count, c.length, sizeof(T), 1);
    c.cached = p.cache > 0;
    if (c.add)
        ROW_RUN(norm_sum_kernel, T, vec, p, c);
    ROW_RUN(norm_kernel, T, vec, p, c);
}

extern "C" kn_status kn_cuda_norm(const void *args)
{
    const kn_norm_args *a = (const kn_norm_args *)args;
    kn_dtype t = a->x.dtype;
    if (a->y.dtype != t || !norm_vector_takes(&a->w, t) || !norm_vector_takes(&a->b, t) ||
        (!a->rms && !norm_stat_takes(&a->mean, t)) || !norm_stat_takes(&a->rstd, t))
        return KN_DECLINED;
    KN_FLOATS(t, norm_run, a);
}
