/* tests/kernels/reference_more_test.c: the reference of random draws, attention, rope, the sum over
 * ranks, optimizers and the norm, and the cost of calls; see reference_test.c. */
#include "kernels/kernels.h"
#include "kernels/philox.h"
#include "tests/kn_test.h"

static bool reference(kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    int n = kn_providers(KN_CPU, providers);
    return providers[n - 1]->run[k](args) == KN_DONE;
}
#define RUN(kernel, ...) KN_CHECK(reference(kernel, &(__VA_ARGS__)), "%s", kn_error())

#define ARRAY(data, dtype, ...)                                                                    \
    kn_array_make((data), (dtype), (int)(sizeof((int64_t[]){ __VA_ARGS__ }) / sizeof(int64_t)),    \
                  (int64_t[]){ __VA_ARGS__ })
#define F64(data, ...) ARRAY(data, KN_F64, __VA_ARGS__)
#define F32(data, ...) ARRAY(data, KN_F32, __VA_ARGS__)

static bool near(double a, double b, double tolerance)
{
    return isnan(b) ? isnan(a) : a == b || fabs(a - b) <= tolerance * (1 + fabs(b));
}

static void randomize(double *x, int n, uint64_t stream)
{
    kn_random_args r = {
        .dst = F64(x, n), .kind = KN_NORMAL, .seed = 5, .stream = stream, .p1 = 1
    };
    RUN(KN_K_RANDOM, r);
}

/* ---- random -------------------------------------------------------------------------------- */

KN_TEST(reference, random_is_a_function_of_the_index)
{
    float whole[37], part[20];
    kn_random_args a = { F32(whole, 37), KN_NORMAL, 8, 1ULL << 40, 0, 2, 0.5 };
    RUN(KN_K_RANDOM, a);
    a.dst = F32(part, 20);
    a.start = 11;
    RUN(KN_K_RANDOM, a);
    KN_CHECK(memcmp(part, whole + 11, sizeof part) == 0, "start");
    KN_CHECK(whole[5] == fmaf(0.5f, kn_normal(kn_philox_at(8, 1ULL << 40, 5)), 2), "formula");
    double wide[20];
    a.dst = F64(wide, 20);
    RUN(KN_K_RANDOM, a);
    for (int i = 0; i < 20; i++)
        KN_CHECK((float)wide[i] == part[i], "f64 sees the same draw");
}

KN_TEST(reference, dropout)
{
    enum { N = 40000 };
    static float x[N], y[N], back[N];
    for (int i = 0; i < N; i++)
        x[i] = 1;
    kn_dropout_args a = { F32(y, N), F32(x, N), 0.25, 1, 2 };
    RUN(KN_K_DROPOUT, a);
    int kept = 0;
    for (int i = 0; i < N; i++) {
        bool keep = kn_uniform01(kn_philox_at(1, 2, (uint64_t)i)) >= 0.25f;
        KN_CHECK(y[i] == (keep ? 1.0f / 0.75f : 0.0f), "element %d is %g", i, (double)y[i]);
        kept += keep;
    }
    KN_CHECK(fabs(kept / (double)N - 0.75) < 5 * 0.433 / 200, "%d kept", kept);
    a.y = a.x = F32(x, N);
    RUN(KN_K_DROPOUT, a);
    KN_CHECK(memcmp(x, y, sizeof x) == 0, "in place");
    a = (kn_dropout_args){ F32(back, N), F32(y, N), 1, 1, 2 };
    RUN(KN_K_DROPOUT, a);
    KN_CHECK(back[0] == 0 && back[N - 1] == 0, "p = 1 drops all");
}

/* ---- attention ----------------------------------------------------------------------------- */

enum { B = 2, H = 4, G = 2, T = 3, S = 5, D = 4 };

/* One head at a time with the whole matrix of probabilities, unlike the kernel. */
static void plain_attention(double *o, const double *q, const double *k, const double *v,
                            const kn_attention_args *a, int64_t t_len, int64_t s_len)
{
    for (int64_t bh = 0; bh < B * H; bh++) {
        int64_t bg = bh / H * G + bh % H / (H / G);
        for (int64_t t = 0; t < t_len; t++) {
            double p[16], sum = 0;
            for (int64_t s = 0; s < s_len; s++) {
                p[s] = 0;
                for (int d = 0; d < D; d++)
                    p[s] += a->scale * q[(bh * t_len + t) * D + d] * k[(bg * s_len + s) * D + d];
                p[s] = a->causal && s - t > s_len - t_len ? 0 : exp(p[s]);
                sum += p[s];
            }
            for (int d = 0; d < D; d++) {
                double *out = &o[(bh * t_len + t) * D + d];
                *out = 0;
                for (int64_t s = 0; s < s_len && sum > 0; s++) {
                    uint64_t i = (uint64_t)((bh * t_len + t) * s_len + s);
                    float u = kn_uniform01(kn_philox_at(a->seed, a->stream, i));
                    if (u >= a->dropout_p)
                        *out += p[s] / sum * v[(bg * s_len + s) * D + d] / (1 - a->dropout_p);
                }
            }
        }
    }
}

