/* tests/gpu/cuda_dropout_test.c: attention with dropout by cuDNN, on a GPU (scripts/gpu-check).
 * With q = k = 0 all probabilities are 1 / T, and with v = 1 the output is the mask that was
 * drawn. */
#include "autograd/operations.h"
#include "kernels/cuda/runtime/runtime.h"
#include "kernels/device.h"
#include "kernels/trace.h"
#include "tensor/tensor_internal.h"
#include "tests/owned.h"
#include <math.h>

enum { B = 2, H = 3, T = 64, D = 64, ALL = B * H * T * D };

static const double drop = 0.25;

typedef struct problem {
    kn_tensor *q, *k, *v, *o, *lse, *dout, *dq, *dk, *dv;
} problem;

typedef enum values { ZEROS, ONE, RANDOM } values; /* ONE: the matrix */

/* [B,H,T,D] in bf16, in memory [B,T,H,D]. */
static kn_tensor *make(values how, uint64_t stream)
{
    static float x[ALL];
    kn_tensor *drawn = kn_randn(KN_F32, KN_CPU, 1, stream, KN_SHAPE(ALL));
    for (int i = 0; i < ALL; i++) {
        const int t = i / (H * D) % T, d = i % D;
        x[i] = how == RANDOM ? ((float *)kn_data(drawn))[i] : how == ONE && t == d;
    }
    kn_tensor *y = kn_from(KN_F32, KN_CPU, x, KN_SHAPE(B, T, H, D));
    return kn_transpose(kn_to_device(kn_cast(y, KN_BF16), KN_CUDA), 1, 2);
}

static problem problem_of(values q, values v, values dout)
{
    /* dq, dk and dv: parts of one tensor */
    kn_tensor *all = kn_zeros(KN_BF16, KN_CUDA, KN_SHAPE(B, T, 3 * H, D)), *d[3];
    for (int i = 0; i < 3; i++)
        d[i] = kn_transpose(kn_slice(all, 2, i * H, (i + 1) * H), 1, 2);
    return (problem){ make(q, 1),
                      make(q, 2),
                      make(v, 3),
                      make(ZEROS, 0),
                      kn_zeros(KN_F32, KN_CUDA, KN_SHAPE(B, H, T)),
                      make(dout, 4),
                      d[0],
                      d[1],
                      d[2] };
}

/* Runs the kernel and checks that cuDNN did. */
static void launch(kn_kernel k, const void *args, size_t size)
{
    OWNED_HOST kn_trace_event *e = NULL;
    kn_trace_start(16);
    KN_CHECK(kn_launch(kn_compute_stream(KN_CUDA), k, args, size));
    const size_t n = kn_trace_stop(&e);
    KN_CHECK(n > 0 && strcmp(e[n - 1].provider, "cudnn") == 0, "%s ran in %s", kn_kernel_name(k),
             n > 0 ? e[n - 1].provider : "nothing");
}

static void forward(const problem *p, uint64_t seed, uint64_t stream, const uint64_t *at)
{
    const kn_attention_args a = { .o = kn_array_of(p->o),
                                  .lse = kn_array_of(p->lse),
                                  .q = kn_array_of(p->q),
                                  .k = kn_array_of(p->k),
                                  .v = kn_array_of(p->v),
                                  .scale = 0.125,
                                  .dropout_p = drop,
                                  .seed = seed,
                                  .stream = stream,
                                  .seed_at = at };
    launch(KN_K_ATTENTION, &a, sizeof a);
}

static void backward(const problem *p, uint64_t seed, uint64_t stream, const uint64_t *at)
{
    const kn_attention_grad_args a = { .dq = kn_array_of(p->dq),
                                       .dk = kn_array_of(p->dk),
                                       .dv = kn_array_of(p->dv),
                                       .dout = kn_array_of(p->dout),
                                       .o = kn_array_of(p->o),
                                       .lse = kn_array_of(p->lse),
                                       .q = kn_array_of(p->q),
                                       .k = kn_array_of(p->k),
                                       .v = kn_array_of(p->v),
                                       .scale = 0.125,
                                       .dropout_p = drop,
                                       .seed = seed,
                                       .stream = stream,
                                       .seed_at = at };
    launch(KN_K_ATTENTION_GRAD, &a, sizeof a);
}

/* [B][H][T][D] of t. */
static void fetch(kn_tensor *t, float *x)
{
    kn_tensor *host = kn_cast(kn_to_device(kn_contiguous(t), KN_CPU), KN_F32);
    KN_CHECK(host && kn_to_host(host, x, ALL * sizeof *x));
}

static void mask_of(uint64_t seed, uint64_t stream, const uint64_t *at, float *mask)
{
    const problem p = problem_of(ZEROS, ONE, ZEROS);
    forward(&p, seed, stream, at);
    fetch(p.o, mask);
    for (int i = 0; i < ALL; i++) {
        const double kept = mask[i] * T * (1 - drop);
        KN_CHECK(mask[i] == 0 || fabs(kept - 1) < 0.01, "1 / keep is %g times itself", kept);
        mask[i] = mask[i] > 0;
    }
}

