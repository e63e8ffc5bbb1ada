/* models/text_internal.h (private): a text's tokens, which lie in parts: files that are mapped, and
 * memory. */
#ifndef KNAP_MODELS_TEXT_INTERNAL_H
#define KNAP_MODELS_TEXT_INTERNAL_H

#include "models/chat_internal.h"
#include "models/text.h"

#include <jansson.h>

typedef struct kn_text_part {
    kn_mapped map;      /* a token file, or zero */
    char *path;         /* its name; NULL: memory */
    void *owned;        /* tokens in memory, or NULL */
    size_t owned_bytes; /* bytes allocated */
    const void *tokens; /* [count] of width bytes */
    int width;          /* 2 or 4 */
    int64_t count;
    int64_t begin; /* the number of its first token among all */
} kn_text_part;

typedef struct kn_conversations kn_conversations;

struct kn_text {
    kn_text_part *part; /* [parts] */
    int64_t parts, room;
    int64_t count, vocab;
    int64_t train;          /* so many tokens are for training, the others for validation */
    int64_t first;          /* the id that a document begins with; -1: none is known */
    bool given;             /* train isn't 90 % of them: validation has data of its own */
    kn_conversations *talk; /* NULL: a text */
};

/* A text without tokens; NULL with an error. */
kn_text *kn_text_new(int64_t vocab);
/* Moves p behind the text's parts, and frees it where that fails. The split is 90 % again. */
bool kn_text_add(kn_text *t, kn_text_part p);
void kn_text_part_free(kn_text_part *p);
/* Moves the parts of b behind those of a and frees b; false with an error. NULL passes an error on.
 */
bool kn_text_append(kn_text *a, kn_text *b);

static inline int64_t kn_part_token(const kn_text_part *p, int64_t i)
{
    return p->width == 2 ? ((const uint16_t *)p->tokens)[i] : ((const uint32_t *)p->tokens)[i];
}

/* Whether a mapped file has the header of a token file. */
bool kn_text_has_header(const kn_mapped *map);

/* The id that a document of llm.c's token file begins with; -1: it is another file. */
int64_t kn_text_llmc_begin(const kn_text *t);
/* Whether the last part of path is a pattern. */
bool kn_text_is_pattern(const char *path);
/* Whether the first of path's files holds tokens. */
bool kn_text_holds_tokens(const char *path);

/* ---- documents.c ----------------------------------------------------------------------------- */

/* Calls each with the object of every line that isn't blank; where is "file:line", for errors.
 * False where it returned it, or with an error: a line that is no object of JSON. */
typedef bool (*kn_json_line_fn)(json_t *object, const char *where, void *arg);
bool kn_json_lines(const char *path, const kn_mapped *map, kn_json_line_fn each, void *arg);

/* The texts of documents, one behind another. */
typedef struct kn_documents {
    char *text;
    int64_t used, room;
    int64_t *end; /* [count]: where each ends */
    int64_t count, ends;
} kn_documents;

/* Adds those of a file; of o count .field and .separator. */
bool kn_documents_read(kn_documents *d, const char *path, const kn_mapped *map,
                       const kn_text_read_options *o);
void kn_documents_free(kn_documents *d);
/* Their ids, u16, or u32 of a vocabulary above 65536: of each the tokenizer's prefix, its own, and
 * the end token. For kn_host_free; NULL with an error. */
void *kn_documents_ids(const kn_documents *d, const kn_tokenizer *t, int64_t end, int64_t *count);

#define KN_END_TOKEN "<|endoftext|>"
/* The id of the end token: of this spelling, or where that is NULL of the usual ones; without a
 * tokenizer end is the id. -1: there is none, with an error if end was given. */
int64_t kn_text_end(const kn_tokenizer *t, const char *end, int64_t vocab);
/* The id that a document begins with, which ends by that one. */
int64_t kn_text_begin(const kn_tokenizer *t, int64_t end);

/* ---- conversations.c ------------------------------------------------------------------------- */

/* Where conversations lie among the tokens, and in rows. */
struct kn_conversations {
    int64_t *start; /* [count + 1] */
    int64_t count, room;
    unsigned char *answer; /* of each token of the text: it is an answer's, and counts */
    int64_t train;         /* so many conversations are for training */
    int64_t left_out;      /* lines without an answer */
    /* kn_text_pack's */
    int64_t ctx;
    bool several;     /* in a row, where attention stays inside of each; else one */
    int64_t *kept;    /* [laid]: conversations with an answer in their first ctx tokens */
    int64_t *row;     /* [rows + 1]: the first of each row, in kept */
    int64_t *counted; /* [rows]: targets that count */
    int64_t laid, rows, train_rows;
    int64_t cut, lost; /* conversations longer than a row, and those without an answer in it */
};

/* Those of a file of JSON lines; NULL with an error. */
kn_text *kn_conversations_read(const char *path, const kn_mapped *map, const kn_tokenizer *t,
                               const kn_chat *chat);
void kn_conversations_free(kn_conversations *c); /* NULL is fine */
/* Moves those of b behind those of a, before b's tokens come there. */
bool kn_conversations_append(kn_text *a, const kn_text *b);
/* There are rows of the split, of ctx tokens; else an error. */
bool kn_conversations_check(const kn_text *t, kn_text_split split, int64_t ctx);
/* Row i of the endless line of them; begin may be NULL. And how many of its targets count. */
void kn_conversations_row(const kn_text *t, kn_text_split split, uint64_t seed, int64_t i,
                          int64_t *x, int64_t *y, int64_t *begin);
int64_t kn_conversations_counted(const kn_text *t, kn_text_split split, uint64_t seed, int64_t i);

#endif
