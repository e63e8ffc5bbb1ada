/* tests/autograd/spectral_test.c: Fourier transforms against their sum, frames there and back, bad
 * arguments. */
#include "tests/owned.h"

static kn_tensor *noise(kn_dtype t, int ndim, const int64_t *shape)
{
    return kn_cast(kn_randn(KN_F64, KN_CPU, 5, 6, ndim, shape), t);
}

/* Lengths of one factor, of several, of a large prime; odd and even ones. */
KN_TEST(spectral, is_its_sum)
{
    static const int64_t lengths[] = { 1, 2, 3, 64, 65, 67, 128, 210, 360, 512, 2 * 131 };
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        IN_SCOPE;
        const int64_t n = lengths[i];
        kn_tensor *x = noise(KN_F64, KN_SHAPE(2, n)), *y = kn_rfft(x);
        KN_CHECK(y && kn_size(y, 1) == n / 2 + 1 && kn_size(y, 2) == 2);
        const double *v = kn_data(x), *got = kn_data(kn_contiguous(y));
        for (int64_t k = 0; k <= n / 2; k++) {
            double re = 0, im = 0;
            for (int64_t j = 0; j < n; j++) {
                re += v[n + j] * cos(2 * M_PI * (double)(j * k % n) / (double)n);
                im -= v[n + j] * sin(2 * M_PI * (double)(j * k % n) / (double)n);
            }
            const double *at = got + (n / 2 + 1 + k) * 2;
            KN_CHECK(fabs(at[0] - re) + fabs(at[1] - im) < 1e-11,
                     "n %lld, k %lld: %g %g, not %g %g", (long long)n, (long long)k, at[0], at[1],
                     re, im);
        }
        kn_tensor *back = kn_norm(kn_sub(kn_irfft(y, n), x), INFINITY, 0, NULL, false);
        KN_CHECK(back && kn_item(back) < 1e-12, "n %lld: back off by %g", (long long)n,
                 kn_item(back));
    }
}

KN_TEST(spectral, frames_there_and_back)
{
    for (int i = 0; i < 4; i++) {
        IN_SCOPE;
        const kn_dtype t = i % 2 ? KN_F32 : KN_F64;
        kn_tensor *x = noise(t, KN_SHAPE(2, 1000));
        kn_tensor *w = kn_add_scalar(kn_abs(noise(t, KN_SHAPE(i / 2 ? 300 : 400))), 0.1);
        kn_tensor *y = kn_stft(x, .n_fft = 400, .hop = 100, .window = w, .normalized = true);
        KN_CHECK(y && kn_size(y, 1) == 201 && kn_size(y, 2) == 11);
        kn_tensor *z = kn_istft(y, .n_fft = 400, .hop = 100, .window = w, .normalized = true);
        kn_tensor *off = kn_norm(kn_sub(z, x), INFINITY, 0, NULL, false);
        KN_CHECK(off && kn_item(off) < (i % 2 ? 2e-5 : 1e-12), "off by %g", kn_item(off));
    }
}

