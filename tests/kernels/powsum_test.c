/* tests/kernels/powsum_test.c: sums of p-th powers in fixed point and the norms made of them. */
#include "kernels/kernels.h"
#include "kernels/philox.h"
#include "tests/kn_test.h"

enum { N = 3000 };

static kn_stream *stream(void)
{
    return kn_compute_stream(KN_CPU);
}

static float norm_of(const int64_t *limbs, float max, double p)
{
    float norm = -1;
    double coef;
    KN_CHECK(
        KN_LAUNCH(stream(), KN_K_CLIP, ((kn_clip_args){ limbs, &max, 1, 0, &norm, &coef, p })));
    return norm;
}

static void sum_of(const kn_run *run, int runs, float max, double p, int64_t *limbs)
{
    KN_CHECK(KN_LAUNCH(stream(), KN_K_POWSUM, ((kn_powsum_args){ run, runs, &max, p, limbs })));
}

/* For every partition of the values over ranks, whose limbs are added: the same bits, and the right
 * norm. */
KN_TEST(powsum, norms_of_every_order_and_partition)
{
    static float x[N];
    float max = 0;
    for (int i = 0; i < N; i++) {
        uint32_t word = kn_philox_at(1, 1, (uint64_t)i);
        x[i] = ldexpf(kn_normal(word), (int)(word % 20) - 10);
        max = fmaxf(max, fabsf(x[i]));
    }
    const double order[] = { 0.5, 1, 1.5, 2, 3, 10, 1000 };
    for (size_t k = 0; k < sizeof order / sizeof *order; k++) {
        double p = order[k], sum = 0;
        for (int i = 0; i < N; i++)
            sum += pow(fabs(x[i] / (double)max), p);
        double want = max * pow(sum, 1 / p);
        int64_t all[KN_SQSUM_LIMBS];
        sum_of(&(kn_run){ x, N, KN_F32 }, 1, max, p, all);
        float norm = norm_of(all, max, p);
        KN_CHECK(fabs(norm - want) <= 1e-7 * want, "p %g: %.9g, not %.9g", p, (double)norm, want);
        for (int cut = 1; cut < N; cut = cut * 5 + 1) {
            int64_t a[KN_SQSUM_LIMBS], b[KN_SQSUM_LIMBS];
            kn_run run[3] = { { x + cut, N - cut, KN_F32 },
                              { x, cut / 2, KN_F32 },
                              { x + cut / 2, cut - cut / 2, KN_F32 } };
            sum_of(run, 1, max, p, a);
            sum_of(run + 1, 2, max, p, b);
            for (int j = 0; j < KN_SQSUM_LIMBS; j++)
                a[j] += b[j];
            KN_CHECK(norm_of(a, max, p) == norm, "p %g, cut at %d", p, cut);
        }
    }
    int64_t limbs[KN_SQSUM_LIMBS] = { 1, 2, 3, 4 };
    KN_CHECK(norm_of(limbs, max, HUGE_VAL) == max, "p = infinity is the maximum");
}

KN_TEST(powsum, odd_values)
{
    int64_t limbs[KN_SQSUM_LIMBS];
    double d[3] = { -0.1, 0.05, 0.1 }; /* f64 is above its rounding to f32, or below */
    kn_run run = { d, 3, KN_F64 };
    sum_of(&run, 1, (float)0.1, 1, limbs);
    KN_CHECK(fabs(norm_of(limbs, (float)0.1, 1) - 0.25f) < 1e-7);
    sum_of(&run, 1, (float)0.1, 1e9, limbs);
    KN_CHECK(norm_of(limbs, (float)0.1, 1e9) <= 0.1000001f, "no overflow at large orders");
    for (int i = 0; i < 3; i++) {
        float max = i == 0 ? 0 : i == 1 ? INFINITY : NAN;
        sum_of(&run, 1, max, 3, limbs);
        for (int k = 0; k < KN_SQSUM_LIMBS; k++)
            KN_CHECK(limbs[k] == 0);
        float norm = norm_of(limbs, max, 3);
        KN_CHECK(i == 2 ? isnan(norm) : norm == max, "%g", (double)norm);
    }
    float one = 1;
    REFUSED(KN_LAUNCH(stream(), KN_K_POWSUM, ((kn_powsum_args){ &run, 1, &one, 0, limbs })),
            "powsum: p is 0");
    REFUSED(KN_LAUNCH(stream(), KN_K_POWSUM, ((kn_powsum_args){ &run, 1, &one, HUGE_VAL, limbs })),
            "powsum: p is inf");
    int32_t whole = 1;
    kn_run bad = { &whole, 1, KN_I32 };
    REFUSED(KN_LAUNCH(stream(), KN_K_POWSUM, ((kn_powsum_args){ &bad, 1, &one, 1, limbs })),
            "powsum");
    KN_CHECK(kn_kernel_cost(KN_K_POWSUM, &(kn_powsum_args){ &run, 1, &one, 1, limbs }).bytes >= 24);
}
