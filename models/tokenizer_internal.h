/* models/tokenizer_internal.h (private): the functions that a kind of tokenizer supplies. */
#ifndef KNAP_MODELS_TOKENIZER_INTERNAL_H
#define KNAP_MODELS_TOKENIZER_INTERNAL_H

#include "models/tokenizer.h"
#include <jansson.h>

typedef struct kn_tokenizer_ops {
    const char *kind;
    /* From a training text, and from the object of a JSON file. Return the kind's own struct, which
     * begins with kn_tokenizer, allocated by kn_host_alloc, ops not yet set; NULL with an error. */
    kn_tokenizer *(*create)(const char *text, size_t len);
    kn_tokenizer *(*from_json)(json_t *root, const char *where);
    /* Adds the kind's fields to root. */
    bool (*to_json)(const kn_tokenizer *t, json_t *root);
    int64_t (*encode)(const kn_tokenizer *t, const char *text, size_t len, void *ids,
                      kn_dtype dtype);
    /* The bytes of one valid id: points *bytes at them (valid while t lives), returns the count. */
    size_t (*piece)(const kn_tokenizer *t, int64_t id, const char **bytes);
    void (*release)(kn_tokenizer *t); /* frees the memory that t points at; optional */
} kn_tokenizer_ops;

struct kn_tokenizer {
    const kn_tokenizer_ops *ops;
    int64_t vocab;
};

/* The tokenizer as an object, which the caller owns; NULL with an error. */
json_t *kn_tokenizer_json(const kn_tokenizer *t);

extern const kn_tokenizer_ops kn_tokenizer_byte, kn_tokenizer_char;

/* Reads one code point of s[len], len > 0 (RFC 3629: shortest form, no surrogates, at most
 * U+10FFFF). Returns its length in bytes, or 0 where the bytes are invalid. */
size_t kn_utf8_read(const char *s, size_t len, uint32_t *code);

/* ids[i] = id, for the dtypes of kn_tokenizer_encode. */
static inline void kn_token_put(void *ids, kn_dtype dtype, int64_t i, int64_t id)
{
    if (dtype == KN_U16)
        ((uint16_t *)ids)[i] = (uint16_t)id;
    else if (dtype == KN_I64)
        ((int64_t *)ids)[i] = id;
    else
        ((uint32_t *)ids)[i] = (uint32_t)id; /* u32, i32 */
}

#endif
