/* models/tokens/encode.c: a text's ids: its added tokens and, of what lies between them, the
 * words', on several threads where it is long. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"

#include <string.h>

/* The ids of a stretch of the text. */
typedef struct part_ids {
    kn_bpe *bpe;
    uint32_t *id;
    int64_t count, room;
    const char *bad; /* a character without an id */
} part_ids;

typedef struct encoding {
    const kn_tokenizer *t;
    part_ids part[KN_WORD_PARTS];
    bool cached;
} encoding;

static bool encode_word(void *arg, int number, const kn_word *word)
{
    encoding *e = arg;
    part_ids *p = &e->part[number];
    if (!word) {
        p->count = 0;
        return true;
    }
    const uint32_t one = (uint32_t)word->id, *id = &one;
    int64_t bad = -1, n = 1;
    if (word->id < 0) {
        if (!p->bpe && !(p->bpe = kn_bpe_begin(e->t, e->cached)))
            return false;
        n = kn_bpe_word(p->bpe, word->text, word->length, &id, &bad);
    }
    if (n < 0 && bad >= 0)
        p->bad = word->text + bad;
    if (n < 0)
        return false;
    if (!kn_host_grow(&p->id, &p->room, p->count + n, sizeof *p->id))
        return false;
    memcpy(p->id + p->count, id, (size_t)n * sizeof *id);
    p->count += n;
    return true;
}

/* A list of ids. */
typedef struct place {
    void *ids;
    kn_dtype dtype;
    int64_t count, room;
    bool grows; /* the list is this function's, and may become longer */
} place;

static bool put(place *to, const uint32_t *id, int64_t n)
{
    if (!to->grows && n > to->room - to->count)
        return kn_fail("kn_tokenizer_encode: more ids than kn_tokenizer_most says");
    if (to->grows && !kn_host_grow(&to->ids, &to->room, to->count + n, kn_dtype_size(to->dtype)))
        return false;
    for (int64_t i = 0; i < n; i++, to->count++)
        if (to->dtype == KN_U16)
            ((uint16_t *)to->ids)[to->count] = (uint16_t)id[i];
        else if (to->dtype == KN_I64)
            ((int64_t *)to->ids)[to->count] = id[i];
        else
            ((uint32_t *)to->ids)[to->count] = id[i]; /* u32, i32 */
    return true;
}

/* What the text has at *bad has no id. */
static bool bad_character(const kn_tokenizer *t, const char *text, size_t size, const char *bad)
{
    uint32_t code = 0;
    const size_t at = (size_t)(bad - text), n = kn_utf8_read(bad, size - at, &code);
    if (t->by_bytes || n == 0)
        return kn_fail(n == 0 && !t->by_bytes
                           ? "the text is not valid UTF-8 at byte %zu (0x%02x)"
                           : "the tokenizer has no id for byte %zu of the text (0x%02x)",
                       at, (unsigned char)*bad);
    if (code < 0x20 || code == 0x7f)
        return kn_fail("the character U+%04X at byte %zu is not in the vocabulary of %lld "
                       "characters that this tokenizer was made with",
                       (unsigned)code, at, (long long)t->vocab);
    return kn_fail("the character '%.*s' (U+%04X) at byte %zu is not in the vocabulary of %lld "
                   "characters that this tokenizer was made with",
                   (int)n, bad, (unsigned)code, at, (long long)t->vocab);
}

/* The ids of text, whose added tokens are found early, late, or now. */
static bool encode_words(const kn_tokenizer *t, const char *text, size_t size, bool early,
                         bool late, place *to)
{
    encoding e = { .t = t, .cached = size > 4096 };
    bool ok = kn_words_each(t, text, size, early, late, encode_word, &e);
    const char *bad = NULL;
    for (int i = 0; i < KN_WORD_PARTS; i++) {
        part_ids *p = &e.part[i];
        ok = ok && put(to, p->id, p->count);
        bad = bad ? bad : p->bad;
        kn_bpe_end(p->bpe);
        kn_host_free(p->id);
    }
    return ok || (bad && kn_ok() && bad_character(t, text, size, bad));
}

/* How a text is changed: stage by stage, what lies between the added tokens that are found then.
 * The normalizer's changes come before the late tokens, the pre-tokenizer's behind them. */
typedef struct stage {
    bool early, late; /* the tokens that are found */
    int from, until;  /* the changes */
    bool last;        /* what lies between the tokens is cut into words */
} stage;

