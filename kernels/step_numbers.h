/* kernels/step_numbers.h (private): the numbers of a step that kernels make of other numbers: the
 * factor that clips, the loss scale. For the CPU and for one thread of a GPU. */
#ifndef KNAP_KERNELS_STEP_NUMBERS_H
#define KNAP_KERNELS_STEP_NUMBERS_H

#include "kernels/convert.h"
#include "kernels/optim_args.h"
#include <math.h>

/* a b, rounded before anything is added to it. */
static inline KN_HD double kn_times(double a, double b)
{
#ifdef __CUDA_ARCH__
    return __dmul_rn(a, b);
#else
    return a * b;
#endif
}

/* Limbs that ranks have added may exceed 40 bits: carries first, so that the same integer gives the
 * same double however it was divided. */
static inline KN_HD double kn_limbs_value(const int64_t *limbs)
{
    int64_t limb[KN_SQSUM_LIMBS], carry = 0;
    for (int k = 0; k < KN_SQSUM_LIMBS; k++) {
        const int64_t v = limbs[k] + carry;
        limb[k] = k == KN_SQSUM_LIMBS - 1 ? v : v & ((1LL << 40) - 1);
        carry = v >> 40;
    }
    double value = 0;
    for (int k = KN_SQSUM_LIMBS - 1; k >= 0; k--)
        value = kn_times(value, 0x1p40) + (double)limb[k];
    return value;
}

/* norm = scale sqrt(limbs 2^(2e - 60)), or scale absmax (limbs 2^-60)^(1/p); coef = scale
 * min(1, max_norm / (norm + 1e-6)), and limit = value times that. */
static inline KN_HD void kn_clip_numbers(const kn_clip_args *a)
{
    const double scale = a->loss_scale ? a->scale / (double)*a->loss_scale : a->scale;
    const double absmax = *a->absmax;
    const bool usual = isfinite(absmax) && absmax > 0;
    double norm = kn_times(absmax, scale), clip = 1;
    if (usual && a->p != 0 && isfinite(a->p)) {
        norm = kn_times(norm, pow(kn_times(kn_limbs_value(a->limbs), 0x1p-60), 1 / a->p));
    } else if (usual && a->p == 0) {
        int e;
        frexp(absmax, &e);
        norm = kn_times(scale, ldexp(sqrt(kn_limbs_value(a->limbs)), e - 30));
    }
    const double above = norm + 1e-6;
    if (a->max_norm > 0 && !(above <= a->max_norm)) /* NaN takes this branch and stays NaN */
        clip = a->max_norm / above;
    *a->norm = (float)norm;
    *a->coef = kn_times(scale, clip);
    if (a->limit)
        *a->limit = kn_times(a->value, clip);
}

static inline KN_HD void kn_loss_scale_decide(const kn_loss_scale_args *a)
{
    kn_step_scalars *x = a->step;
    const bool found = !isfinite(*a->absmax);
    x->grad_scale = a->loss_scale ? a->scale / (double)*a->loss_scale : a->scale;
    x->step -= x->skipped;
    x->skip = found;
    x->skipped += found;
    a->state->skipped += found;
    a->state->found += found;
}

static inline KN_HD void kn_loss_scale_end(const kn_loss_scale_args *a)
{
    kn_loss_scale_state *s = a->state;
    const bool found = s->found > 0;
    s->good = found ? 0 : s->good + 1;
    s->found = 0;
    if (found && s->scale * a->backoff < a->smallest) {
        s->stuck++;
    } else if (found) {
        s->scale *= a->backoff;
    } else if (s->good >= a->interval) {
        s->good = 0;
        s->scale = fmin(a->largest, s->scale * a->growth);
    }
}

static inline KN_HD void kn_loss_scale_numbers(const kn_loss_scale_args *a)
{
    if (a->step)
        kn_loss_scale_decide(a);
    if (!a->later)
        kn_loss_scale_end(a);
}

#endif
