/* models/programs/facts.h: the facts of a recording, as sentences and tables. */
#ifndef KNAP_MODELS_PROGRAMS_FACTS_H
#define KNAP_MODELS_PROGRAMS_FACTS_H

#include "models/programs/sheet.h"
#include "models/programs/waiting.h"

enum { MOST_ROWS = 12 }; /* of a table of the largest */

/* Writes the four parts of the page: step, memory, waiting, run. It may add names to r. */
bool facts_write(sheet *s, recording *r, const waiting *w);
bool facts_of_memory(sheet *s, recording *r);

#endif
