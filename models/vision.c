/* models/vision.c: the rows of the families, and configurations with the images they are for. */
#include "models/vision.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "models/tokenizer_internal.h"

#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- residual nets --------------------------------------------------------------------------- */

static bool resnet_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c)
{
    if (!kn_resnet_preset(preset, &c->resnet))
        return false;
    c->resnet.channels = s->channels;
    c->resnet.classes = s->classes;
    c->resnet.small_images |= s->small_stem;
    return kn_resnet_config_check(&c->resnet);
}

static bool resnet_init(kn_vision_model *m, const kn_vision_config *c, kn_dtype dtype,
                        kn_device device)
{
    return kn_resnet_init(&m->resnet, c->resnet, dtype, device);
}

static const char *resnet_text(const kn_vision_config *c, char *buf)
{
    return kn_resnet_config_text(&c->resnet, buf);
}

static bool resnet_saved(const kn_checkpoint *c, kn_vision_config *config)
{
    return kn_resnet_config_saved(c, &config->resnet);
}

const kn_vision_family kn_resnet_family = { "resnet",    "resnet_block", KN_RESNET_CHOICES,
                                            resnet_make, resnet_init,    resnet_text,
                                            resnet_saved };

/* ---- vision transformers --------------------------------------------------------------------- */

static bool vit_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c)
{
    if (!kn_vit_preset(preset, &c->vit))
        return false;
    c->vit.channels = s->channels;
    c->vit.classes = s->classes;
    c->vit.image = s->side;
    c->vit.dropout = s->dropout;
    if (s->patch > 0)
        c->vit.patch = s->patch;
    return kn_vit_config_check(&c->vit);
}

static bool vit_init(kn_vision_model *m, const kn_vision_config *c, kn_dtype dtype,
                     kn_device device)
{
    return kn_vit_init(&m->vit, c->vit, dtype, device);
}

static const char *vit_text(const kn_vision_config *c, char *buf)
{
    return kn_vit_config_text(&c->vit, buf);
}

static bool vit_saved(const kn_checkpoint *c, kn_vision_config *config)
{
    return kn_vit_config_saved(c, &config->vit);
}

const kn_vision_family kn_vit_family = { "vit",    "vit_block", KN_VIT_CHOICES, vit_make,
                                         vit_init, vit_text,    vit_saved };

/* ---- any ------------------------------------------------------------------------------------- */

static const kn_vision_family *const families[] = { &kn_resnet_family, &kn_vit_family };
enum { FAMILIES = sizeof families / sizeof *families };

/* The word is one of a '|'-separated list. */
static bool has_word(const char *list, const char *word)
{
    size_t n = strlen(word);
    for (const char *at = list; at; at = strchr(at, '|')) {
        at += *at == '|';
        if (strcspn(at, "|") == n && strncmp(at, word, n) == 0)
            return true;
    }
    return false;
}

bool kn_vision_make(const char *preset, const kn_vision_sizes *s, kn_vision_config *c)
{
    for (int i = 0; i < FAMILIES; i++)
        if (has_word(families[i]->choices, preset)) {
            *c = (kn_vision_config){ .family = families[i] };
            return families[i]->make(preset, s, c);
        }
    return kn_fail("there is no image model '%s'; there are " KN_RESNET_CHOICES "|" KN_VIT_CHOICES,
                   preset);
}

/* ---- a configuration and its images ---------------------------------------------------------- */

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

static json_t *numbers(const double *x, int64_t n)
{
    json_t *list = json_array();
    for (int64_t i = 0; i < n; i++)
        json_array_append_new(list, json_real(x[i]));
    return list;
}

char *kn_vision_config_text(const kn_vision_config *c, const kn_vision_input *in)
{
    char small[KN_RESNET_CONFIG_TEXT > KN_VIT_CONFIG_TEXT ? KN_RESNET_CONFIG_TEXT
                                                          : KN_VIT_CONFIG_TEXT];
    if (!c->family->text(c, small))
        return NULL;
    json_t *j = json_loads(small, 0, NULL), *labels = json_array();
    for (int64_t i = 0; i < in->classes; i++)
        json_array_append_new(labels, json_string(in->label[i]));
    json_t *images = json_pack(
        "{s:[I,I,I], s:o, s:o, s:s, s:f}", "input_size", (json_int_t)in->channels,
        (json_int_t)in->side, (json_int_t)in->side, "mean", numbers(in->mean, in->channels), "std",
        numbers(in->std, in->channels), "interpolation", "bilinear", "crop_pct", 1.0);
    bool ok = j && labels && images && (int64_t)json_array_size(labels) == in->classes;
    ok = json_object_set_new(j, "label_names", labels) == 0 && ok;
    ok = json_object_set_new(j, "pretrained_cfg", images) == 0 && ok;
    char *text = ok ? json_dumps(j, 0) : NULL, *copy = text ? kn_host_strdup(text) : NULL;
    free(text);
    json_decref(j);
    if (!copy && kn_ok())
        kn_fail("kn_vision_config_text: no memory, or a label that isn't UTF-8");
    return copy;
}

