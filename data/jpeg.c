/* data/jpeg.c: JPEG files as pixels, by libjpeg-turbo with its default decoder, as PIL uses it.
 *
 * libjpeg ends a broken file by a call that must not return: it jumps back into run(). All that is
 * changed meanwhile is in a jpeg_reader of the caller, and libjpeg's memory in its pools, which
 * jpeg_destroy_decompress frees in any case; there is no state outside, so threads are independent.
 */
#include "data/images_internal.h"
#include "data/loader.h"

#include <stdio.h>

#ifdef KN_HAVE_JPEG
#include <setjmp.h>

#include <jpeglib.h>

#include <jerror.h>

#define MOST_SCANS 100 /* a progressive file needs about 10; each scan costs as much as a file */

typedef struct jpeg_reader {
    struct jpeg_decompress_struct info;
    struct jpeg_error_mgr error;
    struct jpeg_progress_mgr progress;
    jmp_buf stop;
    kn_image_room *room;
    int64_t max_pixels;
    uint8_t *pixels;
    bool no_memory; /* an error stands */
} jpeg_reader;

/* Keeps libjpeg's message and jumps. */
static void on_error(j_common_ptr info)
{
    jpeg_reader *r = info->client_data;
    char text[JMSG_LENGTH_MAX];
    info->err->format_message(info, text);
    snprintf(r->room->problem, sizeof r->room->problem, "libjpeg says: %s", text);
    longjmp(r->stop, 1);
}

/* Warnings that some of the pixels are made up are errors. */
static void on_message(j_common_ptr info, int level)
{
    int code = info->err->msg_code;
    if (level < 0 &&
        (code == JWRN_HIT_MARKER || code == JWRN_JPEG_EOF || code == JWRN_HUFF_BAD_CODE ||
         code == JWRN_ARITH_BAD_CODE || code == JWRN_MUST_RESYNC))
        on_error(info);
}

static void on_progress(j_common_ptr info)
{
    jpeg_reader *r = info->client_data;
    if (r->info.input_scan_number <= MOST_SCANS)
        return;
    snprintf(r->room->problem, sizeof r->room->problem, "it has more than %d scans", MOST_SCANS);
    longjmp(r->stop, 1);
}

/* Cyan, magenta, yellow and black of a row as RGB. Files store 255 - x, as Adobe's do: PIL takes
 * that for granted, also where their marker is missing. */
static void from_cmyk(const uint8_t *in, uint8_t *out, int64_t width)
{
    for (int64_t x = 0; x < width; x++, in += 4, out += 3)
        for (int c = 0; c < 3; c++)
            out[c] = (uint8_t)((in[c] * in[3] + 127) / 255);
}

static void read_rows(jpeg_reader *r)
{
    struct jpeg_decompress_struct *info = &r->info;
    const size_t line = (size_t)info->output_width * 3;
    JSAMPARRAY inks = NULL;
    if (info->out_color_space == JCS_CMYK)
        inks = info->mem->alloc_sarray((j_common_ptr)info, JPOOL_IMAGE, info->output_width * 4, 1);
    while (info->output_scanline < info->output_height) {
        uint8_t *to = r->pixels + info->output_scanline * line;
        jpeg_read_scanlines(info, inks ? inks : &to, 1);
        if (inks)
            from_cmyk(inks[0], to, info->output_width);
    }
}

static bool decode(jpeg_reader *r, const uint8_t *file, size_t size)
{
    struct jpeg_decompress_struct *info = &r->info;
    jpeg_create_decompress(info);
    info->progress = &r->progress;
    jpeg_mem_src(info, (unsigned char *)(uintptr_t)file, (unsigned long)size);
    jpeg_read_header(info, TRUE);
    const int64_t height = info->image_height, width = info->image_width;
    if (!kn_image_fits(r->room, height, width, r->max_pixels))
        return false;
    bool inks = info->jpeg_color_space == JCS_CMYK || info->jpeg_color_space == JCS_YCCK;
    info->out_color_space = inks ? JCS_CMYK : JCS_RGB;
    r->pixels = kn_room_take(r->room, KN_ROOM_DECODED, (size_t)(height * width) * 3);
    r->no_memory = !r->pixels;
    if (r->no_memory)
        return false;
    jpeg_start_decompress(info);
    read_rows(r);
    jpeg_finish_decompress(info);
    return true;
}

static bool run(jpeg_reader *r, const uint8_t *file, size_t size)
{
    if (setjmp(r->stop))
        return false;
    return decode(r, file, size);
}

int kn_jpeg_decode(const uint8_t *file, size_t size, int64_t max_pixels, kn_image_room *room,
                   kn_pixels *out)
{
    jpeg_reader r = { .room = room, .max_pixels = max_pixels };
    r.info.err = jpeg_std_error(&r.error);
    r.info.client_data = &r;
    r.error.error_exit = on_error;
    r.error.emit_message = on_message;
    r.progress.progress_monitor = on_progress;
    bool ok = run(&r, file, size);
    if (ok)
        *out = kn_pixels_interleaved(r.pixels, r.info.image_height, r.info.image_width, 3);
    jpeg_destroy_decompress(&r.info);
    return ok ? true : r.no_memory ? false : KN_SAMPLE_SKIP;
}
#endif
