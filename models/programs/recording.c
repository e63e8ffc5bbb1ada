/* models/programs/recording.c: --record and --explain: steps of a training as events, for a file of
 * all ranks or for the terminal. */
#include "fsdp/record.h"
#include "kernels/error.h"
#include "models/programs/training.h"

#include <stdio.h>
#include <string.h>

enum { FIRST = 2, LAST = 3 }; /* of this run's steps: the first one makes what stays */

/* "5" or "5-7", steps as a run prints them; NULL: the default. */
static bool read_steps(const char *text, int64_t begin, int64_t *first, int64_t *last)
{
    long long a, b;
    int end = 0;
    *first = begin + FIRST;
    *last = begin + LAST;
    if (!text)
        return true;
    if (sscanf(text, "%lld%n", &a, &end) == 1 && !text[end])
        b = a;
    else if (sscanf(text, "%lld-%lld%n", &a, &b, &end) != 2 || text[end])
        return kn_fail("--record-steps %s: give a step, or the first and the last: 5, or 5-7",
                       text);
    *first = a;
    *last = b;
    return (a >= 1 && b >= a) ||
           kn_fail("--record-steps %s: steps count from 1, and the last comes after the first",
                   text);
}

/* Whether --explain's unit is one of the model's, a module above or below units, or the root by its
 * class. */
static bool names_unit(training *t, const char *unit)
{
    kn_module *first = NULL;
    if (strcmp(unit, "all") == 0 || strcmp(unit, kn_module_class(&t->model)) == 0 ||
        (*unit && kn_module_has(&t->model, unit)))
        return true;
    kn_fsdp_units(&t->model, &first, 1);
    return kn_fail(
        "--explain %s: the model has no module of that path; give all, %s (the root), or "
        "a path such as %s",
        unit, kn_module_class(&t->model), first ? kn_module_path(first) : "");
}

bool recording_ready(training *t)
{
    const settings *s = t->s;
    if (!s->record && !s->explain)
        return true;
    if (!read_steps(s->record_steps, t->begin, &t->record_first, &t->record_last))
        return false;
    if (s->explain) {
        t->record_last = t->record_first;
        if (!names_unit(t, s->explain))
            return false;
    }
    return (t->record_first > t->begin && t->record_first <= s->steps) ||
           kn_fail("--%s: step %lld is to be recorded, and the run has steps %lld to %lld; give "
                   "--record-steps",
                   s->record ? "record" : "explain", (long long)t->record_first,
                   (long long)t->begin + 1, (long long)s->steps);
}

bool recording_begin(training *t, int64_t step)
{
    const settings *s = t->s;
    if (step + 1 != t->record_first)
        return true;
    if (s->record)
        return kn_record_start(&t->model, s->record, .comm = t->world, .command = t->program,
                               .values = s->record_values);
    if (first_rank(t))
        kn_trace_watch(1u << KN_TRACE_RUN | 1u << KN_TRACE_WAIT | 1u << KN_TRACE_CALL |
                           1u << KN_TRACE_VERB,
                       t->device);
    return kn_ok();
}

static bool explain(const training *t, int64_t step)
{
    static char line[16384];
    kn_trace_event *event = NULL;
    const char *unit = strcmp(t->s->explain, "all") == 0 ? NULL : t->s->explain;
    const size_t n = kn_trace_stop(&event);
    printf("step %lld on rank 0: %s\n", (long long)step + 1,
           kn_explain_line(event, n, line, sizeof line));
    kn_explain(stdout, event, n, unit);
    kn_host_free(event);
    return kn_ok();
}

bool recording_end(training *t, int64_t step)
{
    if (step + 1 != t->record_last)
        return true;
    if (!t->s->record)
        return !first_rank(t) || explain(t, step);
    if (!take_measurements(t, 0) || !kn_record_stop()) /* a GPU's come a step later */
        return false;
    if (first_rank(t))
        printf("recorded steps %lld to %lld of %d ranks: %s (knap-report makes a page of it)\n",
               (long long)t->record_first, (long long)t->record_last, kn_comm_size(t->world),
               t->s->record);
    return true;
}

/* It ends with the run, where that has no more steps or was stopped. */
bool recording_over(training *t, int64_t steps)
{
    if (steps < t->record_first || steps >= t->record_last)
        return true;
    t->record_last = steps;
    return recording_end(t, steps - 1);
}
