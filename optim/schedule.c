/* optim/schedule.c: learning rates by step. */
#include "optim/optim.h"
#include "kernels/error_internal.h"
#include <math.h>

static const double pi = 3.14159265358979323846;

static bool in_range(const kn_schedule *s)
{
    double power = s->power, factor = s->factor;
    if (s->kind < KN_SCHEDULE_DEFAULT || s->kind > KN_OWN_SCHEDULE)
        return kn_fail("kn_schedule_at: .kind is %d, which is no kind of schedule", (int)s->kind);
    if (s->kind == KN_OWN_SCHEDULE)
        return s->rate || kn_fail("kn_schedule_at: KN_OWN_SCHEDULE needs .rate, a function");
    if (!(s->lr > 0 && isfinite(s->lr) && s->min_lr >= 0 && isfinite(s->min_lr)))
        return kn_fail("kn_schedule_at: .lr is %g and .min_lr %g; they must be above 0 and at "
                       "least 0",
                       s->lr, s->min_lr);
    if (s->warmup < 0 || s->steps < 0)
        return kn_fail("kn_schedule_at: .warmup is %lld and .steps %lld; both must be at least 0",
                       (long long)s->warmup, (long long)s->steps);
    if (s->steps == 0 && s->kind > KN_CONSTANT && s->kind != KN_STEP_DECAY)
        return kn_fail("kn_schedule_at: .steps is 0; it says where the decay ends");
    if (s->kind <= KN_CONSTANT && s->min_lr > 0)
        return kn_fail("kn_schedule_at: .min_lr is %g, but the rate is constant; leave it out, or "
                       "give the .kind of schedule that falls to it",
                       s->min_lr);
    if (s->kind > KN_CONSTANT && s->min_lr > s->lr)
        return kn_fail("kn_schedule_at: .min_lr is %g, above .lr, %g, from which the rate falls",
                       s->min_lr, s->lr);
    if (s->kind == KN_POLYNOMIAL && !(power >= 0 && isfinite(power)))
        return kn_fail("kn_schedule_at: .power is %g; it must be above 0", power);
    if (s->kind == KN_STEP_DECAY && (s->every <= 0 || !(factor >= 0 && factor <= 1)))
        return kn_fail("kn_schedule_at: .every is %lld and .factor %g; they must be at least 1 and "
                       "in (0, 1]",
                       (long long)s->every, factor);
    if (s->kind == KN_WSD && (s->decay < 0 || s->decay > s->steps - s->warmup))
        return kn_fail(
            "kn_schedule_at: .decay is %lld of %lld steps with %lld of warmup; the parts "
            "don't fit",
            (long long)s->decay, (long long)s->steps, (long long)s->warmup);
    if (s->kind == KN_ONE_CYCLE && (s->warmup < 1 || s->steps <= s->warmup))
        return kn_fail("kn_schedule_at: a cycle rises for .warmup steps, %lld, and falls until "
                       ".steps, %lld; give at least 1 and more",
                       (long long)s->warmup, (long long)s->steps);
    return true;
}

/* From a at ratio 0 to b at 1, along half a cosine. */
static double along_cosine(double a, double b, double ratio)
{
    return b + (a - b) * 0.5 * (1 + cos(pi * ratio));
}

static double one_cycle(const kn_schedule *s, int64_t step)
{
    double top = (double)(s->warmup - 1), at = (double)step, low = s->lr / 25;
    if (at < top)
        return along_cosine(low, s->lr, at / top);
    return along_cosine(s->lr, s->min_lr, fmin(1, (at - top) / ((double)(s->steps - 1) - top)));
}

static double step_decay(const kn_schedule *s, int64_t step)
{
    double factor = s->factor != 0 ? s->factor : 0.1;
    return fmax(s->min_lr, s->lr * pow(factor, (double)((step - s->warmup) / s->every)));
}

/* The rate's distance from min_lr, as a share of that of lr, in the decay. */
static double share_left(const kn_schedule *s, int64_t step)
{
    int64_t falls = s->steps - s->warmup, tenth = s->steps < 10 ? 1 : s->steps / 10;
    int64_t decay = s->decay ? s->decay : tenth < falls ? tenth : falls;
    double ratio = (double)(step - s->warmup) / (double)falls;
    switch (s->kind) {
    case KN_COSINE:
        return 0.5 * (1 + cos(pi * ratio));
    case KN_POLYNOMIAL:
        return pow(1 - ratio, s->power != 0 ? s->power : 1);
    case KN_WSD:
        return fmin(1, (double)(s->steps - step) / (double)decay);
    default:
        return 1 - ratio;
    }
}

double kn_schedule_at(const kn_schedule *s, int64_t step)
{
    if (!kn_given(s, "kn_schedule_at", "the schedule") || !in_range(s))
        return 0;
    if (step < 0) {
        kn_fail("kn_schedule_at: the step is %lld; steps count from 0", (long long)step);
        return 0;
    }
    if (s->kind == KN_OWN_SCHEDULE)
        return s->rate(step, s->arg);
    if (s->kind == KN_ONE_CYCLE)
        return one_cycle(s, step);
    if (step < s->warmup)
        return s->lr * (double)(step + 1) / ((double)s->warmup + 1);
    if (s->kind == KN_CONSTANT || s->kind == KN_SCHEDULE_DEFAULT)
        return s->lr;
    if (s->kind == KN_STEP_DECAY)
        return step_decay(s, step);
    if (step >= s->steps)
        return s->min_lr;
    return s->min_lr + share_left(s, step) * (s->lr - s->min_lr);
}
