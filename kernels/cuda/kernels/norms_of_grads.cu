/* kernels/cuda/kernels/norms_of_grads.cu: the greatest magnitude, and sums of squares and powers in
 * fixed point.
 *
 * Maxima and additions of integers don't depend on the order, so however the values lie in blocks,
 * and on whatever device, the bits are the reference's. Floor: each value is read once, by 16 bytes
 * where a run is aligned; each block leaves one partial result, which one block joins. */
#include "kernels/error.h"
#include "kernels/cuda/kernels/cuda_internal.h"
#include "kernels/cuda/kernels/rows.cuh"

#define THREADS 256

/* The runs, which the kernel finds in device memory. */
struct run_list {
    const kn_run *run;
    int runs;
};

/* Calls use(x, r) for each of this thread's values of run r. */
template <typename T, typename F>
static __device__ inline void each_of_run(const T *run, int64_t count, int r, F use)
{
    const T *p = kn_global(run);
    const int n = 16 / (int)sizeof(T);
    typedef typename kn_compute<T>::type A;
    int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;
    int64_t threads = (int64_t)gridDim.x * blockDim.x;
    int64_t units = (uintptr_t)p % 16 == 0 ? count / n : 0;
    for (int64_t u = thread; u < units; u += threads) {
        A x[n];
        row_load<true, n>(p, 1, u, n, x);
        for (int i = 0; i < n; i++)
            use(x[i], r);
    }
    for (int64_t i = units * n + thread; i < count; i += threads)
        use(kn_get(p + i), r);
}

template <typename F> static __device__ inline void each_value(const run_list &l, F use)
{
    for (int r = 0; r < l.runs; r++) {
        const kn_run &run = l.run[r];
        switch (run.dtype) {
        case KN_F32:
            each_of_run((const float *)run.data, run.count, r, use);
            break;
        case KN_BF16:
            each_of_run((const kn_bf16 *)run.data, run.count, r, use);
            break;
        case KN_F16:
            each_of_run((const kn_f16 *)run.data, run.count, r, use);
            break;
        default:
            each_of_run((const double *)run.data, run.count, r, use);
            break;
        }
    }
}

/* Blocks for all the runs' values; list: their copy on the device. */
static kn_status runs_prepare(const kn_run *run, int runs, run_list *list, unsigned *grid)
{
    int64_t count = 0;
    for (int r = 0; r < runs; r++) {
        if (!kn_dtype_is_float(run[r].dtype))
            return KN_DECLINED;
        count += run[r].count;
    }
    list->runs = runs;
    list->run = nullptr;
    if (runs > 0 && !(list->run = (const kn_run *)kn_cuda_table(run, (size_t)runs * sizeof *run)))
        return KN_FAILED;
    unsigned most = 8 * (unsigned)kn_cuda_multiprocessors();
    *grid = kn_blocks(count, THREADS, 16);
    if (*grid > most)
        *grid = most;
    return KN_DONE;
}

/* ---- absmax ---------------------------------------------------------------------------------- */

/* The greatest magnitude, and minus the number of the first run that has a value which isn't
 * finite: each the greatest of what threads and blocks found. */
struct extremes {
    double max, first;
};

static __device__ inline extremes extremes_of_block(extremes e)
{
    KN_SHARED double buffer[33];
    e.max = kn_block_max(e.max, buffer);
    e.first = kn_block_max(e.first, buffer);
    return e;
}

KN_KERNEL(THREADS, absmax_kernel, run_list list, extremes *partial)
{
    extremes e = { 0, -INFINITY };
    each_value(list, [&](auto x, int r) {
        x = x < 0 ? -x : x;
        if (!(x <= e.max)) { /* NaN stays: nothing is greater */
            e.max = e.max != e.max ? e.max : (double)x;
            if (e.first < -r && !isfinite((float)x)) /* runs come in their order */
                e.first = -r;
        }
    });
    e = extremes_of_block(e);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = e;
}

KN_KERNEL(THREADS, absmax_total_kernel, const extremes *partial, int parts, float *out,
          int64_t *first)
{
    extremes e = { 0, -INFINITY };
    for (int i = (int)threadIdx.x; i < parts; i += (int)blockDim.x) {
        e.max = e.max != e.max || e.max > partial[i].max ? e.max : partial[i].max;
        e.first = e.first > partial[i].first ? e.first : partial[i].first;
    }
    e = extremes_of_block(e);
    if (threadIdx.x != 0)
        return;
    *out = (float)e.max;
    if (first)
        *first = isfinite(e.first) ? (int64_t)-e.first : -1;
}

