/* models/programs/losses.c: losses over steps or samples. */
#include "models/programs/losses.h"

#include "kernels/error.h"

bool losses_add(losses *l, const log_line *line)
{
    const double x = (double)(l->samples ? line->samples : line->step);
    chart_cut(&l->line[TRAINED], x);
    chart_cut(&l->line[VALIDATED], x);
    l->line[TRAINED].faint = true;
    return chart_add(&l->line[TRAINED], x, line->loss) &&
           chart_add(&l->line[VALIDATED], x, line->val_loss);
}

static bool take(const log_line *line, void *arg)
{
    return losses_add(arg, line);
}

bool losses_read(losses *l, const char *path, int64_t samples, bool may_lack)
{
    bool there;
    return log_read(path, samples, take, l, may_lack ? &there : NULL);
}

void losses_free(losses *l)
{
    for (int i = 0; i < LOSSES; i++)
        chart_line_free(&l->line[i]);
}
