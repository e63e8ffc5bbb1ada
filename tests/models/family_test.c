/* tests/models/family_test.c: the tables of the families: presets, names and shapes of tensors,
 * ranges, configurations in a checkpoint and as others write them; and what every model does alike:
 * it learns, it recomputes to the same bits, its memory may end anywhere. */
#include "nn/nn_internal.h"
#include "optim/optim.h"
#include "tests/owned.h"
#include "tests/failing.h"
#include "tests/models/small_models.h"

/* ---- presets --------------------------------------------------------------------------------- */

/* Parameters of the published models, in the order of the tables. */
static const struct {
    const char *name;
    int64_t count;
} known[] = { { "gpt2", 124439808 },
              { "gpt2-medium", 354823168 },
              { "gpt2-large", 774030080 },
              { "gpt2-xl", 1557611200 },
              { "stories15m", 15191712 },
              { "stories42m", 41689600 },
              { "stories110m", 109529856 },
              { "llama2-7b", 6738415616 },
              { "llama3-8b", 8030261248 },
              { "llama3-70b", 70553706496 },
              { "llama3.1-8b", 8030261248 },
              { "llama3.1-70b", 70553706496 },
              { "llama3.1-405b", 405853388800 },
              { "llama3.2-1b", 1235814400 },
              { "llama3.2-3b", 3212749824 },
              { "resnet20", 269722 },
              { "resnet32", 464154 },
              { "resnet44", 658586 },
              { "resnet56", 853018 },
              { "resnet110", 1727962 },
              { "resnet18", 11689512 },
              { "resnet34", 21797672 },
              { "resnet50", 25557032 },
              { "resnet101", 44549160 },
              { "resnet152", 60192808 },
              { "vit_cifar", 2693578 },
              { "vit_tiny_patch16_224", 5717416 },
              { "vit_small_patch16_224", 22050664 },
              { "vit_base_patch16_224", 86567656 },
              { "vit_large_patch16_224", 304326632 },
              { "vit_small_patch32_224", 22878952 },
              { "vit_base_patch32_224", 88224232 } };
enum { KNOWN = sizeof known / sizeof *known };

static void check_preset(kn_family_kind kind, const kn_family *f, const kn_preset *p)
{
    OWNED_MODULE kn_module m = { 0 };
    kn_model_config c = { .family = f };
    KN_CHECK(kn_family_of_choice(kind, p->name) == f && kn_family_preset(f, p->name, c.of) &&
                 kn_config_preset(&c) == p,
             "%s", p->name);
    KN_CHECK(kn_config_init(&m, &c, KN_F32, KN_META), "%s", p->name);
    const int64_t count = kn_param_count(&m);
    int i = 0;
    while (i < KNOWN && strcmp(known[i].name, p->name) != 0)
        i++;
    KN_CHECK(i < KNOWN && known[i].count == count, "%s: %lld", p->name, (long long)count);
}

KN_TEST(family, presets_have_the_published_sizes)
{
    const kn_family *f;
    int presets = 0;
    char choices[KN_CHOICES];
    for (kn_family_kind kind = KN_LANGUAGE_MODELS; kind <= KN_IMAGE_MODELS; kind++)
        for (int i = 0; (f = kn_family_at(kind, i)); i++) {
            kn_model_config c;
            KN_CHECK(f->size <= KN_CONFIG_ROOM && kn_family_typed(kind, f->type) == f &&
                         !kn_family_typed(!kind, f->type),
                     "%s", f->type);
            KN_CHECK(!f->custom || kn_family_of_choice(kind, f->custom) == f);
            for (const kn_preset *p = f->preset; p->name; p++, presets++)
                check_preset(kind, f, p);
            REFUSED(kn_family_preset(f, "llama9", c.of),
                    f->preset[0].name ? f->preset[0].name : f->noun);
        }
    KN_CHECK(presets >= KNOWN, "%d", presets);
    KN_CHECK(!kn_family_of_choice(KN_LANGUAGE_MODELS, "llam") &&
             !kn_family_of_choice(KN_LANGUAGE_MODELS, ""));
    KN_CHECK(strncmp(kn_family_choices(KN_LANGUAGE_MODELS, choices), "custom|gpt2|", 12) == 0);
}

