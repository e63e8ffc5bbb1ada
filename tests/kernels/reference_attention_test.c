/* tests/kernels/reference_attention_test.c: the reference provider's attention and rotary
 * embeddings against formulas in double that store the whole matrix of probabilities. */
#include "kernels/philox.h"
#include "tests/kernels/reference.h"

enum { B = 2, H = 4, G = 2, T = 3, S = 5, D = 4 };

/* The addition to a score: the mask's value, or -infinity for a hidden key. */
static double added(const kn_attention_args *a, int64_t bh, int64_t t, int64_t s)
{
    const kn_array *m = &a->mask;
    int64_t last = t + a->k.shape[2] - a->q.shape[2];
    if ((a->causal && s > last) || (a->window && s <= last - a->window))
        return -INFINITY;
    if (!m->data)
        return 0;
    int64_t i = bh / H * m->stride[0] + bh % H * m->stride[1] + t * m->stride[2] + s * m->stride[3];
    if (m->dtype == KN_BOOL)
        return ((bool *)m->data)[i] ? 0 : -INFINITY;
    return ((double *)m->data)[i];
}

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
                p[s] = exp(p[s] + added(a, bh, t, s));
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

typedef enum hiding { NO_MASK, BOOL_MASK, ADDED_MASK, SHARED_MASK } hiding;

/* A mask whose first row hides all; SHARED_MASK: one [T, S] for all heads. */
static kn_array mask_of(hiding how, int64_t t, int64_t s)
{
    static double value[B * H * S * S];
    static bool seen[B * H * S * S];
    kn_array m = F64(value, B, H, t, s);
    randomize(value, B * H * t * s, 33);
    for (int i = 0; i < B * H * t * s; i++) {
        seen[i] = i >= s && i % 3;
        value[i] = i >= s && i % 5 ? value[i] : -INFINITY;
    }
    if (how == BOOL_MASK)
        m = kn_array_make(seen, KN_BOOL, 4, (int64_t[]){ B, H, t, s });
    if (how == SHARED_MASK)
        m.stride[0] = m.stride[1] = 0;
    return how == NO_MASK ? (kn_array){ 0 } : m;
}

static void attention_case(int64_t t, int64_t s, bool causal, double dropout, int64_t window,
                           hiding how)
{
    static double q[B * H * S * D], k[B * G * S * D], v[B * G * S * D], o[B * H * S * D],
        want[B * H * S * D], lse[B * H * S];
    randomize(q, B * H * S * D, 30);
    randomize(k, B * G * S * D, 31);
    randomize(v, B * G * S * D, 32);
    kn_attention_args a = { F64(o, B, H, t, D),
                            F64(lse, B, H, t),
                            F64(q, B, H, t, D),
                            F64(k, B, G, s, D),
                            F64(v, B, G, s, D),
                            mask_of(how, t, s),
                            0.5,
                            causal,
                            dropout,
                            3,
                            4,
                            NULL,
                            window };
    RUN(KN_K_ATTENTION, a);
    plain_attention(want, q, k, v, &a, t, s);
    for (int64_t i = 0; i < B * H * t * D; i++)
        KN_CHECK(near(o[i], want[i], 1e-12), "%lld x %lld causal %d: o[%lld] %.12g, not %.12g",
                 (long long)t, (long long)s, causal, (long long)i, o[i], want[i]);
}

KN_TEST(reference_attention, attention)
{
    attention_case(T, S, false, 0, 0, NO_MASK);
    attention_case(T, S, true, 0, 0, NO_MASK);
    attention_case(S, T, true, 0, 0, NO_MASK); /* the first two queries have no keys */
    attention_case(S, S, true, 0.3, 0, NO_MASK);
    attention_case(T, 0, false, 0, 0, NO_MASK);
    attention_case(0, S, false, 0, 0, NO_MASK);
}

KN_TEST(reference_attention, masks_and_windows)
{
    attention_case(T, S, false, 0, 0, BOOL_MASK);
    attention_case(T, S, false, 0, 0, ADDED_MASK);
    attention_case(S, S, true, 0.3, 0, ADDED_MASK);
    attention_case(S, S, true, 0, 0, SHARED_MASK);
    attention_case(S, S, true, 0, 2, NO_MASK);
    attention_case(T, S, true, 0, 1, NO_MASK);
    attention_case(S, T, true, 0, 2, ADDED_MASK);
    attention_case(S, S, true, 0, 100, BOOL_MASK);
    double x[4] = { 0 };
    kn_attention_args bad = { F64(x, 1, 1, 1, 1), F64(x, 1, 1, 1),    F64(x, 1, 1, 1, 1),
                              F64(x, 1, 1, 1, 1), F64(x, 1, 1, 1, 1), F64(x, 1, 1, 1, 2) };
    KN_CHECK(!reference(KN_K_ATTENTION, &bad), "a mask of 2 keys");
    KN_CHECK_ERROR("attention: mask f64[1,1,1,2] does not fit");
    bad.mask.data = NULL;
    bad.window = 1;
    KN_CHECK(!reference(KN_K_ATTENTION, &bad), "a window without causal");
    KN_CHECK_ERROR("a window of 1 keys");
}

