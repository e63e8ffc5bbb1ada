/* tests/models/pretrained_input_test.c: files of strangers: timm's config.json in its forms, state
 * dictionaries without one, and what is refused, in sentences that name the key or the tensor. */
#include "knap.h"
#include "models/pretrained_internal.h"
#include "tests/kn_test.h"
#include "tests/models/temp.h"

enum { CLASSES = 3 };

/* ---- config.json ----------------------------------------------------------------------------- */

static const char timms[] =
    "{\"architecture\": \"vit_tiny_patch16_224.augreg\", \"num_classes\": 3, \"num_features\": 4, "
    "\"global_pool\": \"token\", \"label_names\": [\"a\", \"b\\u001b[31m\", \"c\"], "
    "\"model_args\": {\"img_size\": [8, 8], \"patch_size\": 4, \"embed_dim\": 4, \"depth\": 1, "
    "\"num_heads\": 2, \"in_chans\": 3, \"dynamic_img_size\": false}, "
    "\"pretrained_cfg\": {\"input_size\": [3, 8, 8], \"interpolation\": \"bilinear\", "
    "\"crop_pct\": 0.8, \"crop_mode\": \"squash\", \"mean\": [0.5, 0.25, 0.5], "
    "\"std\": [0.5, 0.5, 2], \"pool_size\": null, \"num_classes\": 3, \"classifier\": \"head\"}}";

/* A folder with a small vision transformer; its config.json is then written by write_temp. */
static const char *vit_folder(void)
{
    const kn_vit_config vit = { 1, 2, 4, 8, 4, CLASSES, 3, 0 };
    kn_vit n = { 0 };
    write_temp("config.json", "{\"knap\": {}}", 12);
    KN_CHECK(kn_vit_init(&n, vit, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1) &&
             kn_pretrained_save(temp_path(""), &n, .vit = &vit));
    kn_module_free(&n);
    static char dir[256];
    snprintf(dir, sizeof dir, "%s", temp_path(""));
    return dir;
}

static void write_config(const char *from, const char *to)
{
    char text[4096];
    const char *at = from ? strstr(timms, from) : NULL;
    KN_CHECK(!from || at, "no %s", from);
    const int n = snprintf(text, sizeof text, "%.*s%s%s", at ? (int)(at - timms) : 0, timms,
                           at ? to : "", at ? at + strlen(from) : timms);
    write_temp("config.json", text, (size_t)n);
}

KN_TEST(pretrained_input, timms_configurations)
{
    static const struct {
        const char *from, *to, *label;
        double crop, mean, std;
        bool bicubic, squash;
    } good[] = {
        { NULL, NULL, "b?[31m", 0.8, 0.25, 2, false, true },
        { "\"label_names\"", "\"other\"", NULL, 0.8, 0.25, 2, false, true },
        { "[\"a\", \"b\\u001b[31m\", \"c\"]", "{\"0\": \"x\", \"2\": \"y\"}", "class 1", 0.8, 0.25,
          2, false, true },
        { "\"mean\"", "\"other\"", "b?[31m", 0.8, 0.456, 2, false, true },
        { "\"interpolation\": \"bilinear\", \"crop_pct\": 0.8, \"crop_mode\": \"squash\", ", "",
          "b?[31m", 0.875, 0.25, 2, true, false },
        { "\"pretrained_cfg\": {", "\"classifier\": \"head\", \"x\": {\"y\": 1}, \"z\": {",
          "b?[31m", 0.875, 0.456, 0.225, true, false },
    };
    const char *dir = vit_folder();
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        write_config(good[i].from, good[i].to);
        kn_pretrained *p = kn_pretrained_open(dir);
        KN_CHECK(p != NULL, "%zu", i);
        const kn_vit_config *v = kn_pretrained_vit(p);
        KN_CHECK(v && v->image == 8 && v->heads == 2 && v->classes == CLASSES);
        const char *label = kn_pretrained_label(p, 1);
        KN_CHECK(good[i].label ? label && strcmp(label, good[i].label) == 0 : !label, "%zu: %s", i,
                 label ? label : "none");
        const kn_augment a = kn_pretrained_augment(p);
        const int64_t side = (int64_t)(8 / good[i].crop);
        KN_CHECK(a.resize[0] == side && a.resize[1] == (good[i].squash ? side : 0) &&
                     a.center_crop[0] == 8 && a.bicubic == good[i].bicubic,
                 "%zu: %d %d", i, (int)a.resize[0], (int)a.resize[1]);
        KN_CHECK(a.normalize.mean[1] == good[i].mean && a.normalize.std[2] == good[i].std, "%zu",
                 i);
        kn_pretrained_free(p);
    }
}

