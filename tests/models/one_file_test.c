/* tests/models/one_file_test.c: models in one file: GGUFs that the gguf package wrote and llm.c's
 * weights, beside what transformers says of them (scripts/peers hf --write); what is exported is
 * read again bit for bit; files that are refused. */
#include "kernels/convert.h"
#include "models/formats/gguf.h"
#include "models/tokens/tokens.h"
#include "tests/models/owned.h"
#include "tests/models/said.h"
#include "tests/models/temp.h"

#define FOLDER KNAP_SOURCE_ROOT "/tests/models/one_file"

static const char *const names[] = { "gpt2_q8.gguf",    "llama_f16.gguf", "llama_f32.gguf",
                                     "qwen2_bf16.gguf", "qwen3_f32.gguf", "gpt2_llmc.bin",
                                     "gpt2_llmc16.bin" };
enum { FILES = sizeof names / sizeof *names };

static const char *golden(const char *name)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/%s", FOLDER, name);
    return path;
}

static bool with_patterns(void)
{
    kn_tokenizer *t = kn_tokenizer_load(KNAP_SOURCE_ROOT "/tests/models/tokenizers/gpt2");
    const bool with = t || !strstr(kn_error(), "PCRE2");
    kn_tokenizer_free(t);
    kn_clear_error();
    return with;
}

KN_TEST(one_file, as_transformers_computes)
{
    for (int i = 0; i < FILES; i++) {
        char want[512];
        snprintf(want, sizeof want, "%s/%.*s.json", FOLDER, (int)strcspn(names[i], "."), names[i]);
        kn_imported *x = kn_import_open(golden(names[i]));
        KN_CHECK(x);
        KN_CHECK((kn_import_gpt(x) != NULL) == (strncmp(names[i], "gpt2", 4) == 0));
        computes_as_said(x, want);
        kn_import_free(x);
    }
}

/* The lists in a GGUF make the ids that the tokenizer's own library made. */
KN_TEST(one_file, tokenizers)
{
    static const char prompt[] = "The quick brown fox";
    for (int i = 0; i < 5 && with_patterns(); i++) {
        char path[512];
        json_error_t e;
        int64_t want[SAID_IDS], ids[256];
        const int64_t *prefix, *ends;
        snprintf(path, sizeof path, "%s/%.*s.json", FOLDER, (int)strcspn(names[i], "."), names[i]);
        json_t *said = json_load_file(path, 0, &e);
        kn_imported *x = kn_import_open(golden(names[i]));
        kn_tokenizer *t = x ? kn_import_tokenizer(x) : NULL;
        KN_CHECK(said && t);
        int64_t n = kn_tokenizer_prefix(t, &prefix);
        KN_CHECK(n == (i == 2), "%s", names[i]);
        memcpy(ids, prefix, (size_t)n * sizeof *ids);
        n += kn_tokenizer_encode(t, prompt, sizeof prompt - 1, ids + n, KN_I64);
        KN_CHECK(n == said_ids(json_object_get(said, "prompt"), want) &&
                     memcmp(ids, want, (size_t)n * sizeof *ids) == 0,
                 "%s", names[i]);
        KN_CHECK(kn_import_ends(x, &ends) == 1 &&
                     ends[0] == kn_tokenizer_id(t, i == 2 ? "</s>" : "<|endoftext|>"),
                 "%s", names[i]);
        kn_tokenizer_free(t);
        kn_import_free(x);
        json_decref(said);
    }
    kn_imported *x = kn_import_open(golden("gpt2_llmc.bin"));
    KN_CHECK(x && !kn_import_tokenizer(x));
    KN_CHECK_ERROR("holds no tokenizer, as all of llm.c's files: name GPT-2's (--tokenizer");
    kn_import_free(x);
}

/* Any interval of a piece is read, of [rows, cols] in memory. */
static void read_in_parts(const kn_gguf *g, const kn_foreign_piece *piece, const float *want)
{
    float got[32 * 96];
    kn_pieces *p = kn_pieces_of(golden("gpt2_q8.gguf"), &g->seen, piece, 1);
    KN_CHECK(p);
    for (int64_t start = 0; start < 32 * 96; start += 37)
        for (int64_t count = 1; start + count <= 32 * 96; count += 301 + 501 * (start % 3)) {
            KN_CHECK(kn_pieces_read(p, 0, (kn_interval){ start, count, 1, 0, 0 }, got));
            KN_CHECK(memcmp(got, want + start, (size_t)count * sizeof *got) == 0, "%d + %d",
                     (int)start, (int)count);
        }
    kn_pieces_close(p);
}

/* Q8_0: element i of a row is d q_i of its block, in f32; as it lies, transposed, and as rows of
 * heads of 8, whose pairs are neighbours in the file and half a head apart in memory. */
