/* tests/fsdp/stand_in.h: a registered device for tests: it computes by the CPU's kernels, on
 * streams that are threads (or inline, by option), and has its own memory pool, which can be
 * limited, and page-locked memory.
 *
 * Its pool behaves as a caching allocator does: a freed block may be reused at once, in the order
 * of the compute stream. So the compute stream fills it with NaN: reading a block after a premature
 * release, or writing one before the compute stream reaches that point, changes the results. */
#ifndef KNAP_TESTS_STAND_IN_H
#define KNAP_TESTS_STAND_IN_H

#include "kernels/kernels.h"
#include "tests/fsdp/ranks.h"

typedef struct stand_in {
    bool inline_streams;
    int64_t limit;        /* bytes of its memory; 0: none */
    int home_us, away_us; /* the least duration of a copy to the host, from it */
    /* Called before each launch, which fails where it returns false, with its error; NULL: none. */
    bool (*look)(kn_kernel k, const void *args);
} stand_in;

/* It is registered as device STAND_IN until the end. */
#define STAND_IN KN_OTHER_DEVICE
void stand_in_begin(stand_in s);
void stand_in_end(void);
/* Runs body on so many processes while it is registered; returns how many failed. */
int on_stand_in(stand_in s, int ranks, rank_body body, void *arg);
/* The number of the host's waits for its events and streams. */
int stand_in_waits(void);
/* fn is called before each such wait, for a stream or, NULL, an event; NULL: none. */
void stand_in_watch(void (*fn)(const kn_stream *s));
int64_t stand_in_peak(void); /* peak of its allocated bytes */

#endif
