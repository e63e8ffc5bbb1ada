/* tests/models/vision_test.c: residual nets and vision transformers: sizes, training, recompute,
 * configurations in a checkpoint, errors; vision_golden_test.c compares their numbers. */
#include "kernels/faults.h"
#include "models/resnet.h"
#include "models/vit.h"
#include "optim/optim.h"
#include "tests/kn_test.h"
#include "tests/models/temp.h"

static const kn_resnet_config small_resnet = { .blocks = { 1, 2 }, .classes = 5, .width = 4 };
static const kn_resnet_config bottlenecks = {
    .blocks = { 1, 1 }, .classes = 5, .width = 2, .bottleneck = true
};
static const kn_resnet_config cifar = {
    .blocks = { 1, 1, 1 }, .classes = 5, .width = 2, .cifar = true
};
static const kn_vit_config small_vit = {
    .layers = 2, .heads = 2, .embd = 8, .image = 16, .patch = 8, .classes = 5
};

typedef union any_net {
    kn_module base;
    kn_resnet resnet;
    kn_vit vit;
} any_net;

enum { KINDS = 4 };

static bool init(any_net *n, int kind, kn_dtype dtype, kn_device device)
{
    const kn_resnet_config *r[] = { &small_resnet, &bottlenecks, &cifar };
    return kind < 3 ? kn_resnet_init(&n->resnet, *r[kind], dtype, device)
                    : kn_vit_init(&n->vit, small_vit, dtype, device);
}

static void recompute(any_net *n, int kind)
{
    if (kind < 3)
        kn_resnet_recompute(&n->resnet, true);
    else
        kn_vit_recompute(&n->vit, true);
}

static kn_tensor *images(int64_t n)
{
    float x[8 * 3 * 16 * 16];
    for (int64_t i = 0; i < n * 768; i++)
        x[i] = (float)((i * 37 + i / 768 * 11) % 101) / 50 - 1;
    return kn_from(KN_F32, KN_CPU, x, KN_SHAPE(n, 3, 16, 16));
}

static kn_tensor *labels(int64_t n)
{
    int64_t y[8];
    for (int64_t i = 0; i < n; i++)
        y[i] = (3 * i + 1) % 5;
    return kn_from(KN_I64, KN_CPU, y, KN_SHAPE(n));
}

KN_TEST(vision, preset_sizes_are_those_of_torchvision_timm_and_the_paper)
{
    const struct {
        const char *name;
        int64_t count;
    } known[] = { { "resnet18", 11689512 },
                  { "resnet34", 21797672 },
                  { "resnet50", 25557032 },
                  { "resnet101", 44549160 },
                  { "resnet152", 60192808 },
                  { "resnet20", 269722 },
                  { "resnet32", 464154 },
                  { "resnet44", 658586 },
                  { "resnet56", 853018 },
                  { "resnet110", 1727962 },
                  { "vit_tiny_patch16_224", 5717416 },
                  { "vit_small_patch16_224", 22050664 },
                  { "vit_base_patch16_224", 86567656 },
                  { "vit_large_patch16_224", 304326632 },
                  { "vit_small_patch32_224", 22878952 },
                  { "vit_base_patch32_224", 88224232 },
                  { "vit_cifar", 2693578 } };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        any_net n = { 0 };
        kn_resnet_config r;
        kn_vit_config v;
        const char *name = known[i].name;
        bool ok = name[0] == 'v'
                      ? kn_vit_preset(name, &v) && kn_vit_init(&n.vit, v, KN_F32, KN_META)
                      : kn_resnet_preset(name, &r) && kn_resnet_init(&n.resnet, r, KN_F32, KN_META);
        KN_CHECK(ok, "%s: %s", name, kn_error());
        KN_CHECK(kn_param_count(&n) == known[i].count, "%s: %lld", name,
                 (long long)kn_param_count(&n));
        kn_module_free(&n);
    }
    kn_resnet_config r;
    kn_vit_config v;
    KN_CHECK(!kn_resnet_preset("resnet19", &r));
    KN_CHECK_ERROR("resnet18, resnet34");
    KN_CHECK(!kn_vit_preset("vit", &v));
    KN_CHECK_ERROR("vit_base_patch32_224, vit_cifar");
}

