/* tensor/json.h (private to the library): texts of JSON that may come from a stranger. */
#ifndef KNAP_TENSOR_JSON_H
#define KNAP_TENSOR_JSON_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* json_loadb; the caller drops the value. NULL where the text isn't JSON: e says why; or with an
 * error, where memory ran out: that says nothing of the text. */
json_t *kn_json_parse(const char *text, size_t size, size_t flags, const char *where,
                      json_error_t *e);

/* The same of a text's parts: watch comes before the first, watched after the last. False with an
 * error where memory ran out. */
bool kn_json_watch(const char *text, size_t size, const char *where);
bool kn_json_watched(const char *where);
json_t *kn_json_next(const char *text, size_t size, size_t flags, const char *where,
                     json_error_t *e);

/* json_dumps, which in jansson 2.14 goes on without an object's key where its buffer can't grow:
 * here the text is measured first. The caller frees it (kn_host_free). NULL with an error, which
 * names what; j may be NULL where memory ran out. */
char *kn_json_text(const json_t *j, size_t flags, const char *what);
/* The same of j, which is dropped. */
char *kn_json_copy(json_t *j, size_t flags, const char *what);

/* A list of whole numbers; NULL without an error: no memory. */
json_t *kn_json_sizes(const int64_t *size, int count);
/* Whether list is one of exactly count whole numbers of at least 0, which go to size. */
bool kn_json_read_sizes(const json_t *list, size_t count, int64_t *size);

#endif
