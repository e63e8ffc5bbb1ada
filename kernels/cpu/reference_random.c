/* kernels/cpu/reference_random.c: random draws and dropout. The numbers are those of
 * kernels/philox.h: element i is a function of (seed, stream, i) alone. */
#include "kernels/cpu/reference.h"
#include "kernels/philox.h"

/* The draw is an f32 in every dtype, so that an f64 check sees the numbers of the f32 run. */
static double draw(const kn_random_args *a, uint32_t word, bool f64)
{
    float p0 = (float)a->p0, p1 = (float)a->p1;
    if (a->kind == KN_NORMAL) {
        float z = kn_normal(word);
        return f64 ? fma(a->p1, z, a->p0) : fmaf(p1, z, p0);
    }
    float u = kn_uniform01(word);
    if (!f64)
        return kn_uniform_between(u, p0, p1);
    double x = fma(a->p1 - a->p0, u, a->p0);
    return x < a->p1 ? x : a->p0;
}

/* dst[i] = draw(seed, stream, start + i). */
kn_status kn_ref_random(const void *args)
{
    const kn_random_args *a = args;
    int64_t n = kn_array_numel(&a->dst);
    const uint64_t seed = kn_seed_of(a->seed, a->seed_at);
    for (int64_t i = 0; i < n; i++) {
        uint32_t word = kn_philox_at(seed, a->stream, (uint64_t)(a->start + i));
        kn_ref_set(&a->dst, i, draw(a, word, a->dst.dtype == KN_F64));
    }
    return KN_DONE;
}

/* dst[i, j] = src[i, j], rounded by word start + i step + j. */
kn_status kn_ref_round(const void *args)
{
    const kn_round_args *a = args;
    int64_t rows = a->dst.shape[0], n = a->dst.shape[1];
    uint64_t seed = a->seed_at ? kn_step_key(*a->seed_at, *a->step_at) : a->seed;
    kn_philox4 w = { { 0 } };
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < n; j++) {
            uint64_t e = (uint64_t)(a->start + i * a->step + j);
            if (j == 0 || e % 4 == 0)
                w = kn_philox(seed, a->stream, e / 4);
            float x = (float)kn_ref_get(&a->src, i * n + j);
            kn_ref_set(&a->dst, i * n + j,
                       (double)kn_rounded_at_random(a->dst.dtype, x, w.word[e % 4]));
        }
    return KN_DONE;
}

/* y[i] = uniform(seed, stream, i) >= p ? x[i] / (1 - p) : 0, i the row-major index. */
kn_status kn_ref_dropout(const void *args)
{
    const kn_dropout_args *a = args;
    uint64_t seed = kn_seed_of(a->seed, a->seed_at);
    uint32_t threshold = kn_dropout_threshold(a->p);
    double scale = kn_dropout_scale(a->p);
    if (a->y.dtype != KN_F64)
        scale = (float)scale;
    for (kn_ref_walk w = kn_ref_walk_over(&a->y, &a->x, NULL); w.more; kn_ref_walk_next(&w)) {
        bool keep = kn_dropout_keeps(kn_philox_at(seed, a->stream, (uint64_t)w.i), threshold);
        kn_ref_set_computed(&a->y, w.off[0], keep ? kn_ref_get(&a->x, w.off[1]) * scale : 0);
    }
    return KN_DONE;
}
