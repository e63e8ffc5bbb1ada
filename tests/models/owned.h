/* tests/models/owned.h: tokenizers, texts and options that go at the end of their block. */
#ifndef KNAP_TESTS_MODELS_OWNED_H
#define KNAP_TESTS_MODELS_OWNED_H

#include "models/options.h"
#include "models/text.h"
#include "models/tokenizer.h"

static inline void owned_tokenizer(kn_tokenizer **t)
{
    kn_tokenizer_free(*t);
}

static inline void owned_text(kn_text **t)
{
    kn_text_free(*t);
}

static inline void owned_options(kn_options **o)
{
    kn_options_free(*o);
}

#define OWNED_TOKENIZER __attribute__((cleanup(owned_tokenizer), unused))
#define OWNED_TEXT      __attribute__((cleanup(owned_text), unused))
#define OWNED_OPTIONS   __attribute__((cleanup(owned_options), unused))

#endif
