/* tests/models/pretrained_test.c: image models in folders for torchvision and timm: the files, on
 * any number of ranks, in any dtype; scripts/peers vision-folders compares logits with theirs. */
#include "knap.h"
#include "models/pretrained_internal.h"
#include "tests/owned.h"
#include "tests/comm/comm_test.h"
#include "tests/failing.h"
#include "tests/models/temp.h"

#include <sys/wait.h>

enum { KINDS = 4, CLASSES = 3 };

static const kn_resnet_config resnets[] = {
    { .blocks = { 1, 1 }, .classes = CLASSES, .width = 2, .bottleneck = true },
    { .blocks = { 1, 1 }, .classes = CLASSES, .width = 2, .small_images = true },
    { .blocks = { 1, 1 }, .classes = CLASSES, .width = 2, .cifar = true, .channels = 1 },
};
static const kn_vit_config vit = { 1, 2, 4, 8, 4, CLASSES, 3, 0 };
static const char *const labels[] = { "cat", "a \"dog\"", "caf\xc3\xa9" };

typedef union any_net {
    kn_module base;
    kn_resnet resnet;
    kn_vit vit;
} any_net;

/* Classes 0: the configuration's. */
static bool init(any_net *n, int kind, int64_t classes)
{
    *n = (any_net){ 0 };
    kn_vit_config v = vit;
    v.classes = classes ? classes : CLASSES;
    if (kind == 3)
        return kn_vit_init(&n->vit, v, KN_F32, KN_META);
    kn_resnet_config r = resnets[kind];
    r.classes = v.classes;
    return kn_resnet_init(&n->resnet, r, KN_F32, KN_META);
}

static bool make(any_net *n, int kind, uint64_t seed)
{
    return init(n, kind, 0) &&
           kn_fsdp_wrap(n, NULL, .wrap_class = kind < 3 ? "resnet_block" : "vit_block",
                        .layout = KN_LAYOUT_RAGGED, .seed = seed);
}

static bool save(const char *dir, any_net *n, int kind, kn_dtype dtype, const kn_ema *ema)
{
    const kn_pretrained_save_options o = { .resnet = kind < 3 ? &resnets[kind] : NULL,
                                           .vit = kind < 3 ? NULL : &vit,
                                           .labels = labels,
                                           .dtype = dtype,
                                           .crop_pct = 0.875,
                                           .bicubic = true,
                                           .ema = ema };
    return kn_pretrained_save_(dir, n, o);
}

/* ---- what config.json says ------------------------------------------------------------------- */

/* timm's keys, which scripts/peers vision-folders gives to timm. */
KN_TEST(pretrained, configurations_are_timms)
{
    static const struct {
        const char *preset;
        bool small;
        const char *says[4];
    } known[] = {
        { "resnet18",
          false,
          { "\"architecture\": \"resnet18\"", "\"num_features\": 512", "\"global_pool\": \"avg\"",
            "\"first_conv\": \"conv1\"" } },
        { "resnet50",
          false,
          { "\"architecture\": \"resnet50\"", "\"num_features\": 2048", "\"classifier\": \"fc\"",
            "\"num_classes\": 2" } },
        { "resnet50", true, { "\"architecture\": \"knap_resnet50\"" } },
        { "resnet20", false, { "\"architecture\": \"knap_resnet20\"", "\"num_features\": 64" } },
        { "vit_tiny_patch16_224",
          false,
          { "\"architecture\": \"vit_tiny_patch16_224\"", "\"global_pool\": \"token\"",
            "\"first_conv\": \"patch_embed.proj\"", "\"classifier\": \"head\"" } },
        { "vit_cifar",
          false,
          { "\"architecture\": \"vit_base_patch16_224\"", "\"depth\": 6", "\"embed_dim\": 192",
            "\"fixed_input_size\": true" } },
    };
    static const char *const all[] = { "\"crop_mode\": \"center\"",
                                       "\"interpolation\": \"bicubic\"", "\"crop_pct\": 0.5",
                                       "\"label_names\": [\n    \"cat\",\n    \"dog\"\n  ]" };
    char label[2][KN_LABEL_SIZE] = { "cat", "dog" };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        const kn_vision_input in = { 3,   32,    2,   { 0.5, 0.5, 0.5 }, { 0.25, 0.5, 1 }, label,
                                     0.5, false, true };
        const kn_vision_sizes sizes = { 3, 32, 2, known[i].small, 8, 0 };
        kn_model_config c;
        KN_CHECK(kn_vision_preset(known[i].preset, &c) && kn_vision_fit(&c, &sizes));
        OWNED_HOST char *text = kn_pretrained_config_text(&c, &in);
        for (int k = 0; k < 4; k++) {
            KN_CHECK(text && strstr(text, all[k]), "%s: %s", all[k], text);
            if (known[i].says[k])
                KN_CHECK(strstr(text, known[i].says[k]) != NULL, "%s: %s", known[i].says[k], text);
        }
    }
}

