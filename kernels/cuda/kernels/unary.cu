/* kernels/cuda/kernels/unary.cu: dst = f(src), and dx = dy * f'(x). Floor of f: two arrays' bytes
 * once; the dearest function (pow) still computes faster than its bytes arrive. Floor of f': three
 * arrays' bytes once (NEG, AFFINE: two), since of x and y only what the kind's row says is read. */
#include "kernels/cuda/kernels/elements.cuh"
#include "kernels/cuda/kernels/exponentials.cuh"

namespace
{

/* x / (1 + exp(-u)). Of f32 within 1.5e-7 |u| and 6 units in the last place. */
__device__ double gated(double x, double u)
{
    return x / kn_add_rn(1.0, exp(-u));
}
__device__ float gated(float x, float u)
{
    return kn_mul_rn(x, kn_reciprocal(kn_add_rn(1.0f, kn_exp_term(-u))));
}

/* s = sigmoid(u) and 1 - s, of f32 without the difference, which would lose all places where s is
 * near 1; u is at least -88. */
__device__ void sigmoids(double u, double &s, double &rest)
{
    s = gated(1.0, u);
    rest = 1 - s;
}
__device__ void sigmoids(float u, float &s, float &rest)
{
    float e = kn_exp_term(-u);
    s = kn_reciprocal(kn_add_rn(1.0f, e));
    rest = kn_mul_rn(e, s);
}

/* 0.5 x (1 + tanh u) = x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3). */
template <typename A> __device__ A gelu_tanh(A x)
{
    const double two_c = 2 * 0.79788456080286535588;
    A t = kn_fma_rn((A)(two_c * 0.044715), kn_mul_rn(x, x), (A)two_c);
    return gated(x, kn_mul_rn(x, t));
}

/* log(1 + e^x) = max(x, 0) + log(1 + e^-|x|); NaN passes. */
template <typename A> __device__ A softplus(A x)
{
    return (x > 0 || x != x ? x : (A)0) + log1p(exp(-fabs(x)));
}

/* x tanh(log(1 + e^x)) */
template <typename A> __device__ A mish(A x)
{
    return x * tanh(softplus(x));
}

template <typename A> __device__ A clamped(A x, A low, A high)
{
    return x != x ? x : fmin(fmax(x, low), high);
}

template <typename A> __device__ A hardsigmoid(A x)
{
    return clamped(x + 3, (A)0, (A)6) / 6;
}

template <typename A> __device__ A sign(A x)
{
    return x != x ? x : (A)((x > 0) - (x < 0));
}

template <typename T> struct unary_op {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dst, src;
    kn_unary kind;
    A p0, p1;

    __device__ A rare(A x) const
    {
        switch (kind) {
        case KN_SIGN:
            return sign(x);
        case KN_FLOOR:
            return floor(x);
        case KN_CEIL:
            return ceil(x);
        case KN_ROUND:
            return rint(x);
        case KN_EXPM1:
            return expm1(x);
        case KN_LOG:
            return log(x);
        case KN_LOG1P:
            return log1p(x);
        case KN_LOG2:
            return log2(x);
        case KN_SIN:
            return sin(x);
        case KN_COS:
            return cos(x);
        case KN_TAN:
            return tan(x);
        case KN_ATAN:
            return atan(x);
        case KN_ERF:
            return erf(x);
        case KN_LOGSIGMOID:
            return -softplus(-x);
        case KN_GELU:
            return kn_mul_rn((A)0.5, x) * erfc(-x * (A)0.70710678118654752440);
        case KN_MISH:
            return mish(x);
        case KN_ELU:
            return x > 0 ? x : p0 * expm1(x);
        case KN_SOFTPLUS:
            return p0 * x > p1 ? x : softplus(p0 * x) / p0;
        case KN_POW:
            return pow(x, p0);
        default: /* KN_CLAMP, KN_HARDTANH; takes() lists the others */
            return clamped(x, p0, p1);
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
        case KN_SQUARE: EACH(x[v] * x[v]);
        case KN_EXP: EACH(exp(x[v]));
        case KN_SQRT: EACH(sqrt(x[v]));
        case KN_RSQRT: EACH(1 / sqrt(x[v]));
        case KN_RECIP: EACH(1 / x[v]);
        case KN_TANH: EACH(tanh(x[v]));
        case KN_SIGMOID: EACH(gated((A)1, x[v]));
        case KN_RELU: EACH(x[v] > 0 || x[v] != x[v] ? x[v] : 0);
        case KN_GELU_TANH: EACH(gelu_tanh(x[v]));
        case KN_SILU: EACH(gated(x[v], x[v]));
        case KN_HARDSIGMOID: EACH(hardsigmoid(x[v]));
        case KN_HARDSWISH: EACH(kn_mul_rn(x[v], hardsigmoid(x[v])));
        case KN_LEAKY_RELU: EACH(x[v] > 0 ? x[v] : p0 * x[v]);
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
        case KN_SIGN:
            return (x > 0) - (x < 0);
        case KN_FLOOR:
        case KN_CEIL:
        case KN_ROUND:
            return x;
        case KN_SQUARE:
            return (int64_t)((uint64_t)x * (uint64_t)x);
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

/* No default: the compiler warns of a kind that is missing, and none is taken unless it is
 * listed. */
bool takes(kn_unary kind, kn_dtype t)
{
    switch (kind) {
    case KN_NEG:
    case KN_ABS:
    case KN_SIGN:
    case KN_FLOOR:
    case KN_CEIL:
    case KN_ROUND:
    case KN_SQUARE:
    case KN_AFFINE:
    case KN_CLAMP:
        return kn_dtype_is_arithmetic(t);
    case KN_EXP:
    case KN_EXPM1:
    case KN_LOG:
    case KN_LOG1P:
    case KN_LOG2:
    case KN_SQRT:
    case KN_RSQRT:
    case KN_RECIP:
    case KN_SIN:
    case KN_COS:
    case KN_TAN:
    case KN_ATAN:
    case KN_ERF:
    case KN_TANH:
    case KN_SIGMOID:
    case KN_LOGSIGMOID:
    case KN_RELU:
    case KN_GELU_TANH:
    case KN_GELU:
    case KN_SILU:
    case KN_MISH:
    case KN_HARDSIGMOID:
    case KN_HARDSWISH:
    case KN_LEAKY_RELU:
    case KN_ELU:
    case KN_SOFTPLUS:
    case KN_POW:
    case KN_HARDTANH:
        return kn_dtype_is_float(t);
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
        kn_fail("unary: %s from %s to %s is not supported; kernels/kinds.h lists the dtypes of each "
                "kind, and the result has the dtype of its input",
                kn_unary_row(a->kind)->name, kn_dtype_name(a->src.dtype), kn_dtype_name(a->dst.dtype));
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

/* ---- derivatives ---- */

namespace
{
/* Slopes below are 0 or 1 in every dtype far from 0: there x counts as this bound, so that no
 * product is of 0 and infinity. NaN passes. For sigmoids() f32's is nearer: where e^-u is finite. */
template <typename A> __device__ A within(A x, A bound)
{
    return x > bound ? bound : x < -bound ? -bound : x;
}
template <typename A> __device__ A within(A x, A bound, float bound_f32)
{
    return within(x, sizeof(A) == sizeof(float) ? (A)bound_f32 : bound);
}

/* With s = sigmoid(2u), u = c (x + k x^3): 0.5 x (1 + tanh u) = x s, whose derivative is
 * s (1 + x (1 - s) 2u'). */
template <typename A> __device__ A gelu_tanh_slope(A x)
{
    const double c = 2 * 0.79788456080286535588, k = 0.044715;
    x = within(x, (A)30, 10);
    A x2 = kn_mul_rn(x, x), s, rest;
    sigmoids(kn_mul_rn(x, kn_fma_rn((A)(c * k), x2, (A)c)), s, rest);
    A slope = kn_fma_rn((A)(3 * c * k), x2, (A)c);
    return kn_mul_rn(s, kn_fma_rn(kn_mul_rn(x, rest), slope, (A)1));
}

/* Phi(x) + x phi(x). */
template <typename A> __device__ A gelu_erf_slope(A x)
{
    x = within(x, (A)750);
    A density = kn_mul_rn((A)0.39894228040143267794, exp(kn_mul_rn(kn_mul_rn((A)-0.5, x), x)));
    A above = kn_mul_rn((A)0.5, erfc(-x * (A)0.70710678118654752440));
    return kn_fma_rn(x, density, above);
}

template <typename A> __device__ A silu_slope(A x)
{
    x = within(x, (A)750, 87);
    A s, rest;
    sigmoids(x, s, rest);
    return kn_mul_rn(s, kn_fma_rn(x, rest, (A)1));
}

/* With t = tanh(log(1 + e^x)) and s = sigmoid(x): t + x s (1 - t^2). */
template <typename A> __device__ A mish_slope(A x)
{
    x = within(x, (A)750);
    A t = tanh(softplus(x));
    return kn_fma_rn(gated(x, x), (1 - t) * (1 + t), t);
}

template <typename T> struct unary_grad_op {
    typedef typename kn_wide<T>::type A;
    typename kn_kept<T>::type dx, dy, x_in, y_in; /* the latter only where read */
    kn_unary kind;
    bool reads_x, reads_y;
    double p0, p1;

    /* Slopes that are chosen: where one is 0 nothing passes, also no infinite gradient. */
    __device__ bool chooses() const
    {
        return kind == KN_CLAMP || kind == KN_HARDTANH || kind == KN_HARDSIGMOID ||
               kind == KN_SIGN || kind == KN_FLOOR || kind == KN_CEIL || kind == KN_ROUND;
    }
    /* f'(x) */
    __device__ A rare(A x) const
    {
        switch (kind) {
        case KN_SIN:
            return cos(x);
        case KN_COS:
            return -sin(x);
        case KN_ERF:
            return (A)1.12837916709551257390 * exp(-x * x);
        case KN_LOGSIGMOID:
            return gated((A)1, -x);
        case KN_GELU:
            return gelu_erf_slope(x);
        case KN_MISH:
            return mish_slope(x);
        case KN_HARDSIGMOID:
            return x > -3 && x < 3 ? (A)(1.0 / 6) : (A)0;
        case KN_HARDSWISH:
            return x <= -3 ? (A)0 : x >= 3 ? (A)1 : (x + (A)1.5) / 3;
        case KN_ELU:
            return x > 0 ? (A)1 : (A)p0 * exp(x);
        case KN_SOFTPLUS:
            return (A)p0 * x > (A)p1 ? (A)1 : gated((A)1, (A)p0 * x);
        case KN_POW:
            return p0 == 0 ? (A)0 : (A)p0 * pow(x, (A)(p0 - 1));
        case KN_ABS:
            return sign(x);
        case KN_HARDTANH:
            return (double)x > p0 && (double)x < p1 ? 1 : 0;
        case KN_CLAMP:
            return (double)x >= p0 && (double)x <= p1 ? 1 : 0;
        default: /* KN_SIGN, KN_FLOOR, KN_CEIL, KN_ROUND; takes() lists the others */
            return 0;
        }
    }
    template <int V> struct in {
        kn_pack<T, V> g, x, y;
    };
    template <int V> __device__ void load(const int64_t (&at)[4], const bool *repeat, in<V> &r) const
    {
        r.g = r.x = r.y = kn_load<V>(dy + at[1], repeat[1]);
        if (reads_x)
            r.x = kn_load<V>(x_in + at[2], repeat[2]);
        if (reads_y)
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
#define CHOSEN(d)                                                                                  \
    {                                                                                              \
        _Pragma("unroll") for (int v = 0; v < V; v++) g[v] =                                       \
            (d) == 0 ? (A)0 : kn_mul_rn(g[v], (A)(d));                                             \
        break;                                                                                     \
    }
        switch (kind) {
        case KN_NEG: EACH(-1);
        case KN_SQUARE: EACH(x[v] + x[v]);
        case KN_EXP: EACH(y[v]);
        case KN_EXPM1: EACH(y[v] + 1);
        case KN_LOG: EACH(1 / x[v]);
        case KN_LOG1P: EACH(1 / (1 + x[v]));
        case KN_LOG2: EACH((A)1.44269504088896340736 / x[v]);
        case KN_SQRT: EACH((A)0.5 / y[v]);
        case KN_RSQRT: EACH((A)-0.5 * y[v] * y[v] * y[v]);
        case KN_RECIP: EACH(-y[v] * y[v]);
        case KN_TAN: EACH(kn_fma_rn(y[v], y[v], (A)1));
        case KN_ATAN: EACH(1 / kn_fma_rn(x[v], x[v], (A)1));
        case KN_TANH: EACH(kn_fma_rn(-y[v], y[v], (A)1));
        case KN_SIGMOID: EACH(y[v] * (1 - y[v]));
        case KN_RELU: CHOSEN(y[v] <= 0 ? 0 : 1);
        case KN_GELU_TANH: EACH(gelu_tanh_slope(x[v]));
        case KN_SILU: EACH(silu_slope(x[v]));
        case KN_LEAKY_RELU: EACH(x[v] > 0 ? (A)1 : (A)p0);
        case KN_AFFINE: EACH(p0);
        default:
            kn_rolled(x, [this](A u) { return rare(u); });
            if (chooses())
                CHOSEN(x[v]);
            EACH(x[v]);
        }
#undef CHOSEN
#undef EACH
        kn_save_wide<V>(dx + at[0], g);
    }
};

template <typename T>
unary_grad_op<T> grad_of(const kn_unary_grad_args *a, const kn_array *x, const kn_array *y, int reads)
{
    return { kn_kept<T>::of(&a->dx), kn_kept<T>::of(&a->dy), kn_kept<T>::of(x), kn_kept<T>::of(y),
             a->kind,              (reads & KN_READS_X) != 0,     (reads & KN_READS_Y) != 0, a->p0, a->p1 };
}
} // namespace

extern "C" kn_status kn_cuda_unary_grad(const void *args)
{
    const kn_unary_grad_args *a = (const kn_unary_grad_args *)args;
    int reads = kn_unary_row(a->kind)->reads;
    const kn_array *x = reads & KN_READS_X ? &a->x : &a->dy, *y = reads & KN_READS_Y ? &a->y : &a->dy;
    if (!takes(a->kind, KN_F32) || !kn_dtype_is_float(a->dx.dtype)) {
        kn_fail("unary_grad: %s of %s has no derivative", kn_unary_row(a->kind)->name,
                kn_dtype_name(a->dx.dtype));
        return KN_FAILED;
    }
    if (!kn_same_shape(KN_K_UNARY_GRAD, &a->dx, &a->dy) ||
        !kn_same_shape(KN_K_UNARY_GRAD, &a->dx, x) || !kn_same_shape(KN_K_UNARY_GRAD, &a->dx, y))
        return KN_FAILED;
    const kn_array *const arrays[] = { &a->dx, &a->dy, x, y };
#define CASE(T)                                                                                    \
    return kn_each<16 / sizeof(T)>(arrays, grad_of<T>(a, x, y, reads),                             \
                                   grad_of<kn_any<float>>(a, x, y, reads))
    switch (a->dx.dtype) {
    case KN_F32: CASE(float);
    case KN_BF16: CASE(kn_bf16);
    case KN_F16: CASE(kn_f16);
    default: return kn_each(arrays, grad_of<double>(a, x, y, reads));
    }
#undef CASE
}
