/* data/mix.c: mixes two images and their labels: mixup (Zhang et al., "mixup: beyond empirical risk
 * minimization", 2018) and CutMix (Yun et al., 2019). */
#include "data/images_internal.h"
#include "data/loader_internal.h"

#include <math.h>

/* ---- draws
 * --------------------------------------------------------------------------------------- */

/* Never 0. */
static double positive(kn_data_sample *s)
{
    return kn_draw_uniform(s) + 0x1p-25;
}

/* From the gamma distribution of shape a >= 1: Marsaglia and Tsang, "A simple method for generating
 * gamma variables", 2000. */
static double draw_gamma(double a, kn_data_sample *s)
{
    const double d = a - 1.0 / 3, c = 1 / sqrt(9 * d);
    for (;;) {
        double x = kn_draw_normal(s), v = 1 + c * x;
        v = v * v * v;
        if (v > 0 && log(positive(s)) < 0.5 * x * x + d - d * v + d * log(v))
            return d * v;
    }
}

/* From Beta(alpha, alpha). A gamma variable of shape a is one of a + 1 times u^(1/a); both factors
 * are kept as logarithms, since u^(1/a) is 0 for a small a. */
static double draw_beta(double alpha, kn_data_sample *s)
{
    double x = log(draw_gamma(alpha + 1, s)) + log(positive(s)) / alpha;
    double y = log(draw_gamma(alpha + 1, s)) + log(positive(s)) / alpha;
    return 1 / (1 + exp(y - x));
}

/* ---- mixing
 * -------------------------------------------------------------------------------------- */

static void mix_floats(float *a, float *b, int64_t n, float lambda)
{
    for (int64_t i = 0; i < n; i++) {
        float x = a[i], y = b[i];
        a[i] = lambda * x + (1 - lambda) * y;
        b[i] = lambda * y + (1 - lambda) * x;
    }
}

static void mix_images(const kn_mix *m, void *a, void *b, double lambda)
{
    const int64_t n = m->channels * m->height * m->width;
    if (m->dtype == KN_F32) {
        mix_floats(a, b, n, (float)lambda);
        return;
    }
    const int64_t size = (int64_t)kn_dtype_size(m->dtype);
    for (int64_t i = 0; i < n; i++) {
        const double x = kn_element(m->dtype, (char *)a + i * size),
                     y = kn_element(m->dtype, (char *)b + i * size);
        kn_put_float(m->dtype, a, i, lambda * x + (1 - lambda) * y);
        kn_put_float(m->dtype, b, i, lambda * y + (1 - lambda) * x);
    }
}

/* Bytes of a and b are exchanged. */
static void swap(char *a, char *b, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        char one = a[i];
        a[i] = b[i];
        b[i] = one;
    }
}

/* The rectangle around a point with 1 - lambda of the area, cut at the edges; returns the lambda
 * that it leaves. */
static double swap_rectangle(const kn_mix *m, kn_data_sample *s, char *a, char *b, double lambda)
{
    const double half = 0.5 * sqrt(1 - lambda);
    int64_t y = kn_draw_below(s, m->height), tall = (int64_t)(half * (double)m->height);
    int64_t x = kn_draw_below(s, m->width), wide = (int64_t)(half * (double)m->width);
    int64_t top = y > tall ? y - tall : 0, end = y + tall < m->height ? y + tall : m->height;
    int64_t left = x > wide ? x - wide : 0, right = x + wide < m->width ? x + wide : m->width;
    const int64_t size = (int64_t)kn_dtype_size(m->dtype);
    for (int64_t c = 0; c < m->channels; c++)
        for (int64_t row = top; row < end; row++) {
            int64_t at = ((c * m->height + row) * m->width + left) * size;
            swap(a + at, b + at, (size_t)((right - left) * size));
        }
    return 1 - (double)((end - top) * (right - left)) / (double)(m->height * m->width);
}

void kn_mix_pair(const kn_mix *m, kn_data_sample *s, void *a, void *b, float *label_a,
                 float *label_b)
{
    bool both = m->mixup_alpha > 0 && m->cutmix_alpha > 0, cut = m->cutmix_alpha > 0;
    if (both)
        cut = kn_draw_uniform(s) < 0.5;
    double lambda = draw_beta(cut ? m->cutmix_alpha : m->mixup_alpha, s);
    if (cut)
        lambda = swap_rectangle(m, s, a, b, lambda);
    else
        mix_images(m, a, b, lambda);
    mix_floats(label_a, label_b, m->classes, (float)lambda);
}