/* Every tensor of a file: "name dtype[shape]" with spaces between them. */
static void describe_file(const char *path, char *text, size_t size)
{
    kn_safetensors *f = kn_safetensors_open(path);
    text[0] = '\0';
    for (int i = 0; f && i < kn_safetensors_count(f); i++) {
        kn_array a;
        char one[96];
        const char *name = kn_safetensors_name(f, i);
        KN_CHECK(kn_safetensors_describe(f, name, &a));
        const size_t n = strlen(text);
        snprintf(text + n, size - n, "%s%s %s", n ? " " : "", name,
                 kn_array_describe(&a, one, sizeof one));
    }
    KN_CHECK(f && strcmp(kn_safetensors_meta(f, "format"), "pt") == 0);
    kn_safetensors_close(f);
}

KN_TEST(pretrained, files_have_torchvisions_names)
{
    char path[300], text[4096];
    any_net n;
    kn_resnet_config r = { .blocks = { 1 }, .classes = 2, .width = 1, .bottleneck = true };
    KN_CHECK(kn_resnet_init(&n.resnet, r, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1));
    const char *dir = temp_path("names");
    KN_CHECK(kn_pretrained_save(dir, &n, .resnet = &r, .dtype = KN_F16));
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    describe_file(path, text, sizeof text);
#define NORM(name, n) name ".weight f16[" n "] " name ".bias f16[" n "] "
#define SEEN(name, n)                                                                              \
    name ".running_mean f16[" n "] " name ".running_var f16[" n "] " name                          \
         ".num_batches_tracked i64[] "
    static const char *const want = "conv1.weight f16[1,3,7,7] " NORM("bn1", "1");
    static const char *const parts[] = {
        "layer1.0.conv1.weight f16[1,1,1,1] ", "layer1.0.conv2.weight f16[1,1,3,3] ",
        "layer1.0.conv3.weight f16[4,1,1,1] ", "layer1.0.downsample.0.weight f16[4,1,1,1] ",
        "fc.weight f16[2,4] fc.bias f16[2]",   SEEN("bn1", "1"),
        SEEN("layer1.0.downsample.1", "4"),
    };
    KN_CHECK(strncmp(text, want, strlen(want)) == 0, "%s", text);
    strcat(text, " ");
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        KN_CHECK(strstr(text, parts[i]) != NULL, "%s: %s", parts[i], text);
    kn_module_free(&n);
}

/* ---- on ranks -------------------------------------------------------------------------------- */

/* Every parameter and float buffer of a is b's, rounded to dtype. */
static bool same_model(any_net *a, any_net *b, kn_dtype dtype)
{
    const kn_param *p;
    IN_SCOPE;
    int n = kn_params(a, &p);
    bool same = n > 0;
    for (int i = 0; same && i < n; i++) {
        float x[512], y[512];
        const int64_t count = p[i].numel;
        same = count <= 512 && kn_param_read(a, i, x) && kn_param_read(b, i, y);
        kn_tensor *r = kn_cast(kn_from(KN_F32, KN_CPU, x, KN_SHAPE(count)), dtype);
        r = kn_cast(r, KN_F32);
        same = same && memcmp(kn_data(r), y, (size_t)count * sizeof *x) == 0;
    }
    for (kn_walk w = kn_walk_begin(a); same && kn_next_buffer(&w);) {
        kn_tensor *other = kn_look_buffer(b, w.name);
        same = other && kn_item(kn_sum(kn_sub(kn_cast(w.tensor, KN_F64), kn_cast(other, KN_F64)), 0,
                                       NULL, false)) == 0;
    }
    return same && kn_ok();
}

/* Counters that aren't 0. */
static void count_batches(any_net *n)
{
    IN_SCOPE;
    for (kn_walk w = kn_walk_begin(n); kn_next_buffer(&w);)
        if (kn_dtype_of(w.tensor) == KN_I64)
            kn_copy_(w.tensor, kn_from(KN_I64, KN_CPU, (int64_t[]){ 7 }, 0, NULL));
}

