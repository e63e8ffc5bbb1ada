/* models/tokens/bpe.c: the ids of one word by byte pair encoding: its bytes' or characters' ids, of
 * which the two neighbours with the earliest merge become one, of equals the left ones, until no
 * two have a merge. Short words look through all pairs for the earliest; long ones keep them in a
 * heap. */
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/checksum.h"

#include <string.h>

#define FEW 64 /* ids, up to which looking through all pairs is faster */

/* Words that came before, with their ids: most words of a text are short and few. */
#define CACHED 16384
typedef struct cached {
    uint64_t hash;
    uint8_t length, count; /* length 0: none */
    char text[22];
    uint32_t id[8];
} cached;

struct kn_bpe {
    const kn_tokenizer *t;
    cached *cache; /* [CACHED], or NULL */
    uint32_t *id;
    int64_t id_room;
    uint64_t *merge; /* of id[i] and the one behind it */
    int64_t merge_room;
    int64_t *link; /* long words: the next and the last place, two for each */
    int64_t link_room;
    kn_heap heap; /* of the pairs' merges and places; one may be another by now */
};

kn_bpe *kn_bpe_begin(const kn_tokenizer *t, bool keep)
{
    kn_bpe *b = kn_host_calloc(1, sizeof *b);
    if (!b)
        return NULL;
    b->t = t;
    if (!keep || (b->cache = kn_host_calloc(CACHED, sizeof *b->cache)))
        return b;
    kn_bpe_end(b);
    return NULL;
}

void kn_bpe_end(kn_bpe *b)
{
    if (!b)
        return;
    kn_host_free(b->cache);
    kn_host_free(b->id);
    kn_host_free(b->merge);
    kn_host_free(b->link);
    kn_host_free(b->heap.list);
    kn_host_free(b);
}

static inline uint64_t merge_of(const kn_tokenizer *t, uint32_t a, uint32_t b)
{
    return kn_pairs_find(&t->merge, (uint64_t)a << 32 | b);
}

/* ---- short words ----------------------------------------------------------------------------- */

static int64_t merge_few(kn_bpe *b, int64_t n)
{
    uint32_t *id = b->id;
    uint64_t *merge = b->merge;
    for (int64_t i = 0; i + 1 < n; i++)
        merge[i] = merge_of(b->t, id[i], id[i + 1]);
    while (n > 1) {
        int64_t at = 0;
        for (int64_t i = 1; i + 1 < n; i++)
            at = merge[i] < merge[at] ? i : at;
        if (merge[at] == KN_NO_PAIR)
            break;
        id[at] = (uint32_t)merge[at];
        n--;
        memmove(id + at + 1, id + at + 2, (size_t)(n - at - 1) * sizeof *id);
        memmove(merge + at, merge + at + 1, (size_t)(n - at - 1) * sizeof *merge);
        if (at > 0)
            merge[at - 1] = merge_of(b->t, id[at - 1], id[at]);
        if (at + 1 < n)
            merge[at] = merge_of(b->t, id[at], id[at + 1]);
    }
    return n;
}

/* ---- long words ------------------------------------------------------------------------------ */

/* Puts the pair at place into the heap, if it has a merge. */
static bool wait_for(kn_bpe *b, int64_t place, int64_t n)
{
    const int64_t next = b->link[2 * place];
    b->merge[place] = next < n ? merge_of(b->t, b->id[place], b->id[next]) : KN_NO_PAIR;
    return b->merge[place] == KN_NO_PAIR ||
           kn_heap_push(&b->heap, (struct kn_waiting){ b->merge[place], (uint64_t)place, NULL });
}

static int64_t merge_many(kn_bpe *b, int64_t n)
{
    if (!kn_host_grow(&b->link, &b->link_room, 2 * n, sizeof *b->link))
        return -1;
    int64_t *link = b->link, left = 0;
    b->heap.count = 0;
    for (int64_t i = 0; i < n; i++)
        link[2 * i] = i + 1, link[2 * i + 1] = i - 1;
    for (int64_t i = 0; i < n; i++)
        if (!wait_for(b, i, n))
            return -1;
    while (b->heap.count > 0) {
        const struct kn_waiting top = kn_heap_pop(&b->heap);
        const int64_t i = (int64_t)top.place, gone = link[2 * i];
        if (link[2 * i + 1] == -2 || b->merge[i] != top.key) /* it became another pair meanwhile */
            continue;
        b->id[i] = (uint32_t)top.key;
        link[2 * i] = link[2 * gone];
        link[2 * gone + 1] = -2;
        if (link[2 * i] < n)
            link[2 * link[2 * i] + 1] = i;
        if (!wait_for(b, i, n) || (link[2 * i + 1] >= 0 && !wait_for(b, link[2 * i + 1], n)))
            return -1;
    }
    for (int64_t i = 0; i < n; i = link[2 * i])
        b->id[left++] = b->id[i];
    return left;
}

