/* tests/data/image_file_test.c: JPEG and PNG files of every kind, broken ones among them. */
#include "data/images_internal.h"
#include "tests/data/picture_files.h"

#include <math.h>

#if defined(KN_HAVE_PNG) || defined(KN_HAVE_JPEG)
/* Decodes; the answer, and the pixels' shape is checked. */
static int decode(const uint8_t *data, size_t size, kn_image_room *room, kn_pixels *p)
{
    int answer = kn_image_decode(data, size, KN_MAX_PIXELS, room, p);
    KN_CHECK(kn_ok());
    KN_CHECK(answer == KN_SAMPLE_SKIP || (answer == true && p->height > 0 && p->channels == 3));
    return answer;
}
#endif

#ifdef KN_HAVE_PNG
/* Red, green or blue of the pixel that png_of wrote. */
static int expected(int64_t y, int64_t x, int c, int type, int depth)
{
    const int most = (1 << depth) - 1;
    if (type == PNG_COLOR_TYPE_PALETTE) {
        int i = some_sample(y, x, 0, most);
        return (uint8_t)(c == 0 ? 7 * i : c == 1 ? 255 - i : 3 * i);
    }
    int v = some_sample(y, x, type & PNG_COLOR_MASK_COLOR ? c : 0, most);
    return depth == 16 ? v >> 8 : v * 255 / most;
}

KN_TEST(image_file, png_files_of_every_kind)
{
    static const struct {
        int type, depths;
    } kinds[] = { { PNG_COLOR_TYPE_GRAY, 1 | 2 | 4 | 8 | 16 },
                  { PNG_COLOR_TYPE_PALETTE, 1 | 2 | 4 | 8 },
                  { PNG_COLOR_TYPE_RGB, 8 | 16 },
                  { PNG_COLOR_TYPE_GRAY_ALPHA, 8 | 16 },
                  { PNG_COLOR_TYPE_RGB_ALPHA, 8 | 16 } };
    static const int64_t sizes[][2] = { { 1, 1 }, { 13, 9 }, { 3, 33 } };
    kn_image_room room = { 0 };
    for (int k = 0; k < 5; k++)
        for (int depth = 1; depth <= 16; depth *= 2)
            for (int variant = 0; variant < 12; variant++) {
                const int64_t *size = sizes[variant % 3];
                bool interlaced = variant / 3 % 2, transparent = variant / 6;
                if (!(kinds[k].depths & depth))
                    continue;
                bytes b = png_of(size[0], size[1], kinds[k].type, depth, interlaced, transparent,
                                 some_sample);
                kn_pixels p = { 0 };
                KN_CHECK(decode(b.data, b.size, &room, &p) == true, "%s", room.problem);
                KN_CHECK(p.height == size[0] && p.width == size[1]);
                for (int64_t i = 0; i < size[0] * size[1] * 3; i++)
                    KN_CHECK(p.pixel[i] == expected(i / 3 / size[1], i / 3 % size[1], (int)(i % 3),
                                                    kinds[k].type, depth),
                             "type %d, depth %d, value %d", kinds[k].type, depth, (int)i);
                free(b.data);
            }
    kn_room_free(&room);
}

static uint32_t crc(const uint8_t *p, size_t n)
{
    uint32_t c = 0xffffffff;
    for (size_t i = 0; i < n; i++) {
        c ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            c = c >> 1 ^ (c & 1 ? 0xedb88320 : 0);
    }
    return ~c;
}

static void put_word(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> (24 - 8 * i));
}

/* Sizes that a header promises are checked before there is memory for them. */
KN_TEST(image_file, huge_png_files)
{
    static const uint32_t sizes[][2] = {
        { 20000, 20000 }, { 65536, 1025 }, { 999999, 999999 }, { 0x7fffffff, 0x7fffffff }, { 0, 5 }
    };
    kn_image_room room = { 0 };
    kn_pixels p;
    bytes b = png_of(4, 4, PNG_COLOR_TYPE_RGB, 8, false, false, some_sample);
    for (size_t i = 0; i < 5; i++) {
        put_word(b.data + 16, sizes[i][0]);
        put_word(b.data + 20, sizes[i][1]);
        put_word(b.data + 29, crc(b.data + 12, 17));
        KN_CHECK(decode(b.data, b.size, &room, &p) == KN_SAMPLE_SKIP, "case %zu", i);
        KN_CHECK(i > 1 || strstr(room.problem, "the limit is 67108864 pixels"), "%s", room.problem);
        KN_CHECK(room.size[KN_ROOM_DECODED] == 0);
    }
    free(b.data);
    kn_room_free(&room);
}