KN_TEST(spectral, bad_arguments)
{
    kn_tensor *x = noise(KN_F32, KN_SHAPE(2, 8)), *i = kn_zeros(KN_I64, KN_CPU, KN_SHAPE(8));
    REFUSED(kn_rfft(i), "rfft: needs a float x[..., n] of 1 to 7 dims, got i64[8]");
    REFUSED(kn_rfft(NULL), "rfft");
    REFUSED(kn_rfft(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 0))), "rfft: a transform of 0 elements");
    REFUSED(kn_rfft(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2 * 1031))),
            "rfft: 2062 elements have the prime factor 1031, and at most 1024 is done; pad them");
    REFUSED(kn_irfft(x, 8), "irfft: needs a float x[..., n / 2 + 1, 2] for n = 8 elements");
    REFUSED(kn_irfft(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 2)), 8), "got f32[4,2]");
    REFUSED(kn_stft(x), "stft: .n_fft is 0");
    REFUSED(kn_stft(x, .n_fft = 4, .hop = -1), ".hop -1");
    REFUSED(kn_stft(x, .n_fft = 4, .window = x), "stft: the window is f32[2,8]");
    REFUSED(kn_stft(x, .n_fft = 4, .window = noise(KN_F32, KN_SHAPE(5))),
            "the window has 5 elements");
    REFUSED(kn_stft(x, .n_fft = 32), "stft: 8 elements of x f32[2,8] are too few for frames of 32");
    REFUSED(kn_stft(i, .n_fft = 4), "stft: needs a float x[L] or x[N,L], got i64[8]");
    REFUSED(kn_istft(x, .n_fft = 4), "istft: needs a float x[3,T,2] or x[N,3,T,2] for .n_fft 4");
    kn_tensor *y = kn_stft(x, .n_fft = 4);
    REFUSED(kn_istft(y, .n_fft = 4, .length = 99), "span 12 elements, not 2 to 101");
    REFUSED(kn_istft(y, .n_fft = 4, .window = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4))),
            "istft: the windows leave a gap among the elements 2 to 10");
}

KN_TEST(spectral, places_and_volumes_refuse)
{
    kn_tensor *x = noise(KN_F32, KN_SHAPE(1, 2, 3, 4)), *v = noise(KN_F32, KN_SHAPE(1, 2, 3, 4, 5));
    REFUSED(kn_grid_sample(x, x),
            "grid_sample: needs x[N,C,H,W] with at least one element a plane");
    REFUSED(kn_grid_sample(x, NULL), "grid_sample");
    REFUSED(kn_grid_sample(x, noise(KN_F32, KN_SHAPE(1, 2, 3, 2)), .padding = (kn_grid_padding)3),
            "grid_sample: there is no padding 3");
    REFUSED(kn_affine_grid(x, 2, 2, false), "affine_grid: needs a float theta[N,2,3]");
    REFUSED(kn_affine_grid(noise(KN_F32, KN_SHAPE(1, 2, 3)), 0, 2, false), "0 x 2");
    REFUSED(kn_conv3d(v, x, NULL),
            "conv3d: needs x[N,C,D,H,W] or x[C,D,H,W] and weight[O,C/groups,K,R,S]");
    REFUSED(kn_conv3d(v, v, NULL, .groups = 2), "groups 2");
    REFUSED(kn_conv3d(v, noise(KN_F32, KN_SHAPE(1, 2, 3, 4, 5)), NULL, .dilation = 2),
            "conv3d: stride 1, dilation 2, pad 0 along dim 2 of x f32[1,2,3,4,5]");
    REFUSED(kn_conv3d(v, v, NULL, .same = true, .pad = 1), "conv3d: .same goes with stride 1");
    REFUSED(kn_max_pool3d(kn_squeeze(x, 1, (int64_t[]){ 0 }), .kernel = 2),
            "max_pool3d: needs a float x[N,C,D,H,W] or x[C,D,H,W], got f32[2,3,4]");
    REFUSED(kn_avg_pool3d(kn_cast(v, KN_I64), .kernel = 2),
            "avg_pool3d: needs a float x[N,C,D,H,W] or x[C,D,H,W], got i64");
    REFUSED(kn_max_pool3d(v, .kernel = 4),
            "max_pool3d: kernel 4, stride 4, dilation 1, pad 0 along dim 2");
    REFUSED(kn_avg_pool3d(v, .kernel = 2, .dilation = 2), "(averages have no dilation)");
    REFUSED(kn_adaptive_avg_pool3d(v, 1, 0, 2), "adaptive_avg_pool3d: 1 x 0 x 2 windows of x");
    REFUSED(kn_adaptive_max_pool1d(x, 2), "adaptive_max_pool1d: needs a float x[N,C,L]");
}
