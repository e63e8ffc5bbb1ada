/* data/resize.c: images at another size, by a filter as PIL computes it.
 *
 * Along one dim output i has its centre at c = (i + 1/2) s of the input, s = in / out. It is the
 * mean of the input's pixels j with the weights w((j + 1/2 - c) / f), f = max(1, s): so a smaller
 * image takes each pixel into account. w is a triangle (bilinear), or cubics that go below 0
 * (bicubic: R. Keys, 1981, a = -1/2). Along one dim first, rounded to 8 bits, then along the
 * other. Weights are whole numbers of 2^-22, as PIL's, so that the results are the same bits
 * everywhere. */
#include "data/images_internal.h"

#include <math.h>

#define BITS 22

/* The weights of one dim: output i is made of count[i] pixels from first[i] on. */
typedef struct weights {
    int64_t most; /* pixels of an output */
    int32_t *first, *count, *weight;
} weights;

static double triangle(double x)
{
    return x < 1 ? 1 - x : 0;
}

static double cubic(double x)
{
    const double a = -0.5;
    return x < 1   ? ((a + 2) * x - (a + 3)) * x * x + 1
           : x < 2 ? (((x - 5) * x + 8) * x - 4) * a
                   : 0;
}

/* weight(x) of the distance x >= 0 is 0 from support on. */
typedef struct filter {
    double support;
    double (*weight)(double x);
} filter;
static const filter bilinear = { 1, triangle }, bicubic = { 2, cubic };

static int64_t most_of(const filter *f, int64_t in, int64_t out)
{
    double scale = (double)in / (double)out;
    return (int64_t)ceil(f->support * (scale > 1 ? scale : 1)) * 2 + 1;
}

/* Bytes of the weights of a dim. */
static size_t weights_size(const filter *f, int64_t in, int64_t out)
{
    return (size_t)out * (size_t)(2 + most_of(f, in, out)) * sizeof(int32_t);
}

static void weights_of_one(const filter *f, weights *w, int64_t i, int64_t in, double scale)
{
    const double wide = scale > 1 ? scale : 1, reach = f->support * wide;
    const double inverse = 1 / wide; /* as PIL rounds */
    double centre = ((double)i + 0.5) * scale, sum = 0;
    int64_t first = (int64_t)(centre - reach + 0.5), end = (int64_t)(centre + reach + 0.5);
    first = first > 0 ? first : 0;
    end = end < in ? end : in;
    w->first[i] = (int32_t)first;
    w->count[i] = (int32_t)(end - first);
    int32_t *to = w->weight + i * w->most;
    for (int pass = 0; pass < 2; pass++) /* the sum, then the weights */
        for (int64_t j = first; j < end; j++) {
            double part = f->weight(fabs(((double)j - centre + 0.5) * inverse));
            if (pass == 0)
                sum += part;
            else
                to[j - first] = (int32_t)((part < 0 ? -0.5 : 0.5) + part / sum * (1 << BITS));
        }
}

static weights weights_of(const filter *f, void *memory, int64_t in, int64_t out)
{
    weights w = { .most = most_of(f, in, out), .first = memory };
    w.count = w.first + out;
    w.weight = w.count + out;
    for (int64_t i = 0; i < out; i++)
        weights_of_one(f, &w, i, in, (double)in / (double)out);
    return w;
}

static uint8_t rounded(int32_t sum)
{
    int32_t v = (sum + (1 << (BITS - 1))) >> BITS;
    return (uint8_t)(v > 255 ? 255 : v < 0 ? 0 : v);
}

