/* models/tokens/train.c: learns a byte-level BPE. Texts become a list of words with their counts.
 * All neighbours in them are counted; the pair that occurs most often becomes a token and is
 * replaced in the words that hold it, which changes the counts of the pairs beside it; and so on. A
 * queue gives the pair with the highest count. A count in it may be too high by now: then the pair
 * goes back with the right one. As the tokenizers library does it, so that merges are the same:
 * each entry of the queue has the words of its own that hold the pair. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"

#include <string.h>

/* ---- words ----------------------------------------------------------------------------------- */

typedef struct counting {
    kn_strings part[KN_WORD_PARTS]; /* words and how often they occur */
    bool by_line;
} counting;

static bool count_word(kn_strings *s, const char *text, size_t length, int64_t times)
{
    struct kn_string *entry = length > 0 ? kn_strings_add(s, text, length) : NULL;
    if (entry)
        entry->value = (entry->value < 0 ? 0 : entry->value) + times;
    return entry || length == 0;
}

static bool visit_word(void *arg, int part, const kn_word *word)
{
    counting *c = arg;
    if (!word)
        kn_strings_free(&c->part[part]);
    return !word || word->id >= 0 || count_word(&c->part[part], word->text, word->length, 1);
}

/* All in s, with what it holds. */
static bool join(kn_strings *s, counting *c)
{
    bool ok = true;
    for (int p = 0; p < KN_WORD_PARTS; p++) {
        kn_strings *from = &c->part[p];
        for (int64_t i = 0; ok && i < from->count; i++)
            ok = count_word(s, kn_strings_text(from, i), from->list[i].length, from->list[i].value);
        kn_strings_free(from);
    }
    return ok;
}

static bool count_text(kn_strings *s, const kn_tokenizer *t, const char *text, size_t size)
{
    counting c = { 0 };
    bool ok = kn_words_each(t, text, size, true, true, visit_word, &c);
    return join(s, &c) && ok;
}

/* Line by line, as the tokenizers library reads files. */
static bool count_lines(kn_strings *s, const kn_tokenizer *t, const char *text, size_t size)
{
    counting c = { 0 };
    bool ok = true;
    kn_words w;
    for (size_t at = 0, end; ok && at < size; at = end) {
        const char *line = memchr(text + at, '\n', size - at);
        end = line ? (size_t)(line - text) + 1 : size;
        kn_word word;
        ok = kn_words_begin(&w, t, text + at, end - at, 0);
        while (ok && kn_words_next(&w, &word))
            ok = visit_word(&c, 0, &word);
        kn_words_end(&w);
    }
    return join(s, &c) && ok && kn_ok();
}

/* ---- pairs ----------------------------------------------------------------------------------- */

typedef struct list { /* of words, each once */
    uint32_t *word;   /* behind their number */
    int64_t room;
} list;

typedef struct training {
    kn_strings words;                    /* value: the count */
    uint32_t *id;                        /* the ids of all words, one behind another */
    size_t *begin;                       /* [words]: where each begins */
    uint32_t *length;                    /* [words]: how many it has now */
    kn_pairs index;                      /* of a pair in the two lists */
    int64_t *count, counts, counts_room; /* how often it occurs */
    list *fresh;                         /* the words where this round made it */
    int64_t fresh_room;
    uint64_t *touched; /* pairs with fresh words */
    int64_t touches, touched_room;
    kn_heap heap;     /* keys: the highest count first; places: the pairs; with: their words */
    kn_strings token; /* the bytes of each id that isn't special */
    uint64_t *merge;  /* pairs, in their order */
    int64_t merges, merges_room;
} training;

/* The pair's number in the lists; -1 with an error. */
static int64_t number_of(training *t, uint64_t pair)
{
    uint64_t *at = kn_pairs_at(&t->index, pair);
    if (!at)
        return -1;
    if (*at == KN_NO_PAIR) {
        if (!kn_host_grow(&t->count, &t->counts_room, t->counts + 1, sizeof *t->count) ||
            !kn_host_grow(&t->fresh, &t->fresh_room, t->counts + 1, sizeof *t->fresh))
            return -1;
        t->count[t->counts] = 0;
        t->fresh[t->counts] = (list){ 0 };
        *at = (uint64_t)t->counts++;
    }
    return (int64_t)*at;
}

