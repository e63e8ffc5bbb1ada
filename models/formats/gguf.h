/* models/formats/gguf.h (private): GGUF, the file of llama.cpp's models (ggml's specification,
 * versions 2 and 3, little-endian): values by key, then tensors.
 *
 *   "GGUF", u32 version, u64 tensors, u64 values
 *   a value:   string key, u32 type, value      a string: u64 bytes, UTF-8
 *   a tensor:  string name, u32 dims, u64 sizes (the last dim first), u32 type, u64 offset
 *   zeros up to a multiple of general.alignment (32); from there offsets count
 *
 * Nothing in a file is trusted: each count and size is compared with the file's bytes first, so
 * that reading takes at most some times their number. */
#ifndef KNAP_MODELS_FORMATS_GGUF_H
#define KNAP_MODELS_FORMATS_GGUF_H

#include "models/tokens/tokens.h"
#include "state/pieces.h"

#include <jansson.h>
#include <sys/stat.h>

typedef enum kn_gguf_type {
    KN_GGUF_U8 = 0,
    KN_GGUF_I8,
    KN_GGUF_U16,
    KN_GGUF_I16,
    KN_GGUF_U32,
    KN_GGUF_I32,
    KN_GGUF_F32,
    KN_GGUF_BOOL,
    KN_GGUF_STRING,
    KN_GGUF_ARRAY,
    KN_GGUF_U64,
    KN_GGUF_I64,
    KN_GGUF_F64,
    KN_GGUF_TYPES
} kn_gguf_type;

typedef struct kn_gguf_value {
    kn_gguf_type type; /* of an array: of its elements */
    bool array;
    int64_t count; /* elements; 1 where it is no array */
    int64_t at;    /* of the first in kn_gguf.bytes */
} kn_gguf_value;

enum { KN_GGML_F32 = 0, KN_GGML_F16 = 1, KN_GGML_Q8_0 = 8, KN_GGML_BF16 = 30 };

typedef struct kn_gguf_tensor {
    const char *name; /* borrowed of kn_gguf.names */
    uint32_t type;    /* ggml's number */
    int ndim;
    int64_t shape[4]; /* the first dim first */
    int64_t at;       /* in the file */
} kn_gguf_tensor;

typedef struct kn_gguf {
    const char *path; /* borrowed */
    int fd;
    struct stat seen;
    char *bytes; /* the file up to the end of its list of tensors, or more */
    int64_t have, room;
    int64_t at;             /* where the next value is read */
    kn_strings keys, names; /* their values: numbers in the lists */
    kn_gguf_value *value;
    int64_t value_room;
    kn_gguf_tensor *tensor;
    int64_t tensors, tensor_room;
} kn_gguf;

/* Reads all but the tensors' bytes into g, which is zeros. path is borrowed until kn_gguf_close,
 * which is called after an error, too. */
bool kn_gguf_open(kn_gguf *g, const char *path);
void kn_gguf_close(kn_gguf *g);

/* Without an error NULL where there is none. */
const kn_gguf_value *kn_gguf_find(const kn_gguf *g, const char *key);
const kn_gguf_tensor *kn_gguf_tensor_of(const kn_gguf *g, const char *name);
/* Element i of a value that isn't of strings as a number; NAN where it isn't there. */
double kn_gguf_number(const kn_gguf *g, const kn_gguf_value *v, int64_t i);
double kn_gguf_number_at(const kn_gguf *g, const char *key);
/* The value of key is this text. */
bool kn_gguf_says(const kn_gguf *g, const char *key, const char *text);
/* A value that is one string; NULL: it is none. Not ended by 0. */
const char *kn_gguf_text(const kn_gguf *g, const kn_gguf_value *v, size_t *length);
/* The next string of an array: *at is 0 before the first. */
const char *kn_gguf_next(const kn_gguf *g, const kn_gguf_value *v, int64_t *at, size_t *length);
/* A single value for a JSON object; NULL: it is none. f32 become the shortest decimal number that
 * is read as the same. */
json_t *kn_gguf_json(const kn_gguf *g, const kn_gguf_value *v);
/* The tensor as kn_pieces_of takes it, by this name; an error where its type isn't read. */
bool kn_gguf_piece(const kn_gguf *g, const kn_gguf_tensor *t, const char *name,
                   kn_foreign_piece *piece);

#define KN_GGUF_JINJA "tokenizer.chat_template"

/* ---- tokenizers: gguf_tokens.c --------------------------------------------------------------- */

/* The tokenizer in the file; the caller frees it. NULL with an error. */
kn_tokenizer *kn_gguf_tokenizer(const char *path);
/* The chat template in it, for kn_host_free; NULL: it has none, or with an error. */
char *kn_gguf_jinja(const char *path);

/* ---- writing: gguf_write.c ------------------------------------------------------------------- */

/* A header that grows. After a failed call the others do nothing. */
typedef struct kn_gguf_out {
    char *bytes; /* for kn_host_free */
    int64_t used, room;
    uint64_t values;
    bool failed;
} kn_gguf_out;

void kn_gguf_bytes(kn_gguf_out *o, const void *bytes, size_t size);
void kn_gguf_string(kn_gguf_out *o, const char *text, size_t length);
void kn_gguf_u32(kn_gguf_out *o, uint32_t x);
void kn_gguf_u64(kn_gguf_out *o, uint64_t x);
/* A key with a value of this type, which the caller appends. */
void kn_gguf_key(kn_gguf_out *o, const char *key, kn_gguf_type type);
/* Whole values. */
void kn_gguf_put_text(kn_gguf_out *o, const char *key, const char *text);
void kn_gguf_put_u32(kn_gguf_out *o, const char *key, int64_t x);
/* A tokenizer: llama.cpp's lists, and its whole tokenizer.json. */
bool kn_gguf_put_tokenizer(kn_gguf_out *o, const kn_tokenizer *t);

#endif
