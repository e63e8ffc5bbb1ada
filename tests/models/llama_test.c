/* tests/models/llama_test.c: the Llama's sizes, names, gradients, configuration, errors;
 * llama_golden_test.c compares its numbers. */
#include "kernels/faults.h"
#include "models/llama.h"
#include "nn/nn_internal.h"
#include "tests/kn_test.h"
#include "tests/models/ids.h"
#include "tests/models/temp.h"
#include <math.h>

static const kn_llama_config small = {
    .layers = 2, .heads = 4, .kv_heads = 2, .embd = 16, .ctx = 6, .vocab = 11
};

static void begin(kn_llama *g, kn_llama_config c, kn_dtype dtype)
{
    KN_CHECK(kn_llama_init(g, c, dtype, KN_META) && kn_materialize(g, KN_CPU, 7), "%s", kn_error());
}

KN_TEST(llama, preset_sizes_are_the_published_ones)
{
    const struct {
        const char *name;
        int64_t count;
    } known[] = { { "llama2-7b", 6738415616 },     { "llama3-8b", 8030261248 },
                  { "llama3-70b", 70553706496 },   { "llama3.1-8b", 8030261248 },
                  { "llama3.1-70b", 70553706496 }, { "llama3.1-405b", 405853388800 },
                  { "llama3.2-1b", 1235814400 },   { "llama3.2-3b", 3212749824 },
                  { "stories15m", 15191712 },      { "stories42m", 41689600 },
                  { "stories110m", 109529856 } };
    kn_llama_config c;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        kn_llama g = { 0 };
        KN_CHECK(kn_llama_preset(known[i].name, &c) && kn_llama_init(&g, c, KN_F32, KN_META), "%s",
                 kn_error());
        KN_CHECK(kn_param_count(&g) == known[i].count, "%s: %lld", known[i].name,
                 (long long)kn_param_count(&g));
        kn_module_free(&g);
    }
    KN_CHECK(kn_llama_preset("llama3.2-1b", &c) && !c.untied && c.rope_scaling.factor == 32);
    KN_CHECK(!kn_llama_preset("llama9", &c));
    KN_CHECK_ERROR("llama3.2-1b, llama3.2-3b");
}

/* A head that took lm_head's place: its own logits count. */
typedef struct doubled {
    kn_module base;
    kn_module *inner;
} doubled;

static kn_tensor *doubled_forward(kn_module *self, kn_tensor *x)
{
    return kn_scale(kn_call(((doubled *)self)->inner, x), 2);
}

static void check_loss(kn_llama *g)
{
    kn_tensor *x = ids_of(2, 6, 1);
    const double loss = kn_item(kn_llama_loss(g, x, x));
    const double want = kn_item(kn_cross_entropy(kn_llama_logits(g, x), x));
    KN_CHECK(fabs(loss - want) < 1e-6 * want, "%.9g, not %.9g: %s", loss, want, kn_error());
}

KN_TEST(llama, loss_is_that_of_the_logits)
{
    for (int untied = 0; untied < 2; untied++) {
        kn_llama g = { 0 };
        doubled d = { 0 }; /* lives as long as g, of which it becomes a part */
        kn_llama_config c = small;
        c.untied = untied;
        begin(&g, c, KN_F32);
        check_loss(&g);
        if (untied) {
            kn_module_init(&d.base, doubled_forward);
            d.inner = kn_module_replace(&g, "lm_head", &d);
            KN_CHECK(d.inner && kn_module_add(&d.base, "inner", d.inner), "%s", kn_error());
            check_loss(&g);
        }
        kn_module_free(&g);
    }
}

