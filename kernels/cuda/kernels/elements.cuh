/* kernels/cuda/kernels/elements.cuh (private): what elementwise kernels are written with.
 *
 * An operation is a struct with the pointers and two templates that compute V elements which follow
 * each other in the last dim of every array: load<V>(at, repeat, x) reads into x (an Op::in<V>),
 * and finish<V>(at, x, first) computes and stores. at[k] is the offset of the first element in
 * array k, which has stride 1 there, or 0 where repeat[k]; first is its row-major index. kn_each()
 * launches it with V elements a thread (16-byte accesses) where strides and addresses allow, else
 * with V = 1.
 *
 * nvcc takes seconds for each kernel, and makes it for every architecture. So what is rare shares
 * one: vectors are for f32, bf16 and f16; one element at a time, these three (and the integers) are
 * told apart at run time (kn_any).
 *
 * Floor: each byte moves once. A thread loads for the next place before it finishes this one, so
 * that the 1,280 or more threads of an SM have 40 KB of each input in flight, what a Hopper SM
 * needs to keep its memory busy. */
#ifndef KNAP_KERNELS_CUDA_ELEMENTS_CUH
#define KNAP_KERNELS_CUDA_ELEMENTS_CUH

#include "kernels/error.h"
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/values.cuh"

/* ---- V elements at once ---------------------------------------------------------------------- */

/* V elements as they lie in memory, moved in units of at most 16 bytes. */
template <typename T, int V> struct alignas(sizeof(T) * V < 16 ? sizeof(T) * V : 16) kn_pack {
    T x[V];
};

template <int V, typename T> static inline __device__ kn_pack<T, V> kn_load(const T *p, bool repeat)
{
    kn_pack<T, V> r;
    if (V > 1 && !repeat)
        return *(const kn_pack<T, V> *)p;
    r.x[0] = *p;
#pragma unroll
    for (int v = 1; v < V; v++)
        r.x[v] = r.x[0];
    return r;
}

template <int V, typename T>
static inline __device__ void kn_widen(const kn_pack<T, V> &from, typename kn_wide<T>::type (&x)[V])
{
#pragma unroll
    for (int v = 0; v < V; v++)
        x[v] = kn_read(from.x[v]);
}

template <int V, typename T>
static inline __device__ void kn_load_wide(const T *p, bool repeat,
                                           typename kn_wide<T>::type (&x)[V])
{
    kn_widen(kn_load<V>(p, repeat), x);
}

template <int V, typename T> static inline __device__ void kn_save(T *p, const kn_pack<T, V> &r)
{
    *(kn_pack<T, V> *)p = r;
}

template <int V, typename T>
static inline __device__ void kn_save_wide(T *p, const typename kn_wide<T>::type (&x)[V])
{
    kn_pack<T, V> r;
#pragma unroll
    for (int v = 0; v < V; v++)
        kn_write(r.x[v], x[v]);
    kn_save<V>(p, r);
}

/* ---- dtypes told apart at run time ----------------------------------------------------------- */

/* Stands for all storage types that can be computed in A, as one that was read: float for f32, bf16
 * and f16, double for all floats, int64_t for integers and bool. One element at a time. */
template <typename A> struct kn_any {
    A x;
};
template <typename A> struct kn_compute<kn_any<A>> {
    typedef A type;
};
template <typename A> static inline KN_HD A kn_read(const kn_any<A> &from)
{
    return from.x;
}
template <typename A> static inline KN_HD void kn_write(kn_any<A> &to, A x)
{
    to.x = x;
}

/* The address of an element of such a dtype. */
template <typename A> struct kn_any_at {
    char *data;
    kn_dtype dtype;
    int size;

    inline __device__ kn_any_at operator+(int64_t i) const
    {
        return { data + i * size, dtype, size };
    }
};

static inline __device__ float kn_any_get(const kn_any_at<float> &p)
{
    if (p.dtype == KN_F32)
        return *(const float *)p.data;
    return p.dtype == KN_BF16 ? kn_get((const kn_bf16 *)p.data) : kn_get((const kn_f16 *)p.data);
}
static inline __device__ double kn_any_get(const kn_any_at<double> &p)
{
    if (p.dtype == KN_F64)
        return *(const double *)p.data;
    return kn_any_get(kn_any_at<float>{ p.data, p.dtype, p.size });
}
static inline __device__ int64_t kn_any_get(const kn_any_at<int64_t> &p)
{
    if (p.size == 8)
        return *(const int64_t *)p.data;
    if (p.size == 4)
        return *(const int32_t *)p.data;
    uint8_t x = *(const uint8_t *)p.data;
    return p.dtype == KN_BOOL ? x != 0 : x;
}
static inline __device__ void kn_any_put(const kn_any_at<float> &p, float x)
{
    if (p.dtype == KN_F32)
        *(float *)p.data = x;
    else if (p.dtype == KN_BF16)
        kn_put((kn_bf16 *)p.data, x);
    else
        kn_put((kn_f16 *)p.data, x);
}
static inline __device__ void kn_any_put(const kn_any_at<double> &p, double x)
{
    if (p.dtype == KN_F64)
        *(double *)p.data = x;
    else
        kn_any_put(kn_any_at<float>{ p.data, p.dtype, p.size }, (float)x);
}
static inline __device__ void kn_any_put(const kn_any_at<int64_t> &p, int64_t x)
{
    if (p.size == 8)
        *(int64_t *)p.data = x;
    else if (p.size == 4)
        *(int32_t *)p.data = (int32_t)x;
    else
        *(uint8_t *)p.data = p.dtype == KN_BOOL ? x != 0 : (uint8_t)x;
}

