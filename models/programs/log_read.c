/* models/programs/log_read.c: the lines of a log, one after the other. */
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "models/programs/log.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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

bool log_lines(const char *path, bool (*take)(const char *line, off_t at, bool cut, void *arg),
               void *arg, bool *there)
{
    enum { LINE = 1 << 16 }; /* a longer one is none of a log */
    const int fd = kn_open(path, O_RDONLY | O_CLOEXEC, 0);
    if (there)
        *there = fd >= 0;
    if (fd < 0)
        return (there && errno == ENOENT) || kn_fail_system("cannot read the log %s: %m", path);
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

typedef struct reading {
    int64_t samples;
    bool (*take)(const step_report *step, void *arg);
    void *arg;
} reading;

static bool take_line(const char *line, off_t at, bool cut, void *arg)
{
    const reading *r = arg;
    step_report step;
    (void)at, (void)cut;
    return !parse(line, &step) || (r->samples >= 0 && step.samples > r->samples)
               ? kn_ok()
               : r->take(&step, r->arg);
}

bool log_read(const char *path, int64_t samples, bool (*take)(const step_report *step, void *arg),
              void *arg, bool *there)
{
    reading r = { samples, take, arg };
    return log_lines(path, take_line, &r, there);
}
