/* tests/data/image_fuzz.h: JPEG and PNG files with random changes, a function of the number of the
 * round alone: no change may end the program, read outside of the file (the sanitizers tell) or
 * leave an error. */
#ifndef KNAP_TESTS_DATA_IMAGE_FUZZ_H
#define KNAP_TESTS_DATA_IMAGE_FUZZ_H

#include "data/images_internal.h"
#include "tests/data/picture_files.h"

typedef struct seeds {
    bytes file[32];
    int count;
} seeds;

static inline seeds make_seeds(void)
{
    seeds s = { .count = 0 };
#ifdef KN_HAVE_PNG
    static const int types[][2] = { { PNG_COLOR_TYPE_GRAY, 1 },
                                    { PNG_COLOR_TYPE_GRAY, 16 },
                                    { PNG_COLOR_TYPE_PALETTE, 4 },
                                    { PNG_COLOR_TYPE_RGB, 8 },
                                    { PNG_COLOR_TYPE_RGB_ALPHA, 8 } };
    for (int i = 0; i < 10; i++)
        s.file[s.count++] =
            png_of(9, 14, types[i / 2][0], types[i / 2][1], i % 2, true, some_sample);
#endif
#ifdef KN_HAVE_JPEG
    for (int i = 0; i < 6; i++)
        s.file[s.count++] = jpeg_of(20, 26, i % 3 == 2 ? 4 : 1 + 2 * (i % 3), i / 3, some_shade);
#endif
    return s;
}

#ifdef KN_HAVE_PNG
/* Makes the checksums of a PNG's chunks right again, so that changes come further than to them. */
static inline void mend_checksums(uint8_t *p, size_t n)
{
    for (size_t at = 8; at + 12 <= n;) {
        size_t length =
            (size_t)p[at] << 24 | (size_t)p[at + 1] << 16 | (size_t)p[at + 2] << 8 | p[at + 3];
        if (length > n - at - 12)
            return;
        uint32_t c = 0xffffffff;
        for (size_t i = at + 4; i < at + 8 + length; i++) {
            c ^= p[i];
            for (int bit = 0; bit < 8; bit++)
                c = c >> 1 ^ (c & 1 ? 0xedb88320 : 0);
        }
        for (int i = 0; i < 4; i++)
            p[at + 8 + length + (size_t)i] = (uint8_t)(~c >> (24 - 8 * i));
        at += 12 + length;
    }
}
#endif

static inline void fuzz_one(const seeds *all, kn_image_room *room, uint64_t round)
{
    kn_data_sample s = { .seed = 77, .stream = round };
    const bytes *from = &all->file[kn_draw_below(&s, all->count)];
    size_t n =
        kn_draw_uniform(&s) < 0.2 ? (size_t)kn_draw_below(&s, (int64_t)from->size) : from->size;
    uint8_t *p = malloc(n ? n : 1); /* as large as the file: reading beyond is seen */
    memcpy(p, from->data, n);
    for (int64_t k = kn_draw_below(&s, 12); n && k >= 0; k--) {
        size_t at = (size_t)kn_draw_below(&s, (int64_t)n),
               to = (size_t)kn_draw_below(&s, (int64_t)n);
        switch (kn_draw_below(&s, 4)) {
        case 0:
            p[at] ^= (uint8_t)(1 << kn_draw_below(&s, 8));
            break;
        case 1:
            p[at] = (uint8_t)kn_draw_below(&s, 256);
            break;
        case 2:
            p[at] = kn_draw_below(&s, 2) ? 255 : 0;
            break;
        default: /* a piece from elsewhere */
            memmove(p + at, p + to, (n - (at > to ? at : to)) / 8);
        }
    }
#ifdef KN_HAVE_PNG
    if (n > 8 && p[0] == 0x89 && kn_draw_below(&s, 2))
        mend_checksums(p, n);
#endif
    kn_pixels out;
    int answer = kn_image_decode(p, n, 1 << 16, room, &out);
    KN_CHECK(kn_ok() && (answer == true || answer == KN_SAMPLE_SKIP), "round %d", (int)round);
    KN_CHECK(answer != true || out.height * out.width <= 1 << 16);
    free(p);
}

static inline void fuzz_images(uint64_t begin, uint64_t end)
{
    seeds all = make_seeds();
    kn_image_room room = { 0 };
    if (all.count == 0)
        KN_SKIP("neither libjpeg nor libpng");
    for (uint64_t round = begin; round < end; round++)
        fuzz_one(&all, &room, round);
    kn_room_free(&room);
    for (int i = 0; i < all.count; i++)
        free(all.file[i].data);
}

#endif
