/* models/tokens/pattern.c: the patterns that cut texts into words. Their files come with the syntax
 * and the tables of Oniguruma, by which the tokenizers library matches them; here they are PCRE2's.
 * Where the two differ, the pattern is written anew: \s is Unicode's White_Space, and the classes
 * of characters are those of Unicode 16, whatever Unicode PCRE2 knows. */
#include "kernels/error_internal.h"
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

/* Characters that came in Unicode 15, 15.1 and 16, by category and script; "": a script that came
 * with them. */
static const struct {
    const char *category, *script, *short_script, *ranges;
} added[] = {
    { "Ll", "", "", "10d70-10d85" },
    { "Lm", "", "", "10d4e 10d6f 16d40-16d42 16d6b-16d6c 1e4eb" },
    { "Lo", "", "",
      "105c0-105f3 10d4a-10d4d 10d4f 11380-11389 1138b 1138e 11390-113b5 113b7 113d1 113d3 "
      "11bc0-11be0 11f02 11f04-11f10 11f12-11f33 16100-1611d 16d43-16d6a 1e4d0-1e4ea "
      "1e5d0-1e5ed 1e5f0" },
    { "Lu", "", "", "10d50-10d65" },
    { "Mc", "", "",
      "113b8-113ba 113c2 113c5 113c7-113ca 113cc-113cd 113cf 11f03 11f34-11f35 11f3e-11f3f "
      "11f41 1612a-1612c" },
    { "Mn", "", "",
      "10d69-10d6d 113bb-113c0 113ce 113d0 113d2 113e1-113e2 11f00-11f01 11f36-11f3a 11f40 "
      "11f42 11f5a 1611e-16129 1612d-1612f 1e4ec-1e4ef 1e5ee-1e5ef" },
    { "Nd", "", "",
      "10d40-10d49 11bf0-11bf9 11f50-11f59 16130-16139 16d70-16d79 1e4f0-1e4f9 1e5f1-1e5fa" },
    { "Pd", "", "", "10d6e" },
    { "Po", "", "", "113d4-113d5 113d7-113d8 11be1 11f43-11f4f 16d6d-16d6f 1e5ff" },
    { "Sm", "", "", "10d8e-10d8f" },
    { "Lo", "Arabic", "Arab", "10ec2-10ec4" },
    { "Mn", "Arabic", "Arab", "897 10efc-10eff" },
    { "Po", "Balinese", "Bali", "1b4e-1b4f 1b7f" },
    { "Nd", "Common", "Zyyy", "1ccf0-1ccf9" },
    { "No", "Common", "Zyyy", "1d2c0-1d2d3" },
    { "So", "Common", "Zyyy",
      "2427-2429 2ffc-2fff 31e4-31e5 31ef 1cc00-1ccef 1cd00-1ceb3 1f6dc 1f774-1f776 "
      "1f77b-1f77f 1f7d9 1f8b2-1f8bb 1f8c0-1f8c1 1fa75-1fa77 1fa87-1fa89 1fa8f 1faad-1faaf "
      "1fabb-1fabf 1fac6 1face-1facf 1fada-1fadc 1fadf 1fae8-1fae9 1faf7-1faf8 1fbcb-1fbef" },
    { "Ll", "Cyrillic", "Cyrl", "1c8a" },
    { "Lm", "Cyrillic", "Cyrl", "1e030-1e06d" },
    { "Lu", "Cyrillic", "Cyrl", "1c89" },
    { "Mn", "Cyrillic", "Cyrl", "1e08f" },
    { "Po", "Devanagari", "Deva", "11b00-11b09" },
    { "Cf", "EgyptianHieroglyphs", "Egyp", "13439-1343f" },
    { "Lo", "EgyptianHieroglyphs", "Egyp", "1342f 13441-13446 13460-143fa" },
    { "Mn", "EgyptianHieroglyphs", "Egyp", "13440 13447-13455" },
    { "Lo", "Han", "Hani", "2b739 2ebf0-2ee5d 31350-323af" },
    { "Lo", "Hiragana", "Hira", "1b132" },
    { "Mc", "Kannada", "Knda", "cf3" },
    { "Lo", "Katakana", "Kana", "1b155" },
    { "Lo", "KhitanSmallScript", "Kits", "18cff" },
    { "Lo", "Khojki", "Khoj", "1123f-11240" },
    { "Mn", "Khojki", "Khoj", "11241" },
    { "Mn", "Lao", "Laoo", "ece" },
    { "Ll", "Latin", "Latn", "a7cd a7db 1df25-1df2a" },
    { "Lu", "Latin", "Latn", "a7cb-a7cc a7da a7dc" },
    { "Nd", "Myanmar", "Mymr", "116d0-116e3" },
};

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
static void put_added(FILE *out, const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof added / sizeof *added; i++) {
        const char *category = added[i].category;
        char *end;
        const bool is = !is_category(name, length)
                            ? is_named(name, length, added[i].script) ||
                                  is_named(name, length, added[i].short_script)
                            : is_named(name, length, category) ||
                                  is_named(name, length, (const char[]){ *category, 0 }) ||
                                  (is_named(name, length, "LC") && *category == 'L' &&
                                   strchr("ul", category[1]));
        for (const char *at = is ? added[i].ranges : ""; *at; at = end + strspn(end, " ")) {
            const unsigned long first = strtoul(at, &end, 16),
                                last = *end == '-' ? strtoul(end + 1, &end, 16) : first;
            fprintf(out, "\\x{%lx}-\\x{%lx}", first, last);
        }
    }
}