/* Cut at every byte: always unusable. Changed at every byte: checksums find it, except in chunks
 * that say nothing of pixels. */
KN_TEST(image_file, damaged_png_files)
{
    for (int interlaced = 0; interlaced < 2; interlaced++) {
        bytes b = png_of(11, 7, PNG_COLOR_TYPE_RGB, 8, interlaced, false, some_sample);
        kn_image_room room = { 0 };
        kn_pixels p;
        for (size_t n = 0; n < b.size; n++) {
            OWNED_BYTES uint8_t *cut = malloc(n + 1); /* its end is one for the sanitizer */
            memcpy(cut, b.data, n);
            KN_CHECK(decode(cut, n, &room, &p) == KN_SAMPLE_SKIP, "%zu of %zu bytes", n, b.size);
        }
        for (size_t i = 0; i < b.size; i++) {
            b.data[i] ^= 0x15;
            KN_CHECK(decode(b.data, b.size, &room, &p) == KN_SAMPLE_SKIP, "byte %zu", i);
            b.data[i] ^= 0x15;
        }
        KN_CHECK(decode(b.data, b.size, &room, &p) == true);
        free(b.data);
        kn_room_free(&room);
    }
}
#endif

#ifdef KN_HAVE_JPEG
KN_TEST(image_file, jpeg_files_of_every_kind)
{
    static const int64_t sizes[][2] = { { 1, 1 }, { 16, 16 }, { 21, 35 } };
    static const int channels[] = { 1, 3, 4, 5 };
    kn_image_room room = { 0 };
    for (int variant = 0; variant < 24; variant++) {
        const int64_t *size = sizes[variant % 3];
        const int n = channels[variant / 3 % 4];
        bytes b = jpeg_of(size[0], size[1], n, variant / 12, some_shade);
        kn_pixels p = { 0 };
        KN_CHECK(decode(b.data, b.size, &room, &p) == true, "%s", room.problem);
        KN_CHECK(p.height == size[0] && p.width == size[1]);
        for (int64_t i = 0; i < size[0] * size[1] * 3; i++) {
            int64_t y = i / 3 / size[1], x = i / 3 % size[1];
            int c = (int)(i % 3);
            double v = some_shade(y, x, n == 1 ? 0 : c);
            if (n >=
                4) /* inks are stored as 255 - ink, with Adobe's marker or without, as in PIL */
                v = v * some_shade(y, x, 3) / 255;
            KN_CHECK(fabs(v - p.pixel[i]) <= 6, "variant %d, value %d: %d, not %g", variant, (int)i,
                     p.pixel[i], v);
        }
        free(b.data);
    }
    kn_room_free(&room);
}

/* The place of the height in the frame header; the width follows. */
static uint8_t *frame_size(bytes b)
{
    for (size_t i = 2; i + 9 < b.size; i += 2 + (size_t)(b.data[i + 2] << 8 | b.data[i + 3]))
        if (b.data[i + 1] == 0xc0 || b.data[i + 1] == 0xc2)
            return b.data + i + 5;
    return NULL;
}

KN_TEST(image_file, huge_jpeg_files)
{
    for (int progressive = 0; progressive < 2; progressive++) {
        bytes b = jpeg_of(8, 8, 3, progressive, some_shade);
        uint8_t *at = frame_size(b);
        kn_image_room room = { 0 };
        kn_pixels p;
        KN_CHECK(at != NULL);
        at[0] = at[2] = 20000 >> 8;
        at[1] = at[3] = 20000 & 255;
        KN_CHECK(decode(b.data, b.size, &room, &p) == KN_SAMPLE_SKIP);
        KN_CHECK(strstr(room.problem, "20000 x 20000 pixels; the limit is 67108864 pixels"), "%s",
                 room.problem);
        KN_CHECK(room.size[KN_ROOM_DECODED] == 0);
        at[0] = at[1] = 0;
        KN_CHECK(decode(b.data, b.size, &room, &p) == KN_SAMPLE_SKIP);
        free(b.data);
        kn_room_free(&room);
    }
}

