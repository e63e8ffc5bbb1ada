/* data/augment.c: cuts, flips and erases images, with the draws of their sample. */
#include "data/images_internal.h"
#include "data/loader_internal.h"
#include "kernels/error.h"
#include "kernels/memory.h"

#include <math.h>
#include <string.h>

/* ---- views and rooms ---------------------------------------------------------------------------
 */

kn_pixels kn_pixels_interleaved(const uint8_t *pixel, int64_t height, int64_t width,
                                int64_t channels)
{
    return (kn_pixels){ pixel, height, width, channels, width * channels, channels, 1 };
}

kn_pixels kn_pixels_planar(const uint8_t *pixel, int64_t height, int64_t width, int64_t channels)
{
    return (kn_pixels){ pixel, height, width, channels, width, 1, height * width };
}

/* The part of height x width pixels at (top, left), which lies inside. */
static kn_pixels part_of(kn_pixels p, int64_t top, int64_t left, int64_t height, int64_t width)
{
    p.pixel += top * p.row + left * p.col;
    p.height = height;
    p.width = width;
    return p;
}

void *kn_room_take(kn_image_room *r, int which, size_t size)
{
    if (r->size[which] < size || !r->at[which]) {
        kn_host_free(r->at[which]);
        r->at[which] = kn_host_alloc(size > 0 ? size : 1);
        r->size[which] = r->at[which] ? size : 0;
    }
    return r->at[which];
}

void kn_room_free(kn_image_room *r)
{
    for (int i = 0; i < KN_ROOMS; i++)
        kn_host_free(r->at[i]);
    *r = (kn_image_room){ 0 };
}

uint8_t *kn_pixels_gather(kn_pixels p, kn_image_room *room, int which)
{
    uint8_t *to = kn_room_take(room, which, (size_t)(p.height * p.width) * (size_t)p.channels);
    for (int64_t y = 0, at = 0; to && y < p.height; y++)
        for (int64_t x = 0; x < p.width; x++)
            for (int64_t c = 0; c < p.channels; c++)
                to[at++] = p.pixel[y * p.row + x * p.col + c * p.channel];
    return to;
}

/* ---- draws
 * --------------------------------------------------------------------------------------- */

/* Each kind of choice has its own random numbers: one that is switched on or off changes no other.
 */
enum { CROP, HORIZONTAL, VERTICAL, COLOUR, ERASE, NORMAL };

static void draws_of(kn_data_sample *s, int kind)
{
    s->draws = (uint64_t)kind << 8;
}

static double between(kn_data_sample *s, double low, double high)
{
    return low + (high - low) * kn_draw_uniform(s);
}

/* Sides of a rectangle with a part of the area and a ratio that are drawn; tall is wide where the
 * ratio is height / width. */
static void draw_sides(kn_data_sample *s, double area, const double *scale, const double *ratio,
                       int64_t *wide, int64_t *tall)
{
    double part = area * between(s, scale[0], scale[1]);
    double shape = exp(between(s, log(ratio[0]), log(ratio[1])));
    *wide = (int64_t)nearbyint(sqrt(part * shape));
    *tall = (int64_t)nearbyint(sqrt(part / shape));
}

/* ---- cutting
 * ------------------------------------------------------------------------------------- */

/* The whole image with pixels on each side: black, or mirrored at its edge. */
static bool pad(kn_pixels *p, int64_t top, int64_t left, int64_t height, int64_t width,
                bool reflect, kn_image_room *room)
{
    const int64_t n = p->channels;
    uint8_t *to = kn_room_take(room, KN_ROOM_PADDED, (size_t)(height * width) * (size_t)n);
    if (!to)
        return false;
    memset(to, 0, (size_t)(height * width * n));
    for (int64_t y = 0; y < height; y++)
        for (int64_t x = 0; x < width; x++) {
            int64_t i = y - top, j = x - left;
            if (reflect) {
                i = i < 0 ? -i : i >= p->height ? 2 * p->height - 2 - i : i;
                j = j < 0 ? -j : j >= p->width ? 2 * p->width - 2 - j : j;
            }
            if (i >= 0 && i < p->height && j >= 0 && j < p->width)
                for (int64_t c = 0; c < n; c++)
                    to[(y * width + x) * n + c] =
                        p->pixel[i * p->row + j * p->col + c * p->channel];
        }
    *p = kn_pixels_interleaved(to, height, width, n);
    return true;
}

