/* models/tokens/pattern.c: the patterns that cut texts into words. Their files come with the syntax
 * and the tables of Oniguruma, by which the tokenizers library matches them; here they are PCRE2's.
 * Where the two differ, the pattern is written anew: \s is Unicode's White_Space, and the classes
 * of characters are those of Unicode 16, whatever Unicode PCRE2 knows. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"

#ifdef KN_HAVE_PCRE2
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#endif
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name, *pattern;
} named[] = {
    { "gpt2",
      "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+" },
    { "llama3", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}|"
                " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+" },
    { "qwen", "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}|"
              " ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+" },
};

const char *kn_cut_named(const char *name)
{
    for (size_t i = 0; i < sizeof named / sizeof *named; i++)
        if (strcmp(named[i].name, name) == 0)
            return named[i].pattern;
    return NULL;
}

#ifdef KN_HAVE_PCRE2

/* White_Space, as ranges of a class. PCRE2's \s has U+180E too, which was one until Unicode 6.3. */
static const char SPACES[] = "\\x09-\\x0d\\x20\\x85\\xa0\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{"
                             "2029}\\x{202f}\\x{205f}\\x{3000}";

/* Scripts that got characters in Unicode 15, 15.1 and 16. */
enum script {
    NEW,
    ARAB,
    BALI,
    COMMON,
    CYRL,
    DEVA,
    EGYP,
    HANI,
    HIRA,
    KANA,
    KHOJ,
    KITS,
    KNDA,
    LAOO,
    LATN,
    MYMR
};
static const char *const script_names[][2] = { [NEW] = { "", "" },
                                               [ARAB] = { "Arabic", "Arab" },
                                               [BALI] = { "Balinese", "Bali" },
                                               [COMMON] = { "Common", "Zyyy" },
                                               [CYRL] = { "Cyrillic", "Cyrl" },
                                               [DEVA] = { "Devanagari", "Deva" },
                                               [EGYP] = { "EgyptianHieroglyphs", "Egyp" },
                                               [HANI] = { "Han", "Hani" },
                                               [HIRA] = { "Hiragana", "Hira" },
                                               [KANA] = { "Katakana", "Kana" },
                                               [KHOJ] = { "Khojki", "Khoj" },
                                               [KITS] = { "KhitanSmallScript", "Kits" },
                                               [KNDA] = { "Kannada", "Knda" },
                                               [LAOO] = { "Lao", "Laoo" },
                                               [LATN] = { "Latin", "Latn" },
                                               [MYMR] = { "Myanmar", "Mymr" } };