/* Cut anywhere in its header or pixels: unusable. Changed bytes: unusable, or other pixels. */
KN_TEST(image_file, damaged_jpeg_files)
{
    for (int kind = 0; kind < 3; kind++) {
        bytes b = jpeg_of(24, 24, kind == 2 ? 4 : 3, kind == 1, some_shade);
        kn_image_room room = { 0 };
        kn_pixels p;
        int taken = 0;
        for (size_t n = 0; n < b.size - 2; n++) { /* without the end mark, too */
            uint8_t *cut = malloc(n + 1);
            memcpy(cut, b.data, n);
            KN_CHECK(decode(cut, n, &room, &p) == KN_SAMPLE_SKIP, "%zu of %zu bytes", n, b.size);
            free(cut);
        }
        for (size_t i = 0; i < b.size; i++)
            for (int bit = 0; bit < 8; bit += 3) {
                b.data[i] ^= (uint8_t)(1 << bit);
                taken += decode(b.data, b.size, &room, &p) == true;
                b.data[i] ^= (uint8_t)(1 << bit);
            }
        KN_CHECK(taken > 0 && decode(b.data, b.size, &room, &p) == true);
        free(b.data);
        kn_room_free(&room);
    }
}
#endif

KN_TEST(image_file, other_files)
{
    static const uint8_t gif[] = "GIF89a..............";
    kn_scope scope = kn_scope_begin();
    REFUSED(kn_image_read(temp_path("none.png")), "none.png: No such file or directory");
    REFUSED(kn_image_read(temp_path("")), "it is not a regular file");
    REFUSED(kn_image_read(write_temp("a.jpg", gif, sizeof gif)),
            "a.jpg: it is neither a JPEG nor a PNG file");
    REFUSED(kn_image_read(write_temp("b.jpg", gif, 0)), "b.jpg: the file is empty");
    REFUSED(kn_image_read("x", .max_pixels = -1), ".max_pixels is -1");
    REFUSED(kn_image_read(NULL), "kn_image_read: the path is NULL");
    kn_scope_end(scope);
}

#ifdef KN_HAVE_PNG
KN_TEST(image_file, reading_one)
{
    bytes b = png_of(5, 4, PNG_COLOR_TYPE_RGB, 8, false, false, some_sample);
    kn_scope scope = kn_scope_begin();
    const char *path = write_temp("x.png", b.data, b.size);
    kn_tensor *t = kn_image_read(path);
    KN_CHECK(t && kn_size(t, 0) == 3 && kn_size(t, 1) == 5 && kn_size(t, 2) == 4);
    const uint8_t *p = kn_data(t);
    for (int i = 0; i < 60; i++)
        KN_CHECK(p[i] == some_sample(i % 20 / 4, i % 4, i / 20, 255));
    REFUSED(kn_image_read(path, .max_pixels = 19),
            "it has 5 x 4 pixels; the limit is 19 pixels (.max_pixels)");
    kn_scope_end(scope);
    free(b.data);
}
#else
KN_TEST(image_file, without_libpng)
{
    static const uint8_t begin[] = { 0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n', 0 };
    REFUSED(kn_image_read(write_temp("x.png", begin, sizeof begin)),
            "but libpng wasn't found when Knap was built");
}
#endif
#ifndef KN_HAVE_JPEG
KN_TEST(image_file, without_libjpeg)
{
    static const uint8_t begin[] = { 0xff, 0xd8, 0xff, 0 };
    REFUSED(kn_image_read(write_temp("x.jpg", begin, sizeof begin)),
            "but libjpeg wasn't found when Knap was built");
}
#endif
