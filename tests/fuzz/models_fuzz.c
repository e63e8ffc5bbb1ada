/* tests/fuzz/models_fuzz.c: the readers of tensor/ and models/: safetensors, tokenizers, token
 * files, texts, options, checkpoints. */
#include "tests/fuzz/fuzz.h"
#include "models/family.h"
#include "models/programs/gpt_settings.h"
#include "models/text.h"
#include "tensor/safetensors.h"

/* jansson keeps an object of 250 bytes for each "{}" of a header. */
KN_FUZZ(safetensors, .factor = 400, .extra = 1 << 20)
{
    kn_safetensors *f = kn_safetensors_open(fuzz_file("x.safetensors", data, size));
    for (int i = 0; f && i < kn_safetensors_count(f); i++) {
        kn_array a;
        const char *name = kn_safetensors_name(f, i);
        kn_scope scope = kn_scope_begin();
        FUZZ_CHECK(kn_safetensors_has(f, name) && kn_safetensors_describe(f, name, &a));
        FUZZ_CHECK(kn_safetensors_get(f, name), "%s", kn_error());
        kn_scope_end(scope);
    }
    if (f)
        kn_safetensors_meta(f, "format");
    kn_safetensors_close(f);
}

/* A tokenizer's text becomes ids, and text again: for bytes the same. */
static void use_tokenizer(kn_tokenizer *t)
{
    static const char text[] = "a <e>b\xc3\xa9\xff A  12";
    const size_t size = sizeof text - 1;
    int64_t *ids = t ? malloc((size_t)kn_tokenizer_most(t, size) * sizeof *ids) : NULL;
    if (ids) {
        const int64_t vocab = kn_tokenizer_vocab(t),
                      n = kn_tokenizer_encode(t, text, size, ids, KN_I64);
        FUZZ_CHECK(vocab > 0 && n <= kn_tokenizer_most(t, size));
        for (int64_t i = 0; i < n; i++)
            FUZZ_CHECK(ids[i] >= 0 && ids[i] < vocab, "id %lld", (long long)ids[i]);
        const int64_t length = n >= 0 ? kn_tokenizer_decode(t, ids, n, NULL, 0) : 0;
        FUZZ_CHECK(length >= 0);
        FUZZ_CHECK(strcmp(kn_tokenizer_kind(t), "byte") != 0 || length == (int64_t)size);
        kn_clear_error();
    }
    free(ids);
    kn_tokenizer_free(t);
}

KN_FUZZ(tokenizer, .factor = 400, .extra = 1 << 20)
{
    use_tokenizer(kn_tokenizer_parse((const char *)data, size, "tokenizer.json"));
}

KN_FUZZ(sentencepiece, .factor = 4000, .extra = 1 << 20)
{
    use_tokenizer(kn_tokenizer_load(fuzz_file("x.model", data, size)));
}

/* vocab.bpe, and behind "||" encoder.json; else beside a vocabulary of two letters. */
KN_FUZZ(merges, .factor = 400, .extra = 1 << 20)
{
    static const char vocab[] = "{\"a\": 0, \"b\": 1, \"ab\": 2, \"aba\": 3}";
    const uint8_t *at = size ? memmem(data, size, "||", 2) : NULL;
    const size_t n = at ? (size_t)(at - data) : size;
    char folder[4096];
    fuzz_file("encoder.json", at ? (const char *)at + 2 : vocab,
              at ? size - n - 2 : sizeof vocab - 1);
    snprintf(folder, sizeof folder, "%s", fuzz_file("vocab.bpe", data, n));
    *strrchr(folder, '/') = 0;
    use_tokenizer(kn_tokenizer_load(folder));
}

/* A file of tokens or a text; "||" and its tokenizer may follow. A vocabulary of characters is
 * made in a table of all code points. */
KN_FUZZ(text, .factor = 400, .extra = 2 << 20)
{
    const uint8_t *at = size ? memmem(data, size, "||", 2) : NULL;
    size_t n = at ? (size_t)(at - data) : size;
    kn_tokenizer *tokenizer = NULL;
    if (at)
        fuzz_file("text.json", at + 2, size - n - 2);
    kn_text *t = kn_text_open(fuzz_file("text", data, n), n % 2 ? "byte" : "char", &tokenizer);
    int64_t x[6], y[6];
    if (t && kn_text_check(t, 3))
        for (int split = 0; split < 2; split++) {
            bool ok = kn_text_batch(t, (kn_text_split)split, 1, 2, 2, 3, x, y);
            for (int i = 0; ok && i < 6; i++)
                FUZZ_CHECK(x[i] >= 0 && x[i] < kn_text_vocab(t) && y[i] < kn_text_vocab(t));
        }
    kn_text_free(t);
    kn_tokenizer_free(tokenizer);
}

