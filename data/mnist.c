/* data/mnist.c: reads the idx files of MNIST and makes batches of them. */
#include "data/mnist.h"
#include "data/data.h"
#include "data/loader_internal.h"
#include "kernels/convert.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#define MAX_SIDE 4096 /* pixels; a larger size means a broken header */

/* One idx file while it is read. zlib also reads files that are not compressed. */
typedef struct idx_file {
    char *path;
    gzFile gz;
    uint64_t limit; /* bytes it can hold at most, from its size and deflate's best ratio, 1032 */
} idx_file;

/* Opens folder/prefix-kind-ubyte.gz, or the same without .gz. */
static bool idx_open(idx_file *f, const char *folder, const char *prefix, const char *kind)
{
    struct stat st;
    size_t size = strlen(folder) + strlen(prefix) + strlen(kind) + 16;
    f->path = kn_host_alloc(size);
    if (!f->path)
        return false;
    snprintf(f->path, size, "%s/%s-%s-ubyte.gz", folder, prefix, kind);
    if (access(f->path, F_OK) != 0) {
        char *dot = f->path + strlen(f->path) - 3;
        *dot = '\0';
        if (access(f->path, F_OK) != 0)
            return kn_fail("there is no %s.gz (nor %s-%s-ubyte); run scripts/get-data mnist",
                           f->path, prefix, kind);
    }
    if (stat(f->path, &st) != 0 || !S_ISREG(st.st_mode))
        return kn_fail("%s is not a regular file", f->path);
    f->limit = ((uint64_t)st.st_size + 1) * 1032;
    f->gz = gzopen(f->path, "rbe");
    if (!f->gz)
        return kn_fail("cannot open %s", f->path);
    gzbuffer(f->gz, 1 << 16);
    return true;
}

static void idx_close(idx_file *f)
{
    if (f->gz)
        gzclose_r(f->gz);
    kn_host_free(f->path);
}

/* Reads exactly size bytes. */
static bool idx_read(idx_file *f, void *to, size_t size)
{
    unsigned char *p = to;
    while (size > 0) {
        unsigned chunk = size > 1u << 30 ? 1u << 30 : (unsigned)size;
        int n = gzread(f->gz, p, chunk);
        if (n <= 0) {
            int code = Z_OK;
            const char *why = gzerror(f->gz, &code);
            if (n < 0 && code != Z_BUF_ERROR)
                return kn_fail("%s is damaged: %s; download it again", f->path, why);
            return kn_fail("%s is cut short (%zu bytes are missing); download it again", f->path,
                           size);
        }
        p += n;
        size -= (size_t)n;
    }
    return true;
}

/* After the last byte: nothing may follow, and gzip's checksum must hold. */
static bool idx_end(idx_file *f)
{
    unsigned char extra;
    int code = Z_OK, n = gzread(f->gz, &extra, 1);
    const char *why = gzerror(f->gz, &code);
    if (n > 0)
        return kn_fail("%s holds more bytes than its header says", f->path);
    if (n < 0 || (code != Z_OK && code != Z_STREAM_END))
        return kn_fail("%s is damaged at its end: %s; download it again", f->path,
                       code == Z_BUF_ERROR ? "cut short" : why);
    return true;
}

/* Reads magic and dims big-endian numbers; checks the magic and that the file can hold them all. */
static bool idx_header(idx_file *f, uint32_t magic, int dims, int64_t *size)
{
    unsigned char raw[16];
    if (!idx_read(f, raw, 4 + 4 * (size_t)dims))
        return false;
    uint64_t total = 1;
    for (int i = 0; i <= dims; i++) {
        const unsigned char *b = raw + 4 * i;
        uint32_t v = (uint32_t)b[0] << 24 | (uint32_t)b[1] << 16 | (uint32_t)b[2] << 8 | b[3];
        if (i == 0) {
            if (v != magic)
                return kn_fail("%s is no idx file of %s: magic 0x%08x, not 0x%08x", f->path,
                               dims == 3 ? "images" : "labels", v, magic);
            continue;
        }
        if (v == 0 || (i > 1 && v > MAX_SIDE))
            return kn_fail("%s: its header gives %u for dimension %d, which is impossible", f->path,
                           v, i);
        size[i - 1] = v;
        total *= v; /* < 2^32 * 2^24 */
    }
    if (total > f->limit)
        return kn_fail("%s: its header promises %llu bytes, more than a file of its size can hold",
                       f->path, (unsigned long long)total);
    return true;
}

