/* models/programs/losses.h: losses and accuracy of a run as lines of a chart, from its log or as it
 * trains. */
#ifndef KNAP_MODELS_PROGRAMS_LOSSES_H
#define KNAP_MODELS_PROGRAMS_LOSSES_H

#include "models/programs/chart.h"
#include "models/programs/log.h"

enum { TRAINED, VALIDATED, RIGHT, LINES, LOSSES = RIGHT }; /* RIGHT: per cent of the images */
typedef struct losses {
    chart_line line[LINES];
    int64_t unit; /* samples that make 1 on the axis; 0: it counts steps */
    bool means;   /* TRAINED has no point a step, but one an evaluation: the mean since the last */
    double sum;   /* of the count losses since the last evaluation */
    int64_t count;
} losses;

/* A step's values; a step that comes again replaces those that followed it. */
bool losses_add(losses *l, const step_report *step);
/* Those of a log of JSON, up to so many samples (-1: all). Without the file: none, where
 * may_lack. */
bool losses_read(losses *l, const char *path, int64_t samples, bool may_lack);
void losses_free(losses *l);

#endif