KN_TEST(llama, names_and_shapes_are_those_of_hugging_face)
{
    const struct {
        const char *name;
        int64_t rows, columns; /* 0: one dim */
    } want[] = {
        { "model.embed_tokens.weight", 11, 16 },
        { "model.layers.1.input_layernorm.weight", 16, 0 },
        { "model.layers.1.self_attn.q_proj.weight", 16, 16 },
        { "model.layers.1.self_attn.k_proj.weight", 8, 16 },
        { "model.layers.1.self_attn.v_proj.weight", 8, 16 },
        { "model.layers.1.self_attn.o_proj.weight", 16, 16 },
        { "model.layers.1.post_attention_layernorm.weight", 16, 0 },
        { "model.layers.1.mlp.gate_proj.weight", 64, 16 },
        { "model.layers.1.mlp.up_proj.weight", 64, 16 },
        { "model.layers.1.mlp.down_proj.weight", 16, 64 },
        { "model.norm.weight", 16, 0 },
        { "lm_head.weight", 11, 16 },
    };
    for (int untied = 0; untied < 2; untied++) {
        kn_llama g = { 0 };
        kn_llama_config c = small;
        const kn_param *p;
        c.untied = untied;
        KN_CHECK(kn_llama_init(&g, c, KN_F32, KN_META));
        for (size_t i = 0; i < sizeof want / sizeof *want - !untied; i++) {
            kn_tensor *t = kn_module_param(&g, want[i].name);
            KN_CHECK(t && kn_ndim(t) == (want[i].columns ? 2 : 1), "%s: %s", want[i].name,
                     kn_error());
            KN_CHECK(kn_size(t, 0) == want[i].rows, "%s", want[i].name);
            KN_CHECK(!want[i].columns || kn_size(t, 1) == want[i].columns, "%s", want[i].name);
        }
        KN_CHECK(kn_params(&g, &p) == 2 + 2 * 9 + untied);
        kn_module_free(&g);
    }
}

KN_TEST(llama, begins_at_the_uniform_loss_and_sees_no_future)
{
    kn_llama g = { 0 };
    kn_llama_config c = small;
    c.untied = true;
    begin(&g, c, KN_F32);
    kn_scope s = kn_scope_begin();
    double loss = kn_item(kn_llama_loss(&g, ids_of(1, 6, 0), ids_of(1, 6, 1)));
    KN_CHECK(fabs(loss - log(11)) < 0.05, "loss %g", loss);
    float whole[6 * 11], part[4 * 11], last[11];
    KN_CHECK(kn_to_host(kn_llama_logits(&g, ids_of(1, 6, 0)), whole, sizeof whole));
    KN_CHECK(kn_to_host(kn_llama_logits(&g, ids_of(1, 4, 0)), part, sizeof part));
    KN_CHECK(kn_to_host(kn_llama_next_logits(&g, ids_of(1, 4, 0)), last, sizeof last));
    for (int i = 0; i < 4 * 11; i++)
        KN_CHECK(fabsf(whole[i] - part[i]) < 1e-5f, "%d", i);
    for (int i = 0; i < 11; i++)
        KN_CHECK(fabsf(last[i] - part[33 + i]) < 1e-5f, "%d", i);
    kn_scope_end(s);
    kn_module_free(&g);
}

static double deviation_of(kn_llama *g, const char *name)
{
    kn_scope s = kn_scope_begin();
    kn_tensor *w = kn_detach(kn_module_param(g, name));
    double mean = kn_item(kn_mean(kn_mul(w, w), 0, NULL, false));
    kn_scope_end(s);
    return sqrt(mean);
}

static double first_loss(kn_llama *g)
{
    kn_set_step(1);
    kn_scope s = kn_scope_begin();
    double loss = kn_item(kn_llama_loss(g, ids_of(2, 6, 0), ids_of(2, 6, 4)));
    kn_scope_end(s);
    return loss;
}

/* Each setting changes what it names: values at the beginning, dropout, the norms' .eps (a large
 * one takes the logits away), recompute of each block. */
KN_TEST(llama, settings_take_effect)
{
    kn_llama g = { 0 };
    kn_llama_config c = small;
    begin(&g, c, KN_F32);
    const double proj = 0.02 / sqrt(2.0 * c.layers);
    KN_CHECK(fabs(deviation_of(&g, "model.layers.0.self_attn.q_proj.weight") / 0.02 - 1) < 0.2);
    KN_CHECK(fabs(deviation_of(&g, "model.layers.1.self_attn.o_proj.weight") / proj - 1) < 0.2);
    KN_CHECK(fabs(deviation_of(&g, "model.layers.1.mlp.down_proj.weight") / proj - 1) < 0.2);
    double plain = first_loss(&g);
    KN_CHECK(!kn_module_find(&g, "model.layers.1")->impl->recompute);
    kn_llama_recompute(&g, true);
    for (int i = 0; i < c.layers; i++) {
        char path[32];
        snprintf(path, sizeof path, "model.layers.%d", i);
        KN_CHECK(kn_module_find(&g, path)->impl->recompute, "%s", path);
    }
    kn_module_free(&g);
    c.dropout = 0.3;
    begin(&g, c, KN_F32);
    KN_CHECK(first_loss(&g) != plain);
    kn_module_free(&g);
    c = small;
    c.norm_eps = 1e12;
    begin(&g, c, KN_F32);
    KN_CHECK(fabs(first_loss(&g) - log((double)c.vocab)) < 1e-6 && fabs(plain - log(11)) > 1e-4);
    kn_module_free(&g);
}

