/* optim/schedule.c: learning rates by step. */
#include "optim/optim.h"
#include "kernels/error_internal.h"
#include <math.h>

double kn_schedule_at(const kn_schedule *s, int64_t step)
{
    if (!kn_given(s, "kn_schedule_at", "the schedule"))
        return 0;
    if (step < s->warmup)
        return s->lr * (double)(step + 1) / (double)(s->warmup + 1);
    if (s->kind == KN_CONSTANT || s->kind == KN_SCHEDULE_DEFAULT)
        return s->lr;
    if (step >= s->steps)
        return s->min_lr;
    double ratio = (double)(step - s->warmup) / (double)(s->steps - s->warmup);
    double share =
        s->kind == KN_COSINE ? 0.5 * (1 + cos(3.14159265358979323846 * ratio)) : 1 - ratio;
    return s->min_lr + share * (s->lr - s->min_lr);
}
