/* tests/autograd/interpolate_test.c: interpolation against its formula and against numbers computed
 * by hand, channels as pixels, memory order, meta, errors. */
#include "autograd/ops.h"
#include "tests/owned.h"

static kn_tensor *image(int64_t N, int64_t C, int64_t H, int64_t W)
{
    return kn_randn(KN_F64, KN_CPU, 5, (uint64_t)(N + C + H + W), KN_SHAPE(N, C, H, W));
}

static double at(kn_tensor *t, int64_t i, int64_t j, int64_t k, int64_t l)
{
    const double *p = kn_array_of(t).data;
    return p[i * t->stride[0] + j * t->stride[1] + k * t->stride[2] + l * t->stride[3]];
}

static bool holds(kn_tensor *t, const double *want, int n)
{
    KN_CHECK(t && kn_numel(t) == n, "%s", kn_error() ? kn_error() : "sizes");
    const double *v = kn_data(kn_contiguous(t));
    for (int i = 0; i < n; i++)
        KN_CHECK(fabs(v[i] - want[i]) < 1e-12, "[%d] is %g, not %g", i, v[i], want[i]);
    return true;
}

KN_TEST(interpolate, by_hand)
{
    double v[4] = { 0, 4, 8, 16 };
    kn_tensor *x = kn_require_grad(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(1, 1, 1, 4)), true);
    holds(kn_interpolate(x, .sizes = { 1, 6 }), (double[]){ 0, 0, 4, 8, 8, 16 }, 6);
    holds(kn_interpolate(x, .sizes = { 1, 3 }), (double[]){ 0, 4, 8 }, 3);
    holds(kn_interpolate(x, .scales = { 2, 1.5 }),
          (double[]){ 0, 0, 4, 8, 8, 16, 0, 0, 4, 8, 8, 16 }, 12);
    holds(kn_interpolate(x, .sizes = { 1, 8 }, .mode = KN_BILINEAR),
          (double[]){ 0, 1, 3, 5, 7, 10, 14, 16 }, 8);
    holds(kn_interpolate(x, .sizes = { 1, 2 }, .mode = KN_BILINEAR), (double[]){ 2, 12 }, 2);
    holds(kn_interpolate(x, .sizes = { 1, 7 }, .mode = KN_BILINEAR, .align_corners = true),
          (double[]){ 0, 2, 4, 6, 8, 12, 16 }, 7);
    holds(kn_interpolate(x, .size = 1, .mode = KN_BILINEAR, .align_corners = true), v, 1);
    /* 5 * 1.3 = 6.5 positions are 6, 1 / 1.3 apart, not 5 / 6 */
    double five[5] = { 0, 13, 26, 39, 52 };
    kn_tensor *y = kn_from(KN_F64, KN_CPU, five, KN_SHAPE(1, 1, 1, 5));
    y = kn_interpolate(y, .scales = { 1, 1.3 }, .mode = KN_BILINEAR);
    holds(y, (double[]){ 0, 8.5, 18.5, 28.5, 38.5, 48.5 }, 6);
    /* 49 * (2 / 98) rounds below 1 */
    y = kn_interpolate(kn_from(KN_F64, KN_CPU, v, KN_SHAPE(1, 1, 1, 2)), .sizes = { 1, 98 });
    KN_CHECK(y && at(y, 0, 0, 0, 48) == 0 && at(y, 0, 0, 0, 49) == 4);
    KN_CHECK(kn_backward(sum_of(kn_interpolate(x, .sizes = { 2, 6 }))));
    holds(kn_grad(x), (double[]){ 4, 2, 4, 2 }, 4);
}

static double at_place(kn_tensor *x, int64_t n, int64_t c, double h, double w)
{
    const double H = (double)(kn_size(x, 2) - 1), W = (double)(kn_size(x, 3) - 1);
    h = fmin(fmax(h, 0), H), w = fmin(fmax(w, 0), W);
    double sum = 0;
    for (int64_t i = 0; i < kn_size(x, 2); i++)
        for (int64_t j = 0; j < kn_size(x, 3); j++)
            sum += fmax(0, 1 - fabs(h - (double)i)) * fmax(0, 1 - fabs(w - (double)j)) *
                   at(x, n, c, i, j);
    return sum;
}

KN_TEST(interpolate, bilinear_by_its_formula)
{
    static const int64_t sizes[4][4] = {
        { 3, 4, 6, 8 }, { 5, 3, 2, 7 }, { 1, 4, 3, 1 }, { 4, 6, 4, 3 }
    };
    for (int i = 0; i < 8; i++) {
        const int64_t *s = sizes[i / 2];
        const bool corners = i % 2;
        IN_SCOPE;
        kn_tensor *x = image(2, 3, s[0], s[1]);
        kn_tensor *y = kn_interpolate(kn_channels_last(x), .sizes = { s[2], s[3] },
                                      .mode = KN_BILINEAR, .align_corners = corners);
        KN_CHECK(y && kn_is_channels_last(y));
        for (int64_t k = 0; k < kn_numel(y); k++) {
            const int64_t q = k % s[3], p = k / s[3] % s[2], c = k / s[3] / s[2] % 3,
                          n = k / s[3] / s[2] / 3;
            double h = ((double)p + 0.5) * (double)s[0] / (double)s[2] - 0.5;
            double w = ((double)q + 0.5) * (double)s[1] / (double)s[3] - 0.5;
            if (corners) {
                h = s[2] > 1 ? (double)(p * (s[0] - 1)) / (double)(s[2] - 1) : 0;
                w = s[3] > 1 ? (double)(q * (s[1] - 1)) / (double)(s[3] - 1) : 0;
            }
            KN_CHECK(fabs(at(y, n, c, p, q) - at_place(x, n, c, h, w)) < 1e-12, "%d: %g, not %g", i,
                     at(y, n, c, p, q), at_place(x, n, c, h, w));
        }
    }
}

