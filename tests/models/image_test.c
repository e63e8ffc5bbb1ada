/* tests/models/image_test.c: tensors as PNG files, which libpng reads again. */
#include "models/image.h"
#include "autograd/autograd.h"
#include "autograd/operations.h"
#include "tests/models/temp.h"

#ifdef KN_HAVE_PNG
#include <png.h>

/* The grey or coloured pixels of a file; the caller frees them. */
static unsigned char *pixels_of(const char *path, bool coloured, unsigned *width, unsigned *height)
{
    png_image image = { .version = PNG_IMAGE_VERSION };
    KN_CHECK(png_image_begin_read_from_file(&image, path), "%s: %s", path, image.message);
    KN_CHECK(image.format == (coloured ? PNG_FORMAT_RGB : PNG_FORMAT_GRAY));
    unsigned char *pixel = malloc(PNG_IMAGE_SIZE(image));
    KN_CHECK(pixel && png_image_finish_read(&image, NULL, pixel, 0, NULL), "%s", image.message);
    *width = image.width;
    *height = image.height;
    return pixel;
}

KN_TEST(image, a_grid_of_grey_images)
{
    /* 3 images of 2 x 2, the k-th of values k / 4 + 0, 0.01, 0.02, 0.03; f64, with gradient */
    double value[12];
    for (int i = 0; i < 12; i++)
        value[i] = i / 4 * 0.25 + i % 4 * 0.01;
    kn_tensor *x = kn_from(KN_F64, KN_CPU, value, KN_SHAPE(3, 1, 2, 2));
    kn_require_grad(x, true);
    const char *path = temp_path("grid.png");
    KN_CHECK(kn_image_save(path, x, .columns = 2, .gap = 1));
    unsigned width, height;
    unsigned char *pixel = pixels_of(path, false, &width, &height);
    KN_CHECK(width == 7 && height == 7, "%u x %u", width, height);
    for (int row = 0; row < 7; row++)
        for (int col = 0; col < 7; col++) {
            const int which = row / 3 * 2 + col / 3, in = (row % 3 - 1) * 2 + col % 3 - 1;
            const bool black = row % 3 == 0 || col % 3 == 0 || which > 2;
            const int want = black ? 0 : (int)(value[which * 4 + in] * 255 + 0.5);
            KN_CHECK(pixel[row * 7 + col] == want, "(%d, %d): %d, not %d", row, col,
                     pixel[row * 7 + col], want);
        }
    free(pixel);
    KN_CHECK(kn_image_save(path, kn_slice(x, 0, 1, 2)) && kn_image_save(path, x));
    pixel = pixels_of(path, false, &width, &height); /* 2 x 2 of them, gaps of 2 */
    KN_CHECK(width == 10 && height == 10, "%u x %u", width, height);
    free(pixel);
}

KN_TEST(image, colours_and_a_range)
{
    /* [-1, 1] in bf16, of the order in memory that a permutation leaves; NaN and values outside */
    const float value[6] = { -1, 0, 1, 5, -7, NAN }; /* two pixels of three channels */
    kn_tensor *x = kn_from(KN_F32, KN_CPU, value, KN_SHAPE(1, 2, 3));
    x = kn_permute(kn_cast(x, KN_BF16), 3, (int64_t[]){ 2, 0, 1 });
    const char *path = temp_path("colours.png");
    KN_CHECK(kn_image_save(path, x, .gap = KN_ZERO, .low = -1, .high = 1));
    unsigned width, height;
    unsigned char *pixel = pixels_of(path, true, &width, &height);
    KN_CHECK(width == 2 && height == 1);
    const unsigned char want[6] = { 0, 128, 255, 255, 0, 0 };
    KN_CHECK(memcmp(pixel, want, sizeof want) == 0);
    free(pixel);
    KN_CHECK(
        kn_image_save(path, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 5)), .low = -1, .high = KN_ZERO));
    pixel = pixels_of(path, false, &width, &height);
    KN_CHECK(width == 9 && height == 8 && pixel[2 * 9 + 2] == 255 && pixel[0] == 0);
    free(pixel);
    REFUSED(kn_image_save(temp_path("none/x.png"), x), "none/x.png");
}
#else
KN_TEST(image, without_libpng)
{
    REFUSED(kn_image_save("x.png", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(4, 5))),
            "libpng wasn't found when Knap was built");
}
#endif

KN_TEST(image, bad_input)
{
    kn_tensor *x = kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 1, 4, 4));
    KN_CHECK(!kn_image_save(NULL, x) && !kn_image_save("x.png", NULL));
    kn_clear_error();
    REFUSED(kn_image_save("x.png", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 2, 4, 4))),
            "the images are f32[2,2,4,4], should be [N,C,H,W], [C,H,W] or [H,W] with 1 or 3");
    REFUSED(kn_image_save("x.png", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(5))), "f32[5]");
    REFUSED(kn_image_save("x.png", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(0, 1, 4, 4))), "f32[0,1,4,4]");
    REFUSED(kn_image_save("x.png", kn_zeros(KN_I64, KN_CPU, KN_SHAPE(4, 4))),
            "the images are i64, should be floats");
    REFUSED(kn_image_save("x.png", x, .low = 1), ".low is 1 and .high is 0");
    REFUSED(kn_image_save("x.png", x, .low = NAN, .high = 1), "should be less");
    REFUSED(kn_image_save("x.png", x, .columns = -1), ".columns is -1");
    REFUSED(kn_image_save("x.png", x, .gap = 1 << 20), "larger than");
    const int64_t many = (int64_t)1 << 58; /* 64 each are 2^64 */
    kn_tensor *none = kn_zeros(KN_F32, KN_META, KN_SHAPE(many, 1, 1, 1));
    REFUSED(kn_image_save("x.png", none, .columns = many, .gap = 63), "larger than");
    KN_CHECK(!kn_image_save("x.png", kn_zeros(KN_F32, KN_META, KN_SHAPE(4, 4))) && !kn_ok());
    kn_clear_error();
}
