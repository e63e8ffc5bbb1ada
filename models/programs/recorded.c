/* models/programs/recorded.c: reads a recording. Everything in the file is a stranger's: the page
 * and the facts rely on what is checked here, and on nothing else. */
#include "models/programs/recorded.h"
#include "kernels/error_internal.h"
#include "kernels/memory_internal.h"
#include "tensor/files.h"
#include "tensor/json.h"

#include <math.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_RANKS = 4096 };
#define MOST_BYTES  ((size_t)4 << 30)
#define MOST_EVENTS 50000000
#define ANY         -1e15 /* of a time, which may be as far on the other side of 0 */

const char *const event_kinds[KINDS] = { "step", "call", "run",   "wait",   "verb",
                                         "take", "give", "value", "number", "note" };

/* clang-format off */
#define TEXT_KEY(key) { #key, offsetof(event, key), true, 0 }
#define NUMBER_KEY(key, least) { #key, offsetof(event, key), false, least }
const event_key event_keys[] = {
    TEXT_KEY(w), TEXT_KEY(s), TEXT_KEY(m), TEXT_KEY(c), TEXT_KEY(x),
    TEXT_KEY(p), TEXT_KEY(a), TEXT_KEY(o), TEXT_KEY(h), TEXT_KEY(v),
    NUMBER_KEY(t, ANY), NUMBER_KEY(d, 0), NUMBER_KEY(f, 0), NUMBER_KEY(b, 0), NUMBER_KEY(l, 0),
    NUMBER_KEY(q, ANY), NUMBER_KEY(n, ANY), { 0 }
};
/* clang-format on */

/* ---- names ----------------------------------------------------------------------------------- */

/* The number of a text; -1 with an error. */
static int32_t number_of(recording *r, const char *text)
{
    const struct kn_string *name = kn_strings_add(&r->names, text, strlen(text));
    return name ? (int32_t)(name - r->names.list) : -1;
}

/* ---- the first line -------------------------------------------------------------------------- */

/* A text of the head; "" where it is missing. */
static const char *head_text(const recording *r, const char *key)
{
    const char *text = json_string_value(json_object_get(r->head, key));
    return text ? text : "";
}

double head_number(const recording *r, const char *object, const char *key)
{
    const json_t *in = *object ? json_object_get(r->head, object) : r->head;
    return json_number_value(json_object_get(in, key));
}

/* As json_unpack; false with an error, which says what it was. */
static bool unpack(const recording *r, const json_t *j, const char *what, const char *form, ...)
{
    json_error_t e;
    va_list list;
    va_start(list, form);
    const bool ok = json_vunpack_ex((json_t *)j, &e, 0, form, list) == 0;
    va_end(list);
    return ok || kn_fail("%s, line 1: %s: %.150s", r->path, what, e.text);
}

static bool lies(const recording *r, const char *what, int64_t value, int64_t least, int64_t most)
{
    return (value >= least && value <= most) ||
           kn_fail("%s, line 1: %s: %lld isn't from %lld to %lld", r->path, what, (long long)value,
                   (long long)least, (long long)most);
}

/* By shard, the elements [begin, end) of the parameter that lie there. */
static bool check_param(const recording *r, const json_t *param, int shards)
{
    const char *name;
    json_int_t numel, begin, end, runs, every;
    json_t *shape, *parts;
    if (!unpack(r, param, "a parameter", "{s:s, s:I, s:o, s:o}", "name", &name, "numel", &numel,
                "shape", &shape, "parts", &parts))
        return false;
    if (!json_is_array(shape) || (int)json_array_size(parts) != shards)
        return kn_fail("%s, line 1: parameter %.100s must have a \"shape\" and %d \"parts\", one "
                       "a shard",
                       r->path, name, shards);
    for (int i = 0; i < shards; i++) {
        const json_t *part = json_array_get(parts, (size_t)i);
        runs = 1, every = 0; /* of several runs: from the begin of one to that of the next */
        if (!unpack(r, part, "a part", json_array_size(part) > 2 ? "[I, I, I, I]" : "[I, I]",
                    &begin, &end, &runs, &every) ||
            !lies(r, "the begin of a part", begin, 0, end) ||
            !lies(r, "the end of a part", end, begin, numel) ||
            !lies(r, "the runs of a part", runs, 0, numel) ||
            !lies(r, "the step of a part's runs", every, 0, numel))
            return false;
    }
    return true;
}

static bool check_bucket(const recording *r, const json_t *bucket, int shards)
{
    const char *dtype;
    json_int_t bytes;
    json_t *params, *param;
    size_t i;
    if (!unpack(r, bucket, "a bucket", "{s:s, s:s, s:s, s:I, s:o}", "master_dtype", &dtype,
                "param_dtype", &dtype, "reduce_dtype", &dtype, "full_bytes", &bytes, "params",
                &params) ||
        !lies(r, "full_bytes", bytes, 0, INT64_MAX))
        return false;
    json_array_foreach(params, i, param) if (!check_param(r, param, shards)) return false;
    return json_is_array(params) || kn_fail("%s, line 1: \"params\" must be a list", r->path);
}

