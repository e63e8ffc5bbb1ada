/* tests/models/tokenizer_golden_test.c: ids of tokenizers of every kind beside those of the
 * libraries that made them (tokenizers, sentencepiece: scripts/peers tokens --write). */
#include "data/data.h"
#include "kernels/kernels.h"
#include "models/tokenizer.h"
#include "tests/models/owned.h"
#include "tests/models/temp.h"

#include <jansson.h>

#define FOLDER KNAP_SOURCE_ROOT "/tests/models/tokenizers"

static uint64_t fnv(const uint32_t *ids, int64_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (int64_t i = 0; i < n; i++)
        for (int shift = 0; shift < 32; shift += 8)
            h = (h ^ (ids[i] >> shift & 0xff)) * 0x100000001b3u;
    return h;
}

/* The ids of text, of which the caller frees the list. */
static uint32_t *ids_of(const kn_tokenizer *t, const char *text, size_t size, int64_t *count)
{
    uint32_t *ids = malloc((size_t)kn_tokenizer_most(t, size) * sizeof *ids);
    *count = kn_tokenizer_encode(t, text, size, ids, KN_U32);
    KN_CHECK(*count >= 0);
    return ids;
}

/* Their text, of which the caller frees it. */
static char *text_of(const kn_tokenizer *t, const uint32_t *ids, int64_t count, int64_t *length)
{
    OWNED_BYTES int64_t *list = malloc(((size_t)count + 1) * sizeof *list);
    for (int64_t i = 0; i < count; i++)
        list[i] = ids[i];
    *length = kn_tokenizer_decode(t, list, count, NULL, 0);
    char *text = malloc((size_t)*length + 1);
    KN_CHECK(kn_tokenizer_decode(t, list, count, text, (size_t)*length + 1) == *length);
    return text;
}

static bool with_patterns(void)
{
    kn_tokenizer *t = kn_tokenizer_load(FOLDER "/gpt2");
    if (!t && strstr(kn_error(), "PCRE2")) {
        kn_clear_error();
        return false;
    }
    KN_CHECK(t);
    kn_tokenizer_free(t);
    return true;
}

/* Each row of the file of hashes; whole texts come back but for what a tokenizer changes. */
KN_TEST(tokenizer_golden, ids)
{
    kn_mapped text;
    char line[256], name[64], before[64] = "";
    kn_tokenizer *t = NULL;
    int rows = 0;
    if (!with_patterns())
        KN_SKIP("this library was built without PCRE2");
    KN_CHECK(kn_file_map(FOLDER "/text", "text", &text));
    FILE *f = fopen(FOLDER "/ids", "r");
    KN_CHECK(f != NULL);
    while (fgets(line, sizeof line, f)) {
        long at, size, wanted;
        unsigned long long hash;
        if (sscanf(line, "%63s %ld %ld %ld %llx", name, &at, &size, &wanted, &hash) != 5)
            continue;
        if (strcmp(name, before) != 0) {
            char path[512];
            snprintf(path, sizeof path, "%s/%s", FOLDER, name);
            kn_tokenizer_free(t);
            t = kn_tokenizer_load(path);
            if (!t && strstr(kn_error(), "utf8proc")) {
                kn_clear_error();
                continue;
            }
            KN_CHECK(t && strcmp(kn_tokenizer_kind(t), "bpe") == 0);
            strcpy(before, name);
        }
        int64_t count, length;
        const char *part = (const char *)text.data + at;
        uint32_t *ids = ids_of(t, part, (size_t)size, &count);
        KN_CHECK(count == wanted && fnv(ids, count) == hash, "%s from byte %ld: %lld ids for %ld",
                 name, at, (long long)count, wanted);
        char *back = text_of(t, ids, count, &length);
        if (strcmp(name, "qwen") != 0 && strcmp(name, "spaced") != 0 &&
            strcmp(name, "sentencepiece") != 0 && strcmp(name, "symbols") != 0)
            KN_CHECK(length == size && memcmp(back, part, (size_t)size) == 0, "%s at %ld", name,
                     at);
        free(back);
        free(ids);
        rows++;
    }
    KN_CHECK(rows > 80, "%d rows", rows);
    fclose(f);
    kn_tokenizer_free(t);
    kn_file_unmap(&text);
}

