/* kernels/cuda/kernels/unary_grad.cu: dx = dy * f'(x), of the input x or the output y = f(x), whichever
 * kn_unary_needs names; the other one is not read. Floor: three arrays' bytes once (NEG, AFFINE: two). */
#include "kernels/cuda/kernels/elements.cuh"

namespace
{
template <typename A> __device__ A sigmoid(A x)
{
    return 1 / kn_add_rn((A)1, exp(-x));
}

/* With s = sigmoid(2u), u = c (x + k x^3): 0.5 x (1 + tanh u) = x s, whose derivative is
 * s (1 + x (1 - s) 2u'). Beyond 30 it is 0 or 1 in every dtype, and x^2 might overflow. */
template <typename A> __device__ A gelu_tanh_slope(A x)
{
    const double c = 2 * 0.79788456080286535588, k = 0.044715;
    x = x > 30 ? 30 : x < -30 ? -30 : x;
    A x2 = kn_mul_rn(x, x);
    A s = sigmoid(kn_mul_rn(x, kn_fma_rn((A)(c * k), x2, (A)c)));
    A slope = kn_fma_rn((A)(3 * c * k), x2, (A)c);
    return kn_mul_rn(s, kn_fma_rn(kn_mul_rn(x, 1 - s), slope, (A)1));
}

/* Phi(x) + x phi(x). */
template <typename A> __device__ A gelu_erf_slope(A x)
{
    A density = kn_mul_rn((A)0.39894228040143267794, exp(kn_mul_rn(kn_mul_rn((A)-0.5, x), x)));
    A above = kn_mul_rn((A)0.5, erfc(-x * (A)0.70710678118654752440));
    return kn_fma_rn(x, density, above);
}

template <typename A> __device__ A silu_slope(A x)
{
    A s = sigmoid(x);
    return kn_mul_rn(s, kn_fma_rn(x, 1 - s, (A)1));
}

template <typename T> struct unary_grad_op {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dx, dy, x_in, y_in; /* the latter only where needed */
    kn_unary kind;
    bool needs_x, needs_y;
    double p0, p1;

    /* f'(x) */
    __device__ A rare(A x) const
    {
        switch (kind) {
        case KN_GELU:
            return gelu_erf_slope(x);
        case KN_SIN:
            return cos(x);
        case KN_COS:
            return -sin(x);
        case KN_POW:
            return p0 == 0 ? (A)0 : (A)p0 * pow(x, (A)(p0 - 1));
        case KN_ABS:
            return x != x ? x : (A)((x > 0) - (x < 0));
        default: /* KN_CLAMP; has_slope() lists the others */
            return (double)x >= p0 && (double)x <= p1 ? 1 : 0;
        }
    }
    template <int V> struct in {
        kn_pack<T, V> g, x, y;
    };
    template <int V> __device__ void load(const int64_t (&at)[4], const bool *repeat, in<V> &r) const
    {
        r.g = r.x = r.y = kn_load<V>(dy + at[1], repeat[1]);
        if (needs_x)
            r.x = kn_load<V>(x_in + at[2], repeat[2]);
        if (needs_y)
            r.y = kn_load<V>(y_in + at[3], repeat[3]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[4], const in<V> &r, int64_t) const
    {
        A g[V], x[V], y[V];
        kn_widen(r.g, g);
        kn_widen(r.x, x);
        kn_widen(r.y, y);
#define EACH(d)                                                                                    \
    _Pragma("unroll") for (int v = 0; v < V; v++) g[v] = kn_mul_rn(g[v], (A)(d));                  \
    break
        switch (kind) {
        case KN_NEG: EACH(-1);
        case KN_EXP: EACH(y[v]);
        case KN_LOG: EACH(1 / x[v]);
        case KN_SQRT: EACH((A)0.5 / y[v]);
        case KN_RSQRT: EACH((A)-0.5 * y[v] * y[v] * y[v]);
        case KN_RECIP: EACH(-y[v] * y[v]);
        case KN_TANH: EACH(kn_fma_rn(-y[v], y[v], (A)1));
        case KN_SIGMOID: EACH(y[v] * (1 - y[v]));
        case KN_RELU: EACH(y[v] > 0 ? 1 : 0);
        case KN_GELU_TANH: EACH(gelu_tanh_slope(x[v]));
        case KN_SILU: EACH(silu_slope(x[v]));
        case KN_AFFINE: EACH(p0);
        default:
            kn_rolled(x, [this](A u) { return rare(u); });
            EACH(x[v]);
        }
#undef EACH
        kn_save_wide<V>(dx + at[0], g);
    }
};

/* No default: the compiler asks about a new kind, which is nobody's till then. */
bool has_slope(kn_unary kind)
{
    switch (kind) {
    case KN_NEG:
    case KN_ABS:
    case KN_EXP:
    case KN_LOG:
    case KN_SQRT:
    case KN_RSQRT:
    case KN_RECIP:
    case KN_TANH:
    case KN_SIGMOID:
    case KN_RELU:
    case KN_GELU_TANH:
    case KN_GELU:
    case KN_SILU:
    case KN_SIN:
    case KN_COS:
    case KN_AFFINE:
    case KN_POW:
    case KN_CLAMP:
        return true;
    case KN_NOT:
    case KN_UNARY_COUNT:
        break;
    }
    return false;
}

template <typename T>
unary_grad_op<T> grad_of(const kn_unary_grad_args *a, const kn_array *x, const kn_array *y, int needs)
{
    return { kn_kept<T>::of(&a->dx), kn_kept<T>::of(&a->dy), kn_kept<T>::of(x), kn_kept<T>::of(y),
             a->kind,              (needs & 1) != 0,     (needs & 2) != 0, a->p0, a->p1 };
}
} // namespace

extern "C" kn_status kn_cuda_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = (const kn_unary_grad_args *)args;
    int needs = has_slope(a->kind) ? kn_unary_needs(a->kind) : 0;
    const kn_array *x = needs & 1 ? &a->x : &a->dy, *y = needs & 2 ? &a->y : &a->dy;
    if (!has_slope(a->kind) || !kn_dtype_is_float(a->dx.dtype)) {
        kn_fail("unary_grad: kind %d of %s has no derivative", (int)a->kind,
                kn_dtype_name(a->dx.dtype));
        return KN_FAILED;
    }
    if (!kn_same_shape(KN_K_UNARY_GRAD, &a->dx, &a->dy) ||
        !kn_same_shape(KN_K_UNARY_GRAD, &a->dx, x) || !kn_same_shape(KN_K_UNARY_GRAD, &a->dx, y))
        return KN_FAILED;
    const kn_array *const arrays[] = { &a->dx, &a->dy, x, y };
#define CASE(T)                                                                                    \
    return kn_each<16 / sizeof(T)>(arrays, grad_of<T>(a, x, y, needs),                             \
                                   grad_of<kn_any<float>>(a, x, y, needs))
    switch (a->dx.dtype) {
    case KN_F32: CASE(float);
    case KN_BF16: CASE(kn_bf16);
    case KN_F16: CASE(kn_f16);
    default: return kn_each(arrays, grad_of<double>(a, x, y, needs));
    }
#undef CASE
}
