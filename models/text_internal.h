/* models/text_internal.h (private): a text's tokens, which lie in parts: files that are mapped, and
 * memory. */
#ifndef KNAP_MODELS_TEXT_INTERNAL_H
#define KNAP_MODELS_TEXT_INTERNAL_H

#include "models/text.h"

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

struct kn_text {
    kn_text_part *part; /* [parts] */
    int64_t parts, room;
    int64_t count, vocab;
    int64_t train; /* so many tokens are for training, the others for validation */
    bool given;    /* train isn't 90 % of them: validation has data of its own */
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

/* Whether the last part of path is a pattern. */
bool kn_text_is_pattern(const char *path);

#endif
