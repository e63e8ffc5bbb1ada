/* data/mnist.c: the images and labels of MNIST, and batches of them. */
#include "data/mnist.h"
#include "data/data.h"
#include "data/idx_internal.h"
#include "data/loader_internal.h"
#include "tensor/files.h"

#include <string.h>

#define MAX_SIDE 4096 /* pixels */

#ifdef KN_HAVE_ZLIB
static const char *const endings[] = { ".gz", "" };
#else
static const char *const endings[] = { "", ".gz" };
#endif

/* The tensor of folder/prefix-kind-ubyte.gz, or of the same without .gz. */
static kn_tensor *read_part(const char *folder, const char *prefix, const char *kind,
                            uint32_t magic, const char *what, int64_t count)
{
    char name[64];
    snprintf(name, sizeof name, "%s-%s-ubyte", prefix, kind);
    for (int i = 0; i < 2 && kn_ok(); i++) {
        const kn_path path = kn_path_of(folder, name, endings[i]);
        if (kn_is_there(path.text))
            return kn_idx_read_as(path.text, magic, what, count);
    }
    return !kn_ok() ? NULL
                    : kn_fail_null("there is no %s/%s.gz (nor %s); scripts/get-data fetches mnist "
                                   "and fashion-mnist",
                                   folder, name, name);
}

static bool check(const kn_images *im, const char *folder)
{
    if (im->rows > MAX_SIDE || im->cols > MAX_SIDE)
        return kn_fail("%s: images of %lld x %lld pixels", folder, (long long)im->rows,
                       (long long)im->cols);
    for (int64_t i = 0; i < im->count; i++)
        if (im->label[i] > 9)
            return kn_fail("%s: label %lld is %d; labels are 0 to 9", folder, (long long)i,
                           im->label[i]);
    return true;
}

bool kn_images_read(const char *folder, const char *split, kn_images *out)
{
    if (!kn_given_path(folder, "kn_images_read", "the folder") ||
        !kn_given(split, "kn_images_read", "the split") ||
        !kn_given(out, "kn_images_read", "the place for the images"))
        return false;
    bool train = strcmp(split, "train") == 0;
    const char *prefix = train ? "train" : "t10k";
    *out = (kn_images){ 0 };
    if (!train && strcmp(split, "test") != 0)
        return kn_fail("mnist: there is no split '%s'; splits are train and test", split);
    if (!kn_ok())
        return false;
    out->images = read_part(folder, prefix, "images-idx3", 0x803, "images", 0);
    out->count = out->images ? kn_size(out->images, 0) : 0;
    out->labels =
        out->images ? read_part(folder, prefix, "labels-idx1", 0x801, "labels", out->count) : NULL;
    if (out->labels) {
        out->pixel = kn_data(out->images);
        out->label = kn_data(out->labels);
        out->rows = kn_size(out->images, 1);
        out->cols = kn_size(out->images, 2);
        if (check(out, folder))
            return true;
    }
    kn_images_free(out);
    return false;
}

void kn_images_free(kn_images *images)
{
    if (!images)
        return;
    kn_tensor_free(images->images);
    kn_tensor_free(images->labels);
    *images = (kn_images){ 0 };
}

/* ---- the loader ---------------------------------------------------------------------------- */

typedef struct digits {
    kn_images images;
    kn_dtype dtype;
} digits;

static int fill_digit(kn_data_sample *s, void *arg)
{
    const digits *d = arg;
    int64_t pixels = d->images.rows * d->images.cols;
    int64_t label = d->images.label[s->index];
    const uint8_t *pixel = d->images.pixel + s->index * pixels;
    for (int64_t j = 0; j < pixels; j++)
        kn_put_float(d->dtype, s->field[0], j, (double)((float)pixel[j] / 255.0f));
    memcpy(s->field[1], &label, sizeof label);
    return true;
}

static void digits_free(void *arg)
{
    digits *d = arg;
    kn_images_free(&d->images);
    kn_host_free(d);
}

kn_loader *kn_mnist_(const char *split, const kn_comm *world, kn_mnist_options o)
{
    char *folder = NULL;
    digits *d = kn_host_calloc(1, sizeof *d);
    if (!d)
        return NULL;
    d->dtype = o.dtype ? o.dtype : KN_F32;
    if (!kn_dtype_is_float(d->dtype)) {
        kn_fail("kn_mnist: dtype %s is no float", kn_dtype_name(o.dtype));
        goto fail;
    }
    folder = kn_data_find(o.data ? o.data : "mnist");
    if (!folder || !kn_images_read(folder, split, &d->images))
        goto fail;
    kn_host_free(folder);
    kn_field field[KN_MAX_FIELDS] = { { d->dtype, 1, { d->images.rows * d->images.cols } },
                                      { .dtype = KN_I64 } };
    return kn_loader_make("kn_mnist", fill_digit, d, digits_free, world, d->images.count, field,
                          KN_LOADER_COMMON(o));
fail:
    kn_host_free(folder);
    digits_free(d);
    return NULL;
}
