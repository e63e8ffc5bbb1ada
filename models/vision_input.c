/* models/vision_input.c: the images of a model and the labels of its classes, in JSON with timm's
 * names. */
#include "kernels/error.h"
#include "kernels/memory.h"
#include "models/tokens/tokens.h"
#include "models/vision.h"
#include "tensor/json.h"
#include "tensor/files.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* ---- sizes ----------------------------------------------------------------------------------- */

bool kn_vision_preset(const char *name, kn_model_config *c)
{
    char choices[KN_CHOICES];
    *c = (kn_model_config){ .family = kn_family_of_choice(KN_IMAGE_MODELS, name) };
    if (c->family)
        return kn_family_preset(c->family, name, c->of);
    return kn_fail("there is no image model '%.64s'; there are %s", name,
                   kn_family_choices(KN_IMAGE_MODELS, choices));
}

bool kn_vision_fit(kn_model_config *c, const kn_vision_sizes *s)
{
    kn_config_set(c, "channels", (double)s->channels);
    kn_config_set(c, "classes", (double)s->classes);
    kn_config_set(c, "image", (double)s->side);
    kn_config_set(c, "dropout", s->dropout);
    if (s->small_stem)
        kn_config_set(c, "small-images", true);
    if (s->patch > 0)
        kn_config_set(c, "patch", (double)s->patch);
    return kn_family_check(c->family, c->of);
}

kn_vision_sizes kn_vision_sizes_of(const kn_model_config *c)
{
    return (kn_vision_sizes){ .channels = (int64_t)kn_config_get(c, "channels", 0),
                              .side = (int64_t)kn_config_get(c, "image", 0),
                              .classes = (int64_t)kn_config_get(c, "classes", 0),
                              .small_stem = kn_config_get(c, "small-images", 0) != 0,
                              .patch = (int64_t)kn_config_get(c, "patch", 0),
                              .dropout = kn_config_get(c, "dropout", 0) };
}

/* ---- labels ---------------------------------------------------------------------------------- */

void kn_vision_label(char label[KN_LABEL_SIZE], const char *name)
{
    size_t left = strlen(name), used = 0;
    while (left > 0) {
        uint32_t code = 0;
        size_t n = kn_utf8_read(name, left, &code);
        bool shown = n > 0 && code >= ' ' && !(code >= 0x7f && code < 0xa0);
        size_t more = shown ? n : 1;
        if (used + more >= KN_LABEL_SIZE)
            break;
        memcpy(label + used, shown ? name : "?", more);
        used += more;
        n = n > 0 ? n : 1;
        name += n;
        left -= n;
    }
    label[used] = '\0';
}

const char *kn_vision_class(const kn_vision_input *in, int64_t c, char *buf)
{
    snprintf(buf, 32, "class %lld", (long long)c);
    return in->label ? in->label[c] : buf;
}

/* ---- images ---------------------------------------------------------------------------------- */

static const double imagenet[2][3] = { { 0.485, 0.456, 0.406 }, { 0.229, 0.224, 0.225 } };

void kn_vision_input_guess(kn_vision_input *in, bool vit)
{
    static const double cifar[2][3] = { { 0.4914, 0.4822, 0.4465 }, { 0.2470, 0.2435, 0.2616 } };
    static const double grey[2][3] = { { 0.1307 }, { 0.3081 } };
    static const double half[2][3] = { { 0.5, 0.5, 0.5 }, { 0.5, 0.5, 0.5 } };
    const bool small = in->side <= 64;
    const double(*values)[3] = in->channels == 1 ? grey : small ? cifar : vit ? half : imagenet;
    memcpy(in->mean, values[0], sizeof in->mean);
    memcpy(in->std, values[1], sizeof in->std);
    in->crop_pct = small ? 1 : vit ? 0.9 : 0.875;
    in->bicubic = vit && !small;
}

kn_augment kn_vision_augment(const kn_vision_input *in)
{
    const double part = in->crop_pct > 0 ? in->crop_pct : 1;
    const int64_t side = (int64_t)floor((double)in->side / part);
    kn_augment a = { .resize = { side, in->squash ? side : 0 },
                     .center_crop = { in->side },
                     .bicubic = in->bicubic };
    memcpy(a.normalize.mean, in->mean, sizeof in->mean);
    memcpy(a.normalize.std, in->std, sizeof in->std);
    return a;
}

kn_vision_input kn_vision_input_of(const kn_model_config *c)
{
    const kn_vision_sizes s = kn_vision_sizes_of(c);
    return (kn_vision_input){ .channels = s.channels,
                              .classes = s.classes,
                              .side = s.side         ? s.side
                                      : s.small_stem ? 32
                                                     : 224 };
}

