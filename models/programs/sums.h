/* models/programs/sums.h: sums by a pair of numbers: of jobs by name and provider, of bytes by
 * category and owner. */
#ifndef KNAP_MODELS_PROGRAMS_SUMS_H
#define KNAP_MODELS_PROGRAMS_SUMS_H

#include "models/programs/recorded.h"

typedef struct sum {
    int32_t a, b; /* what it is of */
    double count, time, flops, bytes;
} sum;

typedef struct sums {
    names key;
    sum *sum;
    int64_t room;
} sums;

/* That of a and b, valid until the next; NULL with an error. */
sum *sums_at(sums *s, int32_t a, int32_t b);
/* Sorts them, the largest first, and gives their number. They can't be looked up any more. */
int64_t sums_sort_by_time(sums *s);
int64_t sums_sort_by_bytes(sums *s);
void sums_free(sums *s);

static inline double share(double part, double whole)
{
    return whole > 0 ? part / whole : 0;
}

#endif
