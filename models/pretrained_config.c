/* models/pretrained_config.c: timm's config.json of an image model, and a state dictionary without
 * one. The sizes of a model are those of its tensors; the numbers of a config.json must agree. */
#include "data/data.h"
#include "kernels/error.h"
#include "kernels/memory.h"
#include "models/pretrained_internal.h"
#include "tensor/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BYTES  (1 << 26) /* of a config.json */
#define MOST_VALUES (1 << 18) /* numbers, texts, lists and objects in it */
#define OWN         "knap"    /* the key of Knap's sizes; names that timm lacks begin so */

bool kn_pretrained_path(char *path, const char *dir, const char *name)
{
    int n = snprintf(path, 4096, "%s/%s", dir, name);
    return (n > 0 && n < 4096) || kn_fail("the path %.200s... is too long", dir);
}

/* ---- the file -------------------------------------------------------------------------------- */

/* An upper bound of the values of a JSON text, so that it can't take much more memory than its own
 * bytes. */
static int64_t count_values(const kn_mapped *text)
{
    int64_t n = 1;
    bool quoted = false;
    for (size_t i = 0; i < text->size; i++) {
        const unsigned char c = text->data[i];
        if (quoted && c == '\\')
            i++;
        else if (c == '"')
            quoted = !quoted;
        else
            n += !quoted && (c == ',' || c == '[' || c == '{' || c == ':');
    }
    return n;
}

json_t *kn_config_read(const char *path)
{
    json_error_t error = { 0 };
    kn_mapped map;
    json_t *j = NULL;
    if (!kn_file_map(path, "configuration of a model", &map))
        return NULL;
    const int64_t values = map.size <= MOST_BYTES ? count_values(&map) : INT64_MAX;
    if (values <= MOST_VALUES)
        j = kn_json_parse((const char *)map.data, map.size, JSON_REJECT_DUPLICATES, path, &error);
    kn_file_unmap(&map);
    if (json_is_object(j))
        return j;
    char shown[KN_LABEL_SIZE];
    kn_vision_label(shown, error.text);
    if (values > MOST_VALUES)
        kn_fail("%s has more than %d bytes or %d values; it is no model's configuration", path,
                MOST_BYTES, MOST_VALUES);
    else
        kn_fail("%s is no JSON object (%s in line %d); the file is damaged", path,
                j ? "another value" : shown, j ? 1 : error.line);
    json_decref(j);
    return NULL;
}

/* ---- writing --------------------------------------------------------------------------------- */

/* timm's name, and for a model that it lacks one that it refuses, in buf[64]. */
static const char *architecture(const kn_vision_config *c, char *buf)
{
    const char *name = c->family->name(c);
    if (c->family == &kn_vit_family) /* any sizes are arguments of each */
        return name && strcmp(name, "vit_cifar") != 0 ? name : "vit_base_patch16_224";
    const bool theirs = name && !c->resnet.small_images;
    snprintf(buf, 64, "%s%s", theirs ? "" : OWN "_", name ? name : c->family->type);
    return buf;
}

/* What timm's constructor needs beside the name. */
static json_t *model_args(const kn_vision_config *c)
{
    const kn_vit_config *v = &c->vit;
    if (c->family != &kn_vit_family)
        return json_pack("{s:I}", "in_chans", (json_int_t)c->resnet.channels);
    return json_pack("{s:I, s:I, s:I, s:I, s:i, s:i}", "img_size", (json_int_t)v->image,
                     "patch_size", (json_int_t)v->patch, "in_chans", (json_int_t)v->channels,
                     "embed_dim", (json_int_t)v->embd, "depth", v->layers, "num_heads", v->heads);
}

char *kn_config_text(const kn_vision_config *c, const kn_vision_input *in)
{
    char own[1024], name[64];
    if (!c->family->text(c, own))
        return NULL;
    json_error_t error;
    json_t *sizes = kn_json_parse(own, strlen(own), 0, "a configuration", &error),
           *labels = kn_vision_labels_json(in), *images = kn_vision_images_json(c, in);
    const json_int_t features = json_integer_value(json_object_get(sizes, "num_features"));
    json_t *j = json_pack("{s:s, s:I, s:I, s:s, s:o, s:o, s:o}", "architecture",
                          architecture(c, name), "num_classes", (json_int_t)in->classes,
                          "num_features", features, "global_pool", c->family->global_pool,
                          "model_args", model_args(c), "pretrained_cfg", images, OWN, sizes);
    bool ok = j && labels && (!in->label || json_object_set(j, "label_names", labels) == 0);
    char *text = ok ? kn_json_text(j, JSON_INDENT(2)) : NULL,
         *copy = text ? kn_host_strdup(text) : NULL;
    free(text);
    json_decref(labels);
    json_decref(j);
    if (!copy && kn_ok())
        kn_fail("config.json: no memory");
    return copy;
}

