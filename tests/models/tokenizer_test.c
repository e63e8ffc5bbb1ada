/* tests/models/tokenizer_test.c: texts to ids and back, and tokenizer files, also hostile ones. */
#include "data/data.h"
#include "models/tokenizer.h"
#include "tests/models/temp.h"

/* "b NUL a newline e-acute alpha snowman smiley b U+FFFF U+10FFFF": one to four bytes of UTF-8. */
static const char mixed[] = "b\0a\n\xc3\xa9\xce\xb1\xe2\x98\x83\xf0\x9f\x98\x80"
                            "b\xef\xbf\xbf\xf4\x8f\xbf\xbf";
#define MIXED_LENGTH (sizeof mixed - 1)
static const int64_t mixed_ids[] = { 3, 0, 2, 1, 4, 5, 6, 8, 3, 7, 9 };
#define MIXED_IDS (int64_t)(sizeof mixed_ids / sizeof mixed_ids[0])

/* text -> ids -> text is the identity; returns the number of ids. */
static int64_t round_trip(const kn_tokenizer *t, const char *text, size_t len)
{
    int64_t *ids = malloc(len * sizeof *ids);
    char *back = malloc(len + 1);
    int64_t n = kn_tokenizer_encode(t, text, len, ids, KN_I64);
    KN_CHECK(n >= 0, "%s", kn_error());
    int64_t length = kn_tokenizer_decode(t, ids, n, back, len + 1);
    KN_CHECK(length == (int64_t)len && memcmp(back, text, len) == 0 && back[len] == '\0');
    free(ids);
    free(back);
    return n;
}

KN_TEST(tokenizer, bytes)
{
    char all[512];
    for (int i = 0; i < 512; i++)
        all[i] = (char)(i * 7);
    kn_tokenizer *t = kn_tokenizer_create("byte", NULL, 0);
    KN_CHECK(t && kn_tokenizer_vocab(t) == 256 && strcmp(kn_tokenizer_kind(t), "byte") == 0);
    KN_CHECK(round_trip(t, all, sizeof all) == 512);
    int32_t id;
    KN_CHECK(kn_tokenizer_encode(t, "\xff", 1, &id, KN_I32) == 1 && id == 255);
    kn_tokenizer_free(t);
    KN_CHECK(!kn_tokenizer_create("bpe", "a", 1));
    KN_CHECK_ERROR("no tokenizer of kind 'bpe'");
}

KN_TEST(tokenizer, characters)
{
    uint16_t u16[MIXED_LENGTH];
    int32_t i32[MIXED_LENGTH];
    kn_tokenizer *t = kn_tokenizer_create("char", mixed, MIXED_LENGTH);
    KN_CHECK_OK();
    KN_CHECK(kn_tokenizer_vocab(t) == 10);
    KN_CHECK(round_trip(t, mixed, MIXED_LENGTH) == MIXED_IDS);
    KN_CHECK(kn_tokenizer_encode(t, mixed, MIXED_LENGTH, u16, KN_U16) == MIXED_IDS);
    KN_CHECK(kn_tokenizer_encode(t, mixed, MIXED_LENGTH, i32, KN_I32) == MIXED_IDS);
    for (int i = 0; i < MIXED_IDS; i++)
        KN_CHECK(u16[i] == mixed_ids[i] && i32[i] == mixed_ids[i], "id %d", i);
    KN_CHECK(kn_tokenizer_encode(t, mixed, MIXED_LENGTH, u16, KN_U8) == -1);
    KN_CHECK_ERROR("do not fit u8");
    kn_tokenizer_free(t);
}

KN_TEST(tokenizer, decoding_into_too_little_room)
{
    char room[3];
    kn_tokenizer *t = kn_tokenizer_create("char", "abc", 3);
    KN_CHECK(kn_tokenizer_decode(t, (int64_t[]){ 0, 1, 2 }, 3, room, sizeof room) == 3);
    KN_CHECK(strcmp(room, "ab") == 0);
    KN_CHECK(kn_tokenizer_decode(t, (int64_t[]){ 2 }, 1, NULL, 0) == 1);
    KN_CHECK(kn_tokenizer_decode(t, (int64_t[]){ 0, 3 }, 2, room, sizeof room) == -1);
    KN_CHECK_ERROR("id 3 at position 1 is outside the vocabulary of 3");
    KN_CHECK(kn_tokenizer_decode(t, (int64_t[]){ -1 }, 1, room, sizeof room) == -1);
    KN_CHECK_ERROR("id -1 at position 0");
    kn_tokenizer_free(t);
}

