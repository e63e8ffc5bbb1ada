/* models/vision_config.c: sizes of residual nets and vision transformers, and their configurations
 * in a checkpoint, which have the names of timm's config.json where that has one. */
#include "kernels/error.h"
#include "models/vision_internal.h"
#include "state/checkpoint_internal.h"
#include "tensor/json.h"

#include <stdio.h>
#include <string.h>

enum { STAGES = 4, MOST_BLOCKS = 10000, FILE_PATH = 4096 + 32 };
#define MOST_CHANNELS ((int64_t)1 << 24)
#define MOST_CLASSES  ((int64_t)1 << 30)

/* ---- sizes: residual nets -------------------------------------------------------------------- */

typedef struct resnet_preset {
    const char *name;
    int blocks[STAGES];
    bool bottleneck, cifar;
} resnet_preset;

/* Table 1 of arXiv:1512.03385; its nets for CIFAR have 6 n + 2 layers. */
static const resnet_preset resnets[] = {
    { "resnet18", { 2, 2, 2, 2 }, false, false },  { "resnet34", { 3, 4, 6, 3 }, false, false },
    { "resnet50", { 3, 4, 6, 3 }, true, false },   { "resnet101", { 3, 4, 23, 3 }, true, false },
    { "resnet152", { 3, 8, 36, 3 }, true, false }, { "resnet20", { 3, 3, 3 }, false, true },
    { "resnet32", { 5, 5, 5 }, false, true },      { "resnet44", { 7, 7, 7 }, false, true },
    { "resnet56", { 9, 9, 9 }, false, true },      { "resnet110", { 18, 18, 18 }, false, true },
};
enum { RESNETS = sizeof resnets / sizeof *resnets };

bool kn_resnet_preset(const char *name, kn_resnet_config *config)
{
    char list[256] = "";
    if (!config)
        return kn_fail("kn_resnet_preset: the place for the configuration is NULL");
    for (int i = 0; i < RESNETS; i++) {
        const resnet_preset *p = &resnets[i];
        if (name && strcmp(name, p->name) == 0) {
            *config = (kn_resnet_config){ .classes = p->cifar ? 10 : 1000,
                                          .channels = 3,
                                          .width = p->cifar ? 16 : 64,
                                          .bottleneck = p->bottleneck,
                                          .small_images = p->cifar,
                                          .cifar = p->cifar };
            memcpy(config->blocks, p->blocks, sizeof p->blocks);
            return true;
        }
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "", p->name);
    }
    return kn_fail("there is no residual net '%s'; there are %s", name ? name : "", list);
}

/* The number of stages; 0 with an error. */
static int count_stages(const kn_resnet_config *c)
{
    int n = 0;
    for (int k = 0; k < STAGES; k++) {
        if (c->blocks[k] < 0 || c->blocks[k] > MOST_BLOCKS) {
            kn_fail("resnet: stage %d has %d blocks, should have 0 to %d", k + 1, c->blocks[k],
                    MOST_BLOCKS);
            return 0;
        }
        if (c->blocks[k] > 0 && n < k) {
            kn_fail("resnet: stage %d has %d blocks behind a stage without any; a 0 ends the list",
                    k + 1, c->blocks[k]);
            return 0;
        }
        n += c->blocks[k] > 0;
    }
    return n || kn_fail("resnet: .blocks is {0}, should hold 1 to 4 numbers of blocks, such as {2, "
                        "2, 2, 2}")
               ? n
               : 0;
}

bool kn_resnet_config_check(kn_resnet_config *c)
{
    if (!c)
        return kn_fail("kn_resnet_config_check: the configuration is NULL");
    if (c->channels == 0)
        c->channels = 3;
    if (c->width == 0)
        c->width = c->cifar ? 16 : 64;
    c->small_images = c->small_images || c->cifar;
    if (c->cifar && c->bottleneck)
        return kn_fail("resnet: .cifar and .bottleneck contradict each other: shortcuts without "
                       "parameters are for blocks of two convolutions");
    return count_stages(c) > 0 &&
           ((c->channels >= 1 && c->channels <= MOST_CHANNELS && c->width >= 1 &&
             c->width <= MOST_CHANNELS && c->classes >= 1 && c->classes <= MOST_CLASSES) ||
            kn_fail("resnet: images of %lld channels, width %lld, %lld classes; all must be at "
                    "least 1",
                    (long long)c->channels, (long long)c->width, (long long)c->classes));
}

