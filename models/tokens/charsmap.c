/* models/tokens/charsmap.c: the table of characters of a SentencePiece model (nmt_nfkc, nfkc, their
 * _cf, or one's own), as the model's file holds it and, in base64, a tokenizer.json: 4 bytes of
 * size, a trie of that size, then the strings that its values point to. The trie is a double array
 * (Aoe, 1989) as darts-clone lays it out: units of 32 bits, with a label, and where its children
 * are. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/tokens/tokens.h"

#ifdef KN_HAVE_UTF8PROC
#include <utf8proc.h>
#define GRAPHEMES true /* they are known */
#else
#define GRAPHEMES false
#endif
#include <string.h>

#define MOST_TEXT 64 /* bytes in a character's place; NFKC's longest has 33 */

struct kn_charsmap {
    bool longest;
    size_t units, size;
    const char *text; /* [size] the strings, each with a 0 behind it */
    uint32_t unit[];
};

/* ---- base64 (RFC 4648) ----------------------------------------------------------------------- */

static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

char *kn_base64_text(const void *bytes, size_t size)
{
    const unsigned char *b = bytes;
    char *text = kn_host_alloc((size + 2) / 3 * 4 + 1), *to = text;
    for (size_t i = 0; text && i < size; i += 3) {
        const size_t n = size - i < 3 ? size - i : 3;
        const uint32_t v =
            (uint32_t)b[i] << 16 | (n > 1 ? (uint32_t)b[i + 1] << 8 : 0) | (n > 2 ? b[i + 2] : 0);
        for (size_t k = 0; k < 4; k++)
            *to++ = k <= n ? digits[v >> (18 - 6 * k) & 63] : '=';
    }
    if (text)
        *to = 0;
    return text;
}

/* To bytes, which has room for 3/4 of the text: how many; -1: it is no base64. */
static int64_t read_base64(const char *text, unsigned char *bytes)
{
    const size_t length = strlen(text);
    int64_t n = 0;
    uint32_t value = 0;
    for (size_t i = 0; i < length; i++) {
        const char *digit = text[i] == '=' ? NULL : strchr(digits, text[i]);
        if (!digit && (text[i] != '=' || i + 2 < length || (i + 2 == length && text[i + 1] != '=')))
            return -1;
        value = value << 6 | (digit ? (uint32_t)(digit - digits) : 0);
        for (int k = 0; i % 4 == 3 && k < 3; k++)
            bytes[n++] = (unsigned char)(value >> (16 - 8 * k));
    }
    return length % 4 ? -1
                      : n - (length > 0 && text[length - 1] == '=') -
                            (length > 1 && text[length - 2] == '=');
}

/* ---- the table ------------------------------------------------------------------------------- */

kn_charsmap *kn_charsmap_read(const char *base64, bool longest, const char *where, int64_t *grows)
{
    const size_t room = strlen(base64) / 4 * 3;
    kn_charsmap *m = kn_host_calloc(1, sizeof *m + room + 1);
    unsigned char *bytes = m ? (unsigned char *)m->unit : NULL;
    const int64_t size = m ? read_base64(base64, bytes) : 0;
    uint32_t trie = 0;
    if (m && size >= 8)
        memcpy(&trie, bytes, sizeof trie);
    if (!m || trie == 0 || trie % 4 || trie > (uint64_t)size - 4 || !(longest || GRAPHEMES)) {
        if (m && !(longest || GRAPHEMES))
            kn_fail("%s: its Precompiled normalizer needs utf8proc, and this library was built "
                    "without: install libutf8proc-dev and build it again",
                    where);
        else if (m)
            kn_fail("%s: its table of characters (\"precompiled_charsmap\") is damaged", where);
        kn_host_free(m);
        return NULL;
    }
    m->longest = longest;
    m->units = trie / 4;
    m->size = (size_t)size - 4 - trie;
    memmove(bytes, bytes + 4, (size_t)size - 4);
    bytes[size - 4] = 0;
    m->text = (const char *)bytes + trie;
    *grows = 1;
    for (size_t i = 0, n; i < m->size; i += n + 1) {
        n = strlen(m->text + i);
        *grows = (int64_t)n > *grows ? (int64_t)n : *grows;
    }
    if (*grows <= MOST_TEXT)
        return m;
    kn_fail("%s: its table of characters puts %lld bytes in the place of one; %d are read", where,
            (long long)*grows, MOST_TEXT);
    kn_host_free(m);
    return NULL;
}

