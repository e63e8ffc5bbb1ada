/* models/programs/facts.h: the facts of a recording, as sentences and tables. */
#ifndef KNAP_MODELS_PROGRAMS_FACTS_H
#define KNAP_MODELS_PROGRAMS_FACTS_H

#include "models/programs/sheet.h"
#include "models/programs/waiting.h"

/* Writes the four parts of the page: step, memory, waiting, run. It may add names to r. */
bool facts_write(sheet *s, recording *r, const waiting *w);

#endif
