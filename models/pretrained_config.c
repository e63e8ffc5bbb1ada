/* models/pretrained_config.c: timm's config.json of an image model, and a state dictionary without
 * one. The sizes of a model are those of its tensors; the numbers of a config.json must agree. */
#include "kernels/error.h"
#include "models/pretrained_internal.h"
#include "tensor/json.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define OWN "knap" /* the key of Knap's sizes; names that timm lacks begin so */

/* ---- writing --------------------------------------------------------------------------------- */

/* timm's name, and for a model that it lacks one that it refuses, in buf[64]. */
static const char *architecture(const kn_model_config *c, char *buf)
{
    const kn_preset *preset = kn_config_preset(c);
    const bool theirs = preset && !preset->own && !kn_config_get(c, "small-images", 0);
    if (!theirs && c->family->any_sizes)
        return c->family->any_sizes;
    snprintf(buf, 64, "%s%s", theirs ? "" : OWN "_", preset ? preset->name : c->family->type);
    return buf;
}

char *kn_pretrained_config_text(const kn_model_config *c, const kn_vision_input *in)
{
    char name[64];
    json_t *sizes = kn_config_json(c);
    if (!sizes)
        return NULL;
    json_t *labels = kn_vision_labels_json(in), *images = kn_vision_images_json(c, in);
    json_t *args = json_object_get(sizes, "model_args"); /* of timm's constructor */
    args = args ? json_incref(args) : json_pack("{s:I}", "in_chans", (json_int_t)in->channels);
    const json_int_t features = json_integer_value(json_object_get(sizes, "num_features"));
    json_t *j =
        json_pack("{s:s, s:I, s:I, s:s, s:o, s:o, s:o}", "architecture", architecture(c, name),
                  "num_classes", (json_int_t)in->classes, "num_features", features, "global_pool",
                  c->family->global_pool, "model_args", args, "pretrained_cfg", images, OWN, sizes);
    const bool ok = labels && (!in->label || json_object_set(j, "label_names", labels) == 0);
    json_decref(labels);
    if (ok)
        return kn_json_copy(j, JSON_INDENT(2), "config.json");
    json_decref(j);
    return NULL;
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

/* A number of "model_args" that tensors don't show, where it is given. */
static bool read_arg(const kn_json_source args, const char *key, const char *field,
                     kn_model_config *c)
{
    int64_t n = 0;
    if (!json_object_get(args.object, key))
        return true;
    if (!kn_json_int(args, key, 1, 10000, &n))
        return false;
    kn_config_set(c, field, (double)n);
    return true;
}

/* Numbers of a vision transformer, which begins as its preset, by its tensors and the arguments. */
static bool vit_sizes(const kn_json_source args, const kn_pieces *f, const char *path,
                      const char *what, const kn_array *first, kn_model_config *c,
                      kn_vision_sizes *s)
{
    kn_array position;
    const int64_t embd = (int64_t)kn_config_get(c, "embd", 0);
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
    if (!read_arg(args, "depth", "layers", c) || !read_arg(args, "num_heads", "heads", c))
        return false;
    kn_config_set(c, "embd", (double)first->shape[0]);
    return json_object_get(args.object, "num_heads") || embd == first->shape[0] ||
           kn_fail("%s: 'patch_embed.proj.weight' makes %lld channels, %s has %lld; "
                   "\"num_heads\" of \"model_args\" must tell the heads",
                   path, (long long)first->shape[0], what, (long long)embd);
}

/* The preset name with the sizes of the tensors. */
static bool from_tensors(const char *name, const kn_json_source args, const kn_pieces *f,
                         const char *path, kn_model_config *c)
{
    char tensor[64], what[96];
    kn_array first, last;
    if (!kn_vision_preset(name, c))
        return false;
    const kn_family *family = c->family;
    snprintf(what, sizeof what, "a %s", name);
    snprintf(tensor, sizeof tensor, "%s.weight", family->first_conv);
    if (!shape_of(f, path, tensor, 4, what, &first))
        return false;
    snprintf(tensor, sizeof tensor, "%s.weight", family->classifier);
    if (!shape_of(f, path, tensor, 2, what, &last))
        return false;
    kn_vision_sizes s = { .channels = first.shape[1],
                          .classes = last.shape[0],
                          .small_stem =
                              kn_family_makes(family, &kn_resnet_family) && first.shape[2] == 3 };
    return (!kn_family_makes(family, &kn_vit_family) ||
            vit_sizes(args, f, path, what, &first, c, &s)) &&
           kn_vision_fit(c, &s);
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
        if (!is_known)
            return kn_fail("%s: \"model_args\" has \"%.64s\", which Knap's models don't have",
                           s.file, key);
    }
    return true;
}

static bool check_pool(const kn_json_source s, const kn_model_config *c)
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
                        const char *path, kn_model_config *c)
{
    char name[KN_LABEL_SIZE];
    const json_t *own = json_object_get(s.object, OWN);
    const kn_json_source args = { json_object_get(s.object, "model_args"), s.file };
    const char *type = json_string_value(json_object_get(own, "model_type"));
    const char *is = NULL;
    if (own) {
        *c = (kn_model_config){ .family = kn_family_typed(KN_IMAGE_MODELS, type) };
        if (!c->family)
            return kn_fail("%s: \"model_type\" of \"" OWN "\" is no kind of image models", s.file);
        if (!kn_config_read(own, s.file, c))
            return false;
        const kn_preset *preset = kn_config_preset(c);
        is = preset ? preset->name : NULL;
    } else {
        if (!read_name(s, name, sizeof name) || !from_tensors(name, args, f, path, c) ||
            !check_args(args) || !check_pool(args, c) || !check_pool(s, c))
            return false;
        is = name;
    }
    if (given && (!is || strcmp(given, is) != 0))
        return kn_fail("%s: the model is a %s, not a %s; leave the name out", s.file,
                       is ? is : c->family->type, given);
    const kn_vision_sizes sizes = kn_vision_sizes_of(c);
    return check_number(s, "num_classes", sizes.classes) &&
           check_number(args, "num_classes", sizes.classes) &&
           check_number(args, "in_chans", sizes.channels) &&
           (own || !kn_family_makes(c->family, &kn_vit_family) ||
            (check_number(args, "embed_dim", (int64_t)kn_config_get(c, "embd", 0)) &&
             check_number(args, "patch_size", sizes.patch)));
}

bool kn_pretrained_config_model(const json_t *json, const char *config_path, const char *name,
                                kn_pieces *f, const char *path, kn_model_config *c,
                                kn_vision_input *in)
{
    char than[4096 + 32];
    const kn_json_source s = { json, config_path }, none = { NULL, path };
    snprintf(than, sizeof than, json ? "%s gives" : "a %s has", json ? config_path : name);
    if (!(json ? from_config(s, name, f, path, c) : from_tensors(name, none, f, path, c)) ||
        !kn_model_check(c, f, false, path, than))
        return false;
    if (json)
        return kn_vision_input_read(s, c, false, in);
    *in = kn_vision_input_of(c);
    kn_vision_input_guess(in, kn_family_makes(c->family, &kn_vit_family));
    return kn_vision_input_check(in, c, path);
}
