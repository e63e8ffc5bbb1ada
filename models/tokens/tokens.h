/* models/tokens/tokens.h (private): the parts of a tokenizer. A text goes through them in this
 * order: changes.c changes it (normal forms, spaces written as a character); words.c finds the
 * added tokens in it and cuts the rest into words; bpe.c merges each word's bytes or characters;
 * encode.c does that for long texts on several threads. json.c reads all that from tokenizer.json;
 * files.c, train.c and tokenizer.c make such a text. */
#ifndef KNAP_MODELS_TOKENS_TOKENS_H
#define KNAP_MODELS_TOKENS_TOKENS_H

#include "models/tokenizer.h"

#include <jansson.h>

/* ---- tables ---------------------------------------------------------------------------------- */

/* Strings with numbers, each string once. */
typedef struct kn_strings {
    char *bytes; /* one behind another, each with a 0 behind it */
    int64_t bytes_used, bytes_room;
    struct kn_string {
        size_t at, length;
        int64_t value;
    } * list; /* in order of their coming */
    int64_t count, room;
    uint32_t *slot; /* 1 + the index in list; 0: free */
    uint64_t slots, seed;
} kn_strings;

/* Where text[length] stands in the list; -1: nowhere. */
int64_t kn_strings_find(const kn_strings *s, const char *text, size_t length);
/* Its entry, which is new (value -1) where there was none; NULL with an error. Valid until the next
 * call. */
struct kn_string *kn_strings_add(kn_strings *s, const char *text, size_t length);
static inline const char *kn_strings_text(const kn_strings *s, int64_t i)
{
    return s->bytes + s->list[i].at;
}
void kn_strings_free(kn_strings *s);

/* Numbers of 64 bits by keys of 64 bits: UINT64_MAX is no key, and as a value: there is none. */
typedef struct kn_pairs {
    struct kn_pair {
        uint64_t key, value;
    } * slot;
    uint64_t slots, count, seed;
} kn_pairs;

#define KN_NO_PAIR UINT64_MAX
uint64_t kn_hash64(uint64_t a, uint64_t b);
static inline uint64_t kn_pairs_find(const kn_pairs *p, uint64_t key)
{
    if (p->count == 0)
        return KN_NO_PAIR;
    for (uint64_t i = kn_hash64(key, p->seed);; i++) {
        const struct kn_pair *s = &p->slot[i & (p->slots - 1)];
        if (s->key == key || s->key == UINT64_MAX)
            return s->key == key ? s->value : KN_NO_PAIR;
    }
}
/* The value's place, a new one with KN_NO_PAIR where there was none; NULL with an error. Valid
 * until the next call. */
uint64_t *kn_pairs_at(kn_pairs *p, uint64_t key);
void kn_pairs_free(kn_pairs *p);

/* The next line of text[size] from *at on, without its end ("\n" or "\r\n"); false: none is left.
 */
bool kn_next_line(const char *text, size_t size, size_t *at, const char **line, size_t *length);

/* Bytes that grow; a 0 stands behind them. */
typedef struct kn_bytes {
    char *at;
    int64_t size, room;
} kn_bytes;

bool kn_bytes_append(kn_bytes *to, const char *from, size_t size);

/* A heap: the entry with the lowest key, and of equals the lowest place, comes first. */
typedef struct kn_heap {
    struct kn_waiting {
        uint64_t key, place;
        void *with;
    } * list;
    int64_t count, room;
} kn_heap;

bool kn_heap_push(kn_heap *h, struct kn_waiting new);
struct kn_waiting kn_heap_pop(kn_heap *h); /* of a heap that isn't empty */

/* ---- the tokenizer --------------------------------------------------------------------------- */

#define KN_MOST_STEPS 8
#define KN_MOST_IDS   (1 << 24)

typedef struct kn_charsmap kn_charsmap;

/* A step of the cutting: what lies between the matches of a pattern, and the matches. */
typedef struct kn_cut {
    void *code; /* of PCRE2 */
    enum kn_cut_kind {
        KN_CUT_ISOLATED, /* each is a word */
        KN_CUT_REMOVED,  /* matches are left out; invert: what lies between them */
        KN_CUT_PREVIOUS, /* a match belongs to what is before it */
        KN_CUT_NEXT      /* or behind it */
    } kind;
    bool invert;
    bool looks_back;   /* what is before a word may decide about it */
    bool may_be_empty; /* a match */
} kn_cut;

/* A change of the text before it is cut. */
typedef struct kn_change {
    enum kn_change_kind {
        KN_CHANGE_FORM,    /* to a normal form of Unicode: form, of utf8proc's options */
        KN_CHANGE_REPLACE, /* from, or the matches of cut, by to */
        KN_CHANGE_MAP,     /* by a table of characters */
        KN_CHANGE_PREPEND, /* to, where there is a text */
        /* to, where the text begins with no to; the second only at the very beginning */
        KN_CHANGE_BEGIN,
        KN_CHANGE_BEGIN_FIRST
    } kind;
    int form;
    char *from, *to;
    kn_cut cut;
    kn_charsmap *map;
    int64_t grows; /* bytes that one may become */
} kn_change;