/* At first each block is its shortcut, since its last batch norm multiplies by 0. */
KN_TEST(vision, residual_blocks_begin_as_their_shortcuts)
{
    for (int kind = 0; kind < 3; kind++) {
        any_net n = { 0 };
        KN_CHECK(init(&n, kind, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1), "%s",
                 kn_error());
        kn_scope s = kn_scope_begin();
        kn_tensor *gamma =
            kn_module_param(&n, kind == 1 ? "layer1.0.bn3.weight" : "layer1.0.bn2.weight");
        KN_CHECK(kn_item(kn_sum(kn_abs(gamma), 0, NULL, false)) == 0);
        kn_tensor *w = kn_module_param(&n, "conv1.weight"); /* variance 2 / fan_out */
        double want = sqrt(2.0 / (double)(kn_numel(w) / 3));
        double deviation = kn_item(kn_std(w, 0, NULL, false));
        KN_CHECK(fabs(deviation / want - 1) < 0.25, "%g, not %g", deviation, want);
        kn_scope_end(s);
        kn_module_free(&n);
    }
}

KN_TEST(vision, a_loss_falls_in_each_dtype)
{
    const kn_dtype dtype[] = { KN_F32, KN_F64 };
    for (int k = 0; k < KINDS * 2; k++) {
        any_net n = { 0 };
        double first = 0, last = 0;
        KN_CHECK(init(&n, k / 2, dtype[k % 2], KN_META) && kn_materialize(&n, KN_CPU, 1), "%s",
                 kn_error());
        kn_optim *o = kn_adamw(&n, .lr = 1e-2);
        for (int step = 0; step < 30; step++) {
            kn_scope s = kn_scope_begin();
            kn_tensor *x = kn_cast(images(8), dtype[k % 2]);
            kn_tensor *loss = kn_cross_entropy(kn_call(&n, x), labels(8));
            last = kn_item(loss);
            first = step ? first : last;
            KN_CHECK(kn_backward(loss) && kn_step(o), "%s", kn_error());
            kn_scope_end(s);
        }
        KN_CHECK(last < 0.9 * first, "kind %d, dtype %d: %g -> %g", k / 2, k % 2, first, last);
        kn_optim_free(o);
        kn_module_free(&n);
    }
}

static int64_t tracked(any_net *n)
{
    kn_tensor *t = kn_module_has(n, "bn1.num_batches_tracked")
                       ? kn_module_buffer(n, "bn1.num_batches_tracked")
                       : NULL;
    return t ? *(int64_t *)kn_data(t) : 1;
}

/* A block that keeps only its input gives the same bits, and counts the batch once. */
KN_TEST(vision, recompute_gives_the_same_gradients)
{
    for (int kind = 0; kind < KINDS; kind++) {
        const char *name = kind < 3 ? "conv1.weight" : "patch_embed.proj.weight";
        float grad[2][64 * 3 * 49];
        size_t bytes = 0;
        for (int again = 0; again < 2; again++) {
            any_net n = { 0 };
            KN_CHECK(init(&n, kind, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1));
            if (again)
                recompute(&n, kind);
            kn_scope s = kn_scope_begin();
            KN_CHECK(kn_backward(kn_cross_entropy(kn_call(&n, images(4)), labels(4))), "%s",
                     kn_error());
            kn_tensor *g = kn_grad(kn_module_param(&n, name));
            bytes = (size_t)kn_numel(g) * sizeof(float);
            KN_CHECK(bytes <= sizeof grad[0] && kn_to_host(g, grad[again], bytes), "%s",
                     kn_error());
            KN_CHECK(tracked(&n) == 1);
            kn_scope_end(s);
            kn_module_free(&n);
        }
        KN_CHECK(memcmp(grad[0], grad[1], bytes) == 0, "kind %d", kind);
    }
}

/* With every allocation failing in turn: a standing error, nothing leaked. */
KN_TEST(vision, out_of_memory_anywhere)
{
    for (int kind = 0; kind < KINDS; kind++) {
        int64_t live = kn_live_tensors(), k = 1;
        for (bool done = false; !done; k++) {
            any_net n = { 0 };
            kn_fail_alloc(k);
            done = init(&n, kind, KN_F32, KN_META);
            kn_fail_alloc(0);
            KN_CHECK(done == kn_ok(), "kind %d, allocation %lld: %s", kind, (long long)k,
                     kn_ok() ? "none" : kn_error());
            kn_clear_error();
            if (done)
                kn_module_free(&n);
            KN_CHECK(kn_live_tensors() == live, "allocation %lld leaks", (long long)k);
        }
        KN_CHECK(k > 30, "only %lld allocations", (long long)k);
    }
}

