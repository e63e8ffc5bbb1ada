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

template <typename T> struct unary_op : kn_of_one<T> {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dst;
    kn_unary kind;
    A p0, p1;

    static unary_op of(const kn_unary_args *a)
    {
        return { { kn_kept<T>::of(&a->src) }, kn_kept<T>::of(&a->dst), a->kind, (A)a->p0, (A)a->p1 };
    }
    __device__ A of_long(A x) const
    {
        switch (kind) {
            KN_UNARY_KINDS(LONG_FORMULA)
        default:
            return x;
        }
    }
    /* The kind is looked at once a vector. */
    template <int V>
    __device__ void finish(const int64_t (&at)[2], const kn_pack<T, V> &from, int64_t) const
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
struct unary_int_op : kn_of_one<kn_any<int64_t>> {
    kn_any_at<int64_t> dst;
    kn_unary kind;
    int64_t p0, p1;

    template <int V> __device__ void finish(const int64_t (&at)[2], const in<V> &from, int64_t) const
    {
        int64_t x[V] = { kn_int_unary(kind, kn_read(from.x[0]), p0, p1) };
        kn_save_wide<V>(dst + at[0], x);
    }
};

} // namespace

extern "C" kn_status kn_cuda_unary(const void *args)
{
    const kn_unary_args *a = (const kn_unary_args *)args;
    const kn_array *const arrays[] = { &a->dst, &a->src };
    const kn_dtype t = a->src.dtype;
    if (t != KN_I64 && t != KN_I32 && t != KN_U8 && t != KN_BOOL)
        return kn_each_float<unary_op>(t, arrays, a);
    return kn_each(arrays, unary_int_op{ { kn_kept<kn_any<int64_t>>::of(&a->src) },
                                         kn_kept<kn_any<int64_t>>::of(&a->dst), a->kind,
                                         kn_int_param(a->p0), kn_int_param(a->p1) });
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

    static unary_grad_op of(const kn_unary_grad_args *a, const kn_array *in)
    {
        return { kn_kept<T>::of(&a->dx), kn_kept<T>::of(&a->dy), kn_kept<T>::of(in), a->kind,
                 in != &a->dy,           (A)a->p0,               (A)a->p1 };
    }
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
} // namespace

extern "C" kn_status kn_cuda_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = (const kn_unary_grad_args *)args;
    const kn_array *in = kn_unary_grad_input(a);
    const kn_array *const arrays[] = { &a->dx, &a->dy, in };
    return kn_each_float<unary_grad_op>(a->dx.dtype, arrays, a, in);
}
