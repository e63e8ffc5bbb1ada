/* tests/models/tokenizer_changes_test.c: changes of a text before it is cut, and of tokens that
 * are decoded: results of the tokenizers library and of SentencePiece. */
#include "kernels/memory.h"
#include "models/tokenizer.h"
#include "models/tokens/tokens.h"
#include "tests/kn_test.h"
#include "tests/models/owned.h"

/* The byte tokenizer, its ids in the order of bytes, with parts of its file put in place of others:
 * a JSON object. */
static kn_tokenizer *bytes_with(const char *parts)
{
    json_error_t e;
    OWNED_TOKENIZER kn_tokenizer *byte = kn_tokenizer_create("byte", NULL, 0);
    json_t *root = json_loadb(byte->json, byte->json_size, 0, &e), *more = json_loads(parts, 0, &e);
    KN_CHECK(root && more, "%s: %s", parts, e.text);
    json_object_update(root, more);
    char *text = json_dumps(root, 0);
    kn_tokenizer *t = kn_tokenizer_parse(text, strlen(text), "t.json");
    free(text);
    json_decref(root);
    json_decref(more);
    return t;
}

static bool built_without(const char *library)
{
    if (kn_ok() || !strstr(kn_error(), library))
        return false;
    kn_clear_error();
    return true;
}

/* The ids of a text in words: bytes as they are, others as "[256]". */
static void is_read_as(const kn_tokenizer *t, const char *text, const char *wanted)
{
    char got[512] = "";
    int64_t ids[256], n;
    KN_CHECK(t);
    KN_CHECK(kn_tokenizer_most(t, strlen(text)) <= 4096 * 64);
    int64_t count;
    uint32_t *list = kn_tokenizer_list(t, text, strlen(text), KN_U32, &count);
    KN_CHECK(list && count < 256);
    for (n = 0; n < count; n++)
        ids[n] = list[n];
    kn_host_free(list);
    for (int64_t i = 0; i < n; i++)
        snprintf(got + strlen(got), sizeof got - strlen(got), ids[i] < 256 ? "%c" : "[%d]",
                 (int)ids[i]);
    KN_CHECK(strcmp(got, wanted) == 0, "\"%s\" is read as \"%s\", not as \"%s\"", text, got,
             wanted);
}

static void becomes(const char *normalizer, const char *text, const char *wanted)
{
    char parts[2048];
    snprintf(parts, sizeof parts, "{\"normalizer\": %s}", normalizer);
    OWNED_TOKENIZER kn_tokenizer *t = bytes_with(parts);
    if (!built_without("PCRE2") && !built_without("utf8proc"))
        is_read_as(t, text, wanted);
}

KN_TEST(tokenizer_changes, patterns_and_strip)
{
    becomes("{\"type\": \"Strip\", \"strip_left\": true, \"strip_right\": true}",
            "\xe3\x80\x80 \n a b \xc2\xa0", "a b");
    becomes("{\"type\": \"Strip\", \"strip_left\": false, \"strip_right\": true}", " \n a\n",
            " \n a");
    becomes("{\"type\": \"Replace\", \"pattern\": {\"Regex\": \" {2,}\"}, \"content\": \"_-\"}",
            "a  b c     d ", "a_-b c_-d ");
    /* bytes that are no UTF-8 stay where they are */
    becomes(
        "{\"type\": \"Replace\", \"pattern\": {\"Regex\": \"a|\\\\z\xc3\xa9\"}, \"content\": \"\"}",
        "\xff"
        "ab\xc3"
        "a\xff",
        "\xff"
        "b\xc3\xff");
    kn_tokenizer *t =
        bytes_with("{\"normalizer\": {\"type\": \"Replace\", \"pattern\": {\"Regex\": "
                   "\"a*\"}, \"content\": \"b\"}}");
    KN_CHECK(!t);
    if (!built_without("PCRE2"))
        KN_CHECK_ERROR("which may be empty");
}

/* ---- the table of characters ----------------------------------------------------------------- */

enum { UNITS = 1024 };

/* A table: x becomes yy, e becomes E, e with an acute accent of its own e-acute and "!". */
static char *small_table(uint32_t first_unit, uint32_t accent, const char *texts, size_t length)
{
    struct table {
        uint32_t size, unit[UNITS];
        char text[256];
    } t = { .size = sizeof t.unit };
#define UNIT(at, to, ends, label) t.unit[at] = (uint32_t)((at) ^ (to)) << 10 | (ends) << 8 | (label)
    t.unit[0] = first_unit ? first_unit : 256u << 10;
    UNIT(256 ^ 'x', 512, 1, 'x');
    UNIT(256 ^ 'e', 768, 1, 'e');
    UNIT(768 ^ 0xcc, 516, 0, 0xcc);
    UNIT(516 ^ 0x81, 520, 1, 0x81);
    t.unit[512] = 2u | 1u << 31;
    t.unit[768] = 0u | 1u << 31;
    t.unit[520] = accent | 1u << 31;
    memcpy(t.text, texts, length);
    return kn_base64_text(&t, sizeof t.size + sizeof t.unit + length);
}