KN_TEST(tokenizer, characters_outside_the_vocabulary)
{
    int64_t ids[8];
    kn_tokenizer *t = kn_tokenizer_create("char", "abc", 3);
    KN_CHECK(kn_tokenizer_encode(t, "ab\xc3\xa9", 4, ids, KN_I64) == -1);
    KN_CHECK_ERROR("the character '\xc3\xa9' (U+00E9) at byte 2 is not in the vocabulary of 3");
    KN_CHECK(kn_tokenizer_encode(t, "a\n", 2, ids, KN_I64) == -1);
    KN_CHECK_ERROR("the character U+000A at byte 1");
    kn_tokenizer_free(t);
}

KN_TEST(tokenizer, invalid_utf8)
{
    static const char *const bad[] = { "\x80",
                                       "\xc3",
                                       "\xc3(",
                                       "\xc0\x80",
                                       "\xe0\x80\x80",
                                       "\xe2\x98",
                                       "\xed\xa0\x80",
                                       "\xf0\x9f\x98",
                                       "\xf0\x80\x80\x80",
                                       "\xf4\x90\x80\x80",
                                       "\xf8\x88\x80\x80\x80",
                                       "\xff" };
    kn_tokenizer *t = kn_tokenizer_create("char", "ok", 2);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        char text[16];
        int64_t ids[16];
        snprintf(text, sizeof text, "ok%s", bad[i]);
        KN_CHECK(!kn_tokenizer_create("char", text, strlen(text)), "case %zu", i);
        KN_CHECK_ERROR("not valid UTF-8 at byte 2");
        KN_CHECK(kn_tokenizer_encode(t, text, strlen(text), ids, KN_I64) == -1, "case %zu", i);
        KN_CHECK_ERROR("not valid UTF-8 at byte 2");
    }
    kn_tokenizer_free(t);
    KN_CHECK(!kn_tokenizer_create("char", "", 0));
    KN_CHECK_ERROR("the text is empty");
}

KN_TEST(tokenizer, saved_and_loaded)
{
    static const char *const kinds[] = { "char", "byte" };
    for (int k = 0; k < 2; k++) {
        const char *path = temp_path("tokenizer.json");
        kn_tokenizer *t = kn_tokenizer_create(kinds[k], mixed, MIXED_LENGTH), *u = NULL;
        KN_CHECK(t && kn_tokenizer_save(t, path), "%s", kn_error());
        u = kn_tokenizer_load(path);
        KN_CHECK_OK();
        KN_CHECK(strcmp(kn_tokenizer_kind(u), kinds[k]) == 0);
        KN_CHECK(kn_tokenizer_vocab(u) == kn_tokenizer_vocab(t));
        int64_t a[MIXED_LENGTH], b[MIXED_LENGTH];
        int64_t n = kn_tokenizer_encode(t, mixed, MIXED_LENGTH, a, KN_I64);
        KN_CHECK(kn_tokenizer_encode(u, mixed, MIXED_LENGTH, b, KN_I64) == n);
        KN_CHECK(memcmp(a, b, (size_t)n * sizeof *a) == 0);
        round_trip(u, mixed, MIXED_LENGTH);
        kn_tokenizer_free(t);
        kn_tokenizer_free(u);
    }
    KN_CHECK(!kn_tokenizer_load(temp_path("missing.json")));
    KN_CHECK_ERROR("cannot open the tokenizer file");
    kn_tokenizer *t = kn_tokenizer_create("byte", NULL, 0);
    KN_CHECK(!kn_tokenizer_save(t, temp_path("no/such/folder.json")));
    KN_CHECK_ERROR("cannot write");
    kn_tokenizer_free(t);
    remove_temp();
}

