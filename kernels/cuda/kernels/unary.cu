/* kernels/cuda/kernels/unary.cu: dst = f(src). Floor: two arrays' bytes once; the dearest function (pow) still
 * computes faster than its bytes arrive. */
#include "kernels/cuda/kernels/elements.cuh"

namespace
{

/* y = x / (1 + exp(-u)). */
template <typename A> __device__ A gated(A x, A u)
{
    return x / kn_add_rn((A)1, exp(-u));
}

/* 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3). */
template <typename A> __device__ A gelu_tanh(A x)
{
    const double two_c = 2 * 0.79788456080286535588;
    A t = kn_fma_rn((A)(two_c * 0.044715), kn_mul_rn(x, x), (A)two_c);
    return gated(x, kn_mul_rn(x, t));
}

template <typename T> struct unary_op {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dst, src;
    kn_unary kind;
    A p0, p1;

    __device__ A rare(A x) const
    {
        switch (kind) {
        case KN_LOG:
            return log(x);
        case KN_GELU:
            return kn_mul_rn((A)0.5, x) * erfc(-x * (A)0.70710678118654752440);
        case KN_SIN:
            return sin(x);
        case KN_COS:
            return cos(x);
        case KN_POW:
            return pow(x, p0);
        default: /* KN_CLAMP; takes() lists the others */
            return x != x ? x : fmin(fmax(x, p0), p1);
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
        A x[V];
        kn_widen(from, x);
#define EACH(f)                                                                                    \
    _Pragma("unroll") for (int v = 0; v < V; v++) x[v] = (f);                                      \
    break
        switch (kind) {
        case KN_NEG: EACH(-x[v]);
        case KN_ABS: EACH(fabs(x[v]));
        case KN_EXP: EACH(exp(x[v]));
        case KN_SQRT: EACH(sqrt(x[v]));
        case KN_RSQRT: EACH(1 / sqrt(x[v]));
        case KN_RECIP: EACH(1 / x[v]);
        case KN_TANH: EACH(tanh(x[v]));
        case KN_SIGMOID: EACH(gated((A)1, x[v]));
        case KN_RELU: EACH(x[v] > 0 || x[v] != x[v] ? x[v] : 0);
        case KN_GELU_TANH: EACH(gelu_tanh(x[v]));
        case KN_SILU: EACH(gated(x[v], x[v]));
        case KN_AFFINE: EACH(kn_fma_rn(p0, x[v], p1));
        default: kn_rolled(x, [this](A y) { return rare(y); }); break;
        }
#undef EACH
        kn_save_wide<V>(dst + at[0], x);
    }
};

/* Integers wrap around. */
struct unary_int_op {
    kn_any_at<int64_t> dst, src;
    kn_unary kind;
    int64_t p0, p1;

    __device__ int64_t f(int64_t x) const
    {
        switch (kind) {
        case KN_NEG:
            return (int64_t)(0 - (uint64_t)x);
        case KN_ABS:
            return x < 0 ? (int64_t)(0 - (uint64_t)x) : x;
        case KN_AFFINE:
            return (int64_t)((uint64_t)p0 * (uint64_t)x + (uint64_t)p1);
        case KN_CLAMP:
            x = x > p0 ? x : p0;
            return x < p1 ? x : p1;
        default: /* KN_NOT */
            return !x;
        }
    }
    template <int V> using in = kn_pack<kn_any<int64_t>, V>;
    template <int V> __device__ void load(const int64_t (&at)[2], const bool *repeat, in<V> &x) const
    {
        x = kn_load<V>(src + at[1], repeat[1]);
    }
    template <int V> __device__ void finish(const int64_t (&at)[2], const in<V> &from, int64_t) const
    {
        int64_t x[V] = { f(kn_read(from.x[0])) };
        kn_save_wide<V>(dst + at[0], x);
    }
};

int64_t int_param(double p)
{
    return p <= -0x1p63 ? INT64_MIN : p >= 0x1p63 ? INT64_MAX : (int64_t)p;
}

/* No default: the compiler asks about a new kind, which is nobody's till then. */
bool takes(kn_unary kind, kn_dtype t)
{
    const bool is_float = kn_dtype_is_float(t);
    switch (kind) {
    case KN_NEG:
    case KN_ABS:
    case KN_AFFINE:
    case KN_CLAMP:
        return is_float || t == KN_I64 || t == KN_I32 || t == KN_U8 || t == KN_BOOL;
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
    case KN_POW:
        return is_float;
    case KN_NOT:
        return t == KN_BOOL;
    case KN_UNARY_COUNT:
        break;
    }
    return false;
}

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
    if (!kn_same_shape(KN_K_UNARY, &a->dst, &a->src))
        return KN_FAILED;
    if (a->dst.dtype != a->src.dtype || !takes(a->kind, a->src.dtype)) {
        kn_fail("unary: kind %d from %s to %s is not supported; floats take every kind but NOT, "
                "integers NEG, ABS, AFFINE and CLAMP, bool NOT, all into their own dtype",
                (int)a->kind, kn_dtype_name(a->src.dtype), kn_dtype_name(a->dst.dtype));
        return KN_FAILED;
    }
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
                                             int_param(a->p0), int_param(a->p1) });
    default:
        return KN_DECLINED;
    }
}
