/* tests/data/augment_test.c: what happens to one image: sizes as PIL computes them, cuts, flips,
 * colours, values, rectangles that are erased. */
#include "data/images_internal.h"
#include "tests/owned.h"
#include "tests/data/pictures.h"

#include <math.h>

/* The pixels as PIL orders them, [H,W,C]. */
static int64_t interleave(const kn_tensor *t, uint8_t *to)
{
    const uint8_t *p = kn_data((kn_tensor *)t);
    int64_t channels = kn_size(t, 0), height = kn_size(t, 1), width = kn_size(t, 2), n = 0;
    for (int64_t y = 0; y < height; y++)
        for (int64_t x = 0; x < width; x++)
            for (int64_t c = 0; c < channels; c++)
                to[n++] = p[(c * height + y) * width + x];
    return n;
}

static kn_tensor *resized_by(kn_tensor *image, int64_t height, int64_t width, bool bicubic)
{
    return kn_augment_image(image, .augment = { .resize = { height, width }, .bicubic = bicubic },
                            .dtype = KN_U8);
}

static kn_tensor *resized(kn_tensor *image, int64_t height, int64_t width)
{
    return resized_by(image, height, width, false);
}

/* Values made by Pillow 13.0.0: Image.fromarray(image).resize((W, H), Image.BILINEAR), and BICUBIC.
 */
KN_TEST(augment, sizes_as_pil_makes_them)
{
    static const uint8_t smaller[] = { 76,  155, 133, 115, 136, 110, 133, 143, 104, 135, 116, 139,
                                       122, 123, 139, 133, 135, 130, 104, 146, 140, 142, 125, 140,
                                       129, 128, 129, 131, 130, 131, 132, 115, 139, 127, 109, 136 };
    static const uint8_t larger[] = { 0,  101, 202, 1,  102, 203, 6,  107, 208, 10, 111, 212,
                                      11, 112, 213, 23, 124, 225, 25, 126, 227, 30, 131, 232,
                                      36, 137, 238, 37, 138, 239, 51, 152, 157, 53, 154, 159,
                                      60, 161, 166, 67, 168, 173, 69, 170, 175, 74, 175, 20,
                                      76, 177, 22,  85, 186, 31,  93, 194, 39,  95, 196, 41 };
    static const struct {
        int64_t height, width, to_height, to_width;
        uint64_t hash[2]; /* FNV-1a of the values */
    } cases[] = {
        { 97, 61, 40, 33, { 0x7286ca7a7d2fa615, 0x65d0b1ec5765cf1a } },
        { 20, 30, 47, 64, { 0x043c5bac0aef8f45, 0xb7a02af3beca73dd } },
        { 64, 64, 64, 20, { 0xc2adb80956b74599, 0x5ce433c8fe755e1e } },
        { 1, 1, 5, 7, { 0x621e92a2f3a70d52, 0x621e92a2f3a70d52 } },
        { 1, 300, 3, 2, { 0x33d1cf3435407d45, 0x33d1cf3435407d45 } },
        { 300, 400, 224, 224, { 0x92663dec79510141, 0x800aee2a729d8129 } },
        { 50, 50, 1, 1, { 0xa327f9196f0b3953, 0xa2b007196ea477b8 } },
        { 31, 17, 31, 17, { 0xf26b6d23a0531f69, 0xf26b6d23a0531f69 } },
    };
    static uint8_t got[224 * 224 * 3];
    IN_SCOPE;
    KN_CHECK(interleave(resized(picture(3, 13, 9), 4, 3), got) == sizeof smaller);
    KN_CHECK(memcmp(got, smaller, sizeof smaller) == 0);
    KN_CHECK(interleave(resized(picture(3, 3, 2), 4, 5), got) == sizeof larger);
    KN_CHECK(memcmp(got, larger, sizeof larger) == 0);
    for (size_t k = 0; k < 2 * sizeof cases / sizeof cases[0]; k++) {
        const size_t i = k / 2;
        kn_tensor *image = picture(3, cases[i].height, cases[i].width);
        int64_t n =
            interleave(resized_by(image, cases[i].to_height, cases[i].to_width, k % 2), got);
        uint64_t hash = 0xcbf29ce484222325u;
        for (int64_t j = 0; j < n; j++)
            hash = (hash ^ got[j]) * 0x100000001b3u;
        KN_CHECK(hash == cases[i].hash[k % 2], "case %zu%s", i, k % 2 ? ", bicubic" : "");
    }
}