KN_TEST(tokenizer, hostile_files)
{
    static const struct {
        const char *json, *says;
    } cases[] = {
        { "", "is no tokenizer file" },
        { "[]", "has no \"kind\" and \"version\"" },
        { "{}", "has no \"kind\" and \"version\"" },
        { "{\"version\": 1}", "has no \"kind\"" },
        { "{\"kind\": \"byte\"}", "and \"version\"" },
        { "{\"version\": \"1\", \"kind\": \"byte\"}", "and \"version\"" },
        { "{\"version\": 2, \"kind\": \"byte\"}", "tokenizer version 2" },
        { "{\"version\": 1, \"kind\": 7}", "has no \"kind\"" },
        { "{\"version\": 1, \"kind\": \"wordy\"}", "kind 'wordy' is unknown" },
        { "{\"version\": 1, \"kind\": \"char\", \"kind\": \"byte\"}", "is no tokenizer file" },
        { "{\"version\": 1, \"kind\": \"char\"}", "\"chars\" must be a list" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": []}", "\"chars\" must be a list" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": \"abc\"}", "\"chars\" must be a list" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": {\"a\": 1}}", "must be a list" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": [1]}", "entry 0 is not one character" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": [\"\"]}", "entry 0 is not one" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": [\"a\", \"bc\"]}",
          "entry 1 is not one" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": [\"b\", \"a\"]}",
          "entry 1 is out of order" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": [\"a\", \"a\"]}", "or a repetition" },
        { "{\"version\": 1, \"kind\": \"char\", \"chars\": [\"\\ud800\"]}",
          "is no tokenizer file" },
        { "{\"version\": 1, \"kind\": \"byte\"} trailing", "is no tokenizer file" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const char *json = cases[i].json;
        KN_CHECK(!kn_tokenizer_parse(json, strlen(json), "t.json"), "taken: %s", json);
        KN_CHECK(strncmp(kn_error(), "t.json", 6) == 0, "%s", kn_error());
        KN_CHECK_ERROR(cases[i].says);
    }
    /* 100000 nested lists are refused before the stack ends */
    char *deep = malloc(100000);
    memset(deep, '[', 100000);
    KN_CHECK(!kn_tokenizer_parse(deep, 100000, "t.json"));
    KN_CHECK_ERROR("is no tokenizer file");
    free(deep);
}

/* Every prefix of a file is refused; every file with one byte changed is refused or gives a valid
 * tokenizer. */
KN_TEST(tokenizer, truncated_and_flipped_files)
{
    static const char json[] = "{\"version\": 1, \"kind\": \"char\", \"chars\": [\"\\n\", \"a\", "
                               "\"b\", \"\xc3\xa9\", \"\\u2603\"]}";
    size_t n = sizeof json - 1;
    char copy[sizeof json];
    kn_tokenizer *t = kn_tokenizer_parse(json, n, "t.json");
    KN_CHECK(t && kn_tokenizer_vocab(t) == 5);
    kn_tokenizer_free(t);
    for (size_t i = 0; i < n; i++) {
        char *exact = malloc(i + 1); /* so that a sanitizer sees a read past the end */
        memcpy(exact, json, i);
        KN_CHECK(!kn_tokenizer_parse(exact, i, "t.json"), "%zu bytes are taken", i);
        KN_CHECK(kn_error() != NULL);
        kn_clear_error();
        free(exact);
    }
    for (size_t i = 0; i < n; i++) {
        for (int b = 0; b < 256; b++) {
            memcpy(copy, json, sizeof json);
            copy[i] = (char)b;
            t = kn_tokenizer_parse(copy, n, "t.json");
            KN_CHECK((t != NULL) == kn_ok(), "byte %zu = %d", i, b);
            if (t)
                KN_CHECK(kn_tokenizer_vocab(t) >= 1 && kn_tokenizer_vocab(t) <= 256);
            kn_tokenizer_free(t);
            kn_clear_error();
        }
    }
}

KN_TEST(tokenizer, tiny_shakespeare_has_65_characters)
{
    kn_mapped map;
    char *path = kn_data_find_quietly("shakespeare");
    if (!path)
        KN_SKIP("Tiny Shakespeare is not on this machine (KNAP_DATA)");
    KN_CHECK(kn_file_map(path, "text file", &map), "%s", kn_error());
    kn_tokenizer *t = kn_tokenizer_create("char", (const char *)map.data, map.size);
    KN_CHECK(t && kn_tokenizer_vocab(t) == 65);
    /* the first ids that nanoGPT's prepare.py prints for "First" : F 18 i 47 r 56 s 57 t 58 */
    int64_t ids[5];
    KN_CHECK(kn_tokenizer_encode(t, (const char *)map.data, 5, ids, KN_I64) == 5);
    KN_CHECK(ids[0] == 18 && ids[1] == 47 && ids[2] == 56 && ids[3] == 57 && ids[4] == 58);
    KN_CHECK(round_trip(t, (const char *)map.data, map.size) == 1115394);
    kn_tokenizer_free(t);
    kn_file_unmap(&map);
    kn_host_free(path);
}