extern "C" kn_status kn_cuda_absmax(const void *args)
{
    const kn_absmax_args *a = (const kn_absmax_args *)args;
    run_list list;
    unsigned grid;
    kn_status s = runs_prepare(a->run, a->runs, &list, &grid);
    if (s != KN_DONE)
        return s;
    extremes *partial = (extremes *)kn_cuda_scratch(grid * sizeof *partial);
    if (!partial || KN_RUN(absmax_kernel, grid, THREADS, 0, list, partial) != KN_DONE)
        return KN_FAILED;
    return KN_RUN(absmax_total_kernel, 1, THREADS, 0, (const extremes *)partial, (int)grid, a->out,
                  a->first);
}

/* ---- sums in fixed point --------------------------------------------------------------------- */

/* An integer of 128 bits: sums of up to 2^64 values below 2^64. */
struct wide {
    unsigned long long low, high;
};

static __device__ inline void wide_add(wide &a, const wide &b)
{
    a.low += b.low;
    a.high += b.high + (a.low < b.low);
}

static __device__ inline wide wide_block_sum(wide x, wide *buffer)
{
    int lane = (int)threadIdx.x % 32, warp = (int)threadIdx.x / 32;
    for (int o = 16; o > 0; o >>= 1) {
        wide y = { __shfl_xor_sync(KN_FULL_WARP, x.low, o),
                   __shfl_xor_sync(KN_FULL_WARP, x.high, o) };
        wide_add(x, y);
    }
    if (lane == 0)
        buffer[warp] = x;
    __syncthreads();
    x = buffer[0];
    for (int w = 1; w < THREADS / 32; w++)
        wide_add(x, buffer[w]);
    return x;
}

/* p == 0: floor((x 2^-e)^2 2^60) with absmax 2^-e in [1/2, 1), else floor(min(1, |x| / absmax)^p
 * 2^60). */
KN_KERNEL(THREADS, fixed_sum_kernel, run_list list, const float *absmax, double p, wide *partial)
{
    KN_SHARED wide buffer[THREADS / 32];
    wide sum = { 0, 0 };
    double max = (double)*absmax;
    if (max > 0 && max <= 3.5e38) { /* finite */
        int e;
        frexp(max, &e);
        double scale = ldexp(1.0, -e);
        each_value(list, [&](auto x, int) {
            double v;
            if (p == 0) {
                v = (double)x * scale;
                v = v * v;
            } else {
                v = fabs((double)x) / max;
                v = pow(v < 1 ? v : 1.0, p);
            }
            wide_add(sum, { (unsigned long long)(v * 0x1p60), 0 });
        });
    }
    sum = wide_block_sum(sum, buffer);
    if (threadIdx.x == 0)
        partial[blockIdx.x] = sum;
}

KN_KERNEL(THREADS, fixed_total_kernel, const wide *partial, int parts, int64_t *out)
{
    KN_SHARED wide buffer[THREADS / 32];
    wide sum = { 0, 0 };
    for (int i = (int)threadIdx.x; i < parts; i += THREADS)
        wide_add(sum, partial[i]);
    sum = wide_block_sum(sum, buffer);
    if (threadIdx.x != 0)
        return;
    for (int k = 0; k < KN_SQSUM_LIMBS; k++) {
        out[k] = (int64_t)(sum.low & ((1ULL << 40) - 1));
        sum.low = sum.low >> 40 | sum.high << 24;
        sum.high >>= 40;
    }
}

static kn_status fixed_sum(const kn_run *run, int runs, const float *absmax, double p, int64_t *out)
{
    run_list list;
    unsigned grid;
    kn_status s = runs_prepare(run, runs, &list, &grid);
    if (s != KN_DONE)
        return s;
    wide *partial = (wide *)kn_cuda_scratch(grid * sizeof *partial);
    if (!partial || KN_RUN(fixed_sum_kernel, grid, THREADS, 0, list, absmax, p, partial) != KN_DONE)
        return KN_FAILED;
    return KN_RUN(fixed_total_kernel, 1, THREADS, 0, (const wide *)partial, (int)grid, out);
}

extern "C" kn_status kn_cuda_sqsum(const void *args)
{
    const kn_sqsum_args *a = (const kn_sqsum_args *)args;
    return fixed_sum(a->run, a->runs, a->absmax, 0, a->out);
}

extern "C" kn_status kn_cuda_powsum(const void *args)
{
    const kn_powsum_args *a = (const kn_powsum_args *)args;
    return fixed_sum(a->run, a->runs, a->absmax, a->p, a->out);
}
