/* kernels/rope.h: how fast the pairs of a rotary embedding turn, for every provider. */
#ifndef KNAP_KERNELS_ROPE_H
#define KNAP_KERNELS_ROPE_H

#include "kernels/convert.h"
#include "kernels/types.h"
#include <math.h>

/* The angle of pair i of half pairs from one position to the next: base^(-i/half), scaled. */
static inline KN_HD double kn_rope_speed(double base, kn_rope_scaling s, int64_t i, int64_t half)
{
    double speed = pow(base, -(double)i / (double)half);
    if (s.factor == 0)
        return speed;
    double turns = (double)s.original_ctx * speed / 6.283185307179586;
    if (turns < s.low_freq_factor)
        return speed / s.factor;
    if (turns > s.high_freq_factor)
        return speed;
    double place = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
    return (1 - place) * speed / s.factor + place * speed;
}

#endif
