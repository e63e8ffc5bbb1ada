/* models/programs/what_if.c: the same step with another option, beside the real one. All figures
 * are means over the recorded steps and ranks, but for the peak, which is the largest rank's. */
#include "models/programs/what_if.h"

#include <jansson.h>
#include <math.h>
#include <string.h>

typedef struct figures {
    double step, busy, idle[CAUSES]; /* milliseconds of a step */
    double peak;                     /* bytes */
} figures;

/* Bytes that lived on the rank at the start. */
static double live_at_start(const recording *r, int rank)
{
    double live = 0;
    const char *category;
    json_t *bytes;
    json_object_foreach(json_array_get(json_object_get(r->head, "live"), (size_t)rank), category,
                        bytes) if (strcmp(category, "host") != 0 &&
                                   strcmp(category, "offloaded") != 0) live +=
        json_number_value(bytes);
    return live;
}

static figures figures_of(const recording *r, const waiting *w)
{
    figures f = { 0 };
    const double ms = w->steps > 0 ? 1e-3 / (double)w->steps : 0;
    for (int64_t i = 0; i < w->steps; i++) {
        f.step += ms * (w->step[i].end - w->step[i].begin);
        f.busy += ms * w->step[i].busy;
    }
    for (int64_t i = 0; i < w->idles; i++)
        f.idle[w->idle[i].cause] += ms * (w->idle[i].end - w->idle[i].begin);
    for (int rank = 0; rank < r->ranks; rank++)
        f.peak = fmax(f.peak, live_at_start(r, rank));
    for (int64_t i = 0; i < r->events; i++)
        f.peak = fmax(f.peak, r->event[i].l);
    return f;
}

static void write_row(sheet *s, const char *what, double a, double b, const char *form)
{
    if (a == 0 && b == 0)
        return;
    sheet_cell(s, "%s", what);
    sheet_cell(s, form, a);
    sheet_cell(s, form, b);
    sheet_cell(s, form, b - a);
    if (a > 0)
        sheet_cell(s, "%+.1f", 100 * (b - a) / a);
    else
        sheet_cell(s, "new");
    sheet_row(s, 0);
}

bool what_if_write(sheet *s, const recording *a, const waiting *wa, const recording *b,
                   const waiting *wb)
{
    const figures x = figures_of(a, wa), y = figures_of(b, wb);
    sheet_part(s, "what-if", "What if", "This run beside the one before it.");
    sheet_sentence(s, "A step takes %.3f ms here and %.3f ms before: %.1f %% %s.", y.step, x.step,
                   x.step > 0 ? 100 * fabs(y.step - x.step) / x.step : 0,
                   y.step > x.step ? "longer" : "shorter");
    sheet_table(s, "A step of a rank", COLUMNS("what", "#before", "#here", "#difference", "#%"));
    write_row(s, "step, ms", x.step, y.step, "%.3f");
    write_row(s, "compute is busy, ms", x.busy, y.busy, "%.3f");
    for (int i = 0; i < CAUSES; i++) {
        char what[96];
        snprintf(what, sizeof what, "idle, %s, ms", idle_causes[i].name);
        write_row(s, what, x.idle[i], y.idle[i], "%.3f");
    }
    write_row(s, "peak of memory, bytes", x.peak, y.peak, "%.0f");
    const bool ok = sheet_table_end(s, "what-if");
    sheet_part_end(s);
    return ok;
}
