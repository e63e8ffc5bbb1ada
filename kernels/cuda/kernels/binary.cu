/* kernels/cuda/kernels/binary.cu: dst = a op b, and dst = cond ? a : b. Floor: every array's bytes
 * once; broadcast arrays come from the cache. */
#include "kernels/cuda/kernels/elements.cuh"

namespace
{
/* f(a, b) of a whole vector; comparisons give 0 and 1. */
template <int V, typename A>
__device__ void compared(kn_binary kind, const A (&a)[V], const A (&b)[V], int64_t (&y)[V])
{
#define EACH_DO(...)                                                                               \
    _Pragma("unroll") for (int v = 0; v < V; v++) __VA_ARGS__
#define EACH(f)                                                                                    \
    EACH_DO(y[v] = (f));                                                                           \
    break
    switch (kind) {
    case KN_EQ: EACH(a[v] == b[v]);
    case KN_NE: EACH(a[v] != b[v]);
    case KN_LT: EACH(a[v] < b[v]);
    case KN_LE: EACH(a[v] <= b[v]);
    case KN_GT: EACH(a[v] > b[v]);
    case KN_GE: EACH(a[v] >= b[v]);
    case KN_AND: EACH(a[v] != 0 && b[v] != 0);
    case KN_OR: EACH(a[v] != 0 || b[v] != 0);
    default: EACH((a[v] != 0) != (b[v] != 0)); /* KN_XOR */
    }
}

/* MAXIMUM and MINIMUM of anything with NaN are NaN. */
template <int V, typename A>
__device__ void computed(kn_binary kind, A p0, const A (&a)[V], const A (&b)[V], A (&y)[V])
{
    switch (kind) {
    case KN_ADD: EACH(a[v] + b[v]);
    case KN_SUB: EACH(a[v] - b[v]);
    case KN_MUL: EACH(a[v] * b[v]);
    case KN_DIV: EACH(a[v] / b[v]);
    case KN_MAXIMUM: EACH(a[v] != a[v] || a[v] > b[v] ? a[v] : b[v]);
    case KN_MINIMUM: EACH(a[v] != a[v] || a[v] < b[v] ? a[v] : b[v]);
    case KN_ADD_SCALED: EACH(kn_fma_rn(p0, b[v], a[v]));
    case KN_LERP: /* from the nearer end, so that both ends are exact */
        EACH(p0 < (A)0.5 ? kn_fma_rn(p0, b[v] - a[v], a[v]) : kn_fma_rn(p0 - 1, b[v] - a[v], b[v]));
    default: { /* KN_POWER: long, so one in a loop; both turn round together */
        A u[V];
        EACH_DO(u[v] = a[v], y[v] = b[v]);
        kn_rolled(y, [&u](A e) {
            A r = pow(u[0], e);
#pragma unroll
            for (int k = 0; k + 1 < V; k++)
                u[k] = u[k + 1];
            return r;
        });
    }
    }
}

static __device__ int64_t divided(int64_t a, int64_t b)
{
    if (b == -1) /* INT64_MIN / -1 overflows */
        return (int64_t)(0 - (uint64_t)a);
    return b == 0 ? 0 : a / b;
}

/* Integers wrap around; x / 0 is 0. */
__device__ void computed(kn_binary kind, int64_t, const int64_t (&a)[1], const int64_t (&b)[1],
                         int64_t (&y)[1])
{
    enum { V = 1 };
    switch (kind) {
    case KN_ADD: EACH((int64_t)((uint64_t)a[v] + (uint64_t)b[v]));
    case KN_SUB: EACH((int64_t)((uint64_t)a[v] - (uint64_t)b[v]));
    case KN_MUL: EACH((int64_t)((uint64_t)a[v] * (uint64_t)b[v]));
    case KN_DIV: EACH(divided(a[v], b[v]));
    case KN_MAXIMUM: EACH(a[v] > b[v] ? a[v] : b[v]);
    default: EACH(a[v] < b[v] ? a[v] : b[v]); /* KN_MINIMUM */
    }
#undef EACH
#undef EACH_DO
}

template <typename T> struct binary_op {
    typedef typename kn_wide<T>::type A;
    void *dst; /* bool for comparisons, else like a */
    typename kn_kept<T>::type same, a, b;
    kn_binary kind;
    A p0;

    template <int V> struct in {
        kn_pack<T, V> x, y;
    };
    template <int V> __device__ void load(const int64_t (&at)[3], const bool *repeat, in<V> &r) const
    {
        r.x = kn_load<V>(a + at[1], repeat[1]);
        r.y = kn_load<V>(b + at[2], repeat[2]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[3], const in<V> &r, int64_t) const
    {
        A x[V], y[V];
        kn_widen(r.x, x);
        kn_widen(r.y, y);
        if (kind >= KN_EQ) {
            int64_t z[V];
            compared(kind, x, y, z);
            kn_save_wide<V>((kn_bool *)dst + at[0], z);
        } else {
            A z[V];
            computed(kind, p0, x, y, z);
            kn_save_wide<V>(same + at[0], z);
        }
    }
};

template <typename T> struct where_op {
    T *dst;
    const kn_bool *cond;
    const T *a, *b;

    template <int V> struct in {
        kn_pack<kn_bool, V> c;
        kn_pack<T, V> x, y;
    };
    template <int V> __device__ void load(const int64_t (&at)[4], const bool *repeat, in<V> &r) const
    {
        r.c = kn_load<V>(cond + at[1], repeat[1]);
        r.x = kn_load<V>(a + at[2], repeat[2]);
        r.y = kn_load<V>(b + at[3], repeat[3]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[4], const in<V> &r, int64_t) const
    {
        kn_pack<T, V> z;
#pragma unroll
        for (int v = 0; v < V; v++)
            z.x[v] = r.c.x[v].bits ? r.x.x[v] : r.y.x[v];
        kn_save<V>(dst + at[0], z);
    }
};

template <typename T> where_op<T> where_of(const kn_where_args *a)
{
    return { (T *)a->dst.data, (const kn_bool *)a->cond.data, (const T *)a->a.data, (const T *)a->b.data };
}

template <typename T> binary_op<T> binary_of(const kn_binary_args *p)
{
    return { p->dst.data,           kn_kept<T>::of(&p->dst), kn_kept<T>::of(&p->a),
             kn_kept<T>::of(&p->b), p->kind,                 (typename kn_wide<T>::type)p->p0 };
}

kn_status run_binary(const kn_binary_args *p)
{
    const kn_array *const arrays[] = { &p->dst, &p->a, &p->b };
    switch (p->a.dtype) {
    case KN_F32:
        return kn_each<4>(arrays, binary_of<float>(p), binary_of<kn_any<float>>(p));
    case KN_BF16:
        return kn_each<8>(arrays, binary_of<kn_bf16>(p), binary_of<kn_any<float>>(p));
    case KN_F16:
        return kn_each<8>(arrays, binary_of<kn_f16>(p), binary_of<kn_any<float>>(p));
    case KN_F64:
        return kn_each(arrays, binary_of<double>(p));
    default:
        return kn_each(arrays, binary_of<kn_any<int64_t>>(p));
    }
}

/* No default: the compiler warns of a kind that is missing, and none is taken unless it is
 * listed. */
bool takes(kn_binary kind, kn_dtype t, kn_dtype dst)
{
    switch (kind) {
    case KN_ADD:
    case KN_SUB:
    case KN_MUL:
    case KN_DIV:
    case KN_MAXIMUM:
    case KN_MINIMUM:
        return dst == t && kn_dtype_is_arithmetic(t);
    case KN_POWER:
    case KN_ADD_SCALED:
    case KN_LERP:
        return dst == t && kn_dtype_is_float(t);
    case KN_EQ:
    case KN_NE:
    case KN_LT:
    case KN_LE:
    case KN_GT:
    case KN_GE:
        return dst == KN_BOOL && kn_dtype_is_arithmetic(t);
    case KN_AND:
    case KN_OR:
    case KN_XOR:
        return dst == KN_BOOL && t == KN_BOOL;
    case KN_BINARY_COUNT:
        break;
    }
    return false;
}
} // namespace

extern "C" kn_status kn_cuda_binary(const void *args)
{
    const kn_binary_args *p = (const kn_binary_args *)args;
    if (!kn_same_shape(KN_K_BINARY, &p->dst, &p->a) || !kn_same_shape(KN_K_BINARY, &p->dst, &p->b))
        return KN_FAILED;
    if (p->a.dtype != p->b.dtype || !takes(p->kind, p->a.dtype, p->dst.dtype)) {
        kn_fail("binary: %s of %s and %s into %s is not supported; a and b have one dtype, "
                "dst too or, for comparisons and logic, bool",
                kn_binary_row(p->kind)->name, kn_dtype_name(p->a.dtype), kn_dtype_name(p->b.dtype),
                kn_dtype_name(p->dst.dtype));
        return KN_FAILED;
    }
    return run_binary(p);
}

extern "C" kn_status kn_cuda_where(const void *args)
{
    const kn_where_args *a = (const kn_where_args *)args;
    const kn_array *const arrays[] = { &a->dst, &a->cond, &a->a, &a->b };
    if (!kn_same_shape(KN_K_WHERE, &a->dst, &a->cond) ||
        !kn_same_shape(KN_K_WHERE, &a->dst, &a->a) || !kn_same_shape(KN_K_WHERE, &a->dst, &a->b))
        return KN_FAILED;
    if (a->cond.dtype != KN_BOOL || a->a.dtype != a->dst.dtype || a->b.dtype != a->dst.dtype) {
        kn_fail("where: cond is %s and must be bool; a is %s, b is %s, dst is %s and must agree",
                kn_dtype_name(a->cond.dtype), kn_dtype_name(a->a.dtype), kn_dtype_name(a->b.dtype),
                kn_dtype_name(a->dst.dtype));
        return KN_FAILED;
    }
    switch (kn_dtype_size(a->dst.dtype)) {
    case 1:
        return kn_each(arrays, where_of<uint8_t>(a));
    case 2:
        return kn_each<8>(arrays, where_of<uint16_t>(a), where_of<uint16_t>(a));
    case 4:
        return kn_each<4>(arrays, where_of<uint32_t>(a), where_of<uint32_t>(a));
    case 8:
        return kn_each(arrays, where_of<uint64_t>(a));
    default:
        return KN_DECLINED;
    }
}
