/* kernels/cuda/kernels/norm_grad.cu: the backward of layer_norm and rms_norm.
 *
 * With h = (x - mean) rstd and g = dy w: dx = rstd (g - mean_j(g) - h mean_j(g h)) + more,
 * dw_j = sum_rows dy h, db_j = sum_rows dy. dw and db: each block adds its rows in ascending order,
 * then the blocks' sums are added in the order of the blocks, in f64. How rows are given to blocks
 * depends on the shape alone.
 *
 * Floor: dy and x read once, dx written once. Where a row and two rows of f32 sums fit in shared
 * memory one kernel does all (norm_grad_fused_kernel); else dx and the sums read their inputs
 * separately. */
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/norm.cuh"

template <typename T> struct norm_grad_call {
    typedef typename kn_compute<T>::type A;
    T *dx;
    const T *dy, *x, *more; /* more NULL: nothing is added to dx */
    kn_walk<4> rows;
    int64_t length, sd, sy, sx, sm; /* strides of dx, dy, x, more */
    norm_vector w;
    const A *mean, *rstd;
    A *partial; /* [parts][2][length]: dw and db of each part of the rows */
    int64_t parts;
    bool rms, cached;
};

/* dx of one row; add(u, i, dy, h) is called for each of this thread's elements: number i of unit
 * u. */
template <typename T, bool VEC, typename F>
static __device__ inline void norm_grad_row(const norm_grad_call<T> &a, int64_t r,
                                            const row_group &g, T *kept_dy, T *kept_x,
                                            typename kn_compute<T>::type *buffer, F add)
{
    typedef typename kn_compute<T>::type A;
    const int N = row_unit<T>::size;
    int64_t at[4], units = (a.length + N - 1) / N;
    kn_walk_at(a.rows, r, at);
    const T *pd = a.dy + at[1], *px = a.x + at[2];
    const T *more = a.dx && a.more ? a.more + at[3] : nullptr;
    A mean = a.rms ? 0 : a.mean[r], rstd = a.rstd[r], mean_g = 0, mean_gh = 0, d[N], x[N], w[N];
    A added[N]; /* a unit of more: the first is on its way while the row's sums are made */
    if (more && g.lane < units)
        row_load<VEC, N>(more, a.sm, g.lane, row_live<VEC, N>(g.lane, a.length), added);
    row_each<VEC, N, 2>(g, { pd, px }, { a.sy, a.sx }, a.length, { kept_dy, kept_x },
                        [&](int64_t u, int n, const A(&z)[2][N]) {
                            norm_vector_load<T, VEC, N>(a.w, u, n, 1, w);
                            for (int i = 0; i < N; i++) {
                                A h = (z[1][i] - mean) * rstd;
                                mean_g += z[0][i] * w[i];
                                mean_gh += z[0][i] * w[i] * h;
                                if (i < n)
                                    add(u, i, z[0][i], h);
                            }
                        });
    if (!a.dx)
        return;
    mean_g = a.rms ? 0 : row_sum(g, mean_g, buffer) / (A)a.length;
    mean_gh = row_sum(g, mean_gh, buffer) / (A)a.length;
    for (int64_t u = g.lane; u < units; u += g.lanes) {
        int n = row_live<VEC, N>(u, a.length);
        row_again<VEC, N>(pd, a.sy, u, n, kept_dy, d);
        row_again<VEC, N>(px, a.sx, u, n, kept_x, x);
        norm_vector_load<T, VEC, N>(a.w, u, n, 1, w);
        for (int i = 0; i < N; i++)
            d[i] = rstd * (d[i] * w[i] - mean_g - (x[i] - mean) * rstd * mean_gh);
        if (more && u != g.lane)
            row_load<VEC, N>(more, a.sm, u, n, added);
        if (more)
            for (int i = 0; i < N; i++)
                d[i] += added[i];
        row_store<VEC, N>(a.dx + at[0], a.sd, u, n, d);
    }
}

template <typename T, bool VEC>
KN_KERNEL(ROW_MOST, norm_grad_kernel, norm_grad_call<T> a, int mode)
{
    typedef typename kn_compute<T>::type A;
    KN_DYNAMIC(unsigned char, room);
    KN_SHARED A buffer[33];
    row_group g(mode);
    T *kept_dy = row_kept<T>(g, room, a.cached, a.length, 0, 2);
    T *kept_x = row_kept<T>(g, room, a.cached, a.length, 1, 2);
    for (int64_t r = g.first; r < a.rows.count; r += g.step)
        norm_grad_row<T, VEC>(a, r, g, kept_dy, kept_x, buffer, [](int64_t, int, A, A) {});
}

/* Block p takes rows p, p + parts, ...; its sums lie in shared memory, each element with one
 * thread: element i of unit u at [i][u], so that neighbouring threads meet different banks. */