/* Any bytes come back, and several threads give the ids of one. */
KN_TEST(tokenizer_golden, threads_and_any_bytes)
{
    static const char *const names[] = { "gpt2", "llama3", "several" };
    kn_mapped text;
    if (!with_patterns())
        KN_SKIP("this library was built without PCRE2");
    KN_CHECK(kn_file_map(FOLDER "/text", "text", &text));
    const size_t times = 40 / (size_t)kn_one_in(3), size = times * text.size;
    char *all = malloc(size);
    for (size_t i = 0; i < times; i++)
        memcpy(all + i * text.size, text.data, text.size);
    uint64_t seed = 1;
    memset(all + size / 4 - 3000, '7', 6000);             /* in threes, where two of 8 parts meet */
    for (size_t i = size / 2; i < size / 2 + 300000; i++) /* and bytes that are no UTF-8 */
        all[i] = (char)((seed = seed * 6364136223846793005u + 1442695040888963407u) >> 56);
    for (int k = 0; k < 3; k++) {
        char path[512];
        snprintf(path, sizeof path, "%s/%s", FOLDER, names[k]);
        OWNED_TOKENIZER kn_tokenizer *t = kn_tokenizer_load(path);
        int64_t count, counts, length;
        KN_CHECK(t);
        kn_set_threads(1);
        OWNED_BYTES uint32_t *one = ids_of(t, all, size, &count);
        OWNED_BYTES char *back = text_of(t, one, count, &length);
        KN_CHECK(length == (int64_t)size && memcmp(back, all, size) == 0, "%s", names[k]);
        for (int threads = 2; threads <= 4; threads++) {
            kn_set_threads(threads);
            OWNED_BYTES uint32_t *several = ids_of(t, all, size, &counts);
            KN_CHECK(counts == count && memcmp(one, several, (size_t)count * sizeof *one) == 0,
                     "%s, %d threads: %lld ids, one thread %lld", names[k], threads,
                     (long long)counts, (long long)count);
        }
    }
    free(all);
    kn_file_unmap(&text);
}

/* SentencePiece's spaces, and characters that it spells by bytes, come back. */
KN_TEST(tokenizer_golden, pieces_to_text)
{
    static const char *const texts[] = { "the cat sat", " on  the mat. ", "h\xc3\xa9 \xe6\xbc\xa2",
                                         "\xf0\x9f\x98\x80 \n\t\xef\xbf\xbd", " " };
    OWNED_TOKENIZER kn_tokenizer *t = kn_tokenizer_load(FOLDER "/sentencepiece");
    KN_CHECK(t);
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++) {
        int64_t count, length;
        OWNED_BYTES uint32_t *ids = ids_of(t, texts[i], strlen(texts[i]), &count);
        OWNED_BYTES char *back = text_of(t, ids, count, &length);
        KN_CHECK(strcmp(back, texts[i]) == 0, "\"%s\" for \"%s\"", back, texts[i]);
    }
}

/* The golden files were trained on the golden text by the tokenizers library: here come the same
 * vocabularies and merges. */
KN_TEST(tokenizer_golden, training)
{
    static const char *const names[] = { "gpt2", "llama3" };
    kn_mapped text;
    if (!with_patterns())
        KN_SKIP("this library was built without PCRE2");
    KN_CHECK(kn_file_map(FOLDER "/text", "text", &text));
    const char *list = (const char *)text.data;
    for (int k = 0; k < 2; k++)
        for (int threads = 1; threads <= 2; threads++) {
            char path[512];
            json_error_t e;
            kn_set_threads(threads);
            OWNED_TOKENIZER kn_tokenizer *t =
                kn_tokenizer_train(&list, &text.size, 1, .vocab = 700, .pattern = names[k]);
            KN_CHECK(t && kn_tokenizer_save(t, temp_path("trained.json")));
            snprintf(path, sizeof path, "%s/%s/tokenizer.json", FOLDER, names[k]);
            json_t *ours = json_load_file(temp_path("trained.json"), 0, &e),
                   *theirs = json_load_file(path, 0, &e);
            const json_t *mine = json_object_get(ours, "model"),
                         *golden = json_object_get(theirs, "model"),
                         *merges = json_object_get(golden, "merges");
            KN_CHECK(json_equal(json_object_get(mine, "vocab"), json_object_get(golden, "vocab")),
                     "%s: another vocabulary", names[k]);
            KN_CHECK(json_array_size(merges) > 300); /* llama3 lacks the last ones */
            for (size_t i = 0; i < json_array_size(merges); i++)
                KN_CHECK(json_equal(json_array_get(json_object_get(mine, "merges"), i),
                                    json_array_get(merges, i)),
                         "%s: merge %zu", names[k], i);
            KN_CHECK(kn_tokenizer_id(t, "<|endoftext|>") == 0 &&
                     kn_tokenizer_id(t, "no such") == -1);
            KN_CHECK(kn_tokenizer_is_special(t, 0) && !kn_tokenizer_is_special(t, 1) &&
                     !kn_tokenizer_is_special(t, -1) && !kn_tokenizer_is_special(t, 1 << 30));
            json_decref(ours);
            json_decref(theirs);
        }
    kn_file_unmap(&text);
}
