/* kernels/cuda/rope.cu: rotary position embedding. The angles of all positions and pairs are computed
 * once, in f64 as the reference does, into a table of T * D/2 cosines and sines (scratch, read from the
 * cache by every batch and head); then x and y move once. */
#include "kernels/cuda/elements.cuh"

namespace
{
template <typename A> struct turn {
    A cosine, sine;
};

template <typename A>
KN_KERNEL void angles_kernel(turn<A> *table, int64_t count, int64_t half, int64_t start, double base,
                             bool inverse)
{
    int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    for (; i < count; i += n) {
        int64_t t = i / half, pair = i - t * half;
        double angle = (double)(start + t) * pow(base, -(double)pair / (double)half);
        double s = sin(angle);
        table[i].cosine = (A)cos(angle);
        table[i].sine = (A)(inverse ? -s : s);
    }
}

/* arrays: y and x, first halves of the last dim; the table as [1, 1, T, D/2]. */
template <typename T> struct rope_op {
    typedef typename kn_compute<T>::type A;
    T *y;
    const T *x;
    const turn<A> *table;
    int64_t y_half, x_half; /* from an element to its partner */

    template <int V> __device__ void run(const int64_t (&at)[3], const bool *repeat, int64_t) const
    {
        A u[V], v[V];
        kn_load_wide<V>(x + at[1], repeat[1], u);
        kn_load_wide<V>(x + at[1] + x_half, repeat[1], v);
#pragma unroll
        for (int k = 0; k < V; k++) {
            turn<A> r = table[at[2] + k];
            A first = kn_fma_rn(u[k], r.cosine, -kn_mul_rn(v[k], r.sine));
            v[k] = kn_fma_rn(v[k], r.cosine, kn_mul_rn(u[k], r.sine));
            u[k] = first;
        }
        kn_save_wide<V>(y + at[0], u);
        kn_save_wide<V>(y + at[0] + y_half, v);
    }
};

template <typename T> kn_status run_rope(const kn_rope_args *a)
{
    typedef typename kn_compute<T>::type A;
    const int V = 16 / sizeof(T);
    int64_t half = a->x.shape[3] / 2, positions = a->x.shape[2], count = positions * half;
    if (kn_array_numel(&a->x) == 0)
        return KN_DONE;
    turn<A> *table = (turn<A> *)kn_cuda_scratch((size_t)count * sizeof *table);
    if (!table || KN_RUN_FLAT(angles_kernel<A>, kn_blocks(count, 128, 1), 128, table, count, half,
                              a->start, a->base, a->inverse) != KN_DONE)
        return KN_FAILED;
    kn_array y = a->y, x = a->x, angles = kn_array_make(table, KN_U8, 4, a->x.shape);
    y.shape[3] = x.shape[3] = angles.shape[3] = half;
    angles.stride[0] = angles.stride[1] = 0;
    angles.stride[2] = half;
    int64_t y_half = half * y.stride[3], x_half = half * x.stride[3];
    const kn_array *const arrays[] = { &y, &x, &angles };
    rope_op<T> op = { (T *)y.data, (const T *)x.data, table, y_half, x_half };
    bool wide = half % V == 0 && (size_t)half * sizeof(T) % 16 == 0;
    return wide ? kn_each<V>(arrays, op) : kn_each<1>(arrays, op);
}
} // namespace

extern "C" kn_status kn_cuda_rope(const void *args)
{
    const kn_rope_args *a = (const kn_rope_args *)args;
    if (!kn_same_shape(KN_K_ROPE, &a->y, &a->x))
        return KN_FAILED;
    if (a->x.ndim != 4 || a->x.shape[3] % 2 != 0) {
        char text[128];
        kn_fail("rope: %s does not fit: [B, H, T, D] with even D",
                kn_array_describe(&a->x, text, sizeof text));
        return KN_FAILED;
    }
    if (a->y.dtype != a->x.dtype)
        return KN_DECLINED;
#define CASE(T) return run_rope<T>(a)
    KN_FLOATS(a->x.dtype, CASE);
#undef CASE
}
