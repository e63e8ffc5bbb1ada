/* models/programs/losses.c: losses and accuracy over steps or samples. */
#include "models/programs/losses.h"

#include "kernels/error.h"

#include <math.h>

bool losses_add(losses *l, const step_report *step)
{
    const double x = l->unit ? (double)step->samples / (double)l->unit : (double)step->step;
    for (int i = 0; i < LINES; i++)
        chart_cut(&l->line[i], x);
    l->line[TRAINED].faint = !l->means;
    l->sum += step->loss;
    l->count++;
    const double loss = !l->means ? step->loss : step->has_val ? l->sum / (double)l->count : NAN;
    if (step->has_val)
        l->sum = 0, l->count = 0;
    return chart_add(&l->line[TRAINED], x, loss) &&
           chart_add(&l->line[VALIDATED], x, step->has_val ? step->val_loss : NAN) &&
           chart_add(&l->line[RIGHT], x, step->has_accuracy ? 100 * step->accuracy : NAN);
}

static bool take(const step_report *step, void *arg)
{
    return isnan(step->loss) || losses_add(arg, step);
}

bool losses_read(losses *l, const char *path, int64_t samples, bool may_lack)
{
    bool there;
    return log_read(path, samples, take, l, may_lack ? &there : NULL);
}

void losses_free(losses *l)
{
    for (int i = 0; i < LINES; i++)
        chart_line_free(&l->line[i]);
}
