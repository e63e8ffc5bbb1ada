/* kernels/cuda/kernels/softmax.cu: softmax and log-softmax over the last dim, and their backward.
 *
 * Floor: each row is read once and written once (the backward reads two). A row is kept in shared
 * memory between its passes where it fits in 48 KB, and comes from L2 again where it doesn't. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/exponentials.cuh"
#include "kernels/cuda/kernels/rows.cuh"

template <typename T> struct softmax_call {
    T *y;
    const T *x;
    kn_walk<2> rows;
    int64_t length, sy, sx;
    bool log, cached;
};

/* max, then sum exp(x - max), then exp(x - max) / sum or x - max - log sum. */
template <typename T, bool VEC>
KN_KERNEL(ROW_MOST, softmax_kernel, softmax_call<T> a, int mode)
{
    typedef typename kn_compute<T>::type A;
    KN_DYNAMIC(unsigned char, room);
    KN_SHARED A buffer[33];
    row_group g(mode);
    T *cache = row_kept<T>(g, room, a.cached, a.length, 0, 1);
    const int N = row_unit<T>::size;
    int64_t units = (a.length + N - 1) / N;
    for (int64_t r = g.first; r < a.rows.count; r += g.step) {
        int64_t at[2];
        kn_walk_at(a.rows, r, at);
        const T *px = a.x + at[1];
        A max = -row_infinity<A>(), sum = 0, x[N];
        row_each<VEC, N, 1>(
            g, { px }, { a.sx }, a.length, { cache }, [&](int64_t, int n, const A(&z)[1][N]) {
                for (int i = 0; i < N; i++)
                    max = i < n && (z[0][i] > max || z[0][i] != z[0][i]) ? z[0][i] : max;
            });
        max = row_max(g, max, buffer);
        for (int64_t u = g.lane; u < units; u += g.lanes) {
            int n = row_live<VEC, N>(u, a.length);
            row_again<VEC, N>(px, a.sx, u, n, cache, x);
            for (int i = 0; i < N; i++)
                sum += i < n ? kn_exp_term(x[i] - max) : 0;
        }
        sum = row_sum(g, sum, buffer);
        A factor = 1 / sum, log_sum = row_log(sum);
        for (int64_t u = g.lane; u < units; u += g.lanes) {
            int n = row_live<VEC, N>(u, a.length);
            row_again<VEC, N>(px, a.sx, u, n, cache, x);
            for (int i = 0; i < N; i++)
                x[i] = a.log ? x[i] - max - log_sum : kn_exp(x[i] - max) * factor;
            row_store<VEC, N>(a.y + at[0], a.sy, u, n, x);
        }
    }
}

template <typename T> static kn_status softmax_run(const kn_softmax_args *a)
{
    const kn_array *const arrays[2] = { &a->y, &a->x };
    softmax_call<T> c = {
        (T *)a->y.data,    (const T *)a->x.data, row_walk(arrays), row_length(&a->x),
        row_stride(&a->y), row_stride(&a->x),    a->log,           false
    };
    if (c.rows.count == 0 || c.length == 0)
        return KN_DONE;
    bool vec = row_aligned(&a->x) && row_aligned(&a->y);
    row_plan p = row_plan_make(c.rows.count, c.length, sizeof(T), 1);
    c.cached = p.cache > 0;
    ROW_RUN(softmax_kernel, T, vec, p, c);
}

extern "C" kn_status kn_cuda_softmax(const void *args)
{
    const kn_softmax_args *a = (const kn_softmax_args *)args;
    if (a->y.dtype != a->x.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->x.dtype, softmax_run, a);
}

/* ---- backward -------------------------------------------------------------------------------- */

template <typename T> struct softmax_grad_call {
    T *dx;
    const T *dy, *y;
    kn_walk<3> rows;
    int64_t length, sx, sd, sy;
    bool log, cached;
};

/* dx = y (dy - sum dy y), or for log: dy - exp(y) sum dy. */
template <typename T, bool VEC>
KN_KERNEL(ROW_MOST, softmax_grad_kernel, softmax_grad_call<T> a, int mode)
{
    typedef typename kn_compute<T>::type A;
    KN_DYNAMIC(unsigned char, room);
    KN_SHARED A buffer[33];
    row_group g(mode);
    T *kept_dy = row_kept<T>(g, room, a.cached, a.length, 0, 2);
    T *kept_y = row_kept<T>(g, room, a.cached, a.length, 1, 2);
    const int N = row_unit<T>::size;
    int64_t units = (a.length + N - 1) / N;
    for (int64_t r = g.first; r < a.rows.count; r += g.step) {
        int64_t at[3];
        kn_walk_at(a.rows, r, at);
        const T *pd = a.dy + at[1], *py = a.y + at[2];
        A sum = 0, d[N], y[N];
        row_each<VEC, N, 2>(g, { pd, py }, { a.sd, a.sy }, a.length, { kept_dy, kept_y },
                            [&](int64_t, int, const A(&z)[2][N]) {
                                for (int i = 0; i < N; i++)
                                    sum += a.log ? z[0][i] : z[0][i] * z[1][i];
                            });
        sum = row_sum(g, sum, buffer);
        for (int64_t u = g.lane; u < units; u += g.lanes) {
            int n = row_live<VEC, N>(u, a.length);
            row_again<VEC, N>(pd, a.sd, u, n, kept_dy, d);
            row_again<VEC, N>(py, a.sy, u, n, kept_y, y);
            for (int i = 0; i < N; i++)
                d[i] = a.log ? d[i] - kn_exp(y[i]) * sum : y[i] * (d[i] - sum);
            row_store<VEC, N>(a.dx + at[0], a.sx, u, n, d);
        }
    }
}

template <typename T> static kn_status softmax_grad_run(const kn_softmax_grad_args *a)
{
    const kn_array *const arrays[3] = { &a->dx, &a->dy, &a->y };
    softmax_grad_call<T> c = { (T *)a->dx.data,
                               (const T *)a->dy.data,
                               (const T *)a->y.data,
                               row_walk(arrays),
                               row_length(&a->y),
                               row_stride(&a->dx),
                               row_stride(&a->dy),
                               row_stride(&a->y),
                               a->log,
                               false };
    if (c.rows.count == 0 || c.length == 0)
        return KN_DONE;
    bool vec = row_aligned(&a->dx) && row_aligned(&a->dy) && row_aligned(&a->y);
    row_plan p = row_plan_make(c.rows.count, c.length, sizeof(T), 2);
    c.cached = p.cache > 0;
    ROW_RUN(softmax_grad_kernel, T, vec, p, c);
}

extern "C" kn_status kn_cuda_softmax_grad(const void *args)
{
    const kn_softmax_grad_args *a = (const kn_softmax_grad_args *)args;
    if (a->dx.dtype != a->dy.dtype || a->dx.dtype != a->y.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->dx.dtype, softmax_grad_run, a);
}
