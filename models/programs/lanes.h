/* models/programs/lanes.h: the jobs and waits of a recording, by rank and in order of their begin,
 * and which collectives of ranks belong together. */
#ifndef KNAP_MODELS_PROGRAMS_LANES_H
#define KNAP_MODELS_PROGRAMS_LANES_H

#include "models/programs/recorded.h"

#include <sqlite3.h>

/* The numbers of events, in order of their begin. */
typedef struct lane {
    int64_t *event, count, room;
    double *reach; /* the latest end of an event and those before it */
} lane;

/* Of one rank: its compute, waits of compute and of the host, and what ran on other streams. */
typedef struct rank_lanes {
    lane compute, waits, others;
} rank_lanes;

typedef struct lanes {
    rank_lanes *rank;
    double *peers; /* by event: when the last rank of its group began that collective */
} lanes;

/* r is "main" of the database. The caller frees l, after an error too. */
bool lanes_find(lanes *l, const recording *r, sqlite3 *db);
void lanes_free(lanes *l, const recording *r);

/* All before this place of the lane end by t. */
int64_t first_after(const lane *l, double t);
bool is_stream(const recording *r, int32_t name, const char *stream);

static inline double end_of(const event *e)
{
    return e->t + e->d;
}

#endif