static bool encode_stage(const kn_tokenizer *t, const stage *now, const char *text, size_t size,
                         bool first, place *to);

static bool encode_changed(const kn_tokenizer *t, const stage *now, const char *text, size_t size,
                           bool first, place *to)
{
    size_t length;
    if (size == 0)
        return true;
    if (now->from == now->until)
        return encode_stage(t, now + 1, text, size, first, to);
    char *changed = kn_change_text(t, now->from, now->until, text, size, first, &length);
    bool ok = changed && encode_stage(t, now + 1, changed, length, first, to);
    kn_host_free(changed);
    return ok;
}

static bool encode_stage(const kn_tokenizer *t, const stage *now, const char *text, size_t size,
                         bool first, place *to)
{
    if (now->last)
        return encode_words(t, text, size, now->early, now->late, to);
    kn_tokenizer whole = { .added = t->added, .addeds = t->addeds }; /* cuts nothing */
    kn_words w;
    kn_word word;
    size_t from = 0;
    memcpy(whole.added_first, t->added_first, sizeof whole.added_first);
    bool ok = kn_words_begin(&w, &whole, text, size, 0);
    w.early = now->early, w.late = now->late;
    while (ok && kn_words_next(&w, &word)) {
        if (word.id < 0)
            continue;
        const uint32_t id = (uint32_t)word.id;
        const size_t at = (size_t)(word.text - text);
        ok = encode_changed(t, now, text + from, at - from, first && from == 0, to) &&
             put(to, &id, 1);
        from = at + word.length;
    }
    kn_words_end(&w);
    return ok && encode_changed(t, now, text + from, size - from, first && from == 0, to);
}

static bool encode(const kn_tokenizer *t, const char *text, size_t len, place *to)
{
    const int normal = t->normal_changes, all = t->changes;
    bool some_early = false, some_late = false;
    for (int64_t i = 0; i < t->addeds; i++) {
        some_early = some_early || t->added[i].early;
        some_late = some_late || !t->added[i].early;
    }
    /* Those for which nothing happens are left out. */
    const bool apart = normal > 0 || (some_early && some_late);
    const stage list[] = { { true, false, 0, normal, false },
                           { !apart, true, normal, all, all == normal },
                           { .last = true } };
    return encode_stage(t, apart ? list : list + 1, text, len, true, to);
}

/* So many times as many, INT64_MAX at most. */
static void to_more(int64_t *n, int64_t times)
{
    if (__builtin_mul_overflow(*n, times, n))
        *n = INT64_MAX;
}

int64_t kn_tokenizer_most(const kn_tokenizer *t, size_t len)
{
    if (!kn_given(t, "kn_tokenizer_most", "the tokenizer"))
        return -1;
    int64_t most = (int64_t)len;
    for (int i = 0; i < t->changes; i++) {
        const kn_change *c = &t->change[i];
        to_more(&most, c->grows);
        most += most < INT64_MAX - c->grows ? c->grows : 0; /* of no text */
    }
    return most;
}

void *kn_tokenizer_list(const kn_tokenizer *t, const char *text, size_t len, kn_dtype dtype,
                        int64_t *count)
{
    place to = { .dtype = dtype, .grows = true };
    bool ok = put(&to, NULL, 0) && encode(t, text, len, &to);
    if (!ok)
        kn_host_free(to.ids);
    *count = to.count;
    return ok ? to.ids : NULL;
}

int64_t kn_tokenizer_encode(const kn_tokenizer *t, const char *text, size_t len, void *ids,
                            kn_dtype dtype)
{
    if (!kn_given(t, "kn_tokenizer_encode", "the tokenizer") ||
        (len && !(kn_given(text, "kn_tokenizer_encode", "the text") &&
                  kn_given(ids, "kn_tokenizer_encode", "the place for the ids"))))
        return -1;
    bool known = dtype == KN_U16 || dtype == KN_U32 || dtype == KN_I32 || dtype == KN_I64;
    if (!known || (dtype == KN_U16 && t->vocab > 65536)) {
        kn_fail("tokenizer: %lld ids do not fit %s; use %s", (long long)t->vocab,
                kn_dtype_name(dtype),
                t->vocab > 65536 ? "u32, i32 or i64" : "u16, u32, i32 or i64");
        return -1;
    }
    place to = { .ids = ids, .dtype = dtype, .room = kn_tokenizer_most(t, len) };
    return encode(t, text, len, &to) ? to.count : -1;
}
