/* kernels/cuda/kernels/random.cu: draws and dropout with the bits of kernels/philox.h. Ten rounds
 * serve four elements: about 20 integer operations an element, so dropout of bf16 is near the
 * memory's pace. */
#include "kernels/cuda/kernels/elements.cuh"

namespace
{
/* ---- draws ----------------------------------------------------------------------------------- */

struct draws {
    kn_random kind;
    uint64_t seed, stream, start;
    double p0, p1;
    const uint64_t *seed_at;
};

/* The draw is an f32 in every dtype, as in the reference. */
static __device__ double draw(const draws &d, uint32_t word, double)
{
    if (d.kind == KN_NORMAL)
        return fma(d.p1, (double)kn_normal(word), d.p0);
    double x = fma(kn_add_rn(d.p1, -d.p0), (double)kn_uniform01(word), d.p0);
    return x < d.p1 ? x : d.p0;
}
static __device__ float draw(const draws &d, uint32_t word, float)
{
    float p0 = (float)d.p0, p1 = (float)d.p1;
    if (d.kind == KN_NORMAL)
        return fmaf(p1, kn_normal(word), p0);
    return kn_uniform_between(kn_uniform01(word), p0, p1);
}

/* A thread takes one block of Philox, which holds up to four elements; `aligned`: always four, and
 * 16-byte (8-byte) stores. */
template <typename T>
KN_KERNEL(256, random_kernel, T *dst, int64_t count, const draws d, int64_t blocks, bool aligned)
{
    typedef typename kn_compute<T>::type A;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, n = (int64_t)gridDim.x * blockDim.x;
    const uint64_t seed = kn_seed_of(d.seed, d.seed_at);
    for (; t < blocks; t += n) {
        uint64_t block = d.start / 4 + (uint64_t)t;
        kn_philox4 words = kn_philox(seed, d.stream, block);
        int64_t first = (int64_t)(block * 4 - d.start); /* may lie before dst */
        kn_pack<T, 4> r;
#pragma unroll
        for (int v = 0; v < 4; v++)
            kn_put(&r.x[v], draw(d, words.word[v], (A)0));
        if (aligned && first + 4 <= count) {
            kn_save<4>(dst + first, r);
            continue;
        }
#pragma unroll
        for (int v = 0; v < 4; v++)
            if (first + v >= 0 && first + v < count)
                dst[first + v] = r.x[v];
    }
}

template <typename T> kn_status run_random(const kn_random_args *a)
{
    draws d = { a->kind, a->seed, a->stream, (uint64_t)a->start, a->p0, a->p1, a->seed_at };
    int64_t count = kn_array_numel(&a->dst);
    if (count == 0)
        return KN_DONE;
    uint64_t last = d.start + (uint64_t)count - 1;
    int64_t blocks = (int64_t)(last / 4 - d.start / 4) + 1;
    bool aligned = d.start % 4 == 0 && (uintptr_t)a->dst.data % alignof(kn_pack<T, 4>) == 0;
    return KN_RUN_FLAT(random_kernel<T>, kn_blocks(blocks, 256, 1), 256, (T *)a->dst.data, count, d,
                       blocks, aligned);
}

/* ---- rounding at random ---------------------------------------------------------------------- */

struct rounding {
    int64_t rows, n, groups; /* groups: blocks of Philox that a row of n can touch */
    uint64_t seed, stream, start, step;
    const uint64_t *seed_at;
    const double *step_at;
    bool f16;
};

/* A thread takes what one block of Philox has of a row: up to four elements. */
template <typename T> KN_KERNEL(256, round_kernel, uint16_t *dst, const T *src, const rounding r)
{
    const uint64_t key = r.seed_at ? kn_step_key(*r.seed_at, *r.step_at) : r.seed;
    int64_t t = (int64_t)blockIdx.x * blockDim.x + threadIdx.x,
            all = (int64_t)gridDim.x * blockDim.x;
    for (; t < r.rows * r.groups; t += all) {
        int64_t row = t / r.groups;
        uint64_t first = r.start + (uint64_t)row * r.step,
                 block = first / 4 + (uint64_t)(t % r.groups);
        int64_t at = (int64_t)(block * 4 - first); /* may lie before the row */
        kn_philox4 words = kn_philox(key, r.stream, block);
#pragma unroll
        for (int v = 0; v < 4; v++)
            if (at + v >= 0 && at + v < r.n) {
                float x = (float)kn_get(src + row * r.n + at + v);
                dst[row * r.n + at + v] = r.f16 ? kn_f16_at_random(x, words.word[v])
                                                : kn_bf16_at_random(x, words.word[v]);
            }
    }
}

template <typename T> kn_status run_round(const kn_round_args *a)
{
    int64_t rows = a->dst.shape[0], n = a->dst.shape[1];
    rounding r = { rows,
                   n,
                   (n + 3) / 4 + 1,
                   a->seed,
                   a->stream,
                   (uint64_t)a->start,
                   (uint64_t)a->step,
                   a->seed_at,
                   a->step_at,
                   a->dst.dtype == KN_F16 };
    if (rows == 0 || n == 0)
        return KN_DONE;
    return KN_RUN_FLAT(round_kernel<T>, kn_blocks(rows * r.groups, 256, 1), 256,
                       (uint16_t *)a->dst.data, (const T *)a->src.data, r);
}

/* ---- dropout --------------------------------------------------------------------------------- */

template <typename T> struct dropout_op : kn_of_one<T> {
    typedef typename kn_compute<T>::type A;
    typename kn_kept<T>::type y;
    uint64_t seed, stream;
    const uint64_t *seed_at;
    uint32_t threshold;
    A scale;

    static dropout_op of(const kn_dropout_args *a)
    {
        return { { kn_kept<T>::of(&a->x) },
                 kn_kept<T>::of(&a->y),
                 a->seed,
                 a->stream,
                 a->seed_at,
                 kn_dropout_threshold(a->p),
                 (A)kn_dropout_scale(a->p) };
    }
    template <int V>
    __device__ void finish(const int64_t (&at)[2], const kn_pack<T, V> &r, int64_t first) const
    {
        A z[V];
        kn_widen(r, z);
        uint64_t key = kn_seed_of(seed, seed_at);
        kn_philox4 words;
#pragma unroll
        for (int v = 0; v < V; v++) {
            if (v % 4 == 0)
                words = kn_philox(key, stream, (uint64_t)(first + v) / 4);
            uint32_t word = V < 4 ? kn_philox_word(words, first + v) : words.word[v % 4];
            z[v] = kn_dropout_keeps(word, threshold) ? kn_mul_rn(z[v], scale) : 0;
        }
        kn_save_wide<V>(y + at[0], z);
    }
};
} // namespace

