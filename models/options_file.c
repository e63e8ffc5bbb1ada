/* models/options_file.c: options in a file, a subset of TOML: "name = value" a line, with "#"
 * before a comment. A value is a string in quotes, a number, true or false. Tables, dates, strings
 * of several lines and names in quotes are refused. Specification: https://toml.io/en/v1.0.0 */
#include "kernels/error_internal.h"
#include "models/options_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/files.h"

#include <ctype.h>
#include <regex.h>
#include <stdlib.h>
#include <string.h>

#define MOST_BYTES ((size_t)1 << 20) /* of a file */
#define MOST_TEXT  4096              /* of a string, with its end */

typedef struct reader {
    kn_options *o;
    const char *path;
    const char *at, *end; /* what is left of the file */
    int line;
    int *line_of; /* where the file has each row; 0: nowhere */
    bool *fixed;  /* the command line gave the row, or one that it contradicts */
    char text[MOST_TEXT];
} reader;

static bool fail(const reader *r, const char *why)
{
    return kn_fail("%s:%d: %s", r->path, r->line, why);
}

/* The error that stands gets the place before it. */
static bool fail_there(const reader *r)
{
    char why[1024];
    if (kn_error_number() != 0) /* of the system, as no memory */
        return false;
    snprintf(why, sizeof why, "%s", kn_error());
    kn_clear_error();
    return fail(r, why);
}

static void skip_blanks(reader *r)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t'))
        r->at++;
}

static bool is_bare(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-';
}

/* ---- values ---------------------------------------------------------------------------------- */

/* The four or eight digits of a character, written as UTF-8; NUL and halves of pairs are none. */
static bool read_code(reader *r, int digits, size_t *n)
{
    char hex[9] = "";
    for (int i = 0; i < digits && r->at < r->end && isxdigit((unsigned char)*r->at); i++)
        hex[i] = *r->at++;
    if ((int)strlen(hex) < digits)
        return fail(r, "\\u takes four hexadecimal digits, \\U eight");
    const uint32_t code = (uint32_t)strtoul(hex, NULL, 16);
    if (code == 0 || code > 0x10ffff || (code >= 0xd800 && code < 0xe000))
        return fail(r, "a \\u or \\U is no character that an option may have");
    *n += kn_utf8_write(code, r->text + *n);
    return true;
}

static bool read_escape(reader *r, size_t *n)
{
    static const char names[] = "btnfr\"\\", means[] = "\b\t\n\f\r\"\\";
    const char c = r->at < r->end ? *r->at++ : 0;
    const char *known = c ? strchr(names, c) : NULL;
    if (c == 'u' || c == 'U')
        return read_code(r, c == 'u' ? 4 : 8, n);
    if (!known)
        return fail(r, "after a backslash come b, t, n, f, r, u, U, a quote or a backslash");
    r->text[(*n)++] = means[known - names];
    return true;
}

/* "basic" with escapes, 'literal' without. */
static bool read_string(reader *r)
{
    const char quote = *r->at++;
    size_t n = 0;
    if (r->end - r->at >= 2 && r->at[0] == quote && r->at[1] == quote)
        return fail(r,
                    "strings of several lines aren't read; write one line, with \\n for its end");
    while (r->at < r->end && *r->at != quote) {
        if (n + 8 > sizeof r->text)
            return fail(r, "the string is longer than an option may be");
        const char c = *r->at++;
        if (c == '\\' && quote == '"') {
            if (!read_escape(r, &n))
                return false;
        } else
            r->text[n++] = c;
    }
    if (r->at == r->end || *r->at != quote)
        return fail(r, "the string has no closing quote");
    r->at++;
    r->text[n] = 0;
    return true;
}

static bool is_text(const kn_option *p)
{
    return p->kind == KN_OPTION_STRING || p->kind == KN_OPTION_PATH || kn_option_chooses(p);
}

