/* kernels/cuda/kernels/binary.cu: dst = a op b, and dst = cond ? a : b. Floor: every array's bytes
 * once; broadcast arrays come from the cache. */
#include "kernels/cuda/kernels/formulas.cuh"

namespace
{
/* f(a, b) of a whole vector; comparisons give 0 and 1. */
#define EACH(kind, name, function, reads, dtypes, domain, work, formula)                           \
    KN_UNROLLED_##work(KN_##kind, const A a = x[v]; const A b = y[v]; z[v] = (formula))
#define LONG(kind, name, function, reads, dtypes, domain, work, formula)                           \
    KN_ROLLED_##work(KN_##kind, formula)

template <int V, typename A>
__device__ void compared(kn_binary kind, const A (&x)[V], const A (&y)[V], int64_t (&z)[V])
{
    switch (kind) {
        KN_COMPARISON_KINDS(EACH)
    default:
        break;
    }
}

template <typename A> __device__ A of_long(kn_binary kind, A a, A b)
{
    switch (kind) {
        KN_ARITHMETIC_KINDS(LONG)
    default:
        return a;
    }
}

template <int V, typename A>
__device__ void computed(kn_binary kind, A p0, A (&x)[V], A (&y)[V], A (&z)[V])
{
    switch (kind) {
        KN_ARITHMETIC_KINDS(EACH)
    default:
        kn_rolled(x, y, [kind](A a, A b) { return of_long(kind, a, b); });
#pragma unroll
        for (int v = 0; v < V; v++)
            z[v] = x[v];
    }
}

__device__ void computed(kn_binary kind, int64_t, int64_t (&x)[1], int64_t (&y)[1], int64_t (&z)[1])
{
    z[0] = kn_int_arithmetic(kind, x[0], y[0]);
}

template <typename T> struct binary_op {
    typedef typename kn_wide<T>::type A;
    void *dst; /* bool for comparisons, else like a */
    typename kn_kept<T>::type same, a, b;
    kn_binary kind;
    A p0;

    static binary_op of(const kn_binary_args *p)
    {
        return { p->dst.data,           kn_kept<T>::of(&p->dst), kn_kept<T>::of(&p->a),
                 kn_kept<T>::of(&p->b), p->kind,                 (A)p->p0 };
    }
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

} // namespace

extern "C" kn_status kn_cuda_binary(const void *args)
{
    const kn_binary_args *p = (const kn_binary_args *)args;
    const kn_array *const arrays[] = { &p->dst, &p->a, &p->b };
    return kn_dtype_is_float(p->a.dtype) ? kn_each_float<binary_op>(p->a.dtype, arrays, p)
                                         : kn_each(arrays, binary_op<kn_any<int64_t>>::of(p));
}

extern "C" kn_status kn_cuda_where(const void *args)
{
    const kn_where_args *a = (const kn_where_args *)args;
    const kn_array *const arrays[] = { &a->dst, &a->cond, &a->a, &a->b };
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
