/* models/programs/curve.c: the evaluations of a training, also of the part before it was resumed,
 * which its log tells. */
#include "kernels/memory.h"
#include "models/programs/log.h"
#include "models/programs/pictures.h"

#include <math.h>

bool curve_add(curve_point **point, int *n, curve_point p)
{
    curve_point *more = kn_host_realloc(*point, ((size_t)*n + 1) * sizeof p);
    if (!more)
        return false;
    *point = more;
    more[(*n)++] = p;
    return true;
}

/* Where the lines of a log go. */
typedef struct reading {
    const curve_place *done;
    curve_since *since;
    curve_point **point;
    int *n;
} reading;

/* A step that comes again takes the place of the earlier one and of what followed that. */
static bool take(const log_line *line, void *arg)
{
    const reading *r = arg;
    const double epoch = (double)line->samples / (double)r->done->epoch;
    if (isnan(line->loss))
        return true;
    while (*r->n > 0 && (*r->point)[*r->n - 1].epoch >= epoch)
        --*r->n;
    r->since->sum += line->loss;
    r->since->steps++;
    if (isnan(line->val_loss) || isnan(line->val_accuracy))
        return true;
    const curve_point p = { epoch, r->since->sum / (double)r->since->steps, line->val_loss,
                            100 * line->val_accuracy };
    *r->since = (curve_since){ 0 };
    return curve_add(r->point, r->n, p);
}

bool curve_read(const char *log, curve_place done, curve_point **point, int *n, curve_since *since)
{
    reading r = { &done, since, point, n };
    bool there; /* else it begins with this run */
    return !log || log_read(log, done.samples, take, &r, &there);
}
