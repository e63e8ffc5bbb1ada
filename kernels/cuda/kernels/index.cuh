/* kernels/cuda/kernels/index.cuh (private): shared by picking slices and adding into slices. */
#ifndef KNAP_KERNELS_CUDA_INDEX_CUH
#define KNAP_KERNELS_CUDA_INDEX_CUH

#include "kernels/cuda/kernels/elements.cuh"
#include "kernels/join.h"

struct kn_indices {
    const void *data;
    int64_t stride;
    bool wide; /* i64, else i32 */
    kn_cuda_flag *flags;
};

static inline kn_indices kn_indices_make(const kn_array *index)
{
    return { index->data, index->stride[0], index->dtype == KN_I64, kn_cuda_flags() };
}

static inline __device__ int64_t kn_index_at(const kn_indices &x, int64_t i)
{
    i *= x.stride;
    return x.wide ? ((const int64_t *)x.data)[i] : ((const int32_t *)x.data)[i];
}

/* Records an index out of range; the first one stays. */
static inline __device__ void kn_index_flag(const kn_indices &x, int64_t position, int64_t value)
{
    if (atomicCAS(&x.flags->what, (int)KN_FLAG_NONE, (int)KN_FLAG_INDEX) == KN_FLAG_NONE) {
        x.flags->where = position;
        x.flags->value = value;
    }
}

/* Unrounded; integers wrap around. */
template <typename A> static inline __device__ A kn_added(A sum, A x)
{
    return sum + x;
}
static inline __device__ int64_t kn_added(int64_t sum, int64_t x)
{
    return (int64_t)((uint64_t)sum + (uint64_t)x);
}

/* One of the ways of kn_join: product and sum of two floats in double, rounded, are those of float. */
static inline __device__ float kn_join_of(kn_join by, float a, float b)
{
    return by == KN_JOIN_SUM ? a + b : (float)kn_joined(by, a, b);
}
static inline __device__ double kn_join_of(kn_join by, double a, double b)
{
    return kn_joined(by, a, b);
}
static inline __device__ int64_t kn_join_of(kn_join by, int64_t a, int64_t b)
{
    return kn_joined_int(by, a, b);
}

/* ---- an index for each element --------------------------------------------------------------- */

/* full, seen in picked's shape: its first element of dim stands for all, which index replaces. */
static inline kn_array kn_lines_of(const kn_array *full, const kn_array *picked, int dim)
{
    kn_array a = *full;
    for (int d = 0; d < a.ndim; d++)
        a.shape[d] = picked->shape[d];
    a.stride[dim] = 0;
    return a;
}

/* For offsets that a walk computed. */
static inline kn_indices kn_indices_of_elements(const kn_array *index)
{
    return { index->data, 1, index->dtype == KN_I64, kn_cuda_flags() };
}

#endif
