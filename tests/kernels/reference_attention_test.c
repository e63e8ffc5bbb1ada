/* tests/kernels/reference_attention_test.c: the reference provider's attention and rotary
 * embeddings against formulas in double that store the whole matrix of probabilities; gradients
 * against finite differences. */
#include "kernels/philox.h"
#include "tests/kernels/reference.h"

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

KN_TEST(reference_attention, attention)
{
    attention_case(T, S, false, 0);
    attention_case(T, S, true, 0);
    attention_case(S, T, true, 0); /* the first two queries have no keys */
    attention_case(S, S, true, 0.3);
    attention_case(T, 0, false, 0);
    attention_case(0, S, false, 0);
}

KN_TEST(reference_attention, rope)
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