KN_TEST(vision, refuses_bad_input)
{
    const struct {
        kn_resnet_config c;
        const char *error;
    } resnet[] = {
        { { .classes = 5 }, ".blocks is {0}" },
        { { .blocks = { 1, 0, 1 }, .classes = 5 }, "stage 3 has 1 blocks behind a stage without" },
        { { .blocks = { -1 }, .classes = 5 }, "stage 1 has -1 blocks" },
        { { .blocks = { 1 } }, "0 classes" },
        { { .blocks = { 1 }, .classes = 5, .width = -4 }, "width -4" },
        { { .blocks = { 1 }, .classes = 5, .channels = -1 }, "images of -1 channels" },
        { { .blocks = { 1 }, .classes = 5, .cifar = true, .bottleneck = true },
          ".cifar and .bottleneck contradict" },
    };
    const struct {
        kn_vit_config c;
        const char *error;
    } vit[] = {
        { { .layers = 1, .heads = 2, .embd = 8, .image = 16, .patch = 4 }, "0 classes" },
        { { .layers = 1, .heads = 3, .embd = 8, .image = 16, .patch = 4, .classes = 5 },
          "3 heads don't divide 8 channels" },
        { { .layers = 1, .heads = 2, .embd = 8, .image = 16, .patch = 5, .classes = 5 },
          "patches of 5 don't divide images of 16 rows" },
        { { .layers = 1,
            .heads = 2,
            .embd = 8,
            .image = 16,
            .patch = 4,
            .classes = 5,
            .dropout = NAN },
          "dropout nan" },
    };
    any_net n = { 0 };
    for (size_t i = 0; i < sizeof resnet / sizeof *resnet; i++) {
        KN_CHECK(!kn_resnet_init(&n.resnet, resnet[i].c, KN_F32, KN_META), "%s", resnet[i].error);
        KN_CHECK_ERROR(resnet[i].error);
    }
    for (size_t i = 0; i < sizeof vit / sizeof *vit; i++) {
        KN_CHECK(!kn_vit_init(&n.vit, vit[i].c, KN_F32, KN_META), "%s", vit[i].error);
        KN_CHECK_ERROR(vit[i].error);
    }
    for (int kind = 0; kind < KINDS; kind++) {
        KN_CHECK(init(&n, kind, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1));
        kn_scope s = kn_scope_begin();
        KN_CHECK(!kn_call(&n, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 1, 16, 16))));
        KN_CHECK_ERROR("takes [N,3,");
        KN_CHECK(!kn_call(&n, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 16, 16))));
        KN_CHECK_ERROR("takes [N,3,");
        kn_scope_end(s);
        kn_module_free(&n);
    }
}

/* ---- the configuration in a checkpoint ------------------------------------------------------- */

static const char *text_of(int kind, char *buf)
{
    const kn_resnet_config *r[] = { &small_resnet, &bottlenecks, &cifar };
    return kind < 3 ? kn_resnet_config_text(r[kind], buf) : kn_vit_config_text(&small_vit, buf);
}

/* Saves net n with the configuration, in which `to` replaces the text `from`, and opens it. */
static kn_checkpoint *saved(any_net *n, const char *config, const char *from, const char *to)
{
    char text[1024];
    const char *at = from ? strstr(config, from) : NULL;
    KN_CHECK(!from || at, "no %s in %s", from, config);
    snprintf(text, sizeof text, "%.*s%s%s", at ? (int)(at - config) : 0, config, at ? to : "",
             at ? at + strlen(from) : config);
    const char *dir = temp_path("run");
    KN_CHECK(kn_checkpoint_save(dir, n, .config = text), "%s", kn_error());
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    KN_CHECK(c != NULL, "%s", kn_error());
    return c;
}