/* ---- tensors --------------------------------------------------------------------------------- */

KN_TEST(family, names_and_shapes_are_those_of_published_files)
{
    static const struct {
        int kind;
        const char *name;
        int64_t rows, columns; /* 0: one dim */
    } want[] = {
        { GPT, "transformer.wte.weight", 11, 8 },
        { GPT, "transformer.wpe.weight", 6, 8 },
        { GPT, "transformer.h.1.ln_1.weight", 8, 0 },
        { GPT, "transformer.h.1.ln_1.bias", 8, 0 },
        { GPT, "transformer.h.1.attn.c_attn.weight", 8, 24 },
        { GPT, "transformer.h.1.attn.c_attn.bias", 24, 0 },
        { GPT, "transformer.h.1.attn.c_proj.weight", 8, 8 },
        { GPT, "transformer.h.1.ln_2.weight", 8, 0 },
        { GPT, "transformer.h.1.mlp.c_fc.weight", 8, 32 },
        { GPT, "transformer.h.1.mlp.c_proj.weight", 32, 8 },
        { GPT, "transformer.h.1.mlp.c_proj.bias", 8, 0 },
        { GPT, "transformer.ln_f.bias", 8, 0 },
        { OWN_HEAD, "model.embed_tokens.weight", 11, 16 },
        { OWN_HEAD, "model.layers.1.input_layernorm.weight", 16, 0 },
        { OWN_HEAD, "model.layers.1.self_attn.q_proj.weight", 16, 16 },
        { OWN_HEAD, "model.layers.1.self_attn.k_proj.weight", 8, 16 },
        { OWN_HEAD, "model.layers.1.self_attn.v_proj.weight", 8, 16 },
        { OWN_HEAD, "model.layers.1.self_attn.o_proj.weight", 16, 16 },
        { OWN_HEAD, "model.layers.1.post_attention_layernorm.weight", 16, 0 },
        { OWN_HEAD, "model.layers.1.mlp.gate_proj.weight", 64, 16 },
        { OWN_HEAD, "model.layers.1.mlp.up_proj.weight", 64, 16 },
        { OWN_HEAD, "model.layers.1.mlp.down_proj.weight", 16, 64 },
        { OWN_HEAD, "model.norm.weight", 16, 0 },
        { OWN_HEAD, "lm_head.weight", 11, 16 },
    };
    /* a tied head is no parameter of its own */
    static const int params[] = { 2 + 2 * 12 + 2, 2 + 2 * 9, 2 + 2 * 9 + 1 };
    const kn_param *p;
    for (int kind = GPT; kind <= OWN_HEAD; kind++) {
        kn_module m;
        KN_CHECK(declare_small(&m, kind, KN_F32));
        KN_CHECK(kn_params(&m, &p) == params[kind], "model %d: %d", kind, kn_params(&m, &p));
        for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
            if (want[i].kind != kind)
                continue;
            kn_tensor *t = kn_module_param(&m, want[i].name);
            KN_CHECK(t && kn_ndim(t) == (want[i].columns ? 2 : 1), "%s", want[i].name);
            KN_CHECK(kn_size(t, 0) == want[i].rows, "%s", want[i].name);
            KN_CHECK(!want[i].columns || kn_size(t, 1) == want[i].columns, "%s", want[i].name);
        }
        kn_module_free(&m);
    }
}

static void with_biases(void *config)
{
    kn_llama_family.fill(config);
    ((kn_llama_config *)config)->qkv_bias = true;
}

