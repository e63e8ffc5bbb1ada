/* models/programs/chat.h: generate --chat. */
#ifndef KNAP_MODELS_PROGRAMS_CHAT_H
#define KNAP_MODELS_PROGRAMS_CHAT_H

#include "models/imported_internal.h"
#include "models/sample.h"

typedef struct chat_options {
    const char *template, *system; /* NULL: the model's own; none */
    int64_t ctx, tokens;           /* of the context, and of an answer at most */
    kn_sample_options draw;
} chat_options;

/* A conversation in the terminal: lines of standard input are the user's, until its end or /exit.
 * Collective: rank 0 reads and writes. */
bool chat(kn_module *model, const kn_imported *from, const kn_tokenizer *t, const chat_options *o,
          kn_comm *world);

#endif