/* Elements of n that are the same in a and b, as a share; independent ones: keep^2 + drop^2. */
static bool independent(const float *a, const float *b, int n)
{
    const double expected = drop * drop + (1 - drop) * (1 - drop);
    int same = 0;
    for (int i = 0; i < n; i++)
        same += a[i] == b[i];
    return fabs(same - expected * n) < 5 * sqrt(expected * (1 - expected) * n);
}

/* The mask is a function of seed, stream and element. */
KN_TEST(cuda_dropout, draws)
{
    static float mask[ALL], again[ALL];
    IN_SCOPE;
    mask_of(3, 4, NULL, mask);
    int kept = 0;
    for (int i = 0; i < ALL; i++)
        kept += mask[i] > 0;
    KN_CHECK(fabs(kept - (1 - drop) * ALL) < 5 * sqrt(drop * (1 - drop) * ALL), "%d of %d stay",
             kept, ALL);
    for (int i = 1; i < B * H; i++)
        for (int j = 0; j < i; j++)
            KN_CHECK(independent(mask + i * T * D, mask + j * T * D, T * D), "heads %d and %d", j,
                     i);
    mask_of(3, 4, NULL, again);
    KN_CHECK(memcmp(mask, again, sizeof mask) == 0);
    const int64_t seed = 3;
    kn_tensor *at = kn_to_device(kn_from(KN_I64, KN_CPU, &seed, KN_SHAPE(1)), KN_CUDA);
    mask_of(99, 4, kn_array_of(at).data, again); /* as in a recorded step */
    KN_CHECK(memcmp(mask, again, sizeof mask) == 0);
    mask_of(4, 4, NULL, again);
    KN_CHECK(independent(mask, again, ALL), "another seed");
    mask_of(3, 5, NULL, again);
    KN_CHECK(independent(mask, again, ALL), "another stream");
}

/* dv of dout = 1 is the transposed output of v = 1. */
KN_TEST(cuda_dropout, backward_draws_the_mask_of_forward)
{
    static float o[ALL], dv[ALL];
    IN_SCOPE;
    const problem p = problem_of(ZEROS, ONE, ONE);
    forward(&p, 3, 4, NULL);
    backward(&p, 3, 4, NULL);
    fetch(p.o, o), fetch(p.dv, dv);
    for (int i = 0; i < ALL; i++)
        KN_CHECK(dv[i / (T * D) * T * D + i % D * D + i / D % T] == o[i], "element %d", i);
}

/* Of head bh by definition, in f64, with the mask that was read. */
static void head_gradients(float *const in[4], const float *mask, int bh, double *dq, double *dk)
{
    const float *q = in[0] + bh * T * D, *k = in[1] + bh * T * D, *v = in[2] + bh * T * D;
    const float *dout = in[3] + bh * T * D;
    memset(dk, 0, T * D * sizeof *dk);
    for (int t = 0; t < T; t++) {
        double p[T], dp[T], sum = 0, delta = 0;
        for (int s = 0; s < T; s++) {
            double z = 0;
            dp[s] = 0;
            for (int d = 0; d < D; d++) {
                z += 0.125 * q[t * D + d] * k[s * D + d];
                dp[s] += dout[t * D + d] * v[s * D + d] * mask[bh * T * T + t * T + s] / (1 - drop);
            }
            sum += p[s] = exp(z);
        }
        for (int s = 0; s < T; s++)
            delta += (p[s] /= sum) * dp[s];
        for (int d = 0; d < D; d++) {
            dq[t * D + d] = 0;
            for (int s = 0; s < T; s++) {
                const double dz = 0.125 * p[s] * (dp[s] - delta);
                dq[t * D + d] += dz * k[s * D + d];
                dk[s * D + d] += dz * q[t * D + d];
            }
        }
    }
}

static double worst(const float *x, const double *want)
{
    double most = 0, error = 0;
    for (int i = 0; i < T * D; i++) {
        most = fmax(most, fabs(want[i]));
        error = fmax(error, fabs(x[i] - want[i]));
    }
    return error / most;
}

static void check_gradients(void)
{
    static float x[4][ALL], mask[ALL], dq[ALL], dk[ALL];
    static double want[2][T * D];
    IN_SCOPE;
    const problem p = problem_of(RANDOM, RANDOM, RANDOM);
    forward(&p, 3, 4, NULL);
    backward(&p, 3, 4, NULL);
    mask_of(3, 4, NULL, mask);
    kn_tensor *const in[4] = { p.q, p.k, p.v, p.dout };
    for (int i = 0; i < 4; i++)
        fetch(in[i], x[i]);
    fetch(p.dq, dq), fetch(p.dk, dk);
    for (int bh = 0; bh < B * H; bh++) {
        head_gradients((float *const[4]){ x[0], x[1], x[2], x[3] }, mask, bh, want[0], want[1]);
        const double q = worst(dq + bh * T * D, want[0]), k = worst(dk + bh * T * D, want[1]);
        KN_CHECK(q < 0.03 && k < 0.03, "head %d: dq is off by %g, dk by %g", bh, q, k);
    }
}

/* With bits that repeat as well, where cuDNN has that: not on datacenter Blackwell. */
KN_TEST(cuda_dropout, gradients)
{
    const int ways = kn_cuda_arch() / 10 == 10 ? 1 : 2;
    for (int way = 0; way < ways; way++) {
        kn_cuda_deterministic(way);
        check_gradients();
    }
    kn_cuda_deterministic(false);
}