KN_TEST(family, a_table_over_another_model_has_defaults_of_its_own)
{
    OWNED_MODULE kn_module m = { 0 };
    kn_family own = kn_llama_family;
    own.fill = with_biases;
    kn_model_config c = small_config(LLAMA);
    c.family = &own;
    KN_CHECK(kn_family_makes(&own, &kn_llama_family) && !kn_family_makes(&own, &kn_gpt_family));
    KN_CHECK(kn_config_init(&m, &c, KN_F32, KN_META));
    KN_CHECK(kn_module_param(&m, "model.layers.1.self_attn.q_proj.bias"));
}

/* ---- what every model does ------------------------------------------------------------------- */

KN_TEST(family, a_loss_falls_in_each_dtype)
{
    const kn_dtype dtype[] = { KN_F32, KN_F64 };
    for (int k = 0; k < SMALL_MODELS * 2; k += kn_one_in(3)) {
        OWNED_MODULE kn_module m;
        double first = 0, last = 0;
        make_small(&m, k / 2, dtype[k % 2], 1);
        OWNED_OPTIM kn_optim *o = kn_adamw(&m, .lr = 1e-2);
        for (int step = 0; step < 30; step++) {
            IN_SCOPE;
            kn_tensor *loss = small_loss(&m, k / 2, dtype[k % 2]);
            last = kn_item(loss);
            first = step ? first : last;
            KN_CHECK(kn_backward(loss) && kn_step(o));
        }
        KN_CHECK(last < 0.9 * first, "model %d, dtype %d: %g -> %g", k / 2, k % 2, first, last);
    }
}

static bool blocks_recompute(kn_module *m, void *block_class)
{
    return strcmp(kn_module_class(m), block_class) != 0 || m->impl->recompute;
}

/* A block that keeps only its input gives the same bits, and counts the batch once. */
KN_TEST(family, recompute_gives_the_same_gradients)
{
    static float grad[2][1 << 16];
    for (int kind = 0; kind < SMALL_MODELS; kind++) {
        const kn_family *f = small_models[kind].family;
        size_t n[2] = { 0 };
        for (int again = 0; again < 2; again++) {
            OWNED_MODULE kn_module m;
            const kn_param *p;
            make_small(&m, kind, KN_F32, 1);
            if (again)
                kn_family_recompute(f, &m, true);
            KN_CHECK(kn_apply_modules(&m, blocks_recompute, (void *)(uintptr_t)f->block_class) ==
                     again);
            kn_set_step(1); /* both draw as in step 1 */
            kn_scope s = kn_scope_begin();
            KN_CHECK(kn_backward(small_loss(&m, kind, KN_F32)));
            for (int i = 0, params = kn_params(&m, &p); i < params; i++) {
                const size_t count = (size_t)p[i].numel;
                KN_CHECK(n[again] + count <= sizeof grad[0] / sizeof(float) &&
                         kn_to_host(kn_param_grad(&p[i]), grad[again] + n[again],
                                    count * sizeof(float)));
                n[again] += count;
            }
            KN_CHECK(!kn_module_has(&m, "bn1.num_batches_tracked") ||
                     kn_item(kn_module_buffer(&m, "bn1.num_batches_tracked")) == 1);
            kn_scope_end(s);
        }
        KN_CHECK(n[0] == n[1] && memcmp(grad[0], grad[1], n[0] * sizeof(float)) == 0, "model %d",
                 kind);
    }
}

static bool declares(void *kind)
{
    kn_module m;
    const bool done = declare_small(&m, *(int *)kind, KN_F32);
    if (done)
        kn_module_free(&m);
    return done;
}

KN_TEST(family, out_of_memory_anywhere)
{
    for (int kind = 0; kind < SMALL_MODELS; kind++)
        each_allocation_fails(declares, NULL, &kind, 30);
}

/* ---- what is refused ------------------------------------------------------------------------- */

#define REFUSES_GPT(error, ...)                                                                    \
    {                                                                                              \
        &kn_gpt_family, &(const kn_gpt_config){ __VA_ARGS__ }, error                               \
    }
