/* kernels/lse.h (private): where attention's lse loses the weights. */
#ifndef KNAP_KERNELS_LSE_H
#define KNAP_KERNELS_LSE_H

#include "kernels/convert.h"

#include <math.h>
#include <stdbool.h>

/* The backward has P_s = exp(z_s - lse). Of an lse far from 0, f32 keeps the maximum of a row's
 * scores and loses the logarithm of their sum: where a mask adds -1e9 to all of a row's scores,
 * each P would be 1. Beyond 256 a weight would be off by 1.5e-5 of itself; there a row's P are
 * divided by their sum. */
static inline KN_HD bool kn_lse_is_coarse(double lse)
{
    return fabs(lse) > 256 && fabs(lse) < (double)INFINITY;
}

#endif