/* ---- words ----------------------------------------------------------------------------------- */

/* The ids of the character at text, to id: how many, 0 where it has none. */
static int64_t character(const kn_tokenizer *t, const char *text, size_t n, uint32_t code,
                         uint32_t *id)
{
    const uint64_t own = n > 0 ? kn_pairs_find(&t->character, code) : KN_NO_PAIR;
    if (own != KN_NO_PAIR) {
        *id = (uint32_t)own;
        return 1;
    }
    n = n > 0 ? n : 1; /* a byte that isn't UTF-8 */
    for (size_t i = 0; i < n; i++) {
        if (t->byte[(unsigned char)text[i]] < 0)
            return 0;
        id[i] = (uint32_t)t->byte[(unsigned char)text[i]];
    }
    return (int64_t)n;
}

/* The first ids; -1 and *bad. */
static int64_t begin_word(const kn_tokenizer *t, const char *text, size_t length, uint32_t *id,
                          int64_t *bad)
{
    int64_t n = 0;
    bool was_unknown = false;
    for (size_t i = 0, step; i < length; i += step) {
        uint32_t code = 0;
        int64_t made;
        if (t->by_bytes) {
            step = 1;
            made = t->byte[(unsigned char)text[i]] >= 0;
            id[n] = (uint32_t)t->byte[(unsigned char)text[i]];
        } else {
            const size_t read = kn_utf8_read(text + i, length - i, &code);
            step = read > 0 ? read : 1;
            made = character(t, text + i, read, code, id + n);
        }
        if (made == 0 && t->unknown < 0) {
            *bad = (int64_t)i;
            return -1;
        }
        if (made == 0 && !(was_unknown && t->joins_unknown))
            id[n++] = (uint32_t)t->unknown;
        was_unknown = made == 0;
        n += made;
    }
    return n;
}

/* A word that is a token as a whole; -1: it isn't. */
static int64_t whole_word(const kn_tokenizer *t, const char *text, size_t length)
{
    char spelled[4096];
    size_t n = length;
    if (length > sizeof spelled / 2)
        return -1;
    memcpy(spelled, text, length);
    if (t->by_bytes) {
        n = 0;
        for (size_t i = 0; i < length; i++)
            n += kn_utf8_write(kn_byte_letter((unsigned char)text[i]), spelled + n);
    }
    const int64_t i = kn_strings_find(&t->names, spelled, n);
    return i < 0 ? -1 : t->names.list[i].value;
}

static int64_t merge_word(kn_bpe *b, const char *text, size_t length, int64_t *bad)
{
    int64_t most = (int64_t)length, whole;
    if (!kn_host_grow(&b->id, &b->id_room, most, sizeof *b->id) ||
        !kn_host_grow(&b->merge, &b->merge_room, most, sizeof *b->merge))
        return -1;
    if (b->t->whole_first && (whole = whole_word(b->t, text, length)) >= 0) {
        b->id[0] = (uint32_t)whole;
        return 1;
    }
    int64_t n = begin_word(b->t, text, length, b->id, bad);
    if (n < 2 || b->t->merge.count == 0)
        return n;
    return n <= FEW ? merge_few(b, n) : merge_many(b, n);
}

int64_t kn_bpe_word(kn_bpe *b, const char *text, size_t length, const uint32_t **ids, int64_t *bad)
{
    *bad = -1;
    cached *c = NULL;
    uint64_t hash = 0;
    if (b->cache && length <= sizeof c->text) {
        hash = kn_checksum_of(text, length);
        c = &b->cache[hash % CACHED];
        if (c->hash == hash && c->length == length && memcmp(c->text, text, length) == 0) {
            *ids = c->id;
            return c->count;
        }
    }
    const int64_t n = merge_word(b, text, length, bad);
    *ids = b->id;
    if (c && n > 0 && n <= (int64_t)(sizeof c->id / sizeof *c->id)) {
        *c = (cached){ .hash = hash, .length = (uint8_t)length, .count = (uint8_t)n };
        memcpy(c->text, text, length);
        memcpy(c->id, b->id, (size_t)n * sizeof *c->id);
    }
    return n;
}