/* One channel is resized as each of three. */
KN_TEST(augment, sizes_of_grey_images)
{
    IN_SCOPE;
    kn_tensor *grey = resized(picture(1, 23, 31), 9, 40),
              *colour = resized(picture(3, 23, 31), 9, 40);
    KN_CHECK(memcmp(kn_data(grey), kn_data(colour), 9 * 40) == 0);
}

/* The shorter side, and the longer one rounded down, as torchvision's Resize(S). */
KN_TEST(augment, shorter_sides)
{
    static const int64_t cases[][5] = {
        { 30, 50, 20, 20, 33 }, { 50, 30, 20, 33, 20 }, { 7, 7, 3, 3, 3 }, { 5, 9, 5, 5, 9 }
    };
    for (size_t i = 0; i < 4; i++) {
        IN_SCOPE;
        const int64_t *c = cases[i];
        kn_tensor *t = resized(picture(3, c[0], c[1]), c[2], 0);
        KN_CHECK(kn_size(t, 1) == c[3] && kn_size(t, 2) == c[4], "case %zu", i);
    }
}

KN_TEST(augment, the_middle)
{
    static const int64_t cases[][4] = {
        { 9, 12, 4, 5 }, { 3, 10, 6, 4 }, { 2, 3, 7, 6 }, { 5, 5, 5, 5 }
    };
    for (size_t i = 0; i < 4; i++) {
        IN_SCOPE;
        const int64_t h = cases[i][0], w = cases[i][1], ch = cases[i][2], cw = cases[i][3];
        kn_tensor *t = kn_augment_image(picture(3, h, w), .augment = { .center_crop = { ch, cw } },
                                        .dtype = KN_U8);
        const uint8_t *p = kn_data(t);
        /* torchvision: half of the missing pixels, rounded down, in front; where pixels are left
         * over, half of them, rounded to the nearest even number, is cut off in front. */
        int64_t top = h < ch ? -((ch - h) / 2) : (int64_t)rint((double)(h - ch) / 2);
        int64_t left = w < cw ? -((cw - w) / 2) : (int64_t)rint((double)(w - cw) / 2);
        for (int64_t c = 0; c < 3; c++)
            for (int64_t y = 0; y < ch; y++)
                for (int64_t x = 0; x < cw; x++, p++) {
                    int64_t a = y + top, b = x + left;
                    bool in = a >= 0 && a < h && b >= 0 && b < w;
                    KN_CHECK(*p == (in ? formula(a, b, c) : 0), "case %zu", i);
                }
    }
}

/* A crop of a padded image is one of the 81 that are possible, and each comes; black or mirrored.
 */
KN_TEST(augment, padded_crops_and_flips)
{
    for (int reflect = 0; reflect < 2; reflect++) {
        int seen[9][9] = { { 0 } }, kinds = 0, flips = 0;
        for (int64_t index = 0; index < 1500; index++) {
            IN_SCOPE;
            kn_tensor *t =
                kn_augment_image(picture(1, 8, 8), .dtype = KN_U8, .index = index, .epoch = reflect,
                                 .augment = { .random_crop = { { 8 }, 4, reflect },
                                              .random_horizontal_flip = reflect ? 0 : 0.5 });
            const uint8_t *p = kn_data(t);
            int found = -1;
            for (int at = 0; at < (reflect ? 81 : 162); at++) {
                bool same = true;
                for (int i = 0; i < 64 && same; i++) {
                    int y = i / 8 + at % 9 - 4, x = (at < 81 ? i % 8 : 7 - i % 8) + at / 9 % 9 - 4;
                    if (reflect) {
                        y = y < 0 ? -y : y > 7 ? 14 - y : y;
                        x = x < 0 ? -x : x > 7 ? 14 - x : x;
                    }
                    bool in = y >= 0 && y < 8 && x >= 0 && x < 8;
                    same = p[i] == (in ? formula(y, x, 0) : 0);
                }
                found = same ? at : found;
            }
            KN_CHECK(found >= 0, "sample %d is none of them", (int)index);
            kinds += seen[found % 9][found / 9 % 9]++ == 0;
            flips += found >= 81;
        }
        KN_CHECK(kinds == 81, "%d of 81", kinds);
        KN_CHECK(reflect ? flips == 0 : flips > 650 && flips < 850, "%d of 1500 are flipped",
                 flips);
    }
}

KN_TEST(augment, vertical_flips)
{
    IN_SCOPE;
    kn_tensor *t = kn_augment_image(picture(3, 4, 5), .dtype = KN_U8,
                                    .augment = { .random_vertical_flip = 1 });
    const uint8_t *p = kn_data(t);
    for (int64_t i = 0; i < 60; i++)
        KN_CHECK(p[i] == formula(3 - i / 5 % 4, i % 5, i / 20));
}