static int there_and_back(kn_comm *world, void *arg)
{
    char(*dir)[256] = arg;
    const kn_dtype dtypes[] = { KN_F32, KN_BF16, KN_F16, KN_F64 };
    kn_set_threads(1);
    for (int kind = 0; kind < KINDS; kind++) {
        any_net a, b;
        const kn_dtype dtype = dtypes[kind];
        EXPECT(make(&a, kind, 1) && make(&b, kind, 2));
        count_batches(&a);
        EXPECT(save(dir[kind], &a, kind, dtype, NULL));
        kn_pretrained *p = kn_pretrained_open(dir[kind]);
        EXPECT(p != NULL);
        EXPECT(!kn_pretrained_resnet(p) == (kind == 3) && !kn_pretrained_vit(p) == (kind < 3));
        EXPECT(strcmp(kn_pretrained_label(p, 1), labels[1]) == 0);
        const kn_augment g = kn_pretrained_augment(p);
        const int64_t side = kind == 3 ? 8 : kind ? 32 : 224;
        EXPECT(g.center_crop[0] == side && g.resize[0] == side * 8 / 7 && g.bicubic);
        EXPECT(kn_pretrained_load(p, &b) && same_model(&a, &b, dtype), "kind %d", kind);
        kn_pretrained_free(p);
        kn_module_free(&a), kn_module_free(&b);
    }
    (void)world;
    return 0;
}

KN_TEST(pretrained, models_return_on_any_number_of_ranks)
{
    static char dir[KINDS][256];
    for (int k = 0; k < KINDS; k++)
        snprintf(dir[k], sizeof dir[k], "%s", temp_path((char[]){ 'a' + (char)k, '\0' }));
    for (int ranks = 1; ranks <= 4; ranks *= 2)
        on_ranks(ranks, there_and_back, dir);
}

/* ---- a folder that changes ------------------------------------------------------------------- */

/* What each of two ranks finds at the path "model", each in a folder of its own. */
typedef struct views {
    char at[2][256];
    bool opens;
} views;

static int see_others(kn_comm *world, void *arg)
{
    const views *v = arg;
    EXPECT(chdir(v->at[kn_rank(world)]) == 0);
    kn_pretrained *p = kn_pretrained_open("model");
    EXPECT((p != NULL) == v->opens && kn_ok() == v->opens, "%s", kn_ok() ? "opened" : kn_error());
    EXPECT(v->opens || strstr(kn_error(), "model"), "%s", kn_error());
    EXPECT(v->opens || !strstr(kn_error(), "collective"), "%s", kn_error());
    kn_clear_error();
    kn_pretrained_free(p);
    return 0;
}

/* Each kind against each: the first rank's view counts, and all ranks open that, or none. */
KN_TEST(pretrained, ranks_agree_on_what_a_folder_is)
{
    static const char *const kind[] = { "export", "run", "bare", "file", "empty", "none", "other" };
    any_net n, other;
    char path[256], names[CLASSES][KN_LABEL_SIZE] = { "cat", "dog", "ox" };
    kn_model_config c = { .family = &kn_vit_family };
    kn_vision_input in = { .channels = 3, .classes = CLASSES, .side = 8, .crop_pct = 1 };
    if (THREADS_ONLY)
        KN_SKIP("threads are in one folder");
    memcpy(c.of, &vit, sizeof vit);
    KN_CHECK(make(&n, 3, 1) && make(&other, 3, 2));
    for (int k = 0; k < 7; k++)
        KN_CHECK(mkdir(temp_path(kind[k]), 0777) == 0);
    KN_CHECK(save(temp_path("export/model"), &n, 3, KN_F32, NULL) &&
                 save(temp_path("other/model"), &other, 3, KN_F32, NULL), /* of one shape */
             "%s", kn_error());
    kn_vision_input_guess(&in, false);
    in.label = names;
    char *config = kn_vision_config_text(&c, &in);
    KN_CHECK(kn_checkpoint_save(temp_path("run/model"), &n, .step = 1, .config = config));
    kn_host_free(config);
    KN_CHECK(mkdir(temp_path("bare/model"), 0777) == 0 &&
             mkdir(temp_path("empty/model"), 0777) == 0);
    snprintf(path, sizeof path, "%s", temp_path("export/model/model.safetensors"));
    KN_CHECK(link(path, temp_path("bare/model/model.safetensors")) == 0 &&
             link(path, temp_path("file/model")) == 0);
    for (int a = 0; a < 7; a++)
        for (int b = 0; b < 7; b++) {
            static views v;
            snprintf(v.at[0], sizeof v.at[0], "%s", temp_path(kind[a]));
            snprintf(v.at[1], sizeof v.at[1], "%s", temp_path(kind[b]));
            v.opens = a == b && (a < 2 || a == 6); /* .model names none */
            on_ranks(2, see_others, &v);
        }
    kn_module_free(&n), kn_module_free(&other);
}

