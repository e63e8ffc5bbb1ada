/* models/tokenizer_char.c: the character tokenizer: one id for each distinct Unicode code point of
 * the training text, in ascending order. */
#include "kernels/error.h"
#include "kernels/memory.h"
#include "models/tokenizer_internal.h"

#include <stdlib.h>
#include <string.h>

#define CODE_POINTS 0x110000 /* U+0000 .. U+10FFFF */

typedef struct char_tokenizer {
    kn_tokenizer base;
    uint32_t *code;   /* [vocab], ascending: the code point of each id */
    char (*piece)[4]; /* [vocab]: its UTF-8 bytes */
} char_tokenizer;

size_t kn_utf8_read(const char *s, size_t len, uint32_t *code)
{
    const unsigned char *b = (const unsigned char *)s;
    static const uint32_t least[] = { 0, 0, 0x80, 0x800, 0x10000 };
    size_t n = b[0] < 0x80             ? 1
               : (b[0] & 0xe0) == 0xc0 ? 2
               : (b[0] & 0xf0) == 0xe0 ? 3
               : (b[0] & 0xf8) == 0xf0 ? 4
                                       : 0;
    if (n == 0 || n > len)
        return 0;
    uint32_t c = n == 1 ? b[0] : b[0] & (0xffu >> (n + 1));
    for (size_t i = 1; i < n; i++) {
        if ((b[i] & 0xc0) != 0x80)
            return 0;
        c = c << 6 | (b[i] & 0x3f);
    }
    if (c < least[n] || c >= CODE_POINTS || (c >= 0xd800 && c < 0xe000))
        return 0;
    *code = c;
    return n;
}

/* Writes the UTF-8 bytes of a valid code point; returns how many. */
static size_t utf8_write(uint32_t c, char out[4])
{
    if (c < 0x80) {
        out[0] = (char)c;
        return 1;
    }
    size_t n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (size_t i = n - 1; i > 0; i--, c >>= 6)
        out[i] = (char)(0x80 | (c & 0x3f));
    out[0] = (char)((0xf00u >> n & 0xff) | c);
    return n;
}

static size_t utf8_length(uint32_t c)
{
    return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
}

static void char_release(kn_tokenizer *base)
{
    char_tokenizer *t = (char_tokenizer *)base;
    kn_host_free(t->code);
    kn_host_free(t->piece);
}

/* A tokenizer with room for vocab codes, to be filled by add. */
static char_tokenizer *make(int64_t vocab)
{
    char_tokenizer *t = kn_host_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->code = kn_host_calloc((size_t)vocab, sizeof *t->code);
    t->piece = kn_host_calloc((size_t)vocab, sizeof *t->piece);
    if (t->code && t->piece)
        return t;
    char_release(&t->base);
    kn_host_free(t);
    return NULL;
}

static void add(char_tokenizer *t, uint32_t code)
{
    t->code[t->base.vocab] = code;
    utf8_write(code, t->piece[t->base.vocab++]);
}

static kn_tokenizer *char_create(const char *text, size_t len)
{
    char_tokenizer *t = NULL;
    int64_t vocab = 0;
    unsigned char *seen = kn_host_calloc(CODE_POINTS, 1);
    if (!seen)
        return NULL;
    for (size_t i = 0; i < len;) {
        uint32_t code = 0;
        size_t n = kn_utf8_read(text + i, len - i, &code);
        if (n == 0) {
            kn_fail("the text is not valid UTF-8 at byte %zu (0x%02x); use --tokenizer byte", i,
                    (unsigned char)text[i]);
            goto done;
        }
        vocab += !seen[code];
        seen[code] = 1;
        i += n;
    }
    if (vocab == 0) {
        kn_fail("the text is empty: there are no characters to make a tokenizer from");
        goto done;
    }
    t = make(vocab);
    for (uint32_t c = 0; t && c < CODE_POINTS; c++)
        if (seen[c])
            add(t, c);
done:
    kn_host_free(seen);
    return (kn_tokenizer *)t;
}

