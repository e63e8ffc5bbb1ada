/* models/programs/curve.c: the evaluations of a training, also of the part before it was resumed,
 * which its log tells. */
#include "kernels/error_internal.h"
#include "models/programs/pictures.h"
#include "tensor/json.h"

#include <errno.h>
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool curve_add(curve_point **point, int *n, curve_point p)
{
    curve_point *more = kn_host_realloc(*point, ((size_t)*n + 1) * sizeof p);
    if (!more)
        return false;
    *point = more;
    more[(*n)++] = p;
    return true;
}

/* One line; another text than a step's is left out. A step that comes again, after a run that was
 * killed, takes the place of the earlier one and of what followed that. */
static bool read_line(const char *line, const curve_place *done, curve_since *s,
                      curve_point **point, int *n)
{
    json_error_t error;
    json_t *j = kn_json_parse(line, strlen(line), 0, "the log", &error);
    const json_t *loss = json_object_get(j, "loss"), *val = json_object_get(j, "val_loss");
    const json_t *right = json_object_get(j, "val_accuracy");
    bool ok = kn_ok();
    const json_int_t samples = json_integer_value(json_object_get(j, "samples"));
    if (samples > 0 && samples <= done->samples && json_is_number(loss)) {
        const double epoch = (double)samples / (double)done->epoch;
        while (*n > 0 && (*point)[*n - 1].epoch >= epoch)
            --*n;
        s->sum += json_number_value(loss);
        s->steps++;
        if (json_is_number(val) && json_is_number(right)) {
            ok = curve_add(point, n,
                           (curve_point){ epoch, s->sum / (double)s->steps, json_number_value(val),
                                          100 * json_number_value(right) });
            *s = (curve_since){ 0 };
        }
    }
    json_decref(j);
    return ok;
}

bool curve_read(const char *log, curve_place done, curve_point **point, int *n, curve_since *since)
{
    FILE *in = fopen(log, "r");
    if (!in) /* a log that begins with this run */
        return errno == ENOENT || kn_fail_system("cannot read the log %s: %m", log);
    char *line = NULL;
    size_t size = 0;
    bool ok = true;
    while (ok && getline(&line, &size, in) > 0)
        ok = read_line(line, &done, since, point, n);
    ok = ok && (feof(in) || kn_fail_system("cannot read the log %s: %m", log));
    free(line);
    fclose(in);
    return ok;
}