static bool check_units(recording *r)
{
    const char *name;
    int replicas;
    json_t *unit, *bucket, *buckets;
    size_t i, k;
    const json_t *units = json_object_get(r->head, "units");
    json_array_foreach(units, i, unit)
    {
        if (!unpack(r, unit, "a unit", "{s:s, s:i, s:i, s:o}", "name", &name, "shards", &r->shards,
                    "replicas", &replicas, "buckets", &buckets) ||
            !lies(r, "a unit's shards", r->shards, 1, MOST_RANKS)) /* simulated ranks, too */
            return false;
        json_array_foreach(buckets, k,
                           bucket) if (!check_bucket(r, bucket, r->shards)) return false;
        if (!json_is_array(buckets))
            return kn_fail("%s, line 1: \"buckets\" must be a list", r->path);
    }
    return !units || json_is_array(units) ||
           kn_fail("%s, line 1: \"units\" must be a list", r->path);
}

/* Bytes live at the start, by rank and category. */
static bool check_live(const recording *r)
{
    size_t i;
    json_t *rank, *bytes;
    const char *category;
    const json_t *live = json_object_get(r->head, "live");
    if (live && (!json_is_array(live) || json_array_size(live) > (size_t)r->ranks))
        return kn_fail("%s, line 1: \"live\" must be a list of at most %d, the ranks", r->path,
                       r->ranks);
    json_array_foreach(live, i, rank) json_object_foreach(
        rank, category,
        bytes) if (!json_is_number(bytes) ||
                   json_number_value(bytes) <
                       0) return kn_fail("%s, line 1: \"live\" must count bytes by category",
                                         r->path);
    return true;
}

static bool is_no_recording(const recording *r, const char *why)
{
    return kn_fail("%s %s; give a file that --record of a trainer wrote", r->path, why);
}

static bool check_head(recording *r)
{
    int version;
    const char *kind = json_string_value(json_object_get(r->head, "knap"));
    if (!kind || strcmp(kind, "recording") != 0)
        return is_no_recording(r,
                               "is no recording: its first line isn't {\"knap\": \"recording\"}");
    if (!unpack(r, r->head, "the head", "{s:i, s:i}", "version", &version, "ranks", &r->ranks))
        return false;
    if (version != 1)
        return kn_fail("%s is a recording of version %d; this program reads version 1", r->path,
                       version);
    r->shards = r->ranks;
    r->inlines =
        strcmp(head_text(r, "device"), "cpu") == 0 && strcmp(head_text(r, "clock"), "virtual") != 0;
    return lies(r, "ranks", r->ranks, 1, MOST_RANKS) && check_units(r) && check_live(r);
}

/* ---- the events ------------------------------------------------------------------------------ */

/* The first eight elements, as one text. */
static bool elements(const json_t *list, char *text, size_t size)
{
    size_t i, used = 0;
    json_t *number;
    json_array_foreach(list, i, number)
    {
        if (i == 8)
            break;
        if (json_is_number(number))
            used += (size_t)snprintf(text + used, size - used, "%s%.6g", i ? " " : "",
                                     json_number_value(number));
        else
            used += (size_t)snprintf(text + used, size - used, "%s%.20s", i ? " " : "",
                                     json_is_string(number) ? json_string_value(number) : "?");
    }
    return json_is_array(list);
}

static bool take_key(recording *r, event *e, const event_key *key, const json_t *j, int64_t line)
{
    char eight[8 * 24] = "";
    void *to = (char *)e + key->at;
    const json_t *value = json_object_get(j, key->key);
    if (!value)
        return true;
    const bool any = e->k == NUMBER && key->at == offsetof(event, n); /* a norm may explode */
    if (any && json_is_string(value)) {
        e->x = number_of(r, json_string_value(value)); /* "nan", "inf" */
        return e->x >= 0;
    }
    if (!key->text) {
        const double x = json_number_value(value);
        const bool fits = x >= key->least && fabs(x) <= (key->least == ANY ? -ANY : 1e30);
        *(double *)to = x;
        return (json_is_number(value) && (any || fits)) ||
               kn_fail("%s, line %lld: \"%s\" must be a number%s", r->path, (long long)line,
                       key->key, key->least == 0 ? " of at least 0" : "");
    }
    const char *text = elements(value, eight, sizeof eight) ? eight : json_string_value(value);
    if (!text)
        return kn_fail("%s, line %lld: \"%s\" must be a text", r->path, (long long)line, key->key);
    return (*(int32_t *)to = number_of(r, text)) >= 0;
}

