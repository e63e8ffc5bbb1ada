/* models/programs/facts.c: what a recording tells, in numbers. */
#include "models/programs/facts.h"
#include "kernels/error_internal.h"
#include "kernels/memory.h"
#include "kernels/memory_internal.h"
#include "models/programs/lanes.h"
#include "models/programs/report.h"
#include "models/programs/sums.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- the step -------------------------------------------------------------------------------- */

/* The unit's number; -1: none. The root's calls have the path "". */
static int unit_number(const recording *r, const char *name)
{
    const json_t *units = json_object_get(r->head, "units");
    size_t i;
    json_t *unit;
    json_array_foreach(units, i, unit) if ((i == 0 && *name == 0) ||
                                           strcmp(json_string_value(json_object_get(unit, "name")),
                                                  name) == 0) return (int)i;
    return -1;
}

static const char *unit_name(const recording *r, int unit)
{
    const json_t *units = json_object_get(r->head, "units");
    return json_string_value(json_object_get(json_array_get(units, (size_t)unit), "name"));
}

/* As --explain calls it: without what all names with a dot begin with, up to a dot. */
static const char *short_name(const recording *r, int unit)
{
    const char *name = unit_name(r, unit), *dot = strrchr(name, '.');
    const int units = (int)json_array_size(json_object_get(r->head, "units"));
    size_t same = dot ? (size_t)(dot - name) + 1 : 0;
    for (int i = 1; i < units; i++)
        while (same > 0 && strchr(unit_name(r, i), '.') &&
               (strncmp(name, unit_name(r, i), same) != 0 || name[same - 1] != '.'))
            same--;
    return unit == 0 ? "root" : name + same;
}

/* g gathers a unit, s reduces it, F and B begin its forward and its backward; 0: another event. */
static char letter_of(const recording *r, const event *e)
{
    const char *w = name_of(r, e->w);
    if (e->k == VERB)
        return strcmp(w, "gather") == 0 ? 'g' : strcmp(w, "reduce") == 0 ? 's' : 0;
    if (e->k == CALL)
        return strcmp(w, "forward") == 0 ? 'F' : strcmp(w, "backward") == 0 ? 'B' : 0;
    return 0;
}

/* The first recorded step of a rank as one line. */
static void write_order(sheet *s, const recording *r)
{
    char line[2000] = "";
    size_t used = 0;
    int32_t rank = r->ranks;
    for (int64_t i = 0; i < r->events; i++)
        if (r->event[i].k == VERB && r->event[i].r < rank)
            rank = r->event[i].r;
    if (rank == r->ranks)
        return;
    for (int64_t i = 0; i < r->events && used < sizeof line; i++) {
        const event *e = &r->event[i];
        if (e->r != rank)
            continue;
        if (e->k == STEP && strcmp(name_of(r, e->w), "end") == 0)
            break;
        const int unit = letter_of(r, e) ? unit_number(r, name_of(r, e->m)) : -1;
        if (unit >= 0)
            used += (size_t)snprintf(line + used, sizeof line - used, " %c%s", letter_of(r, e),
                                     short_name(r, unit));
    }
    sheet_sentence(s, "The order of the first step on rank %d:%s%s", rank, line,
                   used < sizeof line ? "" : " ...");
}

static bool write_units(sheet *s, const recording *r)
{
    const json_t *units = json_object_get(r->head, "units");
    size_t i, k, n;
    json_t *unit, *bucket, *param;
    char bytes[32];
    sheet_table(s, "Units",
                COLUMNS("unit", "name", "class", "#shards", "#parameters", "#gathered", "dtypes"));
    json_array_foreach(units, i, unit)
    {
        const json_t *buckets = json_object_get(unit, "buckets");
        const json_t *first = json_array_get(buckets, 0);
        double numel = 0, full = 0;
        json_array_foreach(buckets, k, bucket)
        {
            full += json_number_value(json_object_get(bucket, "full_bytes"));
            json_array_foreach(json_object_get(bucket, "params"), n, param) numel +=
                json_number_value(json_object_get(param, "numel"));
        }
        const char *class = json_string_value(json_object_get(unit, "class"));
        sheet_cell(s, "%s", short_name(r, (int)i));
        sheet_cell(s, "%s", json_string_value(json_object_get(unit, "name")));
        sheet_cell(s, "%s", class ? class : "");
        sheet_cell(s, "%.0f", json_number_value(json_object_get(unit, "shards")));
        sheet_cell(s, "%.0f", numel);
        sheet_cell(s, "%s", report_bytes(full, bytes, sizeof bytes));
        const char *master = json_string_value(json_object_get(first, "master_dtype"));
        const char *param_dtype = json_string_value(json_object_get(first, "param_dtype"));
        sheet_cell(s, "%s, computes in %s", master ? master : "", param_dtype ? param_dtype : "");
        sheet_row(s, 0);
    }
    return sheet_table_end(s, "units");
}

