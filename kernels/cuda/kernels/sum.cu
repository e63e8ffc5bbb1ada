/* kernels/cuda/kernels/sum.cu: dst[i] = acc[i] + src[0][i] + ... + src[n-1][i], left to right: the
 * sum over ranks. Floor: n + 1 (n + 2) arrays' bytes once, 16 bytes an access. */
#include "kernels/cuda/kernels/elements.cuh"

namespace
{
struct sources {
    const void *src[KN_SUM_N_MAX];
    int n;
};

/* A: f64 where either side is, else f32. */
template <typename D, typename S, typename A> struct sum_op {
    D *dst;
    const D *acc;
    sources from;

    template <int V> __device__ void run(int64_t i) const
    {
        kn_pack<D, V> r;
        A sum[V] = {};
        if (acc) {
            r = kn_load<V>(acc + i, false);
#pragma unroll
            for (int v = 0; v < V; v++)
                sum[v] = kn_read(r.x[v]);
        }
#pragma unroll 4
        for (int j = 0; j < from.n; j++) {
            kn_pack<S, V> x = kn_load<V>((const S *)from.src[j] + i, false);
#pragma unroll
            for (int v = 0; v < V; v++) { /* -0 + 0 would lose the sign */
                A y = kn_read(x.x[v]);
                sum[v] = j == 0 && !acc ? y : sum[v] + y;
            }
        }
#pragma unroll
        for (int v = 0; v < V; v++)
            kn_store(r.x[v], (double)sum[v]);
        kn_save<V>(dst + i, r);
    }
};

template <int V, typename Op>
KN_KERNEL_RESIDENT(256, V == 8 ? 5 : 0, sum_kernel, const Op op, int64_t count)
{
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = t; i < count / V; i += n)
        op.template run<V>(i * V);
    for (int64_t i = count / V * V + t; V > 1 && i < count; i += n)
        op.template run<1>(i);
}

template <typename D, typename S, typename A> kn_status run_sum(const kn_sum_n_args *a)
{
    const int V = 16 / (sizeof(D) > sizeof(S) ? sizeof(D) : sizeof(S));
    sources from = {};
    from.n = a->n;
    for (int j = 0; j < a->n; j++)
        from.src[j] = a->src[j];
    const sum_op<D, S, A> op = { (D *)a->dst, (const D *)a->acc, from };
    bool aligned = (uintptr_t)a->dst % (V * sizeof(D)) == 0 && (uintptr_t)a->acc % (V * sizeof(D)) == 0;
    for (int j = 0; j < a->n; j++)
        aligned = aligned && (uintptr_t)a->src[j] % (V * sizeof(S)) == 0;
    if (aligned)
        return KN_RUN_FLAT((sum_kernel<V, sum_op<D, S, A>>), kn_blocks(a->count, 256, V), 256, op,
                           a->count);
    return KN_RUN_FLAT((sum_kernel<1, sum_op<D, S, A>>), kn_blocks(a->count, 256, 1), 256, op, a->count);
}

template <typename D> kn_status sum_into(const kn_sum_n_args *a)
{
    switch (a->src_dtype) {
    case KN_F32:
        return run_sum<D, float, typename kn_compute<D>::type>(a);
    case KN_BF16:
        return run_sum<D, kn_bf16, typename kn_compute<D>::type>(a);
    case KN_F16:
        return run_sum<D, kn_f16, typename kn_compute<D>::type>(a);
    case KN_F64:
        return run_sum<D, double, double>(a);
    default:
        return KN_DECLINED;
    }
}
} // namespace

extern "C" kn_status kn_cuda_sum_n(const void *args)
{
    const kn_sum_n_args *a = (const kn_sum_n_args *)args;
    if (a->count == 0)
        return KN_DONE;
    KN_FLOATS(a->dst_dtype, sum_into, a);
}