bool kn_vision_input_check(const kn_vision_input *in, const kn_model_config *c, const char *where)
{
    const kn_vision_sizes s = kn_vision_sizes_of(c);
    const int64_t side = s.side ? s.side : in->side;
    if (s.channels != 1 && s.channels != 3)
        return kn_fail("%s: the model's images have %lld channels; 1 and 3 are known", where,
                       (long long)s.channels);
    if (in->side < 1 || in->side > KN_MOST_SIDE)
        return kn_fail("%s: side is %lld, should lie between 1 and %d", where, (long long)in->side,
                       KN_MOST_SIDE);
    if (in->channels != s.channels || in->side != side)
        return kn_fail(
            "%s: the images are %lld x %lld x %lld, but the model takes images of %lld x "
            "%lld x %lld",
            where, (long long)in->channels, (long long)in->side, (long long)in->side,
            (long long)s.channels, (long long)side, (long long)side);
    if (!(in->crop_pct >= 0.1 && in->crop_pct <= 1))
        return kn_fail("%s: crop_pct is %g, should lie between 0.1 and 1", where, in->crop_pct);
    for (int64_t i = 0; i < in->channels; i++)
        if (!isfinite(in->mean[i]) || !isfinite(in->std[i]) || !(in->std[i] > 0))
            return kn_fail("%s: mean and std of channel %lld are %g and %g; std should be above 0",
                           where, (long long)i, in->mean[i], in->std[i]);
    return true;
}

/* ---- to JSON --------------------------------------------------------------------------------- */

/* NULL without an error: no memory, or a number that isn't finite. */
static json_t *numbers(const double *x, int64_t n)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        if (json_array_append_new(list, json_real(x[i])) != 0) {
            json_decref(list);
            return NULL;
        }
    return list;
}

json_t *kn_vision_labels_json(const kn_vision_input *in)
{
    json_t *labels = json_array();
    for (int64_t i = 0; in->label && i < in->classes; i++)
        json_array_append_new(labels, json_string(in->label[i]));
    if (labels && (!in->label || (int64_t)json_array_size(labels) == in->classes))
        return labels;
    json_decref(labels);
    kn_fail("the labels of a model: no memory, or a label that isn't UTF-8");
    return NULL;
}

json_t *kn_vision_images_json(const kn_model_config *c, const kn_vision_input *in)
{
    const kn_family *f = c->family;
    json_t *j = json_pack(
        "{s:[I,I,I], s:b, s:s, s:f, s:s, s:o, s:o, s:I, s:s, s:s}", "input_size",
        (json_int_t)in->channels, (json_int_t)in->side, (json_int_t)in->side, "fixed_input_size",
        (int)(kn_config_get(c, "image", 0) > 0), "interpolation",
        in->bicubic ? "bicubic" : "bilinear", "crop_pct", in->crop_pct > 0 ? in->crop_pct : 1,
        "crop_mode", in->squash ? "squash" : "center", "mean", numbers(in->mean, in->channels),
        "std", numbers(in->std, in->channels), "num_classes", (json_int_t)in->classes, "first_conv",
        f->first_conv, "classifier", f->classifier);
    if (!j)
        kn_fail("the images of a model: no memory, or means that aren't finite");
    return j;
}

char *kn_vision_config_text(const kn_model_config *c, const kn_vision_input *in)
{
    json_t *j = kn_config_json(c), *labels = j ? kn_vision_labels_json(in) : NULL;
    bool ok = labels && json_object_set_new(j, "label_names", labels) == 0 &&
              json_object_set_new(j, "pretrained_cfg", kn_vision_images_json(c, in)) == 0;
    if (ok)
        return kn_json_copy(j, 0, "a configuration");
    json_decref(j);
    return NULL;
}

/* ---- from JSON ------------------------------------------------------------------------------- */

static const json_t *value_of(const json_t *object, const char *key)
{
    const json_t *v = json_object_get(object, key);
    return json_is_null(v) ? NULL : v;
}

/* A word or number of the object, or normal where it isn't there. */
static const char *word_of(const json_t *object, const char *key, const char *normal)
{
    const json_t *v = value_of(object, key);
    return !v ? normal : json_is_string(v) ? json_string_value(v) : "no text";
}

static double number_of(const json_t *object, const char *key, double normal)
{
    const json_t *v = value_of(object, key);
    return !v ? normal : json_is_number(v) ? json_number_value(v) : NAN;
}

/* "key" of images: channels numbers. Of a stranger: x[3] for one channel count as their mean, and
 * none as normal. */
static bool read_numbers(kn_json_source s, const char *key, int64_t channels,
                         const double normal[3], bool own, double x[3])
{
    const json_t *list = value_of(s.object, key);
    const int64_t given = (int64_t)json_array_size(list);
    bool ok = given == channels || (!own && (!list || given == 3));
    memcpy(x, normal, 3 * sizeof *x);
    for (int64_t i = 0; ok && i < given; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        ok = json_is_number(v);
        x[i] = json_number_value(v);
    }
    if (channels == 1 && given != 1)
        x[0] = (x[0] + x[1] + x[2]) / 3;
    return ok || kn_fail("%s: \"%s\" of the model doesn't hold %lld numbers; the file is damaged",
                         s.file, key, (long long)channels);
}