static bool write_streams(sheet *s, const recording *r, const waiting *w)
{
    sums all = { 0 };
    bool ok = true;
    double time = 0;
    char bytes[32];
    for (int64_t i = 0; i < w->steps; i++)
        time += w->step[i].rank == 0 ? w->step[i].end - w->step[i].begin : 0;
    for (int64_t i = 0; ok && i < r->events; i++) {
        const event *e = &r->event[i];
        sum *of = e->k == RUN ? sums_at(&all, e->r, e->s) : NULL;
        ok = of || e->k != RUN;
        if (of)
            of->count++, of->time += e->d, of->bytes += e->b;
    }
    sheet_table(s, "Streams", COLUMNS("rank", "stream", "#jobs", "#ms", "#bytes"));
    for (int32_t k = 0; ok && k < r->ranks; k++)
        for (int64_t i = 0; i < all.key.count; i++) {
            if (all.sum[i].a != k)
                continue;
            sheet_cell(s, "%d", k);
            sheet_cell(s, "%s", name_of(r, all.sum[i].b));
            sheet_cell(s, "%.0f", all.sum[i].count);
            sheet_cell(s, "%.3f", all.sum[i].time / 1e3);
            sheet_cell(s, "%s", report_bytes(all.sum[i].bytes, bytes, sizeof bytes));
            sheet_row(s, fmin(1, share(all.sum[i].time, time)));
        }
    sums_free(&all);
    return sheet_table_end(s, "streams") && ok;
}

/* "all_gather h.0" counts as "all_gather". */
static int32_t first_word(recording *r, int32_t name)
{
    char word[64];
    const char *text = name_of(r, name);
    const size_t n = strcspn(text, " ");
    if (text[n] == 0 || n >= sizeof word)
        return name;
    memcpy(word, text, n);
    word[n] = 0;
    return names_add(&r->names, word);
}

static bool write_operations(sheet *s, recording *r)
{
    sums all = { 0 };
    bool ok = true;
    double time = 0;
    for (int64_t i = 0; ok && i < r->events; i++) {
        const event *e = &r->event[i];
        const int32_t word = e->k == RUN && is_collective(r, e) ? first_word(r, e->w) : e->w;
        sum *of = e->k == RUN && word >= 0 ? sums_at(&all, word, e->p) : NULL;
        ok = of || e->k != RUN;
        if (!of)
            continue;
        of->count++, of->time += e->d, of->bytes += e->b, of->flops += e->f;
        time += e->d;
    }
    const int64_t count = sums_sort_by_time(&all);
    sheet_table(s, "Jobs that took longest",
                COLUMNS("job", "by", "#times", "#ms", "#%", "#GFLOP/s", "#GB/s"));
    for (int64_t i = 0; ok && i < count && i < MOST_ROWS; i++) {
        const sum *of = &all.sum[i];
        sheet_cell(s, "%s", name_of(r, of->a));
        sheet_cell(s, "%s", name_of(r, of->b));
        sheet_cell(s, "%.0f", of->count);
        sheet_cell(s, "%.3f", of->time / 1e3);
        sheet_cell(s, "%.1f", 100 * share(of->time, time));
        sheet_cell(s, "%.2f", share(of->flops, of->time) / 1e3);
        sheet_cell(s, "%.2f", share(of->bytes, of->time) / 1e3);
        sheet_row(s, share(of->time, time));
    }
    sums_free(&all);
    return sheet_table_end(s, "operations") && ok;
}

/* ---- the waiting ----------------------------------------------------------------------------- */

static const char *awaited_name(const recording *r, const idle *i)
{
    return i->awaited < 0 ? "" : name_of(r, r->event[i->awaited].w);
}

/* Whether the job is the first gather of its backward: none of that backward could issue it
 * ahead. */
static bool begins_backward(const recording *r, int64_t job)
{
    const int32_t rank = r->event[job].r;
    for (int64_t i = job - 1; i >= 0; i--) {
        const event *e = &r->event[i];
        if (e->r == rank && e->k == STEP)
            break;
        if (e->r == rank && e->k == RUN && e->a && e->s == r->event[job].s && is_collective(r, e))
            return false;
    }
    return true;
}

/* What issuing gathers ahead would win back: in forward, in backward, and of the unit that forward
 * ends and backward begins with. */
typedef struct early {
    double forward, backward, kept;
} early;

static void add_early(early *of, const recording *r, const idle *p)
{
    const double time = p->end - p->begin;
    if (p->cause != ISSUED_LATE)
        return;
    if (!p->backward)
        of->forward += time;
    else if (begins_backward(r, p->awaited))
        of->kept += time;
    else
        of->backward += time;
}

