/* kernels/cuda/kernels/cuda.cuh (private): what every .cu file stands on.
 *
 * The files compile twice: by nvcc for GPUs, and by a C++ compiler for the host, where the header
 * that KN_CUDA_EMULATE names (tests/gpu/emulator/emulate.h) runs each block's threads as fibers. So
 * the same lines are tested against the reference on machines without a GPU
 * (tests/gpu/cuda_emulated_test.c), indexing, shared memory, barriers and shuffles included; only
 * the speed is the GPU's.
 *
 * Rules: no atomics on floats (results must not depend on timing), 64-bit element indices, any size
 * and stride; the fast paths (16-byte accesses) are chosen on the host from alignment and strides.
 * Floats load to f32 (f64 stays f64) through kn_get, store through kn_put: convert.h's bits, but
 * for the payload of a NaN. */
#ifndef KNAP_KERNELS_CUDA_CUH
#define KNAP_KERNELS_CUDA_CUH

#include "kernels/convert.h"
#include "kernels/kernels.h"
#include "kernels/philox.h"

#ifdef KN_CUDA_EMULATE
#include KN_CUDA_EMULATE
#else
#include <cuda_runtime.h>
#define KN_SHARED __shared__
/* name[]: the launch's dynamic shared memory. */
#define KN_DYNAMIC(type, name)                                                                     \
    extern __shared__ __align__(16) unsigned char kn_dynamic_[];                                   \
    type *name = (type *)kn_dynamic_
/* Begins a kernel: the most threads of a block that it is launched with, which bounds its registers
 * (65,536 a block), its name, its parameters. The emulation checks each launch,
 * tests/cli/cuda_resources.sh the compiler's result. RESIDENT: so many blocks are to fit on a
 * multiprocessor; fewer leave a thread registers enough not to spill. 0: as the compiler has it. */
#define KN_KERNEL(threads, name, ...) __global__ void __launch_bounds__(threads) name(__VA_ARGS__)
#define KN_KERNEL_RESIDENT(threads, blocks, name, ...)                                             \
    __global__ void __launch_bounds__(threads, blocks) name(__VA_ARGS__)
/* Launches kernel on the stream of the running kn_launch. Threads of a block may use barriers and
 * shuffles (RUN) or not (RUN_FLAT: a plain loop under emulation). Gives a kn_status. */