/* Those characters, by category and script; NEW is one that came with them. */
static const struct {
    uint32_t first, last;
    char category[3];
    enum script script;
} added[] = { { 0x897, 0x897, "Mn", ARAB },       { 0xcf3, 0xcf3, "Mc", KNDA },
              { 0xece, 0xece, "Mn", LAOO },       { 0x1b4e, 0x1b4f, "Po", BALI },
              { 0x1b7f, 0x1b7f, "Po", BALI },     { 0x1c89, 0x1c89, "Lu", CYRL },
              { 0x1c8a, 0x1c8a, "Ll", CYRL },     { 0x2427, 0x2429, "So", COMMON },
              { 0x2ffc, 0x2fff, "So", COMMON },   { 0x31e4, 0x31e5, "So", COMMON },
              { 0x31ef, 0x31ef, "So", COMMON },   { 0xa7cb, 0xa7cc, "Lu", LATN },
              { 0xa7cd, 0xa7cd, "Ll", LATN },     { 0xa7da, 0xa7da, "Lu", LATN },
              { 0xa7db, 0xa7db, "Ll", LATN },     { 0xa7dc, 0xa7dc, "Lu", LATN },
              { 0x105c0, 0x105f3, "Lo", NEW },    { 0x10d40, 0x10d49, "Nd", NEW },
              { 0x10d4a, 0x10d4d, "Lo", NEW },    { 0x10d4e, 0x10d4e, "Lm", NEW },
              { 0x10d4f, 0x10d4f, "Lo", NEW },    { 0x10d50, 0x10d65, "Lu", NEW },
              { 0x10d69, 0x10d6d, "Mn", NEW },    { 0x10d6e, 0x10d6e, "Pd", NEW },
              { 0x10d6f, 0x10d6f, "Lm", NEW },    { 0x10d70, 0x10d85, "Ll", NEW },
              { 0x10d8e, 0x10d8f, "Sm", NEW },    { 0x10ec2, 0x10ec4, "Lo", ARAB },
              { 0x10efc, 0x10eff, "Mn", ARAB },   { 0x1123f, 0x11240, "Lo", KHOJ },
              { 0x11241, 0x11241, "Mn", KHOJ },   { 0x11380, 0x11389, "Lo", NEW },
              { 0x1138b, 0x1138b, "Lo", NEW },    { 0x1138e, 0x1138e, "Lo", NEW },
              { 0x11390, 0x113b5, "Lo", NEW },    { 0x113b7, 0x113b7, "Lo", NEW },
              { 0x113b8, 0x113ba, "Mc", NEW },    { 0x113bb, 0x113c0, "Mn", NEW },
              { 0x113c2, 0x113c2, "Mc", NEW },    { 0x113c5, 0x113c5, "Mc", NEW },
              { 0x113c7, 0x113ca, "Mc", NEW },    { 0x113cc, 0x113cd, "Mc", NEW },
              { 0x113ce, 0x113ce, "Mn", NEW },    { 0x113cf, 0x113cf, "Mc", NEW },
              { 0x113d0, 0x113d0, "Mn", NEW },    { 0x113d1, 0x113d1, "Lo", NEW },
              { 0x113d2, 0x113d2, "Mn", NEW },    { 0x113d3, 0x113d3, "Lo", NEW },
              { 0x113d4, 0x113d5, "Po", NEW },    { 0x113d7, 0x113d8, "Po", NEW },
              { 0x113e1, 0x113e2, "Mn", NEW },    { 0x116d0, 0x116e3, "Nd", MYMR },
              { 0x11b00, 0x11b09, "Po", DEVA },   { 0x11bc0, 0x11be0, "Lo", NEW },
              { 0x11be1, 0x11be1, "Po", NEW },    { 0x11bf0, 0x11bf9, "Nd", NEW },
              { 0x11f00, 0x11f01, "Mn", NEW },    { 0x11f02, 0x11f02, "Lo", NEW },
              { 0x11f03, 0x11f03, "Mc", NEW },    { 0x11f04, 0x11f10, "Lo", NEW },
              { 0x11f12, 0x11f33, "Lo", NEW },    { 0x11f34, 0x11f35, "Mc", NEW },
              { 0x11f36, 0x11f3a, "Mn", NEW },    { 0x11f3e, 0x11f3f, "Mc", NEW },
              { 0x11f40, 0x11f40, "Mn", NEW },    { 0x11f41, 0x11f41, "Mc", NEW },
              { 0x11f42, 0x11f42, "Mn", NEW },    { 0x11f43, 0x11f4f, "Po", NEW },
              { 0x11f50, 0x11f59, "Nd", NEW },    { 0x11f5a, 0x11f5a, "Mn", NEW },
              { 0x1342f, 0x1342f, "Lo", EGYP },   { 0x13439, 0x1343f, "Cf", EGYP },
              { 0x13440, 0x13440, "Mn", EGYP },   { 0x13441, 0x13446, "Lo", EGYP },
              { 0x13447, 0x13455, "Mn", EGYP },   { 0x13460, 0x143fa, "Lo", EGYP },
              { 0x16100, 0x1611d, "Lo", NEW },    { 0x1611e, 0x16129, "Mn", NEW },
              { 0x1612a, 0x1612c, "Mc", NEW },    { 0x1612d, 0x1612f, "Mn", NEW },
              { 0x16130, 0x16139, "Nd", NEW },    { 0x16d40, 0x16d42, "Lm", NEW },
              { 0x16d43, 0x16d6a, "Lo", NEW },    { 0x16d6b, 0x16d6c, "Lm", NEW },
              { 0x16d6d, 0x16d6f, "Po", NEW },    { 0x16d70, 0x16d79, "Nd", NEW },
              { 0x18cff, 0x18cff, "Lo", KITS },   { 0x1b132, 0x1b132, "Lo", HIRA },
              { 0x1b155, 0x1b155, "Lo", KANA },   { 0x1cc00, 0x1ccef, "So", COMMON },
              { 0x1ccf0, 0x1ccf9, "Nd", COMMON }, { 0x1cd00, 0x1ceb3, "So", COMMON },
              { 0x1d2c0, 0x1d2d3, "No", COMMON }, { 0x1df25, 0x1df2a, "Ll", LATN },
              { 0x1e030, 0x1e06d, "Lm", CYRL },   { 0x1e08f, 0x1e08f, "Mn", CYRL },
              { 0x1e4d0, 0x1e4ea, "Lo", NEW },    { 0x1e4eb, 0x1e4eb, "Lm", NEW },
              { 0x1e4ec, 0x1e4ef, "Mn", NEW },    { 0x1e4f0, 0x1e4f9, "Nd", NEW },
              { 0x1e5d0, 0x1e5ed, "Lo", NEW },    { 0x1e5ee, 0x1e5ef, "Mn", NEW },
              { 0x1e5f0, 0x1e5f0, "Lo", NEW },    { 0x1e5f1, 0x1e5fa, "Nd", NEW },
              { 0x1e5ff, 0x1e5ff, "Po", NEW },    { 0x1f6dc, 0x1f6dc, "So", COMMON },
              { 0x1f774, 0x1f776, "So", COMMON }, { 0x1f77b, 0x1f77f, "So", COMMON },
              { 0x1f7d9, 0x1f7d9, "So", COMMON }, { 0x1f8b2, 0x1f8bb, "So", COMMON },
              { 0x1f8c0, 0x1f8c1, "So", COMMON }, { 0x1fa75, 0x1fa77, "So", COMMON },
              { 0x1fa87, 0x1fa89, "So", COMMON }, { 0x1fa8f, 0x1fa8f, "So", COMMON },
              { 0x1faad, 0x1faaf, "So", COMMON }, { 0x1fabb, 0x1fabf, "So", COMMON },
              { 0x1fac6, 0x1fac6, "So", COMMON }, { 0x1face, 0x1facf, "So", COMMON },
              { 0x1fada, 0x1fadc, "So", COMMON }, { 0x1fadf, 0x1fadf, "So", COMMON },
              { 0x1fae8, 0x1fae9, "So", COMMON }, { 0x1faf7, 0x1faf8, "So", COMMON },
              { 0x1fbcb, 0x1fbef, "So", COMMON }, { 0x2b739, 0x2b739, "Lo", HANI },
              { 0x2ebf0, 0x2ee5d, "Lo", HANI },   { 0x31350, 0x323af, "Lo", HANI } };

