/* tests/gpu/cuda_exponentials_test.c: the errors of the CUDA kernels' exponentials of f32, which
 * are 2^(x log2 e) with reciprocals instead of divisions (kernels/cuda/kernels/exponentials.cuh),
 * against f64, over the whole range: nearer than the overlay's tolerances. */
#include "tests/kernels/overlay.h"

#include <math.h>

enum { N = 4001 };

static float in[N], out[N], more[N];

static kn_array array(float *x, int64_t n)
{
    int64_t shape[2] = { 1, n };
    return kn_array_make(x, KN_F32, 2, shape);
}

static void run_own(kn_kernel k, const void *args)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    KN_CHECK(overlay_providers(providers) == 1 && providers[0]->run[k](args) == KN_DONE);
}

/* Within a relative error and an absolute one; infinities and NaN exactly. */
static void check_near(const char *what, double x, double got, double want, double relative,
                       double absolute)
{
    bool same = got == want || (got != got && want != want);
    KN_CHECK(same || fabs(got - want) <= relative * fabs(want) + absolute,
             "%s(%g) is %.9g, not %.9g", what, x, got, want);
}

static double of_product(double x) /* the error of e^x */
{
    return 7.3e-8 * fabs(x) + 2.4e-7;
}

/* Terms down to the smallest subnormal number, below it, and beside the numbers that end. */
KN_TEST(cuda_exponentials, softmax)
{
    for (int i = 0; i < N; i++)
        in[i] = (float)(-110.0 * i / (N - 1));
    in[N - 1] = -INFINITY;
    double sum = 0;
    for (int i = 0; i < N; i++)
        sum += exp(in[i]);
    kn_softmax_args a = { array(out, N), array(in, N), false };
    run_own(KN_K_SOFTMAX, &a);
    for (int i = 0; i < N; i++)
        check_near("softmax", in[i], out[i], exp(in[i]) / sum, of_product(in[i]) + 5e-7, 1.5e-45);
    KN_CHECK(out[N - 1] == 0);
    for (int i = 0; i < N; i++)
        in[i] = i % 2 ? -3e38f : 3e38f; /* their difference overflows */
    run_own(KN_K_SOFTMAX, &a);
    for (int i = 0; i < N; i++)
        check_near("softmax", in[i], out[i], i % 2 ? 0 : 2.0 / (N + 1), 5e-7, 0);
    in[7] = NAN;
    run_own(KN_K_SOFTMAX, &a);
    for (int i = 0; i < N; i++)
        KN_CHECK(out[i] != out[i], "element %d is %g", i, out[i]);
}

/* lse and the gradient made from it: the probabilities of a row add up to 1. */
KN_TEST(cuda_exponentials, cross_entropy)
{
    for (int spread = 1; spread <= 1000; spread *= 10) {
        double sum = 0, top = 0, total = 0;
        for (int i = 0; i < N; i++) {
            in[i] = (float)(spread * sin(i * 12.9898) + 3 * spread);
            top = fmax(top, in[i]);
        }
        for (int i = 0; i < N; i++)
            sum += exp(in[i] - top);
        int64_t target = 7, one = 1;
        float loss, lse, count;
        kn_cross_entropy_args a = { .loss = kn_array_make(&loss, KN_F32, 1, &one),
                                    .count = kn_array_make(&count, KN_F32, 1, &one),
                                    .lse = kn_array_make(&lse, KN_F32, 1, &one),
                                    .logits = array(in, N),
                                    .targets = kn_array_make(&target, KN_I64, 1, &one),
                                    .dlogits = array(out, N),
                                    .ignore_index = -1 };
        run_own(KN_K_CROSS_ENTROPY, &a);
        check_near("lse", spread, lse, top + log(sum), 1.2e-7, 5e-7);
        for (int i = 0; i < N; i++) {
            double p = exp(in[i] - (double)lse), x = in[i] - (double)lse;
            check_near("dlogits", x, out[i], p - (i == target), of_product(x) + 1.2e-7 * fabs(x),
                       i == target ? 2.4e-7 : 1.5e-45);
            total += out[i];
        }
        KN_CHECK(fabs(total) < 2e-7 * (2 + fabs(lse)), "of %d: %g", spread, total);
    }
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}
static double gelu_u(double x)
{
    return 2 * 0.79788456080286535588 * (x + 0.044715 * x * x * x);
}

/* Gates and their slopes from where they are 0 to where they are 1. Below 1e-36 they may be 0. */
KN_TEST(cuda_exponentials, gates)
{
    static const kn_unary kinds[] = { KN_SIGMOID, KN_SILU, KN_GELU_TANH };
    for (int i = 0; i < N; i++)
        in[i] = (float)(90 * pow(2.0 * i / (N - 1) - 1, 3)), more[i] = 1;
    in[0] = -3e38f, in[1] = 3e38f, in[2] = -1e19f, in[3] = 1e19f;
    for (int k = 0; k < 3; k++) {
        kn_unary_args a = { .dst = array(out, N), .src = array(in, N), .kind = kinds[k] };
        run_own(KN_K_UNARY, &a);
        for (int i = 0; i < N; i++) {
            double x = in[i], u = k == 2 ? gelu_u(x) : x, s = sigmoid(u);
            check_near(kn_unary_row(kinds[k])->name, x, out[i], k ? x * s : s,
                       of_product(fmin(fabs(u), 100)) * (k == 2 ? 3 : 1) + 5e-7, 1e-36);
        }
        if (k == 0)
            continue; /* its slope is a product of y */
        kn_unary_grad_args g = {
            .dx = array(out, N), .dy = array(more, N), .x = array(in, N), .kind = kinds[k]
        };
        run_own(KN_K_UNARY_GRAD, &g);
        for (int i = 0; i < N; i++) {
            double x = in[i], u = k == 2 ? gelu_u(x) : x, s = sigmoid(u), rest = sigmoid(-u);
            double du = k == 2 ? 2 * 0.79788456080286535588 * (1 + 3 * 0.044715 * x * x) : 1;
            double want = fabs(x) > 100 ? x > 0 : s * (1 + x * rest * du);
            check_near("slope", x, out[i], want, 5e-7, 1e-6);
        }
    }
}
