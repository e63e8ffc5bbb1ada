/* fsdp/explain.c: the schedule of a step as text, read from its events: one line of letters, or a
 * sentence an event. */
#include "fsdp/record.h"
#include "kernels/error.h"
#include "kernels/trace_internal.h"

#include <stdio.h>
#include <string.h>

/* ---- names ----------------------------------------------------------------------------------- */

/* Units are those that a verb speaks of. A root is called by its class there, and has no path. */
typedef struct names {
    const kn_trace_event *event;
    size_t events;
    size_t same; /* so many first characters are the same in all paths with a dot */
} names;

static bool is_unit(const names *n, const kn_trace_event *call)
{
    const char *name = *call->path ? call->path : call->provider;
    for (size_t i = 0; i < n->events; i++)
        if (n->event[i].kind == KN_TRACE_VERB && strcmp(n->event[i].path, name) == 0)
            return true;
    return false;
}

static bool is_root(const names *n, const char *unit)
{
    for (size_t i = 0; i < n->events; i++)
        if (n->event[i].kind == KN_TRACE_CALL && !*n->event[i].path)
            return strcmp(n->event[i].provider, unit) == 0;
    return false;
}

/* Up to the last dot that all paths of units with a dot share. */
static size_t shared(const names *n)
{
    const char *first = NULL;
    size_t same = 0;
    for (size_t i = 0; i < n->events; i++) {
        const char *path = n->event[i].path;
        if (n->event[i].kind != KN_TRACE_VERB || !strchr(path, '.'))
            continue;
        if (!first)
            same = (size_t)(strrchr(first = path, '.') - path) + 1;
        while (same > 0 && (strncmp(first, path, same) != 0 || first[same - 1] != '.'))
            same--;
    }
    return same;
}

static const char *short_name(const names *n, const char *unit)
{
    if (is_root(n, unit))
        return "root";
    return strchr(unit, '.') && strlen(unit) > n->same ? unit + n->same : unit;
}

static names names_of(const kn_trace_event *event, size_t events)
{
    names n = { event, events, 0 };
    n.same = shared(&n);
    return n;
}

/* ---- the line -------------------------------------------------------------------------------- */

static char letter_of(const names *n, const kn_trace_event *e)
{
    if (e->kind == KN_TRACE_VERB)
        return strcmp(e->what, "gather") == 0 ? 'g' : strcmp(e->what, "reduce") == 0 ? 's' : 0;
    if (e->kind != KN_TRACE_CALL || !is_unit(n, e))
        return 0;
    return strcmp(e->what, "forward") == 0 ? 'F' : strcmp(e->what, "backward") == 0 ? 'B' : 0;
}

char *kn_explain_line(const kn_trace_event *event, size_t events, char *text, size_t size)
{
    if (!text || (!event && events > 0)) {
        kn_fail("kn_explain_line: the %s is NULL", text ? "list of events" : "text");
        return text;
    }
    const names n = names_of(event, events);
    size_t used = 0;
    if (size > 0)
        text[0] = 0;
    for (size_t i = 0; i < events && used < size; i++) {
        const char letter = letter_of(&n, &event[i]);
        const char *name = *event[i].path ? event[i].path : event[i].provider;
        if (letter)
            used += (size_t)snprintf(text + used, size - used, "%s%c%s", used ? " " : "", letter,
                                     short_name(&n, name));
    }
    if (used >= size && size > 3)
        memcpy(text + size - 4, "...", 4);
    return text;
}

/* ---- sentences ------------------------------------------------------------------------------- */

/* Kernels since the last sentence, of one stream. */
typedef struct work {
    const char *stream;
    int count;
    double seconds;
} work;

enum { STREAMS = 8 };

typedef struct telling {
    FILE *out;
    double zero;
    work of[STREAMS];
} telling;

static void tell_work(telling *t)
{
    for (int i = 0; i < STREAMS; i++)
        if (t->of[i].count)
            fprintf(t->out, "%14s %s ran %d piece%s of work in %.3f ms\n", "", t->of[i].stream,
                    t->of[i].count, t->of[i].count == 1 ? "" : "s", 1e3 * t->of[i].seconds);
    memset(t->of, 0, sizeof t->of);
}

static void count_work(telling *t, const kn_trace_event *e)
{
    int i = 0;
    while (i < STREAMS - 1 && t->of[i].count && strcmp(t->of[i].stream, e->stream) != 0)
        i++;
    t->of[i].stream = e->stream;
    t->of[i].count++;
    t->of[i].seconds += e->end - e->begin;
}

static void tell(telling *t, const kn_trace_event *e, const char *name)
{
    static const struct {
        const char *what, *text;
    } verbs[] = { { "gather", "its whole parameters are on their way" },
                  { "gathered", "its whole parameters are there" },
                  { "release", "gives its whole parameters back" },
                  { "reduce", "its gradients are on their way" },
                  { "reduced", "its gradients are reduced, and whole ones given back" } };
    if (e->kind == KN_TRACE_WAIT) {
        fprintf(t->out, "%11.3f ms %s waits %.3f ms for %s\n", 1e3 * (e->begin - t->zero),
                e->stream, 1e3 * (e->end - e->begin), e->what);
        return;
    }
    fprintf(t->out, "%11.3f ms %s: ", 1e3 * (e->begin - t->zero), name);
    if (e->kind == KN_TRACE_CALL) {
        fprintf(t->out, "%s%s%s\n", e->what, strstr(e->what, " end") ? "s" : " begins",
                e->backward && strncmp(e->what, "forward", 7) == 0 ? ", once more for backward"
                                                                   : "");
        return;
    }
    for (size_t i = 0; i < sizeof verbs / sizeof *verbs; i++)
        if (strcmp(e->what, verbs[i].what) == 0)
            fprintf(t->out, "%s, %.0f bytes", verbs[i].text, e->bytes);
    fprintf(t->out, ": %s (%s)\n", e->detail, e->source);
}

/* Whether path is unit's, or below it. */
static bool belongs(const char *path, const char *unit)
{
    const size_t n = strlen(unit);
    return strncmp(path, unit, n) == 0 && (path[n] == 0 || path[n] == '.');
}

void kn_explain(FILE *out, const kn_trace_event *event, size_t events, const char *unit)
{
    if (!out || (!event && events > 0)) {
        kn_fail("kn_explain: the %s is NULL", out ? "list of events" : "file");
        return;
    }
    const names n = names_of(event, events);
    telling t = { .out = out, .zero = events ? event[0].begin : 0 };
    for (size_t i = 0; i < events; i++) {
        const kn_trace_event *e = &event[i];
        const char *name = *e->path ? e->path : e->provider;
        if ((unit && !belongs(name, unit)) || kn_trace_wraps(e))
            continue;
        if (e->kind == KN_TRACE_RUN) {
            count_work(&t, e);
        } else if (e->kind == KN_TRACE_VERB || e->kind == KN_TRACE_WAIT ||
                   (e->kind == KN_TRACE_CALL && is_unit(&n, e))) {
            tell_work(&t);
            tell(&t, e, name);
        }
    }
    tell_work(&t);
}
