/* tests/kernels/reference_optim_test.c: the reference provider's sums over ranks, optimizers and
 * norms against known values and formulas in double. */
#include "kernels/convert.h"
#include "kernels/philox.h"
#include "tests/kernels/reference.h"

KN_TEST(reference_optim, sum_n)
{
    float a[3] = { -0.0f, 1, 0x1p24f }, b[3] = { -0.0f, 2, 1 }, c[3] = { -0.0f, 3, 1 }, y[3];
    kn_sum_n_args s = { y, NULL, { a, b, c }, 3, 3, KN_F32, KN_F32 };
    RUN(KN_K_SUM_N, s);
    KN_CHECK(signbit(y[0]) && y[1] == 6, "a negative zero survives");
    KN_CHECK(y[2] == 0x1p24f, "f32, left to right: %.1f", (double)y[2]);
    s.acc = s.dst = a;
    RUN(KN_K_SUM_N, s);
    KN_CHECK(a[1] == 1 + 1 + 2 + 3, "in place on acc");
    uint16_t h = kn_f32_to_bf16(1), tiny = kn_f32_to_bf16(0x1p-9f), r;
    kn_sum_n_args half = { &r, NULL, { &h, &tiny, &tiny, &tiny }, 4, 1, KN_BF16, KN_BF16 };
    RUN(KN_K_SUM_N, half);
    KN_CHECK(r == kn_f32_to_bf16(1 + 0x1p-7f), "bf16 adds in f32 and rounds once: %04x", r);
}

KN_TEST(reference_optim, adamw)
{
    float p[2] = { 1, -2 }, m[2] = { 0 }, v[2] = { 0 }, g[2] = { 0.5f, -4 };
    double lr = 0.1f, scale = 0.5, step = 1;
    kn_opt_piece piece = { p, g, m, v, NULL, 2, 2.0f, 0.25f, KN_F32, KN_F32, NULL, KN_F32 };
    kn_adamw_args a = { { &piece, 1, &lr, &scale, &step, NULL }, 0.9, 0.999, 1e-8 };
    double P[2] = { 1, -2 }, M[2] = { 0 }, V[2] = { 0 };
    for (int t = 1; t <= 5; t++) {
        step = (float)t;
        RUN(KN_K_ADAMW, a);
        for (int i = 0; i < 2; i++) {
            double gi = g[i] * 0.5;
            M[i] = 0.9 * M[i] + 0.1 * gi;
            V[i] = 0.999 * V[i] + 0.001 * gi * gi;
            double update = M[i] / (1 - pow(0.9, t)) / (sqrt(V[i] / (1 - pow(0.999, t))) + 1e-8);
            P[i] -= 0.1 * 2 * (update + 0.25 * P[i]);
            KN_CHECK(near(p[i], P[i], 2e-6) && near(m[i], M[i], 1e-6) && near(v[i], V[i], 1e-6),
                     "step %d: p %g, not %g", t, (double)p[i], P[i]);
        }
    }
}

KN_TEST(reference_optim, sgd)
{
    for (int nesterov = 0; nesterov < 2; nesterov++) {
        double p = 1, m = 55, g = 0.5, P = 1, M = 0;
        double lr = 0.25, scale = 1, step = 1;
        kn_opt_piece piece = { &p, &g, &m, NULL, NULL, 1, 1, 0.5f, KN_F64, KN_F64, NULL, KN_F64 };
        kn_sgd_args a = { { &piece, 1, &lr, &scale, &step, NULL }, 0.5, 0.25, nesterov };
        for (int t = 1; t <= 3; t++) {
            step = (float)t;
            RUN(KN_K_SGD, a);
            double grad = g + 0.5 * P;
            M = t == 1 ? grad : 0.5 * M + 0.75 * grad;
            P -= 0.25 * (nesterov ? grad + 0.5 * M : M);
            KN_CHECK(near(p, P, 1e-15) && near(m, M, 1e-15), "step %d: %g, not %g", t, p, P);
        }
    }
}

KN_TEST(reference_optim, lion)
{
    float p[3] = { 1, -2, 3 }, m[3] = { 0 }, g[3] = { 0.5f, -4, 0 };
    double lr = 0.1f, scale = 0.5, step = 1;
    kn_opt_piece piece = { p, g, m, NULL, NULL, 3, 2.0f, 0.25f, KN_F32, KN_F32, NULL, KN_F32 };
    kn_lion_args a = { { &piece, 1, &lr, &scale, &step, NULL }, 0.9, 0.99 };
    double P[3] = { 1, -2, 3 }, M[3] = { 0 };
    for (int t = 1; t <= 5; t++) {
        g[0] = t < 4 ? 0.5f : -9; /* the sign turns */
        RUN(KN_K_LION, a);
        for (int i = 0; i < 3; i++) {
            double c = 0.9 * M[i] + 0.1 * 0.5 * g[i];
            M[i] = 0.99 * M[i] + 0.01 * 0.5 * g[i];
            P[i] -= 0.1 * 2 * ((c > 0) - (c < 0) + 0.25 * P[i]);
            KN_CHECK(near(p[i], P[i], 1e-6) && near(m[i], M[i], 1e-6), "step %d: p %g, not %g", t,
                     (double)p[i], P[i]);
        }
    }
    g[2] = NAN;
    RUN(KN_K_LION, a);
    KN_CHECK(isnan(p[2]) && isnan(m[2]) && !isnan(p[1]));
}

/* ---- the norm ------------------------------------------------------------------------------ */