/* A number, true or false. */
static bool read_word(reader *r, const kn_option *p)
{
    static const char number[] = "^[+-]?(0|[1-9](_?[0-9])*)(\\.[0-9](_?[0-9])*)?"
                                 "([eE][+-]?[0-9](_?[0-9])*)?$",
                      whole[] = "^[+-]?(0|[1-9](_?[0-9])*)$", flag[] = "^(true|false)$";
    char word[64], *to = r->text;
    size_t n = 0;
    regex_t pattern;
    while (r->at < r->end && (is_bare(*r->at) || *r->at == '.' || *r->at == '+')) {
        if (n + 1 >= sizeof word)
            return fail(r, "the value is too long for a number; a text stands in quotes");
        word[n++] = *r->at++;
    }
    word[n] = 0;
    if (regcomp(&pattern,
                p->kind == KN_OPTION_FLAG  ? flag
                : p->kind == KN_OPTION_INT ? whole
                                           : number,
                REG_EXTENDED | REG_NOSUB) != 0)
        return kn_fail_memory("a pattern of numbers");
    const int result = regexec(&pattern, word, 0, NULL, 0);
    regfree(&pattern);
    if (result == REG_ESPACE)
        return kn_fail_memory("a number in %s", r->path);
    if (result != 0 || is_text(p))
        return kn_fail("%s:%d: %s takes %s, not %s", r->path, r->line, p->name,
                       kn_option_kinds[p->kind].takes, n ? word : "this");
    for (const char *from = word; *from; from++) /* its digits may be in groups: 1_000 */
        if (*from != '_')
            *to++ = *from;
    *to = 0;
    return true;
}

static bool read_value(reader *r, const kn_option *p)
{
    if (r->at == r->end || (*r->at != '"' && *r->at != '\''))
        return read_word(r, p);
    return is_text(p) ? read_string(r)
                      : kn_fail("%s:%d: %s takes no text; leave the quotes out", r->path, r->line,
                                p->name);
}

/* ---- lines ----------------------------------------------------------------------------------- */

/* The row that the line names; -1 with an error. */
static int read_name(reader *r)
{
    const char *name = r->at;
    while (r->at < r->end && is_bare(*r->at))
        r->at++;
    const size_t length = (size_t)(r->at - name);
    if (length == 0) {
        fail(r, name < r->end && *name == '['
                    ? "tables, [name], aren't read; write \"name = value\" alone"
                    : "a line is \"name = value\", with the name of an option without quotes");
        return -1;
    }
    const int i = kn_options_find(r->o, name, length);
    if (i < 0) {
        kn_options_fail_unknown(r->o, name, length);
        fail_there(r);
    } else if (r->line_of[i])
        kn_fail("%s:%d: %s is in line %d already; keep one", r->path, r->line, r->o->table[i].name,
                r->line_of[i]);
    else
        return i;
    return -1;
}

/* "name = value" up to the line's end. */
static bool read_option(reader *r)
{
    const int i = read_name(r);
    if (i < 0)
        return false;
    const kn_option *p = &r->o->table[i];
    skip_blanks(r);
    if (r->at == r->end || *r->at != '=')
        return kn_fail("%s:%d: behind %s comes =, and its value", r->path, r->line, p->name);
    r->at++;
    skip_blanks(r);
    r->line_of[i] = r->line;
    if (strcmp(p->name, "config") == 0)
        return fail(r, "a file of options names no other one; leave config out");
    return read_value(r, p) && (r->fixed[i] || kn_options_give(r->o, i, r->text) || fail_there(r));
}

/* A line without its end is UTF-8, and has no control character but tabs. */
static bool check_line(const reader *r, const char *end)
{
    uint32_t code;
    size_t n;
    for (const char *p = r->at; p < end; p += n) {
        n = kn_utf8_read(p, (size_t)(end - p), &code);
        if (n == 0)
            return fail(r, "this isn't valid UTF-8");
        if ((code < 0x20 && code != '\t') || code == 0x7f)
            return fail(r,
                        "a control character stands in this line; within \"\" it is written as \\u "
                        "and four digits");
    }
    return true;
}