/* Kinds that a later version may add are left out. */
static bool add_event(recording *r, const json_t *j, int64_t line)
{
    const char *kind = json_string_value(json_object_get(j, "k"));
    const json_t *rank = json_object_get(j, "r");
    int k = 0;
    if (!kind || !json_is_number(json_object_get(j, "t")))
        return kn_fail("%s, line %lld: an event must have \"k\", a text, and \"t\", a number",
                       r->path, (long long)line);
    if (!json_is_integer(rank) || json_integer_value(rank) < 0 ||
        json_integer_value(rank) >= r->ranks)
        return kn_fail("%s, line %lld: \"r\" must be one of the recording's ranks, 0 to %d",
                       r->path, (long long)line, r->ranks - 1);
    while (k < KINDS && strcmp(kind, event_kinds[k]) != 0)
        k++;
    if (k == KINDS)
        return true;
    if (r->events == MOST_EVENTS)
        return kn_fail("%s, line %lld: that are more than %d events; record fewer steps", r->path,
                       (long long)line, MOST_EVENTS);
    event e = { .k = (event_kind)k, .r = (int32_t)json_integer_value(rank), .line = line };
    for (const event_key *key = event_keys; key->key; key++)
        if (!take_key(r, &e, key, j, line))
            return false;
    e.worker = !r->inlines || json_is_number(json_object_get(j, "q"));
    e.q = e.worker && e.q < e.t ? e.q : e.t;
    if (!kn_host_grow(&r->event, &r->room, r->events + 1, sizeof *r->event))
        return false;
    r->event[r->events++] = e;
    return true;
}

static bool read_line(recording *r, const char *text, size_t size, int64_t line)
{
    json_error_t error;
    json_t *j = kn_json_parse(text, size, JSON_REJECT_DUPLICATES, r->path, &error);
    if (!j && kn_ok() && line == 1)
        is_no_recording(r, "is no recording: its first line isn't JSON");
    if (!j && kn_ok())
        kn_fail("%s, line %lld is no JSON: %.150s", r->path, (long long)line, error.text);
    if (j && !json_is_object(j))
        kn_fail("%s, line %lld is no object of JSON", r->path, (long long)line);
    if (kn_ok() && line == 1) {
        r->head = json_incref(j);
        check_head(r);
    } else if (kn_ok()) {
        add_event(r, j, line);
    }
    json_decref(j);
    return kn_ok();
}

/* Those of one rank follow each other in the file, and a job is noted when it ends. */
static int by_time(const void *a, const void *b)
{
    const event *e = a, *o = b;
    return e->t != o->t ? (e->t > o->t) - (e->t < o->t) : (e->line > o->line) - (e->line < o->line);
}

bool recording_read(recording *r, const char *path)
{
    size_t size;
    *r = (recording){ .path = path };
    struct stat st;
    if (number_of(r, "") < 0)
        return false;
    if (kn_look(path, &st) == 0)
        return is_no_recording(r, "isn't there");
    char *text = kn_file_read(path, MOST_BYTES, &size);
    bool ok = text != NULL;
    int64_t line = 1;
    if (ok && size == 0)
        ok = kn_fail("%s is empty; --record of a trainer writes a recording", path);
    if (ok && text[size - 1] != '\n')
        ok = kn_fail("%s ends in the middle of a line: the recording was cut; record again", path);
    for (char *at = text, *end; ok && at < text + size; at = end + 1, line++) {
        end = memchr(at, '\n', (size_t)(text + size - at));
        ok = read_line(r, at, (size_t)(end - at), line);
    }
    if (ok && r->events == 0)
        ok = kn_fail("%s has no events: no step was recorded", path);
    if (ok)
        qsort(r->event, (size_t)r->events, sizeof *r->event, by_time);
    kn_host_free(text);
    return ok;
}

void recording_free(recording *r)
{
    json_decref(r->head);
    kn_host_free(r->event);
    kn_strings_free(&r->names);
}

bool is_collective(const recording *r, const event *e)
{
    static const char *const begin[] = { "all_gather", "all_reduce", "all_to_all", "reduce_scatter",
                                         "broadcast",  "barrier",    "agree",      NULL };
    bool any = false;
    for (int i = 0; begin[i]; i++)
        any |= strncmp(name_of(r, e->w), begin[i], strlen(begin[i])) == 0;
    return any;
}

bool recording_make(const char *command, const char *more, const char *path)
{
    const size_t size = strlen(command) + strlen(more) + strlen(path) + 32;
    char *text = kn_host_alloc(size);
    if (!text)
        return false;
    snprintf(text, size, "%s %s --record '%s' >&2", command, more, path);
    fflush(NULL);
    const int status = system(text);
    kn_host_free(text);
    return status == 0 || kn_fail("the command failed: %.300s", command);
}
