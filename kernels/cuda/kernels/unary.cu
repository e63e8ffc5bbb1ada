/* kernels/cuda/kernels/unary.cu: dst = f(src), and dx = dy * f'(x). Floor of f: two arrays' bytes
 * once; the dearest function (pow) still computes faster than its bytes arrive. Floor of f': three
 * arrays' bytes once (NEG, AFFINE: two), since of x and y only what the kind's row says is read. */
#include "kernels/cuda/kernels/formulas.cuh"

namespace
{
#define LONG_FORMULA(kind, name, function, reads, dtypes, domain, work, formula, gradient)         \
    KN_ROLLED_##work(KN_##kind, formula)
#define LONG_GRADIENT(kind, name, function, reads, dtypes, domain, work, formula, gradient)        \
    KN_ROLLED_##work(KN_##kind, gradient)
#define EACH_FORMULA(kind, name, function, reads, dtypes, domain, work, formula, gradient)         \
    KN_UNROLLED_##work(KN_##kind, const A x = u[v]; u[v] = (formula))
#define EACH_GRADIENT(kind, name, function, reads, dtypes, domain, work, formula, gradient)        \
    KN_UNROLLED_##work(KN_##kind, const A d = g[v]; const A x = u[v]; const A y = x;               \
                       (void)d; (void)y; g[v] = (gradient))

template <typename T> struct unary_op {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dst, src;
    kn_unary kind;
    A p0, p1;

    __device__ A of_long(A x) const
    {
        switch (kind) {
            KN_UNARY_KINDS(LONG_FORMULA)
        default:
            return x;
        }
    }
    template <int V> using in = kn_pack<T, V>;
    template <int V> __device__ void load(const int64_t (&at)[2], const bool *repeat, in<V> &x) const
    {
        x = kn_load<V>(src + at[1], repeat[1]);
    }
    /* The kind is looked at once a vector. */
    template <int V> __device__ void finish(const int64_t (&at)[2], const in<V> &from, int64_t) const
    {
        A u[V];
        kn_widen(from, u);
        switch (kind) {
            KN_UNARY_KINDS(EACH_FORMULA)
        default:
            kn_rolled(u, [this](A x) { return of_long(x); });
        }
        kn_save_wide<V>(dst + at[0], u);
    }
};

/* Integers wrap around. */
struct unary_int_op {
    kn_any_at<int64_t> dst, src;
    kn_unary kind;
    int64_t p0, p1;

    template <int V> using in = kn_pack<kn_any<int64_t>, V>;
    template <int V> __device__ void load(const int64_t (&at)[2], const bool *repeat, in<V> &x) const
    {
        x = kn_load<V>(src + at[1], repeat[1]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[2], const in<V> &from, int64_t) const
    {
        int64_t x[V] = { kn_int_unary(kind, kn_read(from.x[0]), p0, p1) };
        kn_save_wide<V>(dst + at[0], x);
    }
};

template <typename T> unary_op<T> unary_of(const kn_unary_args *a)
{
    typedef typename kn_wide<T>::type A;
    return { kn_kept<T>::of(&a->dst), kn_kept<T>::of(&a->src), a->kind, (A)a->p0, (A)a->p1 };
}

template <typename T> kn_status floats(const kn_unary_args *a)
{
    const kn_array *const arrays[] = { &a->dst, &a->src };
    return kn_each<16 / sizeof(T)>(arrays, unary_of<T>(a), unary_of<kn_any<float>>(a));
}
} // namespace

extern "C" kn_status kn_cuda_unary(const void *args)
{
    const kn_unary_args *a = (const kn_unary_args *)args;
    const kn_array *const arrays[] = { &a->dst, &a->src };
    switch (a->src.dtype) {
    case KN_F32:
        return floats<float>(a);
    case KN_BF16:
        return floats<kn_bf16>(a);
    case KN_F16:
        return floats<kn_f16>(a);
    case KN_F64:
        return kn_each(arrays, unary_of<double>(a));
    case KN_I64:
    case KN_I32:
    case KN_U8:
    case KN_BOOL:
        return kn_each(arrays, unary_int_op{ kn_kept<kn_any<int64_t>>::of(&a->dst),
                                             kn_kept<kn_any<int64_t>>::of(&a->src), a->kind,
                                             kn_int_param(a->p0), kn_int_param(a->p1) });
    default:
        return KN_DECLINED;
    }
}

/* ---- derivatives ---- */

namespace
{
template <typename T> struct unary_grad_op {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dx, dy, from; /* the last, x or y, only where read */
    kn_unary kind;
    bool reads;
    A p0, p1;

    __device__ A of_long(A d, A x) const
    {
        const A y = x;
        switch (kind) {
            KN_UNARY_KINDS(LONG_GRADIENT)
        default:
            return y;
        }
    }
    template <int V> struct in {
        kn_pack<T, V> g, u;
    };
    template <int V> __device__ void load(const int64_t (&at)[3], const bool *repeat, in<V> &r) const
    {
        r.g = r.u = kn_load<V>(dy + at[1], repeat[1]);
        if (reads)
            r.u = kn_load<V>(from + at[2], repeat[2]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[3], const in<V> &r, int64_t) const
    {
        A g[V], u[V];
        kn_widen(r.g, g);
        kn_widen(r.u, u);
        switch (kind) {
            KN_UNARY_KINDS(EACH_GRADIENT)
        default:
            kn_rolled(g, u, [this](A d, A x) { return of_long(d, x); });
        }
        kn_save_wide<V>(dx + at[0], g);
    }
};

template <typename T> unary_grad_op<T> grad_of(const kn_unary_grad_args *a, const kn_array *in)
{
    typedef typename kn_wide<T>::type A;
    return { kn_kept<T>::of(&a->dx), kn_kept<T>::of(&a->dy), kn_kept<T>::of(in), a->kind,
             in != &a->dy,           (A)a->p0,               (A)a->p1 };
}
} // namespace

extern "C" kn_status kn_cuda_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = (const kn_unary_grad_args *)args;
    const kn_array *in = kn_unary_grad_input(a);
    const kn_array *const arrays[] = { &a->dx, &a->dy, in };
#define CASE(T)                                                                                    \
    return kn_each<16 / sizeof(T)>(arrays, grad_of<T>(a, in), grad_of<kn_any<float>>(a, in))
    switch (a->dx.dtype) {
    case KN_F32: CASE(float);
    case KN_BF16: CASE(kn_bf16);
    case KN_F16: CASE(kn_f16);
    default: return kn_each(arrays, grad_of<double>(a, in));
    }
#undef CASE
}
