/* models/programs/predict.c: names what is on images, by a model that train_resnet saved or that
 * PyTorch's programs wrote: predict --from PATH IMAGE..., or on the test images of a set: predict
 * --from PATH --data cifar10 */
#include "data/images.h"
#include "kernels/error_internal.h"
#include "models/image.h"
#include "models/options.h"
#include "models/pretrained_internal.h"
#include "state/folder_internal.h"
#include "tensor/files.h"

#include <stddef.h>
#include <stdio.h>
#include <string.h>

typedef struct settings {
    const char *from, *data, *save, *export, *logits, *model;
    char *const *images;
    int64_t count, top;
    int dtype;
} settings;

#define AT(field) offsetof(settings, field)

static char models[KN_CHOICES + 16] = "by-folder|";

static const kn_option table[] = {
    { "IMAGE...", KN_OPTION_REST, .help = "files to look at" },
    { "from", KN_OPTION_PATH, AT(from), NULL,
      "a folder of train_resnet (--out, in it step-N or best; --export) or timm, or a "
      ".safetensors file of torchvision or timm" },
    { "model", KN_OPTION_NAME, AT(model), "by-folder",
      "the model of a file without a config.json beside it", .choices = models },
    { "data", KN_OPTION_PATH, AT(data), NULL,
      "also the test images of a set (cifar10, shapes, ...) or a folder, beside their classes" },
    { "count", KN_OPTION_INT, AT(count), "0", "of these the first so many; 0: all",
      .with = "data" },
    { "save", KN_OPTION_PATH, AT(save), NULL, "write these images as PNG files into this folder",
      .with = "data" },
    { "top", KN_OPTION_INT, AT(top), "5", "classes to print an image", .min = 1, .max = 1 << 20 },
    { "logits", KN_OPTION_PATH, AT(logits), NULL,
      "write the logits of all classes into this file: a line an image, separated by tabs" },
    { "export", KN_OPTION_PATH, AT(export), NULL,
      "write the model into this folder, for torchvision and timm" },
    { "dtype", KN_OPTION_CHOICE, AT(dtype), "f32", "of the exported file",
      .choices = "f32|bf16|f16", .with = "export" },
    { 0 },
};

/* The model in use. */
typedef struct predictor {
    const settings *s;
    kn_pretrained *from;
    kn_module model;
    const kn_vision_input *in;
    FILE *logits;
} predictor;

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

static bool write_logits(const predictor *p, kn_tensor *logits)
{
    const int64_t n = kn_numel(logits);
    double *value = kn_host_alloc((size_t)n * sizeof *value);
    bool ok = value && kn_to_host(kn_cast(logits, KN_F64), value, (size_t)n * sizeof *value);
    for (int64_t i = 0; ok && i < n; i++)
        ok = fprintf(p->logits, "%.9g%c", value[i], i == n - 1 ? '\n' : '\t') > 0;
    kn_host_free(value);
    return ok || (kn_ok() && kn_fail_system("cannot write %s: %m", p->s->logits));
}

/* Prints name and the likeliest classes, of which *best is the first. */
static bool print_best(const predictor *p, kn_tensor *logits, const char *name, int64_t *best)
{
    const int64_t top = p->s->top < p->in->classes ? p->s->top : p->in->classes;
    kn_tensor *which = NULL,
              *most = kn_topk(kn_softmax(kn_cast(logits, KN_F64)), top, 1, .indices = &which);
    double *value = kn_host_alloc((size_t)top * sizeof *value);
    int64_t *index = kn_host_alloc((size_t)top * sizeof *index);
    bool ok = most && value && index && kn_to_host(most, value, (size_t)top * sizeof *value) &&
              kn_to_host(which, index, (size_t)top * sizeof *index);
    if (ok)
        printf("%s\n", name);
    for (int64_t i = 0; ok && i < top; i++) {
        char number[32];
        printf("  %6.2f %%  %s\n", 100 * value[i], kn_vision_class(p->in, index[i], number));
    }
    if (ok)
        *best = index[0];
    kn_host_free(value), kn_host_free(index);
    return ok;
}

/* Prints name, and the likeliest classes of the u8 image [C,H,W]; best: the likeliest one. */
static bool predict(predictor *p, const char *name, kn_tensor *image, int64_t *best)
{
    if (image && p->in->channels == 1 && kn_size(image, 0) == 3)
        image = to_grey(image);
    kn_tensor *x =
        image ? kn_augment_image(image, .augment = kn_pretrained_augment(p->from)) : NULL;
    kn_tensor *logits = x ? kn_call(&p->model, kn_unsqueeze(x, 0)) : NULL;
    return logits && print_best(p, logits, name, best) && (!p->logits || write_logits(p, logits));
}

