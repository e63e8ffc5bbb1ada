/* tests/models/imported_test.c: language models in folders of transformers: their logits and texts
 * beside those that it computed (scripts/peers hf --write), and folders that are refused. */
#include "models/family.h"
#include "tests/models/said.h"
#include "tests/models/temp.h"

#define FOLDER KNAP_SOURCE_ROOT "/tests/models/imported"

static void one_model(const char *name)
{
    char path[512], want[600];
    snprintf(path, sizeof path, "%s/%s", FOLDER, name);
    snprintf(want, sizeof want, "%s/want.json", path);
    kn_imported *x = kn_import_open(path);
    KN_CHECK(x);
    KN_CHECK((kn_import_gpt(x) != NULL) == (strncmp(name, "gpt2", 4) == 0));
    KN_CHECK((kn_import_llama(x) != NULL) == (strncmp(name, "gpt2", 4) != 0));
    computes_as_said(x, want);
    kn_import_free(x);
}

KN_TEST(imported, as_transformers_computes)
{
    static const char *const names[] = { "gpt2",    "llama", "llama_tied", "llama_rope",
                                         "mistral", "qwen2", "qwen3" };
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        one_model(names[i]);
}

/* What is exported is read again, bit for bit; a GPT without biases gets zeros. */
KN_TEST(imported, exported_and_read)
{
    const kn_gpt_config gpt = { 2, 2, 16, 8, 30, 0, false }, bare = { 2, 2, 16, 8, 30, 0, true };
    const kn_llama_config llama = { .layers = 2,
                                    .heads = 2,
                                    .kv_heads = 1,
                                    .embd = 16,
                                    .ctx = 8,
                                    .vocab = 30,
                                    .norm_eps = 1e-6,
                                    .rope_base = 5000,
                                    .rope_scaling = { 4, 1, 4, 16 } },
                          own_head = { .layers = 1,
                                       .heads = 4,
                                       .embd = 16,
                                       .ctx = 8,
                                       .vocab = 30,
                                       .untied = true };
    kn_tokenizer *t = kn_tokenizer_create("char", "abcdefghijklmnopqrstuvwxyz0123", 30);
    kn_set_grad_mode(false);
    for (int i = 0; i < 4; i++) {
        kn_module m = { 0 }, again = { 0 };
        kn_scope scope = kn_scope_begin();
        KN_CHECK(i < 2 ? kn_gpt_init((kn_gpt *)&m, i ? bare : gpt, KN_F32, KN_CPU)
                       : kn_llama_init((kn_llama *)&m, i == 2 ? llama : own_head, KN_F32, KN_CPU));
        KN_CHECK(kn_export(temp_path("out"), &m, .comm = kn_comm_self(), .tokenizer = t,
                           .gpt = i < 2 ? kn_gpt_config_of((kn_gpt *)&m) : NULL,
                           .llama = i < 2 ? NULL : kn_llama_config_of((kn_llama *)&m)));
        kn_imported *x = kn_import_open(temp_path("out"), .comm = kn_comm_self());
        KN_CHECK(x && kn_config_init(&again, kn_import_config(x), KN_F32, KN_CPU) &&
                 kn_import_load(x, &again));
        const int64_t ids[] = { 3, 1, 4, 1, 5 };
        kn_tensor *in = kn_from(KN_I64, KN_CPU, ids, KN_SHAPE(1, 5));
        kn_tensor *a = kn_language_next_logits(&m, in), *b = kn_language_next_logits(&again, in);
        KN_CHECK(a && b && memcmp(kn_data(a), kn_data(b), 30 * sizeof(float)) == 0, "model %d", i);
        if (i == 2)
            KN_CHECK(kn_import_llama(x)->norm_eps == 1e-6 &&
                     kn_import_llama(x)->rope_scaling.original_ctx == 16);
        kn_tokenizer *read = kn_import_tokenizer(x);
        KN_CHECK(read && kn_tokenizer_vocab(read) == 30);
        kn_tokenizer_free(read);
        kn_import_free(x);
        kn_scope_end(scope);
        kn_module_free(&m);
        kn_module_free(&again);
    }
    kn_tokenizer_free(t);
    kn_gpt g = { 0 };
    KN_CHECK(kn_gpt_init(&g, gpt, KN_F32, KN_CPU));
    REFUSED(kn_export(temp_path("out"), &g), "give one of .gpt and .llama");
    REFUSED(kn_export(temp_path("out"), &g, .gpt = &gpt, .end_count = -1), ".end_count is -1");
    REFUSED(kn_export(temp_path("out"), &g, .llama = &own_head, .comm = kn_comm_self()),
            "the module holds a model of other sizes than the configuration gives: 12 missing");
    REFUSED(kn_export(temp_path("out"), &g, .gpt = &gpt, .dtype = KN_I64, .comm = kn_comm_self()),
            "kn_export: .dtype is i64");
    write_temp("config.json", "{}", 2);
    REFUSED(kn_export(temp_folder, &g, .gpt = &gpt, .comm = kn_comm_self()),
            "that Knap didn't export");
    kn_module_free(&g);
}