static void early_cell(sheet *s, const early *of, double spans)
{
    const struct {
        const char *option;
        double time;
    } part[] = { { "--forward-prefetch", of->forward },
                 { "--prefetch pre", of->backward },
                 { "the last unit kept after forward", of->kept } };
    char text[300] = "";
    size_t used = 0;
    for (int i = 0; i < 3; i++)
        if (part[i].time > 0)
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s: %.1f us a step",
                                     used ? "; " : "", part[i].option, part[i].time / spans);
    sheet_cell(s, "%s", text);
}

/* What each cause cost, and what was awaited longest because of it. */
static bool write_causes(sheet *s, const recording *r, const waiting *w, double idle_time)
{
    sums cause = { 0 }, what = { 0 };
    bool ok = true;
    early ahead = { 0 };
    const double spans = fmax(1, (double)w->steps);
    for (int64_t i = 0; ok && i < w->idles; i++) {
        const idle *p = &w->idle[i];
        sum *of = sums_at(&cause, p->cause, 0);
        if ((ok = of != NULL))
            of->time += p->end - p->begin, of->count++;
        sum *job =
            ok ? sums_at(&what, p->cause, p->awaited < 0 ? 0 : r->event[p->awaited].w) : NULL;
        if ((ok = job != NULL))
            job->time += p->end - p->begin;
        add_early(&ahead, r, p);
    }
    const int64_t causes = sums_sort_by_time(&cause), jobs = sums_sort_by_time(&what);
    sheet_table(s, "Causes, largest first",
                COLUMNS("cause", "#idle, us", "#%", "#us a step and rank", "mostly for", "which",
                        "less of it by"));
    for (int64_t i = 0; ok && i < causes; i++) {
        const sum *of = &cause.sum[i];
        int64_t k = 0;
        while (k < jobs && what.sum[k].a != of->a)
            k++;
        sheet_cell(s, "%s", idle_causes[of->a].name);
        sheet_cell(s, "%.1f", of->time);
        sheet_cell(s, "%.1f", 100 * share(of->time, idle_time));
        sheet_cell(s, "%.1f", of->time / spans);
        sheet_cell(s, "%s", k < jobs ? name_of(r, what.sum[k].b) : "");
        sheet_cell(s, "%s", idle_causes[of->a].explained);
        if (of->a == ISSUED_LATE)
            early_cell(s, &ahead, spans);
        else
            sheet_cell(s, "%s", idle_causes[of->a].remedy);
        sheet_row(s, share(of->time, idle_time));
    }
    sums_free(&cause);
    sums_free(&what);
    return sheet_table_end(s, "causes") && ok;
}

static int by_length(const void *a, const void *b)
{
    const idle *i = *(idle *const *)a, *k = *(idle *const *)b;
    const double s = i->end - i->begin, t = k->end - k->begin;
    return s != t ? (s < t) - (s > t) : (i > k) - (i < k);
}

static bool write_gaps(sheet *s, const recording *r, const waiting *w)
{
    const idle **gap = kn_host_alloc((size_t)(w->idles + 1) * sizeof *gap);
    for (int64_t i = 0; gap && i < w->idles; i++)
        gap[i] = &w->idle[i];
    if (gap && w->idles > 0)
        qsort(gap, (size_t)w->idles, sizeof *gap, by_length);
    sheet_table(s, "The longest pieces",
                COLUMNS("rank", "#at, us", "#idle, us", "cause", "waits for", "in"));
    for (int64_t i = 0; gap && i < w->idles && i < MOST_ROWS; i++) {
        sheet_cell(s, "%d", gap[i]->rank);
        sheet_cell(s, "%.1f", gap[i]->begin);
        sheet_cell(s, "%.1f", gap[i]->end - gap[i]->begin);
        sheet_cell(s, "%s", idle_causes[gap[i]->cause].name);
        sheet_cell(s, "%s", awaited_name(r, gap[i]));
        sheet_cell(s, "%s", gap[i]->backward ? "backward" : "");
        sheet_row(s, share(gap[i]->end - gap[i]->begin, gap[0]->end - gap[0]->begin));
    }
    kn_host_free(gap);
    return sheet_table_end(s, "gaps") && gap;
}

static bool write_waiting(sheet *s, const recording *r, const waiting *w)
{
    double time = 0, busy = 0;
    for (int64_t i = 0; i < w->steps; i++) {
        time += w->step[i].end - w->step[i].begin;
        busy += w->step[i].busy;
    }
    sheet_sentence(s, "Compute was idle for %.1f of %.1f us (%.1f %%), over all ranks and steps.",
                   time - busy, time, 100 * share(time - busy, time));
    return write_causes(s, r, w, time - busy) && write_gaps(s, r, w);
}

/* ---- the run --------------------------------------------------------------------------------- */