#define KN_RUN(kernel, grid, block, dynamic, ...)                                                  \
    (kernel<<<(grid), (block), (dynamic), (cudaStream_t)kn_cuda_stream()>>>(__VA_ARGS__),          \
     kn_cuda_launched(#kernel))
#define KN_RUN_FLAT(kernel, grid, block, ...) KN_RUN(kernel, grid, block, 0, __VA_ARGS__)
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The stream that the running kn_launch is for (runtime.c; the emulation has none). */
void *kn_cuda_stream(void);
/* KN_DONE, or KN_FAILED with the launch's error standing. kernel: as KN_RUN's caller wrote it. */
kn_status kn_cuda_launched(const char *kernel);
int kn_cuda_multiprocessors(void);
/* Scratch for one launch, in stream order: valid for kernels launched until the next
 * kn_cuda_scratch on the same stream. NULL with an error. */
void *kn_cuda_scratch(size_t bytes);
/* Copies a host table (of the pieces of an optimizer, runs, ...) for the kernels that follow; the
 * same lifetime rule as scratch, its own buffer. NULL with an error. */
const void *kn_cuda_table(const void *host, size_t bytes);

/* Errors that kernels report without stopping: read once a step (kn_stream_sync, kn_item). */
typedef struct kn_cuda_flag {
    int what;               /* KN_FLAG_...; the first one stays */
    long long where, value; /* row or position, and the bad value */
} kn_cuda_flag;
enum { KN_FLAG_NONE = 0, KN_FLAG_TARGET, KN_FLAG_INDEX };
kn_cuda_flag *kn_cuda_flags(void); /* device memory */

/* The plain name of a kernel: each_kernel of "(each_kernel<N, V, Op>)". */
static inline const char *kn_cuda_plain(const char *kernel, char *name, size_t size)
{
    size_t n = 0;
    while (*kernel == '(')
        kernel++;
    for (; n + 1 < size && kernel[n] && kernel[n] != '<' && kernel[n] != ')'; n++)
        name[n] = kernel[n];
    name[n] = 0;
    return name;
}

#ifdef __cplusplus
}

/* ---- elements -------------------------------------------------------------------------------- */

/* Storage types told apart by the compiler. */
struct kn_bf16 {
    uint16_t bits;
};
struct kn_f16 {
    uint16_t bits;
};

/* p, which a kernel read from a table, so that the compiler can't see where it points: it points to
 * the device's memory (as NULL does to a GPU), and no access need find that out. */
template <typename T> static inline __device__ T *kn_global(T *p)
{
#ifdef __CUDA_ARCH__
    __builtin_assume(__isGlobal(p));
#endif
    return p;
}

/* T: storage, A: what it is computed in. */
template <typename T> struct kn_compute {
    typedef T type;
};
template <> struct kn_compute<kn_bf16> {
    typedef float type;
};
template <> struct kn_compute<kn_f16> {
    typedef float type;
};

template <typename T> static inline KN_HD typename kn_compute<T>::type kn_get(const T *p)
{
    return *p;
}
template <> inline KN_HD float kn_get<kn_bf16>(const kn_bf16 *p)
{
    return kn_bf16_to_f32(p->bits);
}
/* One instruction where the GPU has it; it rounds like convert.h and differs in a NaN's payload. */
template <> inline KN_HD float kn_get<kn_f16>(const kn_f16 *p)
{
#ifdef __CUDA_ARCH__
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(p->bits));
    return x;
#else
    return kn_f16_to_f32(p->bits);
#endif
}
template <typename T> static inline KN_HD void kn_put(T *p, typename kn_compute<T>::type x)
{
    *p = x;
}
template <> inline KN_HD void kn_put<kn_bf16>(kn_bf16 *p, float x)
{
#ifdef __CUDA_ARCH__
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(p->bits) : "f"(x));
#else
    p->bits = kn_f32_to_bf16(x);
#endif
}
template <> inline KN_HD void kn_put<kn_f16>(kn_f16 *p, float x)
{
#ifdef __CUDA_ARCH__
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(p->bits) : "f"(x));
#else
    p->bits = kn_f32_to_f16(x);
#endif
}

/* Element at of p, of a float dtype t, = x, which narrow ones take as a float. */
static inline __device__ void kn_put_as(void *p, kn_dtype t, int64_t at, double x)
{
    switch (t) {
    case KN_F32: return kn_put((float *)p + at, (float)x);
    case KN_BF16: return kn_put((kn_bf16 *)p + at, (float)x);
    case KN_F16: return kn_put((kn_f16 *)p + at, (float)x);
    default: return kn_put((double *)p + at, x);
    }
}

/* Returns what f<T>(...) gives for the storage type of a float dtype; declines others. */
#define KN_FLOATS(dtype, f, ...)                                                                   \
    do {                                                                                           \
        switch (dtype) {                                                                           \
        case KN_F32: return f<float>(__VA_ARGS__);                                                 \
        case KN_BF16: return f<kn_bf16>(__VA_ARGS__);                                              \
        case KN_F16: return f<kn_f16>(__VA_ARGS__);                                                \
        case KN_F64: return f<double>(__VA_ARGS__);                                                \
        default: return KN_DECLINED;                                                               \
        }                                                                                          \
    } while (0)

/* ---- strided arrays -------------------------------------------------------------------------- */

/* Several arrays of one shape walked by one index: dims are merged where all strides allow it (made
 * on the host, passed by value). */
template <int N> struct kn_walk {
    int ndim;
    int64_t count;
    int64_t shape[KN_MAX_DIMS];
    int64_t stride[N][KN_MAX_DIMS];
    bool flat; /* every array is contiguous: offset == index */
};