/* A list of names, or of a stranger an object {"0": name} that may have gaps. */
static bool read_labels(kn_json_source s, bool own, kn_vision_input *in)
{
    const json_t *labels = s.object;
    const int64_t given = json_is_object(labels) ? (int64_t)json_object_size(labels)
                                                 : (int64_t)json_array_size(labels);
    if (!own && given == 0)
        return true;
    const bool gaps = !own && json_is_object(labels);
    if (gaps ? given > in->classes : !json_is_array(labels) || given != in->classes)
        return kn_fail("%s: \"label_names\" of the model aren't %lld names; the file is damaged",
                       s.file, (long long)in->classes);
    in->label = kn_host_calloc((size_t)in->classes, sizeof *in->label);
    for (int64_t i = 0; in->label && i < in->classes; i++) {
        char number[32];
        snprintf(number, sizeof number, "class %lld", (long long)i);
        const json_t *name = gaps ? json_object_get(labels, number + strlen("class "))
                                  : json_array_get(labels, (size_t)i);
        kn_vision_label(in->label[i], /* must steer no terminal */
                        json_is_string(name) ? json_string_value(name) : number);
    }
    return in->label != NULL;
}

/* "input_size"; of a stranger it may be missing, and its channels are the tensors'. */
static bool read_sides(kn_json_source s, bool own, kn_vision_input *in)
{
    const json_t *size = value_of(s.object, "input_size");
    int64_t n[3];
    if (!own && !size)
        return true;
    for (size_t i = 0; i < 3; i++) {
        const json_t *v = json_array_get(size, i);
        n[i] = json_integer_value(v);
        if (n[i] < 1 || n[i] > KN_MOST_SIDE)
            return kn_fail("%s: \"input_size\" of the model isn't [channels, rows, columns], each "
                           "from 1 to %d; the file is damaged",
                           s.file, KN_MOST_SIDE);
    }
    in->side = n[1];
    in->channels = own ? n[0] : in->channels;
    return ((n[0] == 1 || n[0] == 3) && n[1] == n[2]) ||
           kn_fail("%s: the model's images are %lld x %lld x %lld; squares of 1 or 3 channels "
                   "are known",
                   s.file, (long long)n[0], (long long)n[1], (long long)n[2]);
}

static bool read_cuts(kn_json_source s, bool own, kn_vision_input *in)
{
    const char *filter = word_of(s.object, "interpolation", own ? "bilinear" : "bicubic");
    const char *mode = word_of(s.object, "crop_mode", "center");
    in->crop_pct = number_of(s.object, "crop_pct", own ? 1 : 0.875);
    in->bicubic = strcmp(filter, "bicubic") == 0;
    in->squash = strcmp(mode, "squash") == 0;
    if (!in->bicubic && strcmp(filter, "bilinear") != 0)
        return kn_fail("%s: \"interpolation\" of the model is \"%.64s\"; bilinear and bicubic are "
                       "known",
                       s.file, filter);
    return in->squash || strcmp(mode, "center") == 0 ||
           kn_fail("%s: \"crop_mode\" of the model is \"%.64s\"; center and squash are known",
                   s.file, mode);
}

bool kn_vision_input_read(kn_json_source s, const kn_model_config *c, bool own, kn_vision_input *in)
{
    const int64_t channels = (int64_t)kn_config_get(c, "channels", 0);
    const json_t *images = json_object_get(s.object, "pretrained_cfg"),
                 *labels = json_object_get(s.object, "label_names");
    if (images && !json_is_object(images))
        return kn_fail("%s: \"pretrained_cfg\" is no object; the file is damaged", s.file);
    if (!own && !images) /* an older form: all in one object */
        images = s.object;
    if (!own && !labels)
        labels = json_object_get(images, "label_names");
    *in = kn_vision_input_of(c);
    in->side = (int64_t)kn_config_get(c, "image", 224);
    const kn_json_source of = { images, s.file };
    return read_sides(of, own, in) && read_cuts(of, own, in) &&
           read_numbers(of, "mean", channels, imagenet[0], own, in->mean) &&
           read_numbers(of, "std", channels, imagenet[1], own, in->std) &&
           kn_vision_input_check(in, c, s.file) &&
           read_labels((kn_json_source){ labels, s.file }, own, in);
}

bool kn_vision_config_saved(const kn_checkpoint *c, kn_model_config *config, kn_vision_input *in)
{
    json_t *j = NULL;
    if (!kn_config_saved(c, KN_IMAGE_MODELS, config, &j))
        return false;
    const kn_path file = kn_path_of(kn_checkpoint_folder(c), "state.json", "");
    bool ok = !in || kn_vision_input_read((kn_json_source){ j, file.text }, config, true, in);
    json_decref(j);
    return ok;
}