/* (v / 255 - mean) / std in f32, and rounded to the other types. */
KN_TEST(augment, values)
{
    static const float mean[3] = { 0.4914f, 0.4822f, 0.4465f },
                       std[3] = { 0.247f, 0.2435f, 0.2616f };
    const kn_augment a = { .normalize = { { 0.4914, 0.4822, 0.4465 }, { 0.247, 0.2435, 0.2616 } } };
    float got[3 * 16 * 16], cast[3 * 16 * 16];
    IN_SCOPE;
    kn_tensor *image = picture(3, 16, 16), *f32 = kn_augment_image(image, .augment = a);
    KN_CHECK(f32 && kn_to_host(f32, got, sizeof got));
    for (int64_t i = 0; i < 768; i++) {
        float v = (float)formula(i / 16 % 16, i % 16, i / 256) / 255.0f;
        KN_CHECK(got[i] == (v - mean[i / 256]) / std[i / 256]);
    }
    static const kn_dtype others[] = { KN_F64, KN_BF16, KN_F16 };
    for (int d = 0; d < 3; d++) {
        kn_tensor *t = kn_augment_image(image, .augment = a, .dtype = others[d]);
        KN_CHECK(kn_to_host(kn_cast(t, KN_F32), got, sizeof got));
        KN_CHECK(kn_to_host(kn_cast(kn_cast(f32, others[d]), KN_F32), cast, sizeof cast));
        KN_CHECK(memcmp(got, cast, sizeof got) == 0, "%s", kn_dtype_name(others[d]));
    }
}

/* Rectangles lie inside, are as large as their range says, and all kinds of places come. */
KN_TEST(augment, erased_rectangles)
{
    enum { SIDE = 40, AREA = SIDE * SIDE };
    int erased = 0;
    float x[AREA];
    for (int64_t index = 0; index < 300; index++) {
        IN_SCOPE;
        kn_tensor *t = kn_augment_image(picture(1, SIDE, SIDE), .index = index,
                                        .augment = { .random_erasing = { .p = 0.5, .value = -9 } });
        KN_CHECK(kn_to_host(t, x, sizeof x));
        int top = SIDE, left = SIDE, end = -1, right = -1, count = 0;
        for (int i = 0; i < AREA; i++)
            if (x[i] == -9) {
                top = i / SIDE < top ? i / SIDE : top;
                left = i % SIDE < left ? i % SIDE : left;
                end = i / SIDE > end ? i / SIDE : end;
                right = i % SIDE > right ? i % SIDE : right;
                count++;
            }
        KN_CHECK(count == 0 || count == (end - top + 1) * (right - left + 1));
        KN_CHECK(count == 0 || (count > 0.015 * AREA && count < 0.35 * AREA), "%d", count);
        erased += count > 0;
    }
    KN_CHECK(erased > 110 && erased < 190, "%d of 300", erased);
}

/* Parts lie inside the image, whose pixels tell their places, and are as large as scale says. */
KN_TEST(augment, random_resized_crops)
{
    uint8_t places[2 * 100 * 100];
    int64_t whole = 0;
    for (int i = 0; i < 100 * 100; i++) {
        places[i] = (uint8_t)(2 * (i / 100));             /* rises downwards, */
        places[100 * 100 + i] = (uint8_t)(2 * (i % 100)); /* and to the right */
    }
    for (int64_t index = 0; index < 200; index++)
        for (int axis = 0; axis < 2; axis++) {
            IN_SCOPE;
            kn_tensor *image = kn_from(KN_U8, KN_CPU, places + axis * 10000, KN_SHAPE(1, 100, 100));
            kn_tensor *t = kn_augment_image(
                image, .dtype = KN_U8, .index = index,
                .augment = { .random_resized_crop = { .size = { 10 }, .scale = { 0.2, 0.5 } } });
            const uint8_t *p = kn_data(t);
            for (int i = 0; i < 99; i++)
                KN_CHECK(axis ? i % 10 == 9 || p[i + 1] >= p[i] : i >= 90 || p[i + 10] >= p[i]);
            int64_t side = (p[99] - p[0]) / 2 * 10 / 9; /* about */
            KN_CHECK(side >= 30 && side <= 90, "%d", (int)side);
            whole += side;
        }
    KN_CHECK(whole / 400 > 50 && whole / 400 < 65, "mean side %d", (int)(whole / 400));
}

