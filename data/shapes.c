/* data/shapes.c: "shapes", images that are drawn instead of photographed, for programs and tests on
 * machines without data: one of ten kinds of figures with a random place, size, angle and colours,
 * small discs around it, a background that changes from one colour to another, and noise. Image i
 * of a split is a function of (split, i) alone; nearest means of pixels tell the kinds apart badly
 * (tests/data/image_set_test.c), a small convolutional network well. */
#include "data/data.h"
#include "data/images_internal.h"
#include "kernels/philox.h"

#include <math.h>
#include <string.h>

#define SIDE   32
#define NOISE  20 /* at most so many steps of 255 */
#define FINE   2  /* a pixel is the mean of FINE x FINE points */
#define EXTRAS 3

enum { DISC, RING, SQUARE, FRAME, TRIANGLE, CROSS, STAR, CRESCENT, STRIPES, CHECKERS, KINDS };
static const char *const kind_names[KINDS] = { "disc",  "ring", "square",   "frame",   "triangle",
                                               "cross", "star", "crescent", "stripes", "checkers" };

/* A five-pointed star holds the points beyond at most one of its five lines. */
static bool in_star(double u, double v)
{
    static const double line[5][2] = { { 0, -1 },
                                       { 0.9510565, -0.3090170 },
                                       { 0.5877853, 0.8090170 },
                                       { -0.5877853, 0.8090170 },
                                       { -0.9510565, -0.3090170 } };
    int beyond = 0;
    for (int i = 0; i < 5; i++)
        beyond += u * line[i][0] + v * line[i][1] > 0.32;
    return beyond < 2 && u * u + v * v < 1.1;
}

/* A point in coordinates of the figure, which fills about the circle of radius 1. */
static bool inside(int kind, double u, double v)
{
    const double far = u * u + v * v, a = fabs(u), b = fabs(v), most = a > b ? a : b,
                 least = a < b ? a : b;
    switch (kind) {
    case DISC:
        return far < 0.72;
    case RING:
        return far < 0.9 && far > 0.3;
    case SQUARE:
        return most < 0.75;
    case FRAME:
        return most < 0.82 && most > 0.48;
    case TRIANGLE:
        return v > -0.5 && v + 1.7320508 * a < 1;
    case CROSS:
        return least < 0.27 && most < 0.95;
    case STAR:
        return in_star(u, v);
    case CRESCENT:
        return far < 0.9 && (u - 0.45) * (u - 0.45) + v * v > 0.45;
    case STRIPES:
        return most < 0.9 && (int)((u + 0.9) / 0.36) % 2 == 0;
    default:
        return most < 0.9 && ((int)((u + 0.9) / 0.6) + (int)((v + 0.9) / 0.6)) % 2 == 0;
    }
}

typedef struct figure {
    int kind;
    double x, y, radius, cosine, sine; /* in pixels; the angle */
    double colour[3];
} figure;

static bool covers(const figure *f, double x, double y)
{
    double dx = (x - f->x) / f->radius, dy = (y - f->y) / f->radius;
    return inside(f->kind, f->cosine * dx + f->sine * dy, f->cosine * dy - f->sine * dx);
}

static double between(kn_data_sample *s, double low, double high)
{
    return low + (high - low) * kn_draw_uniform(s);
}

static void draw_colour(kn_data_sample *s, double *colour)
{
    for (int c = 0; c < 3; c++)
        colour[c] = between(s, 30, 225);
}

/* Another colour, told apart by at least one channel. */
static void draw_other_colour(kn_data_sample *s, const double *than, double *colour)
{
    double far = 0;
    do {
        draw_colour(s, colour);
        for (int c = 0; c < 3; c++)
            far = fmax(far, fabs(colour[c] - than[c]));
    } while (far < 70);
}

static figure draw_figure(kn_data_sample *s, int kind, double low, double high, double margin)
{
    figure f = { .kind = kind, .radius = between(s, low, high) };
    f.x = between(s, margin, SIDE - margin);
    f.y = between(s, margin, SIDE - margin);
    double a = kn_draw_normal(s), b = kn_draw_normal(s), length = sqrt(a * a + b * b) + 1e-9;
    f.cosine = a / length;
    f.sine = b / length;
    return f;
}

typedef struct scene {
    double from[3], to[3]; /* colours of the background */
    double across, along;  /* its direction */
    figure figure[1 + EXTRAS];
    int figures;
} scene;

static scene draw_scene(kn_data_sample *s, int kind)
{
    scene d = { .figures = 1 + (int)kn_draw_below(s, EXTRAS + 1) };
    draw_colour(s, d.from);
    for (int c = 0; c < 3; c++)
        d.to[c] = d.from[c] + between(s, -60, 60);
    d.across = between(s, 0, 1);
    d.along = 1 - d.across;
    for (int i = d.figures - 1; i >= 1; i--) {
        d.figure[i] = draw_figure(s, DISC, 1.5, 3, 2);
        draw_other_colour(s, d.from, d.figure[i].colour);
    }
    d.figure[0] = draw_figure(s, kind, 7, 13, 12);
    draw_other_colour(s, d.from, d.figure[0].colour);
    return d;
}

static void add_point(const scene *d, double x, double y, double *sum)
{
    double part = (x * d->across + y * d->along) / SIDE;
    const double *colour = NULL;
    for (int i = 0; i < d->figures && !colour; i++)
        colour = covers(&d->figure[i], x, y) ? d->figure[i].colour : NULL;
    for (int c = 0; c < 3; c++)
        sum[c] += colour ? colour[c] : d->from[c] + part * (d->to[c] - d->from[c]);
}

static int read_image(const kn_image_set *s, int64_t index, kn_image_room *room, kn_pixels *out)
{
    uint8_t *to = kn_room_take(room, KN_ROOM_DECODED, SIDE * SIDE * 3), noise[16];
    if (!to)
        return false;
    kn_data_sample draws = { .seed = s->seed, .stream = kn_random_stream("data.shapes", index, 0) };
    const scene d = draw_scene(&draws, (int)(index % KINDS));
    for (int i = 0; i < SIDE * SIDE; i++) {
        double sum[3] = { 0 };
        for (int k = 0; k < FINE * FINE; k++)
            add_point(&d, i % SIDE + (0.5 + k % FINE) / FINE,
                      (double)(i / SIDE) + (0.5 + (double)(k / FINE)) / FINE, sum);
        if (i % 4 == 0) {
            kn_philox4 r = kn_philox(s->seed, ~draws.stream, (uint64_t)i / 4);
            memcpy(noise, r.word, sizeof noise);
        }
        for (int c = 0; c < 3; c++) {
            double v = sum[c] / (FINE * FINE) + (noise[4 * (i % 4) + c] / 127.5 - 1) * NOISE;
            to[3 * i + c] = (uint8_t)(v > 255 ? 255 : v > 0 ? v : 0);
        }
    }
    *out = kn_pixels_interleaved(to, SIDE, SIDE, 3);
    return true;
}

static int64_t label_of(const kn_image_set *s, int64_t index)
{
    (void)s;
    return index % KINDS;
}

bool kn_shapes_open(kn_image_set *s, const char *split)
{
    bool train = strcmp(split, "train") == 0;
    s->info = (kn_image_set_info){ .kind = "drawn shapes, no real images",
                                   .count = train ? 50000 : 10000,
                                   .channels = 3,
                                   .height = SIDE,
                                   .width = SIDE,
                                   .made = true };
    s->seed = train ? 1 : 2;
    s->read = read_image;
    s->label = label_of;
    return kn_image_set_name(s, kind_names, KINDS);
}