KN_TEST(vision, configurations_are_saved)
{
    for (int kind = 0; kind < KINDS; kind++) {
        any_net n = { 0 }, read = { 0 };
        char text[KN_RESNET_CONFIG_TEXT], again[KN_RESNET_CONFIG_TEXT];
        KN_CHECK(init(&n, kind, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 4));
        KN_CHECK(text_of(kind, text) != NULL, "%s", kn_error());
        kn_checkpoint *c = saved(&n, text, NULL, NULL);
        kn_resnet_config r;
        kn_vit_config v;
        if (kind < 3)
            KN_CHECK(kn_resnet_config_saved(c, &r) && kn_resnet_config_text(&r, again) &&
                         kn_resnet_init(&read.resnet, r, KN_F32, KN_META),
                     "%s", kn_error());
        else
            KN_CHECK(kn_vit_config_saved(c, &v) && kn_vit_config_text(&v, again) &&
                         kn_vit_init(&read.vit, v, KN_F32, KN_META),
                     "%s", kn_error());
        KN_CHECK(strcmp(text, again) == 0, "%s\n%s", text, again);
        KN_CHECK(kn_materialize(&read, KN_CPU, 5) && kn_checkpoint_load(c, &read), "%s",
                 kn_error());
        kn_scope s = kn_scope_begin();
        float y[2][10];
        kn_train(&n, false), kn_train(&read, false);
        KN_CHECK(kn_to_host(kn_call(&n, images(2)), y[0], sizeof y[0]) &&
                 kn_to_host(kn_call(&read, images(2)), y[1], sizeof y[1]));
        KN_CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
        kn_scope_end(s);
        /* another kind's reader names the model */
        KN_CHECK(kind < 3 ? !kn_vit_config_saved(c, &v) : !kn_resnet_config_saved(c, &r));
        KN_CHECK_ERROR(kind < 3 ? "a resnet, not a vision transformer"
                                : "a vit, not a residual net");
        kn_checkpoint_free(c);
        kn_module_free(&n), kn_module_free(&read);
    }
    remove_temp();
}

KN_TEST(vision, a_damaged_configuration_is_refused)
{
    const struct {
        int kind;
        const char *from, *to, *error;
    } bad[] = {
        { 0, "[1, 2, 0, 0]", "[1, 1, 0, 0]", "other sizes" },
        { 0, "[1, 2, 0, 0]", "[1, 2, 1, 0]", "other sizes" },
        { 0, "[1, 2, 0, 0]", "[1, -2, 0, 0]", "four whole numbers" },
        { 0, "[1, 2, 0, 0]", "7", "four whole numbers" },
        { 0, "\"width\": 4", "\"width\": 8", "other sizes" },
        { 0, "\"width\": 4", "\"width\": 1e3", "\"width\" of the model" },
        { 0, "\"num_classes\": 5", "\"num_classes\": 6", "other sizes" },
        { 0, "\"in_chans\": 3", "\"in_chans\": 0", "\"in_chans\" of the model" },
        { 0, "\"bottleneck\": false", "\"bottleneck\": true", "other sizes" },
        { 0, "\"small_images\": false", "\"small_images\": true", "other sizes" },
        { 3, "\"depth\": 2", "\"depth\": 1", "other sizes" },
        { 3, "\"depth\": 2", "\"depth\": 3", "other sizes" },
        { 3, "\"img_size\": 16", "\"img_size\": 24", "other sizes" },
        { 3, "\"embed_dim\": 8", "\"embed_dim\": 1000000000", "\"embed_dim\" of the model" },
        { 3, "\"num_heads\": 2", "\"num_heads\": 3", "heads don't divide" },
        { 3, "\"model_args\": {", "\"other\": {", "\"img_size\" of the model is missing" },
        { 3, "\"vit\"", "\"tiv\"", "a tiv, not a vision transformer" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        any_net n = { 0 };
        char text[KN_RESNET_CONFIG_TEXT];
        kn_resnet_config r;
        kn_vit_config v;
        KN_CHECK(init(&n, bad[i].kind, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 4) &&
                 text_of(bad[i].kind, text));
        kn_checkpoint *c = saved(&n, text, bad[i].from, bad[i].to);
        KN_CHECK(bad[i].kind < 3 ? !kn_resnet_config_saved(c, &r) : !kn_vit_config_saved(c, &v),
                 "%s", bad[i].to);
        KN_CHECK_ERROR(bad[i].error);
        kn_checkpoint_free(c);
        kn_module_free(&n);
    }
    remove_temp();
}