#define TEXTS "E\0yy\0\xc3\xa9!"

static kn_tokenizer *with_table(const char *base64, const char *how, const char *symbols)
{
    OWNED_BYTES char *parts = malloc(strlen(base64) + 1024);
    sprintf(parts,
            "{\"normalizer\": {\"type\": \"Precompiled\", \"precompiled_charsmap\": \"%s\"%s}, "
            "\"added_tokens\": [%s]}",
            base64, how, symbols);
    kn_tokenizer *t = bytes_with(parts);
    return t;
}

/* The tokenizers library takes the first key that a grapheme begins with, SentencePiece the longest
 * one (both say so of this table), and leaves its user's symbols alone, which are tokens. */
KN_TEST(tokenizer_changes, table_of_characters)
{
    static const char text[] = "axe\xcc\x81"
                               "e\xcc\x81\xcc\x81"
                               "e x\xcc\x81\xff";
    OWNED_HOST char *base64 = small_table(0, 5, TEXTS, sizeof TEXTS);
    OWNED_TOKENIZER kn_tokenizer *t = with_table(base64, "", "");
    if (!built_without("utf8proc"))
        is_read_as(t, text, "ayyEEE yy\xff");
    kn_tokenizer_free(t);
    t = with_table(base64, ", \"longest\": true", "");
    is_read_as(t, text,
               "ayy\xc3\xa9!\xc3\xa9!\xcc\x81"
               "E yy\xcc\x81\xff");
    kn_tokenizer_free(t);
    t = with_table(
        base64, ", \"longest\": true",
        "{\"id\": 256, \"content\": \"xe\", \"user_defined\": true}, {\"id\": 257, "
        "\"content\": \"Ey\", \"user_defined\": true}, {\"id\": 258, \"content\": \"<e>\", "
        "\"special\": true}");
    is_read_as(t, "axb xe ex <e>", "ayyb [256] [257]y [258]");
}

KN_TEST(tokenizer_changes, damaged_tables)
{
    static const struct {
        uint32_t first_unit, accent;
        const char *texts;
        size_t length;
    } cases[] = { { 0, 500, TEXTS, sizeof TEXTS },        /* behind the strings */
                  { 0, 5, TEXTS, 3 },                     /* those are fewer */
                  { 0x1fffffu << 10 | 1 << 9, 5, "", 0 }, /* children far outside */
                  { 0x3ff00u << 10, 5, TEXTS, sizeof TEXTS } };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int64_t count;
        OWNED_HOST char *base64 =
            small_table(cases[i].first_unit, cases[i].accent, cases[i].texts, cases[i].length);
        OWNED_TOKENIZER kn_tokenizer *t = with_table(base64, ", \"longest\": true", "");
        KN_CHECK(t);
        OWNED_HOST void *ids = kn_tokenizer_list(t, "be\xcc\x81x", 5, KN_U32, &count);
        if (i < 2) {
            REFUSED(ids, "table of characters is damaged");
        } else
            KN_CHECK(ids && count == 5);
    }
    static char wide[200];
    memset(wide, 'w', sizeof wide - 1);
    char *base64 = small_table(0, 0, wide, sizeof wide);
    REFUSED(with_table(base64, ", \"longest\": true", ""),
            "puts 199 bytes in the place of one; 64 are read");
    kn_host_free(base64);
    static const char *const bad[] = { "",
                                       "A",
                                       "AAAA",
                                       "AAAAAAAAAAAA",
                                       "BAAAAAAA!AAA",
                                       "BAAAAAA=AAAA",
                                       "8AAAAAAAAAAA",
                                       "BgAAAAAAAAAAAA==" };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        KN_CHECK(!with_table(bad[i], ", \"longest\": true", ""), "%s is taken", bad[i]);
        KN_CHECK_ERROR("(\"precompiled_charsmap\") is damaged");
    }
}

/* ---- added tokens and words ------------------------------------------------------------------ */

/* A token that takes the spaces behind it leaves a token in them, as the library does. */
KN_TEST(tokenizer_changes, token_in_the_spaces_of_another)
{
    OWNED_TOKENIZER kn_tokenizer *t = bytes_with(
        "{\"added_tokens\": [{\"id\": 256, \"content\": \"<x>\", \"rstrip\": true}, {\"id\": 257, "
        "\"content\": \"\\n\\n\"}, {\"id\": 258, \"content\": \"<l>\", \"lstrip\": true}, {\"id\": "
        "259, \"content\": \"<s>\", \"special\": true, \"rstrip\": true}]}");
    is_read_as(t, "<s> \n\n  a<s>", "[259]a[259]"); /* special ones come before all others */
    KN_CHECK(kn_tokenizer_is_special(t, 259) && !kn_tokenizer_is_special(t, 258) &&
             !kn_tokenizer_is_special(t, 97));
    is_read_as(t, "<x> \n\n  a", "[256][257]  a");
    is_read_as(t, "<x>\n\n\n a", "[256][257]\n a");
    is_read_as(t, "<x> \n <x>  <l> b", "[256][256][258] b");
}

