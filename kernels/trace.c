/* kernels/trace.c: the stream of events of a context. A ring keeps the last ones, or it grows and
 * keeps all; kn_trace_write turns them into Chrome's trace format (about:tracing, Perfetto). */
#include "kernels/device.h"
#include "kernels/trace_internal.h"
#include "kernels/kernels_internal.h"
#include "kernels/memory_internal.h"

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

double kn_now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

void kn_sleep(double seconds)
{
    struct timespec t = { .tv_sec = (time_t)seconds };
    t.tv_nsec = (long)((seconds - (double)t.tv_sec) * 1e9);
    while (nanosleep(&t, &t) != 0)
        ;
}

/* ---- words ----------------------------------------------------------------------------------- */

/* Each word stands once, in one text; events hold its place there, since they repeat their
 * words. */
typedef struct words {
    char *text; /* begins with the empty word */
    int64_t length, room;
    uint32_t *place; /* a hash table, at most half full; 0: free */
    size_t places, count;
} words;

static uint32_t *find(const words *w, const char *word)
{
    size_t i = kn_hash_string(word) & (w->places - 1);
    while (w->place[i] && strcmp(w->text + w->place[i], word) != 0)
        i = (i + 1) & (w->places - 1);
    return &w->place[i];
}

static bool widen(words *w)
{
    words next = *w;
    next.places = w->places ? 2 * w->places : 256;
    next.place = kn_host_calloc(next.places, sizeof *next.place);
    if (!next.place)
        return false;
    for (size_t i = 0; i < w->places; i++)
        if (w->place[i])
            *find(&next, w->text + w->place[i]) = w->place[i];
    kn_host_free(w->place);
    *w = next;
    return true;
}

/* 0, the empty word, also where there is no memory for another. */
static uint32_t word_at(words *w, const char *word)
{
    if (!word || !*word || (2 * w->count >= w->places && !widen(w)))
        return 0;
    uint32_t *at = find(w, word);
    const int64_t begin = w->length ? w->length : 1, end = begin + (int64_t)strlen(word) + 1;
    if (*at || end > UINT32_MAX || !kn_host_grow(&w->text, &w->room, end, 1))
        return *at;
    w->text[0] = 0;
    memcpy(w->text + begin, word, (size_t)(end - begin));
    w->length = end;
    w->count++;
    return *at = (uint32_t)begin;
}

/* ---- keeping --------------------------------------------------------------------------------- */

typedef struct slot {
    kn_trace_kind kind;
    bool backward;
    uint32_t what, provider, stream, path, detail, source;
    double begin, end, issued, flops, bytes, number;
} slot;

struct kn_trace {
    int64_t capacity, room;
    int64_t added; /* since the start; the last capacity of them are kept */
    slot *ring;
    words words;
    kn_device clock;
};

const char *kn_trace_kind_name(kn_trace_kind kind)
{
    static const char *const name[KN_TRACE_KINDS] = {
        [KN_TRACE_RUN] = "run",     [KN_TRACE_WAIT] = "wait", [KN_TRACE_CALL] = "call",
        [KN_TRACE_VERB] = "verb",   [KN_TRACE_TAKE] = "take", [KN_TRACE_GIVE] = "give",
        [KN_TRACE_VALUE] = "value", [KN_TRACE_STEP] = "step", [KN_TRACE_NUMBER] = "number",
    };
    return (unsigned)kind < KN_TRACE_KINDS ? name[kind] : "unknown";
}

static void trace_free(struct kn_trace *t)
{
    if (!t)
        return;
    kn_host_free(t->ring);
    kn_host_free(t->words.text);
    kn_host_free(t->words.place);
    kn_host_free(t);
}

static void start(unsigned kinds, int64_t capacity, int64_t room, kn_device clock)
{
    kn_context *c = kn_context_get();
    if (c->recording) {
        kn_fail("kn_trace_start: a recording has the events; end it first (kn_record_stop)");
        return;
    }
    kn_trace_stop(NULL);
    struct kn_trace *t = kn_host_calloc(1, sizeof *t);
    if (!t || !kn_host_grow(&t->ring, &t->room, room, sizeof *t->ring)) {
        trace_free(t);
        return;
    }
    t->room = room;
    t->capacity = capacity;
    t->clock = clock;
    pthread_mutex_lock(&c->trace_lock);
    c->trace = t;
    pthread_mutex_unlock(&c->trace_lock);
    atomic_store(&c->tracing, kinds);
}