static const struct {
    const char *from, *to, *error;
} bad[] = {
    { "3, \"num_f", "1000000000, \"num_f", "\"num_classes\" isn't 3" },
    { "\"num_classes\": 3, \"num_f", "\"num_classes\": \"3\", \"num_f", "\"num_classes\" isn't 3" },
    { "\"depth\": 1", "\"depth\": 2", "at least 24 tensors" },
    { "\"depth\": 1", "\"depth\": 10000", "at least 120000 tensors" },
    { "\"depth\": 1", "\"depth\": 10001", "whole number from 1 to 10000" },
    { "\"depth\": 1", "\"depth\": 1e400", "no JSON object" },
    { "\"depth\": 1", "\"depth\": 99999999999999999999", "no JSON object" },
    { "\"num_heads\": 2", "\"num_heads\": 3", "3 heads don't divide 4 channels" },
    { "\"num_heads\": 2, ", "", "must tell the heads" },
    { "\"embed_dim\": 4", "\"embed_dim\": 1000000000", "\"embed_dim\" isn't 4" },
    { "\"patch_size\": 4", "\"patch_size\": 2", "\"patch_size\" isn't 4" },
    { "\"in_chans\": 3", "\"in_chans\": 1", "\"in_chans\" isn't 3" },
    { "false", "true", "\"dynamic_img_size\", which Knap's models don't have" },
    { "\"token\"", "\"avg\"", "\"global_pool\" isn't \"token\"" },
    { "\"vit_tiny_patch16_224.augreg\"", "17", "\"architecture\" is missing or no text" },
    { "\"architecture\"", "\"model\"", "\"architecture\" is missing or no text" },
    { "vit_tiny_patch16_224.augreg", "\\u001bswin", "no image model '?swin'" },
    { "vit_tiny_patch16_224.augreg", "resnet50", "no tensor 'conv1.weight'" },
    { "\"num_features\"", "\"knap\": {\"model_type\": \"gpt2\"}, \"x\"", "no kind of image" },
    { "\"num_features\"", "\"knap\": {\"model_type\": \"vit\"}, \"x\"", "\"num_classes\" of the" },
    { "\"pretrained_cfg\": {", "\"pretrained_cfg\": [], \"x\": {", "is no object" },
    { "[3, 8, 8]", "[3, 16, 16]", "takes images of 3 x 8 x 8" },
    { "[3, 8, 8]", "[3, 1e9, 8]", "each from 1 to 4096" },
    { "[3, 8, 8]", "7", "each from 1 to 4096" },
    { "[0.5, 0.25, 0.5]", "[0.5, NaN, 0.5]", "no JSON object" },
    { "[0.5, 0.25, 0.5]", "[0.5, \"x\", 0.5]", "doesn't hold 3 numbers" },
    { "[0.5, 0.5, 2]", "[0.5, 0.5, 0]", "0.5 and 0; std should be above 0" },
    { "[0.5, 0.5, 2]", "[0.5, 0.5, 2, 2]", "doesn't hold 3 numbers" },
    { "\"crop_pct\": 0.8", "\"crop_pct\": 0", "crop_pct is 0, should lie" },
    { "\"crop_pct\": 0.8", "\"crop_pct\": 1e-300", "crop_pct is 1e-300" },
    { "\"bilinear\"", "\"lanczos\"", "is \"lanczos\"; bilinear and bicubic" },
    { "\"bilinear\"", "7", "is \"no text\"" },
    { "\"squash\"", "\"b\\u0007order\"", "is \"b?order\"; center and squash" },
    { "[\"a\", \"b\\u001b[31m\", \"c\"]", "[\"a\"]", "aren't 3 names" },
    { "[\"a\", \"b\\u001b[31m\", \"c\"]", "\"abc\"", NULL },
    { "{\"arch", "[{\"arch", "no JSON object" },
    { "{\"arch", "{\"num_classes\": 3, \"arch", "no JSON object" }, /* a key twice */
};

KN_TEST(pretrained_input, damaged_configurations)
{
    const char *dir = vit_folder();
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        write_config(bad[i].from, bad[i].to);
        kn_pretrained *p = kn_pretrained_open(dir);
        KN_CHECK(!p == (bad[i].error != NULL), "%s", bad[i].to);
        if (bad[i].error)
            KN_CHECK_ERROR(bad[i].error);
        kn_pretrained_free(p);
    }
}

/* Memory stays within the file's size and a constant: depth and number of values are bounded. */
KN_TEST(pretrained_input, large_configurations)
{
    const size_t size = 3u << 20;
    OWNED_BYTES char *text = malloc(size);
    const char *dir = vit_folder();
    for (int kind = 0; kind < 3; kind++) {
        memset(text, '[', size);
        for (size_t i = 0; kind > 0 && i + 3 < size; i += 3)
            memcpy(text + i, kind == 1 ? "[]," : "{},", 3);
        text[0] = kind ? '[' : '{';
        write_temp("config.json", text, kind ? size : 10000);
        REFUSED(kn_pretrained_open(dir), kind ? "262144 values" : "no JSON object");
    }
    write_temp("config.json", "", 0);
    REFUSED(kn_pretrained_open(dir), "empty");
    KN_CHECK(truncate(temp_path("config.json"), ((off_t)1 << 26) + 1) == 0);
    REFUSED(kn_pretrained_open(dir), "67108864 bytes");
}

/* ---- state dictionaries ---------------------------------------------------------------------- */

enum { MISSING = 1, OTHER, SHAPE, KIND, NOT_FINITE, NO_COUNTERS };

