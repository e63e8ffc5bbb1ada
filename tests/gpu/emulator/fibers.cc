/* tests/gpu/emulator/fibers.cc: kernels that test the emulator itself
 * (tests/gpu/emulator/emulate.h); called by cuda_emulated_test.c. */
#include "kernels/cuda/kernels/cuda.cuh"

namespace
{
/* Every block sums its threads' numbers in shared memory that the block before it has used. */
KN_KERNEL(1024, sums_kernel, long long *out)
{
    KN_SHARED long long buffer[33];
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long sum = kn_block_sum(i, buffer);
    if (threadIdx.x == blockDim.x - 1)
        out[blockIdx.x] = sum;
}

/* Lane l gets the value of lane l ^ 5, twice in a row. */
KN_KERNEL(64, swap_kernel, int *out)
{
    int x = (int)threadIdx.x * 3, y = __shfl_xor_sync(KN_FULL_WARP, x, 5);
    out[threadIdx.x] = y * 1000 + __shfl_xor_sync(KN_FULL_WARP, y, 5);
}

KN_KERNEL(64, lost_barrier_kernel, int *out)
{
    if (threadIdx.x != 7)
        __syncthreads();
    out[threadIdx.x] = 1;
}
} // namespace

extern "C" KN_API kn_status emulated_sums(long long *out, int blocks, int threads)
{
    return KN_RUN(sums_kernel, blocks, threads, 0, out);
}

extern "C" KN_API kn_status emulated_swap(int *out, int threads)
{
    return KN_RUN(swap_kernel, 1, threads, 0, out);
}

extern "C" KN_API kn_status emulated_lost_barrier(int *out)
{
    return KN_RUN(lost_barrier_kernel, 1, 64, 0, out);
}

extern "C" KN_API kn_status emulated_flat_barrier(int *out)
{
    return KN_RUN_FLAT(lost_barrier_kernel, 1, 64, out);
}

/* swap_kernel is for 64 threads at most. */
extern "C" KN_API kn_status emulated_too_many(int *out)
{
    return KN_RUN(swap_kernel, 1, 96, 0, out);
}