/* Images of one pixel, and of one row or column, come through everything. */
KN_TEST(augment, tiny_and_narrow_images)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 1, 3000 }, { 3000, 1 }, { 2, 2 } };
    const kn_augment cases[] = {
        { .random_resized_crop = { .size = { 7, 5 } }, .random_erasing = { .p = 1 } },
        { .random_resized_crop = { { 7, 5 }, { 1e-9, 1e-9 }, { 1e6, 1e6 } } },
        { .resize = { 7, 5 }, .color_jitter = { 1, 1, 1, 0.5 } },
        { .center_crop = { 7, 5 }, .random_vertical_flip = 1 },
        { .random_crop = { { 7, 5 }, 7, false }, .random_horizontal_flip = 1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        for (int k = 0; k < 4; k++)
            for (int64_t channels = 1; channels < 4; channels += 2) {
                IN_SCOPE;
                kn_tensor *t = kn_augment_image(picture(channels, sizes[k][0], sizes[k][1]),
                                                .augment = cases[i], .index = k);
                KN_CHECK(t && kn_size(t, 0) == channels && kn_size(t, 1) == 7 && kn_size(t, 2) == 5,
                         "case %zu, size %d", i, k);
            }
}

KN_TEST(augment, options_that_do_not_fit)
{
    static const struct {
        kn_augment a;
        kn_dtype dtype;
        const char *says;
    } cases[] = {
        { { .resize = { -1 } }, 0, ".resize is { -1, 0 }, should be { S } or { H, W }" },
        { { .resize = { 0, 4 } }, 0, ".resize is { 0, 4 }" },
        { { .center_crop = { 1 << 20 } }, 0, "of at most 32768 pixels" },
        { { .center_crop = { 4 }, .random_crop = { .size = { 4 } } }, 0, "give one of" },
        { { .resize = { 9 }, .random_resized_crop = { .size = { 4 } } }, 0, "leave it out" },
        { { .random_crop = { .padding = 4 } }, 0, "has a padding, but no .size" },
        { { .random_crop = { .size = { 4 }, .padding = -1 } }, 0, "padding is -1" },
        { { .random_crop = { .size = { 9 } } }, 0, "smaller than the .random_crop of 9 x 9" },
        { { .random_crop = { { 4 }, 8, true } }, 0, "can't be mirrored .padding 8 beyond" },
        { { .random_horizontal_flip = 1.5 }, 0, "random_horizontal_flip is 1.5" },
        { { .random_vertical_flip = NAN }, 0, "random_vertical_flip is nan" },
        { { .color_jitter = { .hue = 0.6 } }, 0, "color_jitter.hue is 0.6, should lie between" },
        { { .color_jitter = { .contrast = -1 } }, 0, "color_jitter.contrast is -1" },
        { { .normalize = { .std = { 1, 0, 1 } } },
          0,
          ".normalize of channel 1 has mean 0 and std 0" },
        { { .normalize = { .mean = { INFINITY } } }, 0, ".normalize of channel 0" },
        { { .random_erasing = { .p = 2 } }, 0, "random_erasing.p is 2" },
        { { .random_erasing = { .p = 1, .scale = { 0.5, 0.1 } } }, 0, "random_erasing.scale" },
        { { .random_resized_crop = { { 4 }, { 0.1, 2 } } }, 0, "two rising numbers in (0, 1]" },
        { { .normalize = { .mean = { 1 } } }, KN_U8, "need a .dtype of floats, not u8" },
        { { .random_erasing = { .p = 1 } }, KN_U8, "need a .dtype of floats, not u8" },
        { { .resize = { 0 } }, KN_I64, ".dtype is i64, should be a float or u8" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        IN_SCOPE;
        KN_CHECK(
            !kn_augment_image(picture(3, 8, 8), .augment = cases[i].a, .dtype = cases[i].dtype),
            "case %zu", i);
        KN_CHECK_ERROR(cases[i].says);
    }
    IN_SCOPE;
    REFUSED(kn_augment_image(kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 4, 4))),
            "the image is f32[3,4,4], should be u8 [C,H,W] on the CPU");
    REFUSED(kn_augment_image(kn_zeros(KN_U8, KN_CPU, KN_SHAPE(2, 4, 4))), "with 1 or 3 channels");
    REFUSED(kn_augment_image(picture(1, 1, 9), .augment = { .resize = { 20000 } }),
            "an image becomes 20000 x 180000 pixels; the limit is 67108864 pixels");
}
