/* models/tokens/sentencepiece.c: SentencePiece's BPE: its pieces and their scores become the
 * vocabulary and merges of a tokenizer.json. */
#include "data/data.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/tokens/tokens.h"

#include <stdlib.h>
#include <string.h>

/* ---- messages -------------------------------------------------------------------------------- */

/* A message of protocol buffers, read field by field. */
typedef struct message {
    const unsigned char *at, *end;
} message;

typedef struct field {
    int number, type;
    uint64_t value; /* of types 0, 1 and 5 */
    message inside; /* of type 2 */
} field;

static bool read_varint(message *m, uint64_t *value)
{
    *value = 0;
    for (int shift = 0; m->at < m->end && shift < 64; shift += 7) {
        *value |= (uint64_t)(*m->at & 0x7f) << shift;
        if (!(*m->at++ & 0x80))
            return true;
    }
    return false;
}

/* The next field; false at the end, and where the message is damaged: m->at isn't the end then. */
static bool read_field(message *m, field *f)
{
    uint64_t key, size = 0;
    const unsigned char *from = m->at;
    if (m->at >= m->end || !read_varint(m, &key))
        goto bad;
    *f = (field){ .number = (int)(key >> 3), .type = (int)(key & 7) };
    if (f->type == 0) {
        if (read_varint(m, &f->value))
            return true;
        goto bad;
    }
    if (f->type == 2 ? !read_varint(m, &size) : f->type != 1 && f->type != 5)
        goto bad;
    size = f->type == 1 ? 8 : f->type == 5 ? 4 : size;
    if (size > (uint64_t)(m->end - m->at))
        goto bad;
    f->inside = (message){ m->at, m->at + size };
    if (f->type != 2)
        memcpy(&f->value, m->at, size);
    m->at += size;
    return true;
bad:
    m->at = from;
    return false;
}

typedef struct model {
    kn_sentences s;
    int64_t kind;    /* 2: BPE */
    bool odd_spaces; /* behind a word, or as they are */
} model;

bool kn_sentences_add(kn_sentences *m, const char *text, size_t length, float score, int type,
                      const char *where)
{
    if (!text || length == 0 || length > 1024 || !kn_is_utf8(text, length) ||
        memchr(text, 0, length))
        return kn_fail("%s: its piece %lld is damaged", where, (long long)m->count);
    struct kn_string *s = kn_strings_add(&m->pieces, text, length);
    if (!s || !kn_host_grow(&m->score, &m->score_room, m->count + 1, sizeof *m->score) ||
        !kn_host_grow(&m->type, &m->type_room, m->count + 1, sizeof *m->type))
        return false;
    if (s->value >= 0)
        return kn_fail("%s: the piece \"%.*s\" is there twice", where, (int)length, text);
    s->value = m->count;
    m->score[m->count] = score;
    m->has_bytes = m->has_bytes || type == KN_SENTENCE_BYTE;
    m->wide = m->wide || (type == KN_SENTENCE_USER && memmem(text, length, "  ", 2));
    m->type[m->count++] = type;
    return m->count < KN_MOST_IDS || kn_fail("%s: too many pieces", where);
}

void kn_sentences_free(kn_sentences *m)
{
    kn_strings_free(&m->pieces);
    kn_host_free(m->score);
    kn_host_free(m->type);
}

static bool read_piece(model *m, message in, const char *path)
{
    field f;
    const unsigned char *text = NULL;
    size_t length = 0;
    float score = 0;
    int type = KN_SENTENCE_NORMAL;
    while (read_field(&in, &f)) {
        if (f.number == 1 && f.type == 2)
            text = f.inside.at, length = (size_t)(f.inside.end - f.inside.at);
        else if (f.number == 2 && f.type == 5)
            memcpy(&score, &f.value, sizeof score);
        else if (f.number == 3 && f.type == 0)
            type = (int)f.value;
    }
    if (in.at != in.end)
        return kn_fail("%s: its piece %lld is damaged", path, (long long)m->s.count);
    return kn_sentences_add(&m->s, (const char *)text, length, score, type, path);
}

/* A table of characters, whose strings stand behind a trie of so many bytes. */
static bool puts_two_spaces(const unsigned char *map, size_t size)
{
    uint32_t trie = 0;
    if (size > sizeof trie)
        memcpy(&trie, map, sizeof trie);
    return size > trie && memmem(map + trie, size - trie, "  ", 2);
}