/* Two keys whose scores lie `gap` apart: dz = P (1 - P) (dP_0 - dP_1) of the first to nearly all
 * digits, however near P is to 1. */
KN_TEST(reference_attention, gradient_of_nearly_all_weight)
{
    double q[D], k[2 * D], v[2 * D], o[D], lse[1], dout[D], dq[D], dk[2 * D], dv[2 * D];
    for (int gap = 0; gap < 40; gap++) {
        double qk = 0, dp = 0;
        randomize(q, D, 50);
        randomize(k, D, 51);
        randomize(v, 2 * D, 52);
        randomize(dout, D, 53);
        for (int d = 0; d < D; d++)
            qk += q[d] * q[d], dp += dout[d] * (v[d] - v[D + d]);
        for (int d = 0; d < D; d++)
            k[D + d] = k[d] - gap / qk * q[d];
        kn_attention_args a = { F64(o, 1, 1, 1, D), F64(lse, 1, 1, 1),  F64(q, 1, 1, 1, D),
                                F64(k, 1, 1, 2, D), F64(v, 1, 1, 2, D), .scale = 1 };
        RUN(KN_K_ATTENTION, a);
        RUN(KN_K_ATTENTION_GRAD,
            (kn_attention_grad_args){ F64(dq, 1, 1, 1, D), F64(dk, 1, 1, 2, D), F64(dv, 1, 1, 2, D),
                                      F64(dout, 1, 1, 1, D), a.o, a.lse, a.q, a.k, a.v,
                                      .scale = 1 });
        double dz = dp / (1 + exp(-gap)) / (1 + exp(gap));
        for (int d = 0; d < D; d++)
            KN_CHECK(fabs(dk[d] - dz * q[d]) <= 1e-12 * fabs(dz),
                     "gap %d: dk[%d] is %.15g, not %.15g", gap, d, dk[d], dz * q[d]);
    }
}

/* Pair i of 4 turns 100^(-i/4) a position, over 200 positions 31.8, 10.1, 3.2 and 1.0 times: with
 * factors of 2 and 12 the first as ever, the last two 8 times slower or nearly so. */
KN_TEST(reference_attention, rope_scaling)
{
    double x[8] = { 1, 1, 1, 1, 0, 0, 0, 0 }, y[8];
    const kn_rope_scaling s = { 8, 2, 12, 200 };
    RUN(KN_K_ROPE, (kn_rope_args){ F64(y, 1, 1, 1, 8), F64(x, 1, 1, 1, 8), 100, 1, false, s });
    for (int i = 0; i < 4; i++) {
        double speed = pow(10, -i / 2.0), turns = 200 * speed / (2 * M_PI);
        double kept = turns > 12 ? 1 : turns < 2 ? 0 : (turns - 2) / 10;
        double want = speed * (kept + (1 - kept) / 8);
        KN_CHECK((i == 0) == (kept == 1) && (i == 3) == (kept == 0), "pair %d: %g", i, kept);
        KN_CHECK(near(atan2(y[i + 4], y[i]), want, 1e-13), "pair %d turns %g, not %g", i,
                 atan2(y[i + 4], y[i]), want);
    }
}

KN_TEST(reference_attention, rope)
{
    double x[2 * 3 * 4], y[2 * 3 * 4], back[2 * 3 * 4];
    randomize(x, 24, 40);
    RUN(KN_K_ROPE, (kn_rope_args){ F64(y, 1, 2, 3, 4), F64(x, 1, 2, 3, 4), 100, 5, false, { 0 } });
    /* head 1, t = 2: position 7; pair (1, 3) turns by 7 * 100^(-1/2) */
    const double *u = x + 5 * 4, *w = y + 5 * 4, angle = 7 / 10.0;
    KN_CHECK(near(w[1], u[1] * cos(angle) - u[3] * sin(angle), 1e-13), "%g", w[1]);
    KN_CHECK(near(w[3], u[3] * cos(angle) + u[1] * sin(angle), 1e-13), "%g", w[3]);
    RUN(KN_K_ROPE,
        (kn_rope_args){ F64(back, 1, 2, 3, 4), F64(y, 1, 2, 3, 4), 100, 5, true, { 0 } });
    for (int i = 0; i < 24; i++)
        KN_CHECK(near(back[i], x[i], 1e-13), "inverse");
    kn_rope_args bad = { F64(y, 1, 2, 4, 3), F64(x, 1, 2, 4, 3), 100, 0, false, { 0 } };
    KN_CHECK(!reference(KN_K_ROPE, &bad), "odd D");
    KN_CHECK_ERROR("even D");
}