/* ---- reading --------------------------------------------------------------------------------- */

/* The shape of a tensor of ndim dims, which the model's first or last layer must have. */
static bool shape_of(const kn_pieces *f, const char *path, const char *name, int ndim,
                     const char *what, kn_array *a)
{
    char text[96];
    const int i = kn_pieces_find(f, name);
    if (i < 0)
        return kn_fail("%s has no tensor '%s'; it isn't %s", path, name, what);
    const kn_piece *p = kn_pieces_tensor(f, i);
    *a = kn_array_make(NULL, p->dtype, p->ndim, p->shape);
    return (a->ndim == ndim && a->shape[0] > 0) ||
           kn_fail("%s: '%s' is %s, which is no %s of %s", path, name,
                   kn_array_describe(a, text, sizeof text),
                   ndim == 2 ? "classifier" : "first layer", what);
}

/* Numbers of a vision transformer that its tensors don't show, by its preset or the arguments. */
static bool vit_sizes(const kn_json_source args, const kn_pieces *f, const char *path,
                      const char *what, const kn_array *first, kn_vit_config *v, kn_vision_sizes *s)
{
    kn_array position;
    int64_t n = 0;
    if (!shape_of(f, path, "pos_embed", 3, what, &position))
        return false;
    s->patch = first->shape[2];
    const int64_t patches = position.shape[1] - 1, rows = (int64_t)sqrt((double)patches);
    if (rows < 1 || rows * rows != patches || s->patch < 1 || s->patch > KN_MOST_SIDE ||
        rows * s->patch > KN_MOST_SIDE)
        return kn_fail("%s: 'pos_embed' has %lld places; a token and a square of patches of %lld "
                       "pixels are known",
                       path, (long long)position.shape[1], (long long)s->patch);
    s->side = rows * s->patch;
    if (json_object_get(args.object, "depth")) {
        if (!kn_json_int(args, "depth", 1, 10000, &n))
            return false;
        v->layers = (int)n;
    }
    if (json_object_get(args.object, "num_heads")) {
        if (!kn_json_int(args, "num_heads", 1, 1 << 20, &n))
            return false;
        v->heads = (int)n;
    } else if (v->embd != first->shape[0]) {
        return kn_fail("%s: 'patch_embed.proj.weight' makes %lld channels, %s has %lld; "
                       "\"num_heads\" of \"model_args\" must tell the heads",
                       path, (long long)first->shape[0], what, (long long)v->embd);
    }
    v->embd = first->shape[0];
    return true;
}

/* The preset name with the sizes of the tensors. */
static bool from_tensors(const char *name, const kn_json_source args, const kn_pieces *f,
                         const char *path, kn_vision_config *c)
{
    char tensor[64], what[96];
    kn_array first, last;
    const kn_vision_family *family = kn_vision_family_of(name);
    if (!family)
        return false;
    *c = (kn_vision_config){ .family = family };
    snprintf(what, sizeof what, "a %s", name);
    snprintf(tensor, sizeof tensor, "%s.weight", family->first_conv);
    if (!shape_of(f, path, tensor, 4, what, &first))
        return false;
    snprintf(tensor, sizeof tensor, "%s.weight", family->classifier);
    if (!shape_of(f, path, tensor, 2, what, &last))
        return false;
    kn_vision_sizes s = { .channels = first.shape[1],
                          .classes = last.shape[0],
                          .small_stem = family == &kn_resnet_family && first.shape[2] == 3 };
    if (family == &kn_resnet_family)
        return family->make(name, &s, c);
    kn_vit_config v;
    if (!kn_vit_preset(name, &v) || !vit_sizes(args, f, path, what, &first, &v, &s))
        return false;
    v.image = s.side, v.patch = s.patch, v.classes = s.classes, v.channels = s.channels;
    c->vit = v;
    return kn_vit_config_check(&c->vit);
}

/* "in_chans" and others, which the tensors show, and those that leave the model as it is. */
static bool check_args(const kn_json_source s)
{
    static const char *const known[] = {
        "in_chans",        "num_classes",   "img_size",       "patch_size",      "embed_dim",
        "depth",           "num_heads",     "global_pool",    "drop_rate",       "drop_path_rate",
        "drop_block_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate",  "patch_drop_rate",
        "class_token",     "mlp_ratio",     "qkv_bias",       "strict_img_size", "zero_init_last",
        "weight_init",
    };
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)s.object, key, value)
    {
        bool is_known = json_is_null(value) || json_is_false(value);
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            is_known |= strcmp(key, known[i]) == 0;
        char shown[KN_LABEL_SIZE];
        kn_vision_label(shown, key);
        if (!is_known)
            return kn_fail("%s: \"model_args\" has \"%s\", which Knap's models don't have", s.file,
                           shown);
    }
    return true;
}