static double weight(int i)
{
    return 1 + 0.3 * ((i * 7) % 5) - 0.1 * i / (i + 3.0);
}

static double attention_loss(const kn_attention_args *a)
{
    RUN(KN_K_ATTENTION, *a);
    double sum = 0;
    for (int i = 0; i < kn_array_numel(&a->o); i++)
        sum += weight(i) * ((double *)a->o.data)[i];
    return sum;
}

static void check_differences(const char *what, const kn_array *x, const double *dx,
                              const kn_attention_args *a)
{
    const double h = 1e-5;
    for (int i = 0; i < kn_array_numel(x); i++) {
        double *at = (double *)x->data + i, keep = *at;
        *at = keep + h;
        double up = attention_loss(a);
        *at = keep - h;
        double down = attention_loss(a);
        *at = keep;
        KN_CHECK(near(dx[i], (up - down) / (2 * h), 1e-7), "%s[%d]: %.9g, differences %.9g", what,
                 i, dx[i], (up - down) / (2 * h));
    }
}

static void attention_case(int64_t t, int64_t s, bool causal, double dropout)
{
    static double q[B * H * S * D], k[B * G * S * D], v[B * G * S * D], o[B * H * S * D],
        want[B * H * S * D], lse[B * H * S], dout[B * H * S * D], dq[B * H * S * D],
        dk[B * G * S * D], dv[B * G * S * D];
    randomize(q, B * H * S * D, 30);
    randomize(k, B * G * S * D, 31);
    randomize(v, B * G * S * D, 32);
    kn_attention_args a = { F64(o, B, H, t, D),
                            F64(lse, B, H, t),
                            F64(q, B, H, t, D),
                            F64(k, B, G, s, D),
                            F64(v, B, G, s, D),
                            0.5,
                            causal,
                            dropout,
                            3,
                            4 };
    attention_loss(&a);
    plain_attention(want, q, k, v, &a, t, s);
    for (int64_t i = 0; i < B * H * t * D; i++)
        KN_CHECK(near(o[i], want[i], 1e-12), "%lld x %lld causal %d: o[%lld] %.12g, not %.12g",
                 (long long)t, (long long)s, causal, (long long)i, o[i], want[i]);
    for (int i = 0; i < B * H * t * D; i++)
        dout[i] = weight(i);
    RUN(KN_K_ATTENTION_GRAD,
        (kn_attention_grad_args){ F64(dq, B, H, t, D), F64(dk, B, G, s, D), F64(dv, B, G, s, D),
                                  F64(dout, B, H, t, D), a.o, a.lse, a.q, a.k, a.v, a.scale, causal,
                                  dropout, a.seed, a.stream });
    check_differences("dq", &a.q, dq, &a);
    check_differences("dk", &a.k, dk, &a);
    check_differences("dv", &a.v, dv, &a);
}

KN_TEST(reference, attention)
{
    attention_case(T, S, false, 0);
    attention_case(T, S, true, 0);
    attention_case(S, T, true, 0); /* the first two queries see nothing */
    attention_case(S, S, true, 0.3);
    attention_case(T, 0, false, 0);
    attention_case(0, S, false, 0);
}

KN_TEST(reference, rope)
{
    double x[2 * 3 * 4], y[2 * 3 * 4], back[2 * 3 * 4];
    randomize(x, 24, 40);
    RUN(KN_K_ROPE, (kn_rope_args){ F64(y, 1, 2, 3, 4), F64(x, 1, 2, 3, 4), 100, 5, false });
    /* head 1, t = 2: position 7; pair (1, 3) turns by 7 * 100^(-1/2) */
    const double *u = x + 5 * 4, *w = y + 5 * 4, angle = 7 / 10.0;
    KN_CHECK(near(w[1], u[1] * cos(angle) - u[3] * sin(angle), 1e-13), "%g", w[1]);
    KN_CHECK(near(w[3], u[3] * cos(angle) + u[1] * sin(angle), 1e-13), "%g", w[3]);
    RUN(KN_K_ROPE, (kn_rope_args){ F64(back, 1, 2, 3, 4), F64(y, 1, 2, 3, 4), 100, 5, true });
    for (int i = 0; i < 24; i++)
        KN_CHECK(near(back[i], x[i], 1e-13), "inverse");
    kn_rope_args bad = { F64(y, 1, 2, 4, 3), F64(x, 1, 2, 4, 3), 100, 0, false };
    KN_CHECK(!reference(KN_K_ROPE, &bad), "odd D");
    KN_CHECK_ERROR("even D");
}

/* ---- sharding and optimizers --------------------------------------------------------------- */

KN_TEST(reference, sum_n)
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

