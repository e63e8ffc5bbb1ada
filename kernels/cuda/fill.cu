/* kernels/cuda/fill.cu: dst[i] = value + i * step, in f64, rounded once. */
#include "kernels/cuda/elements.cuh"

namespace
{
template <typename T> struct fill_op {
    T *dst;
    double value, step;

    template <int V> struct in {};

    template <int V> __device__ void load(const int64_t (&)[1], const bool *, in<V> &) const {}
    template <int V> __device__ void finish(const int64_t (&at)[1], const in<V> &, int64_t first) const
    {
        kn_pack<T, V> r;
#pragma unroll
        for (int v = 0; v < V; v++)
            kn_store(r.x[v], step == 0 ? value
                                       : kn_add_rn(value, kn_mul_rn((double)(first + v), step)));
        kn_save<V>(dst + at[0], r);
    }
};
} // namespace

extern "C" kn_status kn_cuda_fill(const void *args)
{
    const kn_fill_args *a = (const kn_fill_args *)args;
    const kn_array *const arrays[] = { &a->dst };
    double value = a->value + 0.0 * a->step; /* -0 + 0 is 0 */
#define CASE(T) return kn_each<16 / sizeof(T)>(arrays, fill_op<T>{ (T *)a->dst.data, value, a->step })
    KN_ARITHMETIC(a->dst.dtype, CASE);
#undef CASE
}