template <int N> static kn_walk<N> kn_walk_make(const kn_array *const (&a)[N])
{
    kn_walk<N> w = {};
    w.count = 1;
    for (int d = 0; d < a[0]->ndim; d++) {
        int64_t n = a[0]->shape[d];
        w.count *= n;
        if (n == 1)
            continue;
        bool merge = w.ndim > 0;
        for (int k = 0; k < N && merge; k++)
            merge = w.stride[k][w.ndim - 1] == a[k]->stride[d] * n;
        if (!merge)
            w.ndim++;
        for (int k = 0; k < N; k++)
            w.stride[k][w.ndim - 1] = a[k]->stride[d];
        w.shape[w.ndim - 1] = merge ? w.shape[w.ndim - 1] * n : n;
    }
    w.flat = w.ndim <= 1;
    for (int k = 0; k < N && w.ndim == 1; k++)
        w.flat = w.flat && w.stride[k][0] == 1;
    return w;
}

/* Element offsets of index i in each array. */
template <int N>
static inline __device__ void kn_walk_at(const kn_walk<N> &w, int64_t i, int64_t (&at)[N])
{
    for (int k = 0; k < N; k++)
        at[k] = w.flat ? i : 0;
    if (w.flat)
        return;
#pragma unroll 1
    for (int d = w.ndim - 1; d > 0; d--) {
        int64_t q = i / w.shape[d], r = i - q * w.shape[d];
        i = q;
        for (int k = 0; k < N; k++)
            at[k] += r * w.stride[k][d];
    }
    for (int k = 0; k < N && w.ndim > 0;
         k++) /* rows of a matrix cost no division, which takes 100 instructions */
        at[k] += i * w.stride[k][0];
}

/* a b + c, rounded once: the compiler may not choose (-fmad=false), so sums of products that need
 * the rate of multiply-adds call this. */
static inline KN_HD float kn_fma_rn(float a, float b, float c)
{
    return fmaf(a, b, c);
}
static inline KN_HD double kn_fma_rn(double a, double b, double c)
{
    return fma(a, b, c);
}

/* Blocks of a grid-stride loop over count elements, `each` a thread. */
static inline unsigned kn_blocks(int64_t count, int64_t block, int64_t each)
{
    int64_t n = (count + block * each - 1) / (block * each), most = 32 * kn_cuda_multiprocessors();
    return (unsigned)(n < 1 ? 1 : n < most ? n : most);
}

#ifndef KN_CUDA_EMULATE
/* ---- sums over a warp and a block ------------------------------------------------------------ */
#define KN_FULL_WARP 0xffffffffu
#endif

/* Every lane gets the sum (maximum); the order is that of a butterfly: fixed. */
template <typename A> static __device__ inline A kn_warp_sum(A x)
{
    for (int o = 16; o > 0; o >>= 1)
        x += __shfl_xor_sync(KN_FULL_WARP, x, o);
    return x;
}
template <typename A> static __device__ inline A kn_warp_max(A x)
{
    for (int o = 16; o > 0; o >>= 1) {
        A y = __shfl_xor_sync(KN_FULL_WARP, x, o);
        x = x != x || x > y ? x : y; /* NaN wins */
    }
    return x;
}
/* The same for a block of whole warps; buffer: one element a warp and one more, in shared memory.
 * Every thread gets the result; the barrier at the end lets the buffer be used again. */
template <bool SUM, typename A> static __device__ inline A kn_block_fold(A x, A *buffer)
{
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = (blockDim.x + 31) / 32;
    x = SUM ? kn_warp_sum(x) : kn_warp_max(x);
    if (lane == 0)
        buffer[warp] = x;
    __syncthreads();
    if (warp == 0) {
        A y = lane < warps ? buffer[lane] : SUM ? (A)0 : buffer[0];
        y = SUM ? kn_warp_sum(y) : kn_warp_max(y);
        if (lane == 0)
            buffer[warps] = y;
    }
    __syncthreads();
    x = buffer[warps];
    __syncthreads();
    return x;
}
template <typename A> static __device__ inline A kn_block_sum(A x, A *buffer)
{
    return kn_block_fold<true>(x, buffer);
}
template <typename A> static __device__ inline A kn_block_max(A x, A *buffer)
{
    return kn_block_fold<false>(x, buffer);
}
#endif /* __cplusplus */

#endif