static bool fits(const kn_augment_plan *plan, int64_t height, int64_t width)
{
    return height <= plan->max_pixels / width ||
           kn_fail("an image becomes %lld x %lld pixels; the limit is %lld pixels",
                   (long long)height, (long long)width, (long long)plan->max_pixels);
}

static bool resize(const kn_augment_plan *plan, kn_pixels *p, kn_image_room *room)
{
    int64_t height = plan->a.resize[0], width = plan->a.resize[1];
    if (width == 0) { /* of the shorter side */
        const int64_t side = height;
        height = p->height <= p->width
                     ? side
                     : (int64_t)((double)side * (double)p->height / (double)p->width);
        width = p->width <= p->height
                    ? side
                    : (int64_t)((double)side * (double)p->width / (double)p->height);
    }
    if (height == p->height && width == p->width)
        return true;
    return fits(plan, height, width) && fits(plan, p->height, width) &&
           kn_resize(*p, height, width, plan->a.bicubic, room, p);
}

/* The largest middle part whose ratio lies in the range. */
static kn_pixels middle(kn_pixels p, const double *ratio)
{
    int64_t height = p.height, width = p.width;
    double is = (double)width / (double)height;
    if (is < ratio[0])
        height = (int64_t)nearbyint((double)width / ratio[0]);
    else if (is > ratio[1])
        width = (int64_t)nearbyint((double)height * ratio[1]);
    height = height < 1 ? 1 : height > p.height ? p.height : height;
    width = width < 1 ? 1 : width > p.width ? p.width : width;
    return part_of(p, (p.height - height) / 2, (p.width - width) / 2, height, width);
}

static bool random_resized_crop(const kn_augment_plan *plan, kn_pixels *p, kn_data_sample *s,
                                kn_image_room *room)
{
    const int64_t *size = plan->a.random_resized_crop.size;
    const double *scale = plan->a.random_resized_crop.scale,
                 *ratio = plan->a.random_resized_crop.ratio;
    kn_pixels part = { 0 };
    draws_of(s, CROP);
    for (int tries = 0; tries < 10 && !part.pixel; tries++) {
        int64_t height, width;
        draw_sides(s, (double)p->height * (double)p->width, scale, ratio, &width, &height);
        if (width < 1 || width > p->width || height < 1 || height > p->height)
            continue;
        int64_t top = kn_draw_below(s, p->height - height + 1);
        part = part_of(*p, top, kn_draw_below(s, p->width - width + 1), height, width);
    }
    if (!part.pixel)
        part = middle(*p, ratio);
    return fits(plan, part.height, size[1]) &&
           kn_resize(part, size[0], size[1], plan->a.bicubic, room, p);
}

static bool random_crop(const kn_augment_plan *plan, kn_pixels *p, kn_data_sample *s,
                        kn_image_room *room)
{
    const int64_t *size = plan->a.random_crop.size, by = plan->a.random_crop.padding;
    const bool reflect = plan->a.random_crop.reflect;
    if (size[0] > p->height + 2 * by || size[1] > p->width + 2 * by)
        return kn_fail("an image of %lld x %lld pixels is smaller than the .random_crop of %lld x "
                       "%lld with a .padding of %lld",
                       (long long)p->height, (long long)p->width, (long long)size[0],
                       (long long)size[1], (long long)by);
    if (reflect && (by >= p->height || by >= p->width))
        return kn_fail("an image of %lld x %lld pixels can't be mirrored .padding %lld beyond its "
                       "edges",
                       (long long)p->height, (long long)p->width, (long long)by);
    if (by > 0 && (!fits(plan, p->height + 2 * by, p->width + 2 * by) ||
                   !pad(p, by, by, p->height + 2 * by, p->width + 2 * by, reflect, room)))
        return false;
    draws_of(s, CROP);
    int64_t top = kn_draw_below(s, p->height - size[0] + 1);
    *p = part_of(*p, top, kn_draw_below(s, p->width - size[1] + 1), size[0], size[1]);
    return true;
}

static bool center_crop(const kn_augment_plan *plan, kn_pixels *p, kn_image_room *room)
{
    const int64_t height = plan->a.center_crop[0], width = plan->a.center_crop[1];
    int64_t high = height > p->height ? height : p->height,
            wide = width > p->width ? width : p->width;
    if ((high > p->height || wide > p->width) &&
        (!fits(plan, high, wide) ||
         !pad(p, (high - p->height) / 2, (wide - p->width) / 2, high, wide, false, room)))
        return false;
    *p = part_of(*p, (int64_t)nearbyint((double)(p->height - height) / 2),
                 (int64_t)nearbyint((double)(p->width - width) / 2), height, width);
    return true;
}