/* Writes the class \p{NAME} or \P{NAME} at p; returns its length, 0 where it isn't one that can be
 * written. */
static size_t put_property(FILE *out, const char *p, bool in_class, int version)
{
    const char *name = p[2] == '{' ? p + 3 : p + 2;
    const char *end = p[2] == '{' ? strchr(p, '}') : p[2] ? p + 3 : NULL;
    if (!end)
        return 0;
    const bool other = (p[1] == 'P') != (*name == '^');
    name += *name == '^';
    const size_t length = (size_t)(end - name);
    /* A difference of sets, also from those without a character. */
    if (version < 16 &&
        ((other && in_class) || is_named(name, length, "C") || is_named(name, length, "Cn")))
        return 0;
    /* of \p{Han} it would take a wider set, Script_Extensions */
    const bool narrow = !is_category(name, length) && version >= 14;
    fprintf(out, "%s\\%c{%s%.*s}",
            in_class ? ""
            : other  ? "[^"
                     : "[",
            other && in_class ? 'P' : 'p', narrow ? "sc:" : "", (int)length, name);
    if (version < 16)
        put_added(out, name, length);
    if (!in_class)
        fputs("]", out);
    return (size_t)(end - p) + (*end == '}');
}

/* Writes the part of a pattern at p in PCRE2's words; returns its length, 0 where PCRE2 reads it
 * otherwise. */
static size_t put_part(FILE *out, const char *p, bool *in_class, int version)
{
    const bool escaped = *p == '\\' && p[1];
    size_t n = escaped ? 2 : 1;
    if ((escaped && strchr("hHKCwW", p[1])) || (*p == '(' && p[1] == '*') ||
        strncmp(p, "(?C", 3) == 0)
        return 0;
    if (escaped && (p[1] == 'p' || p[1] == 'P'))
        return put_property(out, p, *in_class, version);
    if (escaped && (p[1] == 's' || (p[1] == 'S' && !*in_class))) {
        fprintf(out, *in_class ? "%s%s" : "[%s%s]", p[1] == 'S' ? "^" : "", SPACES);
        return n;
    }
    if (*in_class && (*p == '[' || (*p == '&' && p[1] == '&')))
        return 0;
    if (!*in_class && *p == '}' && p[1] == '+') /* a count that is repeated, not a possessive one */
        return 0;
    if (*p == '[') { /* a ] in front is no end of the class */
        *in_class = true;
        n += p[1] == '^';
        n += p[n] == ']';
    } else if (*p == ']')
        *in_class = false;
    fwrite(p, 1, n, out);
    return n;
}

/* The pattern in PCRE2's words, to be freed with free; NULL with an error. */
static char *translate(const char *pattern, const char *where)
{
    char version[32] = "", *text = NULL;
    size_t size, n = 1;
    bool in_class = false;
    const char *p = pattern;
    FILE *out = open_memstream(&text, &size);
    pcre2_config(PCRE2_CONFIG_UNICODE_VERSION, version);
    for (; out && *p && n > 0; p += n)
        n = put_part(out, p, &in_class, atoi(version));
    if (!*pattern)
        kn_fail("%s: an empty pattern", where);
    else if (n == 0)
        kn_fail(
            "%s: the pattern \"%.200s\" has \"%.2s\", which PCRE2 reads otherwise: this library "
            "doesn't take it",
            where, pattern, p);
    if ((!out || fclose(out) != 0) && kn_ok())
        kn_fail_memory("%s: no memory for a pattern", where);
    if (kn_ok())
        return text;
    free(text);
    return NULL;
}

bool kn_cut_pattern(kn_cut *c, const char *pattern, bool literal, const char *where)
{
    char *text = literal ? NULL : translate(pattern, where);
    if (!literal && !text)
        return false;
    int error;
    PCRE2_SIZE at;
    uint32_t back = 0, empty = 0;
    pcre2_code *code = pcre2_compile(
        (PCRE2_SPTR)(literal ? pattern : text), PCRE2_ZERO_TERMINATED,
        PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE), &error, &at, NULL);
    free(text);
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