/* One row: out[width, C]. */
static void narrow_row(const kn_pixels *in, const uint8_t *row, const weights *w, int64_t width,
                       uint8_t *out)
{
    for (int64_t x = 0; x < width; x++) {
        const int32_t *weight = w->weight + x * w->most;
        const uint8_t *from = row + w->first[x] * in->col;
        if (in->channels == 3) {
            int32_t r = 0, g = 0, b = 0;
            for (int32_t k = 0; k < w->count[x]; k++, from += in->col) {
                r += weight[k] * from[0];
                g += weight[k] * from[in->channel];
                b += weight[k] * from[2 * in->channel];
            }
            out[3 * x] = rounded(r);
            out[3 * x + 1] = rounded(g);
            out[3 * x + 2] = rounded(b);
        } else {
            int32_t sum = 0;
            for (int32_t k = 0; k < w->count[x]; k++, from += in->col)
                sum += weight[k] * from[0];
            out[x] = rounded(sum);
        }
    }
}

/* Output row y of bytes values: a mean of rows. */
static void shorten_row(const kn_pixels *in, const weights *w, int64_t y, int64_t bytes,
                        uint8_t *out)
{
    enum { BLOCK = 256 };
    const int32_t *weight = w->weight + y * w->most;
    for (int64_t begin = 0; begin < bytes; begin += BLOCK) {
        int64_t n = bytes - begin < BLOCK ? bytes - begin : BLOCK;
        int32_t sum[BLOCK] = { 0 };
        for (int32_t k = 0; k < w->count[y]; k++) {
            const uint8_t *from = in->pixel + (w->first[y] + k) * in->row + begin;
            for (int64_t i = 0; i < n; i++)
                sum[i] += weight[k] * from[i];
        }
        for (int64_t i = 0; i < n; i++)
            out[begin + i] = rounded(sum[i]);
    }
}

static bool narrow(const filter *f, kn_pixels *p, int64_t width, kn_image_room *room, int which)
{
    void *memory = kn_room_take(room, KN_ROOM_WEIGHTS, weights_size(f, p->width, width));
    const int64_t line = width * p->channels;
    uint8_t *to = memory ? kn_room_take(room, which, (size_t)(p->height * line)) : NULL;
    if (!to)
        return false;
    weights w = weights_of(f, memory, p->width, width);
    for (int64_t y = 0; y < p->height; y++)
        narrow_row(p, p->pixel + y * p->row, &w, width, to + y * line);
    *p = kn_pixels_interleaved(to, p->height, width, p->channels);
    return true;
}

static bool shorten(const filter *f, kn_pixels *p, int64_t height, kn_image_room *room, int which)
{
    if (p->col != p->channels || p->channel != 1) {
        const uint8_t *line_up = kn_pixels_gather(*p, room, KN_ROOM_COLOURED);
        if (!line_up)
            return false;
        *p = kn_pixels_interleaved(line_up, p->height, p->width, p->channels);
    }
    void *memory = kn_room_take(room, KN_ROOM_WEIGHTS, weights_size(f, p->height, height));
    const int64_t line = p->width * p->channels;
    uint8_t *to = memory ? kn_room_take(room, which, (size_t)(height * line)) : NULL;
    if (!to)
        return false;
    weights w = weights_of(f, memory, p->height, height);
    for (int64_t y = 0; y < height; y++)
        shorten_row(p, &w, y, line, to + y * line);
    *p = kn_pixels_interleaved(to, height, p->width, p->channels);
    return true;
}

/* Where many rows go, and few columns, they go first: the order of Pillow 13.0. With the other
 * order the rounding in between differs by a step here and there. */
static bool shorter_first(const kn_pixels *in, int64_t height, int64_t width)
{
    return height < in->height && in->height - height > 2 * (in->width - width);
}

bool kn_resize(kn_pixels in, int64_t height, int64_t width, bool cubics, kn_image_room *room,
               kn_pixels *out)
{
    const filter *f = cubics ? &bicubic : &bilinear;
    const bool shorter = shorter_first(&in, height, width);
    *out = in;
    return shorter ? shorten(f, out, height, room, KN_ROOM_NARROW) &&
                         narrow(f, out, width, room, KN_ROOM_RESIZED)
                   : narrow(f, out, width, room, KN_ROOM_NARROW) &&
                         shorten(f, out, height, room, KN_ROOM_RESIZED);
}