/* Writes a ResNet-20 for 4 classes, which tensor name is changed in. */
static const char *write_state(const char *name, int change)
{
    const kn_vision_sizes sizes = { .channels = 3, .side = 32, .classes = 4 };
    static float values[2 + 65 * 64 * 9] = { 0.5f };
    static const int64_t counter[4];
    kn_safetensors_entry entry[200];
    kn_model_tensors t;
    kn_model_config c;
    kn_module m = { 0 };
    int n = 0;
    KN_CHECK(kn_vision_preset("resnet20", &c) && kn_vision_fit(&c, &sizes) &&
             kn_config_init(&m, &c, KN_F32, KN_META) && kn_model_tensors_make(&t, &m) &&
             t.count + 1 < 200);
    values[1] = change == NOT_FINITE ? NAN : 1;
    for (int i = 0; i < t.count; i++) {
        kn_safetensors_entry *e = &entry[n];
        *e = t.entry[i];
        const bool counts = e->dtype == KN_I64, is = strcmp(e->name, name) == 0;
        e->data = counts ? (const void *)counter : values + (is && change == NOT_FINITE ? 1 : 2);
        if (is && change == SHAPE)
            e->shape[0]++;
        if (is && change == KIND)
            e->dtype = KN_I32;
        n += !(is && change == MISSING) && !(counts && change == NO_COUNTERS);
    }
    if (change == OTHER) {
        entry[n] = entry[0];
        entry[n++].name = name;
    }
    const char *path = temp_path("state.safetensors");
    KN_CHECK(kn_safetensors_save(path, entry, n, NULL, 0));
    kn_model_tensors_free(&t);
    kn_module_free(&m);
    return path;
}

KN_TEST(pretrained_input, state_dictionaries)
{
    static const struct {
        const char *name;
        int change;
        const char *model, *error;
    } state[] = {
        { "", 0, "resnet20", NULL },
        { "", NO_COUNTERS, "resnet20", NULL },
        { "", 0, NULL, "doesn't say which model it is" },
        { "", 0, "resnet21", "no image model 'resnet21'" },
        { "", 0, "vit_cifar", "no tensor 'patch_embed.proj.weight'" },
        { "", 0, "resnet32", "at least 150 tensors" },
        { "", 0, "resnet18", "other sizes than a resnet18 has: " },
        { "layer2.1.bn1.running_mean", MISSING, "resnet20",
          "1 missing (layer2.1.bn1.running_mean)" },
        { "fc.weight", MISSING, "resnet20", "no tensor 'fc.weight'" },
        { "x\033[2J", OTHER, "resnet20", "1 unexpected (x?[2J)" },
        { "layer3.2.conv2.weight", SHAPE, "resnet20",
          "(layer3.2.conv2.weight): it is f32[65,64,3,3], not f32[64,64,3,3]" },
        { "layer1.0.bn2.bias", KIND, "resnet20",
          "1 mismatched (layer1.0.bn2.bias): it is i32[16]" },
        { "layer1.2.conv1.weight", NOT_FINITE, "resnet20",
          "'layer1.2.conv1.weight' holds a value that isn't finite" },
    };
    for (size_t i = 0; i < sizeof state / sizeof *state; i++) {
        kn_module m = { 0 };
        kn_pretrained *p = kn_pretrained_open(write_state(state[i].name, state[i].change),
                                              .model = state[i].model);
        const kn_model_config *c = p ? kn_pretrained_config(p) : NULL;
        const bool ok = c && kn_config_init(&m, c, KN_F32, KN_META) &&
                        kn_materialize(&m, KN_CPU, 1) && kn_pretrained_load(p, &m);
        KN_CHECK(ok == !state[i].error, "%s: %s", state[i].name, kn_ok() ? "loaded" : kn_error());
        if (state[i].error)
            KN_CHECK_ERROR(state[i].error);
        if (c)
            KN_CHECK(kn_config_get(c, "classes", 0) == 4 &&
                     kn_pretrained_augment(p).center_crop[0] == 32 && !kn_pretrained_label(p, 3));
        if (c)
            kn_module_free(&m);
        kn_pretrained_free(p);
    }
}

KN_TEST(pretrained_input, places_without_a_model)
{
    REFUSED(kn_pretrained_open("/proc/none"), "cannot open /proc/none");
    write_temp("pytorch_model.bin", "x", 1);
    REFUSED(kn_pretrained_open(temp_path("")), "write its pytorch_model.bin again");
    write_temp("model.safetensors", "x", 1);
    REFUSED(kn_pretrained_open(temp_path("")), "doesn't say which model it is");
    REFUSED(kn_pretrained_open(temp_path(""), .model = "resnet18"), "not a safetensors file");
    remove_temp();
    kn_pretrained *p = NULL;
    const char *dir = vit_folder();
    REFUSED(kn_pretrained_open(dir, .model = "vit_cifar"), "not a vit_cifar; leave the name out");
    KN_CHECK((p = kn_pretrained_open(dir)) != NULL && !kn_pretrained_label(p, 0) && kn_ok());
    REFUSED(kn_pretrained_label(p, 3), "there is no class 3; the model has 3");
    kn_pretrained_free(p);
}
