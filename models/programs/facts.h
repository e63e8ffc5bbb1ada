/* models/programs/facts.h: the facts of a recording, as sentences and tables. */
#ifndef KNAP_MODELS_PROGRAMS_FACTS_H
#define KNAP_MODELS_PROGRAMS_FACTS_H

#include "models/programs/sheet.h"

/* Writes the four parts of the page: step, memory, waiting, run. r is "main" of s's database. */
bool facts_write(sheet *s, const recording *r);
/* A part of the page: times of a step, idle time by cause and peaks of memory of the recordings
 * "before" and "main", and by how much they differ. */
bool facts_what_if(sheet *s);

#endif