template <int V, typename A>
static inline __device__ kn_pack<kn_any<A>, V> kn_load(const kn_any_at<A> &p, bool)
{
    static_assert(V == 1, "dtypes told apart at run time move one by one");
    return { { { kn_any_get(p) } } };
}
template <int V, typename A>
static inline __device__ void kn_save(const kn_any_at<A> &p, const kn_pack<kn_any<A>, V> &r)
{
    kn_any_put(p, r.x[0].x);
}
template <int V, typename A>
static inline __device__ void kn_save_wide(const kn_any_at<A> &p, const A (&x)[V])
{
    kn_any_put(p, x[0]);
}

/* How an operation on T keeps an array: T *, or the above. */
template <typename T> struct kn_kept {
    typedef T *type;
    static type of(const kn_array *a)
    {
        return (T *)a->data;
    }
};
template <typename A> struct kn_kept<kn_any<A>> {
    typedef kn_any_at<A> type;
    static type of(const kn_array *a)
    {
        return { (char *)a->data, a->dtype, (int)kn_dtype_size(a->dtype) };
    }
};

/* x moves on by one: its first leaves, and last comes. */
template <int V, typename A> static inline __device__ void kn_turn(A (&x)[V], A last)
{
#pragma unroll
    for (int k = 0; k + 1 < V; k++)
        x[k] = x[k + 1];
    x[V - 1] = last;
}

/* Each x becomes f(x), or f(x, y), by a loop that stays one: for functions of many instructions.
 * The arrays turn round instead of being indexed, which would take them out of registers. */
template <int V, typename A, typename F> static inline __device__ void kn_rolled(A (&x)[V], F f)
{
#pragma unroll 1
    for (int v = 0; v < V; v++)
        kn_turn(x, f(x[0]));
}
template <int V, typename A, typename F>
static inline __device__ void kn_rolled(A (&x)[V], A (&y)[V], F f)
{
#pragma unroll 1
    for (int v = 0; v < V; v++) {
        kn_turn(x, f(x[0], y[0]));
        kn_turn(y, y[0]);
    }
}

/* Operations of one input, which is array 1, derive from this. */
template <typename T> struct kn_of_one {
    typename kn_kept<T>::type src;

    template <int V> using in = kn_pack<T, V>;
    template <int V>
    __device__ void load(const int64_t (&at)[2], const bool *repeat, kn_pack<T, V> &x) const
    {
        x = kn_load<V>(src + at[1], repeat[1]);
    }
};

/* ---- walking in steps of V ------------------------------------------------------------------- */

/* A walk whose last dim is counted in vectors. */
template <int N> struct kn_span {
    int64_t vectors,
        count;     /* count: elements; what vectors leave over follows them in the only dim */
    int64_t begin; /* vectors that another launch does */
    int ndim;
    bool small;     /* indices fit 31 bits: divisions are of 32 bits */
    bool repeat[N]; /* stride 0 in the last dim */
    int64_t shape[KN_MAX_DIMS], stride[N][KN_MAX_DIMS];
};

/* Whether array k of a walk can be read V elements at a time. */
template <int N> static bool kn_span_fits(const kn_walk<N> &w, int k, const kn_array *a, int V)
{
    int64_t size = (int64_t)kn_dtype_size(a->dtype), unit = size * V < 16 ? size * V : 16;
    int last = w.ndim - 1;
    if (w.stride[k][last] == 0)
        return true;
    bool fits = w.stride[k][last] == 1 && (uintptr_t)a->data % (uintptr_t)unit == 0;
    for (int d = 0; d < last; d++)
        fits = fits && w.stride[k][d] * size % unit == 0;
    return fits;
}

/* Fills s for vectors of V elements, or of 1 where some array does not allow them (the result).
 * Elements are left over only without `whole`. */