/* ---- sizes: vision transformers -------------------------------------------------------------- */

static const struct {
    const char *name;
    kn_vit_config config;
} vits[] = {
    { "vit_tiny_patch16_224", { 12, 3, 192, 224, 16, 1000, 3, 0 } },
    { "vit_small_patch16_224", { 12, 6, 384, 224, 16, 1000, 3, 0 } },
    { "vit_base_patch16_224", { 12, 12, 768, 224, 16, 1000, 3, 0 } },
    { "vit_large_patch16_224", { 24, 16, 1024, 224, 16, 1000, 3, 0 } },
    { "vit_small_patch32_224", { 12, 6, 384, 224, 32, 1000, 3, 0 } },
    { "vit_base_patch32_224", { 12, 12, 768, 224, 32, 1000, 3, 0 } },
    { "vit_cifar", { 6, 3, 192, 32, 4, 10, 3, 0 } },
};
enum { VITS = sizeof vits / sizeof *vits };

bool kn_vit_preset(const char *name, kn_vit_config *config)
{
    char list[256] = "";
    if (!config)
        return kn_fail("kn_vit_preset: the place for the configuration is NULL");
    for (int i = 0; i < VITS; i++) {
        if (name && strcmp(name, vits[i].name) == 0) {
            *config = vits[i].config;
            return true;
        }
        snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", i ? ", " : "",
                 vits[i].name);
    }
    return kn_fail("there is no vision transformer '%s'; there are %s", name ? name : "", list);
}

bool kn_vit_config_check(kn_vit_config *c)
{
    if (!c)
        return kn_fail("kn_vit_config_check: the configuration is NULL");
    if (c->channels == 0)
        c->channels = 3;
    if (c->layers < 1 || c->layers > MOST_BLOCKS || c->heads < 1 || c->embd < 1 ||
        c->embd > MOST_CHANNELS || c->image < 1 || c->image > 1 << 20 || c->patch < 1 ||
        c->classes < 1 || c->classes > MOST_CLASSES || c->channels < 1 ||
        c->channels > MOST_CHANNELS)
        return kn_fail("vit: %d layers, %d heads, %lld channels, images of %lld x %lld x %lld, "
                       "patches of %lld x %lld, %lld classes; all must be at least 1",
                       c->layers, c->heads, (long long)c->embd, (long long)c->channels,
                       (long long)c->image, (long long)c->image, (long long)c->patch,
                       (long long)c->patch, (long long)c->classes);
    if (c->embd % c->heads)
        return kn_fail("vit: %d heads don't divide %lld channels; choose another number of heads",
                       c->heads, (long long)c->embd);
    if (c->image % c->patch)
        return kn_fail("vit: patches of %lld don't divide images of %lld rows; choose another size",
                       (long long)c->patch, (long long)c->image);
    return (c->dropout >= 0 && c->dropout < 1) ||
           kn_fail("vit: dropout %g, should lie in [0, 1)", c->dropout);
}

/* ---- names ----------------------------------------------------------------------------------- */

const char *kn_resnet_name(const kn_resnet_config *c)
{
    for (int i = 0; i < RESNETS; i++)
        if (c->width == (resnets[i].cifar ? 16 : 64) && c->cifar == resnets[i].cifar &&
            c->bottleneck == resnets[i].bottleneck &&
            memcmp(c->blocks, resnets[i].blocks, sizeof c->blocks) == 0)
            return resnets[i].name;
    return NULL;
}

const char *kn_vit_name(const kn_vit_config *c)
{
    const char *same = NULL; /* but the patches */
    for (int i = 0; i < VITS; i++) {
        const kn_vit_config *p = &vits[i].config;
        if (p->layers != c->layers || p->heads != c->heads || p->embd != c->embd)
            continue;
        if (p->patch == c->patch)
            return vits[i].name;
        same = same ? same : vits[i].name;
    }
    return same;
}

/* ---- to text --------------------------------------------------------------------------------- */