typedef struct writer {
    char *text;
    int64_t used, room;
    bool failed;
} writer;

static void put(writer *w, const char *text, size_t length)
{
    if (w->failed || !kn_host_grow(&w->text, &w->room, w->used + (int64_t)length + 1, 1)) {
        w->failed = true;
        return;
    }
    memcpy(w->text + w->used, text, length);
    w->used += (int64_t)length;
    w->text[w->used] = 0;
}

/* Whether a name in a pattern is this one: upper or lower case, with or without "_". */
static bool is_named(const char *text, size_t length, const char *name)
{
    for (size_t i = 0; i < length; i++)
        if (!strchr("_- ", text[i]) && (!*name || tolower(text[i]) != tolower(*name++)))
            return false;
    return length > 0 && !*name;
}

/* A category ("L", "Lu", "LC"), not a script. */
static bool is_category(const char *name, size_t length)
{
    return length == 1 || (length == 2 && strchr("CLMNPSZ", toupper(*name)));
}

/* The later characters of a category or a script, as ranges of a class. */
static void put_added(writer *w, const char *name, size_t length)
{
    char range[40];
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) {
        const char *category = added[i].category, *const *script = script_names[added[i].script];
        const bool is = !is_category(name, length)
                            ? is_named(name, length, script[0]) || is_named(name, length, script[1])
                            : is_named(name, length, category) ||
                                  is_named(name, length, (const char[]){ *category, 0 }) ||
                                  (is_named(name, length, "LC") && *category == 'L' &&
                                   strchr("ul", category[1]));
        if (is)
            put(w, range,
                (size_t)snprintf(range, sizeof range, "\\x{%x}-\\x{%x}", added[i].first,
                                 added[i].last));
    }
}