static bool read_images(idx_file *f, kn_images *out)
{
    int64_t size[3];
    if (!idx_header(f, 0x803, 3, size))
        return false;
    size_t bytes = (size_t)(size[0] * size[1] * size[2]);
    out->pixel = kn_take(kn_device_memory(KN_CPU), bytes, KN_MEM_DATA);
    if (!out->pixel)
        return false;
    out->count = size[0];
    out->rows = size[1];
    out->cols = size[2];
    return idx_read(f, out->pixel, bytes) && idx_end(f);
}

static bool read_labels(idx_file *f, kn_images *out)
{
    int64_t count;
    if (!idx_header(f, 0x801, 1, &count))
        return false;
    if (count != out->count)
        return kn_fail("%s has %lld labels for %lld images", f->path, (long long)count,
                       (long long)out->count);
    out->label = kn_take(kn_device_memory(KN_CPU), (size_t)count, KN_MEM_DATA);
    if (!out->label || !idx_read(f, out->label, (size_t)count) || !idx_end(f))
        return false;
    for (int64_t i = 0; i < count; i++)
        if (out->label[i] > 9)
            return kn_fail("%s: label %lld is %d; labels are 0 to 9", f->path, (long long)i,
                           out->label[i]);
    return true;
}

bool kn_images_read(const char *folder, const char *split, kn_images *out)
{
    if (!kn_given(folder, "kn_images_read", "the folder") ||
        !kn_given(split, "kn_images_read", "the split") ||
        !kn_given(out, "kn_images_read", "the place for the images"))
        return false;
    idx_file images = { 0 }, labels = { 0 };
    bool ok = false, train = strcmp(split, "train") == 0;
    const char *prefix = train ? "train" : "t10k";
    *out = (kn_images){ 0 };
    if (!train && strcmp(split, "test") != 0)
        return kn_fail("mnist: there is no split '%s'; splits are train and test", split);
    ok = idx_open(&images, folder, prefix, "images-idx3") && read_images(&images, out) &&
         idx_open(&labels, folder, prefix, "labels-idx1") && read_labels(&labels, out);
    idx_close(&images);
    idx_close(&labels);
    if (!ok)
        kn_images_free(out);
    return ok;
}

void kn_images_free(kn_images *images)
{
    kn_memory *m = kn_device_memory(KN_CPU);
    if (!images)
        return;
    if (images->pixel)
        kn_give(m, images->pixel, (size_t)(images->count * images->rows * images->cols),
                KN_MEM_DATA);
    if (images->label)
        kn_give(m, images->label, (size_t)images->count, KN_MEM_DATA);
    *images = (kn_images){ 0 };
}

/* ---- the loader ---------------------------------------------------------------------------- */

typedef struct digits {
    kn_images images;
    kn_dtype dtype;
} digits;

static void pixels_to(kn_dtype dtype, void *to, const uint8_t *pixel, int64_t n)
{
    for (int64_t j = 0; j < n; j++) {
        float x = (float)pixel[j] / 255.0f;
        if (dtype == KN_F32)
            ((float *)to)[j] = x;
        else if (dtype == KN_F64)
            ((double *)to)[j] = x;
        else
            ((uint16_t *)to)[j] = dtype == KN_BF16 ? kn_f32_to_bf16(x) : kn_f32_to_f16(x);
    }
}

static int fill_digit(kn_data_sample *s, void *arg)
{
    const digits *d = arg;
    int64_t pixels = d->images.rows * d->images.cols;
    int64_t label = d->images.label[s->index];
    pixels_to(d->dtype, s->field[0], d->images.pixel + s->index * pixels, pixels);
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
