/* models/programs/losses.c: losses and accuracy over steps or samples. */
#include "models/programs/losses.h"
#include "kernels/error_internal.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <fcntl.h>
#include <math.h>
#include <string.h>
#include <unistd.h>

bool losses_add(losses *l, const step_report *step)
{
    const double x = l->unit ? (double)step->samples / (double)l->unit : (double)step->step;
    for (int i = 0; i < LINES; i++)
        chart_cut(&l->line[i], x);
    l->line[TRAINED].faint = !l->means;
    l->sum += isfinite(step->loss) ? step->loss : 0;
    l->count += isfinite(step->loss);
    const double loss = !l->means ? step->loss : step->has_val ? l->sum / (double)l->count : NAN;
    if (step->has_val)
        l->sum = 0, l->count = 0;
    return chart_add(&l->line[TRAINED], x, loss) &&
           chart_add(&l->line[VALIDATED], x, step->has_val ? step->val_loss : NAN) &&
           chart_add(&l->line[RIGHT], x, step->has_accuracy ? 100 * step->accuracy : NAN);
}

void losses_free(losses *l)
{
    for (int i = 0; i < LINES; i++)
        chart_line_free(&l->line[i]);
}

/* ---- a log ----------------------------------------------------------------------------------- */

bool log_lines(const char *path, bool (*take)(const char *line, off_t at, bool cut, void *arg),
               void *arg, bool may_lack)
{
    enum { LINE = 1 << 16 }; /* a longer one is none of a log */
    const int fd = kn_open(path, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0)
        return (may_lack && errno == ENOENT) || kn_fail_system("cannot read the log %s: %m", path);
    FILE *in = fdopen(fd, "r");
    if (!in) {
        kn_fail_system("cannot read the log %s: %m", path);
        close(fd);
        return false;
    }
    char *line = kn_host_alloc(LINE);
    bool more = line != NULL, begins = true;
    for (off_t at = 0; more && fgets(line, LINE, in); at = ftello(in)) {
        const size_t length = strlen(line);
        const bool ends = length > 0 && line[length - 1] == '\n';
        more = !begins || take(line, at, !ends && feof(in), arg);
        begins = ends;
    }
    if (ferror(in))
        kn_fail_system("cannot read the log %s: %m", path);
    kn_host_free(line);
    fclose(in);
    return kn_ok();
}

static double number_in(const json_t *j, const char *key)
{
    const json_t *v = json_object_get(j, key);
    return json_is_number(v) ? json_number_value(v) : NAN;
}

/* A line of a step; false: another text, or with an error. */
static bool parse(const char *text, step_report *r)
{
    json_error_t error;
    json_t *j = kn_json_parse(text, strlen(text), 0, "the log", &error);
    *r = (step_report){ .step = json_integer_value(json_object_get(j, "step")),
                        .samples = json_integer_value(json_object_get(j, "samples")),
                        .loss = number_in(j, "loss"),
                        .val_loss = number_in(j, "val_loss"),
                        .accuracy = number_in(j, "val_accuracy") };
    json_decref(j);
    r->has_val = !isnan(r->val_loss);
    r->has_accuracy = !isnan(r->accuracy);
    return r->step > 0 && r->samples > 0;
}

typedef struct reading {
    losses *l;
    int64_t samples;
} reading;

static bool take(const char *line, off_t at, bool cut, void *arg)
{
    const reading *r = arg;
    step_report step;
    (void)at, (void)cut;
    return parse(line, &step) && (r->samples < 0 || step.samples <= r->samples)
               ? losses_add(r->l, &step)
               : kn_ok();
}

bool losses_read(losses *l, const char *path, int64_t samples, bool may_lack)
{
    return log_lines(path, take, &(reading){ l, samples }, may_lack);
}
