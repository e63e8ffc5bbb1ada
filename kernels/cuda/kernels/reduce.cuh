/* kernels/cuda/kernels/reduce.cuh (private): the states of reductions, and how results are stored. */
#ifndef KNAP_KERNELS_CUDA_REDUCE_CUH
#define KNAP_KERNELS_CUDA_REDUCE_CUH

#include "kernels/cuda/kernels/rows.cuh"

#define LAST INT64_MAX /* where nothing has been seen */

/* ---- folds -------------------------------------------------------------------------- */

/* Each has the state S of a fold, its start, one more element, and two
 * states joined; `at` is the position among the folded elements. V: what
 * elements load to: f32, f64 or i64. */
struct sum_floats {
    typedef double S;
    static __device__ S start(void)
    {
        return 0;
    }
    template <typename V> static __device__ void add(S &s, V x, int64_t, bool)
    {
        s += (S)x;
    }
    static __device__ void join(S &s, const S &t)
    {
        s += t;
    }
};

struct sum_ints {
    typedef int64_t S;
    static __device__ S start(void)
    {
        return 0;
    }
    static __device__ void add(S &s, int64_t x, int64_t, bool)
    {
        s = (S)((uint64_t)s + (uint64_t)x);
    }
    static __device__ void join(S &s, const S &t)
    {
        add(s, t, 0, false);
    }
};

template <typename V> struct extreme_state {
    V best;
    int64_t where;
};

/* Turns the order round, exactly; twice is nothing. */
template <typename V> static __device__ inline V flipped(V x)
{
    return -x;
}
static __device__ inline int64_t flipped(int64_t x)
{
    return ~x;
}

/* The greatest: NaN beats everything, of equals the first stays. KN_MIN is the greatest of
 * `flipped`. */
template <typename V> struct greatest {
    typedef extreme_state<V> S;
    static __device__ S start(void)
    {
        return { -row_infinity<V>(), LAST };
    }
    static __device__ void add(S &s, V x, int64_t at, bool smallest)
    {
        join(s, { smallest ? flipped(x) : x, at });
    }
    static __device__ void join(S &s, const S &t)
    {
        bool beats = s.best == s.best && (t.best != t.best || t.best > s.best);
        bool same = t.best == s.best || (t.best != t.best && s.best != s.best);
        if (beats || (same && t.where < s.where))
            s = t;
    }
};
template <> inline __device__ extreme_state<int64_t> greatest<int64_t>::start(void)
{
    return { INT64_MIN, LAST };
}

/* Neighbours in src of which a thread takes one after the other, so that the order of additions is
 * the same wherever src lies; only where all units are 16 aligned bytes of a dtype of at most 4
 * they are moved at once. One for integers. */
enum { MOST_UNIT = 8 };

static inline int fold_unit(kn_dtype t)
{
    return kn_dtype_is_float(t) ? 16 / (int)kn_dtype_size(t) : 1;
}

template <typename T, int N> static __device__ inline void load_unit(const T *p, float (&x)[N])
{
    row_chunk<T> chunk = *(const row_chunk<T> *)p;
    for (int i = 0; i < N; i++)
        x[i] = kn_get(chunk.at + i);
}

/* src's elements at, at + stride, ... (n <= MOST_UNIT), of any dtype of V's kind. */
template <typename T, typename V>
static __device__ inline void load_as(const void *src, int64_t at, int64_t stride, int n, V (&x)[MOST_UNIT])
{
#pragma unroll
    for (int i = 0; i < MOST_UNIT; i++)
        if (i < n)
            x[i] = (V)kn_get((const T *)src + at + i * stride);
}
static __device__ inline void load_any(const void *src, kn_dtype t, int64_t at, int64_t stride, int n,
                                       double (&x)[MOST_UNIT])
{
    if (t == KN_F32)
        load_as<float>(src, at, stride, n, x);
    else if (t == KN_BF16)
        load_as<kn_bf16>(src, at, stride, n, x);
    else if (t == KN_F16)
        load_as<kn_f16>(src, at, stride, n, x);
    else
        load_as<double>(src, at, stride, n, x);
}
static __device__ inline void load_any(const void *src, kn_dtype t, int64_t at, int64_t, int,
                                       int64_t (&x)[MOST_UNIT])
{
    if (t == KN_I64)
        x[0] = ((const int64_t *)src)[at];
    else if (t == KN_I32)
        x[0] = ((const int32_t *)src)[at];
    else
        x[0] = ((const uint8_t *)src)[at];
}

/* ---- storing --------------------------------------------------------------------------------- */

struct reduce_out {
    void *data;
    kn_dtype dtype;
    kn_reduce_kind kind;
    bool ints; /* of integers */
    int64_t length;
};

static __device__ inline int64_t saturated(double x, double low, double high)
{
    if (x != x)
        return 0;
    if (x >= 9223372036854775807.0 && high >= 9223372036854775807.0)
        return INT64_MAX;
    return (int64_t)(x < low ? low : x > high ? high : x);
}

static __device__ inline void store_float(const reduce_out &o, int64_t at, double x)
{
    switch (o.dtype) {
    case KN_F32:
        ((float *)o.data)[at] = (float)x;
        break;
    case KN_BF16:
        kn_put((kn_bf16 *)o.data + at, (float)x);
        break;
    case KN_F16:
        kn_put((kn_f16 *)o.data + at, (float)x);
        break;
    case KN_F64:
        ((double *)o.data)[at] = x;
        break;
    case KN_I64:
        ((int64_t *)o.data)[at] = saturated(x, -0x1p63, 0x1p63);
        break;
    case KN_I32:
        ((int32_t *)o.data)[at] = (int32_t)saturated(x, -0x1p31, 0x1p31 - 1);
        break;
    case KN_U8:
        ((uint8_t *)o.data)[at] = (uint8_t)saturated(x, 0, 255);
        break;
    default:
        ((uint8_t *)o.data)[at] = x != 0;
        break;
    }
}

static __device__ inline void store_int(const reduce_out &o, int64_t at, int64_t x)
{
    switch (o.dtype) {
    case KN_I64:
        ((int64_t *)o.data)[at] = x;
        break;
    case KN_I32:
        ((int32_t *)o.data)[at] = (int32_t)x;
        break;
    case KN_U8:
        ((uint8_t *)o.data)[at] = (uint8_t)x;
        break;
    case KN_BOOL:
        ((uint8_t *)o.data)[at] = x != 0;
        break;
    default:
        store_float(o, at, (double)x);
    }
}

static __device__ inline void store_state(const reduce_out &o, int64_t at, double sum)
{
    store_float(o, at, o.kind == KN_MEAN ? sum / (double)o.length : sum);
}
static __device__ inline void store_state(const reduce_out &o, int64_t at, int64_t sum)
{
    if (o.kind == KN_MEAN)
        store_float(o, at, (double)sum / (double)o.length);
    else
        store_int(o, at, sum);
}
template <typename V>
static __device__ inline void store_state(const reduce_out &o, int64_t at,
                                          const extreme_state<V> &s)
{
    if (o.kind == KN_ARGMAX)
        store_int(o, at, s.where == LAST ? 0 : s.where);
    else if (o.length == 0)
        store_float(o, at, o.kind == KN_MAX ? -(double)INFINITY : (double)INFINITY);
    else if (o.ints)
        store_int(o, at, (int64_t)(o.kind == KN_MIN ? flipped(s.best) : s.best));
    else
        store_float(o, at, (double)(o.kind == KN_MIN ? flipped(s.best) : s.best));
}

#endif