/* Scripts are Unicode 16's, not the wider sets (Script_Extensions) that PCRE2 has by default. */
KN_TEST(tokenizer_changes, scripts)
{
    static const struct {
        const char *pattern, *text, *wanted;
    } cases[] = {
        { "\\\\p{Han}",
          "a\xe6\xbc\xa2\xe3\x80\x85\xe3\x83\xbb\xf0\xb1\x8d\x90"
          "b",
          "\xe6\xbc\xa2\xe3\x80\x85\xf0\xb1\x8d\x90" },
        { "[^a\\\\p{hani}]",
          "a\xe6\xbc\xa2\xe3\x83\xbb\xf0\xae\xaf\xb0"
          "b",
          "\xe3\x83\xbb"
          "b" },
        { "\\\\P{Latin}", "a\xea\x9f\x8b.\xea\x9f\x9c", "." },
        { "\\\\p{Yi}", "\xea\x80\x80\xe3\x83\xbb", "\xea\x80\x80" },
        { "\\\\p{LC}", "1\xea\x9f\x8b\xc7\x85.", "\xea\x9f\x8b\xc7\x85" },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char parts[512];
        snprintf(parts, sizeof parts,
                 "{\"pre_tokenizer\": {\"type\": \"Sequence\", \"pretokenizers\": [{\"type\": "
                 "\"Split\", \"pattern\": {\"Regex\": \"%s\"}, \"behavior\": \"Removed\", "
                 "\"invert\": true}, {\"type\": \"ByteLevel\", \"add_prefix_space\": false, "
                 "\"use_regex\": false}]}}",
                 cases[i].pattern);
        OWNED_TOKENIZER kn_tokenizer *t = bytes_with(parts);
        if (built_without("PCRE2"))
            KN_SKIP("this library was built without PCRE2");
        is_read_as(t, cases[i].text, cases[i].wanted);
    }
}

/* ---- decoders -------------------------------------------------------------------------------- */

#define STRIP "{\"type\": \"Strip\", \"content\": \" \", \"start\": 1, \"stop\": 0}"
#define FUSE  "{\"type\": \"Fuse\"}"
#define BYTES "{\"type\": \"ByteFallback\"}"
#define BY(a, b)                                                                                   \
    "{\"type\": \"Replace\", \"pattern\": {\"String\": \"" a "\"}, \"content\": \"" b "\"}"

KN_TEST(tokenizer_changes, decoders)
{
    static const struct {
        const char *decoders, *wanted; /* of "_a", "<0x5F>", "_b" */
    } cases[] = {
        { BY("_", " ") ", " BYTES ", " FUSE ", " STRIP, "a_ b" },
        { BY("_", "%") ", " BY("%", "+") ", " BYTES, "+a_+b" },
        { BY("0x5", "0x4") ", " BYTES ", " FUSE, "_aO_b" },
        { FUSE, "_a<0x5F>_b" },
        { STRIP, NULL },
        { STRIP ", " FUSE, NULL },
        { BYTES ", " BY("_", " "), NULL },
        { FUSE ", " BYTES, NULL },
        { FUSE ", " BY("_", " "), NULL },
        { BYTES ", " STRIP, NULL },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char json[1024], text[64];
        snprintf(
            json, sizeof json,
            "{\"decoder\": {\"type\": \"Sequence\", \"decoders\": [%s]}, \"model\": {\"vocab\": "
            "{\"_a\": 0, \"<0x5F>\": 1, \"_b\": 2}, \"merges\": []}}",
            cases[i].decoders);
        kn_tokenizer *t = kn_tokenizer_parse(json, strlen(json), "t.json");
        KN_CHECK((t != NULL) == (cases[i].wanted != NULL), "%s", cases[i].decoders);
        if (!t) {
            KN_CHECK_ERROR("in a place where this library doesn't read it");
            continue;
        }
        KN_CHECK(kn_tokenizer_decode(t, (int64_t[]){ 0, 1, 2 }, 3, text, sizeof text) > 0);
        KN_CHECK(strcmp(text, cases[i].wanted) == 0, "%s: \"%s\"", cases[i].decoders, text);
        kn_tokenizer_free(t);
    }
}

/* ---- training -------------------------------------------------------------------------------- */

/* A word of a million equal letters; a pass over it for each merge, or this takes minutes. */
KN_TEST(tokenizer_changes, training_on_a_long_word)
{
    const size_t size = (1 << 20) + 7;
    OWNED_BYTES char *text = malloc(size);
    const char *list = text;
    memset(text, 'a', size);
    OWNED_TOKENIZER kn_tokenizer *t = kn_tokenizer_train(&list, &size, 1, .vocab = 300);
    if (t || !built_without("PCRE2")) {
        int64_t count;
        KN_CHECK(t && kn_tokenizer_vocab(t) > 257 + 16);
        OWNED_HOST uint32_t *ids = kn_tokenizer_list(t, text, 64, KN_U32, &count);
        KN_CHECK(ids && count == 1 && ids[0] == 257 + 5, "%d ids", (int)count);
    }
}
