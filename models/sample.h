/* models/sample.h: choosing tokens from logits, and writing text with a GPT. */
#ifndef KNAP_MODELS_SAMPLE_H
#define KNAP_MODELS_SAMPLE_H

#include "models/gpt.h"
#include "models/tokenizer.h"
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct kn_sample_options {
    double temperature; /* 0: always the likeliest token */
    int64_t top_k;      /* only the k likeliest; 0: all */
    double top_p;       /* only the likeliest that together reach p; 0 or 1: all */
    uint64_t seed;
    /* Asked by kn_gpt_write before each token; true ends the text there, which is no error. Must answer the
     * same on every rank. NULL: never. */
    bool (*stop)(void *arg);
    void *stop_arg;
} kn_sample_options;

/* A token drawn from softmax(logits / temperature), cut to top_k, then to top_p. The draw is a
 * function of (seed, index) alone. -1 with an error: no finite logit, out of memory. */
KN_API int64_t kn_sample(const float *logits, int64_t vocab, const kn_sample_options *o,
                         int64_t index);

/* Writes the prompt and tokens more to out (NULL: nowhere), in evaluation mode, without gradients.
 * Only the last ctx tokens are seen. Collective where g is sharded: every rank passes the same. */
KN_API bool kn_gpt_write(kn_gpt *g, const kn_tokenizer *t, const char *prompt, int64_t tokens,
                         const kn_sample_options *o, FILE *out);

#ifdef __cplusplus
}
#endif
#endif