/* Writes the class \p{NAME} or \P{NAME} at p; returns its length, 0 where it isn't one that can be
 * written. */
static size_t put_property(writer *w, const char *p, bool in_class, int version)
{
    const char *name = p[2] == '{' ? p + 3 : p + 2;
    const char *end = p[2] == '{' ? strchr(p, '}') : p[2] ? p + 3 : NULL;
    if (!end)
        return 0;
    const bool other = (p[1] == 'P') != (*name == '^');
    name += *name == '^';
    const size_t length = (size_t)(end - name), all = (size_t)(end - p) + (*end == '}');
    const bool category = is_category(name, length);
    /* A difference of sets, also from those without a character. */
    if (version < 16 &&
        ((other && in_class) || is_named(name, length, "C") || is_named(name, length, "Cn")))
        return 0;
    if (!in_class)
        put(w, other ? "[^" : "[", other ? 2 : 1);
    put(w, other && in_class ? "\\P{" : "\\p{", 3);
    if (!category && version >= 14) /* it reads \p{Han} as a wider set, Script_Extensions */
        put(w, "sc:", 3);
    put(w, name, length), put(w, "}", 1);
    if (version < 16)
        put_added(w, name, length);
    if (!in_class)
        put(w, "]", 1);
    return all;
}

/* The pattern in PCRE2's words, to be freed; NULL with an error. */
static char *translate(const char *pattern, const char *where)
{
    char version[32] = "";
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    const int unicode = atoi(version);
    writer w = { 0 };
    bool in_class = false;
    for (const char *p = pattern; *p && !w.failed;) {
        size_t n = 1;
        if ((*p == '\\' && p[1] && strchr("hHKCwW", p[1])) || (*p == '(' && p[1] == '*') ||
            strncmp(p, "(?C", 3) == 0)
            goto other;
        if (*p == '\\' && p[1]) {
            n = 0;
            if ((p[1] == 'p' || p[1] == 'P') && (n = put_property(&w, p, in_class, unicode)) == 0)
                goto other;
            if (n == 0 && (p[1] == 's' || (p[1] == 'S' && !in_class))) {
                if (!in_class)
                    put(&w, p[1] == 'S' ? "[^" : "[", p[1] == 'S' ? 2 : 1);
                put(&w, SPACES, sizeof SPACES - 1);
                if (!in_class)
                    put(&w, "]", 1);
                n = 2;
            }
            if (n == 0)
                put(&w, p, n = 2);
            p += n;
            continue;
        }
        if (in_class && (*p == '[' || (*p == '&' && p[1] == '&')))
            goto other;
        if (!in_class && *p == '}' &&
            p[1] == '+') /* a count that is repeated, not a possessive one */
            goto other;
        if (*p == '[' && !in_class) { /* a ] in front is no end of the class */
            in_class = true;
            n += p[1] == '^';
            n += p[n] == ']';
        } else if (*p == ']')
            in_class = false;
        put(&w, p, n);
        p += n;
        continue;
    other:
        kn_fail(
            "%s: the pattern \"%.200s\" has \"%.2s\", which PCRE2 reads otherwise: this library "
            "doesn't take it",
            where, pattern, p);
        kn_host_free(w.text);
        return NULL;
    }
    if (!w.text && !w.failed)
        kn_fail("%s: an empty pattern", where);
    if (w.failed)
        kn_host_free(w.text);
    return w.failed ? NULL : w.text;
}

