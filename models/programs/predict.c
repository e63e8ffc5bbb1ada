/* models/programs/predict.c: names what is on images, by a model that train_resnet --out saved:
 * predict --from DIR IMAGE..., or on the test images of a set: predict --from DIR --data cifar10 */
#include "data/images.h"
#include "kernels/error.h"
#include "models/image.h"
#include "models/options.h"
#include "models/vision.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

typedef struct settings {
    const char *from, *data, *save;
    int64_t count, top, threads;
} settings;

#define AT(field) offsetof(settings, field)

static const kn_option table[] = {
    { "from", KN_OPTION_PATH, AT(from), NULL, "the folder that train_resnet --out wrote" },
    { "data", KN_OPTION_PATH, AT(data), NULL,
      "also the test images of a set (cifar10, shapes, ...) or a folder, beside their classes" },
    { "count", KN_OPTION_INT, AT(count), "0", "of these the first so many; 0: all" },
    { "save", KN_OPTION_PATH, AT(save), NULL, "write these images as PNG files into this folder" },
    { "top", KN_OPTION_INT, AT(top), "5", "classes to print an image", .min = 1, .max = 1 << 20 },
    { "threads", KN_OPTION_INT, AT(threads), NULL, "threads", .max = 1024, .note = "cores" },
    { 0 },
};

/* Moves the arguments that are neither options nor their values behind the others; returns the
 * number of options and values, the program's name included. */
static int images_last(int argc, char **argv, char **sorted)
{
    int n = 0, images = argc;
    sorted[n++] = argv[0];
    for (int i = 1; i < argc; i++) {
        const kn_option *o = table;
        if (strncmp(argv[i], "--", 2) != 0) {
            sorted[--images] = argv[i];
            continue;
        }
        while (o->name && strcmp(o->name, argv[i] + 2) != 0)
            o++;
        sorted[n++] = argv[i];
        if (o->name && i + 1 < argc) /* each takes a value */
            sorted[n++] = argv[++i];
    }
    return n;
}

/* image[3,H,W] as [1,H,W]: the luma of ITU-R 601, rounded as PIL rounds it. */
static kn_tensor *to_grey(const kn_tensor *image)
{
    const int64_t rows = kn_size(image, 1), columns = kn_size(image, 2), n = rows * columns;
    uint8_t *p = kn_host_alloc((size_t)n * 4); /* the channels, then the result */
    kn_tensor *grey = NULL;
    if (p && kn_to_host(image, p, (size_t)n * 3)) {
        for (int64_t i = 0; i < n; i++)
            p[3 * n + i] =
                (uint8_t)((p[i] * 19595 + p[n + i] * 38470 + p[2 * n + i] * 7471 + 0x8000) >> 16);
        grey = kn_from(KN_U8, KN_CPU, p + 3 * n, KN_SHAPE(1, rows, columns));
    }
    kn_host_free(p);
    return grey;
}

/* Prints name, and the likeliest classes of the u8 image [C,H,W]; best: the likeliest one. */
static bool predict(kn_vision_model *m, const kn_vision_input *in, const char *name,
                    kn_tensor *image, int64_t top, int64_t *best)
{
    kn_augment a = { .resize = { in->side }, .center_crop = { in->side } };
    memcpy(a.normalize.mean, in->mean, sizeof in->mean);
    memcpy(a.normalize.std, in->std, sizeof in->std);
    if (image && in->channels == 1 && kn_size(image, 0) == 3)
        image = to_grey(image);
    kn_tensor *x = image ? kn_augment_image(image, .augment = a) : NULL;
    kn_tensor *logits = x ? kn_call(m, kn_unsqueeze(x, 0)) : NULL;
    kn_tensor *p = logits ? kn_softmax(kn_cast(logits, KN_F64)) : NULL;
    top = top < in->classes ? top : in->classes;
    kn_tensor *which = NULL, *most = p ? kn_topk(p, top, 1, .indices = &which) : NULL;
    double *value = kn_host_alloc((size_t)top * sizeof *value);
    int64_t *index = kn_host_alloc((size_t)top * sizeof *index);
    bool ok = most && value && index && kn_to_host(most, value, (size_t)top * sizeof *value) &&
              kn_to_host(which, index, (size_t)top * sizeof *index);
    if (ok)
        printf("%s\n", name);
    for (int64_t i = 0; ok && i < top; i++)
        printf("  %6.2f %%  %s\n", 100 * value[i], in->label[index[i]]);
    if (ok)
        *best = index[0];
    kn_host_free(value), kn_host_free(index);
    return ok;
}