static size_t children_of(uint32_t unit)
{
    return (size_t)(unit >> 10) << (unit >> 6 & 8);
}

/* How many bytes of text[size] the first key that it begins with has, or the longest: *to goes in
 * their place. 0: it begins with none; -1 with an error. */
static int64_t find(const kn_charsmap *m, const char *text, size_t size, const char **to)
{
    int64_t found = 0;
    size_t at = children_of(m->unit[0]);
    for (size_t i = 0; i < size && text[i]; i++) {
        const unsigned char c = (unsigned char)text[i];
        at ^= c;
        if (at >= m->units || (m->unit[at] & 0x800000ff) != c)
            break;
        const bool ends = m->unit[at] >> 8 & 1;
        at ^= children_of(m->unit[at]);
        if (!ends)
            continue;
        const size_t value = at < m->units ? m->unit[at] & 0x7fffffff : m->size;
        if (value >= m->size) {
            kn_fail("the tokenizer's table of characters is damaged: it points outside itself");
            return -1;
        }
        found = (int64_t)i + 1;
        *to = m->text + value;
        if (!m->longest)
            break;
    }
    return found;
}

/* ---- its use --------------------------------------------------------------------------------- */

static size_t character(const char *text, size_t size)
{
    uint32_t code;
    const size_t n = kn_utf8_read(text, size, &code);
    return n > 0 ? n : 1;
}

#ifdef KN_HAVE_UTF8PROC

/* The bytes of one character at text[size] as a reader sees it: a letter with its accents. */
static size_t grapheme(const char *text, size_t size)
{
    uint32_t code, next;
    size_t n = kn_utf8_read(text, size, &code), step;
    utf8proc_int32_t state = 0;
    if (n == 0)
        return 1;
    for (; n < size && (step = kn_utf8_read(text + n, size - n, &next)) > 0; n += step) {
        if ((code | next) < 0x80 && code != '\r')
            break;
        if (utf8proc_grapheme_break_stateful((utf8proc_int32_t)code, (utf8proc_int32_t)next,
                                             &state))
            break;
        code = next;
    }
    return n;
}

#else

static size_t grapheme(const char *text, size_t size)
{
    return character(text, size);
}

#endif

typedef struct changing {
    const kn_charsmap *m;
    kn_bytes *out;
    const char *text;
    size_t same; /* the text from here on isn't in out yet */
} changing;

/* Looks up the text from at to end. *next: the end of the changed part; at: none was. */
static bool look_up(changing *c, size_t at, size_t end, size_t *next)
{
    const char *to = NULL;
    const int64_t found = find(c->m, c->text + at, end - at, &to);
    *next = at;
    if (found <= 0)
        return found == 0;
    *next = c->m->longest ? at + (size_t)found : end;
    const bool ok = kn_bytes_append(c->out, c->text + c->same, at - c->same) &&
                    kn_bytes_append(c->out, to, strlen(to));
    c->same = *next;
    return ok;
}

/* The tokenizers library looks up graphemes of less than 6 bytes, by the first key that one begins
 * with, whose text goes in the place of the whole; of others, each character. */
static bool change_graphemes(changing *c, size_t size)
{
    for (size_t at = 0, next, end; at < size; at = end) {
        end = at + grapheme(c->text + at, size - at);
        next = at;
        if (end - at < 6 && !look_up(c, at, end, &next))
            return false;
        for (size_t i = next, step; i < end; i += step) {
            step = character(c->text + i, end - i);
            if (!look_up(c, i, i + step, &next))
                return false;
        }
    }
    return true;
}

/* SentencePiece looks up the longest key, and leaves its user's symbols alone. */
static bool change_longest(changing *c, const kn_tokenizer *t, size_t size)
{
    for (size_t at = 0, next; at < size; at = next) {
        const kn_added *symbol = kn_added_at(t, c->text + at, size - at, false, true);
        if (!symbol && !look_up(c, at, size, &next))
            return false;
        if (symbol || next == at)
            next = at + (symbol ? symbol->length : character(c->text + at, size - at));
    }
    return true;
}

bool kn_charsmap_change(const kn_tokenizer *t, const kn_charsmap *m, kn_bytes *out,
                        const char *text, size_t size)
{
    changing c = { m, out, text, 0 };
    return (m->longest ? change_longest(&c, t, size) : change_graphemes(&c, size)) &&
           kn_bytes_append(out, text + c.same, size - c.same);
}
