/* models/tokens/json.h (private): what the two files that read a tokenizer.json have in common. */
#ifndef KNAP_MODELS_TOKENS_JSON_H
#define KNAP_MODELS_TOKENS_JSON_H

#include "kernels/error_internal.h"
#include "models/tokens/tokens.h"

#include <string.h>

typedef struct kn_json_reader {
    kn_tokenizer *t;
    const char *where;
    int64_t ids; /* the largest id + 1 */
    struct kn_decoding *decoding;
} kn_json_reader;

static inline const char *text_in(const json_t *object, const char *field)
{
    const char *text = json_string_value(json_object_get(object, field));
    return text ? text : "";
}

static inline bool true_in(const json_t *object, const char *field, bool otherwise)
{
    const json_t *value = json_object_get(object, field);
    return value && !json_is_null(value) ? json_is_true(value) : otherwise;
}

static inline bool is(const json_t *object, const char *type)
{
    return strcmp(text_in(object, "type"), type) == 0;
}

static inline bool unread(const kn_json_reader *r, const char *part, const json_t *object)
{
    return kn_fail("%s: its %s is of type \"%.60s\", which this library doesn't read", r->where,
                   part, text_in(object, "type"));
}

/* Calls each for the members of a "Sequence", which are its list of that name, or for the object
 * itself; null has none. */
typedef bool (*kn_json_part_fn)(kn_json_reader *r, const json_t *object);
bool kn_json_parts(kn_json_reader *r, const json_t *object, const char *list, kn_json_part_fn each);
/* The bytes that each id stands for, by the file's decoder. */
bool kn_json_read_texts(kn_json_reader *r, const json_t *decoder);

#endif