/* The files; those that can't be read are named on standard error, and the others follow. */
static bool predict_files(const settings *s, kn_vision_model *m, const kn_vision_input *in,
                          char *const *path, int n)
{
    int bad = 0;
    for (int i = 0; i < n; i++) {
        kn_scope scope = kn_scope_begin();
        int64_t best;
        if (!predict(m, in, path[i], kn_image_read(path[i]), s->top, &best)) {
            fprintf(stderr, "predict: %s\n", kn_error());
            kn_clear_error();
            bad++;
        }
        kn_scope_end(scope);
    }
    return bad == 0 || kn_fail("%d of %d images couldn't be read", bad, n);
}

/* ---- images of a set ------------------------------------------------------------------------- */

/* --save: the image as DIR/INDEX.png, named in name. */
static bool save_image(const char *folder, int64_t index, kn_tensor *image, char *name, size_t size)
{
    snprintf(name, size, "%s/%lld.png", folder, (long long)index);
    return kn_image_save(name, kn_cast(image, KN_F32), .high = 255, .gap = KN_ZERO);
}

/* Test image number i: what it is and what the model takes it for; right counts equal names. */
static bool predict_one(const settings *s, kn_vision_model *m, const kn_vision_input *in,
                        const kn_image_set *set, int64_t i, int64_t *right)
{
    char label[KN_LABEL_SIZE], name[4096], text[4100 + KN_LABEL_SIZE];
    int64_t best = 0;
    kn_tensor *image = kn_image_set_image(set, i);
    if (!image)
        return false;
    kn_vision_label(label, kn_image_set_class(set, kn_image_set_label(set, i)));
    snprintf(name, sizeof name, "%s, test image %lld", s->data, (long long)i);
    if (s->save && !save_image(s->save, i, image, name, sizeof name))
        return false;
    snprintf(text, sizeof text, "%s: %s", name, label);
    const bool ok = predict(m, in, text, image, s->top, &best);
    *right += ok && strcmp(in->label[best], label) == 0;
    return ok;
}

static bool predict_set(const settings *s, kn_vision_model *m, const kn_vision_input *in)
{
    if (s->save && mkdir(s->save, 0777) != 0 && errno != EEXIST)
        return kn_fail("--save %s: cannot make the folder: %s", s->save, strerror(errno));
    kn_image_set *set = kn_image_set_open(s->data, "test");
    const int64_t all = set ? kn_image_set_read_info(set).count : 0;
    const int64_t n = s->count > 0 && s->count < all ? s->count : all;
    int64_t right = 0;
    for (int64_t i = 0; i < n && kn_ok(); i++) {
        kn_scope scope = kn_scope_begin();
        predict_one(s, m, in, set, i, &right);
        kn_scope_end(scope);
    }
    kn_image_set_free(set);
    if (kn_ok())
        printf("right: %lld of %lld, %.2f %%\n", (long long)right, (long long)n,
               100 * (double)right / (double)n);
    return kn_ok();
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool run(const settings *s, char *const *path, int n)
{
    kn_vision_model m = { 0 };
    kn_vision_input in = { 0 };
    kn_vision_config config;
    if (!s->from)
        return kn_fail("give --from DIR, a folder that train_resnet --out wrote");
    if (n == 0 && !s->data)
        return kn_fail("give one image or several: predict --from DIR IMAGE...; or --data with a "
                       "set of images");
    if (!s->data && (s->count || s->save))
        return kn_fail("--count and --save are for the images of --data; leave them out");
    kn_checkpoint *c = kn_checkpoint_open(s->from, NULL);
    bool ok = c && kn_vision_config_saved(c, &config, &in) &&
              config.family->init(&m, &config, KN_F32, KN_META);
    if (ok) {
        kn_train(&m, false);
        kn_set_grad_mode(false);
        ok = kn_materialize(&m, KN_CPU, 1) && kn_checkpoint_load(c, &m) &&
             (!s->data || predict_set(s, &m, &in)) && predict_files(s, &m, &in, path, n);
        kn_module_free(&m);
    }
    kn_checkpoint_free(c);
    kn_host_free(in.label);
    return ok;
}

int main(int argc, char **argv)
{
    settings s = { 0 };
    kn_init(&argc, &argv);
    char **sorted = kn_host_calloc((size_t)argc + 1, sizeof *sorted);
    int n = sorted ? images_last(argc, argv, sorted) : 0;
    kn_options *o = sorted ? kn_options_main(table, &s, n, sorted,
                                             "Names what is on images: predict --from DIR IMAGE...")
                           : NULL;
    if (o) {
        for (int i = n, j = argc - 1; i < j; i++, j--) { /* they were collected backwards */
            char *other = sorted[i];
            sorted[i] = sorted[j], sorted[j] = other;
        }
        run(&s, sorted + n, argc - n);
    }
    kn_options_free(o);
    kn_host_free(sorted);
    return kn_finish();
}
