/* tests/fsdp/stand_in.h: a device of its own without one: it computes by the CPU's kernels, on
 * streams that are threads (or inline, where asked), with a pool of its own that can be limited,
 * and page-locked memory beside.
 *
 * Its pool behaves as a caching allocator does: a block that comes back may be given out at once,
 * and is the compute stream's from there on. So the compute stream fills it with NaN: whoever reads
 * a block that was released too early, or writes one before the compute stream got there, changes
 * the results. */
#ifndef KNAP_TESTS_STAND_IN_H
#define KNAP_TESTS_STAND_IN_H

#include "kernels/types.h"

typedef struct stand_in {
    bool inline_streams;
    int64_t limit; /* bytes of its memory; 0: none */
    int home_us;   /* how long a copy to the host takes at least */
} stand_in;

/* It is registered as device STAND_IN until the end. */
#define STAND_IN KN_OTHER_DEVICE
void stand_in_begin(stand_in s);
void stand_in_end(void);
/* How often the host has waited for it, for an event or a stream. */
int stand_in_waits(void);
/* fn is called before each such wait; NULL: nobody. */
void stand_in_watch(void (*fn)(void));
int64_t stand_in_peak(void); /* bytes of its memory that were out at once */

#endif