KN_TEST(interpolate, pixels)
{
    kn_tensor *x = image(2, 12, 3, 2), *y = kn_pixel_shuffle(x, 2);
    KN_CHECK(y && kn_size(y, 1) == 3 && kn_size(y, 2) == 6 && kn_size(y, 3) == 4);
    for (int64_t i = 0; i < kn_numel(y); i++) {
        const int64_t w = i % 4, h = i / 4 % 6, c = i / 24 % 3, n = i / 72;
        KN_CHECK(at(y, n, c, h, w) == at(x, n, (c * 2 + h % 2) * 2 + w % 2, h / 2, w / 2));
    }
    kn_tensor *back = kn_pixel_unshuffle(y, 2);
    KN_CHECK(back && kn_size(back, 1) == 12);
    KN_CHECK(memcmp(kn_data(kn_contiguous(back)), kn_data(x), 144 * sizeof(double)) == 0);
    kn_tensor *ids = kn_reshape(kn_arange(KN_I64, KN_CPU, 8), KN_SHAPE(4, 1, 2));
    ids = kn_pixel_shuffle(ids, 2);
    const int64_t want[8] = { 0, 2, 1, 3, 4, 6, 5, 7 };
    KN_CHECK(ids && memcmp(kn_data(kn_contiguous(ids)), want, sizeof want) == 0);
    x = kn_require_grad(image(1, 4, 2, 2), true);
    KN_CHECK(kn_backward(sum_of(kn_slice(kn_pixel_shuffle(x, 2), 2, 0, 1))));
    holds(kn_grad(x), (double[]){ 1, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 }, 16);
    y = kn_pixel_shuffle(kn_empty(KN_F32, KN_META, KN_SHAPE(0, 9, 4, 4)), 3);
    KN_CHECK(y && kn_size(y, 0) == 0 && kn_size(y, 2) == 12);
}

KN_TEST(interpolate, errors_and_meta)
{
    kn_tensor *x = image(1, 3, 4, 5);
    kn_tensor *y = kn_interpolate(kn_empty(KN_BF16, KN_META, KN_SHAPE(8, 3, 32, 32)), .scale = 7);
    KN_CHECK(y && kn_size(y, 3) == 224);
    REFUSED(kn_interpolate(x), "interpolate: needs either a size or a scale, neither was given");
    REFUSED(kn_interpolate(x, .size = 3, .scale = 2), "both were given");
    REFUSED(kn_interpolate(x, .size = 3, .align_corners = true),
            ".align_corners does nothing with KN_NEAREST");
    REFUSED(kn_interpolate(x, .size = 3, .mode = (kn_interpolate_mode)7), "there is no mode 7");
    REFUSED(kn_interpolate(x, .size = 3, .mode = KN_AREA, .align_corners = true),
            ".align_corners does nothing with KN_NEAREST, KN_NEAREST_EXACT and KN_AREA");
    REFUSED(kn_interpolate(x, .size = 3, .antialias = true), ".antialias is of KN_BILINEAR");
    REFUSED(kn_interpolate(kn_reshape(x, KN_SHAPE(3, 20)), .size = 2),
            "interpolate: needs a float x[N,C,H,W], x[N,C,L] or x[N,C,D,H,W], got f64[3,20]");
    REFUSED(kn_interpolate(x, .sizes = { 3, -1 }),
            "interpolate: 5 columns would become -1; at least 1 are needed");
    REFUSED(kn_interpolate(x, .scale = 0.2), "interpolate: 4 rows would become 0");
    REFUSED(kn_interpolate(x, .scale = -1), "a scale of -1 makes no size of 4 rows");
    REFUSED(kn_interpolate(x, .scale = NAN), "a scale of nan");
    REFUSED(kn_interpolate(x, .scale = 1e300), "not so large");
    REFUSED(kn_interpolate(image(1, 1, 0, 3), .size = 2), "interpolate: 0 rows would become 2");
    REFUSED(kn_interpolate(kn_reshape(x, KN_SHAPE(3, 4, 5)), .size = 2, .mode = KN_BICUBIC),
            "interpolate: needs a float x[N,C,H,W] for KN_BICUBIC and .antialias, got f64[3,4,5]");
    REFUSED(kn_pixel_shuffle(x, 2),
            "pixel_shuffle: the channels of x f64[1,3,4,5] don't divide by 2 x 2");
    REFUSED(kn_pixel_shuffle(x, 0), "pixel_shuffle: the factor is 0");
    REFUSED(kn_pixel_unshuffle(x, 2),
            "pixel_unshuffle: rows and columns of x f64[1,3,4,5] don't divide by 2");
    REFUSED(kn_pixel_unshuffle(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 4)), 2),
            "pixel_unshuffle: needs x[...,C,H,W]");
}
