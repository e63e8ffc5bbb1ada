/* kernels/cuda/emulate.h (private): CUDA's execution model on the host, for tests. A block's threads are
 * fibers that run in turn; a barrier or a shuffle lets the others go first. Blocks run one after another,
 * so shared memory is a static variable. Slow, exact, and finds what a GPU would hide: a barrier that not
 * every thread reaches ends the program with a sentence. */
#ifndef KNAP_KERNELS_CUDA_EMULATE_H
#define KNAP_KERNELS_CUDA_EMULATE_H

#include <functional>
#include <math.h>
#include <stddef.h>
#include <stdint.h>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __restrict__
#define __grid_constant__
#define KN_SHARED              static
#define KN_DYNAMIC(type, name) type *name = (type *)kn_emulated_dynamic
/* A kernel has one more parameter, by which it says its bound to the launch. */
#define KN_KERNEL(threads, name, ...)                  static void name(kn_emulated_bound<(threads)>, __VA_ARGS__)
#define KN_KERNEL_RESIDENT(threads, blocks, name, ...) KN_KERNEL(threads, name, __VA_ARGS__)
#define KN_FULL_WARP                                   0xffffffffu

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c)
    {
    }
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float4 {
    float x, y, z, w;
};
struct float2 {
    float x, y;
};
struct uint2 {
    unsigned x, y;
};
struct int4 {
    int x, y, z, w;
};
struct double2 {
    double x, y;
};

extern dim3 threadIdx, blockIdx, blockDim, gridDim;
extern unsigned char kn_emulated_dynamic[];

/* Whether the running launch's stream is being recorded: then run(arg) becomes a part of the recording, and
 * drop(arg) ends it (run NULL: only the answer). A test that records puts its own in the place of this one,
 * which never does. */
extern "C" bool kn_cuda_record(void (*run)(void *), void (*drop)(void *), void *arg);
void kn_emulate_later(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                      const std::function<void()> &body);
/* Runs body once for each thread of each block, with barriers (fibers) or without (a loop). */
void kn_emulate(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                const std::function<void()> &body);
[[noreturn]] void kn_emulated_too_many(int most);
template <int THREADS> struct kn_emulated_bound {
};
/* Becomes any bound; ends the program where the block is larger. */
struct kn_emulated_launch {
    template <int THREADS> operator kn_emulated_bound<THREADS>() const
    {
        if (blockDim.x * blockDim.y * blockDim.z > THREADS)
            kn_emulated_too_many(THREADS);
        return {};
    }
};
/* Waits for the block's (warp's) other threads. */
void __syncthreads(void);
void __syncwarp(unsigned mask = KN_FULL_WARP);
/* What lane `from` of this warp passed; all lanes of mask must call. bytes <= 16. */
void kn_emulated_exchange(const void *mine, void *theirs, size_t bytes, int from);

template <typename T> static inline T __shfl_xor_sync(unsigned, T x, int mask)
{
    T y;
    kn_emulated_exchange(&x, &y, sizeof x, (int)(threadIdx.x % 32) ^ mask);
    return y;
}
template <typename T> static inline T __shfl_sync(unsigned, T x, int lane)
{
    T y;
    kn_emulated_exchange(&x, &y, sizeof x, lane % 32);
    return y;
}
template <typename T> static inline T __shfl_down_sync(unsigned, T x, int delta)
{
    T y;
    int lane = (int)(threadIdx.x % 32), from = lane + delta;
    kn_emulated_exchange(&x, &y, sizeof x, from < 32 ? from : lane);
    return y;
}
template <typename T> static inline T __shfl_up_sync(unsigned, T x, int delta)
{
    T y;
    int lane = (int)(threadIdx.x % 32), from = lane - delta;
    kn_emulated_exchange(&x, &y, sizeof x, from >= 0 ? from : lane);
    return y;
}
template <typename T> static inline T atomicAdd(T *p, T x)
{
    T old = *p;
    *p = old + x;
    return old;
}
template <typename T> static inline T atomicCAS(T *p, T expected, T x)
{
    T old = *p;
    if (old == expected)
        *p = x;
    return old;
}
template <typename T> static inline T atomicMax(T *p, T x)
{
    T old = *p;
    *p = old > x ? old : x;
    return old;
}
template <typename T> static inline T atomicMin(T *p, T x)
{
    T old = *p;
    *p = old < x ? old : x;
    return old;
}
template <typename T> static inline T atomicExch(T *p, T x)
{
    T old = *p;
    *p = x;
    return old;
}
static inline void __threadfence(void)
{
}
static inline int __popc(unsigned x)
{
    return __builtin_popcount(x);
}
static inline int __clz(int x)
{
    return x ? __builtin_clz((unsigned)x) : 32;
}
static inline float rsqrtf(float x)
{
    return 1 / sqrtf(x);
}
static inline double rsqrt(double x)
{
    return 1 / sqrt(x);
}
static inline int __clzll(long long x)
{
    return x ? __builtin_clzll((unsigned long long)x) : 64;
}
template <typename T> static inline T __ldg(const T *p)
{
    return *p;
}

/* A recorded kernel runs later, with the arguments that it was given now. */
template <typename K, typename... A>
static inline std::function<void()> kn_emulated_call(K kernel, A... args)
{
    return [=] { kernel(kn_emulated_launch(), args...); };
}
#define KN_EMULATE(kernel, grid, block, dynamic, fibers, ...)                                      \
    (kn_cuda_record(nullptr, nullptr, nullptr)                                                     \
         ? kn_emulate_later((grid), (block), (dynamic), fibers, #kernel,                           \
                            kn_emulated_call((kernel), __VA_ARGS__))                               \
         : kn_emulate((grid), (block), (dynamic), fibers, #kernel,                                 \
                      [&] { kernel(kn_emulated_launch(), __VA_ARGS__); }),                         \
     kn_cuda_launched(#kernel))
#define KN_RUN(kernel, grid, block, dynamic, ...)                                                  \
    KN_EMULATE(kernel, grid, block, dynamic, true, __VA_ARGS__)
#define KN_RUN_FLAT(kernel, grid, block, ...) KN_EMULATE(kernel, grid, block, 0, false, __VA_ARGS__)

#endif