static int by_number(const void *a, const void *b)
{
    const step_span *s = a, *t = b;
    return s->number != t->number ? (s->number > t->number) - (s->number < t->number)
                                  : s->rank - t->rank;
}

/* The events that tell numbers of steps. */
typedef struct numbers {
    const event **of;
    int64_t count, room;
} numbers;

static bool find_numbers(numbers *n, const recording *r)
{
    for (int64_t i = 0; i < r->events; i++) {
        if (r->event[i].k != NUMBER)
            continue;
        if (!kn_host_grow(&n->of, &n->room, n->count + 1, sizeof *n->of))
            return false;
        n->of[n->count++] = &r->event[i];
    }
    return true;
}

/* Of a step, on the first rank that tells it; NULL where none does. */
static const event *number_of(const numbers *n, const recording *r, int64_t step, const char *name)
{
    for (int64_t i = 0; i < n->count; i++)
        if (strcmp(name_of(r, n->of[i]->w), name) == 0 && atoll(name_of(r, n->of[i]->c)) == step)
            return n->of[i];
    return NULL;
}

static void number_cell(sheet *s, const recording *r, const event *e)
{
    if (!e || e->x)
        sheet_cell(s, "%s", e ? name_of(r, e->x) : "unknown");
    else
        sheet_cell(s, "%.5g", e->n);
}

/* One row: the step on all its ranks, from step[0] on. */
static void write_step(sheet *s, const recording *r, const numbers *n, const step_span *step,
                       int64_t ranks)
{
    double longest = 0, time = 0, busy = 0, flops = 0, ideal = 0;
    for (int64_t k = 0; k < ranks; k++) {
        longest = fmax(longest, step[k].end - step[k].begin);
        time += step[k].end - step[k].begin;
        busy += step[k].busy;
        flops += step[k].flops;
        ideal += step[k].ideal;
    }
    const event *items = number_of(n, r, step->number, "items");
    sheet_cell(s, "%lld", (long long)step->number);
    sheet_cell(s, "%.3f", longest / 1e3);
    sheet_cell(s, "%.1f", 100 * share(busy, time));
    number_cell(s, r, number_of(n, r, step->number, "loss"));
    number_cell(s, r, number_of(n, r, step->number, "lr"));
    number_cell(s, r, number_of(n, r, step->number, "norm"));
    sheet_cell(s, items ? "%.0f" : "unknown", items ? share(items->n, longest / 1e6) : 0);
    sheet_cell(s, "%.2f", share(flops, longest) / 1e3);
    sheet_cell(s, ideal > 0 ? "%.1f" : "unknown", 100 * share(ideal, time));
    sheet_row(s, 0);
}

static bool write_run(sheet *s, const recording *r, const waiting *w)
{
    numbers n = { 0 };
    if (*head_text(r, "command"))
        sheet_sentence(s, "%s", head_text(r, "command"));
    sheet_sentence(s, "%d %s, %s, %s clock, %.0f %s each", r->ranks,
                   r->ranks == 1 ? "rank" : "ranks", head_text(r, "device"), head_text(r, "clock"),
                   head_number(r, "", "threads"),
                   head_number(r, "", "threads") == 1 ? "thread" : "threads");
    step_span *step = kn_host_alloc((size_t)(w->steps + 1) * sizeof *step);
    bool ok = step && find_numbers(&n, r);
    if (ok && w->steps > 0) {
        memcpy(step, w->step, (size_t)w->steps * sizeof *step);
        qsort(step, (size_t)w->steps, sizeof *step, by_number);
    }
    sheet_table(s, "Steps",
                COLUMNS("step", "#ms", "#compute busy, %", "#loss", "#rate", "#norm", "#items/s",
                        "#GFLOP/s", "#of the roofline, %"));
    for (int64_t i = 0, k; ok && i < w->steps; i = k) {
        for (k = i + 1; k < w->steps && step[k].number == step[i].number; k++)
            ;
        write_step(s, r, &n, step + i, k - i);
    }
    kn_host_free(step);
    kn_host_free(n.of);
    return sheet_table_end(s, "steps") && ok;
}

bool facts_write(sheet *s, recording *r, const waiting *w)
{
    sheet_part(s, "step", "The step", "What each stream of each rank did, event by event.");
    write_order(s, r);
    bool ok = write_units(s, r) && write_streams(s, r, w) && write_operations(s, r);
    sheet_part_end(s);
    sheet_part(s, "memory", "The memory", "Bytes that live on a rank, by category.");
    ok = ok && facts_of_memory(s, r);
    sheet_part_end(s);
    sheet_part(s, "waiting", "The waiting", "Every idle microsecond of compute has one cause.");
    ok = ok && write_waiting(s, r, w);
    sheet_part_end(s);
    sheet_part(s, "run", "The run", "Its steps, in numbers.");
    ok = ok && write_run(s, r, w);
    sheet_part_end(s);
    return ok;
}
