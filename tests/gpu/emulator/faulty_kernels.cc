/* tests/gpu/emulator/faulty_kernels.cc: kernels with one fault each. On a GPU the fault gives
 * random values, a hang or an error without a place; cuda_faults_test.c expects the emulator's
 * message. */
#include "kernels/cuda/kernels/elements.cuh"
#include "kernels/cuda/kernels/rows.cuh"

namespace
{
KN_KERNEL(64, no_barrier_kernel, float *out)
{
    KN_SHARED float x[64];
    x[threadIdx.x] = 1;
    out[threadIdx.x] = x[63 - threadIdx.x];
}

/* Other threads read the values before the next round overwrites them. */
KN_KERNEL(64, early_write_kernel, float *out)
{
    KN_SHARED float x[64];
    float sum = 0;
    for (int i = 0; i < 2; i++) {
        x[threadIdx.x] = (float)i;
        __syncthreads();
        sum += x[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

KN_KERNEL(64, no_syncwarp_kernel, float *out)
{
    KN_SHARED float x[64];
    x[threadIdx.x] = 1;
    float y = __shfl_xor_sync(KN_FULL_WARP, 1.0f, 1); /* orders no memory */
    out[threadIdx.x] = y + x[threadIdx.x ^ 1];
}

KN_KERNEL(64, syncwarp_for_a_block_kernel, float *out)
{
    KN_SHARED float x[64];
    x[threadIdx.x] = 1;
    __syncwarp();
    out[threadIdx.x] = x[threadIdx.x ^ 32];
}

KN_KERNEL(64, block_reads_block_kernel, float *out)
{
    out[blockIdx.x] = 1;
    if (blockIdx.x > 0 && threadIdx.x == 0)
        out[2] = out[blockIdx.x - 1];
}

KN_KERNEL(64, plain_and_atomic_kernel, int *out)
{
    if (threadIdx.x == 5)
        out[0] = 7;
    else
        atomicAdd(out, 1);
}

KN_KERNEL(64, unwritten_kernel, float *out)
{
    KN_SHARED float x[65];
    x[threadIdx.x] = 1;
    __syncthreads();
    out[threadIdx.x] = x[threadIdx.x + 1];
}

KN_KERNEL(64, unwritten_dynamic_kernel, float *out)
{
    KN_DYNAMIC(float, x);
    out[threadIdx.x] = x[threadIdx.x];
}

KN_KERNEL(64, beyond_dynamic_kernel, float *out)
{
    KN_DYNAMIC(float, x);
    x[threadIdx.x + 1] = out[threadIdx.x];
}

KN_KERNEL(64, beyond_array_kernel, float *out)
{
    out[threadIdx.x + 1] = 1;
}

KN_KERNEL(64, scratch_kernel, float *out, const float *scratch)
{
    out[threadIdx.x] = scratch[threadIdx.x];
}

KN_KERNEL(64, misaligned_kernel, float *out)
{
    kn_pack<float, 4> x = {};
    kn_save<4>(out + 1 + 4 * threadIdx.x, x);
}

KN_KERNEL(64, lane_has_left_kernel, float *out)
{
    if (threadIdx.x % 32 == 3)
        return;
    out[threadIdx.x] = __shfl_xor_sync(KN_FULL_WARP, 1.0f, 1);
}

KN_KERNEL(64, no_such_lane_kernel, float *out)
{
    out[threadIdx.x] = __shfl_xor_sync(KN_FULL_WARP, 1.0f, 16);
}

KN_KERNEL(64, two_shuffles_kernel, float *out)
{
    float x = 1;
    if (threadIdx.x % 2)
        x = __shfl_xor_sync(KN_FULL_WARP, x, 2);
    else
        x = __shfl_xor_sync(KN_FULL_WARP, 2 * x, 2);
    out[threadIdx.x] = x;
}

KN_KERNEL(64, two_barriers_kernel, float *out)
{
    if (threadIdx.x < 32) {
        out[threadIdx.x] = 1;
        __syncthreads();
    } else {
        __syncthreads();
        out[threadIdx.x] = 2;
    }
}

KN_KERNEL(64, index_kernel, float *out, int n)
{
    float x[4] = {};
    x[n] = 1;
    out[threadIdx.x] = x[0];
}

KN_KERNEL(64, to_int_kernel, int *out, float x)
{
    out[threadIdx.x] = (int)x;
}

KN_KERNEL(1024, large_shared_kernel, float *out)
{
    KN_DYNAMIC(float, x);
    KN_SHARED float y[8][64];
    for (int i = 0; i < 8; i++)
        y[i][threadIdx.x] = x[threadIdx.x] = 1;
    out[threadIdx.x] = y[0][threadIdx.x];
}
} // namespace

extern "C" KN_API kn_status emulated_fault(int i, void *p)
{
    float *out = (float *)p, *scratch = (float *)kn_cuda_scratch(64 * sizeof(float));
    switch (i) {
    case 0:
        return KN_RUN(no_barrier_kernel, 1, 64, 0, out);
    case 1:
        return KN_RUN(early_write_kernel, 1, 64, 0, out);
    case 2:
        return KN_RUN(no_syncwarp_kernel, 1, 64, 0, out);
    case 3:
        return KN_RUN(syncwarp_for_a_block_kernel, 1, 64, 0, out);
    case 4:
        return KN_RUN_FLAT(block_reads_block_kernel, 2, 1, out);
    case 5:
        return KN_RUN_FLAT(plain_and_atomic_kernel, 1, 64, (int *)p);
    case 6:
        return KN_RUN(unwritten_kernel, 1, 64, 0, out);
    case 7:
        return KN_RUN(unwritten_dynamic_kernel, 1, 64, 256, out);
    case 8:
        return KN_RUN(beyond_dynamic_kernel, 1, 64, 256, out);
    case 9:
        return KN_RUN_FLAT(beyond_array_kernel, 1, 64, out);
    case 10:
        return KN_RUN_FLAT(scratch_kernel, 1, 64, out, (const float *)scratch);
    case 11:
        kn_cuda_scratch(64 * sizeof(float));
        return KN_RUN_FLAT(scratch_kernel, 1, 64, out, (const float *)scratch);
    case 12:
        return KN_RUN_FLAT(misaligned_kernel, 1, 8, out);
    case 13:
        return KN_RUN(lane_has_left_kernel, 1, 64, 0, out);
    case 14:
        return KN_RUN(no_such_lane_kernel, 1, 40, 0, out);
    case 15:
        return KN_RUN(two_shuffles_kernel, 1, 64, 0, out);
    case 16:
        return KN_RUN(two_barriers_kernel, 1, 64, 0, out);
    case 17:
        return KN_RUN_FLAT(index_kernel, 1, 1, out, 4);
    case 18:
        return KN_RUN_FLAT(to_int_kernel, 1, 1, (int *)p, 3e9f);
    case 19:
        return KN_RUN(large_shared_kernel, 1, 64, 47 << 10, out);
    default:
        return KN_DECLINED;
    }
}

/* Launches that some GPU refuses: an error stands. */
extern "C" KN_API kn_status emulated_refused(int i, void *p)
{
    float *out = (float *)p;
    switch (i) {
    case 0:
        return KN_RUN(large_shared_kernel, 1, 1025, 0, out);
    case 1:
        return KN_RUN(large_shared_kernel, 1, 64, (48 << 10) + 4, out);
    case 2:
        return KN_RUN(large_shared_kernel, 0, 64, 0, out);
    case 3:
        return KN_RUN(large_shared_kernel, dim3(1, 65536), 64, 0, out);
    case 4:
        return KN_RUN(large_shared_kernel, 1, dim3(1, 1, 65), 0, out);
    default:
        return KN_DECLINED;
    }
}