/* A block that keeps only its input gives the same bits. */
KN_TEST(llama, recompute_gives_the_same_gradients)
{
    float grad[2][16 * 16];
    kn_llama_config c = small;
    c.dropout = 0.3;
    c.rope_scaling.factor = 8;
    for (int again = 0; again < 2; again++) {
        kn_llama g = { 0 };
        begin(&g, c, KN_F32);
        kn_llama_recompute(&g, again);
        kn_set_step(1); /* both draw as in step 1 */
        kn_scope s = kn_scope_begin();
        KN_CHECK(kn_backward(kn_llama_loss(&g, ids_of(2, 6, 0), ids_of(2, 6, 4))), "%s",
                 kn_error());
        kn_tensor *q = kn_module_param(&g, "model.layers.0.self_attn.q_proj.weight");
        KN_CHECK(kn_to_host(kn_grad(q), grad[again], sizeof grad[again]), "%s", kn_error());
        kn_scope_end(s);
        kn_module_free(&g);
    }
    KN_CHECK(memcmp(grad[0], grad[1], sizeof grad[0]) == 0);
}

/* With every allocation failing in turn: a standing error, nothing leaked. */
KN_TEST(llama, out_of_memory_anywhere)
{
    int64_t live = kn_live_tensors(), k = 1;
    for (bool done = false; !done; k++) {
        kn_llama g = { 0 };
        kn_fail_alloc(k);
        done = kn_llama_init(&g, small, KN_F32, KN_META);
        kn_fail_alloc(0);
        KN_CHECK(done == kn_ok(), "allocation %lld: %s", (long long)k,
                 kn_ok() ? "none" : kn_error());
        kn_clear_error();
        if (done)
            kn_module_free(&g);
        KN_CHECK(kn_live_tensors() == live, "allocation %lld leaks", (long long)k);
    }
    KN_CHECK(k > 50, "only %lld allocations", (long long)k);
}

KN_TEST(llama, refuses_bad_input)
{
    const struct {
        kn_llama_config c;
        const char *error;
    } bad[] = {
        { { .heads = 4, .embd = 16, .ctx = 6, .vocab = 11 }, "0 layers" },
        { { .layers = 1, .heads = 3, .embd = 16, .ctx = 6, .vocab = 11 }, "3 heads don't divide" },
        { { .layers = 1, .heads = 2, .embd = 6, .ctx = 6, .vocab = 11 }, "heads of an even size" },
        { { .layers = 1, .heads = 4, .kv_heads = 3, .embd = 16, .ctx = 6, .vocab = 11 },
          "3 key-value heads don't divide 4 heads" },
        { { .layers = 1, .heads = 4, .embd = 16, .ctx = 6, .vocab = 11, .dropout = 1 },
          "dropout 1" },
        { { .layers = 1, .heads = 4, .embd = 16, .ctx = 6, .vocab = 11, .norm_eps = -1 },
          ".norm_eps -1" },
        { { .layers = 1, .heads = 4, .embd = 16, .ctx = 6, .vocab = 11, .rope_base = -1 },
          "the base of rope is -1" },
        { { .layers = 1, .heads = 4, .embd = 16, .ctx = 6, .vocab = 11, .rope_scaling = { 0.5 } },
          "the factor must be at least 1" },
        { { .layers = 1,
            .heads = 4,
            .embd = 16,
            .ctx = 6,
            .vocab = 11,
            .rope_scaling = { 2, 4, 4 } },
          "the high factor above the low one" },
        { { .layers = 1,
            .heads = 4,
            .embd = 16,
            .ctx = 6,
            .vocab = 11,
            .rope_scaling = { .original_ctx = 3 } },
          "no .factor" },
    };
    kn_llama g = { 0 };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        KN_CHECK(!kn_llama_init(&g, bad[i].c, KN_F32, KN_META), "%s", bad[i].error);
        KN_CHECK_ERROR(bad[i].error);
    }
    begin(&g, small, KN_F32);
    kn_scope s = kn_scope_begin();
    KN_CHECK(!kn_llama_logits(&g, ids_of(1, 7, 0)));
    KN_CHECK_ERROR("7 tokens in a row; the model's context is 1 to 6");
    KN_CHECK(!kn_llama_loss(&g, ids_of(1, 6, 0), ids_of(2, 6, 0)));
    KN_CHECK_ERROR("targets");
    KN_CHECK(!kn_llama_loss(&g, ids_of(2, 6, 0), ids_of(2, 5, 0)));
    KN_CHECK_ERROR("llama: ids are i64[2,6] but targets i64[2,5]");
    kn_scope_end(s);
    kn_module_free(&g);
    kn_llama_config none = small;
    none.hidden = 0, none.embd = INT64_MIN;
    KN_CHECK(!kn_llama_config_check(&none));
    KN_CHECK_ERROR("all must be at least 1");
}

