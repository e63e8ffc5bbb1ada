/* models/tokens/changes.c: what happens to a text before it is cut into words. Normal forms are
 * utf8proc's; bytes that aren't UTF-8 stay as they are. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/tokens/tokens.h"

#ifdef KN_HAVE_UTF8PROC
#include <utf8proc.h>
#endif
#include <stdlib.h>
#include <string.h>

/* ---- normal forms ---------------------------------------------------------------------------- */

#ifdef KN_HAVE_UTF8PROC

int kn_change_form(const char *name)
{
    static const struct {
        const char *name;
        int form;
    } forms[] = { { "NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE },
                  { "NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE },
                  { "NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT },
                  { "NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT } };
    for (size_t i = 0; i < sizeof forms / sizeof *forms; i++)
        if (strcmp(forms[i].name, name) == 0)
            return forms[i].form;
    return 0;
}

/* Valid UTF-8 from[size] in its normal form. */
static bool append_form(kn_bytes *to, int form, const char *from, size_t size)
{
    utf8proc_uint8_t *made = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)from, (utf8proc_ssize_t)size, &made,
                                      (utf8proc_option_t)form);
    if (n < 0)
        return kn_fail("a text can't be brought into a normal form of Unicode: %s",
                       utf8proc_errmsg(n));
    bool ok = kn_bytes_append(to, (const char *)made, (size_t)n);
    free(made);
    return ok;
}

#else

int kn_change_form(const char *name)
{
    return strcmp(name, "NFC") == 0 || strcmp(name, "NFD") == 0 || strcmp(name, "NFKC") == 0 ||
           strcmp(name, "NFKD") == 0;
}

static bool append_form(kn_bytes *to, int form, const char *from, size_t size)
{
    (void)to, (void)form, (void)from, (void)size;
    return kn_fail(
        "this tokenizer brings texts into a normal form of Unicode, and this library was "
        "built without utf8proc: install libutf8proc-dev and build it again");
}

#endif

/* The end of the valid UTF-8 that begins at text[at]. */
static size_t valid_end(const char *text, size_t at, size_t size)
{
    uint32_t code;
    for (size_t n; at < size && (n = kn_utf8_read(text + at, size - at, &code)) > 0;)
        at += n;
    return at;
}

/* Line by line, since no form goes over the end of one; ASCII is as it should be. */
static bool change_form(kn_bytes *to, int form, const char *from, size_t size)
{
    for (size_t at = 0, end; at < size; at = end) {
        const char *line = memchr(from + at, '\n', size - at);
        end = line ? (size_t)(line - from) + 1 : size;
        size_t plain = at;
        while (plain < end && (unsigned char)from[plain] < 0x80)
            plain++;
        if (plain == end && !kn_bytes_append(to, from + at, end - at))
            return false;
        for (size_t run = at, stop; plain < end && run < end; run = stop + 1) {
            stop = valid_end(from, run, end);
            if (stop > run && !append_form(to, form, from + run, stop - run))
                return false;
            if (stop < end && !kn_bytes_append(to, from + stop, 1))
                return false;
        }
    }
    return true;
}

/* ---- the others ------------------------------------------------------------------------------ */

/* Of a pattern's matches, in valid UTF-8. */
static bool replace_matches(kn_bytes *to, const kn_change *c, const char *from, size_t size)
{
    kn_matching m = { 0 };
    bool ok = kn_matching_begin(&m);
    for (size_t run = 0, stop; ok && run < size; run = stop + 1) {
        size_t at = 0, begin, end;
        const char *text = from + run;
        stop = valid_end(from, run, size);
        for (const size_t length = stop - run; ok && at < length; at = end) {
            ok = kn_matching_next(&m, &c->cut, text, length, at, &begin, &end) &&
                 kn_bytes_append(to, text + at, begin - at) &&
                 (begin == length || kn_bytes_append(to, c->to, strlen(c->to)));
        }
        ok = ok && (stop == size || kn_bytes_append(to, from + stop, 1));
    }
    kn_matching_end(&m);
    return ok;
}

static bool replace(kn_bytes *to, const kn_change *c, const char *from, size_t size)
{
    const size_t length = strlen(c->from);
    const char *end = from + size;
    while (from < end) {
        const char *next = memmem(from, (size_t)(end - from), c->from, length);
        if (!kn_bytes_append(to, from, (size_t)((next ? next : end) - from)) ||
            (next && !kn_bytes_append(to, c->to, strlen(c->to))))
            return false;
        from = next ? next + length : end;
    }
    return true;
}

static bool change(kn_bytes *to, const kn_tokenizer *t, const kn_change *c, bool first,
                   const char *from, size_t size)
{
    const size_t length = c->to ? strlen(c->to) : 0;
    bool begins = length > 0 && size >= length && memcmp(from, c->to, length) == 0;
    switch (c->kind) {
    case KN_CHANGE_FORM:
        return change_form(to, c->form, from, size);
    case KN_CHANGE_MAP:
        return kn_charsmap_change(t, c->map, to, from, size);
    case KN_CHANGE_REPLACE:
        return c->from ? replace(to, c, from, size) : replace_matches(to, c, from, size);
    case KN_CHANGE_PREPEND:
        begins = size == 0;
        break;
    case KN_CHANGE_BEGIN:
        break;
    case KN_CHANGE_BEGIN_FIRST:
        begins = begins || !first;
        break;
    }
    return (begins || kn_bytes_append(to, c->to, length)) && kn_bytes_append(to, from, size);
}

char *kn_change_text(const kn_tokenizer *t, int change_from, int until, const char *from,
                     size_t size, bool first, size_t *length)
{
    kn_bytes now = { 0 };
    bool ok = kn_bytes_append(&now, from, size);
    for (int i = change_from; ok && i < until; i++) {
        kn_bytes next = { 0 };
        ok = kn_bytes_append(&next, "", 0) &&
             change(&next, t, &t->change[i], first, now.at, (size_t)now.size);
        kn_host_free(now.at);
        now = next;
    }
    if (!ok)
        kn_host_free(now.at);
    *length = (size_t)now.size;
    return ok ? now.at : NULL;
}
