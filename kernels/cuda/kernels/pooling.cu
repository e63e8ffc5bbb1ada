/* kernels/cuda/kernels/pooling.cu: the largest and the mean of windows, and their gradients.
 * cuDNN's own would need its kind of index (positions in a window) and knows no adaptive windows,
 * and there is nothing to win: these are bound by memory.
 *
 * Floor: x (dy and index) read once, the rest written once. A thread makes one output, or 16 bytes
 * of neighbouring channels where those are neighbours in memory; windows that overlap meet in the
 * cache. The gradient adds the windows of an element in their order: no atomics. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/images.cuh"
#include "kernels/windows.h"

/* x and y with their gradients in backward; index NULL: not wanted. */
template <typename T> struct pool_call {
    T *out;
    const T *in;
    int32_t *index;
    kn_image so, si, sn; /* strides of out, in, index */
    kn_window_dim d[2];
    int64_t images, channels; /* channels: vectors of V */
    kn_pool kind;
    bool last;  /* channels come before positions */
    bool small; /* all counts fit 32 bits */
};

/* kn_save_wide by 16 bytes: behind loops over windows nvcc would store element by element. */
template <int V, typename T> static __device__ inline void pool_save(T *p, const kn_pack<T, V> &r)
{
#ifdef __CUDA_ARCH__
    for (int i = 0; sizeof r % 16 == 0 && i < (int)(sizeof r / 16); i++) {
        uint4 unit;
        memcpy(&unit, (const char *)&r + 16 * i, 16);
        __stwb((uint4 *)p + i, unit);
    }
    if (sizeof r % 16 == 0)
        return;
#endif
    kn_save<V>(p, r);
}
template <int V, typename T>
static __device__ inline void pool_save_wide(T *p, const typename kn_wide<T>::type (&x)[V])
{
    kn_pack<T, V> r;
#pragma unroll
    for (int v = 0; v < V; v++)
        kn_write(r.x[v], x[v]);
    pool_save<V>(p, r);
}

/* ---- forward --------------------------------------------------------------------------------- */

template <typename T, int V>
static __device__ inline void
pool_largest(const pool_call<T> &c, const T *plane, const kn_window_span &rows, const kn_window_span &columns,
             typename kn_compute<T>::type (&best)[V], kn_pack<int32_t, V> &where)
{
    typedef typename kn_compute<T>::type A;
#pragma unroll
    for (int v = 0; v < V; v++) {
        best[v] = -(A)INFINITY;
        where.x[v] = -1;
    }
    for (int64_t h = rows.begin; h < rows.end; h += rows.step)
        for (int64_t w = columns.begin; w < columns.end; w += columns.step) {
            A x[V];
            kn_load_wide<V>(plane + h * c.si.h + w * c.si.w, false, x);
#pragma unroll
            for (int v = 0; v < V; v++) {
                bool better = x[v] > best[v] || (x[v] != x[v] && best[v] == best[v]);
                if (where.x[v] < 0 || better) {
                    best[v] = x[v];
                    where.x[v] = (int32_t)(h * c.d[1].size + w);
                }
            }
        }
}

template <typename T, int V>
static __device__ inline void pool_mean(const pool_call<T> &c, const T *plane,
                                        const kn_window_span &rows, const kn_window_span &columns,
                                        typename kn_compute<T>::type (&sum)[V])
{
    typedef typename kn_compute<T>::type A;
    for (int64_t h = rows.begin; h < rows.end; h++)
        for (int64_t w = columns.begin; w < columns.end; w++) {
            A x[V];
            kn_load_wide<V>(plane + h * c.si.h + w * c.si.w, false, x);
#pragma unroll
            for (int v = 0; v < V; v++)
                sum[v] += x[v];
        }
    bool some = rows.begin < rows.end && columns.begin < columns.end;
    A by = (A)(rows.divide * columns.divide);
#pragma unroll
    for (int v = 0; v < V; v++)
        sum[v] = some ? sum[v] / by : (A)0;
}

template <typename T, int V>
KN_KERNEL_RESIDENT(256, sizeof(T) == 8 ? 1 : 0, pool_kernel, pool_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    int64_t H = c.d[0].made, W = c.d[1].made, count = c.images * c.channels * H * W;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        kn_image p = kn_image_place(i, c.channels, H, W, c.last, c.small);
        kn_window_span rows = kn_window_span_of(&c.d[0], p.h), columns = kn_window_span_of(&c.d[1], p.w);
        const T *plane = c.in + p.n * c.si.n + p.c * V * c.si.c;
        A r[V] = {};
        kn_pack<int32_t, V> where;
        if (c.kind == KN_POOL_MAX)
            pool_largest<T, V>(c, plane, rows, columns, r, where);
        else
            pool_mean<T, V>(c, plane, rows, columns, r);
        pool_save_wide<V>(c.out + p.n * c.so.n + p.c * V * c.so.c + p.h * c.so.h + p.w * c.so.w, r);
        if (c.index && c.kind == KN_POOL_MAX)
            pool_save<V>(c.index + p.n * c.sn.n + p.c * V * c.sn.c + p.h * c.sn.h + p.w * c.sn.w,
                         where);
    }
}

/* ---- backward -------------------------------------------------------------------------------- */

