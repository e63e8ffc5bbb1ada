/* models/programs/what_if.h: a step beside the same step another way. */
#ifndef KNAP_MODELS_PROGRAMS_WHAT_IF_H
#define KNAP_MODELS_PROGRAMS_WHAT_IF_H

#include "models/programs/sheet.h"
#include "models/programs/waiting.h"

/* A part of the page: times of a step, idle time by cause and peaks of memory of both, and by how
 * much they differ. */
bool what_if_write(sheet *s, const recording *a, const waiting *wa, const recording *b,
                   const waiting *wb);

#endif