/* With a chance: a dim of so many pixels, step apart, is read backwards. */
static void flip(kn_pixels *p, int64_t pixels, int64_t *step, double chance, int kind,
                 kn_data_sample *s)
{
    draws_of(s, kind);
    if (chance > 0 && kn_draw_uniform(s) < chance) {
        p->pixel += (pixels - 1) * *step;
        *step = -*step;
    }
}

bool kn_augment_pixels(const kn_augment_plan *plan, kn_pixels *p, kn_data_sample *s,
                       kn_image_room *room)
{
    const kn_augment *a = &plan->a;
    bool ok = a->resize[0] == 0 || resize(plan, p, room);
    if (ok && a->random_resized_crop.size[0] > 0)
        ok = random_resized_crop(plan, p, s, room);
    else if (ok && a->random_crop.size[0] > 0)
        ok = random_crop(plan, p, s, room);
    else if (ok && a->center_crop[0] > 0)
        ok = center_crop(plan, p, room);
    if (!ok)
        return false;
    flip(p, p->width, &p->col, a->random_horizontal_flip, HORIZONTAL, s);
    flip(p, p->height, &p->row, a->random_vertical_flip, VERTICAL, s);
    if (a->color_jitter.brightness > 0 || a->color_jitter.contrast > 0 ||
        a->color_jitter.saturation > 0 || a->color_jitter.hue > 0) {
        uint8_t *pixels = kn_pixels_gather(*p, room, KN_ROOM_COLOURED);
        if (!pixels)
            return false;
        draws_of(s, COLOUR);
        kn_jitter(a, pixels, p->height * p->width, p->channels, s);
        *p = kn_pixels_interleaved(pixels, p->height, p->width, p->channels);
    }
    return true;
}

/* ---- values
 * -------------------------------------------------------------------------------------- */

static void erase(const kn_augment_plan *plan, const kn_pixels *p, kn_data_sample *s, void *out)
{
    const double area = (double)p->height * (double)p->width;
    int64_t height = 0, width = 0, tries = 0;
    draws_of(s, ERASE);
    if (kn_draw_uniform(s) >= plan->a.random_erasing.p)
        return;
    for (; tries < 10; tries++) {
        draw_sides(s, area, plan->a.random_erasing.scale, plan->a.random_erasing.ratio, &height,
                   &width);
        if (height < p->height && width < p->width)
            break;
    }
    if (tries == 10)
        return;
    int64_t top = kn_draw_below(s, p->height - height + 1),
            left = kn_draw_below(s, p->width - width + 1);
    draws_of(s, NORMAL);
    for (int64_t c = 0; c < p->channels; c++)
        for (int64_t y = top; y < top + height; y++)
            for (int64_t x = left; x < left + width; x++)
                kn_put_float(plan->dtype, out, (c * p->height + y) * p->width + x,
                             plan->a.random_erasing.random ? kn_draw_normal(s)
                                                           : plan->a.random_erasing.value);
}

#define STORE(type)                                                                                \
    for (int64_t c = 0; c < p.channels; c++) {                                                     \
        type table[256];                                                                           \
        for (int v = 0; v < 256; v++)                                                              \
            memcpy(&table[v], plan->table[c][v], sizeof(type));                                    \
        for (int64_t y = 0; y < p.height; y++) {                                                   \
            const uint8_t *from = p.pixel + y * p.row + c * p.channel;                             \
            type *to = (type *)out + (c * p.height + y) * p.width;                                 \
            for (int64_t x = 0; x < p.width; x++)                                                  \
                to[x] = table[from[x * p.col]];                                                    \
        }                                                                                          \
    }

void kn_augment_store(const kn_augment_plan *plan, kn_pixels p, kn_data_sample *s, void *out)
{
    switch (kn_dtype_size(plan->dtype)) {
    case 1:
        STORE(uint8_t)
        break;
    case 2:
        STORE(uint16_t)
        break;
    case 4:
        STORE(uint32_t)
        break;
    default:
        STORE(uint64_t)
    }
    if (plan->a.random_erasing.p > 0)
        erase(plan, &p, s, out);
}
