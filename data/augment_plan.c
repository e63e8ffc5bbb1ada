/* data/augment_plan.c: checks what shall happen to images, before any is read. */
#include "data/images_internal.h"
#include "data/loader_internal.h"
#include "kernels/error_internal.h"
#include "tensor/tensor_internal.h"

#include <math.h>

#define MOST_SIDE (1 << 15)

/* A size: { S } is a square where square is true. */
static bool check_size(const char *caller, const char *name, int64_t *size, bool square)
{
    if (size[0] < 0 || size[0] > MOST_SIDE || size[1] < 0 || size[1] > MOST_SIDE ||
        (size[0] == 0 && size[1] != 0))
        return kn_fail(
            "%s: .%s is { %lld, %lld }, should be { S } or { H, W } of at most %d pixels", caller,
            name, (long long)size[0], (long long)size[1], MOST_SIDE);
    if (square && size[1] == 0)
        size[1] = size[0];
    return true;
}

/* A range of numbers > 0; both 0: the default. */
static bool check_range(const char *caller, const char *name, double *range, double low,
                        double high, double most)
{
    if (range[0] == 0 && range[1] == 0) {
        range[0] = low;
        range[1] = high;
    }
    return (range[0] > 0 && range[0] <= range[1] && range[1] <= most) ||
           kn_fail("%s: .%s is { %g, %g }, should be two rising numbers in (0, %g]", caller, name,
                   range[0], range[1], most);
}

static bool check_part(const char *caller, const char *name, double v, double most)
{
    return (v >= 0 && v <= most) ||
           kn_fail("%s: .%s is %g, should lie between 0 and %g", caller, name, v, most);
}

static bool check_cuts(const char *caller, kn_augment *a)
{
    int cuts = (a->random_resized_crop.size[0] != 0) + (a->random_crop.size[0] != 0) +
               (a->center_crop[0] != 0);
    if (!check_size(caller, "resize", a->resize, false) ||
        !check_size(caller, "random_resized_crop.size", a->random_resized_crop.size, true) ||
        !check_size(caller, "random_crop.size", a->random_crop.size, true) ||
        !check_size(caller, "center_crop", a->center_crop, true))
        return false;
    if (a->resize[0] && a->random_resized_crop.size[0])
        return kn_fail("%s: .resize changes nothing before .random_resized_crop; leave it out",
                       caller);
    if (cuts > 1)
        return kn_fail("%s: give one of .random_resized_crop, .random_crop and .center_crop",
                       caller);
    if (a->random_crop.padding < 0 || a->random_crop.padding > MOST_SIDE)
        return kn_fail("%s: .random_crop.padding is %lld, should lie between 0 and %d", caller,
                       (long long)a->random_crop.padding, MOST_SIDE);
    if (a->random_crop.size[0] == 0 && (a->random_crop.padding || a->random_crop.reflect))
        return kn_fail("%s: .random_crop has a padding, but no .size", caller);
    return check_range(caller, "random_resized_crop.scale", a->random_resized_crop.scale, 0.08, 1,
                       1) &&
           check_range(caller, "random_resized_crop.ratio", a->random_resized_crop.ratio, 3.0 / 4,
                       4.0 / 3, 1e6);
}

static bool check_chances(const char *caller, kn_augment *a)
{
    return check_part(caller, "random_horizontal_flip", a->random_horizontal_flip, 1) &&
           check_part(caller, "random_vertical_flip", a->random_vertical_flip, 1) &&
           check_part(caller, "color_jitter.brightness", a->color_jitter.brightness, 1e3) &&
           check_part(caller, "color_jitter.contrast", a->color_jitter.contrast, 1e3) &&
           check_part(caller, "color_jitter.saturation", a->color_jitter.saturation, 1e3) &&
           check_part(caller, "color_jitter.hue", a->color_jitter.hue, 0.5) &&
           check_part(caller, "random_erasing.p", a->random_erasing.p, 1) &&
           check_range(caller, "random_erasing.scale", a->random_erasing.scale, 0.02, 0.33, 1) &&
           check_range(caller, "random_erasing.ratio", a->random_erasing.ratio, 0.3, 3.3, 1e6) &&
           (isfinite(a->random_erasing.value) ||
            kn_fail("%s: .random_erasing.value is %g", caller, a->random_erasing.value));
}

