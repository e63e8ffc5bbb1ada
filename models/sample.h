/* models/sample.h: choosing tokens from logits, writing text with a language model, and how well it
 * predicts one. */
#ifndef KNAP_MODELS_SAMPLE_H
#define KNAP_MODELS_SAMPLE_H

#include "models/text.h"
#include "models/tokenizer.h"
#include "nn/nn.h"
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_sample_options {
    double temperature; /* 0: always the likeliest token */
    int64_t top_k;      /* only the k likeliest; 0: all */
    double top_p;       /* only the likeliest whose probabilities sum to p; 0 or 1: all */
    uint64_t seed;
    /* kn_write_text calls it before each token; true ends the text there, without an error. It must
     * return the same on every rank. NULL: never stops. */
    bool (*stop)(void *arg);
    void *stop_arg;
} kn_sample_options;

/* Draws a token from softmax(logits / temperature), cut to top_k, then to top_p. The draw is a
 * function of (seed, index) alone. A logit of -infinity has no chance. -1 with an error: a logit
 * that is NaN or +infinity, none that is finite, a negative option, out of memory. */
KN_API int64_t kn_sample(const float *logits, int64_t vocab, const kn_sample_options *o,
                         int64_t index);

/* Returns the logits of the tokens after the last ones of ids[B, T] (i64): [B, V], or [B, T, V],
 * whose last position is read; for B = 1 also [V]. B is above 1 only for several texts that are
 * .cached. V is at least the tokenizer's vocabulary. NULL will do for kn_gpt and kn_llama;
 * kn_gpt_next_logits as a kn_logits_fn computes the last position's alone. */
typedef kn_tensor *(*kn_logits_fn)(void *module, kn_tensor *ids);

/* How a text begins: with a text, or with ids[count], as they are. */
typedef struct kn_prompt {
    const char *text;
    const int64_t *ids; /* NULL: text */
    int64_t count;
} kn_prompt;

typedef struct kn_write_text_options {
    KN_BEGIN_OPTIONS;
    /* Goes before the text; at least one token; NULL: a new line. Before it come, unseen, tokens
     * that the tokenizer puts before a text (kn_tokenizer_prefix). Or ids, as they are. */
    const char *prompt;
    const int64_t *prompt_ids; /* [prompt_count] */
    int64_t prompt_count;
    /* Several texts: prompts in the place of the one above, each of them `samples` times (0: once).
     * Text i, from 0, has the seed .draw.seed + i and the tokens that it has alone with this seed,
     * up to the rounding of a GPU's products. Those that are .cached are computed 4 at once (on a
     * GPU 32). Each is written when it and those before are whole: a line "--- 1 of 6: prompt 1,
     * seed 1337", the text, a new line. One text is written token by token. */
    const kn_prompt *prompts; /* [prompts_count] */
    int64_t prompts_count, samples;
    int64_t tokens;          /* written after each prompt, at most */
    const int64_t *stop_ids; /* [stop_count]: one of them ends the text, and isn't written */
    int stop_count;
    bool print_ids;         /* numbers, with blanks between them, not their text */
    int64_t ctx;            /* the model sees the last ctx tokens; 0: all */
    kn_sample_options draw; /* choice of tokens */
    /* module takes the tokens that are new, behind those of a kn_cache, which is made for the call;
     * texts longer than .ctx are computed whole, token by token. kn_gpt and kn_llama do. */
    bool cached;
    FILE *out; /* NULL: nowhere */
} kn_write_text_options;
/* Writes the prompt and .tokens more, in evaluation mode, without gradients. t may be NULL where
 * prompt and text are ids. logits NULL: kn_call(module, ids). Collective where module is sharded:
 * every rank passes the same arguments, except .out. Errors: a prompt that the tokenizer can't
 * encode; logits of another shape; those of kn_sample. */
KN_API bool kn_write_text_(void *module, kn_logits_fn logits, const kn_tokenizer *t,
                           kn_write_text_options o);
#define kn_write_text(module, logits, tokenizer, ...)                                              \
    kn_write_text_(module, logits, tokenizer, KN_OPTIONS(kn_write_text_options, __VA_ARGS__))

/* ---- how well a text is predicted ------------------------------------------------------------ */

/* The mean cross-entropy of ids[B, T] against targets[B, T] (i64), of which -100 doesn't count. */
typedef kn_tensor *(*kn_loss_fn)(void *module, kn_tensor *ids, kn_tensor *targets);

typedef struct kn_text_score {
    double loss;    /* nats a token, the mean; exp(loss) is the perplexity */
    int64_t tokens; /* predicted: all but the first */
    int64_t bytes;  /* that they stand for; 0 without .tokenizer. Bits a byte: loss * tokens /
                     * (bytes * log(2)) */
} kn_text_score;

typedef struct kn_text_evaluate_options {
    KN_BEGIN_OPTIONS;
    int64_t ctx;    /* tokens of a window; required */
    int64_t stride; /* between windows, 1 to ctx: each token is predicted once, from at least ctx -
                     * stride tokens before it where there are so many; 0: ctx */
    int64_t batch;  /* windows at a time; 0: 1 */
    const kn_tokenizer *tokenizer; /* of the text, to count its bytes; NULL: they aren't counted */
    kn_comm *comm;                 /* ranks that share the windows; NULL: kn_world() */
    void (*tell)(double share, void *arg); /* called with the share that is done; may be NULL */
    void *tell_arg;
} kn_text_evaluate_options;
/* Predicts all of a text, in evaluation mode, without gradients. Collective. */
KN_API bool kn_text_evaluate_(void *module, kn_loss_fn loss, const kn_text *text,
                              kn_text_score *out, kn_text_evaluate_options o);
#define kn_text_evaluate(module, loss, text, out, ...)                                             \
    kn_text_evaluate_(module, loss, text, out, KN_OPTIONS(kn_text_evaluate_options, __VA_ARGS__))

#ifdef __cplusplus
}
#endif
#endif