#define REFUSES_LLAMA(error, ...)                                                                  \
    {                                                                                              \
        &kn_llama_family, &(const kn_llama_config){ __VA_ARGS__ }, error                           \
    }
#define REFUSES_RESNET(error, ...)                                                                 \
    {                                                                                              \
        &kn_resnet_family, &(const kn_resnet_config){ __VA_ARGS__ }, error                         \
    }
#define REFUSES_VIT(error, ...)                                                                    \
    {                                                                                              \
        &kn_vit_family, &(const kn_vit_config){ __VA_ARGS__ }, error                               \
    }

KN_TEST(family, sizes_that_do_not_fit)
{
    const struct {
        const kn_family *family;
        const void *config;
        const char *error;
    } bad[] = {
        REFUSES_GPT("3 heads don't divide 8 channels", 2, 3, 8, 6, 11),
        REFUSES_GPT("gpt: .vocab is 0", 2, 2, 8, 6),
        REFUSES_GPT("gpt: .dropout is 1", 2, 2, 8, 6, 11, 1),
        REFUSES_LLAMA("llama: .layers is 0, should lie between 1 and 100000", 0, 4, 0, 16, 0, 6,
                      11),
        REFUSES_LLAMA("3 heads don't divide 16 channels", 1, 3, 0, 16, 0, 6, 11),
        REFUSES_LLAMA("heads of an even size", 1, 2, 0, 6, 0, 6, 11),
        REFUSES_LLAMA("3 key-value heads don't divide 4 heads", 1, 4, 3, 16, 0, 6, 11),
        REFUSES_LLAMA(".dropout is 1", 1, 4, 0, 16, 0, 6, 11, .dropout = 1),
        REFUSES_LLAMA(".norm_eps is -1", 1, 4, 0, 16, 0, 6, 11, .norm_eps = -1),
        REFUSES_LLAMA(".rope_base is -1", 1, 4, 0, 16, 0, 6, 11, .rope_base = -1),
        REFUSES_LLAMA(".rope_factor is 0.5", 1, 4, 0, 16, 0, 6, 11, .rope_scaling = { 0.5 }),
        REFUSES_LLAMA("the high factor above the low one", 1, 4, 0, 16, 0, 6, 11,
                      .rope_scaling = { 2, 4, 4 }),
        REFUSES_LLAMA("no .factor", 1, 4, 0, 16, 0, 6, 11, .rope_scaling = { .original_ctx = 3 }),
        REFUSES_LLAMA(".embd is -9.2", 1, 4, 0, INT64_MIN, 0, 6, 11),
        REFUSES_RESNET(".blocks is {0}", { 0 }, 5),
        REFUSES_RESNET("stage 3 has 1 blocks behind a stage without", { 1, 0, 1 }, 5),
        REFUSES_RESNET(".blocks is -1", { -1 }, 5),
        REFUSES_RESNET(".classes is 0", { 1 }),
        REFUSES_RESNET(".width is -4", { 1 }, 5, .width = -4),
        REFUSES_RESNET(".channels is -1", { 1 }, 5, .channels = -1),
        REFUSES_RESNET(".cifar and .bottleneck contradict", { 1 }, 5, .cifar = true,
                       .bottleneck = true),
        REFUSES_VIT(".classes is 0", 1, 2, 8, 16, 4),
        REFUSES_VIT("3 heads don't divide 8 channels", 1, 3, 8, 16, 4, 5),
        REFUSES_VIT("patches of 5 don't divide images of 16 rows", 1, 2, 8, 16, 5, 5),
        REFUSES_VIT(".dropout is nan", 1, 2, 8, 16, 4, 5, .dropout = NAN),
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        kn_module m = { 0 };
        kn_model_config c = { .family = bad[i].family };
        memcpy(c.of, bad[i].config, c.family->size);
        KN_CHECK(!kn_config_init(&m, &c, KN_F32, KN_META), "%s", bad[i].error);
        KN_CHECK_ERROR(bad[i].error);
    }
}