static bool read_lines(reader *r)
{
    const char *end = r->end;
    for (r->line = 1; r->at < end; r->line++) {
        const char *next = memchr(r->at, '\n', (size_t)(end - r->at));
        r->end = next ? next : end;
        if (r->end > r->at && r->end[-1] == '\r')
            r->end--;
        if (!check_line(r, r->end))
            return false;
        skip_blanks(r);
        if (r->at < r->end && *r->at != '#' && !read_option(r))
            return false;
        skip_blanks(r);
        if (r->at < r->end && *r->at != '#')
            return fail(r, "something follows the value; one option a line");
        r->at = next ? next + 1 : end;
    }
    return true;
}

/* Rows that the command line gave, and those that it contradicts. */
static void mark_fixed(reader *r)
{
    const kn_options *o = r->o;
    char other[64];
    for (int i = 0; i < o->count; i++) {
        r->fixed[i] |= o->values[i].origin == KN_VALUE_GIVEN;
        for (const char *list = o->table[i].clashes; kn_next_word(&list, other);) {
            const int j = kn_options_find(o, other, strlen(other));
            r->fixed[i] |= kn_option_asks(o, j);
            if (j >= 0 && kn_option_asks(o, i))
                r->fixed[j] = true;
        }
    }
}

bool kn_options_load(kn_options *o, const char *path)
{
    if (!kn_given(o, "kn_options_load", "the options' struct") ||
        !kn_given_path(path, "kn_options_load", "the path"))
        return false;
    size_t size;
    reader r = { .o = o, .path = path };
    char *text = kn_file_read(path, MOST_BYTES, &size);
    r.line_of = kn_host_calloc((size_t)o->count + 1, sizeof *r.line_of);
    r.fixed = kn_host_calloc((size_t)o->count + 1, sizeof *r.fixed);
    bool ok = text && r.line_of && r.fixed;
    if (ok) {
        r.at = text;
        r.end = text + size;
        mark_fixed(&r);
    }
    ok = ok && read_lines(&r) && kn_options_check_clashes(o);
    kn_host_free(r.line_of);
    kn_host_free(r.fixed);
    kn_host_free(text);
    return ok;
}

/* ---- writing --------------------------------------------------------------------------------- */

static void write_string(FILE *out, const char *text)
{
    putc('"', out);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++)
        if (*c < 0x20 || *c == 0x7f)
            fprintf(out, "\\u%04x", *c);
        else
            fprintf(out, "%s%c", *c == '"' || *c == '\\' ? "\\" : "", *c);
    putc('"', out);
}

static void write_value(FILE *out, const kn_option *p, const char *text)
{
    char number[32];
    if (p->kind == KN_OPTION_INT)
        fprintf(out, "%lld", strtoll(text, NULL, 10));
    else if (p->kind == KN_OPTION_FLOAT)
        fprintf(out, "%s", kn_number_text(strtod(text, NULL), number));
    else if (p->kind == KN_OPTION_FLAG)
        fprintf(out, "%s", text);
    else
        write_string(out, text);
}

static void write_row(FILE *out, const kn_option *p, const kn_option_value *v)
{
    const bool chosen = v->origin == KN_VALUE_GIVEN || v->origin == KN_VALUE_RESTORED;
    if (p->kind == KN_OPTION_HEADING) {
        fprintf(out, "\n# %s\n", p->name);
        return;
    }
    if (!kn_option_is_one(p) || p->of == KN_OF_ONCE || !v->text)
        return;
    if (!kn_is_utf8(v->text, strlen(v->text))) {
        fprintf(out, "# %s: its text isn't valid UTF-8, as which TOML has it\n", p->name);
        return;
    }
    fprintf(out, "%s%s = ", chosen ? "" : "# ", p->name);
    write_value(out, p, v->text);
    putc('\n', out);
}

char *kn_options_toml(const kn_options *o)
{
    char *text = NULL;
    size_t size = 0;
    if (!kn_given(o, "kn_options_toml", "the options' struct"))
        return NULL;
    FILE *out = open_memstream(&text, &size);
    for (int i = 0; out && i < o->count; i++)
        write_row(out, &o->table[i], &o->values[i]);
    return kn_options_end(out, &text);
}