/* ---- the configuration in a checkpoint ------------------------------------------------------- */

/* Beside Muon the embedding and a head of its own take AdamW, the blocks' matrices don't. */
KN_TEST(llama, the_head_takes_adamw_beside_muon)
{
    for (int untied = 0; untied < 2; untied++) {
        kn_llama g = { 0 };
        kn_llama_config c = small;
        const kn_param *p;
        c.untied = untied;
        begin(&g, c, KN_F32);
        kn_optim *o = kn_muon(&g, .lr = 0.1);
        int n = kn_params(&g, &p), matrices = 0;
        for (int i = 0; o && i < n; i++) {
            bool matrix = strcmp(kn_optim_state_name_of(o, i, 0), "momentum") == 0;
            bool block = strstr(p[i].name, "_proj.weight") != NULL;
            KN_CHECK(matrix == block, "%s", p[i].name);
            matrices += matrix;
        }
        KN_CHECK(o && matrices == 14, "%d", matrices);
        kn_optim_free(o);
        kn_module_free(&g);
    }
}

/* What kn_llama_config_saved reads of a model of config small that was saved with text. */
static bool saved_as(kn_llama *g, const char *text, kn_llama_config *read)
{
    const char *dir = temp_path("run");
    KN_CHECK(kn_checkpoint_save(dir, g, .config = text), "%s", kn_error());
    kn_checkpoint *c = kn_checkpoint_open(dir, NULL);
    bool ok = kn_llama_config_saved(c, read);
    kn_checkpoint_free(c);
    return ok;
}

KN_TEST(llama, a_checkpoint_keeps_its_configuration)
{
    for (int i = 0; i < 2; i++) {
        kn_llama g = { 0 };
        kn_llama_config c = small, read;
        char text[KN_LLAMA_CONFIG_TEXT];
        c.untied = i;
        c.dropout = 0.125;
        c.norm_eps = i ? 1e-6 : 0;
        c.rope_base = i ? 5e5 : 0;
        c.rope_scaling.factor = i ? 32 : 0;
        begin(&g, c, KN_F32);
        KN_CHECK(kn_llama_config_text(&c, text) && saved_as(&g, text, &read), "%s", kn_error());
        const kn_llama_config *kept = kn_llama_config_of(&g);
        KN_CHECK(kept->hidden == 64 && kept->norm_eps == (i ? 1e-6 : 1e-5), "%g", kept->norm_eps);
        KN_CHECK(read.layers == 2 && read.heads == 4 && read.kv_heads == 2 && read.embd == 16 &&
                     read.hidden == 64 && read.ctx == 6 && read.vocab == 11 &&
                     read.norm_eps == kept->norm_eps && read.rope_base == kept->rope_base &&
                     read.dropout == 0.125 && read.untied == i &&
                     memcmp(&read.rope_scaling, &kept->rope_scaling, sizeof read.rope_scaling) == 0,
                 "%s", text);
        KN_CHECK(!i || read.rope_scaling.original_ctx == 8192);
        kn_module_free(&g);
    }
    remove_temp();
}