/* The pair occurs so much more often in a word. */
static bool occurs(training *t, uint32_t a, uint32_t b, int64_t change, uint32_t word)
{
    const uint64_t pair = (uint64_t)a << 32 | b;
    const int64_t n = number_of(t, pair);
    if (n < 0)
        return false;
    t->count[n] += change * t->words.list[word].value;
    list *l = &t->fresh[n];
    if (change < 0 || (l->word && l->word[*l->word] == word))
        return true;
    const uint32_t count = l->word ? *l->word : 0;
    if (!kn_host_grow(&l->word, &l->room, (int64_t)count + 2, sizeof *l->word))
        return false;
    l->word[count + 1] = word;
    *l->word = count + 1;
    if (count > 0)
        return true;
    if (!kn_host_grow(&t->touched, &t->touched_room, t->touches + 1, sizeof *t->touched))
        return false;
    t->touched[t->touches++] = pair;
    return true;
}

/* ---- the queue ------------------------------------------------------------------------------- */

/* Takes the words over. */
static bool push(training *t, int64_t count, uint64_t pair, uint32_t *words)
{
    if (kn_heap_push(&t->heap, (struct kn_waiting){ (uint64_t)(INT64_MAX - count), pair, words }))
        return true;
    kn_host_free(words);
    return false;
}

/* Puts the pairs that this round made into the queue. */
static bool queue_fresh(training *t)
{
    bool ok = true;
    for (int64_t i = 0; i < t->touches; i++) {
        const int64_t n = (int64_t)kn_pairs_find(&t->index, t->touched[i]);
        uint32_t *words = t->fresh[n].word;
        t->fresh[n] = (list){ 0 };
        if (ok && t->count[n] > 0)
            ok = push(t, t->count[n], t->touched[i], words);
        else
            kn_host_free(words);
    }
    t->touches = 0;
    return ok;
}

/* ---- merging --------------------------------------------------------------------------------- */

/* In a word, a b becomes new. */
static bool merge_word(training *t, uint32_t word, uint32_t a, uint32_t b, uint32_t new)
{
    uint32_t *id = t->id + t->begin[word], n = 0;
    for (uint32_t i = 0; i < t->length[word]; i++) {
        const bool merges = i + 1 < t->length[word] && id[i] == a && id[i + 1] == b;
        i += merges;
        id[n++] = merges ? new : id[i];
        if (merges && n > 1 &&
            (!occurs(t, id[n - 2], a, -1, word) || !occurs(t, id[n - 2], new, 1, word)))
            return false;
        if (merges && i + 1 < t->length[word] &&
            (!occurs(t, b, id[i + 1], -1, word) || !occurs(t, new, id[i + 1], 1, word)))
            return false;
    }
    t->length[word] = n;
    return true;
}

/* The id of the two tokens' bytes, which may have come of others before; -1 with an error. */
static int64_t join_tokens(training *t, uint32_t a, uint32_t b)
{
    const struct kn_string *x = &t->token.list[a], *y = &t->token.list[b];
    const size_t length = x->length + y->length;
    char *both = kn_host_alloc(length + 1);
    if (!both)
        return -1;
    memcpy(both, t->token.bytes + x->at, x->length);
    memcpy(both + x->length, t->token.bytes + y->at, y->length);
    const int64_t before = t->token.count;
    struct kn_string *token = kn_strings_add(&t->token, both, length);
    if (token && t->token.count > before)
        token->value = before;
    kn_host_free(both);
    return token ? token->value : -1;
}

