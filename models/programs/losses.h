/* models/programs/losses.h: the losses of a run as lines of a chart, from its log or as it
 * trains. */
#ifndef KNAP_MODELS_PROGRAMS_LOSSES_H
#define KNAP_MODELS_PROGRAMS_LOSSES_H

#include "models/programs/chart.h"
#include "models/programs/log.h"

enum { TRAINED, VALIDATED, LOSSES };
typedef struct losses {
    chart_line line[LOSSES];
    bool samples; /* over samples, not steps */
} losses;

/* A step's; a step that comes again replaces what followed it. */
bool losses_add(losses *l, const log_line *line);
/* Those of a log of JSON, up to so many samples (-1: all). Without the file: none, where
 * may_lack. */
bool losses_read(losses *l, const char *path, int64_t samples, bool may_lack);
void losses_free(losses *l);

#endif