/* Adds the share of window (h, w) of y in the element `at` = h W + w of x. */
template <typename T, int V>
static __device__ inline void pool_grad_add(const pool_call<T> &c, const kn_image &from,
                                            int64_t at, int64_t divide,
                                            typename kn_compute<T>::type (&sum)[V])
{
    typedef typename kn_compute<T>::type A;
    A dy[V];
    kn_load_wide<V>(c.in + from.n * c.si.n + from.c * V * c.si.c + from.h * c.si.h +
                        from.w * c.si.w,
                    false, dy);
    if (c.kind == KN_POOL_AVG) {
#pragma unroll
        for (int v = 0; v < V; v++)
            sum[v] += dy[v] / (A)divide;
        return;
    }
    kn_pack<int32_t, V> where = kn_load<V>(
        c.index + from.n * c.sn.n + from.c * V * c.sn.c + from.h * c.sn.h + from.w * c.sn.w, false);
#pragma unroll
    for (int v = 0; v < V; v++)
        if (where.x[v] == at)
            sum[v] += dy[v];
}

template <typename T, int V>
KN_KERNEL_RESIDENT(256, sizeof(T) == 8 ? 1 : 0, pool_grad_kernel, pool_call<T> c)
{
    typedef typename kn_compute<T>::type A;
    int64_t H = c.d[0].size, W = c.d[1].size, count = c.images * c.channels * H * W;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < count;
         i += (int64_t)gridDim.x * blockDim.x) {
        kn_image p = kn_image_place(i, c.channels, H, W, c.last, c.small), from = p;
        int64_t p0, p1, q0, q1;
        kn_windows_of(&c.d[0], p.h, &p0, &p1);
        kn_windows_of(&c.d[1], p.w, &q0, &q1);
        A sum[V] = {};
        for (from.h = p0; from.h < p1; from.h++)
            for (from.w = q0; from.w < q1; from.w++) {
                int64_t divide = 1;
                if (c.kind == KN_POOL_AVG)
                    divide = kn_window_share(&c.d[0], from.h, p.h) *
                             kn_window_share(&c.d[1], from.w, p.w);
                if (divide > 0)
                    pool_grad_add<T, V>(c, from, p.h * W + p.w, divide, sum);
            }
        pool_save_wide<V>(c.out + p.n * c.so.n + p.c * V * c.so.c + p.h * c.so.h + p.w * c.so.w, sum);
    }
}

/* Can V channels of each position be moved at once? */
static bool pool_whole(const kn_array *a, int V)
{
    int64_t size = (int64_t)kn_dtype_size(a->dtype), unit = size * V < 16 ? size * V : 16;
    bool whole = !a->data || ((uintptr_t)a->data % (uintptr_t)unit == 0 && a->stride[1] == 1);
    for (int d = 0; a->data && d < 4; d++)
        whole = whole && (d == 1 || a->shape[d] == 1 || a->stride[d] * size % unit == 0);
    return whole;
}

/* Fills a call whose larger image is x; the result: channels a thread takes. */
template <typename T>
static int pool_plan(pool_call<T> &c, const kn_array *x, const kn_array *y, const kn_array *out,
                     const kn_array *in, const kn_array *index, const kn_window *w)
{
    const int most = 16 / (int)sizeof(T);
    bool whole = x->shape[1] % most == 0 && pool_whole(x, most) && pool_whole(y, most) &&
                 pool_whole(index, most);
    int V = whole ? most : 1;
    c.out = (T *)out->data;
    c.in = (const T *)in->data;
    c.index = (int32_t *)index->data;
    c.so = kn_image_of(out);
    c.si = kn_image_of(in);
    c.sn = index->data ? kn_image_of(index) : kn_image();
    for (int d = 0; d < 2; d++)
        c.d[d] = kn_window_dim_of(w, d, x, y);
    c.images = x->shape[0];
    c.channels = x->shape[1] / V;
    c.last = V > 1 || out->stride[1] == 1;
    c.small = kn_array_numel(out) < INT32_MAX;
    return V;
}

template <typename T> static kn_status pool_run(const kn_pool_args *a)
{
    pool_call<T> c = {};
    int V = pool_plan(c, &a->x, &a->y, &a->y, &a->x, &a->index, &a->window);
    int64_t count = kn_array_numel(&a->y) / V;
    c.kind = a->kind;
    if (count == 0)
        return KN_DONE;
    if (V > 1)
        return KN_RUN_FLAT((pool_kernel<T, 16 / (int)sizeof(T)>), kn_blocks(count, 256, 1), 256, c);
    return KN_RUN_FLAT((pool_kernel<T, 1>), kn_blocks(count, 256, 1), 256, c);
}

template <typename T> static kn_status pool_grad_run(const kn_pool_grad_args *a)
{
    pool_call<T> c = {};
    int V = pool_plan(c, &a->dx, &a->dy, &a->dx, &a->dy, &a->index, &a->window);
    int64_t count = kn_array_numel(&a->dx) / V;
    c.kind = a->kind;
    if (count == 0)
        return KN_DONE;
    if (V > 1)
        return KN_RUN_FLAT((pool_grad_kernel<T, 16 / (int)sizeof(T)>), kn_blocks(count, 256, 1),
                           256, c);
    return KN_RUN_FLAT((pool_grad_kernel<T, 1>), kn_blocks(count, 256, 1), 256, c);
}

extern "C" kn_status kn_cuda_pool(const void *args)
{
    const kn_pool_args *a = (const kn_pool_args *)args;
    if (a->y.dtype != a->x.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->x.dtype, pool_run, a);
}

extern "C" kn_status kn_cuda_pool_grad(const void *args)
{
    const kn_pool_grad_args *a = (const kn_pool_grad_args *)args;
    if (a->dx.dtype != a->dy.dtype)
        return KN_DECLINED;
    KN_FLOATS(a->dx.dtype, pool_grad_run, a);
}