/* A model's folder as older files have it: without "transformer." before names, with masks of
 * attention, and with the head that the token embedding is, or another one. */
static kn_imported *open_older(const char *name, bool other_head)
{
    static const char before[] = "transformer.";
    char path[512];
    json_error_t e;
    kn_scope scope = kn_scope_begin();
    snprintf(path, sizeof path, "%s/%s", FOLDER, name);
    kn_state *from = kn_state_open(path), *to = kn_state_new();
    for (int i = 0; i < kn_state_count(from); i++) {
        const char *own = kn_state_name(from, i);
        const bool long_name = strncmp(own, before, strlen(before)) == 0;
        kn_tensor *x = kn_state_tensor(from, own);
        kn_state_set_tensor(to, long_name ? own + strlen(before) : own, x);
        if (strstr(own, "wte.weight") || strstr(own, "embed_tokens.weight"))
            kn_state_set_tensor(to, "lm_head.weight", other_head ? kn_add_scalar(x, 1) : x);
    }
    if (strcmp(name, "gpt2") == 0)
        kn_state_set_tensor(to, "h.1.attn.bias", kn_zeros(KN_F32, KN_CPU, KN_SHAPE(1, 1, 8, 8)));
    KN_CHECK(kn_state_save(to, temp_path("model.safetensors")));
    kn_state_free(from), kn_state_free(to);
    kn_scope_end(scope);
    snprintf(path, sizeof path, "%s/%s/config.json", FOLDER, name);
    json_t *config = json_load_file(path, 0, &e);
    KN_CHECK(config && json_dump_file(config, temp_path("config.json"), 0) == 0);
    json_decref(config);
    return kn_import_open(temp_folder);
}

KN_TEST(imported, older_names_and_heads)
{
    static const char *const names[] = { "gpt2", "llama_tied" };
    for (int i = 0; i < 2; i++) {
        char want[512];
        snprintf(want, sizeof want, "%s/%s/want.json", FOLDER, names[i]);
        kn_imported *x = open_older(names[i], false);
        KN_CHECK(x && !kn_import_note(x), "%s", names[i]);
        computes_as_said(x, want);
        kn_import_free(x);
        x = open_older(names[i], true);
        KN_CHECK((x != NULL) == (i == 1), "%s", names[i]);
        if (i == 0)
            KN_CHECK_ERROR("its 'lm_head.weight' differs from its token embedding");
        else
            KN_CHECK(kn_import_llama(x)->untied && strstr(kn_import_note(x), "read as untied"));
        kn_import_free(x);
        remove_temp();
    }
}

/* A model's config.json with one value changed, beside its tensors. */
static kn_imported *open_changed(const char *name, const char *key, const char *value)
{
    char path[512];
    json_error_t e;
    snprintf(path, sizeof path, "%s/%s/config.json", FOLDER, name);
    json_t *config = json_load_file(path, 0, &e), *new = json_loads(value, JSON_DECODE_ANY, &e);
    KN_CHECK(config && new &&json_object_set_new(config, key, new) == 0, "%s", path);
    const char *file = temp_path("config.json");
    KN_CHECK(json_dump_file(config, file, 0) == 0);
    json_decref(config);
    snprintf(path, sizeof path, "%s/%s/model.safetensors", FOLDER, name);
    const char *link = temp_path("model.safetensors");
    unlink(link);
    KN_CHECK(symlink(path, link) == 0);
    return kn_import_open(temp_folder);
}