static void norm_of(const kn_run *run, int runs, float absmax, int64_t limbs[KN_SQSUM_LIMBS],
                    float *norm)
{
    double coef;
    RUN(KN_K_SQSUM, (kn_sqsum_args){ run, runs, &absmax, limbs });
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &absmax, 1, 0, norm, &coef });
}

static float absmax_of(const kn_run *run, int runs)
{
    float m;
    RUN(KN_K_ABSMAX, (kn_absmax_args){ run, runs, &m });
    return m;
}

/* For every partition of the values into runs and of the runs over ranks, whose limbs are added:
 * one norm. */
KN_TEST(reference_optim, norm_does_not_depend_on_the_partition)
{
    enum { N = 5000 };
    static float x[N];
    for (int i = 0; i < N; i++) {
        uint32_t word = kn_philox_at(1, 1, (uint64_t)i);
        x[i] = ldexpf(kn_normal(word), (int)(word % 40) - 30);
    }
    double sum = 0;
    for (int i = 0; i < N; i++)
        sum += (double)x[i] * x[i];
    kn_run all = { x, N, KN_F32 };
    float max = absmax_of(&all, 1), norm;
    int64_t want[KN_SQSUM_LIMBS];
    norm_of(&all, 1, max, want, &norm);
    KN_CHECK(near(norm, sqrt(sum), 1e-7), "norm %.9g, not %.9g", (double)norm, sqrt(sum));
    for (int cut = 1; cut < N; cut = cut * 3 + 1) {
        kn_run runs[] = { { x + cut, N - cut, KN_F32 },
                          { x, cut / 2, KN_F32 },
                          { x + cut / 2, cut - cut / 2, KN_F32 } };
        int64_t limbs[KN_SQSUM_LIMBS], a[KN_SQSUM_LIMBS], b[KN_SQSUM_LIMBS];
        float n1, n2;
        double coef;
        norm_of(runs, 3, absmax_of(runs, 3), limbs, &n1);
        KN_CHECK(memcmp(limbs, want, sizeof limbs) == 0 && n1 == norm, "runs cut at %d", cut);
        norm_of(runs, 1, max, a, &n2);
        norm_of(runs + 1, 2, max, b, &n2);
        for (int k = 0; k < KN_SQSUM_LIMBS; k++)
            a[k] += b[k]; /* limbs may now exceed 40 bits */
        RUN(KN_K_CLIP, (kn_clip_args){ a, &max, 1, 0, &n2, &coef });
        KN_CHECK(n2 == norm, "two ranks cut at %d: %a, not %a", cut, (double)n2, (double)norm);
    }
}

KN_TEST(reference_optim, norm_carries_over_all_limbs)
{
    enum { N = 1 << 21 }; /* N (1 - 2^-23) 2^60 needs the third limb */
    static float x[N];
    for (int i = 0; i < N; i++)
        x[i] = 1.0f - 0x1p-24f;
    kn_run run = { x, N, KN_F32 };
    int64_t limbs[KN_SQSUM_LIMBS];
    float norm;
    norm_of(&run, 1, x[0], limbs, &norm);
    KN_CHECK(limbs[2] != 0 && near(norm, x[0] * sqrt((double)N), 1e-7), "%.9g", (double)norm);
    for (int k = 0; k < KN_SQSUM_LIMBS; k++)
        KN_CHECK(limbs[k] >= 0 && limbs[k] < 1LL << 40);
}

KN_TEST(reference_optim, norm_of_odd_values)
{
    float x[4] = { 1, -3, 0x1p-149f, 2 }, norm, max;
    double coef;
    int64_t limbs[KN_SQSUM_LIMBS];
    kn_run run = { x, 4, KN_F32 };
    x[1] = -INFINITY;
    KN_CHECK(absmax_of(&run, 1) == INFINITY);
    norm_of(&run, 1, INFINITY, limbs, &norm);
    KN_CHECK(norm == INFINITY && limbs[0] == 0 && limbs[1] == 0, "infinite");
    x[2] = NAN;
    KN_CHECK(isnan(absmax_of(&run, 1)), "NaN beats infinity");
    norm_of(&run, 1, NAN, limbs, &norm);
    KN_CHECK(isnan(norm));
    KN_CHECK(absmax_of(NULL, 0) == 0);
    norm_of(NULL, 0, 0, limbs, &norm);
    KN_CHECK(norm == 0, "nothing");
    x[0] = 0x1p-149f; /* the smallest positive f32 */
    run.count = 1;
    norm_of(&run, 1, absmax_of(&run, 1), limbs, &norm);
    KN_CHECK(norm == 0x1p-149f, "%a", (double)norm);
    x[0] = 3e38f;
    norm_of(&run, 1, absmax_of(&run, 1), limbs, &norm);
    KN_CHECK(norm == 3e38f, "%a", (double)norm);
    x[0] = 3, x[1] = 4, run.count = 2;
    max = absmax_of(&run, 1);
    RUN(KN_K_SQSUM, (kn_sqsum_args){ &run, 1, &max, limbs });
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &max, 0.5, 1, &norm, &coef });
    KN_CHECK(norm == 2.5f && near(coef, 0.5 / (2.5 + 1e-6), 1e-15), "clipped: %.17g", coef);
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &max, 0.5, 10, &norm, &coef });
    KN_CHECK(coef == 0.5, "below max_norm: scale alone");
    max = NAN;
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &max, 0.5, 10, &norm, &coef });
    KN_CHECK(isnan(norm) && isnan(coef), "NaN is not hidden");
}