template <typename T, bool VEC> KN_KERNEL(256, norm_grad_fused_kernel, norm_grad_call<T> a)
{
    typedef typename kn_compute<T>::type A;
    const int N = row_unit<T>::size;
    int64_t units = (a.length + N - 1) / N;
    KN_DYNAMIC(A, sums);
    KN_SHARED A buffer[33];
    row_group g(ROW_BLOCK);
    A *dw = sums, *db = sums + units * N;
    unsigned char *room = (unsigned char *)(sums + 2 * units * N);
    T *kept_dy = row_kept<T>(g, room, a.cached, a.length, 0, 2);
    T *kept_x = row_kept<T>(g, room, a.cached, a.length, 1, 2);
    for (int64_t u = g.lane; u < units; u += g.lanes)
        for (int i = 0; i < N; i++)
            dw[i * units + u] = db[i * units + u] = 0;
    for (int64_t r = blockIdx.x; r < a.rows.count; r += a.parts)
        norm_grad_row<T, VEC>(a, r, g, kept_dy, kept_x, buffer,
                                         [=](int64_t u, int i, A d, A h) {
                                             dw[i * units + u] += d * h;
                                             db[i * units + u] += d;
                                         });
    A *out = a.partial + (int64_t)blockIdx.x * 2 * a.length;
    for (int64_t u = g.lane; u < units; u += g.lanes)
        for (int i = 0; i < row_live<VEC, N>(u, a.length); i++) {
            out[u * N + i] = dw[i * units + u];
            out[a.length + u * N + i] = db[i * units + u];
        }
}

#define STRIP 32 /* columns and rows that a block of norm_grad_columns_kernel takes at once */
#define DEEP  8

/* Without dx, or for rows that are too short or too long for the above: a block a strip of columns
 * and a part of the rows; threads side by side read neighbours. */
template <typename T> KN_KERNEL(STRIP *DEEP, norm_grad_columns_kernel, norm_grad_call<T> a)
{
    typedef typename kn_compute<T>::type A;
    KN_SHARED A sum_w[DEEP][STRIP], sum_b[DEEP][STRIP];
    int64_t part = blockIdx.y, each = (a.rows.count + a.parts - 1) / a.parts,
            end = (part + 1) * each;
    int64_t j = (int64_t)blockIdx.x * STRIP + threadIdx.x;
    A dw = 0, db = 0;
    if (end > a.rows.count)
        end = a.rows.count;
    for (int64_t r = part * each + threadIdx.y; r < end && j < a.length; r += DEEP) {
        int64_t at[4];
        kn_walk_at(a.rows, r, at);
        A d = kn_get(a.dy + at[1] + j * a.sy), mean = a.rms ? 0 : a.mean[r];
        dw += d * (kn_get(a.x + at[2] + j * a.sx) - mean) * a.rstd[r];
        db += d;
    }
    sum_w[threadIdx.y][threadIdx.x] = dw;
    sum_b[threadIdx.y][threadIdx.x] = db;
    __syncthreads();
    if (threadIdx.y > 0 || j >= a.length)
        return;
    for (int k = 1; k < DEEP; k++) {
        dw += sum_w[k][threadIdx.x];
        db += sum_b[k][threadIdx.x];
    }
    a.partial[part * 2 * a.length + j] = dw;
    a.partial[(part * 2 + 1) * a.length + j] = db;
}

struct norm_sums {
    void *dw, *db; /* NULL: not wanted */
    kn_dtype dw_dtype, db_dtype;
    int64_t dw_stride, db_stride, length, parts;
};

/* Adds the parts' sums in order; threads of a block share a column: part k, k + DEEP, ... each. */
template <typename A> KN_KERNEL(STRIP *DEEP, norm_grad_total_kernel, norm_sums s, const A *partial)
{
    KN_SHARED double sum[DEEP][STRIP];
    int64_t j = (int64_t)blockIdx.x * STRIP + threadIdx.x;
    bool weight = blockIdx.y == 0;
    double total = 0;
    for (int64_t p = threadIdx.y; p < s.parts && j < s.length; p += DEEP)
        total += (double)partial[(p * 2 + !weight) * s.length + j];
    sum[threadIdx.y][threadIdx.x] = total;
    __syncthreads();
    if (threadIdx.y > 0 || j >= s.length)
        return;
    for (int k = 1; k < DEEP; k++)
        total += sum[k][threadIdx.x];
    if (weight && s.dw)
        kn_put_as(s.dw, s.dw_dtype, j * s.dw_stride, total);
    if (!weight && s.db)
        kn_put_as(s.db, s.db_dtype, j * s.db_stride, total);
}

/* ---- on the host ----------------------------------------------------------------------------- */

template <typename T> static kn_status norm_grad_input(norm_grad_call<T> c, bool vec)
{
    row_plan p = row_plan_make(c.rows.count, c.length, sizeof(T), 2);
    c.cached = p.cache > 0;
    ROW_RUN(norm_grad_kernel, T, vec, p, c);
}