/* Writes j into buf[size]; takes j over. */
static const char *text_of(json_t *j, char *buf, size_t size, const char *function)
{
    size_t n = j ? json_dumpb(j, buf, size - 1, 0) : 0;
    json_decref(j);
    if (n == 0 || n >= size) {
        kn_fail("%s: no memory, or a configuration that isn't finite", function);
        return NULL;
    }
    buf[n] = '\0';
    return buf;
}

const char *kn_resnet_config_text(const kn_resnet_config *config, char buf[KN_RESNET_CONFIG_TEXT])
{
    if (!config || !buf) {
        kn_fail("kn_resnet_config_text: the %s is NULL", config ? "buffer" : "configuration");
        return NULL;
    }
    kn_resnet_config c = *config;
    if (!kn_resnet_config_check(&c))
        return NULL;
    const int *b = c.blocks;
    int64_t features = (c.width << (count_stages(&c) - 1)) * (c.bottleneck ? 4 : 1);
    json_t *j =
        json_pack("{s:s, s:s*, s:[i,i,i,i], s:I, s:I, s:I, s:I, s:b, s:b, s:b, s:b}", "model_type",
                  "resnet", "architecture", c.small_images ? NULL : kn_resnet_name(&c), "blocks",
                  b[0], b[1], b[2], b[3], "num_classes", (json_int_t)c.classes, "in_chans",
                  (json_int_t)c.channels, "width", (json_int_t)c.width, "num_features",
                  (json_int_t)features, "bottleneck", (int)c.bottleneck, "small_images",
                  (int)c.small_images, "cifar", (int)c.cifar, "plain_gamma", (int)c.plain_gamma);
    return text_of(j, buf, KN_RESNET_CONFIG_TEXT, "kn_resnet_config_text");
}

const char *kn_vit_config_text(const kn_vit_config *config, char buf[KN_VIT_CONFIG_TEXT])
{
    if (!config || !buf) {
        kn_fail("kn_vit_config_text: the %s is NULL", config ? "buffer" : "configuration");
        return NULL;
    }
    kn_vit_config c = *config;
    if (!kn_vit_config_check(&c))
        return NULL;
    /* timm's sizes all come from model_args; the name chooses the class */
    json_t *j = json_pack("{s:s, s:s, s:I, s:I, s:f, s:{s:I, s:I, s:I, s:I, s:i, s:i}}",
                          "model_type", "vit", "architecture", "vit_base_patch16_224",
                          "num_classes", (json_int_t)c.classes, "num_features", (json_int_t)c.embd,
                          "dropout", c.dropout, "model_args", "img_size", (json_int_t)c.image,
                          "patch_size", (json_int_t)c.patch, "in_chans", (json_int_t)c.channels,
                          "embed_dim", (json_int_t)c.embd, "depth", c.layers, "num_heads", c.heads);
    return text_of(j, buf, KN_VIT_CONFIG_TEXT, "kn_vit_config_text");
}

/* ---- from text ------------------------------------------------------------------------------- */

bool kn_json_int(kn_json_source s, const char *key, int64_t low, int64_t high, int64_t *value)
{
    const json_t *v = json_object_get(s.object, key);
    *value = json_integer_value(v);
    return (json_is_integer(v) && *value >= low && *value <= high) ||
           kn_fail("%s: \"%s\" of the model is missing or not a whole number from %lld to %lld; "
                   "the file is damaged",
                   s.file, key, (long long)low, (long long)high);
}

/* The model's configuration in c, to be freed with json_decref; NULL with an error where it is of
 * another type than this. */
static json_t *saved_object(const kn_checkpoint *c, const char *type, const char *noun)
{
    const char *text = kn_checkpoint_config(c);
    json_error_t error;
    json_t *m = text ? kn_json_parse(text, strlen(text), 0, "a configuration", &error) : NULL;
    if (!m) {
        if (kn_ok())
            kn_fail("%s: no memory", type);
        return NULL;
    }
    const char *is_type = json_string_value(json_object_get(m, "model_type"));
    if (is_type && strcmp(is_type, type) == 0)
        return m;
    char shown[KN_LABEL_SIZE];
    kn_vision_label(shown, is_type ? is_type : "");
    kn_fail("%s/state.json: the model is %s%s, not a %s", kn_checkpoint_folder(c),
            is_type ? "a " : "of an unknown kind", shown, noun);
    json_decref(m);
    return NULL;
}