/* Two models of one shape in turn; the number of the one that failed, or 0. */
static int replace_often(const char *dir)
{
    any_net a, b;
    int failed = !make(&a, 3, 1) || !make(&b, 3, 2);
    for (int i = 1; i <= 100 && !failed; i++) {
        const double shade = i % 2;
        failed = kn_pretrained_save(dir, i % 2 ? &b : &a, .vit = &vit,
                                    .mean = { shade, shade, shade }, .std = { 1, 1, 1 })
                     ? 0
                     : i;
    }
    return failed;
}

/* What opens is one of the two, with its own configuration. */
KN_TEST(pretrained, a_model_that_is_replaced_meanwhile)
{
    any_net a, b, c;
    int status = -1, opened = 0;
    const char *dir = temp_path("replaced");
    if (THREADS_ONLY)
        KN_SKIP("another process exports");
    const pid_t exports = fork();
    if (exports == 0)
        _exit(replace_often(dir));
    KN_CHECK(exports > 0 && make(&a, 3, 1) && make(&b, 3, 2) && make(&c, 3, 3));
    for (bool over = false; !over;) {
        over = waitpid(exports, &status, WNOHANG) == exports;
        kn_pretrained *p = kn_pretrained_open(dir);
        if (p && kn_pretrained_load(p, &c)) {
            const bool second = kn_pretrained_augment(p).normalize.mean[0] != 0;
            KN_CHECK(same_model(&c, second ? &b : &a, KN_F32), "another's weights");
            opened++;
        }
        kn_pretrained_free(p);
        kn_clear_error(); /* it is being replaced */
    }
    KN_CHECK(status == 0 && opened > 0, "status %d, opened %d", status, opened);
    kn_module_free(&a), kn_module_free(&b), kn_module_free(&c);
}

/* The file has the averages, and the module goes on with its own values. */
static int averages(kn_comm *world, void *arg)
{
    any_net a, b;
    kn_set_threads(1);
    EXPECT(make(&a, 1, 1) && make(&b, 1, 2));
    kn_ema *ema = kn_ema_new(&a); /* of seed 1 */
    kn_pretrained *first = NULL;
    EXPECT(ema && save(arg, &b, 1, KN_F32, NULL)); /* of seed 2 */
    EXPECT((first = kn_pretrained_open(arg)) && kn_pretrained_load(first, &a));
    kn_pretrained_free(first);
    EXPECT(save(arg, &a, 1, KN_F32, ema) && same_model(&a, &b, KN_F32));
    kn_pretrained *p = kn_pretrained_open(arg);
    EXPECT(p && kn_pretrained_load(p, &b) && !same_model(&a, &b, KN_F32));
    EXPECT(kn_ema_swap(ema) && same_model(&a, &b, KN_F32) && kn_ema_swap(ema));
    kn_pretrained_free(p);
    kn_ema_free(ema);
    kn_module_free(&a), kn_module_free(&b);
    (void)world;
    return 0;
}

KN_TEST(pretrained, averages_are_saved)
{
    static char dir[256];
    snprintf(dir, sizeof dir, "%s", temp_path("ema"));
    on_ranks(2, averages, dir);
}

/* ---- another number of classes --------------------------------------------------------------- */

KN_TEST(pretrained, a_new_head_keeps_its_values)
{
    for (int kind = 0; kind < KINDS; kind += 3) {
        const char *dir = temp_path(kind ? "vit" : "resnet"), *head = kind ? "head" : "fc";
        char weight[32];
        any_net a, b;
        snprintf(weight, sizeof weight, "%s.weight", head);
        KN_CHECK(init(&a, kind, 0) && kn_materialize(&a, KN_CPU, 1) && init(&b, kind, 5) &&
                 kn_materialize(&b, KN_CPU, 2));
        KN_CHECK(save(dir, &a, kind, KN_F32, NULL));
        kn_pretrained *p = kn_pretrained_open(dir);
        KN_CHECK(p && !kn_pretrained_load(p, &b));
        KN_CHECK_ERROR("not f32[5");
        kn_scope scope = kn_scope_begin();
        const double before = kn_item(kn_sum(kn_module_param(&b, weight), 0, NULL, false));
        KN_CHECK(kn_pretrained_load(p, &b, .new_head = true));
        KN_CHECK(kn_item(kn_sum(kn_module_param(&b, weight), 0, NULL, false)) == before);
        const char *first = kind ? "patch_embed.proj.weight" : "conv1.weight";
        KN_CHECK(memcmp(kn_data(kn_module_param(&a, first)), kn_data(kn_module_param(&b, first)),
                        (size_t)kn_numel(kn_module_param(&a, first)) * 4) == 0);
        kn_scope_end(scope);
        kn_pretrained_free(p);
        kn_module_free(&a), kn_module_free(&b);
    }
}