static bool read_model(model *m, message in, const char *path)
{
    field f, g;
    m->kind = 1;
    m->s.shrinks = true;
    while (read_field(&in, &f)) {
        if (f.number == 1 && f.type == 2 && !read_piece(m, f.inside, path))
            return false;
        while (f.number == 2 && f.type == 2 && read_field(&f.inside, &g))
            if (g.number == 3 && g.type == 0)
                m->kind = (int64_t)g.value;
            else if (g.number == 24 && g.type == 0)
                m->odd_spaces |= g.value != 0;
        while (f.number == 3 && f.type == 2 && read_field(&f.inside, &g)) {
            if (g.number == 2 && g.type == 2)
                m->s.map = g.inside.at, m->s.map_size = (size_t)(g.inside.end - g.inside.at);
            else if (g.number == 3 && g.type == 0)
                m->s.no_begin = g.value == 0;
            else if (g.number == 4 && g.type == 0)
                m->s.shrinks = g.value != 0;
            else if (g.number == 5 && g.type == 0)
                m->odd_spaces |= g.value == 0;
        }
    }
    if (in.at != in.end || m->s.count == 0)
        return kn_fail("%s is no SentencePiece model, or is damaged", path);
    if (m->kind != 2)
        return kn_fail("%s is a SentencePiece model of type %lld; this library reads BPE (2)", path,
                       (long long)m->kind);
    if (m->odd_spaces)
        return kn_fail("%s has spaces behind its words, or as they are, which this library doesn't "
                       "read of SentencePiece's models; its tokenizer.json, if it has one, is read",
                       path);
    if (m->s.shrinks && (m->s.wide || puts_two_spaces(m->s.map, m->s.map_size)))
        return kn_fail(
            "%s takes away spaces behind others, but not those of %s, which this library "
            "doesn't read",
            path, m->s.wide ? "its user's symbols" : "its table of characters");
    return true;
}

/* A pair of pieces that make one. */
typedef struct pair {
    int64_t left, right, made;
    float score;
    size_t left_length, right_length; /* characters */
} pair;

