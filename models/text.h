/* models/text.h: a text as one long run of token ids, and the batches drawn from it.
 *
 * The first 90 % of the tokens are for training, the last 10 % for validation (as nanoGPT's
 * character data sets), unless that has data of its own (kn_text_join). A row of a batch is a
 * window of ctx + 1 tokens: x = window[0 .. ctx-1], y = window[1 .. ctx].
 *
 * A token file (any name; by custom *.tokens) is memory-mapped, so it may be larger than memory.
 * Little-endian: "KNTOKENS", u32 version = 1, u32 bytes a token (2 or 4), u64 count, u64 vocab,
 * zeros up to byte 64, then the tokens. llm.c's files (256 numbers of 32 bits, of which the first
 * is 20240520 or 20240801) are read, too, as of GPT-2's 50257 or Llama 3's 128256 ids. */
#ifndef KNAP_MODELS_TEXT_H
#define KNAP_MODELS_TEXT_H

#include "autograd/function.h"
#include "data/data.h"
#include "data/loader.h"
#include "models/tokenizer.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_text kn_text;

typedef enum kn_text_split { KN_TRAIN = 0, KN_VALIDATION } kn_text_split;

/* The tokens of a file, or of the files in a folder or of those that match a pattern
 * ("train_*.bin": of its last part, fnmatch(3)), as one text in order of their names; names that
 * begin with a dot or end in .json are passed over in a folder. A token file is mapped; its
 * tokenizer is read from the file "<path>.json" beside it where there is one (of several: of the
 * first, or tokenizer.json). Tokens without a header (kn_text_is_plain) need *tokenizer, which says
 * how many kinds there are. Any other file is a text, encoded in memory with *tokenizer, or, where
 * *tokenizer is NULL, with a new one of this kind made from the text ("char", "byte"), or one that
 * is read from the file or folder `kind` (kn_tokenizer_load). On return *tokenizer is the tokenizer
 * used (NULL: a token file without one); the caller frees it. */
KN_API kn_text *kn_text_open(const char *path, const char *kind, kn_tokenizer **tokenizer);
typedef struct kn_text_read_options {
    KN_BEGIN_OPTIONS;
    const char *kind; /* kn_text_open's; NULL: "char" */
    int64_t vocab;    /* kinds of tokens in files of them without a header; 0: the tokenizer's */
    /* Texts are documents: JSON lines whose .field is one each, or divided by lines that are
     * .separator ("": empty lines). NULL: a file is one. */
    const char *field, *separator;
    /* Stands between two documents and behind the last; NULL: the tokenizer's <|endoftext|>,
     * <|end_of_text|> or </s>. A tokenizer that is made here gets it, else it must have it. */
    const char *end;
    /* Lines of JSON are conversations, {"messages": [{"role": "user", "content": "..."}]}, or
     * {"prompt", "completion"} (or "answer"), which are written by the template of this name
     * (chatml, llama3, llama2, plain). One that takes the place of *tokenizer,
     * which is freed, has its tokens where that lacks them. */
    const char *chat;
} kn_text_read_options;
/* kn_text_open with more to say. Documents: before each come the tokens that the tokenizer puts
 * before a text (kn_tokenizer_prefix), behind it the end token; empty ones are left out. Of token
 * files .end says which token stands between documents. */
KN_API kn_text *kn_text_read_(const char *path, kn_tokenizer **tokenizer, kn_text_read_options o);
#define kn_text_read(path, tokenizer, ...)                                                         \
    kn_text_read_(path, tokenizer, KN_OPTIONS(kn_text_read_options, __VA_ARGS__))
/* One text of two: all of train is for training, all of validation for validation. Takes both over,
 * after an error, too. */
