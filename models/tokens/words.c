/* models/tokens/words.c: cuts a text into words, in which alone bytes or characters are merged. A
 * stretch of plain text ends at an added token, or at a byte that isn't UTF-8, which is a word;
 * patterns cut it, the second one what the first one gave, and so on. Where a word begins says how
 * the text goes on from there, so that several threads can begin anywhere: at the first place where
 * two of them agree that a word begins, they agree on all that follows. */
#include "models/tokens/tokens.h"

#include <string.h>

static const char MARK[] =
    "\xe2\x96\x81"; /* U+2581, which begins a word in SentencePiece's files */

/* ---- stretches ------------------------------------------------------------------------------- */

/* The first from low to high whose byte at depth is c or more. */
static const kn_added *first_from(const kn_added *low, const kn_added *high, size_t depth, int c)
{
    for (int64_t n = high - low; n > 0;)
        if ((unsigned char)low[n / 2].text[depth] < c)
            low += n / 2 + 1, n -= n / 2 + 1;
        else
            n /= 2;
    return low;
}

const kn_added *kn_added_at(const kn_tokenizer *t, const char *text, size_t size, bool early,
                            bool late)
{
    const kn_added *best = NULL, *low = t->added, *high = low + t->addeds;
    if (size == 0 || !t->added_first[(unsigned char)*text])
        return NULL;
    /* All from low to high share the bytes before depth. */
    for (size_t depth = 0; low < high; depth++) {
        if (low->length == depth) {
            if (low->early ? early : late)
                best = low;
            low++;
        }
        if (low == high || depth >= size)
            break;
        const int c = (unsigned char)text[depth];
        low = first_from(low, high, depth, c);
        high = first_from(low, high, depth, c + 1);
    }
    return best;
}

