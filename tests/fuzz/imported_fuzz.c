/* tests/fuzz/imported_fuzz.c: language models of others: a GGUF, llm.c's weights, and a config.json
 * beside the tensors of a small Llama. */
#include "models/imported_internal.h"
#include "tests/fuzz/fuzz.h"

/* What can be opened has a model of these sizes, a tokenizer or an error, and can be read. */
static void use_model(kn_imported *x)
{
    kn_module m = { 0 };
    const int64_t *ends;
    const kn_model_config *c = x ? kn_import_config(x) : NULL;
    if (!c)
        return;
    const int64_t vocab = (int64_t)kn_config_get(c, "vocab", 0);
    for (int i = 0; i < kn_import_ends(x, &ends); i++)
        FUZZ_CHECK(ends[i] >= 0 && ends[i] < vocab);
    if (kn_config_init(&m, c, KN_F32, KN_META))
        FUZZ_CHECK(kn_materialize(&m, KN_CPU, 1) && (kn_import_load(x, &m) || !kn_ok()));
    kn_module_free(&m);
    kn_clear_error();
    kn_tokenizer *t = kn_import_tokenizer(x);
    FUZZ_CHECK(t || !kn_ok());
    kn_tokenizer_free(t);
    kn_import_free(x);
}

KN_FUZZ(gguf, .factor = 4000, .extra = 4 << 20)
{
    use_model(kn_import_open(fuzz_file("model.gguf", data, size)));
}

/* The first 32 bytes are the numbers of the header, the others come behind it. */
KN_FUZZ(llmc, .factor = 4000, .extra = 4 << 20)
{
    static uint8_t file[1024 + 16384];
    const size_t head = size < 32 ? size : 32, rest = size - head < 16384 ? size - head : 16384;
    memset(file, 0, 1024);
    memcpy(file, data, head);
    memcpy(file + 1024, data + head, rest);
    use_model(kn_import_open(fuzz_file("model.bin", file, 1024 + rest)));
}

static bool save_model(const char *folder)
{
    const kn_llama_config llama = {
        .layers = 1, .heads = 2, .embd = 4, .hidden = 4, .ctx = 4, .vocab = 5
    };
    kn_llama n = { 0 };
    const bool ok = kn_llama_init(&n, llama, KN_F32, KN_META) && kn_materialize(&n, KN_CPU, 1) &&
                    kn_export(folder, &n, .llama = kn_llama_config_of(&n));
    kn_module_free(&n);
    return ok;
}

KN_FUZZ(import_config, .factor = 800, .extra = 4 << 20)
{
    static fuzz_kept kept;
    fuzz_tensors(&kept, save_model);
    fuzz_file("config.json", data, size);
    use_model(kn_import_open(fuzz_folder()));
}