/* The first byte says how the rest is read: documents of JSON or between separators, conversations
 * by each template. */
KN_FUZZ(documents, .factor = 400, .extra = 4 << 20)
{
    static const char *const chats[] = { "chatml", "llama3", "llama2", "plain" };
    enum { CTX = 24 };
    const int form = size ? data[0] % 6 : 0;
    int64_t x[2 * CTX], y[2 * CTX], begin[2 * CTX];
    kn_tokenizer *tokenizer = NULL;
    kn_text *t = kn_text_read(fuzz_file("lines", data + (size > 0), size - (size > 0)), &tokenizer,
                              .kind = "byte", .field = form == 0 ? "text" : NULL,
                              .separator = form == 1 ? "--" : NULL,
                              .chat = form > 1 ? chats[form - 2] : NULL);
    const bool fits = t && (form < 2 || kn_text_pack(t, CTX, form % 2)) && kn_text_check(t, CTX);
    for (int split = 0; fits && split < 2; split++) {
        FUZZ_CHECK(kn_text_batch_documents(t, (kn_text_split)split, 1, 2, 2, CTX, x, y, begin),
                   "%s", kn_error());
        for (int i = 0; i < 2 * CTX; i++)
            FUZZ_CHECK(x[i] >= 0 && x[i] < kn_text_vocab(t) && y[i] < kn_text_vocab(t) &&
                       begin[i] >= 0 && begin[i] <= i % CTX);
    }
    kn_text_free(t);
    kn_tokenizer_free(tokenizer);
}

/* Arguments by lines, as on train_gpt's command line; after an empty one recorded "name=value". */
KN_FUZZ(options, .factor = 64, .extra = 1 << 20)
{
    fuzz_input rest = { data, size };
    char room[4096], name[64], *argv[40] = { "train_gpt" }, *p = room;
    int argc = 1;
    size_t left = sizeof room;
    while (rest.size && argc < 40 && left > 1) {
        fuzz_input line = fuzz_part(&rest, '\n');
        if (line.size == 0)
            break;
        argv[argc++] = (char *)(uintptr_t)fuzz_word(&line, '\0', p, left);
        left -= strlen(p) + 1;
        p += strlen(p) + 1;
    }
    gpt_settings s = { 0 };
    kn_options *o = gpt_settings_begin(&s.run) ? kn_options_create(s.run.table, &s) : NULL;
    bool ok = o && kn_options_parse(o, argc, argv);
    while (ok && rest.size) {
        fuzz_input line = fuzz_part(&rest, '\n');
        fuzz_word(&line, '=', name, sizeof name);
        ok = kn_options_restore(o, name, fuzz_word(&line, '\0', room, sizeof room),
                                KN_VALUE_RESTORED);
    }
    kn_model_config c;
    if (ok && !kn_options_help_wanted(o))
        ok = gpt_settings_check(&s, o, kn_world()) && gpt_settings_model(&s, 65, NULL, &c);
    kn_option_record r;
    for (int i = 0; o && kn_options_record(o, i, &r); i++)
        FUZZ_CHECK(r.name && r.value);
    kn_options_free(o);
}

/* A file of train_gpt's options; what it chose, written and read again, is the same. */
KN_FUZZ(options_file, .factor = 64, .extra = 1 << 20)
{
    gpt_settings s = { 0 }, again = { 0 };
    kn_options *o = gpt_settings_begin(&s.run) ? kn_options_create(s.run.table, &s) : NULL;
    if (o && kn_options_load(o, fuzz_file("x.toml", data, size))) {
        char *text = kn_options_toml(o), *other = NULL;
        kn_options *to = kn_options_create(s.run.table, &again);
        FUZZ_CHECK(text && to);
        if (kn_options_load(to, fuzz_file("y.toml", text, strlen(text))))
            other = kn_options_toml(to);
        FUZZ_CHECK(other && strcmp(text, other) == 0, "%s", kn_error());
        kn_host_free(text);
        kn_host_free(other);
        kn_options_free(to);
    }
    kn_options_free(o);
}