/* A token that is found as it is in the text, before it is cut. */
typedef struct kn_added {
    const char *text; /* of the names, or own */
    char *own;
    size_t length;
    int64_t id;
    bool special;     /* stands for no text */
    bool early;       /* found before the text is changed */
    bool as_is;       /* found as it is behind the changes, which leave it alone */
    bool left, right; /* takes the spaces beside it */
} kn_added;

struct kn_tokenizer {
    char *json; /* tokenizer.json */
    size_t json_size;
    const char *kind;
    int64_t vocab;
    /* Its tokens as the file spells them, and the bytes that each id stands for. */
    kn_strings names;
    char *bytes;
    size_t *at;       /* [vocab + 1] in bytes */
    char *added_id;   /* [vocab]: an added token's 1, a special one's 2, else 0 */
    bool drops_space; /* a text's first space comes of the changes: decoding leaves it out */
    int64_t prefix[KN_MOST_STEPS]; /* before every text */
    int prefixes;
    /* Text to words. */
    kn_change change[KN_MOST_STEPS];
    int normal_changes, changes; /* those before the late tokens are looked for, and all */
    kn_added *added;             /* in order of their texts */
    int64_t addeds;
    bool added_first[256]; /* bytes that one begins with */
    kn_cut cut[KN_MOST_STEPS];
    int cuts;
    bool cuts_at_spaces; /* no token goes over the beginning of a word that is marked by U+2581 */
    /* Words to ids. */
    bool by_bytes;      /* of bytes; else of characters */
    bool whole_first;   /* a word that is a token is that token, whatever the merges are */
    int32_t byte[256];  /* the id of a byte, or -1 */
    kn_pairs character; /* the id of a code point */
    kn_pairs merge;     /* of two ids a << 32 | b: rank << 32 | id */
    int64_t unknown;    /* the id of a character without one; -1: that is an error */
    bool joins_unknown; /* several in a row are one */
};

/* Of a tokenizer.json's value and its text, of which the tokenizer makes a copy. */
kn_tokenizer *kn_tokenizer_of_json(json_t *root, const char *text, size_t size, const char *where);
/* The same of a value that this library made; takes it over. NULL passes an error on. */
kn_tokenizer *kn_tokenizer_of_made(json_t *root, const char *where);
/* A tokenizer.json around the model's two parts, which are taken over: of bytes that are cut by
 * pattern (NULL: not at all, "": GPT-2's), or of characters. added may be NULL. */
json_t *kn_tokenizer_frame(json_t *vocab, json_t *merges, json_t *added, const char *pattern,
                           bool by_bytes);
/* {"id": id, "content": text, "special": true ...}; NULL: no memory. */
json_t *kn_tokenizer_special(int64_t id, const char *text);

/* t with these tokens as special ones, which get ids behind its own unless it has them; NULL with
 * an error. */
kn_tokenizer *kn_tokenizer_with(const kn_tokenizer *t, const char *const *token, int count);

/* The pieces of a SentencePiece model, in order of their ids; their types have its numbers. */
typedef enum kn_sentence_type {
    KN_SENTENCE_NORMAL = 1,
    KN_SENTENCE_UNKNOWN,
    KN_SENTENCE_CONTROL,
    KN_SENTENCE_USER,
    KN_SENTENCE_UNUSED,
    KN_SENTENCE_BYTE
} kn_sentence_type;
typedef struct kn_sentences {
    kn_strings pieces; /* value: the id */
    float *score;
    int *type;
    int64_t count, score_room, type_room;
    const unsigned char *map; /* its table of characters (charsmap.c); borrowed */
    size_t map_size;
    bool no_begin; /* no space is put before a text */
    bool shrinks;  /* spaces at a text's ends go, and those behind others */
    bool has_bytes;
    bool wide; /* a symbol of its user has two spaces in a row */
} kn_sentences;
bool kn_sentences_add(kn_sentences *m, const char *text, size_t length, float score, int type,
                      const char *where);
/* Their tokenizer.json, which the caller drops; NULL with an error. */
json_t *kn_sentences_json(const kn_sentences *m);
void kn_sentences_free(kn_sentences *m);
kn_tokenizer *kn_sentences_load(const char *path); /* a file tokenizer.model */

/* The bytes of one valid id, valid while t lives: how many. */
size_t kn_tokenizer_piece(const kn_tokenizer *t, int64_t id, const char **bytes);
/* Of ids[n] all bytes; those outside the vocabulary, as -100, have none. */
int64_t kn_tokenizer_bytes(const kn_tokenizer *t, const int64_t *ids, int64_t n);

/* The character that stands for a byte in a byte-level tokenizer's file (GPT-2's alphabet), and the
 * byte of a character, or -1. */
uint32_t kn_byte_letter(unsigned char byte);
int kn_letter_byte(uint32_t letter);
/* The spelling of bytes[size], to be freed with kn_host_free; NULL with an error. */
char *kn_spell_bytes(const char *bytes, size_t size);

/* Reads one code point of s[len], len > 0 (RFC 3629: shortest form, no surrogates, at most
 * U+10FFFF). Returns its length in bytes, or 0 where the bytes are invalid. */