/* The files; those that can't be read are named on standard error, and the others follow. */
static bool predict_files(predictor *p)
{
    char *const *path = p->s->images;
    int bad = 0, n = 0;
    for (int i = 0; path[i]; i++, n++) {
        kn_scope scope = kn_scope_begin();
        int64_t best;
        if (!predict(p, path[i], kn_image_read(path[i]), &best)) {
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
static bool predict_one(predictor *p, const kn_image_set *set, int64_t i, int64_t *right)
{
    const settings *s = p->s;
    char label[KN_LABEL_SIZE], name[4096], text[4100 + KN_LABEL_SIZE], number[32];
    int64_t best = 0;
    kn_tensor *image = kn_image_set_image(set, i);
    if (!image)
        return false;
    kn_vision_label(label, kn_image_set_class(set, kn_image_set_label(set, i)));
    snprintf(name, sizeof name, "%s, test image %lld", s->data, (long long)i);
    if (s->save && !save_image(s->save, i, image, name, sizeof name))
        return false;
    snprintf(text, sizeof text, "%s: %s", name, label);
    const bool ok = predict(p, text, image, &best);
    *right += ok && strcmp(kn_vision_class(p->in, best, number), label) == 0;
    return ok;
}

static bool predict_set(predictor *p)
{
    const settings *s = p->s;
    if (s->save && (!kn_folder_outside(s->save) || !kn_folder_make(s->save, "--save ")))
        return false;
    kn_image_set *set = kn_image_set_open(s->data, "test");
    const int64_t all = set ? kn_image_set_read_info(set).count : 0;
    const int64_t n = s->count > 0 && s->count < all ? s->count : all;
    int64_t right = 0;
    for (int64_t i = 0; i < n && kn_ok(); i++) {
        kn_scope scope = kn_scope_begin();
        predict_one(p, set, i, &right);
        kn_scope_end(scope);
    }
    kn_image_set_free(set);
    if (kn_ok())
        printf("right: %lld of %lld, %.2f %%\n", (long long)right, (long long)n,
               100 * (double)right / (double)n);
    return kn_ok();
}

/* ---- the program ----------------------------------------------------------------------------- */

static bool export_model(predictor *p)
{
    static const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16 };
    const kn_pretrained_save_options o = { .dtype = dtypes[p->s->dtype] };
    if (!kn_vision_save(p->s->export, &p->model, kn_pretrained_config(p->from), p->in, o))
        return false;
    printf("exported to %s\n", p->s->export);
    return true;
}

static bool run(const settings *s)
{
    predictor p = { .s = s };
    if (!s->from)
        return kn_fail("give --from PATH, a folder of train_resnet or timm, or a file of tensors");
    if (!s->images[0] && !s->data && !s->export)
        return kn_fail("give one image or several: predict --from PATH IMAGE...; or --data with a "
                       "set of images; or --export DIR");
    p.from = kn_pretrained_open(s->from, .model = strcmp(s->model, "by-folder") ? s->model : NULL);
    const kn_model_config *config = p.from ? kn_pretrained_config(p.from) : NULL;
    bool ok = config && kn_config_init(&p.model, config, KN_F32, KN_META);
    if (ok) {
        p.in = kn_pretrained_input(p.from);
        kn_train(&p.model, false);
        kn_set_grad_mode(false);
        ok = kn_materialize(&p.model, KN_CPU, 1) && kn_pretrained_load(p.from, &p.model) &&
             (!s->export || export_model(&p)) &&
             (!s->logits || (p.logits = fopen(s->logits, "w")) ||
              kn_fail_system("cannot write %s: %m", s->logits)) &&
             (!s->data || predict_set(&p)) && predict_files(&p);
        if (p.logits && fclose(p.logits) != 0)
            kn_fail_system("cannot write %s: %m", s->logits);
        kn_module_free(&p.model);
    }
    kn_pretrained_free(p.from);
    return ok;
}

int main(int argc, char **argv)
{
    settings s = { 0 };
    kn_init(&argc, &argv);
    kn_family_choices(KN_IMAGE_MODELS, models + strlen(models));
    kn_options *o = kn_options_main(table, &s, argc, argv,
                                    "Names what is on images: predict --from PATH IMAGE...; or "
                                    "exports the model.");
    if (o) {
        s.images = kn_options_rest(o);
        run(&s);
    }
    kn_options_free(o);
    return kn_finish();
}