KN_TEST(imported, refused)
{
    static const struct {
        const char *name, *key, *value, *says;
    } cases[] = {
        { "mistral", "model_type", "\"gemma\"",
          "the model is a gemma; these are read: gpt2, llama, mistral, qwen2, qwen3" },
        { "mistral", "model_type", "7", "of an unknown kind" },
        { "mistral", "quantization_config", "{\"quant_method\": \"awq\"}", "quantized (\"quant" },
        { "mistral", "num_hidden_layers", "3", "at least 27 tensors" },
        { "mistral", "num_hidden_layers", "100000", "at least 900000 tensors" },
        { "mistral", "num_hidden_layers", "1", "unexpected" },
        { "mistral", "intermediate_size", "64",
          "its config.json gives: 6 mismatched (model.layers.0.mlp.gate" },
        { "mistral", "vocab_size", "1000000000", "not f32[1000000000,16]" },
        { "mistral", "hidden_act", "\"gelu\"", "hidden_act" },
        { "mistral", "attention_bias", "true", "attention_bias" },
        { "mistral", "head_dim", "16", "not f32[64,16]" },
        { "mistral", "head_dim", "-1", "head_dim" },
        { "mistral", "sliding_window", "0", "sliding_window" },
        { "mistral", "model_type", "\"qwen2\"", "missing (model.layers.0.self_attn.q_proj.bias, " },
        { "qwen2", "model_type", "\"llama\"", "q_proj.bias" },
        { "mistral", "rope_parameters", "{\"rope_type\": \"yarn\"}", "rope_type 'yarn'" },
        { "mistral", "num_attention_heads", "0", "num_attention_heads" },
        { "mistral", "num_attention_heads", "\"4\"", "num_attention_heads" },
        { "llama_tied", "tie_word_embeddings", "false", "1 missing (lm_head.weight)" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kn_imported *x = open_changed(cases[i].name, cases[i].key, cases[i].value);
        kn_module m = { 0 };
        if (x && kn_config_init(&m, kn_import_config(x), KN_F32, KN_CPU))
            KN_CHECK(!kn_import_load(x, &m), "%s %s", cases[i].key, cases[i].value);
        KN_CHECK(kn_error() && strstr(kn_error(), cases[i].says), "%s %s", cases[i].key,
                 cases[i].value);
        kn_clear_error();
        kn_module_free(&m);
        kn_import_free(x);
    }
    REFUSED(kn_import_open(temp_path("nowhere")), "nowhere");
    write_temp("config.json", "{\"model_type\": \"gpt2\"", 21);
    REFUSED(kn_import_open(temp_folder), "is no JSON object");
}

/* GPT-2's config.json by itself: what the GPT here doesn't compute. */
KN_TEST(imported, other_gpts)
{
    static const struct {
        const char *key, *value, *says;
    } cases[] = { { "activation_function", "\"gelu\"", "is gelu; the GPT here has only gelu_new" },
                  { "n_inner", "100", "four times n_embd" },
                  { "layer_norm_epsilon", "1e-6", "is 1e-06; the GPT here has only 1e-5" },
                  { "scale_attn_weights", "false", "is false; the GPT here has only true" },
                  { "tie_word_embeddings", "false", "is false; the GPT here has only true" },
                  { "n_layer", "0", "n_layer" },
                  { "n_head", "3", "3 heads don't divide 16 channels" } };
    char path[512];
    json_error_t e;
    snprintf(path, sizeof path, "%s/gpt2/config.json", FOLDER);
    json_t *config = json_load_file(path, 0, &e);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        kn_model_config c = { .family = &kn_gpt_family };
        json_t *changed = json_copy(config);
        json_object_set_new(changed, cases[i].key, json_loads(cases[i].value, JSON_DECODE_ANY, &e));
        KN_CHECK(!kn_config_read_theirs(changed, "config.json", &c), "%s %s", cases[i].key,
                 cases[i].value);
        KN_CHECK(strstr(kn_error(), cases[i].says), "%s", cases[i].key);
        kn_clear_error();
        json_decref(changed);
    }
    json_decref(config);
}

/* Which layers see a window, by the configurations of each kind. */
KN_TEST(imported, windows)
{
    static const struct {
        const char *type, *more;
        int64_t window; /* -1: refused */
    } cases[] = {
        { "llama", "\"sliding_window\": 4", 0 },
        { "mistral", "\"sliding_window\": 4", 4 },
        { "mistral", "\"sliding_window\": null", 0 },
        { "mistral", "\"head_dim\": 8", 4096 },
        { "qwen2", "\"sliding_window\": 4", 0 },
        { "qwen2", "\"sliding_window\": 4, \"use_sliding_window\": true", 0 }, /* 28 layers */
        { "qwen2", "\"sliding_window\": 4, \"use_sliding_window\": true, \"max_window_layers\": 0",
          4 },
        { "qwen3", "\"sliding_window\": 4, \"use_sliding_window\": true, \"max_window_layers\": 1",
          -1 },
        { "qwen2",
          "\"sliding_window\": 4, \"use_sliding_window\": true, \"max_window_layers\": 0, "
          "\"layer_types\": [\"full_attention\", \"full_attention\"]",
          0 },
        { "qwen2",
          "\"sliding_window\": 4, \"use_sliding_window\": true, \"layer_types\": "
          "[\"full_attention\", \"sliding_attention\"]",
          -1 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[1024];
        json_error_t e;
        kn_model_config c = { .family = &kn_llama_family };
        snprintf(text, sizeof text,
                 "{\"model_type\": \"%s\", \"num_hidden_layers\": 2, \"num_attention_heads\": 2, "
                 "\"num_key_value_heads\": 2, \"hidden_size\": 16, \"intermediate_size\": 16, "
                 "\"max_position_embeddings\": 8, \"vocab_size\": 11, %s}",
                 cases[i].type, cases[i].more);
        json_t *j = json_loads(text, 0, &e);
        KN_CHECK(j, "%s", text);
        const bool read = kn_config_read(j, "config.json", &c);
        const kn_llama_config *l = (const void *)c.of;
        KN_CHECK(read == (cases[i].window >= 0), "case %zu", i);
        KN_CHECK(!read || l->window == cases[i].window, "case %zu: %d", i, (int)l->window);
        kn_clear_error();
        json_decref(j);
    }
}