size_t kn_utf8_read(const char *s, size_t len, uint32_t *code);
bool kn_is_utf8(const char *s, size_t len); /* all of it */
/* Writes a valid code point; returns its length. */
size_t kn_utf8_write(uint32_t code, char out[4]);

/* ---- changes ------------------------------------------------------------------------------- */

/* The text after changes from to until - 1, to be freed with kn_host_free; first: it is a text's
 * beginning. NULL with an error. */
char *kn_change_text(const kn_tokenizer *t, int from, int until, const char *text, size_t size,
                     bool first, size_t *length);
/* The form of Unicode by its name ("NFC"); 0 where there is none. */
int kn_change_form(const char *name);

/* The table of a Precompiled normalizer; longest: as SentencePiece uses it. *grows: the most bytes
 * that one may become. NULL with an error; free with kn_host_free. */
kn_charsmap *kn_charsmap_read(const char *base64, bool longest, const char *where, int64_t *grows);
bool kn_charsmap_change(const kn_tokenizer *t, const kn_charsmap *m, kn_bytes *out,
                        const char *text, size_t size);
/* To be freed with kn_host_free; NULL with an error. */
char *kn_base64_text(const void *bytes, size_t size);

/* ---- words ---------------------------------------------------------------------------------- */

/* Words longer than this may be cut. */
#define KN_WORD_MOST (256 << 10)

/* The longest added token that text[size] begins with; NULL: none. early, late: which are looked
 * for. */
const kn_added *kn_added_at(const kn_tokenizer *t, const char *text, size_t size, bool early,
                            bool late);

typedef struct kn_word {
    const char *text;
    size_t length;
    int64_t id; /* of an added token; -1: of none */
} kn_word;

/* Compiles a pattern of the Ruby syntax that the tokenizers library reads; NULL with an error. */
bool kn_cut_pattern(kn_cut *c, const char *pattern, bool literal, const char *where);
void kn_cut_free(kn_cut *c);
/* Memory to match in, PCRE2's. */
typedef struct kn_matching {
    void *match, *context, *stack;
} kn_matching;

bool kn_matching_begin(kn_matching *m);
void kn_matching_end(kn_matching *m);
/* The next match in valid UTF-8 that isn't empty, from text[from] on; at the text's end where there
 * is none. False with an error. */
bool kn_matching_next(kn_matching *m, const kn_cut *c, const char *text, size_t size, size_t from,
                      size_t *begin, size_t *end);

/* A walk over the words of a text. */
typedef struct kn_words {
    const kn_tokenizer *t;
    const char *text;
    size_t size;
    bool early, late;     /* which added tokens it looks for */
    size_t at;            /* the next word of cut 0 */
    size_t begin, end;    /* the stretch of plain text that at lies in */
    kn_added const *next; /* at the stretch's end, or NULL */
    size_t next_end;
    size_t seen; /* no added token, no damage from the stretch's end to here */
    struct kn_cut_walk {
        size_t at, end, match, match_end;
        bool found; /* the match, which is at its end where there is none */
    } walk[KN_MOST_STEPS];
    kn_matching matching;
} kn_words;

bool kn_words_begin(kn_words *w, const kn_tokenizer *t, const char *text, size_t size, size_t at);
/* The next word; false at the end or with an error. */
bool kn_words_next(kn_words *w, kn_word *word);
/* All words before w->at are given. */
bool kn_words_between(const kn_words *w);
void kn_words_end(kn_words *w);

/* The patterns by name ("gpt2", "llama3", "qwen"); NULL: no name of one. */
const char *kn_cut_named(const char *name);

/* Calls visit for every word of text[size], on several threads where that pays: part, less than
 * KN_WORD_PARTS, numbers the stretches of the text in order, each on one thread at a time. NULL as
 * a word takes back all words of a part, which follow once more: they were cut otherwise. False
 * with an error, or where visit returned it. */
#define KN_WORD_PARTS 64
typedef bool (*kn_visit_fn)(void *arg, int part, const kn_word *word);
bool kn_words_each(const kn_tokenizer *t, const char *text, size_t size, bool early, bool late,
                   kn_visit_fn visit, void *arg);

/* A text's ids in a list of their number, to be freed with kn_host_free; NULL with an error. */
void *kn_tokenizer_list(const kn_tokenizer *t, const char *text, size_t len, kn_dtype dtype,
                        int64_t *count);
/* While a text is cut up, told is called with the bytes that were done since the last call, on one
 * thread at a time; NULL ends that. For programs that show how far they are. */
void kn_words_tell(void (*told)(int64_t bytes, void *arg), void *arg);

/* ---- bpe ------------------------------------------------------------------------------------- */

typedef struct kn_bpe kn_bpe; /* memory to merge in */

kn_bpe *kn_bpe_begin(const kn_tokenizer *t, bool cached);
void kn_bpe_end(kn_bpe *b);
/* The ids of a word, valid until the next call; -1 with *bad >= 0 (the place of a character that
 * has no id) or with an error. */
int64_t kn_bpe_word(kn_bpe *b, const char *text, size_t length, const uint32_t **ids, int64_t *bad);

#endif
