/* tests/fsdp/apart.h: how far numbers lie apart. */
#ifndef KNAP_TESTS_FSDP_APART_H
#define KNAP_TESTS_FSDP_APART_H

#include <math.h>
#include <stdint.h>

/* The largest relative difference; infinity for NaN. */
static inline double apart(const double *a, const double *b, int64_t n)
{
    double most = 0;
    for (int64_t i = 0; i < n; i++) {
        const double d = fabs(a[i] - b[i]) / (1 + fabs(b[i]));
        most = d >= 0 ? fmax(most, d) : INFINITY;
    }
    return most;
}

#endif
