/* models/programs/prompts.h: how the texts of generate begin: one prompt or several, from the
 * command line or a file. */
#ifndef KNAP_MODELS_PROGRAMS_PROMPTS_H
#define KNAP_MODELS_PROGRAMS_PROMPTS_H

#include "comm/comm.h"
#include "models/options.h"
#include "models/sample.h"

/* What the options say; a value that is given several times stands as models/options.h says. */
typedef struct prompt_settings {
    const char *prompt, *file, *lines, *ids;
} prompt_settings;

typedef struct prompts {
    kn_prompt *list;
    int64_t count, room;
    char *text;   /* of all that are texts */
    int64_t *ids; /* of all that are ids */
} prompts;

/* Rank 0 reads a file, and all have it. Free it after an error, too. Collective. */
bool prompts_read(prompts *p, const prompt_settings *s, kn_comm *world);
/* Ids that the vocabulary doesn't have are an error. */
bool prompts_fit(const prompts *p, int64_t vocab);
void prompts_free(prompts *p);

/* Rank 0's text, which this takes over, on all ranks, for kn_host_free; NULL: rank 0 has none, or
 * with an error. Collective. */
char *share_text(char *text, const char *what, kn_comm *world);

#endif
