/* tests/data/jitter_test.c: colours against the formulas, written down here once more with the
 * draws of the sample. */
#include "data/images_internal.h"
#include "tests/data/pictures.h"

#include <math.h>

enum { COUNT = 400 };

static kn_data_sample draws(uint64_t stream)
{
    return (kn_data_sample){ .seed = 3, .stream = stream };
}

static void colours(uint8_t *p)
{
    for (int i = 0; i < 3 * COUNT; i++)
        p[i] = (uint8_t)(i * i * 31 + i * 7);
}

static double grey(const uint8_t *p)
{
    return floor(0.2989 * p[0] + 0.587 * p[1] + 0.114 * p[2] + 1e-6);
}

/* The factor or shift that kn_jitter draws as its nth number. */
static double factor(uint64_t stream, int nth, double low, double high)
{
    kn_data_sample s = draws(stream);
    double u = 0;
    for (int i = 0; i <= nth; i++)
        u = kn_draw_uniform(&s);
    return low + (high - low) * u;
}

static void check_blend(const uint8_t *got, const uint8_t *was, double f, double mean, bool own)
{
    for (int i = 0; i < 3 * COUNT; i++) {
        double other = own ? grey(was + i / 3 * 3) : mean;
        double v = f * was[i] + (1 - f) * other;
        v = v > 255 ? 255 : v > 0 ? v : 0;
        KN_CHECK(fabs(v - got[i] - 0.5) < 0.501, "value %d: %g is %d", i, v, got[i]);
    }
}

KN_TEST(jitter, factors)
{
    uint8_t was[3 * COUNT], p[3 * COUNT];
    double mean = 0;
    colours(was);
    for (int i = 0; i < COUNT; i++)
        mean += grey(was + 3 * i) / COUNT;
    for (uint64_t stream = 0; stream < 20; stream++)
        for (int kind = 0; kind < 3; kind++) {
            kn_augment a = { 0 };
            double *most[] = { &a.color_jitter.brightness, &a.color_jitter.contrast,
                               &a.color_jitter.saturation };
            kn_data_sample s = draws(stream);
            *most[kind] = stream < 10 ? 0.4 : 3;
            memcpy(p, was, sizeof p);
            kn_jitter(&a, p, COUNT, 3, &s);
            double f = factor(stream, kind, stream < 10 ? 0.6 : 0, 1 + *most[kind]);
            check_blend(p, was, f, kind == 1 ? mean : 0, kind == 2);
        }
}

static double hue_of(double r, double g, double b)
{
    double high = fmax(r, fmax(g, b)), spread = high - fmin(r, fmin(g, b));
    double h = high == r   ? (g - b) / spread
               : high == g ? 2 + (b - r) / spread
                           : 4 + (r - g) / spread;
    return h / 6 - floor(h / 6);
}

/* A turned hue keeps the largest and the smallest channel, and the hue moves by the shift. */
KN_TEST(jitter, hues)
{
    uint8_t was[3 * COUNT], p[3 * COUNT];
    colours(was);
    for (uint64_t stream = 0; stream < 20; stream++) {
        const kn_augment a = { .color_jitter = { .hue = stream < 10 ? 0.5 : 0.1 } };
        kn_data_sample s = draws(stream);
        double shift = factor(stream, 3, -a.color_jitter.hue, a.color_jitter.hue);
        memcpy(p, was, sizeof p);
        kn_jitter(&a, p, COUNT, 3, &s);
        for (int i = 0; i < COUNT; i++) {
            const uint8_t *x = was + 3 * i, *y = p + 3 * i;
            double high = fmax(x[0], fmax(x[1], x[2])), low = fmin(x[0], fmin(x[1], x[2]));
            KN_CHECK(fabs(high - fmax(y[0], fmax(y[1], y[2]))) <= 1);
            KN_CHECK(fabs(low - fmin(y[0], fmin(y[1], y[2]))) <= 1);
            if (high - low < 100)
                continue;
            double moved = hue_of(y[0], y[1], y[2]) - hue_of(x[0], x[1], x[2]) - shift;
            KN_CHECK(fabs(moved - rint(moved)) < 0.01, "pixel %d: %g", i, moved);
        }
    }
}

/* Grey images keep one channel: brightness and contrast alone change them. */
KN_TEST(jitter, grey_images)
{
    uint8_t was[COUNT], p[COUNT];
    const kn_augment none = { .color_jitter = { .saturation = 0.9, .hue = 0.5 } };
    const kn_augment some = { .color_jitter = { .brightness = 0.5, .contrast = 0.5 } };
    for (int i = 0; i < COUNT; i++)
        p[i] = was[i] = (uint8_t)(i * 13);
    kn_data_sample s = draws(1);
    kn_jitter(&none, p, COUNT, 1, &s);
    KN_CHECK(memcmp(p, was, sizeof p) == 0);
    s = draws(1);
    kn_jitter(&some, p, COUNT, 1, &s);
    KN_CHECK(memcmp(p, was, sizeof p) != 0);
}