#define MOST (INT64_MAX / 4 / (int64_t)sizeof(slot))

void kn_trace_start(size_t capacity)
{
    if (capacity == 0 || capacity > (size_t)MOST)
        kn_fail("kn_trace_start: a capacity of %zu events; from 1 up to what fits into memory",
                capacity);
    else
        start(1u << KN_TRACE_RUN, (int64_t)capacity, (int64_t)capacity, KN_CPU);
}

void kn_trace_watch(unsigned kinds, kn_device clock)
{
    if (kinds == 0 || kinds >> KN_TRACE_KINDS)
        kn_fail("kn_trace_watch: the kinds are %#x, no sum of 1 << kind for kinds of kn_trace_kind",
                kinds);
    else
        start(kinds, MOST, 4096, clock);
}

static _Thread_local bool muted; /* by kn_trace_mute */

void kn_trace_mute(bool mute)
{
    muted = mute;
}

static bool keeps(const kn_context *c, kn_trace_kind kind)
{
    return !muted && atomic_load_explicit(&c->tracing, memory_order_relaxed) >> kind & 1;
}

bool kn_trace_sees(kn_trace_kind kind)
{
    return keeps(kn_context_get(), kind);
}

bool kn_tracing(void)
{
    return kn_trace_sees(KN_TRACE_RUN);
}

/* A ring that can't grow any more forgets its oldest event. */
static slot *next_slot(struct kn_trace *t)
{
    if (t->added == t->room && t->room < t->capacity &&
        !kn_host_grow(&t->ring, &t->room, t->room + 1, sizeof *t->ring))
        t->capacity = t->room;
    return &t->ring[t->added++ % t->room];
}

static double now(const kn_context *c)
{
    if (c->trace->clock != KN_META)
        return kn_now();
    return c->compute[KN_META] ? kn_meta_clock(c->compute[KN_META]) : 0;
}

static _Thread_local double issued; /* when the job was, that this worker runs */

void kn_trace_issued(double at)
{
    issued = at;
}

void kn_trace_put(const kn_stream *s, kn_trace_event e)
{
    kn_context *c = s ? s->context : kn_context_get();
    if (!keeps(c, e.kind))
        return;
    if (kn_context_is_worker()) {
        e.issued = issued;
    } else if (!e.path) {
        e.path = kn_context_path(c);
        e.backward = c->engine != NULL;
    }
    pthread_mutex_lock(&c->trace_lock);
    struct kn_trace *t = c->trace;
    if (t) {
        words *w = &t->words;
        if (e.begin == 0 && e.end == 0)
            e.begin = e.end = now(c);
        *next_slot(t) = (slot){ .kind = e.kind,
                                .backward = e.backward,
                                .what = word_at(w, e.what),
                                .provider = word_at(w, e.provider),
                                .stream = word_at(w, e.stream ? e.stream
                                                     : s      ? s->name
                                                              : "host"),
                                .path = word_at(w, e.path),
                                .detail = word_at(w, e.detail),
                                .source = word_at(w, e.source),
                                .begin = e.begin,
                                .end = e.end,
                                .issued = e.issued,
                                .flops = e.flops,
                                .bytes = e.bytes,
                                .number = e.number };
    }
    pthread_mutex_unlock(&c->trace_lock);
}

void kn_trace_add(const char *what, const char *provider, const kn_stream *s, double begin,
                  double end, double flops, double bytes)
{
    kn_trace_put(s, (kn_trace_event){ .what = what,
                                      .provider = provider,
                                      .begin = begin,
                                      .end = end,
                                      .flops = flops,
                                      .bytes = bytes });
}

static int64_t kept(const struct kn_trace *t)
{
    return t->added < t->room ? t->added : t->room;
}

/* The i-th kept event, oldest first. */
static const slot *nth(const struct kn_trace *t, int64_t i)
{
    return &t->ring[(t->added - kept(t) + i) % t->room];
}

/* Its words lie in text. */
static kn_trace_event event_of(const slot *s, const char *text)
{
    return (kn_trace_event){ .what = text + s->what,
                             .provider = text + s->provider,
                             .stream = text + s->stream,
                             .begin = s->begin,
                             .end = s->end,
                             .flops = s->flops,
                             .bytes = s->bytes,
                             .kind = s->kind,
                             .path = text + s->path,
                             .detail = text + s->detail,
                             .source = text + s->source,
                             .issued = s->issued,
                             .number = s->number,
                             .backward = s->backward };
}