/* That of a model of config small with a head of its own, as transformers writes it. */
static const char whole[] =
    "{'model_type': 'llama', 'num_hidden_layers': 2, 'num_attention_heads': 4, 'hidden_size': 16, "
    "'num_key_value_heads': 2, 'intermediate_size': 64, 'max_position_embeddings': 6, "
    "'vocab_size': 11, 'rms_norm_eps': 1e-6, 'rope_theta': 500, 'rope_scaling': {'rope_type': "
    "'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, "
    "'original_max_position_embeddings': 3}, 'tie_word_embeddings': false}";

/* whole with to in the place of from, and " for '. */
static const char *edited(const char *from, const char *to, char *buf, size_t size)
{
    const char *at = strstr(whole, from);
    KN_CHECK(at != NULL, "%s", from);
    snprintf(buf, size, "%.*s%s%s", (int)(at - whole), whole, to, at + strlen(from));
    for (char *c = buf; *c; c++)
        *c = *c == '\'' ? '"' : *c;
    return buf;
}

KN_TEST(llama, reads_the_configurations_of_hugging_face)
{
    static const struct {
        const char *from, *to;
    } good[] = { { "", "" },
                 { "'rope_theta': 500, 'rope_scaling': {",
                   "'rope_parameters': {'rope_theta': 500, " }, /* transformers 5 */
                 { "'rope_theta'", "'rope_parameters': null, 'rope_theta'" },
                 { "'rms_norm_eps': 1e-6, ", "" },
                 { ", 'tie_word_embeddings': false", ", 'head_dim': 4, 'hidden_act': 'silu'" } };
    static const struct {
        const char *from, *to, *error;
    } bad[] = {
        { "'llama3'", "'linear'", "rope_type 'linear'" },
        { "'vocab_size'", "'attention_bias': true, 'vocab_size'", "has biases" },
        { "'vocab_size'", "'hidden_act': 'gelu', 'vocab_size'", "hidden_act 'gelu'" },
        { "'vocab_size'", "'head_dim': 8, 'vocab_size'", "head_dim 8" },
        { "1e-6", "'small'", "\"rms_norm_eps\"" },
        { "8.0", "-8.0", "\"factor\"" },
        { "8.0", "0.0", "\"factor\"" },
        { "'factor': 8.0, ", "", "\"factor\"" },
        { "8.0", "0.5", "\"factor\"" },
        { "'rope_type': 'llama3', ", "", "rope_type ''" },
        { "false", "true", "a model of other sizes" },
        { "_layers': 2", "_layers': 1", "a model of other sizes" },
        { "_layers': 2", "_layers': 3", "a model of other sizes" },
        { "_heads': 2", "_heads': 4", "a model of other sizes" },
        { "size': 64", "size': 65", "a model of other sizes" },
        { "_heads': 2", "_heads': 3", "3 key-value heads don't divide" },
        { "16", "1000000000000", "\"hidden_size\"" },
        { "'num_hidden_layers': 2, ", "", "\"num_hidden_layers\"" },
        { "'llama'", "'mistral'", "the model is a mistral, not a Llama" },
        { "'model_type': 'llama', ", "", "of an unknown kind, not a Llama" },
    };
    kn_llama g = { 0 };
    kn_llama_config c = small, read;
    char text[1024];
    c.untied = true;
    begin(&g, c, KN_F32);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        edited(good[i].from, good[i].to, text, sizeof text);
        KN_CHECK(saved_as(&g, text, &read), "%s", kn_error());
        KN_CHECK(read.rope_base == 500 && read.rope_scaling.factor == 8 &&
                     read.rope_scaling.original_ctx == 3 && read.norm_eps == 1e-6 && read.untied,
                 "%s", text);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        edited(bad[i].from, bad[i].to, text, sizeof text);
        KN_CHECK(!saved_as(&g, text, &read), "%s", text);
        KN_CHECK_ERROR(bad[i].error);
    }
    kn_module_free(&g);
    remove_temp();
}