extern "C" kn_status kn_cuda_random(const void *args)
{
    const kn_random_args *a = (const kn_random_args *)args;
    KN_FLOATS(a->dst.dtype, run_random, a);
}

extern "C" kn_status kn_cuda_dropout(const void *args)
{
    const kn_dropout_args *a = (const kn_dropout_args *)args;
    const kn_array *const arrays[] = { &a->y, &a->x };
    if (a->y.dtype != a->x.dtype)
        return KN_DECLINED;
    return kn_each_float<dropout_op>(a->y.dtype, arrays, a);
}

extern "C" kn_status kn_cuda_round(const void *args)
{
    const kn_round_args *a = (const kn_round_args *)args;
    KN_FLOATS(a->src.dtype, run_round, a);
}

/* ---- the key of another generator's draw ----------------------------------------------------- */

namespace
{
KN_KERNEL(32, key_kernel, uint64_t *to, uint64_t *offset, uint64_t seed, const uint64_t *seed_at,
          uint64_t stream)
{
    if (threadIdx.x > 0)
        return;
    kn_philox4 words = kn_philox(kn_seed_of(seed, seed_at), stream, 0);
    *to = (uint64_t)words.word[1] << 32 | words.word[0];
    *offset = 0;
}
} // namespace

extern "C" kn_status kn_cuda_draw_key(uint64_t *to, uint64_t *offset, uint64_t seed,
                                      const uint64_t *seed_at, uint64_t stream)
{
    return KN_RUN_FLAT(key_kernel, 1, 32, to, offset, seed, seed_at, stream);
}
