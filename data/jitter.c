/* data/jitter.c: colours of 8 bits changed, by the formulas of torchvision.transforms.ColorJitter:
 * a factor f of the distance from black (brightness), from the image's mean grey (contrast), from
 * each pixel's grey (saturation); hues turned by a part of the circle. */
#include "data/images_internal.h"

#include <math.h>

static float grey_of(const uint8_t *p, int64_t channels)
{
    if (channels == 1)
        return p[0];
    return floorf(0.2989f * (float)p[0] + 0.587f * (float)p[1] + 0.114f * (float)p[2]);
}

/* f v + (1 - f) other, cut to 8 bits. */
static uint8_t blend(uint8_t v, float other, float f)
{
    float x = f * (float)v + (1 - f) * other;
    return (uint8_t)(x > 255 ? 255 : x > 0 ? x : 0);
}

static void blend_all(uint8_t *p, int64_t values, float other, float f)
{
    for (int64_t i = 0; i < values; i++)
        p[i] = blend(p[i], other, f);
}

static void contrast(uint8_t *p, int64_t count, int64_t channels, float f)
{
    double sum = 0; /* of whole numbers: exact */
    for (int64_t i = 0; i < count; i++)
        sum += (double)grey_of(p + i * channels, channels);
    blend_all(p, count * channels, (float)(sum / (double)count), f);
}

static void saturation(uint8_t *p, int64_t count, float f)
{
    for (int64_t i = 0; i < count; i++, p += 3) {
        float grey = grey_of(p, 3);
        for (int c = 0; c < 3; c++)
            p[c] = blend(p[c], grey, f);
    }
}

/* The hue of a pixel in sixths of the circle, and how far it is from grey. */
static float hue_of(const uint8_t *p, float high, float spread)
{
    float r = (float)p[0], g = (float)p[1], b = (float)p[2];
    float h = high == r   ? (g - b) / spread
              : high == g ? 2 + (b - r) / spread
                          : 4 + (r - g) / spread;
    return h < 0 ? h + 6 : h;
}

/* A colour of brightness high whose least channel is high - spread. */
static uint8_t channel_at(float sixths, float offset, float high, float spread)
{
    float k = fmodf(offset + sixths, 6), low = fminf(k, 4 - k);
    float v = high - spread * fmaxf(0, fminf(1, low));
    return (uint8_t)fminf(255, fmaxf(0, v / 255 * 255.999f));
}

static void hue(uint8_t *p, int64_t count, float shift)
{
    for (int64_t i = 0; i < count; i++, p += 3) {
        float high = (float)(p[0] > p[1] ? p[0] > p[2] ? p[0] : p[2] : p[1] > p[2] ? p[1] : p[2]);
        float low = (float)(p[0] < p[1] ? p[0] < p[2] ? p[0] : p[2] : p[1] < p[2] ? p[1] : p[2]);
        if (high == low)
            continue;
        float sixths = fmodf(hue_of(p, high, high - low) + 6 * shift + 6, 6);
        p[0] = channel_at(sixths, 5, high, high - low);
        p[1] = channel_at(sixths, 3, high, high - low);
        p[2] = channel_at(sixths, 1, high, high - low);
    }
}

static float factor_of(double most, kn_data_sample *s)
{
    double low = most < 1 ? 1 - most : 0;
    return (float)(low + (1 + most - low) * kn_draw_uniform(s));
}

void kn_jitter(const kn_augment *a, uint8_t *pixels, int64_t count, int64_t channels,
               kn_data_sample *s)
{
    int order[4] = { 0, 1, 2, 3 };
    float f[4] = { factor_of(a->color_jitter.brightness, s), factor_of(a->color_jitter.contrast, s),
                   factor_of(a->color_jitter.saturation, s),
                   (float)(a->color_jitter.hue * (2 * kn_draw_uniform(s) - 1)) };
    for (int i = 3; i > 0; i--) {
        int j = (int)kn_draw_below(s, i + 1), one = order[i];
        order[i] = order[j];
        order[j] = one;
    }
    for (int i = 0; i < 4; i++)
        if (order[i] == 0 && a->color_jitter.brightness > 0)
            blend_all(pixels, count * channels, 0, f[0]);
        else if (order[i] == 1 && a->color_jitter.contrast > 0)
            contrast(pixels, count, channels, f[1]);
        else if (order[i] == 2 && a->color_jitter.saturation > 0 && channels == 3)
            saturation(pixels, count, f[2]);
        else if (order[i] == 3 && a->color_jitter.hue > 0 && channels == 3)
            hue(pixels, count, f[3]);
}
