/* bench/times.h: times of processors, and medians of times. */
#ifndef KNAP_BENCH_TIMES_H
#define KNAP_BENCH_TIMES_H

#include <stdint.h>
#include <stdlib.h>
#include <time.h>

/* Seconds that this process's threads computed so far: others on the machine count less. */
static inline double processor_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int times_compare(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts v. */
static inline double median_of(double *v, int64_t n)
{
    qsort(v, (size_t)n, sizeof *v, times_compare);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

#endif