template <int N>
static int kn_span_make(kn_span<N> &s, const kn_array *const (&a)[N], int V, bool whole)
{
    kn_walk<N> w = kn_walk_make(a);
    int last = w.ndim - 1;
    bool fits = w.ndim > 0 && w.count >= V && ((w.ndim == 1 && !whole) || w.shape[last] % V == 0);
    for (int k = 0; k < N && fits; k++)
        fits = kn_span_fits(w, k, a[k], V);
    V = fits ? V : 1;
    s.count = w.count;
    s.begin = 0;
    s.vectors = w.count / V;
    s.ndim = w.ndim;
    s.small = w.count < INT32_MAX;
    for (int d = 0; d < KN_MAX_DIMS; d++) {
        s.shape[d] = d == last ? w.shape[d] / V : w.shape[d];
        for (int k = 0; k < N; k++)
            s.stride[k][d] = d == last ? w.stride[k][d] * V : w.stride[k][d];
    }
    for (int k = 0; k < N; k++)
        s.repeat[k] = w.ndim > 0 && w.stride[k][last] == 0;
    return V;
}

/* Offsets of vector i. */
template <int N>
static inline __device__ void kn_span_at(const kn_span<N> &s, int64_t i, int64_t (&at)[N])
{
    for (int k = 0; k < N; k++)
        at[k] = 0;
    if (s.small) {
        uint32_t j = (uint32_t)i;
#pragma unroll 1
        for (int d = s.ndim - 1; d > 0; d--) {
            uint32_t n = (uint32_t)s.shape[d], q = j / n, r = j - q * n;
            for (int k = 0; k < N; k++)
                at[k] += r * s.stride[k][d];
            j = q;
        }
        i = j;
    } else {
#pragma unroll 1
        for (int d = s.ndim - 1; d > 0; d--) {
            int64_t q = i / s.shape[d], r = i - q * s.shape[d];
            for (int k = 0; k < N; k++)
                at[k] += r * s.stride[k][d];
            i = q;
        }
    }
    for (int k = 0; k < N && s.ndim > 0; k++)
        at[k] += i * s.stride[k][0];
}

template <int N, int V, typename Op> KN_KERNEL(256, each_kernel, const kn_span<N> s, const Op op)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            step = (int64_t)gridDim.x * blockDim.x;
    int64_t at[N] = {}, next[N];
    typename Op::template in<V> x = {}, y = {};
    bool loaded = false;
#pragma unroll 1
    for (;; i += step) {
        bool more = i < s.vectors;
        if (more) {
            kn_span_at(s, s.begin + i, next);
            op.template load<V>(next, s.repeat, y);
        }
        if (loaded)
            op.template finish<V>(at, x, (s.begin + i - step) * V);
        if (!more)
            break;
        loaded = true;
        x = y;
        for (int k = 0; k < N; k++)
            at[k] = next[k];
    }
}

/* Runs op over arrays of one shape, V elements a thread where they allow it; what is left over, and
 * arrays that don't allow it, one at a time by `any`, the same operation on other types. */
template <int V, int N, typename Op, typename Any>
static kn_status kn_each(const kn_array *const (&a)[N], const Op &op, const Any &any)
{
    kn_span<N> s;
    int v = kn_span_make(s, a, V, false);
    if (v > 1) {
        kn_status done =
            KN_RUN_FLAT((each_kernel<N, V, Op>), kn_blocks(s.vectors, 256, 2), 256, s, op);
        s.begin = s.vectors * V;
        s.vectors = s.count - s.begin;
        if (done != KN_DONE || s.vectors == 0)
            return done;
        for (int k = 0; k < N; k++)
            s.stride[k][0] = s.repeat[k] ? 0 : 1;
    }
    if (s.vectors == 0)
        return KN_DONE;
    return KN_RUN_FLAT((each_kernel<N, 1, Any>), kn_blocks(s.vectors, 256, 2), 256, s, any);
}
template <int N, typename Any>
static kn_status kn_each(const kn_array *const (&a)[N], const Any &any)
{
    kn_span<N> s;
    kn_span_make(s, a, 1, false);
    if (s.count == 0)
        return KN_DONE;
    return KN_RUN_FLAT((each_kernel<N, 1, Any>), kn_blocks(s.vectors, 256, 2), 256, s, any);
}

/* Runs the operation Op<T>::of(args) on floats of dtype t. */
template <template <typename> class Op, int N, typename... Args>
static kn_status kn_each_float(kn_dtype t, const kn_array *const (&a)[N], Args... args)
{
    switch (t) {
    case KN_F32: return kn_each<4>(a, Op<float>::of(args...), Op<kn_any<float>>::of(args...));
    case KN_BF16: return kn_each<8>(a, Op<kn_bf16>::of(args...), Op<kn_any<float>>::of(args...));
    case KN_F16: return kn_each<8>(a, Op<kn_f16>::of(args...), Op<kn_any<float>>::of(args...));
    case KN_F64: return kn_each(a, Op<double>::of(args...));
    default: return KN_DECLINED;
    }
}

#endif
