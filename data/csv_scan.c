/* data/csv_scan.c: cuts a text into fields and reads numbers. Nothing is assumed of the text. */
#include "data/csv_internal.h"
#include "kernels/error_internal.h"

#include <locale.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define LONGEST 400 /* characters of a number */

/* ---- fields ---------------------------------------------------------------------------------- */

void kn_csv_begin(kn_csv_scan *s, const char *path, const char *text, size_t size, char separator)
{
    *s = (kn_csv_scan){ .path = path, .at = text, .end = text + size, .separator = separator };
    s->next_line = 1;
    if (size >= 3 && memcmp(text, "\xef\xbb\xbf", 3) == 0) /* a mark of UTF-8 */
        s->at += 3;
}

static bool is_blank(const kn_csv_scan *s, char c)
{
    return c == ' ' || (c == '\t' && s->separator != '\t');
}

static void pass_blanks(kn_csv_scan *s)
{
    while (s->at < s->end && is_blank(s, *s->at))
        s->at++;
}

/* At an end of the line; *length of it: 0 at the end of the file. */
static bool at_line_end(const kn_csv_scan *s, const char *p, int *length)
{
    *length = p == s->end ? 0 : *p == '\n' ? 1 : 2;
    return p == s->end || *p == '\n' || (*p == '\r' && p + 1 < s->end && p[1] == '\n');
}

static void pass_line_end(kn_csv_scan *s, int length)
{
    s->at += length;
    s->next_line += length > 0;
}

bool kn_csv_more(kn_csv_scan *s)
{
    for (int length; s->at < s->end;) {
        const char *line = s->at;
        pass_blanks(s);
        if (!at_line_end(s, s->at, &length)) {
            s->at = line;
            s->column = 0;
            return true;
        }
        pass_line_end(s, length);
    }
    return false;
}

/* The text in quotes; s->at comes behind the closing one. */
static bool quoted_text(kn_csv_scan *s, kn_csv_field *f)
{
    f->quoted = true;
    f->text = ++s->at;
    for (; s->at < s->end; s->at++) {
        s->next_line += *s->at == '\n';
        if (*s->at != '"')
            continue;
        if (s->at + 1 == s->end || s->at[1] != '"')
            break;
        s->at++;
    }
    if (s->at == s->end)
        return kn_fail("%s:%lld, column %lld: the quote that begins here has no end", s->path,
                       (long long)s->line, (long long)s->column);
    f->length = (size_t)(s->at - f->text);
    s->at++;
    return true;
}

static void plain_text(kn_csv_scan *s, kn_csv_field *f)
{
    int length;
    f->text = s->at;
    while (!at_line_end(s, s->at, &length) && *s->at != s->separator &&
           !(s->separator == ' ' && is_blank(s, *s->at)))
        s->at++;
    f->length = (size_t)(s->at - f->text);
    while (f->length > 0 && is_blank(s, f->text[f->length - 1]))
        f->length--;
}

bool kn_csv_next(kn_csv_scan *s, kn_csv_field *f)
{
    int length;
    *f = (kn_csv_field){ 0 };
    s->line = s->next_line;
    s->column++;
    pass_blanks(s);
    if (s->at < s->end && *s->at == '"') {
        if (!quoted_text(s, f))
            return false;
    } else {
        plain_text(s, f);
    }
    const char *behind = s->at;
    pass_blanks(s);
    if (at_line_end(s, s->at, &length)) {
        f->last = true;
        pass_line_end(s, length);
        return true;
    }
    if (s->separator == ' ' && s->at > behind)
        return true;
    if (*s->at != s->separator)
        return kn_fail("%s:%lld, column %lld: '%c' follows the closing quote", s->path,
                       (long long)s->line, (long long)s->column, *s->at);
    s->at++;
    return true;
}

/* ---- numbers --------------------------------------------------------------------------------- */

static locale_t c_locale;

static void make_locale(void)
{
    c_locale = newlocale(LC_ALL_MASK, "C", (locale_t)0);
}

static bool is_missing(const kn_csv_field *f)
{
    static const char *const words[] = { "", "?", "NA", "N/A", "NaN", "null" };
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        if (strlen(words[i]) == f->length && strncasecmp(words[i], f->text, f->length) == 0)
            return true;
    return false;
}

kn_csv_kind kn_csv_kind_of(const kn_csv_field *f, double *value)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    char room[LONGEST + 1], *end;
    *value = 0;
    if (is_missing(f))
        return KN_CSV_MISSING;
    if (f->length > LONGEST)
        return KN_CSV_TEXT;
    for (size_t i = 0; i < f->length; i++)
        if (f->text[i] == '\0' || !strchr("0123456789+-.eE", f->text[i]))
            return KN_CSV_TEXT; /* strtod takes more: hexadecimals, infinities */
    memcpy(room, f->text, f->length);
    room[f->length] = '\0';
    pthread_once(&once, make_locale);
    *value = c_locale ? strtod_l(room, &end, c_locale) : strtod(room, &end);
    return end == room + f->length ? KN_CSV_NUMBER : KN_CSV_TEXT;
}

/* A whole number exactly, where the text is one; else by its value. */
static bool whole(const kn_csv_field *f, double value, int64_t *n)
{
    uint64_t sum = 0;
    size_t i = f->length > 0 && (f->text[0] == '-' || f->text[0] == '+');
    bool minus = i > 0 && f->text[0] == '-', digits = i < f->length;
    for (; i < f->length && digits; i++) {
        digits = f->text[i] >= '0' && f->text[i] <= '9';
        if (digits && (__builtin_mul_overflow(sum, 10u, &sum) ||
                       __builtin_add_overflow(sum, (uint64_t)(f->text[i] - '0'), &sum)))
            return false;
    }
    if (digits) {
        *n = (int64_t)(minus ? 0 - sum : sum);
        return sum <= (uint64_t)INT64_MAX + minus;
    }
    if (!(fabs(value) < 0x1p63) || value != floor(value))
        return false;
    *n = (int64_t)value;
    return true;
}

bool kn_csv_store(const kn_csv_field *f, double value, kn_dtype dtype, void *p)
{
    int64_t n = 0;
    bool fits = true;
    if (dtype == KN_I64 || dtype == KN_I32)
        fits = whole(f, value, &n);
    if (dtype == KN_F32) {
        *(float *)p = (float)value;
        fits = isfinite((float)value) || isnan(value);
    } else if (dtype == KN_F64) {
        *(double *)p = value;
        fits = isfinite(value) || isnan(value);
    } else if (dtype == KN_I64) {
        *(int64_t *)p = n;
    } else {
        *(int32_t *)p = (int32_t)n;
        fits = fits && n == (int32_t)n;
    }
    return fits;
}