KN_TEST(one_file, blocks)
{
    kn_gguf g = { 0 };
    static char bytes[1 << 17];
    KN_CHECK(kn_gguf_open(&g, golden("gpt2_q8.gguf")));
    const kn_gguf_tensor *t = kn_gguf_tensor_of(&g, "blk.0.attn_qkv.weight");
    KN_CHECK(t && t->type == KN_GGML_Q8_0 && t->shape[0] == 96 && t->shape[1] == 32);
    KN_CHECK(pread(g.fd, bytes, 96 * 34, t->at) == 96 * 34);
    float plain[32 * 96], turned[32 * 96], heads[32 * 96];
    for (int o = 0; o < 96; o++)
        for (int i = 0; i < 32; i++) {
            const int apart = o / 8 * 8 + o % 8 / 2 + o % 2 * 4;
            uint16_t d;
            memcpy(&d, bytes + o * 34, 2);
            plain[o * 32 + i] = turned[i * 96 + o] = heads[apart * 32 + i] =
                kn_f16_to_f32(d) * (float)(int8_t)bytes[o * 34 + 2 + i];
        }
    kn_foreign_piece piece;
    KN_CHECK(kn_gguf_piece(&g, t, "w", &piece));
    read_in_parts(&g, &piece, plain);
    piece.form.head = 8;
    read_in_parts(&g, &piece, heads);
    piece.form.head = 0, piece.form.transposed = true;
    piece.piece.shape[0] = 32, piece.piece.shape[1] = 96;
    read_in_parts(&g, &piece, turned);
    kn_gguf_close(&g);
}

/* ---- export ---------------------------------------------------------------------------------- */

static const kn_llama_config rope = { .layers = 2,
                                      .heads = 2,
                                      .kv_heads = 1,
                                      .embd = 16,
                                      .ctx = 8,
                                      .vocab = 30,
                                      .norm_eps = 1e-6,
                                      .rope_base = 5000,
                                      .rope_scaling = { 4, 1.5, 3, 16 } },
                             window = { .layers = 1,
                                        .heads = 4,
                                        .embd = 16,
                                        .ctx = 8,
                                        .vocab = 30,
                                        .window = 3,
                                        .untied = true },
                             qwen2 = { .layers = 2,
                                       .heads = 4,
                                       .kv_heads = 2,
                                       .embd = 16,
                                       .ctx = 8,
                                       .vocab = 30,
                                       .qkv_bias = true },
                             qwen3 = { .layers = 1,
                                       .heads = 2,
                                       .embd = 16,
                                       .head_dim = 12,
                                       .ctx = 8,
                                       .vocab = 30,
                                       .qk_norm = true };
static const kn_gpt_config gpt = { 2, 2, 16, 8, 30, 0, false }, bare = { 2, 2, 16, 8, 30, 0, true };
static const kn_llama_config *const llamas[] = { &rope, &window, &qwen2, &qwen3 };

/* Every parameter of the module again, and its zeros for biases that it lacks. */
static void same_parameters(kn_module *m, kn_module *again)
{
    const kn_param *p, *q;
    const int n = kn_params(again, &q), have = kn_params(m, &p);
    for (int i = 0, at; i < n; i++) {
        for (at = 0; at < have && strcmp(p[at].name, q[i].name) != 0; at++)
            ;
        const float *b = kn_data(q[i].tensor), *a = at < have ? kn_data(p[at].tensor) : NULL;
        const size_t count = (size_t)kn_numel(q[i].tensor);
        KN_CHECK(!a || memcmp(a, b, count * sizeof *a) == 0, "%s", q[i].name);
        for (size_t k = 0; !a && k < count; k++)
            KN_CHECK(b[k] == 0 && strstr(q[i].name, "bias"), "%s", q[i].name);
    }
}