static bool check_pool(const kn_json_source s, const kn_vision_config *c)
{
    const json_t *pool = json_object_get(s.object, "global_pool");
    const char *want = c->family->global_pool;
    return !pool || json_is_null(pool) ||
           (json_is_string(pool) && strcmp(json_string_value(pool), want) == 0) ||
           kn_fail("%s: \"global_pool\" isn't \"%s\", the only one of Knap's %s", s.file, want,
                   c->family->type);
}

/* A number that config.json may tell must be that of the tensors. */
static bool check_number(const kn_json_source s, const char *key, int64_t want)
{
    const json_t *v = json_object_get(s.object, key);
    return !v || json_is_null(v) || (json_is_integer(v) && json_integer_value(v) == want) ||
           kn_fail(
               "%s: \"%s\" isn't %lld, as the tensors of model.safetensors have it; the file is "
               "damaged, or of another model",
               s.file, key, (long long)want);
}

/* A preset's name out of "resnet50.a1_in1k"; false with an error. */
static bool read_name(const kn_json_source s, char *name, size_t size)
{
    const char *text = json_string_value(json_object_get(s.object, "architecture"));
    if (!text)
        return kn_fail("%s: \"architecture\" is missing or no text; it isn't a configuration of "
                       "timm or Knap",
                       s.file);
    char label[KN_LABEL_SIZE];
    kn_vision_label(label, text);
    snprintf(name, size, "%.*s", (int)strcspn(label, "."), label);
    return true;
}

static bool from_config(const kn_json_source s, const char *given, const kn_pieces *f,
                        const char *path, kn_vision_config *c)
{
    char name[KN_LABEL_SIZE];
    const json_t *own = json_object_get(s.object, OWN);
    const kn_json_source args = { json_object_get(s.object, "model_args"), s.file };
    const char *type = json_string_value(json_object_get(own, "model_type"));
    const char *is = NULL;
    if (own) {
        const kn_vision_family *family = kn_vision_family_typed(type);
        *c = (kn_vision_config){ .family = family };
        if (!family)
            return kn_fail("%s: \"model_type\" of \"" OWN "\" is no kind of image models", s.file);
        if (!family->read(own, s.file, c))
            return false;
        is = family->name(c);
    } else {
        if (!read_name(s, name, sizeof name) || !from_tensors(name, args, f, path, c) ||
            !check_args(args) || !check_pool(args, c) || !check_pool(s, c))
            return false;
        is = name;
    }
    if (given && (!is || strcmp(given, is) != 0))
        return kn_fail("%s: the model is a %s, not a %s; leave the name out", s.file,
                       is ? is : c->family->type, given);
    const kn_vision_sizes sizes = c->family->sizes(c);
    return check_number(s, "num_classes", sizes.classes) &&
           check_number(args, "num_classes", sizes.classes) &&
           check_number(args, "in_chans", sizes.channels) &&
           (own || c->family != &kn_vit_family ||
            (check_number(args, "embed_dim", c->vit.embd) &&
             check_number(args, "patch_size", c->vit.patch)));
}

bool kn_config_model(const json_t *json, const char *config_path, const char *name,
                     const kn_pieces *f, const char *path, kn_vision_config *c, kn_vision_input *in)
{
    char than[4096 + 32];
    const kn_json_source s = { json, config_path }, none = { NULL, path };
    snprintf(than, sizeof than, json ? "%s gives" : "a %s has", json ? config_path : name);
    if (!(json ? from_config(s, name, f, path, c) : from_tensors(name, none, f, path, c)) ||
        !kn_vision_check(c, f, path, than))
        return false;
    if (json)
        return kn_vision_input_read(s, c, false, in);
    const kn_vision_sizes sizes = c->family->sizes(c);
    const bool vit = c->family == &kn_vit_family;
    *in = (kn_vision_input){ .channels = sizes.channels,
                             .classes = sizes.classes,
                             .side = vit                ? sizes.side
                                     : sizes.small_stem ? 32
                                                        : 224 };
    if (in->channels != 1 && in->channels != 3)
        return kn_fail("%s: the model's images have %lld channels; 1 and 3 are known", path,
                       (long long)in->channels);
    kn_vision_input_guess(in, vit);
    return true;
}
