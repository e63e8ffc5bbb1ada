/* models/tokenizer.h: text to token ids and back. Kinds: "byte" (256 ids, one a byte) and "char"
 * (one id for each distinct code point of the training text, in ascending order, as nanoGPT's
 * character data sets have it: 65 for Tiny Shakespeare). A kind is a table of functions
 * (models/tokenizer_internal.h); another kind is one more table. */
#ifndef KNAP_MODELS_TOKENIZER_H
#define KNAP_MODELS_TOKENIZER_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_tokenizer kn_tokenizer;

/* A tokenizer of a kind for a training text. "char" needs valid UTF-8; an error names the first
 * bad byte's offset. The text is not kept. Free with kn_tokenizer_free. */
KN_API kn_tokenizer *kn_tokenizer_create(const char *kind, const char *text, size_t len);
KN_API void kn_tokenizer_free(kn_tokenizer *t); /* NULL is fine */

KN_API const char *kn_tokenizer_kind(const kn_tokenizer *t);
KN_API int64_t kn_tokenizer_vocab(const kn_tokenizer *t); /* ids are 0 .. vocab-1 */

/* Writes the ids of text[len] to ids, which has room for len elements of dtype (u16, u32, i32 or
 * i64; no kind makes more ids than bytes). Returns how many, or -1 with an error: a character
 * outside the vocabulary, invalid UTF-8, ids that the dtype cannot hold. */
KN_API int64_t kn_tokenizer_encode(const kn_tokenizer *t, const char *text, size_t len, void *ids,
                                   kn_dtype dtype);

/* Writes the text of ids[n] and a final 0 to text, at most size bytes in all. Returns the length of
 * the whole text without the 0, even if it exceeds size (as snprintf), or -1 with an error. With
 * "byte" the text need not be valid UTF-8. */
KN_API int64_t kn_tokenizer_decode(const kn_tokenizer *t, const int64_t *ids, int64_t n, char *text,
                                   size_t size);

/* The tokenizer as a JSON file (tokenizer.json of a checkpoint):
 *   {"version": 1, "kind": "byte"}    {"version": 1, "kind": "char", "chars": ["\n", " ", "!"]}
 * Loading checks every field; errors name the file and the field. */
KN_API bool kn_tokenizer_save(const kn_tokenizer *t, const char *path);
KN_API kn_tokenizer *kn_tokenizer_load(const char *path);
/* The same from memory; where names the source in errors. */
KN_API kn_tokenizer *kn_tokenizer_parse(const char *json, size_t len, const char *where);

#ifdef __cplusplus
}
#endif
#endif