/* ---- what may be overwritten, and when memory ends ------------------------------------------- */

KN_TEST(pretrained, only_exports_are_replaced)
{
    OWNED_MODULE any_net n;
    char dir[256];
    KN_CHECK(init(&n, 1, 0) && kn_materialize(&n, KN_CPU, 1));
    snprintf(dir, sizeof dir, "%s", temp_path("run"));
    KN_CHECK(kn_checkpoint_save(dir, &n));
    REFUSED(save(dir, &n, 1, KN_F32, NULL), "holds the checkpoint of a run");
    remove_temp();
    write_temp("model.safetensors", "x", 1);
    REFUSED(save(temp_path(""), &n, 1, KN_F32, NULL), "model.safetensors that Knap didn't export");
    write_temp("config.json", "{\"architecture\": \"resnet18\"}", 28);
    REFUSED(save(temp_path(""), &n, 1, KN_F32, NULL), "config.json that Knap didn't export");
    write_temp("config.json", "{\"knap\": {}}", 12);
    KN_CHECK(save(temp_path(""), &n, 1, KN_F32, NULL));
    REFUSED(kn_pretrained_save("/proc/none/x", &n, .resnet = &resnets[1]),
            "cannot make the folder");
    REFUSED(kn_pretrained_save(temp_path(""), &n, .resnet = &resnets[0]),
            "of other sizes than the configuration gives: 18 missing (layer1.0.conv3.weight");
    kn_resnet_config wider = resnets[1];
    wider.width = 4;
    REFUSED(kn_pretrained_save(temp_path(""), &n, .resnet = &wider), "mismatched (conv1.weight, ");
    REFUSED(kn_pretrained_save(temp_path(""), &n), "one of .resnet and .vit");
    *(float *)kn_data(kn_module_param(&n, "fc.bias")) = 1e6f;
    REFUSED(save(temp_path(""), &n, 1, KN_F16, NULL),
            "'fc.bias' holds a value that isn't a number in f16");
    *(float *)kn_data(kn_module_param(&n, "fc.bias")) = INFINITY;
    REFUSED(save(temp_path(""), &n, 1, KN_F32, NULL), "'fc.bias' holds a value that isn't finite");
    kn_pretrained *p = kn_pretrained_open(temp_path("")); /* the one before is still there */
    KN_CHECK(p != NULL);
    kn_pretrained_free(p);
}

/* The old configuration goes before the model, the new one comes after it. */
KN_TEST(pretrained, an_export_that_was_cut_off_is_refused_and_replaced)
{
    OWNED_MODULE any_net n;
    char config[256], new[256];
    KN_CHECK(init(&n, 1, 0) && kn_materialize(&n, KN_CPU, 1));
    KN_CHECK(save(temp_path(""), &n, 1, KN_F32, NULL));
    snprintf(config, sizeof config, "%s", temp_path("config.json"));
    snprintf(new, sizeof new, "%s", temp_path("config.json.new"));
    KN_CHECK(rename(config, new) == 0);
    REFUSED(kn_pretrained_open(temp_path("")), "an export into this folder didn't end");
    REFUSED(kn_pretrained_open(temp_path(""), .model = "resnet18"),
            "an export into this folder didn't end");
    KN_CHECK(save(temp_path(""), &n, 1, KN_F32, NULL));
    KN_CHECK(access(new, F_OK) != 0);
    kn_pretrained *p = kn_pretrained_open(temp_path(""));
    KN_CHECK(p != NULL);
    kn_pretrained_free(p);
}

static bool writes(void *net)
{
    return save(temp_path("memory"), net, 3, KN_BF16, NULL);
}

static bool reads(void *net)
{
    kn_pretrained *p = kn_pretrained_open(temp_path("memory"));
    const bool done = p && kn_pretrained_load(p, net);
    kn_pretrained_free(p);
    return done;
}

KN_TEST(pretrained, out_of_memory_anywhere)
{
    OWNED_MODULE any_net n;
    KN_CHECK(init(&n, 3, 0) && kn_materialize(&n, KN_CPU, 1) &&
             save(temp_path("memory"), &n, 3, KN_F32, NULL));
    each_allocation_fails(writes, NULL, &n, 30);
    each_allocation_fails(reads, NULL, &n, 30);
}