static bool merge_pairs(training *t, int64_t most, const kn_tokenizer_train_options *o)
{
    const int64_t first = t->token.count;
    bool ok = queue_fresh(t);
    while (ok && t->token.count < most && t->heap.count > 0) {
        const struct kn_waiting top = kn_heap_pop(&t->heap);
        const uint64_t pair = top.place;
        const uint32_t a = (uint32_t)(pair >> 32), b = (uint32_t)pair;
        uint32_t *words = top.with;
        const int64_t now = t->count[kn_pairs_find(&t->index, pair)];
        if (now != INT64_MAX - (int64_t)top.key) {
            ok = push(t, now, pair, words);
            continue;
        }
        const bool enough = now >= 1 && now >= o->least;
        const int64_t new = enough ? join_tokens(t, a, b) : -1;
        ok = !enough || (new >= 0 &&
                         kn_host_grow(&t->merge, &t->merges_room, t->merges + 1, sizeof *t->merge));
        if (ok && enough)
            t->merge[t->merges++] = pair;
        for (uint32_t i = 1; ok && enough && i <= *words; i++)
            ok = merge_word(t, words[i], a, b, (uint32_t) new);
        kn_host_free(words);
        ok = ok && queue_fresh(t);
        if (!enough)
            break;
        if (ok && o->progress && t->merges % 64 == 0 &&
            o->progress((double)(t->token.count - first) / (double)(most - first), o->progress_arg))
            ok = kn_fail("kn_tokenizer_train: ended by .progress");
    }
    return ok;
}

/* ---- beginning and end ----------------------------------------------------------------------- */

static bool add_token(training *t, const char *bytes, size_t length)
{
    struct kn_string *token = kn_strings_add(&t->token, bytes, length);
    if (token)
        token->value = t->token.count - 1;
    return token != NULL;
}

/* The bytes, in the order of their letters. */
static bool begin_tokens(training *t)
{
    for (uint32_t letter = 0; letter < 0x144; letter++) {
        const int byte = kn_letter_byte(letter);
        if (byte >= 0 && !add_token(t, (const char[]){ (char)byte }, 1))
            return false;
    }
    return true;
}

/* The words' ids, and their pairs. */
static bool begin_words(training *t)
{
    const int64_t words = t->words.count;
    size_t at = 0;
    int32_t of[256];
    if (words > UINT32_MAX)
        return kn_fail("kn_tokenizer_train: %lld different words are too many", (long long)words);
    for (int i = 0; i < 256; i++)
        of[i] = (int32_t)kn_strings_find(&t->token, (const char[]){ (char)i }, 1);
    t->id = kn_host_alloc((size_t)(t->words.bytes_used + 1) * sizeof *t->id);
    t->begin = kn_host_alloc((size_t)(words + 1) * sizeof *t->begin);
    t->length = kn_host_alloc((size_t)(words + 1) * sizeof *t->length);
    if (!t->id || !t->begin || !t->length)
        return false;
    for (int64_t i = 0; i < words; i++) {
        const struct kn_string *w = &t->words.list[i];
        t->begin[i] = at;
        t->length[i] = (uint32_t)w->length;
        for (size_t j = 0; j < w->length; j++)
            t->id[at++] = (uint32_t)of[(unsigned char)t->words.bytes[w->at + j]];
        for (size_t j = 0; j + 1 < w->length; j++)
            if (!occurs(t, t->id[t->begin[i] + j], t->id[t->begin[i] + j + 1], 1, (uint32_t)i))
                return false;
    }
    return true;
}

static json_t *spelled(const training *t, int64_t i)
{
    const struct kn_string *s = &t->token.list[i];
    char *text = kn_spell_bytes(t->token.bytes + s->at, s->length);
    json_t *j = text ? json_string(text) : NULL;
    kn_host_free(text);
    return j;
}

