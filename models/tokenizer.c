/* models/tokenizer.c: code shared by all kinds of tokenizers (dispatch, decoding, JSON files), and
 * the byte tokenizer, whose ids are the bytes. */
#include "kernels/error_internal.h"
#include "models/tokenizer_internal.h"
#include "data/data.h"
#include "tensor/json.h"

#include <errno.h>
#include <string.h>

static const kn_tokenizer_ops *const kinds[] = { &kn_tokenizer_char, &kn_tokenizer_byte };
#define KINDS (sizeof kinds / sizeof kinds[0])

static const kn_tokenizer_ops *find_kind(const char *kind)
{
    for (size_t i = 0; i < KINDS; i++)
        if (strcmp(kinds[i]->kind, kind) == 0)
            return kinds[i];
    return NULL;
}

kn_tokenizer *kn_tokenizer_create(const char *kind, const char *text, size_t len)
{
    if (!kn_given(kind, "kn_tokenizer_create", "the kind") ||
        (len && !kn_given(text, "kn_tokenizer_create", "the text")))
        return NULL;
    const kn_tokenizer_ops *ops = find_kind(kind);
    if (!ops)
        return kn_fail_null("no tokenizer of kind '%s'; kinds are char and byte", kind);
    kn_tokenizer *t = ops->create(text, len);
    if (t)
        t->ops = ops;
    return t;
}

void kn_tokenizer_free(kn_tokenizer *t)
{
    if (t && t->ops->release)
        t->ops->release(t);
    kn_host_free(t);
}

const char *kn_tokenizer_kind(const kn_tokenizer *t)
{
    if (!kn_given(t, "kn_tokenizer_kind", "the tokenizer"))
        return "";
    return t->ops->kind;
}

int64_t kn_tokenizer_vocab(const kn_tokenizer *t)
{
    if (!kn_given(t, "kn_tokenizer_vocab", "the tokenizer"))
        return 0;
    return t->vocab;
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
    return t->ops->encode(t, text, len, ids, dtype);
}

int64_t kn_tokenizer_decode(const kn_tokenizer *t, const int64_t *ids, int64_t n, char *text,
                            size_t size)
{
    if (!kn_given(t, "kn_tokenizer_decode", "the tokenizer") ||
        (n > 0 && !kn_given(ids, "kn_tokenizer_decode", "the list of ids")) ||
        (size > 0 && !kn_given(text, "kn_tokenizer_decode", "the place for the text")))
        return -1;
    size_t length = 0;
    for (int64_t i = 0; i < n; i++) {
        const char *bytes = NULL;
        if (ids[i] < 0 || ids[i] >= t->vocab) {
            kn_fail("tokenizer: id %lld at position %lld is outside the vocabulary of %lld",
                    (long long)ids[i], (long long)i, (long long)t->vocab);
            return -1;
        }
        size_t count = t->ops->piece(t, ids[i], &bytes);
        for (size_t j = 0; j < count; j++, length++)
            if (length + 1 < size)
                text[length] = bytes[j];
    }
    if (size > 0)
        text[length < size ? length : size - 1] = '\0';
    return (int64_t)length;
}

/* ---- JSON ---------------------------------------------------------------------------------- */

json_t *kn_tokenizer_json(const kn_tokenizer *t)
{
    json_t *root = json_object();
    if (!root || json_object_set_new(root, "version", json_integer(1)) != 0 ||
        json_object_set_new(root, "kind", json_string(t->ops->kind)) != 0)
        kn_fail("out of memory while writing the tokenizer");
    else if (!t->ops->to_json || t->ops->to_json(t, root))
        return root;
    json_decref(root);
    return NULL;
}

bool kn_tokenizer_save(const kn_tokenizer *t, const char *path)
{
    if (!kn_given(t, "kn_tokenizer_save", "the tokenizer") ||
        !kn_given_path(path, "kn_tokenizer_save", "the path"))
        return false;
    json_t *root = kn_tokenizer_json(t);
    char *text = root ? kn_json_text(root, JSON_INDENT(1)) : NULL;
    json_decref(root);
    if (!text)
        return kn_ok() && kn_fail("%s: out of memory while writing the tokenizer", path);
    bool ok = kn_file_write(path, (const void *const[]){ text, "\n" },
                            (const size_t[]){ strlen(text), 1 }, 2);
    free(text);
    return ok;
}

kn_tokenizer *kn_tokenizer_parse(const char *json, size_t len, const char *where)
{
    json_error_t error;
    kn_tokenizer *t = NULL;
    if (!kn_given(json, "kn_tokenizer_parse", "the text"))
        return NULL;
    json_t *root = kn_json_parse(json, len, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, where, &error);
    if (!root)
        return kn_fail_null("%s is no tokenizer file: line %d: %s", where, error.line, error.text);
    const char *kind = json_string_value(json_object_get(root, "kind"));
    json_t *version = json_object_get(root, "version");
    if (!kind || !json_is_integer(version)) {
        kn_fail("%s is no tokenizer file: it has no \"kind\" and \"version\"", where);
    } else if (json_integer_value(version) != 1) {
        kn_fail("%s: tokenizer version %lld; this program reads version 1", where,
                (long long)json_integer_value(version));
    } else if (!find_kind(kind)) {
        kn_fail("%s: tokenizer kind '%.40s' is unknown; kinds are char and byte", where, kind);
    } else {
        t = find_kind(kind)->from_json(root, where);
        if (t)
            t->ops = find_kind(kind);
    }
    json_decref(root);
    return t;
}

kn_tokenizer *kn_tokenizer_load(const char *path)
{
    kn_mapped map;
    if (!kn_given_path(path, "kn_tokenizer_load", "the path") ||
        !kn_file_map(path, "tokenizer file", &map))
        return NULL;
    kn_tokenizer *t = kn_tokenizer_parse((const char *)map.data, map.size, path);
    kn_file_unmap(&map);
    return t;
}

/* ---- byte ---------------------------------------------------------------------------------- */

typedef struct byte_tokenizer {
    kn_tokenizer base;
    char bytes[256]; /* bytes[id] = id */
} byte_tokenizer;

static kn_tokenizer *byte_create(const char *text, size_t len)
{
    (void)text;
    (void)len;
    byte_tokenizer *t = kn_host_calloc(1, sizeof *t);
    if (!t)
        return NULL;
    t->base.vocab = 256;
    for (int i = 0; i < 256; i++)
        t->bytes[i] = (char)i;
    return &t->base;
}

static kn_tokenizer *byte_from_json(json_t *root, const char *where)
{
    (void)root;
    (void)where;
    return byte_create(NULL, 0);
}

static int64_t byte_encode(const kn_tokenizer *t, const char *text, size_t len, void *ids,
                           kn_dtype dtype)
{
    (void)t;
    for (size_t i = 0; i < len; i++)
        kn_token_put(ids, dtype, (int64_t)i, (unsigned char)text[i]);
    return (int64_t)len;
}

static size_t byte_piece(const kn_tokenizer *t, int64_t id, const char **bytes)
{
    *bytes = &((const byte_tokenizer *)t)->bytes[id];
    return 1;
}

const kn_tokenizer_ops kn_tokenizer_byte = { .kind = "byte",
                                             .create = byte_create,
                                             .from_json = byte_from_json,
                                             .encode = byte_encode,
                                             .piece = byte_piece };
