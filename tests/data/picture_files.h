/* tests/data/picture_files.h: JPEG and PNG files of all kinds, written by libjpeg and libpng into
 * memory. */
#ifndef KNAP_TESTS_DATA_PICTURE_FILES_H
#define KNAP_TESTS_DATA_PICTURE_FILES_H

#include "tests/data/pictures.h"

#include <stdlib.h>

typedef struct bytes {
    uint8_t *data;
    size_t size, room;
} bytes;

#ifdef KN_HAVE_PNG
#include <png.h>

static inline void append(png_structp png, png_bytep data, size_t size)
{
    bytes *b = png_get_io_ptr(png);
    if (b->size + size > b->room)
        b->data = realloc(b->data, b->room = 2 * (b->size + size));
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

static inline void flushed(png_structp png)
{
}

/* A row of samples of depth bits, value (y, x, c) as sample(y, x, c, most) gives it. */
static inline void pack_row(uint8_t *row, int64_t y, int64_t width, int channels, int depth,
                            int (*sample)(int64_t y, int64_t x, int c, int most))
{
    const int most = (1 << depth) - 1;
    memset(row, 0, (size_t)(width * channels * depth + 7) / 8);
    for (int64_t i = 0; i < width * channels; i++) {
        int v = sample(y, i / channels, (int)(i % channels), most);
        if (depth == 16) {
            row[2 * i] = (uint8_t)(v >> 8);
            row[2 * i + 1] = (uint8_t)v;
        } else
            row[i * depth / 8] |= (uint8_t)(v << (8 - depth - i * depth % 8));
    }
}

/* A PNG of PNG_COLOR_TYPE type, interlaced or not; palettes have entries (7 i, 255 - i, 3 i). */
static inline bytes png_of(int64_t height, int64_t width, int type, int depth, bool interlaced,
                           bool transparent, int (*sample)(int64_t y, int64_t x, int c, int most))
{
    bytes b = { 0 };
    png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, NULL, NULL, NULL);
    png_infop info = png_create_info_struct(png);
    png_set_write_fn(png, &b, append, flushed);
    png_set_IHDR(png, info, (png_uint_32)width, (png_uint_32)height, depth, type,
                 interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
                 PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
    if (type == PNG_COLOR_TYPE_PALETTE) {
        png_color colour[256];
        png_byte alpha[256];
        for (int i = 0; i < 256; i++) {
            colour[i] = (png_color){ (png_byte)(7 * i), (png_byte)(255 - i), (png_byte)(3 * i) };
            alpha[i] = (png_byte)(i * 90);
        }
        png_set_PLTE(png, info, colour, 1 << depth);
        if (transparent)
            png_set_tRNS(png, info, alpha, 1 << depth, NULL);
    }
    png_write_info(png, info);
    const int channels = png_get_channels(png, info);
    const size_t line = (size_t)(width * channels * depth + 7) / 8;
    uint8_t *all = malloc(line * (size_t)height + 1), **row = malloc((size_t)height * sizeof *row);
    for (int64_t y = 0; y < height; y++)
        pack_row(row[y] = all + line * (size_t)y, y, width, channels, depth, sample);
    png_write_image(png, row);
    png_write_end(png, info);
    png_destroy_write_struct(&png, &info);
    free(all);
    free(row);
    return b;
}
#endif

#ifdef KN_HAVE_JPEG
#include <jpeglib.h>

/* A JPEG of a smooth image, value (y, x, c) = shade(y, x, c); channels 1, 3, 4 (CMYK with Adobe's
 * marker) or 5 (CMYK without it). */
static inline bytes jpeg_of(int64_t height, int64_t width, int kind, bool progressive,
                            uint8_t (*shade)(int64_t y, int64_t x, int c))
{
    const int channels = kind == 5 ? 4 : kind;
    struct jpeg_compress_struct info;
    struct jpeg_error_mgr error;
    unsigned char *data = NULL;
    unsigned long size = 0;
    info.err = jpeg_std_error(&error);
    jpeg_create_compress(&info);
    jpeg_mem_dest(&info, &data, &size);
    info.image_height = (JDIMENSION)height;
    info.image_width = (JDIMENSION)width;
    info.input_components = channels;
    info.in_color_space = channels == 1 ? JCS_GRAYSCALE : channels == 3 ? JCS_RGB : JCS_CMYK;
    jpeg_set_defaults(&info);
    info.write_Adobe_marker = kind == 4;
    jpeg_set_quality(&info, 95, TRUE);
    if (progressive)
        jpeg_simple_progression(&info);
    jpeg_start_compress(&info, TRUE);
    uint8_t *row = malloc((size_t)(width * channels));
    for (int64_t y = 0; y < height; y++) {
        for (int64_t i = 0; i < width * channels; i++)
            row[i] = shade(y, i / channels, (int)(i % channels));
        jpeg_write_scanlines(&info, &row, 1);
    }
    jpeg_finish_compress(&info);
    jpeg_destroy_compress(&info);
    free(row);
    return (bytes){ data, size, size };
}
#endif

/* Samples of a PNG. */
static inline int some_sample(int64_t y, int64_t x, int c, int most)
{
    return (int)((y * 3777 + x * 1511 + c * 10001 + y * x * 57) & most);
}

static inline uint8_t some_shade(int64_t y, int64_t x, int c)
{
    return (uint8_t)(40 + 3 * y + 2 * x + 30 * c);
}

#endif