/* dx and the parts' sums in one pass; KN_DECLINED where a row doesn't suit it. */
template <typename T> static kn_status norm_grad_fused(norm_grad_call<T> &c, bool vec)
{
    typedef typename kn_compute<T>::type A;
    int64_t units = (c.length + row_unit<T>::size - 1) / row_unit<T>::size;
    int64_t sums = 2 * units * row_unit<T>::size * (int64_t)sizeof(A);
    int64_t kept = 2 * ((c.length * (int64_t)sizeof(T) + 15) / 16 * 16);
    if (!c.dx || 32 > c.length || sums > ROW_CACHE_BYTES - 1024)
        return KN_DECLINED;
    c.cached = sums + kept <= ROW_CACHE_BYTES - 1024;
    int64_t parts = ((int64_t)1 << 20) / c.length, some = (c.rows.count + 7) / 8;
    parts = parts < 264 ? 264 : parts > 1056 ? 1056 : parts;
    c.parts = parts < some ? parts : some;
    c.partial = (A *)kn_cuda_scratch((size_t)(c.parts * 2 * c.length) * sizeof(A));
    if (!c.partial)
        return KN_FAILED;
    int64_t block = (units + 31) / 32 * 32;
    block = block > 256 ? 256 : block;
    size_t dynamic = (size_t)(sums + (c.cached ? kept : 0));
    return vec ? KN_RUN((norm_grad_fused_kernel<T, (sizeof(T) < 8)>), (unsigned)c.parts, (unsigned)block,
                        dynamic, c)
               : KN_RUN((norm_grad_fused_kernel<T, false>), (unsigned)c.parts, (unsigned)block,
                        dynamic, c);
}

template <typename T> static kn_status norm_grad_columns(norm_grad_call<T> &c)
{
    typedef typename kn_compute<T>::type A;
    int64_t strips = (c.length + STRIP - 1) / STRIP, parts = 2048 / strips,
            some = (c.rows.count + 63) / 64;
    parts = parts < some ? parts : some;
    c.parts = parts < 1 ? 1 : parts;
    c.partial = (A *)kn_cuda_scratch((size_t)(c.parts * 2 * c.length) * sizeof(A));
    if (!c.partial)
        return KN_FAILED;
    return KN_RUN(norm_grad_columns_kernel<T>, dim3((unsigned)strips, (unsigned)c.parts),
                  dim3(STRIP, DEEP), 0, c);
}

template <typename T> static kn_status norm_grad_run(const kn_norm_grad_args *a)
{
    typedef typename kn_compute<T>::type A;
    const kn_array *dx = a->dx.data ? &a->dx : &a->dy;
    const kn_array *more = a->more.data ? &a->more : dx;
    const kn_array *const arrays[4] = { dx, &a->dy, &a->x, more };
    norm_grad_call<T> c = { (T *)a->dx.data,
                            (const T *)a->dy.data,
                            (const T *)a->x.data,
                            (const T *)a->more.data,
                            row_walk(arrays),
                            row_length(&a->x),
                            row_stride(dx),
                            row_stride(&a->dy),
                            row_stride(&a->x),
                            row_stride(more),
                            norm_vector_of(&a->w, a->x.dtype),
                            (const A *)a->mean.data,
                            (const A *)a->rstd.data,
                            nullptr,
                            1,
                            a->rms,
                            false };
    if (c.length == 0)
        return KN_DONE;
    bool sums = a->dw.data || a->db.data;
    bool vec = row_aligned(dx) && row_aligned(&a->dy) && row_aligned(&a->x) && row_aligned(more) &&
               norm_vector_aligned(&a->w);
    kn_status s = KN_DECLINED;
    if (sums && c.rows.count > 0)
        s = norm_grad_fused(c, vec);
    if (s == KN_DECLINED && c.dx && c.rows.count > 0 && norm_grad_input(c, vec) != KN_DONE)
        return KN_FAILED;
    if (s == KN_DECLINED && sums)
        s = norm_grad_columns(c);
    if (s == KN_FAILED || !sums)
        return s == KN_FAILED ? KN_FAILED : KN_DONE;
    norm_sums t = { a->dw.data,
                    a->db.data,
                    a->dw.dtype,
                    a->db.dtype,
                    a->dw.ndim > 0 ? a->dw.stride[0] : 1,
                    a->db.ndim > 0 ? a->db.stride[0] : 1,
                    c.length,
                    c.parts };
    return KN_RUN(norm_grad_total_kernel<A>, dim3((unsigned)((c.length + STRIP - 1) / STRIP), 2),
                  dim3(STRIP, DEEP), 0, t, (const A *)c.partial);
}

extern "C" kn_status kn_cuda_norm_grad(const void *args)
{
    const kn_norm_grad_args *a = (const kn_norm_grad_args *)args;
    kn_dtype t = a->x.dtype;
    if (a->dy.dtype != t || (a->dx.data && a->dx.dtype != t) ||
        !norm_vector_takes(&a->w, t) ||
        !norm_vector_takes(&a->dw, t) || !norm_vector_takes(&a->db, t) ||
        (!a->rms && !norm_stat_takes(&a->mean, t)) || !norm_stat_takes(&a->rstd, t))
        return KN_DECLINED;
    KN_FLOATS(t, norm_grad_run, a);
}
