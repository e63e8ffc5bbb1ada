/* data/png.c: PNG files as pixels, by libpng: 8 bits of red, green and blue, without alpha and
 * without correction of gamma, as PIL's convert("RGB") gives them. As in jpeg.c, a broken file
 * jumps back into run(), and nothing is left behind. */
#include "data/images_internal.h"
#include "data/loader.h"

#include <stdio.h>
#include <string.h>

#ifdef KN_HAVE_PNG
#include <png.h>

typedef struct png_reader {
    png_structp png;
    png_infop info;
    kn_image_room *room;
    const uint8_t *at; /* what wasn't read yet */
    size_t left;
    int64_t max_pixels, height, width;
    uint8_t *pixels;
    bool no_memory; /* an error stands */
} png_reader;

static void on_error(png_structp png, png_const_charp text)
{
    png_reader *r = png_get_error_ptr(png);
    snprintf(r->room->problem, sizeof r->room->problem, "libpng says: %s", text);
    png_longjmp(png, 1);
}

static void on_warning(png_structp png, png_const_charp text)
{
    (void)png, (void)text; /* of chunks that don't touch the pixels */
}

static void on_read(png_structp png, png_bytep to, size_t size)
{
    png_reader *r = png_get_io_ptr(png);
    if (size > r->left)
        png_error(png, "the file is cut short");
    memcpy(to, r->at, size);
    r->at += size;
    r->left -= size;
}

static bool decode(png_reader *r)
{
    png_set_read_fn(r->png, r, on_read);
    png_read_info(r->png, r->info);
    r->height = png_get_image_height(r->png, r->info);
    r->width = png_get_image_width(r->png, r->info);
    if (!kn_image_fits(r->room, r->height, r->width, r->max_pixels))
        return false;
    png_set_expand(r->png);
    png_set_strip_16(r->png);
    png_set_gray_to_rgb(r->png);
    png_set_strip_alpha(r->png);
    const int passes = png_set_interlace_handling(r->png);
    png_read_update_info(r->png, r->info);
    const size_t line = (size_t)r->width * 3;
    if (png_get_rowbytes(r->png, r->info) != line)
        png_error(r->png, "rows of another kind of pixels");
    r->pixels = kn_room_take(r->room, KN_ROOM_DECODED, (size_t)r->height * line);
    r->no_memory = !r->pixels;
    if (r->no_memory)
        return false;
    for (int pass = 0; pass < passes; pass++)
        for (int64_t y = 0; y < r->height; y++)
            png_read_row(r->png, r->pixels + (size_t)y * line, NULL);
    png_read_end(r->png, NULL);
    return true;
}

static bool run(png_reader *r)
{
    if (setjmp(png_jmpbuf(r->png)))
        return false;
    return decode(r);
}

int kn_png_decode(const uint8_t *file, size_t size, int64_t max_pixels, kn_image_room *room,
                  kn_pixels *out)
{
    png_reader r = { .room = room, .at = file, .left = size, .max_pixels = max_pixels };
    r.png = png_create_read_struct(PNG_LIBPNG_VER_STRING, &r, on_error, on_warning);
    r.info = r.png ? png_create_info_struct(r.png) : NULL;
    bool ok = r.info && run(&r);
    if (ok)
        *out = kn_pixels_interleaved(r.pixels, r.height, r.width, 3);
    else if (!r.info)
        snprintf(room->problem, sizeof room->problem, "libpng has no memory");
    png_destroy_read_struct(&r.png, &r.info, NULL);
    return ok ? true : r.no_memory ? false : KN_SAMPLE_SKIP;
}
#endif