bool kn_cut_pattern(kn_cut *c, const char *pattern, bool literal, const char *where)
{
    char *text = literal ? kn_host_strdup(pattern) : translate(pattern, where);
    if (!text)
        return false;
    int error;
    PCRE2_SIZE at;
    uint32_t back = 0, empty = 0;
    pcre2_code *code = pcre2_compile(
        (PCRE2_SPTR)text, PCRE2_ZERO_TERMINATED,
        PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE), &error, &at, NULL);
    kn_host_free(text);
    if (!code) {
        PCRE2_UCHAR why[128] = "";
        pcre2_get_error_message(error, why, sizeof why);
        return kn_fail("%s: the pattern \"%.200s\" isn't one: %s", where, pattern, (char *)why);
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* where it can't, pcre2_match goes on without */
    pcre2_pattern_info(code, PCRE2_INFO_MAXLOOKBEHIND, &back);
    c->code = code;
    pcre2_pattern_info(code, PCRE2_INFO_MATCHEMPTY, &empty);
    c->looks_back = back > 0;
    c->may_be_empty = empty != 0;
    return true;
}

void kn_cut_free(kn_cut *c)
{
    pcre2_code_free(c->code);
}

/* ---- matching -------------------------------------------------------------------------------- */

bool kn_matching_begin(kn_matching *m)
{
    m->stack = pcre2_jit_stack_create(32 << 10, 8 << 20, NULL);
    m->match = pcre2_match_data_create(1, NULL);
    m->context = pcre2_match_context_create(NULL);
    if (!m->stack || !m->match || !m->context) {
        kn_matching_end(m);
        return kn_fail_memory("no memory to match a tokenizer's pattern");
    }
    pcre2_jit_stack_assign(m->context, NULL, m->stack);
    return true;
}

void kn_matching_end(kn_matching *m)
{
    pcre2_match_data_free(m->match);
    pcre2_match_context_free(m->context);
    pcre2_jit_stack_free(m->stack);
    *m = (kn_matching){ 0 };
}

bool kn_matching_next(kn_matching *m, const kn_cut *c, const char *text, size_t size, size_t from,
                      size_t *begin, size_t *end)
{
    while (from < size) {
        const int found = pcre2_match(c->code, (PCRE2_SPTR)text, size, from, PCRE2_NO_UTF_CHECK,
                                      m->match, m->context);
        const PCRE2_SIZE *at = pcre2_get_ovector_pointer(m->match);
        if (found == PCRE2_ERROR_NOMATCH)
            break;
        if (found < 0)
            return kn_fail("tokenizer: its pattern takes too long for a text of %zu bytes (PCRE2's "
                           "error %d)",
                           size, found);
        *begin = at[0], *end = at[1];
        if (*end > *begin && *begin >= from)
            return true;
        from = *end + 1;
        while (from < size && ((unsigned char)text[from] & 0xc0) == 0x80)
            from++;
    }
    *begin = *end = size;
    return true;
}

#else

bool kn_matching_begin(kn_matching *m)
{
    (void)m;
    return kn_fail("tokenizer: this library was built without PCRE2");
}

void kn_matching_end(kn_matching *m)
{
    (void)m;
}

bool kn_matching_next(kn_matching *m, const kn_cut *c, const char *text, size_t size, size_t from,
                      size_t *begin, size_t *end)
{
    (void)m, (void)c, (void)text, (void)from;
    *begin = *end = size;
    return true;
}

bool kn_cut_pattern(kn_cut *c, const char *pattern, bool literal, const char *where)
{
    (void)c, (void)pattern, (void)literal;
    return kn_fail("%s: its words are cut by a pattern, and this library was built without PCRE2: "
                   "install libpcre2-dev and build it again",
                   where);
}

void kn_cut_free(kn_cut *c)
{
    (void)c;
}

#endif
