/* models/documents.c: texts that are many documents: lines of JSON, or parts between lines that
 * divide them. */
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "models/text_internal.h"
#include "models/tokens/tokens.h"
#include "tensor/json.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

/* ---- lines ----------------------------------------------------------------------------------- */

static bool is_blank(const char *line, size_t length)
{
    while (length > 0 && strchr(" \t\r", line[length - 1]) && line[length - 1])
        length--;
    return length == 0;
}

bool kn_json_lines(const char *path, const kn_mapped *map, kn_json_line_fn each, void *arg)
{
    const char *line;
    size_t at = 0, length;
    int64_t number = 0;
    while (kn_next_line((const char *)map->data, map->size, &at, &line, &length)) {
        char where[4200];
        json_error_t error;
        number++;
        if (is_blank(line, length))
            continue;
        snprintf(where, sizeof where, "%s:%lld", path, (long long)number);
        json_t *object = kn_json_parse(line, length, JSON_ALLOW_NUL, where, &error);
        bool ok = object != NULL;
        if (!ok && kn_ok())
            kn_fail("%s: this line isn't JSON: column %d: %s", where, error.column, error.text);
        else if (ok && !json_is_object(object))
            ok = kn_fail("%s: this line is no object, as {\"text\": \"...\"}", where);
        ok = ok && each(object, where, arg);
        json_decref(object);
        if (!ok)
            return false;
    }
    return true;
}

/* ---- documents ------------------------------------------------------------------------------- */

void kn_documents_free(kn_documents *d)
{
    kn_host_free(d->text);
    kn_host_free(d->end);
}

/* One more; an empty one is none. */
static bool add(kn_documents *d, const char *text, size_t size)
{
    if (size == 0)
        return true;
    if (!kn_host_grow(&d->text, &d->room, d->used + (int64_t)size, 1) ||
        !kn_host_grow(&d->end, &d->ends, d->count + 1, sizeof *d->end))
        return false;
    memcpy(d->text + d->used, text, size);
    d->used += (int64_t)size;
    d->end[d->count++] = d->used;
    return true;
}

typedef struct fields {
    kn_documents *to;
    const char *field;
} fields;

static bool add_field(json_t *object, const char *where, void *arg)
{
    const fields *f = arg;
    const json_t *value = json_object_get(object, f->field);
    if (!json_is_string(value))
        return kn_fail("%s: the line's object has no text \"%.100s\" (--field)", where, f->field);
    return add(f->to, json_string_value(value), json_string_length(value));
}

/* A document is what lies between two separators, without the end of its last line. */
static bool divide(kn_documents *d, const char *path, const kn_mapped *map, const char *separator)
{
    bool divided = false;
    const char *line, *text = (const char *)map->data, *begin = text, *end = text;
    size_t at = 0, length;
    const size_t n = strlen(separator);
    while (kn_next_line(text, map->size, &at, &line, &length)) {
        if (length != n || memcmp(line, separator, n) != 0) {
            end = line + length;
            continue;
        }
        if (end > begin && !add(d, begin, (size_t)(end - begin)))
            return false;
        begin = end = text + at;
        divided = true;
    }
    if (!divided && map->size > 0)
        return kn_fail("%s has no line '%.100s' between two documents (--separator); if it is one "
                       "document, leave the separator out or put it at the end",
                       path, separator);
    return end <= begin || add(d, begin, (size_t)(end - begin));
}

bool kn_documents_read(kn_documents *d, const char *path, const kn_mapped *map,
                       const kn_text_read_options *o)
{
    fields f = { d, o->field };
    bool ok = o->field       ? kn_json_lines(path, map, add_field, &f)
              : o->separator ? divide(d, path, map, o->separator)
                             : add(d, (const char *)map->data, map->size);
    return ok && (d->count > 0 || kn_fail("%s holds no documents, or empty ones only", path));
}

/* ---- tokens ---------------------------------------------------------------------------------- */

int64_t kn_text_end(const kn_tokenizer *t, const char *end, int64_t vocab)
{
    static const char *const usual[] = { KN_END_TOKEN, "<|end_of_text|>", "</s>" };
    int64_t id = -1;
    for (size_t i = 0; t && !end && id < 0 && i < sizeof usual / sizeof *usual; i++)
        id = kn_tokenizer_id(t, usual[i]);
    if (t && end && (id = kn_tokenizer_id(t, end)) < 0 && kn_ok())
        kn_fail("the tokenizer has no token '%.100s', which is to end a document (--end)", end);
    if (!t && end) {
        char *rest;
        errno = 0;
        id = strtoll(end, &rest, 10);
        if (rest == end || *rest || errno || id < 0 || id >= vocab) {
            kn_fail("--end %.100s: without a tokenizer give the id of the token, below %lld", end,
                    (long long)vocab);
            return -1;
        }
    }
    return id;
}

int64_t kn_text_begin(const kn_tokenizer *t, int64_t end)
{
    const int64_t *prefix;
    return t && kn_tokenizer_prefix(t, &prefix) > 0 ? prefix[0] : end;
}

/* Puts ids[n] of width 2 or 4 behind those of *all. */
static bool put(char **all, int64_t *room, int64_t *used, size_t width, const void *ids, int64_t n)
{
    if (!kn_host_grow(all, room, *used + n, width))
        return false;
    memcpy(*all + (size_t)*used * width, ids, (size_t)n * width);
    *used += n;
    return true;
}

void *kn_documents_ids(const kn_documents *d, const kn_tokenizer *t, int64_t end, int64_t *count)
{
    const kn_dtype dtype = kn_tokenizer_vocab(t) <= 65536 ? KN_U16 : KN_U32;
    const size_t width = kn_dtype_size(dtype);
    char *all = NULL;
    const int64_t *prefix, prefixes = kn_tokenizer_prefix(t, &prefix);
    int64_t room = 0, from = 0;
    bool ok = true;
    *count = 0;
    for (int64_t i = 0; ok && i < d->count; from = d->end[i++]) {
        int64_t n = 0;
        void *ids = kn_tokenizer_list(t, d->text + from, (size_t)(d->end[i] - from), dtype, &n);
        ok = ids != NULL;
        for (int64_t k = 0; ok && k < prefixes; k++) /* little-endian: the low bytes are the id */
            ok = put(&all, &room, count, width, &prefix[k], 1);
        ok =
            ok && put(&all, &room, count, width, ids, n) && put(&all, &room, count, width, &end, 1);
        kn_host_free(ids);
    }
    if (ok)
        return all;
    kn_host_free(all);
    return NULL;
}