static size_t characters(const char *text, size_t size)
{
    size_t n = 0;
    for (size_t i = 0; i < size; i++)
        n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

/* Higher scores first; then, as transformers has it, longer left and right halves. */
static int by_score(const void *a, const void *b)
{
    const pair *x = a, *y = b;
    if (x->score != y->score)
        return x->score > y->score ? -1 : 1;
    if (x->left_length != y->left_length)
        return x->left_length > y->left_length ? -1 : 1;
    if (x->right_length != y->right_length)
        return x->right_length > y->right_length ? -1 : 1;
    if (x->made != y->made)
        return x->made < y->made ? -1 : 1;
    return x->left < y->left ? -1 : x->left > y->left;
}

/* All ways of making a piece of two others. */
static json_t *merges_of(const kn_sentences *m)
{
    pair *list = NULL;
    int64_t count = 0, room = 0;
    json_t *merges = json_array();
    for (int64_t i = 0; i < m->count; i++) {
        const struct kn_string *s = &m->pieces.list[i];
        const char *text = m->pieces.bytes + s->at;
        for (size_t cut = 1; m->type[i] == KN_SENTENCE_NORMAL && cut < s->length; cut++) {
            if (((unsigned char)text[cut] & 0xc0) == 0x80)
                continue;
            const int64_t left = kn_strings_find(&m->pieces, text, cut),
                          right = kn_strings_find(&m->pieces, text + cut, s->length - cut);
            if (left < 0 || right < 0 || m->type[left] != KN_SENTENCE_NORMAL ||
                m->type[right] != KN_SENTENCE_NORMAL)
                continue;
            if (!kn_host_grow(&list, &room, count + 1, sizeof *list))
                goto done;
            list[count++] = (pair){ left,
                                    right,
                                    i,
                                    m->score[i],
                                    characters(text, cut),
                                    characters(text + cut, s->length - cut) };
        }
    }
    if (count > 0)
        qsort(list, (size_t)count, sizeof *list, by_score);
    for (int64_t i = 0; i < count; i++)
        json_array_append_new(merges, json_pack("[s, s]", kn_strings_text(&m->pieces, list[i].left),
                                                kn_strings_text(&m->pieces, list[i].right)));
done:
    kn_host_free(list);
    return merges;
}

#define MARK "\xe2\x96\x81" /* U+2581, for a space */

static json_t *replacement(const char *kind, const char *pattern, const char *content)
{
    return json_pack("{s:s, s:{s:s}, s:s}", "type", "Replace", "pattern", kind, pattern, "content",
                     content);
}

/* The model's changes of a text: its table of characters, with spaces at the text's ends left out
 * and one for several; spaces become marks, and one stands in front. */
static json_t *normalizers_of(const kn_sentences *m)
{
    json_t *list = json_array();
    if (m->map_size > 0) {
        char *map = kn_base64_text(m->map, m->map_size);
        json_array_append_new(list,
                              json_pack("{s:s, s:s, s:b}", "type", "Precompiled",
                                        "precompiled_charsmap", map ? map : "", "longest", 1));
        kn_host_free(map);
    }
    if (m->shrinks) {
        json_array_append_new(list, replacement("Regex", "\\A +", ""));
        json_array_append_new(list, replacement("Regex", " {2,}", " "));
    }
    json_array_append_new(list, replacement("String", " ", MARK));
    if (m->shrinks)
        json_array_append_new(list, replacement("Regex", MARK "+\\z", ""));
    if (!m->no_begin)
        json_array_append_new(list, json_pack("{s:s, s:s}", "type", "Prepend", "prepend", MARK));
    return list;
}

/* Its user's symbols are found in a text as they are, behind the changes. */
static json_t *symbol(int64_t id, const char *text)
{
    json_t *token = kn_tokenizer_special(id, text);
    json_object_set_new(token, "special", json_false());
    json_object_set_new(token, "user_defined", json_true());
    return token;
}

json_t *kn_sentences_json(const kn_sentences *m)
{
    json_t *vocab = json_object(), *added = json_array();
    const char *unknown = NULL;
    for (int64_t i = 0; i < m->count; i++) {
        const char *text = kn_strings_text(&m->pieces, i);
        json_object_set_new(vocab, text, json_integer(i));
        if (m->type[i] == KN_SENTENCE_UNKNOWN)
            unknown = text;
        if (m->type[i] == KN_SENTENCE_UNKNOWN || m->type[i] == KN_SENTENCE_CONTROL)
            json_array_append_new(added, kn_tokenizer_special(i, text));
        else if (m->type[i] == KN_SENTENCE_USER)
            json_array_append_new(added, symbol(i, text));
    }
    json_t *root = kn_tokenizer_frame(vocab, merges_of(m), added, NULL, false);
    json_t *bpe = json_object_get(root, "model");
    json_object_set_new(bpe, "unk_token", unknown ? json_string(unknown) : json_null());
    json_object_set_new(bpe, "fuse_unk", json_true());
    json_object_set_new(bpe, "byte_fallback", json_boolean(m->has_bytes));
    json_object_set_new(
        root, "normalizer",
        json_pack("{s:s, s:o}", "type", "Sequence", "normalizers", normalizers_of(m)));
    json_t *decoders =
        json_pack("[{s:s, s:{s:s}, s:s}, {s:s}, {s:s}]", "type", "Replace", "pattern", "String",
                  MARK, "content", " ", "type", "ByteFallback", "type", "Fuse");
    if (!m->no_begin)
        json_array_append_new(decoders, json_pack("{s:s, s:s, s:i, s:i}", "type", "Strip",
                                                  "content", " ", "start", 1, "stop", 0));
    json_object_set_new(root, "decoder",
                        json_pack("{s:s, s:o}", "type", "Sequence", "decoders", decoders));
    if (kn_ok())
        return root;
    json_decref(root);
    return NULL;
}

kn_tokenizer *kn_sentences_load(const char *path)
{
    kn_mapped map;
    model m = { 0 };
    kn_tokenizer *t = NULL;
    if (!kn_file_map(path, "tokenizer file", &map))
        return NULL;
    if (read_model(&m, (message){ map.data, map.data + map.size }, path))
        t = kn_tokenizer_of_made(kn_sentences_json(&m.s), path);
    kn_file_unmap(&map);
    kn_sentences_free(&m.s);
    return t;
}