bool kn_resnet_config_read(kn_json_source s, kn_resnet_config *c)
{
    const json_t *blocks = json_object_get(s.object, "blocks");
    for (int k = 0; k < STAGES; k++) {
        const json_t *n = json_array_get(blocks, (size_t)k);
        if (!json_is_integer(n) || json_integer_value(n) < 0 || json_integer_value(n) > MOST_BLOCKS)
            return kn_fail("%s: \"blocks\" of the model doesn't hold four whole numbers from 0 to "
                           "%d; the file is damaged",
                           s.file, MOST_BLOCKS);
        c->blocks[k] = (int)json_integer_value(n);
    }
    c->bottleneck = json_is_true(json_object_get(s.object, "bottleneck"));
    c->small_images = json_is_true(json_object_get(s.object, "small_images"));
    c->cifar = json_is_true(json_object_get(s.object, "cifar"));
    c->plain_gamma = json_is_true(json_object_get(s.object, "plain_gamma"));
    return kn_json_int(s, "num_classes", 1, MOST_CLASSES, &c->classes) &&
           kn_json_int(s, "in_chans", 1, MOST_CHANNELS, &c->channels) &&
           kn_json_int(s, "width", 1, MOST_CHANNELS, &c->width) && kn_resnet_config_check(c);
}

/* Compares the model of state.json with the tensors before memory is allocated by it. */
static bool check_saved(const kn_checkpoint *c, const kn_vision_config *read)
{
    char than[FILE_PATH];
    snprintf(than, sizeof than, "%s/state.json gives", c->dir);
    return c->model ? kn_vision_check(read, c->model, c->dir, than)
                    : kn_fail("%s holds no tensors; the checkpoint is damaged", c->dir);
}

bool kn_resnet_config_saved(const kn_checkpoint *c, kn_resnet_config *config)
{
    kn_resnet_config read = { 0 };
    json_t *m = saved_object(c, "resnet", "residual net");
    if (!m)
        return false;
    bool ok = config || kn_fail("kn_resnet_config_saved: the place for the configuration is NULL");
    char file[FILE_PATH];
    snprintf(file, sizeof file, "%s/state.json", kn_checkpoint_folder(c));
    ok = ok && kn_resnet_config_read((kn_json_source){ m, file }, &read) &&
         check_saved(c, &(kn_vision_config){ .family = &kn_resnet_family, .resnet = read });
    json_decref(m);
    if (ok)
        *config = read;
    return ok;
}

bool kn_vit_config_read(kn_json_source s, kn_vit_config *c)
{
    const kn_json_source sizes = { json_object_get(s.object, "model_args"), s.file };
    int64_t layers, heads;
    if (!kn_json_int(s, "num_classes", 1, MOST_CLASSES, &c->classes) ||
        !kn_json_int(sizes, "img_size", 1, 1 << 20, &c->image) ||
        !kn_json_int(sizes, "patch_size", 1, 1 << 20, &c->patch) ||
        !kn_json_int(sizes, "in_chans", 1, MOST_CHANNELS, &c->channels) ||
        !kn_json_int(sizes, "embed_dim", 1, MOST_CHANNELS, &c->embd) ||
        !kn_json_int(sizes, "depth", 1, MOST_BLOCKS, &layers) ||
        !kn_json_int(sizes, "num_heads", 1, MOST_BLOCKS, &heads))
        return false;
    c->layers = (int)layers;
    c->heads = (int)heads;
    c->dropout = json_number_value(json_object_get(s.object, "dropout"));
    return kn_vit_config_check(c);
}

bool kn_vit_config_saved(const kn_checkpoint *c, kn_vit_config *config)
{
    kn_vit_config read = { 0 };
    json_t *m = saved_object(c, "vit", "vision transformer");
    if (!m)
        return false;
    bool ok = config || kn_fail("kn_vit_config_saved: the place for the configuration is NULL");
    char file[FILE_PATH];
    snprintf(file, sizeof file, "%s/state.json", kn_checkpoint_folder(c));
    ok = ok && kn_vit_config_read((kn_json_source){ m, file }, &read) &&
         check_saved(c, &(kn_vision_config){ .family = &kn_vit_family, .vit = read });
    json_decref(m);
    if (ok)
        *config = read;
    return ok;
}
