/* tests/gpu/emulator/emulate.h (private): CUDA's execution model on the host, for tests. A block's threads are
 * fibers that run in turn; a barrier or a shuffle lets the others go first. Blocks run one after another.
 *
 * Slow, exact, and stricter than a GPU, which would hang or silently compute something else. The
 * program ends with a message at:
 *   barriers and shuffles that not every thread (lane) reaches, or that threads reach at different
 *     places;
 *   shuffles from lanes that have left or never existed;
 *   races: two threads access the same bytes, one of them writes, and no barrier lies between them
 *     (emulate_check.cc checks every access: shared and global memory, threads of one block and of
 *     different ones);
 *   shared memory and scratch that is read before it was written;
 *   accesses outside of the arrays of the call, of scratch, and of dynamic shared memory; misaligned
 *     addresses; undefined arithmetic;
 *   launches that some GPU refuses.
 * Accesses are checked in launches whose arrays a test named (emulated_allow, in
 * tests/gpu/emulator/emulated.h). Threads, warps and blocks run in an order that changes from launch
 * to launch (KN_EMULATE_ORDER=ascending, descending, or the number of an order, fixes it), so results
 * that depend on the order don't repeat. */
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
#define KN_SHARED                                                                                  \
    static __thread /* a segment of its own, by which emulate_check.cc recognises it */
#define KN_DYNAMIC(type, name) type *name = (type *)kn_emulated_dynamic
/* A kernel has one more parameter, which passes its bound to the launch. */
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

extern dim3 kn_emulated_index[4]; /* registers of a GPU */
#define threadIdx           kn_emulated_index[0]
#define blockIdx            kn_emulated_index[1]
#define blockDim            kn_emulated_index[2]
#define gridDim             kn_emulated_index[3]
#define KN_EMULATED_DYNAMIC (228 << 10)
extern unsigned char kn_emulated_dynamic[];

/* emulated_runtime.record (emulated.h). */
extern "C" bool kn_cuda_record(void (*run)(void *), void (*drop)(void *), void *arg);
void kn_emulate_later(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                      const void *kernel, const std::function<void()> &body);
/* Runs body(closure) once for each thread of each block, with barriers (fibers) or without (a loop). kernel: its
 * address, whatever its type. */
void kn_emulated_run(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                     const void *kernel, void (*body)(const void *), const void *closure);
template <typename F>
static inline void kn_emulate(dim3 grid, dim3 block, size_t dynamic, bool fibers, const char *name,
                              const void *kernel, const F &f)
{
    kn_emulated_run(
        grid, block, dynamic, fibers, name, kernel,
        [](const void *closure) { (*(const F *)closure)(); }, &f);
}
/* Raises a kernel's limit of dynamic shared memory above 48 KB. */
void kn_emulated_room(const void *kernel, size_t bytes);
[[noreturn]] void kn_emulated_too_many(int most);
template <int THREADS> struct kn_emulated_bound {
};
/* Converts to any bound; ends the program if the block is larger. */
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
/* Returns the value that lane `from` of this warp passed; all lanes must call. bytes <= 16. */
void kn_emulated_exchange(unsigned mask, const void *mine, void *theirs, size_t bytes, int from);
/* Accesses between these two are atomic. */
void kn_emulated_atomic(bool begins);

#define KN_INLINED                                                                                 \
    static inline __attribute__((always_inline)) /* so that callers have different addresses */

KN_INLINED int kn_emulated_lane(void)
{
    return (int)((threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % 32);
}
template <typename T> KN_INLINED T __shfl_sync(unsigned mask, T x, int lane)
{
    T y;
    kn_emulated_exchange(mask, &x, &y, sizeof x, lane % 32);
    return y;
}
template <typename T> KN_INLINED T __shfl_xor_sync(unsigned mask, T x, int o)
{
    return __shfl_sync(mask, x, kn_emulated_lane() ^ o);
}
template <typename T> KN_INLINED T __shfl_down_sync(unsigned mask, T x, int delta)
{
    int lane = kn_emulated_lane();
    return __shfl_sync(mask, x, lane + delta < 32 ? lane + delta : lane);
}
template <typename T> KN_INLINED T __shfl_up_sync(unsigned mask, T x, int delta)
{
    int lane = kn_emulated_lane();
    return __shfl_sync(mask, x, lane >= delta ? lane - delta : lane);
}
/* Replaces *p by f(*p); returns the old value. */
template <typename T, typename F> static inline T kn_emulated_update(T *p, F f)
{
    kn_emulated_atomic(true);
    T old = *p;
    *p = f(old);
    kn_emulated_atomic(false);
    return old;
}
template <typename T> static inline T atomicAdd(T *p, T x)
{
    return kn_emulated_update(p, [=](T old) { return (T)(old + x); });
}
template <typename T> static inline T atomicCAS(T *p, T expected, T x)
{
    return kn_emulated_update(p, [=](T old) { return old == expected ? x : old; });
}
template <typename T> static inline T atomicMax(T *p, T x)
{
    return kn_emulated_update(p, [=](T old) { return old > x ? old : x; });
}
template <typename T> static inline T atomicMin(T *p, T x)
{
    return kn_emulated_update(p, [=](T old) { return old < x ? old : x; });
}
template <typename T> static inline T atomicExch(T *p, T x)
{
    return kn_emulated_update(p, [=](T) { return x; });
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

/* A recorded kernel runs later, with the arguments of this call. */
template <typename K, typename... A>
static inline std::function<void()> kn_emulated_call(K kernel, A... args)
{
    return [=] { kernel(kn_emulated_launch(), args...); };
}
#define KN_EMULATE(kernel, grid, block, dynamic, fibers, ...)                                      \
    (kn_cuda_record(nullptr, nullptr, nullptr)                                                     \
         ? kn_emulate_later((grid), (block), (dynamic), fibers, #kernel, (const void *)(kernel),   \
                            kn_emulated_call((kernel), __VA_ARGS__))                               \
         : kn_emulate((grid), (block), (dynamic), fibers, #kernel, (const void *)(kernel),         \
                      [&] { kernel(kn_emulated_launch(), __VA_ARGS__); }),                         \
     kn_cuda_launched(#kernel))
#define KN_RUN(kernel, grid, block, dynamic, ...)                                                  \
    KN_EMULATE(kernel, grid, block, dynamic, true, __VA_ARGS__)
#define KN_RUN_FLAT(kernel, grid, block, ...) KN_EMULATE(kernel, grid, block, 0, false, __VA_ARGS__)

#endif