KN_TEST(reference, adamw)
{
    float p[2] = { 1, -2 }, m[2] = { 0 }, v[2] = { 0 }, g[2] = { 0.5f, -4 };
    float lr = 0.1f, scale = 0.5f, step = 1;
    kn_opt_piece piece = { p, g, m, v, 2, 2.0f, 0.25f, KN_F32, KN_F32, NULL, KN_F32 };
    kn_adamw_args a = { &piece, 1, &lr, &scale, &step, 0.9, 0.999, 1e-8 };
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

KN_TEST(reference, sgd)
{
    for (int nesterov = 0; nesterov < 2; nesterov++) {
        double p = 1, m = 55, g = 0.5, P = 1, M = 0;
        float lr = 0.25f, scale = 1, step = 1;
        kn_opt_piece piece = { &p, &g, &m, NULL, 1, 1, 0.5f, KN_F64, KN_F64, NULL, KN_F64 };
        kn_sgd_args a = { &piece, 1, &lr, &scale, &step, 0.5, 0.25, nesterov };
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

/* ---- the norm ------------------------------------------------------------------------------ */

static void norm_of(const kn_run *run, int runs, float absmax, int64_t limbs[KN_SQSUM_LIMBS],
                    float *norm)
{
    float coef;
    RUN(KN_K_SQSUM, (kn_sqsum_args){ run, runs, &absmax, limbs });
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &absmax, 1, 0, norm, &coef });
}

static float absmax_of(const kn_run *run, int runs)
{
    float m;
    RUN(KN_K_ABSMAX, (kn_absmax_args){ run, runs, &m });
    return m;
}

/* However the values are cut into runs, and the runs into ranks whose limbs are added: one norm. */
KN_TEST(reference, norm_does_not_depend_on_the_partition)
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
        float n1, n2, coef;
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

KN_TEST(reference, norm_carries_over_all_limbs)
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

KN_TEST(reference, norm_of_odd_values)
{
    float x[4] = { 1, -3, 0x1p-149f, 2 }, norm, coef, max;
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
    x[0] = 0x1p-149f; /* the smallest number there is */
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
    KN_CHECK(norm == 2.5f && near(coef, 0.5 / (2.5 + 1e-6), 1e-7), "clipped: %g", (double)coef);
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &max, 0.5, 10, &norm, &coef });
    KN_CHECK(coef == 0.5f, "below max_norm: scale alone");
    max = NAN;
    RUN(KN_K_CLIP, (kn_clip_args){ limbs, &max, 0.5, 10, &norm, &coef });
    KN_CHECK(isnan(norm) && isnan(coef), "NaN is not hidden");
}

/* ---- cost ---------------------------------------------------------------------------------- */

KN_TEST(reference, cost)
{
    kn_matmul_args m = { F32(NULL, 2, 3, 5), F32(NULL, 2, 3, 7), F32(NULL, 2, 7, 5) };
    kn_cost c = kn_kernel_cost(KN_K_MATMUL, &m);
    KN_CHECK(c.flops == 2 * 2 * 3 * 5 * 7 && c.bytes == 4 * (30 + 42 + 70));
    m.b.stride[0] = 0;
    KN_CHECK(kn_kernel_cost(KN_K_MATMUL, &m).bytes == 4 * (30 + 42 + 35), "broadcast b");
    kn_attention_args a = { F32(NULL, 1, 2, 4, 8), F32(NULL, 1, 2, 4), F32(NULL, 1, 2, 4, 8),
                            F32(NULL, 1, 2, 4, 8), F32(NULL, 1, 2, 4, 8) };
    double full = kn_kernel_cost(KN_K_ATTENTION, &a).flops;
    a.causal = true;
    KN_CHECK(kn_kernel_cost(KN_K_ATTENTION, &a).flops == full * 10 / 16, "10 of 16 pairs");
    kn_opt_piece p = { .count = 10, .param_dtype = KN_F32, .grad_dtype = KN_BF16 };
    kn_adamw_args o = { .piece = &p, .pieces = 1 };
    KN_CHECK(kn_kernel_cost(KN_K_ADAMW, &o).bytes == 10 * (6 * 4 + 2));
    p.out = &p;
    p.out_dtype = KN_BF16;
    KN_CHECK(kn_kernel_cost(KN_K_ADAMW, &o).bytes == 10 * (6 * 4 + 2 + 2));
    kn_conv_args v = { .y = F32(NULL, 2, 6, 5, 5),
                       .x = F32(NULL, 2, 4, 5, 5),
                       .w = F32(NULL, 6, 2, 3, 3) };
    c = kn_kernel_cost(KN_K_CONV, &v); /* in two groups */
    KN_CHECK(c.flops == 2 * 300 * 18 && c.bytes == 4 * (300 + 200 + 108));
    kn_conv_grad_w_args g = { .dw = v.w, .dy = v.y, .x = v.x };
    KN_CHECK(kn_kernel_cost(KN_K_CONV_GRAD_W, &g).flops == c.flops);
    kn_pool_args q = { .y = F32(NULL, 1, 2, 2, 2),
                       .x = F32(NULL, 1, 2, 4, 4),
                       .window.kernel = { 2, 2 } };
    KN_CHECK(kn_kernel_cost(KN_K_POOL, &q).flops == 32 &&
             kn_kernel_cost(KN_K_POOL, &q).bytes == 160);
}
