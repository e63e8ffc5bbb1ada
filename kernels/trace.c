/* kernels/trace.c: events: kernel, provider, time, stream. A ring keeps the last events of a
 * context; kn_trace_write turns them into Chrome's trace format (about:tracing, Perfetto). */
#include "kernels/trace.h"
#include "kernels/kernels_internal.h"

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

/* An event with its words copied: streams and labels may be gone when the trace is read. */
typedef struct slot {
    kn_trace_event event;
    char what[96], provider[16], stream[32];
} slot;

struct kn_trace {
    size_t capacity;
    uint64_t added; /* since the start; the last capacity of them are kept */
    slot ring[];
};

void kn_trace_start(size_t capacity)
{
    kn_context *c = kn_context_get();
    kn_trace_stop(NULL);
    if (capacity == 0 || capacity > SIZE_MAX / 2 / sizeof(slot)) {
        kn_fail("kn_trace_start: a capacity of %zu events; from 1 up to what fits into memory",
                capacity);
        return;
    }
    struct kn_trace *t = kn_host_alloc(sizeof *t + capacity * sizeof *t->ring);
    if (!t)
        return;
    t->capacity = capacity;
    t->added = 0;
    pthread_mutex_lock(&c->lock);
    c->trace = t;
    pthread_mutex_unlock(&c->lock);
    atomic_store(&c->tracing, true);
}

bool kn_tracing(void)
{
    return atomic_load_explicit(&kn_context_get()->tracing, memory_order_relaxed);
}

static void fill(slot *at, const char *what, const char *provider, const char *stream)
{
    snprintf(at->what, sizeof at->what, "%s", what);
    snprintf(at->provider, sizeof at->provider, "%s", provider ? provider : "");
    snprintf(at->stream, sizeof at->stream, "%s", stream);
}

void kn_trace_add(const char *what, const char *provider, const kn_stream *s, double begin,
                  double end, double flops, double bytes)
{
    kn_context *c = s ? s->context : kn_context_get();
    pthread_mutex_lock(&c->lock);
    struct kn_trace *t = c->trace;
    if (t) {
        slot *at = &t->ring[t->added++ % t->capacity];
        fill(at, what, provider, s ? s->name : "host");
        at->event = (kn_trace_event){ .begin = begin, .end = end, .flops = flops, .bytes = bytes };
    }
    pthread_mutex_unlock(&c->lock);
}

static size_t kept(const struct kn_trace *t)
{
    return t->added < t->capacity ? (size_t)t->added : t->capacity;
}

/* The i-th kept event, oldest first. */
static const slot *nth(const struct kn_trace *t, size_t i)
{
    return &t->ring[(t->added - kept(t) + i) % t->capacity];
}

/* One block that holds the events and, behind them, their words. */
static kn_trace_event *copy_out(const struct kn_trace *t)
{
    size_t n = kept(t);
    kn_trace_event *events = kn_host_alloc(n * (sizeof *events + sizeof(slot)));
    if (!events)
        return NULL;
    slot *words = (slot *)(events + n);
    for (size_t i = 0; i < n; i++) {
        words[i] = *nth(t, i);
        events[i] = words[i].event;
        events[i].what = words[i].what;
        events[i].provider = words[i].provider;
        events[i].stream = words[i].stream;
    }
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
    atomic_store(&c->tracing, false);
    pthread_mutex_lock(&c->lock);
    struct kn_trace *t = c->trace;
    c->trace = NULL;
    pthread_mutex_unlock(&c->lock);
    if (events)
        *events = t ? copy_out(t) : NULL;
    size_t n = t && events && *events ? kept(t) : 0;
    kn_host_free(t);
    return n;
}

/* ---- Chrome's trace format --------------------------------------------------------------- */

static void write_string(FILE *f, const char *s)
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

/* A stream's row: the place of the first event with its name. */
static size_t row_of(const struct kn_trace *t, size_t i)
{
    size_t row = 0;
    while (row < i && strcmp(nth(t, row)->stream, nth(t, i)->stream) != 0)
        row++;
    return row;
}

static void write_row_name(FILE *f, int rank, size_t row, const char *name)
{
    fprintf(f, "{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%zu,\"args\":{\"name\":",
            rank, row);
    write_string(f, name);
    fputs("}},\n", f);
}

/* Times in Chrome's format are microseconds. */
static void write_event(FILE *f, int rank, size_t row, const slot *s)
{
    fputs("{\"name\":", f);
    write_string(f, s->what);
    fputs(",\"cat\":", f);
    write_string(f, s->provider);
    fprintf(f,
            ",\"ph\":\"X\",\"pid\":%d,\"tid\":%zu,\"ts\":%.3f,\"dur\":%.3f,"
            "\"args\":{\"flops\":%.17g,\"bytes\":%.17g}}",
            rank, row, 1e6 * s->event.begin, 1e6 * (s->event.end - s->event.begin), s->event.flops,
            s->event.bytes);
}

static void write_all(FILE *f, int rank, const struct kn_trace *t)
{
    fputs("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", f);
    for (size_t i = 0; t && i < kept(t); i++) {
        size_t row = row_of(t, i);
        if (row == i)
            write_row_name(f, rank, row, nth(t, i)->stream);
        write_event(f, rank, row, nth(t, i));
        fputs(i + 1 < kept(t) ? ",\n" : "\n", f);
    }
    fputs("]}\n", f);
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
    pthread_mutex_lock(&c->lock);
    write_all(f, c->rank, c->trace);
    pthread_mutex_unlock(&c->lock);
    bool bad = ferror(f) != 0;
    bad |= fclose(f) != 0;
    return !bad || kn_fail("kn_trace_write: %s: %s; is the disk full?", path, strerror(errno));
}
