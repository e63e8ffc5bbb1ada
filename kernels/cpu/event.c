/* kernels/cpu/event.c: events of the CPU. An event holds a stream and the number of its jobs at the
 * recording; it has happened when the stream has done as many. So recording puts nothing into the
 * queue, and recording again forgets the former place. */
#include "kernels/cpu/cpu_internal.h"

typedef struct cpu_event {
    kn_event base;
    pthread_mutex_t lock;
    kn_cpu_stream *stream; /* a reference; NULL: never recorded, or on an inline stream */
    uint64_t seq;
} cpu_event;

kn_event *kn_cpu_event_create(void)
{
    cpu_event *e = kn_host_calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->base.table = &kn_cpu_table;
    pthread_mutex_init(&e->lock, NULL);
    return &e->base;
}

/* Moves the event to another place, which may be nowhere. */
static void place(cpu_event *e, kn_cpu_stream *stream, uint64_t seq)
{
    pthread_mutex_lock(&e->lock);
    kn_cpu_stream *before = e->stream;
    e->stream = stream;
    e->seq = seq;
    pthread_mutex_unlock(&e->lock);
    if (before)
        kn_cpu_stream_release(before);
}

/* The event's place with a reference of the caller's own. */
static kn_cpu_stream *look(cpu_event *e, uint64_t *seq)
{
    pthread_mutex_lock(&e->lock);
    kn_cpu_stream *stream = e->stream;
    *seq = e->seq;
    if (stream)
        kn_cpu_stream_hold(stream);
    pthread_mutex_unlock(&e->lock);
    return stream;
}

void kn_cpu_event_destroy(kn_event *event)
{
    cpu_event *e = (cpu_event *)event;
    place(e, NULL, 0);
    pthread_mutex_destroy(&e->lock);
    kn_host_free(e);
}

bool kn_cpu_event_record(kn_event *event, kn_stream *s)
{
    kn_cpu_stream *stream = (kn_cpu_stream *)s;
    if (!stream->worker) {
        place((cpu_event *)event, NULL, 0);
        return true;
    }
    kn_cpu_stream_hold(stream);
    place((cpu_event *)event, stream, kn_cpu_stream_seq(stream));
    return true;
}

bool kn_cpu_event_wait(kn_event *event, kn_stream *s)
{
    uint64_t seq;
    kn_cpu_stream *other = look((cpu_event *)event, &seq);
    if (!other)
        return true;
    kn_cpu_stream_wait((kn_cpu_stream *)s, other, seq);
    kn_cpu_stream_release(other);
    return true;
}

bool kn_cpu_event_sync(kn_event *event)
{
    uint64_t seq;
    kn_cpu_stream *other = look((cpu_event *)event, &seq);
    if (!other)
        return true;
    kn_cpu_stream_host_waits(other, seq);
    kn_cpu_stream_release(other);
    return true;
}

bool kn_cpu_event_done(kn_event *event)
{
    uint64_t seq;
    kn_cpu_stream *other = look((cpu_event *)event, &seq);
    if (!other)
        return true;
    bool done = kn_cpu_stream_past(other, seq);
    kn_cpu_stream_release(other);
    return done;
}