/* The special tokens come first. */
static kn_tokenizer *made(const training *t, const char *const *special, const char *pattern)
{
    json_t *vocab = json_object(), *merges = json_array(), *added = json_array();
    int64_t first = 0;
    for (; special[first]; first++) {
        json_array_append_new(added, kn_tokenizer_special(first, special[first]));
        json_object_set_new(vocab, special[first], json_integer(first));
    }
    for (int64_t i = 0; i < t->token.count; i++) {
        json_t *name = spelled(t, i);
        if (json_object_get(vocab, json_string_value(name)) && kn_ok())
            kn_fail(
                "kn_tokenizer_train: the special token \"%.60s\" is one of the tokens that come "
                "of the texts, or is there twice",
                json_string_value(name));
        json_object_set_new(vocab, json_string_value(name), json_integer(first + i));
        json_decref(name);
    }
    for (int64_t i = 0; i < t->merges; i++)
        json_array_append_new(merges, json_pack("[o, o]", spelled(t, (int64_t)(t->merge[i] >> 32)),
                                                spelled(t, (int64_t)(uint32_t)t->merge[i])));
    if (kn_ok() && ((int64_t)json_object_size(vocab) != first + t->token.count ||
                    (int64_t)json_array_size(merges) != t->merges))
        kn_fail_memory("the trained tokenizer");
    return kn_tokenizer_of_made(kn_tokenizer_frame(vocab, merges, added, pattern, true),
                                "the trained tokenizer");
}

static void training_end(training *t)
{
    kn_strings_free(&t->words);
    kn_strings_free(&t->token);
    kn_pairs_free(&t->index);
    for (int64_t i = 0; i < t->counts; i++)
        kn_host_free(t->fresh[i].word);
    for (int64_t i = 0; i < t->heap.count; i++)
        kn_host_free(t->heap.list[i].with);
    void *const all[] = { t->id,    t->begin,   t->length,    t->count,
                          t->fresh, t->touched, t->heap.list, t->merge };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        kn_host_free(all[i]);
}

kn_tokenizer *kn_tokenizer_train_(const char *const *text, const size_t *len, int count,
                                  kn_tokenizer_train_options o)
{
    static const char *const end_of_text[] = { "<|endoftext|>", NULL };
    const char *const *special = o.special ? o.special : end_of_text;
    const char *given = o.pattern ? o.pattern : "gpt2", *pattern = kn_cut_named(given);
    if ((count > 0 && (!kn_given(text, "kn_tokenizer_train", "the list of texts") ||
                       !kn_given(len, "kn_tokenizer_train", "the list of lengths"))))
        return NULL;
    if (!pattern &&
        strspn(given, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-") ==
            strlen(given)) { /* as a pattern it would find itself */
        return kn_fail_null(
            "kn_tokenizer_train: there is no pattern called '%.60s'; there are gpt2, llama3 and "
            "qwen, or give a regular expression",
            given);
    }
    int64_t specials = 0, least;
    for (; special[specials]; specials++)
        if (strlen(special[specials]) - 1 > 254)
            return kn_fail_null(
                "kn_tokenizer_train: a special token of %zu bytes; 1 to 255 are supported",
                strlen(special[specials]));
    if (o.least < 0)
        return kn_fail_null("kn_tokenizer_train: .least is %lld; it must be at least 0",
                            (long long)o.least);
    least = 256 + specials;
    if (o.vocab < least || o.vocab > KN_MOST_IDS)
        return kn_fail_null(
            "kn_tokenizer_train: .vocab is %lld; it takes %lld (256 bytes and the special "
            "tokens) to %d",
            (long long)o.vocab, (long long)least, KN_MOST_IDS);
    training t = { 0 };
    /* The texts are cut by the tokenizer that is to come, which has no merges yet. */
    const bool is_gpt2 = strcmp(given, "gpt2") == 0;
    pattern = is_gpt2 ? "" : pattern ? pattern : given;
    kn_tokenizer *cutter = begin_tokens(&t) ? made(&t, special, pattern) : NULL, *out = NULL;
    bool ok = cutter != NULL;
    for (int i = 0; ok && i < count; i++)
        ok = o.by_line ? count_lines(&t.words, cutter, text[i], len[i])
                       : count_text(&t.words, cutter, text[i], len[i]);
    if (ok && begin_words(&t) && merge_pairs(&t, o.vocab - specials, &o))
        out = made(&t, special, pattern);
    kn_tokenizer_free(cutter);
    training_end(&t);
    return out;
}
