/* models/programs/waiting.h: why the compute streams of a recording were idle: every microsecond
 * has one cause. */
#ifndef KNAP_MODELS_PROGRAMS_WAITING_H
#define KNAP_MODELS_PROGRAMS_WAITING_H

#include "models/programs/recorded.h"

#include <sqlite3.h>

typedef enum idle_cause {
    ISSUED_LATE, /* what compute waited for could have begun while compute was busy before */
    LIMITER,     /* .max_gathers or .max_reductions held it back */
    BEHIND,      /* its stream was still busy with another collective */
    SLOWER_RANK, /* the same collective began later on another rank */
    TRANSFER,    /* the collective itself: it takes longer than the compute that could hide it */
    COPY,        /* a copy to or from the host or a file */
    HOST,        /* nothing was awaited: the host hadn't issued the next kernel */
    CAUSES
} idle_cause;

typedef struct idle {
    double begin, end; /* microseconds */
    int64_t awaited;   /* the event, -1: none */
    idle_cause cause;
    int32_t rank;
    bool backward;
} idle;

/* A recorded step on a rank. */
typedef struct step_span {
    double begin, end, busy; /* busy: of the compute stream, microseconds */
    double flops, ideal;     /* of its kernels; ideal: microseconds at the processor's rates */
    int64_t number;
    int32_t rank;
} step_span;

typedef struct waiting {
    idle *idle;
    step_span *step;
    int64_t idles, idle_room, steps, step_room;
} waiting;

typedef struct cause_words {
    const char *name, *explained, *remedy;
} cause_words;
extern const cause_words idle_causes[CAUSES];

/* r is "main" of the database. The caller frees w, after an error too. */
bool waiting_find(waiting *w, const recording *r, sqlite3 *db);
/* Adds steps, pieces and causes to a schema of the database. */
bool waiting_add(const waiting *w, sqlite3 *db, const char *schema);
void waiting_free(waiting *w);

#endif
