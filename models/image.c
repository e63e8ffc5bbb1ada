/* models/image.c: tensors as PNG files, written by libpng. */
#include "models/image.h"
#include "autograd/autograd.h"
#include "autograd/operations.h"
#include "kernels/error_internal.h"
#include "data/data.h"

#include <math.h>

#define MOST_PIXELS (1 << 28) /* of a picture */

/* A grid of images, each with gap black pixels around it. */
typedef struct grid {
    int64_t count, channels, rows, cols; /* of the images */
    int64_t across, down, gap;
    int64_t width, height; /* of the picture */
} grid;

static bool grid_of(grid *g, const kn_tensor *x, const kn_image_save_options *o)
{
    const int n = kn_ndim(x);
    char text[128];
    if (n < 2 || n > 4 || (n > 2 && kn_size(x, -3) != 1 && kn_size(x, -3) != 3) || !kn_numel(x))
        return kn_fail("kn_image_save: the images are %s, should be [N,C,H,W], [C,H,W] or [H,W] "
                       "with 1 or 3 channels",
                       kn_describe(x, text, sizeof text));
    *g = (grid){ n == 4 ? kn_size(x, 0) : 1, n > 2 ? kn_size(x, -3) : 1, kn_size(x, -2),
                 kn_size(x, -1) };
    if (o->columns < 0 || (o->gap < 0 && o->gap != KN_ZERO) || o->gap > MOST_PIXELS)
        return kn_fail("kn_image_save: .columns is %lld and .gap %lld, should be at least 0",
                       (long long)o->columns, (long long)o->gap);
    g->across = o->columns ? o->columns : (int64_t)ceil(sqrt((double)g->count));
    g->across = g->across < g->count ? g->across : g->count;
    g->down = (g->count - 1) / g->across + 1;
    g->gap = o->gap == KN_ZERO ? 0 : o->gap ? o->gap : 2;
    const double gap = (double)g->gap, width = (double)g->across * ((double)g->cols + gap) + gap,
                 height = (double)g->down * ((double)g->rows + gap) + gap;
    if (width * height > MOST_PIXELS)
        return kn_fail("kn_image_save: a picture of %.0f x %.0f pixels is larger than %d pixels",
                       width, height, MOST_PIXELS);
    g->width = (int64_t)width;
    g->height = (int64_t)height;
    return true;
}

/* What is in [low, high] as one of 256 steps. */
static unsigned char step_of(double v, double low, double high)
{
    const double part = (v - low) / (high - low);
    return part >= 1 ? 255 : part > 0 ? (unsigned char)(part * 255 + 0.5) : 0;
}

/* Draws value[N,C,H,W] into pixel[height, width, C], which is black. */
static void draw(const grid *g, const float *value, double low, double high, unsigned char *pixel)
{
    for (int64_t i = 0; i < g->count; i++) {
        const int64_t top = g->gap + i / g->across * (g->rows + g->gap),
                      left = g->gap + i % g->across * (g->cols + g->gap);
        for (int64_t c = 0; c < g->channels; c++)
            for (int64_t r = 0; r < g->rows; r++)
                for (int64_t j = 0; j < g->cols; j++)
                    pixel[((top + r) * g->width + left + j) * g->channels + c] =
                        step_of(*value++, low, high);
    }
}

#ifdef KN_HAVE_PNG
#include <png.h>

static bool write_png(const char *path, const grid *g, const unsigned char *pixel)
{
    png_image image = { .version = PNG_IMAGE_VERSION,
                        .width = (png_uint_32)g->width,
                        .height = (png_uint_32)g->height,
                        .format = g->channels == 3 ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY };
    png_alloc_size_t size = PNG_IMAGE_PNG_SIZE_MAX(image); /* an upper bound */
    void *file = kn_host_alloc(size);
    bool ok = file && png_image_write_to_memory(&image, file, &size, 0, pixel, 0, NULL);
    if (file && !ok)
        kn_fail("kn_image_save: %s: libpng says: %s", path, image.message);
    ok = ok && kn_file_write(path, (const void *[]){ file }, (size_t[]){ size }, 1);
    png_image_free(&image);
    kn_host_free(file);
    return ok;
}
#else
static bool write_png(const char *path, const grid *g, const unsigned char *pixel)
{
    (void)g, (void)pixel;
    return kn_fail("kn_image_save: %s can't be written: libpng wasn't found when Knap was built "
                   "(libpng-dev on Debian)",
                   path);
}
#endif

bool kn_image_save_(const char *path, kn_tensor *x, kn_image_save_options o)
{
    if (!kn_given_path(path, "kn_image_save", "the path") ||
        !kn_given(x, "kn_image_save", "the tensor"))
        return false;
    const bool unit = o.low == 0 && o.high == 0;
    const double low = o.low == KN_ZERO ? 0 : o.low, high = unit                ? 1
                                                            : o.high == KN_ZERO ? 0
                                                                                : o.high;
    grid g = { 0 };
    if (!(low < high) || !isfinite(low) || !isfinite(high))
        return kn_fail("kn_image_save: .low is %g and .high is %g, should be less", low, high);
    if (!kn_dtype_is_float(kn_dtype_of(x)))
        return kn_fail("kn_image_save: the images are %s, should be floats (kn_cast)",
                       kn_dtype_name(kn_dtype_of(x)));
    if (!grid_of(&g, x, &o))
        return false;
    kn_scope scope = kn_scope_begin();
    const size_t bytes = (size_t)kn_numel(x) * sizeof(float);
    float *value = kn_host_alloc(bytes);
    unsigned char *pixel = kn_host_calloc((size_t)(g.width * g.height), (size_t)g.channels);
    bool ok = value && pixel && kn_to_host(kn_cast(kn_detach(x), KN_F32), value, bytes);
    if (ok) {
        draw(&g, value, low, high, pixel);
        ok = write_png(path, &g, pixel);
    }
    kn_host_free(value), kn_host_free(pixel);
    kn_scope_end(scope);
    return ok;
}
