/* kernels/cuda/kernels/norm.cuh (private): weights and biases of the norms, which have x's dtype or
 * f32. */
#ifndef KNAP_KERNELS_CUDA_NORM_CUH
#define KNAP_KERNELS_CUDA_NORM_CUH

#include "kernels/cuda/kernels/rows.cuh"

struct norm_vector {
    const void *data; /* NULL: absent */
    int64_t stride;
    bool same; /* x's dtype, else f32 */
};

static inline norm_vector norm_vector_of(const kn_array *v, kn_dtype t)
{
    return { v->data, v->ndim > 0 ? v->stride[0] : 1, v->dtype == t };
}

static inline bool norm_vector_aligned(const kn_array *v)
{
    return !v->data || ((uintptr_t)v->data % 16 == 0 && v->stride[0] == 1);
}

static inline bool norm_vector_takes(const kn_array *v, kn_dtype t)
{
    return !v->data || v->dtype == t || v->dtype == KN_F32;
}

static inline bool norm_stat_takes(const kn_array *v, kn_dtype t)
{
    return !v->data || v->dtype == (t == KN_F64 ? KN_F64 : KN_F32);
}

/* Unit u of a vector, or the value that stands for an absent one. */
template <typename T, bool VEC, int N>
static __device__ inline void norm_vector_load(const norm_vector &v, int64_t u, int n, int absent,
                                               typename kn_compute<T>::type (&x)[N])
{
    typedef typename kn_compute<T>::type A;
    if (!v.data) {
        for (int i = 0; i < N; i++)
            x[i] = (A)absent;
    } else if (v.same) {
        row_load<VEC, N>((const T *)v.data, v.stride, u, n, x);
    } else {
        float y[N];
        row_load<(VEC && N >= 4), N>((const float *)v.data, v.stride, u, n, y);
        for (int i = 0; i < N; i++)
            x[i] = (A)y[i];
    }
}

#endif
