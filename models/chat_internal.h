/* models/chat_internal.h (private): conversations as texts, by templates. */
#ifndef KNAP_MODELS_CHAT_INTERNAL_H
#define KNAP_MODELS_CHAT_INTERNAL_H

#include "models/tokenizer.h"

#include <jansson.h>

typedef enum kn_role { KN_SYSTEM, KN_USER, KN_ASSISTANT, KN_ROLES } kn_role;

/* How messages become one text: begin, then of each message open, its text without white space
 * around it, and close; behind the assistant's open comes lead, of which its text begins. */
typedef struct kn_chat {
    const char *name, *begin, *open[KN_ROLES], *lead, *close[KN_ROLES];
    const char *stop;     /* the token that ends an answer */
    const char *token[4]; /* that a tokenizer must have, ended by NULL */
    bool strict;          /* user and assistant take turns, the user begins */
    bool joins;           /* a message behind the system's has no open */
    const char *jinja;    /* the same for transformers' apply_chat_template */
} kn_chat;

#define KN_CHATS "chatml|llama3|llama2|plain"
/* The template of that name; NULL without an error: none. */
const kn_chat *kn_chat_named(const char *name);
/* The one that does what this text for Jinja does, as far as its marks tell; NULL: none. */
const kn_chat *kn_chat_of_jinja(const char *jinja);
/* The same of the file at path; NULL with an error. */
const kn_chat *kn_chat_known(const char *jinja, const char *path);
/* The template of a model's folder (tokenizer_config.json, chat_template.jinja); NULL: it has none,
 * or with an error one that isn't known. */
const kn_chat *kn_chat_of_folder(const char *dir);
/* The first whose tokens t has; NULL: none. */
const kn_chat *kn_chat_for(const kn_tokenizer *t);
/* Whether t has all tokens of c. */
bool kn_chat_fits(const kn_tokenizer *t, const kn_chat *c);
/* t with the tokens of c, or NULL with an error. */
kn_tokenizer *kn_chat_tokenizer(const kn_tokenizer *t, const kn_chat *c);

/* Ids, and which of them are an answer's. */
typedef struct kn_chat_ids {
    int64_t *id;
    unsigned char *answer;
    int64_t count, room, answers;
} kn_chat_ids;
void kn_chat_ids_free(kn_chat_ids *ids);
bool kn_chat_put(kn_chat_ids *to, int64_t id, bool answer); /* one more */

/* Messages that come one after another. */
typedef struct kn_chat_writer {
    const kn_chat *chat;
    const kn_tokenizer *t;
    kn_role last;
    bool begun;
    char *text; /* that isn't encoded yet */
    int64_t size, room;
    bool after_stop; /* it begins with the stop token, whose id is there already */
} kn_chat_writer;
/* Adds the ids of a message. Of a text that has no special token at its end they come with the next
 * one's. where names the source in errors. */
bool kn_chat_add(kn_chat_writer *w, kn_role role, const char *text, size_t size, const char *where,
                 kn_chat_ids *to);
/* The ids in front of an answer, behind which it is to be written; at a message's end only. */
bool kn_chat_ask(kn_chat_writer *w, kn_chat_ids *to);
/* The answer was written, its stop token the last. */
bool kn_chat_answered(kn_chat_writer *w);
void kn_chat_end(kn_chat_writer *w);

/* The ids of {"messages": [{"role", "content"}]} or {"prompt", "completion" or "answer"}. */
bool kn_chat_encode(const kn_chat *c, const kn_tokenizer *t, const json_t *object,
                    const char *where, kn_chat_ids *to);

#endif