static kn_tokenizer *char_from_json(json_t *root, const char *where)
{
    json_t *chars = json_object_get(root, "chars");
    size_t vocab = json_array_size(chars); /* 0 for anything but an array */
    if (vocab == 0 || vocab > CODE_POINTS) {
        kn_fail("%s: \"chars\" must be a list of at least one character", where);
        return NULL;
    }
    char_tokenizer *t = make((int64_t)vocab);
    for (size_t i = 0; t && i < vocab; i++) {
        json_t *item = json_array_get(chars, i);
        const char *s = json_string_value(item);
        size_t n = json_string_length(item);
        uint32_t code = 0;
        if (!s || n == 0 || kn_utf8_read(s, n, &code) != n) {
            kn_fail("%s: \"chars\" entry %zu is not one character", where, i);
            goto fail;
        }
        if (i > 0 && code <= t->code[i - 1]) {
            kn_fail("%s: \"chars\" entry %zu is out of order or a repetition", where, i);
            goto fail;
        }
        add(t, code);
    }
    return (kn_tokenizer *)t;
fail:
    char_release(&t->base);
    kn_host_free(t);
    return NULL;
}

static bool char_to_json(const kn_tokenizer *base, json_t *root)
{
    const char_tokenizer *t = (const char_tokenizer *)base;
    json_t *chars = json_array();
    bool ok = chars != NULL;
    for (int64_t i = 0; ok && i < base->vocab; i++)
        ok = json_array_append_new(chars, json_stringn(t->piece[i], utf8_length(t->code[i]))) == 0;
    ok = json_object_set_new(root, "chars", chars) == 0 && ok;
    return ok || kn_fail("out of memory while writing the tokenizer");
}

/* The id of a code point by binary search, or -1. */
static int64_t id_of(const char_tokenizer *t, uint32_t code)
{
    int64_t low = 0, high = t->base.vocab;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (t->code[middle] < code)
            low = middle + 1;
        else
            high = middle;
    }
    return low < t->base.vocab && t->code[low] == code ? low : -1;
}

static int64_t char_encode(const kn_tokenizer *base, const char *text, size_t len, void *ids,
                           kn_dtype dtype)
{
    const char_tokenizer *t = (const char_tokenizer *)base;
    int64_t count = 0, ascii[128];
    for (uint32_t c = 0; c < 128; c++)
        ascii[c] = id_of(t, c);
    for (size_t i = 0; i < len;) {
        uint32_t code = 0;
        size_t n = kn_utf8_read(text + i, len - i, &code);
        if (n == 0) {
            kn_fail("the text is not valid UTF-8 at byte %zu (0x%02x)", i, (unsigned char)text[i]);
            return -1;
        }
        int64_t id = code < 128 ? ascii[code] : id_of(t, code);
        if (id < 0) {
            if (code < 0x20 || code == 0x7f)
                kn_fail("the character U+%04X at byte %zu is not in the vocabulary of %lld "
                        "characters that this tokenizer was made with",
                        (unsigned)code, i, (long long)base->vocab);
            else
                kn_fail("the character '%.*s' (U+%04X) at byte %zu is not in the vocabulary of "
                        "%lld characters that this tokenizer was made with",
                        (int)n, text + i, (unsigned)code, i, (long long)base->vocab);
            return -1;
        }
        kn_token_put(ids, dtype, count++, id);
        i += n;
    }
    return count;
}

static size_t char_piece(const kn_tokenizer *base, int64_t id, const char **bytes)
{
    const char_tokenizer *t = (const char_tokenizer *)base;
    *bytes = t->piece[id];
    return utf8_length(t->code[id]);
}

const kn_tokenizer_ops kn_tokenizer_char = { .kind = "char",
                                             .create = char_create,
                                             .from_json = char_from_json,
                                             .to_json = char_to_json,
                                             .encode = char_encode,
                                             .piece = char_piece,
                                             .release = char_release };