/* One block that holds the events and, behind them, their words. */
static kn_trace_event *copy_out(const struct kn_trace *t)
{
    const int64_t n = kept(t);
    const size_t length = (size_t)t->words.length;
    kn_trace_event *events = kn_host_alloc((size_t)n * sizeof *events + length + 1);
    if (!events)
        return NULL;
    char *text = (char *)(events + n);
    text[length] = 0;
    if (length)
        memcpy(text, t->words.text, length);
    for (int64_t i = 0; i < n; i++)
        events[i] = event_of(nth(t, i), text);
    return events;
}

/* Devices that keep their own time enter their events. */
static void flush(kn_context *c)
{
    for (kn_stream *s = kn_context_is_worker() ? NULL : c->streams; s; s = s->next)
        if (s->table->trace_flush)
            s->table->trace_flush(s);
}

size_t kn_trace_stop(kn_trace_event **events)
{
    kn_context *c = kn_context_get();
    if (events)
        flush(c);
    atomic_store(&c->tracing, 0);
    pthread_mutex_lock(&c->trace_lock);
    struct kn_trace *t = c->trace;
    c->trace = NULL;
    pthread_mutex_unlock(&c->trace_lock);
    if (events)
        *events = t ? copy_out(t) : NULL;
    size_t n = t && events && *events ? (size_t)kept(t) : 0;
    trace_free(t);
    return n;
}

/* ---- Chrome's trace format --------------------------------------------------------------- */

void kn_json_string(FILE *f, const char *s)
{
    fputc('"', f);
    for (; *s; s++) {
        if (*s == '"' || *s == '\\')
            fprintf(f, "\\%c", *s);
        else if ((unsigned char)*s < 0x20)
            fprintf(f, "\\u%04x", (unsigned)*s);
        else
            fputc(*s, f);
    }
    fputc('"', f);
}

/* A stream's row: the place of the first event that ran on it. */
static int64_t row_of(const struct kn_trace *t, int64_t i)
{
    int64_t row = 0;
    while (row < i &&
           (nth(t, row)->kind != KN_TRACE_RUN || nth(t, row)->stream != nth(t, i)->stream))
        row++;
    return row;
}

static void write_row_name(FILE *f, int rank, int64_t row, const char *name)
{
    fprintf(f, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%lld,\"args\":{\"name\":",
            rank, (long long)row);
    kn_json_string(f, name);
    fputs("}},\n", f);
}

/* Times in Chrome's format are microseconds. */
static void write_event(FILE *f, int rank, int64_t row, const kn_trace_event *e)
{
    fputs("{\"name\":", f);
    kn_json_string(f, e->what);
    fputs(",\"cat\":", f);
    kn_json_string(f, e->provider);
    fprintf(f,
            ",\"ph\":\"X\",\"pid\":%d,\"tid\":%lld,\"ts\":%.3f,\"dur\":%.3f,"
            "\"args\":{\"flops\":%.17g,\"bytes\":%.17g}}",
            rank, (long long)row, 1e6 * e->begin, 1e6 * (e->end - e->begin), e->flops, e->bytes);
}

static void write_all(FILE *f, int rank, const struct kn_trace *t)
{
    bool any = false;
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", f);
    for (int64_t i = 0; t && i < kept(t); i++) {
        const kn_trace_event e = event_of(nth(t, i), t->words.text ? t->words.text : "");
        if (e.kind != KN_TRACE_RUN)
            continue;
        const int64_t row = row_of(t, i);
        fputs(any ? ",\n" : "", f);
        any = true;
        if (row == i)
            write_row_name(f, rank, row, e.stream);
        write_event(f, rank, row, &e);
    }
    fputs(any ? "\n]}\n" : "]}\n", f);
}

bool kn_trace_write(const char *path)
{
    if (!kn_given_path(path, "kn_trace_write", "the path"))
        return false;
    kn_context *c = kn_context_get();
    flush(c);
    FILE *f = fopen(path, "w");
    if (!f)
        return kn_fail("kn_trace_write: %s: %s; choose a path that can be written", path,
                       strerror(errno));
    pthread_mutex_lock(&c->trace_lock);
    write_all(f, c->rank, c->trace);
    pthread_mutex_unlock(&c->trace_lock);
    bool bad = ferror(f) != 0;
    bad |= fclose(f) != 0;
    return !bad || kn_fail("kn_trace_write: %s: %s; is the disk full?", path, strerror(errno));
}