/* ---- in a checkpoint ------------------------------------------------------------------------- */

static void forward_bits(kn_module *m, int kind, float bits[64])
{
    const kn_family *f = small_models[kind].family;
    IN_SCOPE;
    kn_train(m, false);
    kn_tensor *y = f->kind == KN_LANGUAGE_MODELS ? kn_language_next_logits(m, ids_of(1, 4, 1))
                                                 : kn_call(m, small_images(2));
    KN_CHECK(y && kn_numel(y) <= 64 && kn_to_host(y, bits, (size_t)kn_numel(y) * sizeof *bits));
}

/* The checkpoint tells the family, defaults are filled in, and the model computes the same bits. */
KN_TEST(family, configurations_are_saved)
{
    for (int kind = 0; kind < SMALL_MODELS; kind++) {
        const kn_model_config c = small_config(kind);
        const kn_family *f = c.family, *other;
        const kn_family_kind of = f->kind;
        kn_module m, again = { 0 };
        kn_model_config read = { 0 };
        float y[2][64] = { { 0 } };
        make_small(&m, kind, KN_F32, 4);
        char *text = kn_config_text(&c), *second = NULL;
        KN_CHECK(text != NULL);
        kn_checkpoint *saved = saved_with(&m, text, NULL, NULL);
        KN_CHECK(kn_config_saved(saved, of, &read, NULL) && read.family == f &&
                     (second = kn_config_text(&read)) && strcmp(text, second) == 0,
                 "%s\n%s", text, second ? second : kn_error());
        KN_CHECK(memcmp(read.of, kn_family_config_of(f, &m), f->size) == 0, "%s", text);
        KN_CHECK(kn_config_init(&again, &read, KN_F32, KN_META) &&
                 kn_materialize(&again, KN_CPU, 5) && kn_checkpoint_load(saved, &again));
        forward_bits(&m, kind, y[0]);
        forward_bits(&again, kind, y[1]);
        KN_CHECK(memcmp(y[0], y[1], sizeof y[0]) == 0);
        for (int i = 0; (other = kn_family_at(of, i)); i++) {
            char noun[64], type[64];
            snprintf(noun, sizeof noun, "not a %s", other->noun);
            snprintf(type, sizeof type, "the model is a %s", f->type);
            KN_CHECK(kn_family_saved(other, saved, read.of) == (other == f), "%s", other->noun);
            KN_CHECK(other == f || (strstr(kn_error(), noun) && strstr(kn_error(), type)));
            kn_clear_error();
        }
        REFUSED(kn_config_saved(saved, !of, &read, NULL),
                of == KN_IMAGE_MODELS ? "which are gpt2, llama" : "which are resnet, vit");
        kn_checkpoint_free(saved);
        kn_host_free(text), kn_host_free(second);
        kn_module_free(&m), kn_module_free(&again);
    }
}

KN_TEST(family, defaults_are_filled_in)
{
    OWNED_MODULE kn_module m;
    make_small(&m, LLAMA, KN_F32, 1);
    const kn_llama_config *c = kn_llama_config_of((kn_llama *)&m);
    KN_CHECK(c->hidden == 64 && c->norm_eps == 1e-5 && c->rope_base == 1e4);
    kn_module_free(&m);
    make_small(&m, OWN_HEAD, KN_F32, 1);
    c = kn_llama_config_of((kn_llama *)&m);
    KN_CHECK(c->norm_eps == 1e-6 && c->rope_scaling.low_freq_factor == 1 &&
             c->rope_scaling.high_freq_factor == 4 && c->rope_scaling.original_ctx == 8192);
}

/* A configuration that another program wrote, or damaged. error NULL: it is read. */
typedef struct edit {
    int kind;
    const char *from, *to, *error;
} edit;

