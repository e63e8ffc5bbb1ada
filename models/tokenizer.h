/* models/tokenizer.h: text to token ids and back.
 *
 * A tokenizer is a file tokenizer.json as the tokenizers library writes it, of byte pair encoding
 * (Sennrich, Haddow and Birch, 2016): GPT-2's, Llama's, Qwen's and Mistral's, those that
 * kn_tokenizer_train makes, and two without merges: "byte" (256 ids, one a byte) and "char" (one id
 * for each distinct code point of a text, in ascending order, as nanoGPT's character data sets have
 * it: 65 for Tiny Shakespeare). Other files are read into that form. */
#ifndef KNAP_MODELS_TOKENIZER_H
#define KNAP_MODELS_TOKENIZER_H

#include "kernels/types.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_tokenizer kn_tokenizer;

/* A tokenizer of kind "byte" or "char" for a text, which is not kept. "char" needs valid UTF-8; an
 * error names the first bad byte's offset. Free with kn_tokenizer_free. */
KN_API kn_tokenizer *kn_tokenizer_create(const char *kind, const char *text, size_t len);
KN_API void kn_tokenizer_free(kn_tokenizer *t); /* NULL is fine */

KN_API const char *kn_tokenizer_kind(const kn_tokenizer *t); /* "byte", "char" or "bpe" */
KN_API int64_t kn_tokenizer_vocab(const kn_tokenizer *t);    /* ids are 0 .. vocab-1 */
/* The id of a token by its spelling in the file ("<|endoftext|>"); -1 without an error: none. */
KN_API int64_t kn_tokenizer_id(const kn_tokenizer *t, const char *token);
/* Whether its file calls the id's token special ("<|endoftext|>"): it stands for no text. */
KN_API bool kn_tokenizer_is_special(const kn_tokenizer *t, int64_t id);

/* The ids that its file puts before every text, as Llama's <s>, which kn_tokenizer_encode doesn't:
 * their number. *ids is borrowed. */
KN_API int64_t kn_tokenizer_prefix(const kn_tokenizer *t, const int64_t **ids);

/* The most ids that len bytes of text can make. */
KN_API int64_t kn_tokenizer_most(const kn_tokenizer *t, size_t len);
/* Writes the ids of text[len] to ids, which has room for kn_tokenizer_most(t, len) elements of
 * dtype (u16, u32, i32 or i64). Added tokens ("<|endoftext|>") in the text become their ids;
 * nothing is put before or behind. A long text is cut up among kn_threads(). Returns the number of
 * ids, or -1 with an error: a character outside the vocabulary, ids that the dtype cannot hold. */
KN_API int64_t kn_tokenizer_encode(const kn_tokenizer *t, const char *text, size_t len, void *ids,
                                   kn_dtype dtype);

/* Writes the text of ids[n] and a final 0 to text, at most size bytes in all. Returns the length of
 * the whole text without the 0, even if it exceeds size (as snprintf), or -1 with an error. The
 * bytes need not be valid UTF-8. */
KN_API int64_t kn_tokenizer_decode(const kn_tokenizer *t, const int64_t *ids, int64_t n, char *text,
                                   size_t size);

/* ---- files ----------------------------------------------------------------------------------- */

/* Reads a tokenizer.json, or of a folder the first of: tokenizer.json; vocab.json and merges.txt;
 * encoder.json and vocab.bpe; tokenizer.model (SentencePiece's BPE). Errors name the file, the
 * field and what of it this library doesn't read. */
KN_API kn_tokenizer *kn_tokenizer_load(const char *path);
/* A tokenizer.json from memory; where names the source in errors. */
KN_API kn_tokenizer *kn_tokenizer_parse(const char *json, size_t len, const char *where);
/* Writes tokenizer.json; one that was read as such is written as it was. */
KN_API bool kn_tokenizer_save(const kn_tokenizer *t, const char *path);

/* ---- training -------------------------------------------------------------------------------- */

typedef struct kn_tokenizer_train_options {
    size_t _size;
    struct kn_guard *_positional; /* makes positional use a compile error */
    int64_t vocab;                /* ids in all; required */
    /* Cuts texts into words: a regular expression, or "gpt2" (NULL), "llama3", "qwen". */
    const char *pattern;
    const char *const *special; /* tokens of their own, ended by NULL; NULL: "<|endoftext|>" */
    int64_t least;              /* merges only pairs that occur so often; 0: any */
    bool by_line;               /* a word ends where a line does */
    /* Called now and then with the share done, 0 to 1; true ends the training with an error. */
    bool (*progress)(double done, void *arg);
    void *progress_arg;
} kn_tokenizer_train_options;

/* Learns a byte-level BPE from count texts: the 256 bytes, then the pair that occurs most often
 * becomes a token, again and again (of equals the one with the lower ids): the merges of the
 * tokenizers library's BpeTrainer. Special tokens in the texts count for nothing. NULL with an
 * error. */
#define kn_tokenizer_train(text, len, count, ...)                                                  \
    kn_tokenizer_train_(                                                                           \
        (text), (len), (count),                                                                    \
        (kn_tokenizer_train_options){ ._size = sizeof(kn_tokenizer_train_options), __VA_ARGS__ })
KN_API kn_tokenizer *kn_tokenizer_train_(const char *const *text, const size_t *len, int count,
                                         kn_tokenizer_train_options o);

#ifdef __cplusplus
}
#endif
#endif