/* "key" of images, channels numbers above low. */
static bool read_numbers(const json_t *images, const char *key, int64_t channels, double low,
                         double *x, const char *folder)
{
    const json_t *list = json_object_get(images, key);
    for (int64_t i = 0; i < channels; i++) {
        const json_t *v = json_array_get(list, (size_t)i);
        x[i] = json_number_value(v);
        if (!json_is_number(v) || !isfinite(x[i]) || !(x[i] > low))
            return kn_fail("%s/state.json: \"%s\" of the model doesn't hold %lld numbers%s; the "
                           "checkpoint is damaged",
                           folder, key, (long long)channels, low == 0 ? " above 0" : "");
    }
    return true;
}

static bool read_labels(const json_t *labels, kn_vision_input *in, const char *folder)
{
    if ((int64_t)json_array_size(labels) != in->classes)
        return kn_fail("%s/state.json: \"label_names\" of the model aren't %lld names; the "
                       "checkpoint is damaged",
                       folder, (long long)in->classes);
    in->label = kn_host_calloc((size_t)in->classes, sizeof *in->label);
    for (int64_t i = 0; in->label && i < in->classes; i++) {
        const char *name = json_string_value(json_array_get(labels, (size_t)i));
        kn_vision_label(in->label[i], name ? name : "?"); /* a stranger's: must steer no terminal */
    }
    return in->label != NULL;
}

static bool read_input(const json_t *m, const kn_vision_config *c, kn_vision_input *in,
                       const char *folder)
{
    const bool vit = c->family == &kn_vit_family;
    const int64_t channels = vit ? c->vit.channels : c->resnet.channels;
    const json_t *images = json_object_get(m, "pretrained_cfg");
    const json_t *size = json_object_get(images, "input_size");
    int64_t n[3];
    for (size_t i = 0; i < 3; i++) {
        const json_t *v = json_array_get(size, i);
        n[i] = json_integer_value(v);
        if (!json_is_integer(v) || n[i] < 1 || n[i] > KN_MOST_SIDE)
            return kn_fail("%s/state.json: \"input_size\" of the model isn't [channels, rows, "
                           "columns], each from 1 to %d; the checkpoint is damaged",
                           folder, KN_MOST_SIDE);
    }
    in->channels = n[0], in->side = n[1];
    in->classes = json_integer_value(json_object_get(m, "num_classes"));
    if ((n[0] != 1 && n[0] != 3) || n[1] != n[2])
        return kn_fail("%s/state.json: the model's images are %lld x %lld x %lld; squares of 1 or "
                       "3 channels are known",
                       folder, (long long)n[0], (long long)n[1], (long long)n[2]);
    if (n[0] != channels || (vit && n[1] != c->vit.image))
        return kn_fail(
            "%s/state.json: \"input_size\" is %lld x %lld x %lld, the model takes images "
            "of %lld x %lld x %lld; the checkpoint is damaged",
            folder, (long long)n[0], (long long)n[1], (long long)n[2], (long long)channels,
            (long long)(vit ? c->vit.image : n[1]), (long long)(vit ? c->vit.image : n[1]));
    return read_numbers(images, "mean", n[0], -HUGE_VAL, in->mean, folder) &&
           read_numbers(images, "std", n[0], 0, in->std, folder) &&
           read_labels(json_object_get(m, "label_names"), in, folder);
}

bool kn_vision_config_saved(const kn_checkpoint *c, kn_vision_config *config, kn_vision_input *in)
{
    const char *text = kn_checkpoint_config(c);
    json_t *m = text ? json_loads(text, 0, NULL) : NULL;
    if (!m)
        return kn_ok() && kn_fail("kn_vision_config_saved: no memory");
    const char *type = json_string_value(json_object_get(m, "model_type"));
    kn_vision_config read = { 0 };
    for (int i = 0; type && i < FAMILIES; i++)
        if (strcmp(type, families[i]->type) == 0)
            read.family = families[i];
    bool ok = read.family ? read.family->saved(c, &read)
                          : kn_fail("%s/state.json: the model is %s%s, not an image model",
                                    kn_checkpoint_folder(c), type ? "a " : "of an unknown kind",
                                    type ? type : "");
    if (ok && in) {
        *in = (kn_vision_input){ 0 };
        ok = read_input(m, &read, in, kn_checkpoint_folder(c));
    }
    json_decref(m);
    if (ok)
        *config = read;
    return ok;
}