/* The length of the white space at text[size] (as Rust's char::is_whitespace says); 0: none. */
static size_t space_at(const char *text, size_t size)
{
    uint32_t c = 0;
    const size_t n = kn_utf8_read(text, size, &c);
    const bool is = (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 ||
                    (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f ||
                    c == 0x205f || c == 0x3000;
    return is ? n : 0;
}

/* Begins a stretch at w->at, or looks further ahead in the one that is there. Its end depends on
 * w->at alone: what else it depended on would be another thing on another thread. */
static void stretch(kn_words *w, bool more)
{
    const size_t window = (size_t)1 << 20;
    size_t cap = (w->at + KN_WORD_MOST + window - 1) / window * window, i = w->at, n = 0;
    if (!more)
        w->begin = w->at;
    else if (w->seen > i)
        i = w->seen;
    cap = cap < w->size ? cap : w->size;
    w->next = NULL;
    w->next_end = 0;
    for (uint32_t code; i < cap; i += n) {
        const unsigned char c = (unsigned char)w->text[i];
        if ((w->next = kn_added_at(w->t, w->text + i, w->size - i, w->early, w->late))) {
            w->next_end = i + w->next->length;
            break;
        }
        n = c < 0x80 ? 1 : kn_utf8_read(w->text + i, w->size - i, &code);
        if (n == 0)
            break;
    }
    w->seen = w->end = i;
    if (!w->next)
        return;
    while (w->next->right) { /* over the spaces behind it, up to another one in them */
        const char *behind = w->text + w->next_end;
        const size_t left = w->size - w->next_end;
        if (kn_added_at(w->t, behind, left, w->early, w->late) || (n = space_at(behind, left)) == 0)
            break;
        w->next_end += n;
    }
    while (w->next->left && w->end > w->at) { /* back over the spaces before it */
        size_t last = w->end - 1;
        while (last > w->at && ((unsigned char)w->text[last] & 0xc0) == 0x80)
            last--;
        if (space_at(w->text + last, w->end - last) != w->end - last)
            break;
        w->end = last;
    }
}

/* ---- patterns -------------------------------------------------------------------------------- */

/* Sets the walk's match to the next one at or behind at; at the end where there is none. */
static bool find(kn_words *w, int level)
{
    struct kn_cut_walk *k = &w->walk[level];
    size_t begin, end;
    if (!kn_matching_next(&w->matching, &w->t->cut[level], w->text + w->begin, k->end - w->begin,
                          k->at - w->begin, &begin, &end))
        return false;
    k->match = w->begin + begin, k->match_end = w->begin + end;
    return k->found = true;
}

/* The next piece of a level, which is not at its end. *out: it is left out. */
static bool piece(kn_words *w, int level, size_t *begin, size_t *end, bool *out)
{
    const kn_cut *c = &w->t->cut[level];
    struct kn_cut_walk *k = &w->walk[level];
    if ((!k->found || k->match < k->at) && !find(w, level))
        return false;
    const bool is_match = k->match == k->at;
    *begin = k->at;
    *end = is_match ? k->match_end : k->match;
    *out = c->kind == KN_CUT_REMOVED && is_match != c->invert;
    k->at = *end;
    if (c->kind == KN_CUT_PREVIOUS && !is_match)
        *end = k->at = k->match_end;
    if (c->kind == KN_CUT_NEXT && is_match) {
        if (k->at < k->end && !find(w, level))
            return false;
        *end = k->at = k->at < k->end ? k->match : k->end;
    }
    return true;
}

/* ---- words ----------------------------------------------------------------------------------- */

bool kn_words_begin(kn_words *w, const kn_tokenizer *t, const char *text, size_t size, size_t at)
{
    *w = (kn_words){ .t = t, .text = text, .size = size, .early = true, .late = true };
    w->at = w->begin = w->end = w->seen = at;
    return t->cuts == 0 || kn_matching_begin(&w->matching);
}

void kn_words_end(kn_words *w)
{
    kn_matching_end(&w->matching);
}

bool kn_words_between(const kn_words *w)
{
    for (int i = 1; i < w->t->cuts; i++)
        if (w->walk[i].at < w->walk[i].end)
            return false;
    return true;
}

/* Whether the next words come of a stretch's text. */
static bool has_stretch(kn_words *w)
{
    if (w->at == w->end && w->at == w->seen && !w->next)
        stretch(w, false);
    else if (!w->next && w->seen < w->size && w->at + KN_WORD_MOST > w->end)
        stretch(w, true);
    return w->at < w->end;
}

/* The word at a stretch's end: an added token, or bytes that aren't UTF-8. */
static void break_word(kn_words *w, kn_word *word)
{
    uint32_t code;
    size_t end = w->next ? w->next_end : w->at + 1;
    while (!w->next && end < w->size && kn_utf8_read(w->text + end, w->size - end, &code) == 0)
        end++;
    *word = (kn_word){ w->text + w->at, end - w->at, w->next ? w->next->id : -1 };
    w->at = w->begin = w->end = w->seen = end;
    w->next = NULL;
}

/* Without cuts: up to the next mark of a word's beginning, or all. */
static size_t uncut_end(const kn_words *w)
{
    const char *p = w->text + w->at, *end = w->text + w->end;
    while (w->t->cuts_at_spaces && p < end) {
        while (end - p >= 3 && memcmp(p, MARK, 3) == 0)
            p += 3;
        p = memmem(p, (size_t)(end - p), MARK, 3);
        return p ? (size_t)(p - w->text) : w->end;
    }
    return w->end;
}

bool kn_words_next(kn_words *w, kn_word *word)
{
    const int last = w->t->cuts - 1;
    for (int level = last < 0 ? 0 : last;;) {
        size_t begin, end;
        bool out = false;
        if (level == 0) {
            if (!has_stretch(w)) {
                if (w->at >= w->size)
                    return false;
                break_word(w, word);
                for (int i = 0; i <= last; i++) /* none is in the middle of anything */
                    w->walk[i] = (struct kn_cut_walk){ 0 };
                return true;
            }
            struct kn_cut_walk *k = &w->walk[0];
            if (k->at != w->at || k->end != w->end)
                *k = (struct kn_cut_walk){ .at = w->at, .end = w->end };
        }
        if (last < 0) {
            begin = w->at;
            end = w->at = uncut_end(w);
        } else if (w->walk[level].at >= w->walk[level].end) {
            level--;
            continue;
        } else if (!piece(w, level, &begin, &end, &out)) {
            return false;
        }
        if (level == 0)
            w->at = end;
        if (out || begin == end)
            continue;
        if (level >= last) {
            *word = (kn_word){ w->text + begin, end - begin, -1 };
            return true;
        }
        w->walk[++level] = (struct kn_cut_walk){ .at = begin, .end = end };
    }
}