static void check_edit(kn_module *m, const char *config, const edit *e, kn_model_config *read)
{
    const kn_family *f = small_models[e->kind].family;
    kn_checkpoint *c = saved_with(m, config, e->from, e->to);
    *read = (kn_model_config){ .family = f };
    KN_CHECK(kn_family_saved(f, c, read->of) == !e->error, "%s", e->to);
    if (e->error)
        KN_CHECK_ERROR(e->error);
    kn_checkpoint_free(c);
}

KN_TEST(family, a_damaged_configuration_is_refused)
{
    static const edit bad[] = {
        { GPT, "\"layers\": 2", "\"layers\": 1", "other sizes" },
        { GPT, "\"layers\": 2", "\"layers\": 3", "other sizes" },
        { GPT, "\"layers\": 2", "\"layers\": 100000", "at least 600000 tensors" },
        { GPT, "\"heads\": 2", "\"heads\": 2.5", "\"heads\" of the model" },
        { GPT, "\"vocab\": 11", "\"vocab\": 12", "(transformer.wte.weight): it is f32[11,8]" },
        { GPT, "\"ctx\": 6", "\"ctx\": 7", "other sizes" },
        { GPT, "\"no_bias\": false", "\"no_bias\": true", "other sizes" },
        { GPT, "\"no_bias\": false", "\"no_bias\": 1", "isn't true or false" },
        { GPT, "\"dropout\": 0.0", "\"dropout\": -1", "\"dropout\" of the model" },
        { GPT, "\"model_type\": \"gpt2\", ", "", "tells no sizes of a model" },
        { GPT, "\"gpt2\"", "3", "tells no sizes of a model" },
        { GPT, "\"gpt2\"", "\"m\\u001b[31m\"", "the model is a m?[31m, not a GPT" },
        { RESNET, "[1, 2, 0, 0]", "[1, 1, 0, 0]", "other sizes" },
        { RESNET, "[1, 2, 0, 0]", "[1, 2, 1, 0]", "other sizes" },
        { RESNET, "[1, 2, 0, 0]", "[1, -2, 0, 0]", "4 whole numbers" },
        { RESNET, "[1, 2, 0, 0]", "7", "4 whole numbers" },
        { RESNET, "\"width\": 4", "\"width\": 8", "other sizes" },
        { RESNET, "\"width\": 4", "\"width\": 1e3", "\"width\" of the model" },
        { RESNET, "\"num_classes\": 5", "\"num_classes\": 6", "other sizes" },
        { RESNET, "\"in_chans\": 3", "\"in_chans\": 0", "\"in_chans\" of the model" },
        { RESNET, "\"bottleneck\": false", "\"bottleneck\": true", "other sizes" },
        { RESNET, "\"small_images\": false", "\"small_images\": true", "other sizes" },
        { VIT, "\"depth\": 2", "\"depth\": 1", "other sizes" },
        { VIT, "\"depth\": 2", "\"depth\": 3", "other sizes" },
        { VIT, "\"img_size\": 16", "\"img_size\": 24", "other sizes" },
        { VIT, "\"embed_dim\": 8", "\"embed_dim\": 1000000000", "\"embed_dim\" of the model" },
        { VIT, "\"num_heads\": 2", "\"num_heads\": 3", "heads don't divide" },
        { VIT, "\"model_args\": {", "\"other\": {", "\"img_size\" of the model is missing" },
        { VIT, "\"vit\"", "\"tiv\"", "a tiv, not a vision transformer" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const kn_model_config c = small_config(bad[i].kind);
        OWNED_MODULE kn_module m;
        kn_model_config read;
        OWNED_HOST char *text = kn_config_text(&c);
        make_small(&m, bad[i].kind, KN_F32, 4);
        check_edit(&m, text, &bad[i], &read);
    }
}

/* That of a Llama with a head of its own, as transformers writes it. */
static const char theirs[] =
    "{\"model_type\": \"llama\", \"num_hidden_layers\": 2, \"num_attention_heads\": 4, "
    "\"hidden_size\": 16, \"num_key_value_heads\": 2, \"intermediate_size\": 64, "
    "\"max_position_embeddings\": 6, \"vocab_size\": 11, \"rms_norm_eps\": 1e-6, "
    "\"rope_theta\": 500, \"rope_scaling\": {\"rope_type\": \"llama3\", \"factor\": 8.0, "
    "\"low_freq_factor\": 1.0, \"high_freq_factor\": 4.0, "
    "\"original_max_position_embeddings\": 3}, \"tie_word_embeddings\": false}";

KN_TEST(family, configurations_of_hugging_face)
{
    static const edit edits[] = {
        { OWN_HEAD, NULL, NULL, NULL },
        { OWN_HEAD, "\"rope_theta\": 500, \"rope_scaling\": {",
          "\"rope_parameters\": {\"rope_theta\": 500, ", NULL }, /* transformers 5 */
        { OWN_HEAD, "\"rope_theta\"", "\"rope_parameters\": null, \"rope_theta\"", NULL },
        { OWN_HEAD, "\"rms_norm_eps\": 1e-6, ", "", NULL },
        { OWN_HEAD, ", \"tie_word_embeddings\": false",
          ", \"head_dim\": 4, \"hidden_act\": \"silu\"", NULL },
        { OWN_HEAD, "\"llama3\"", "\"linear\"", "rope_type 'linear'" },
        { OWN_HEAD, "\"vocab_size\"", "\"attention_bias\": true, \"vocab_size\"",
          "\"attention_bias\" of the model is true; the Llama here has only false" },
        { OWN_HEAD, "\"vocab_size\"", "\"hidden_act\": \"gelu\", \"vocab_size\"",
          "\"hidden_act\" of the model is gelu" },
        { OWN_HEAD, "\"vocab_size\"", "\"head_dim\": 8, \"vocab_size\"",
          "it is f32[16,16], not f32[32,16]" },
        { OWN_HEAD, "1e-6", "\"small\"", "\"rms_norm_eps\"" },
        { OWN_HEAD, "8.0", "-8.0", "\"factor\"" },
        { OWN_HEAD, "8.0", "0.0", "\"factor\"" },
        { OWN_HEAD, "\"factor\": 8.0, ", "", "\"factor\"" },
        { OWN_HEAD, "8.0", "0.5", "\"factor\"" },
        { OWN_HEAD, "\"rope_type\": \"llama3\", ", "", "rope_type ''" },
        { OWN_HEAD, "false", "true", "a model of other sizes" },
        { OWN_HEAD, "_layers\": 2", "_layers\": 1", "a model of other sizes" },
        { OWN_HEAD, "_layers\": 2", "_layers\": 3", "a model of other sizes" },
        { OWN_HEAD, "_heads\": 2", "_heads\": 4", "a model of other sizes" },
        { OWN_HEAD, "size\": 64", "size\": 65", "a model of other sizes" },
        { OWN_HEAD, "_heads\": 2", "_heads\": 3", "3 key-value heads don't divide" },
        { OWN_HEAD, "16", "1000000000000", "\"hidden_size\"" },
        { OWN_HEAD, "\"num_hidden_layers\": 2, ", "", "\"num_hidden_layers\"" },
        { OWN_HEAD, "\"llama\"", "\"gemma\"", "the model is a gemma, not a Llama" },
        { OWN_HEAD, "\"model_type\": \"llama\", ", "", "tells no sizes of a model" },
    };
    OWNED_MODULE kn_module m;
    make_small(&m, OWN_HEAD, KN_F32, 7);
    for (size_t i = 0; i < sizeof edits / sizeof *edits; i++) {
        kn_model_config read;
        check_edit(&m, theirs, &edits[i], &read);
        const kn_llama_config *c = (const void *)read.of;
        KN_CHECK(edits[i].error ||
                     (c->rope_base == 500 && c->rope_scaling.factor == 8 &&
                      c->rope_scaling.original_ctx == 3 && c->norm_eps == 1e-6 && c->untied),
                 "%s", edits[i].to);
    }
}