KN_TEST(one_file, exported_and_read)
{
    OWNED_TOKENIZER kn_tokenizer *t =
        kn_tokenizer_create("char", "abcdefghijklmnopqrstuvwxyz01 \n", 30);
    for (int i = 0; i < 8; i++) { /* GPTs by both formats, then Llamas */
        kn_module m = { 0 }, again = { 0 };
        const bool llama = i > 3;
        const kn_export_format format = i % 2 && !llama ? KN_EXPORT_LLMC : KN_EXPORT_GGUF;
        kn_scope scope = kn_scope_begin();
        KN_CHECK(llama ? kn_llama_init((kn_llama *)&m, *llamas[i - 4], KN_F32, KN_CPU)
                       : kn_gpt_init((kn_gpt *)&m, i / 2 ? bare : gpt, KN_F32, KN_CPU));
        for (int times = 0; times < 2; times++) /* the second one replaces the first */
            KN_CHECK(kn_export(temp_path("out"), &m, .comm = kn_comm_self(), .tokenizer = t,
                               .format = format,
                               .gpt = llama ? NULL : kn_gpt_config_of((kn_gpt *)&m),
                               .llama = llama ? kn_llama_config_of((kn_llama *)&m) : NULL));
        kn_imported *x = kn_import_open(temp_path("out"), .comm = kn_comm_self());
        KN_CHECK(x);
        KN_CHECK(kn_config_init(&again, kn_import_config(x), KN_F32, KN_CPU) &&
                 kn_import_load(x, &again));
        same_parameters(&m, &again);
        const void *want = llama ? (const void *)kn_llama_config_of((kn_llama *)&m) : NULL;
        KN_CHECK(!want || memcmp(want, kn_import_llama(x), sizeof(kn_llama_config)) == 0, "%d", i);
        kn_tokenizer *read = kn_import_tokenizer(x);
        KN_CHECK((read != NULL) == (format == KN_EXPORT_GGUF));
        KN_CHECK(!read || kn_tokenizer_id(read, " ") == kn_tokenizer_id(t, " "));
        kn_clear_error();
        kn_tokenizer_free(read);
        kn_import_free(x);
        kn_scope_end(scope);
        kn_module_free(&m);
        kn_module_free(&again);
        remove_temp();
    }
}

/* A table over a model writes that model's files. */
KN_TEST(one_file, exported_by_another_table)
{
    kn_llama l = { 0 };
    kn_gpt g = { 0 };
    kn_family own = kn_llama_family;
    KN_CHECK(kn_llama_init(&l, rope, KN_F32, KN_CPU) && kn_gpt_init(&g, gpt, KN_F32, KN_CPU));
    const kn_llama_config *want = kn_llama_config_of(&l);
    kn_model_config c = kn_config_of(&own, want);
    kn_export_options o = { .format = KN_EXPORT_GGUF, .comm = kn_comm_self() };
    KN_CHECK(kn_language_save(temp_path("out"), &l, &c, o));
    kn_imported *x = kn_import_open(temp_path("out"), .comm = kn_comm_self());
    KN_CHECK(x && memcmp(want, kn_import_llama(x), sizeof *want) == 0);
    kn_import_free(x);
    remove_temp();
    own = kn_gpt_family;
    c = kn_config_of(&own, kn_gpt_config_of(&g));
    o.format = KN_EXPORT_LLMC;
    KN_CHECK(kn_language_save(temp_path("out"), &g, &c, o));
    remove_temp();
    kn_module_free(&l);
    kn_module_free(&g);
}

KN_TEST(one_file, not_exported)
{
    kn_gpt g = { 0 };
    kn_llama l = { 0 };
    KN_CHECK(kn_gpt_init(&g, gpt, KN_F32, KN_CPU) && kn_llama_init(&l, qwen2, KN_F32, KN_CPU));
    REFUSED(kn_export(temp_path("out"), &l, .llama = kn_llama_config_of(&l),
                      .format = KN_EXPORT_LLMC, .comm = kn_comm_self()),
            "llm.c's files hold GPT-2s, and the model is a Llama");
    REFUSED(kn_export(temp_path("out"), &g, .gpt = &gpt, .format = KN_EXPORT_LLMC, .dtype = KN_F16,
                      .comm = kn_comm_self()),
            "llm.c's files are of f32 or bf16, not f16");
    REFUSED(kn_export(temp_path("out"), &g, .gpt = &gpt, .format = KN_EXPORT_GGUF, .dtype = KN_F64,
                      .comm = kn_comm_self()),
            "a GGUF is of f32, f16 or bf16, not f64");
    REFUSED(kn_export(temp_path("out"), &g, .gpt = &gpt, .format = (kn_export_format)7,
                      .comm = kn_comm_self()),
            ".format is 7");
    write_temp("model.gguf", "GGUF", 4);
    REFUSED(
        kn_export(temp_folder, &g, .gpt = &gpt, .format = KN_EXPORT_GGUF, .comm = kn_comm_self()),
        "holds a model.gguf that Knap didn't export");
    REFUSED(kn_export(temp_folder, &g, .gpt = &gpt, .format = KN_EXPORT_HF, .comm = kn_comm_self()),
            "holds a model.gguf, an export of another format");
    KN_CHECK(unlink(temp_path("model.gguf")) == 0);
    write_temp("model.bin", "other", 5);
    REFUSED(
        kn_export(temp_folder, &g, .gpt = &gpt, .format = KN_EXPORT_LLMC, .comm = kn_comm_self()),
        "holds a model.bin that Knap didn't export");
    kn_module_free(&g);
    kn_module_free(&l);
}