KN_API kn_text *kn_text_join(kn_text *train, kn_text *validation);
/* Tokens from memory: encodes text[len]. */
KN_API kn_text *kn_text_encode(const kn_tokenizer *t, const char *text, size_t len);
/* Copies count ids below vocab, of u16, or u32 where vocab is above 65536. */
KN_API kn_text *kn_text_of_ids(const void *ids, int64_t count, int64_t vocab);
KN_API kn_text *kn_text_map(const char *path); /* a token file */
/* Tokens of two bytes without a header, as nanoGPT writes them: ids below vocab, at most 65536. */
KN_API kn_text *kn_text_map_plain(const char *path, int64_t vocab);
/* Whether path may be such a file: its name ends in ".bin", and no header says what it is. */
KN_API bool kn_text_is_plain(const char *path);
/* Whether path is a token file with a header. */
KN_API bool kn_text_is_tokens(const char *path);
/* Lays the conversations of a text out in rows of ctx tokens, those for training and those for
 * validation apart: one in a row, or several, where kn_text_batch_documents is used. Longer ones
 * are cut. kn_text_batch of them: all rows, in an order that is a function of seed and of how often
 * all were there, those for validation in their own; of y are the answers' tokens, the rest is
 * -100. */
KN_API bool kn_text_pack(kn_text *t, int64_t ctx, bool several);
/* Writes a token file, of a text that is one file's or from memory. */
KN_API bool kn_text_save(const kn_text *t, const char *path);
KN_API void kn_text_free(kn_text *t); /* NULL is fine */

KN_API int64_t kn_text_count(const kn_text *t, kn_text_split split);
KN_API int64_t kn_text_vocab(const kn_text *t);
/* Token i, of all; -1 with an error if there is none. */
KN_API int64_t kn_text_token(const kn_text *t, int64_t i);
/* True if both splits have at least ctx + 1 tokens; else an error with the largest context
 * possible. */
KN_API bool kn_text_check(const kn_text *t, int64_t ctx);

/* A hash of the tokens: of all where they take up to 64 MiB, else of 64 MiB spread over them; and
 * of their number. It finds texts that were mixed up or changed, not malice. */
KN_API uint64_t kn_text_hash(const kn_text *t);

/* Windows first .. first + batch - 1 of an endless line of them; x, y: [batch, ctx], first at least
 * 0, batch at least 1. Window i starts at an offset drawn uniformly from 0 .. n-ctx-1 as a function
 * of (seed, split, i) alone. */
KN_API bool kn_text_batch(const kn_text *t, kn_text_split split, uint64_t seed, int64_t first,
                          int64_t batch, int64_t ctx, int64_t *x, int64_t *y);

/* The same, and where the documents are: begin[batch, ctx] is the place in its row of the first
 * token of the document that a token belongs to. A document begins with the first token that the
 * tokenizer puts before a text, or, where it puts none, with the end token of the one before, of
 * which the document's first token is predicted. An error where the text has no documents. */
KN_API bool kn_text_batch_documents(const kn_text *t, kn_text_split split, uint64_t seed,
                                    int64_t first, int64_t batch, int64_t ctx, int64_t *x,
                                    int64_t *y, int64_t *begin);
/* Which tokens of a row are of one document, as a mask of attention [B,1,T,T] (bool), of begin
 * [B,T]. */
KN_API kn_tensor *kn_document_mask(kn_tensor *begin);
/* Whether a language model's forward takes these tensors: ids [B,T], with targets [B,T] for the
 * loss, with begin [B,T], too; T and the positions that attention, one of its layers, has in a
 * cache are at most ctx. Else false with an error that begins by the model's name. */
KN_API bool kn_text_inputs(const char *name, const kn_values *in, const void *attention,
                           int64_t ctx);

typedef struct kn_text_options {
    KN_BEGIN_OPTIONS;
    int64_t ctx; /* T; required */
    kn_text_split split;
    KN_LOADER_OPTIONS; /* windows are drawn at random: .shuffle and .tail are errors */
} kn_text_options;

/* A loader of batches x, y [B, T] (i64) of a text, borrowed. Row r of round k is window
 * (k N + rank) B + r of the line. */
#define kn_text_loader(text, world, ...)                                                           \
    kn_text_loader_(text, world, KN_OPTIONS(kn_text_options, __VA_ARGS__))
KN_API kn_loader *kn_text_loader_(const kn_text *text, const kn_comm *world, kn_text_options o);

#ifdef __cplusplus
}
#endif
#endif