static bool check_normalize(const char *caller, kn_augment *a, int64_t channels)
{
    double *mean = a->normalize.mean, *std = a->normalize.std;
    if (std[0] == 0 && std[1] == 0 && std[2] == 0)
        std[0] = std[1] = std[2] = 1;
    for (int64_t c = 0; c < channels; c++)
        if (!isfinite(mean[c]) || !(std[c] > 0) || !isfinite(std[c]))
            return kn_fail("%s: .normalize of channel %lld has mean %g and std %g", caller,
                           (long long)c, mean[c], std[c]);
    return true;
}

static bool check_dtype(const char *caller, const kn_augment *a, kn_dtype dtype)
{
    bool floats = false;
    for (int c = 0; c < 3; c++)
        floats |= a->normalize.mean[c] != 0 || a->normalize.std[c] != 0;
    if (dtype != KN_U8 && !kn_dtype_is_float(dtype))
        return kn_fail("%s: .dtype is %s, should be a float or u8", caller, kn_dtype_name(dtype));
    if (dtype == KN_U8 && (floats || a->random_erasing.p != 0))
        return kn_fail("%s: .normalize and .random_erasing need a .dtype of floats, not u8",
                       caller);
    return true;
}

/* The value of each pixel, computed in f32 as torch does. */
static void fill_table(kn_augment_plan *p)
{
    for (int c = 0; c < p->channels; c++)
        for (int v = 0; v < 256; v++) {
            float x =
                ((float)v / 255.0f - (float)p->a.normalize.mean[c]) / (float)p->a.normalize.std[c];
            if (p->dtype == KN_U8)
                p->table[c][v][0] = (char)v;
            else
                kn_put_float(p->dtype, p->table[c][v], 0, (double)x);
        }
}

bool kn_augment_plan_make(kn_augment_plan *p, const char *caller, const kn_augment *a,
                          kn_dtype dtype, int64_t channels, int64_t height, int64_t width)
{
    *p = (kn_augment_plan){ .a = *a,
                            .dtype = dtype ? dtype : KN_F32,
                            .channels = channels,
                            .height = height,
                            .width = width,
                            .max_pixels = KN_MAX_PIXELS };
    if (!check_dtype(caller, a, p->dtype) || !check_cuts(caller, &p->a) ||
        !check_chances(caller, &p->a) || !check_normalize(caller, &p->a, channels))
        return false;
    const int64_t *size = p->a.random_resized_crop.size[0] ? p->a.random_resized_crop.size
                          : p->a.random_crop.size[0]       ? p->a.random_crop.size
                          : p->a.center_crop[0]            ? p->a.center_crop
                                                           : p->a.resize;
    if (size[1] > 0) {
        p->height = size[0];
        p->width = size[1];
    } else if (size[0] > 0 && height == width && height > 0) {
        p->height = p->width = size[0];
    } else if (size[0] > 0) {
        p->height = p->width = 0;
    }
    fill_table(p);
    return true;
}

kn_tensor *kn_augment_image_(const kn_tensor *image, kn_augment_image_options o)
{
    static const char *const caller = "kn_augment_image";
    kn_augment_plan plan;
    kn_image_room room = { 0 };
    char text[128];
    if (!kn_check(image, caller))
        return NULL;
    if (kn_ndim(image) != 3 || kn_dtype_of(image) != KN_U8 || kn_device_of(image) != KN_CPU ||
        (kn_size(image, 0) != 1 && kn_size(image, 0) != 3) || kn_numel(image) == 0)
        return kn_fail_null(
            "%s: the image is %s, should be u8 [C,H,W] on the CPU with 1 or 3 channels", caller,
            kn_describe(image, text, sizeof text));
    if (kn_numel(image) > 3 * KN_MAX_PIXELS || o.epoch < 0 || o.index < 0)
        return kn_fail_null(
            "%s: %s as sample %lld of epoch %lld; an image has at most %lld pixels, samples "
            "and epochs count from 0",
            caller, kn_describe(image, text, sizeof text), (long long)o.index, (long long)o.epoch,
            (long long)KN_MAX_PIXELS);
    kn_array in = kn_array_of(image);
    kn_pixels p = { in.data,      in.shape[1],  in.shape[2], in.shape[0],
                    in.stride[1], in.stride[2], in.stride[0] };
    kn_data_sample s = { .seed = o.seed, .stream = kn_sample_stream(o.epoch, o.index) };
    kn_tensor *out = NULL;
    if (kn_augment_plan_make(&plan, caller, &o.augment, o.dtype, p.channels, p.height, p.width) &&
        kn_augment_pixels(&plan, &p, &s, &room) &&
        (out = kn_empty(plan.dtype, KN_CPU, KN_SHAPE(p.channels, p.height, p.width))))
        kn_augment_store(&plan, p, &s, kn_array_of(out).data);
    kn_room_free(&room);
    return out;
}
