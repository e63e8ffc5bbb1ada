/* kernels/meta/table.c: the meta device computes nothing. Its memory hands out addresses without
 * bytes (the ledger still counts them), and a stream is a virtual clock that each kernel moves on
 * by launch + max(flops / rate, bytes / rate) seconds. So a schedule can be simulated for any
 * number of ranks, with a trace that looks like a real one.
 *
 * The host has a virtual clock too (kn_context.meta_host): launching costs it nothing, waiting for
 * a stream or an event moves it to that time, and a kernel never starts before it was launched. The
 * host's own computation (KN_STREAM_HOST) moves that clock on, at the host's rate; copies between
 * it and the device pass at the link's. */
#include "kernels/device.h"
#include "kernels/trace.h"
#include "kernels/checks.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>

typedef struct meta_stream {
    kn_stream base;
    double clock;
    bool host; /* its clock is the host's */
} meta_stream;

typedef struct meta_event {
    kn_event base;
    double time;
    char of[sizeof(((kn_stream *)0)->name)]; /* the stream that it was recorded on */
} meta_event;

/* The rates of one device: round figures of a current data-centre GPU. */
static double flops_rate = 1e14, bytes_rate = 2e12, launch_cost = 5e-6;
static double link_rate = 5e10, host_rate = 1e11;

void kn_meta_rates(double flops_per_s, double bytes_per_s, double launch_s)
{
    if (!(flops_per_s > 0) || !(bytes_per_s > 0) || !(launch_s >= 0)) {
        kn_fail("kn_meta_rates: rates must be positive: %g flops/s, %g bytes/s, %g s a launch",
                flops_per_s, bytes_per_s, launch_s);
        return;
    }
    flops_rate = flops_per_s;
    bytes_rate = bytes_per_s;
    launch_cost = launch_s;
}

void kn_meta_host_rates(double link_bytes_per_s, double host_bytes_per_s)
{
    if (!(link_bytes_per_s > 0) || !(host_bytes_per_s > 0)) {
        kn_fail(
            "kn_meta_host_rates: rates must be positive: %g bytes/s of the link, %g of the host",
            link_bytes_per_s, host_bytes_per_s);
        return;
    }
    link_rate = link_bytes_per_s;
    host_rate = host_bytes_per_s;
}

static double clock_of(const meta_stream *s)
{
    return s->host ? s->base.context->meta_host : s->clock;
}

/* Something takes so long on s, from now on; returns when it began. */
static double pass(meta_stream *s, double seconds)
{
    kn_context *c = kn_context_get();
    double begin = fmax(clock_of(s), c->meta_host);
    *(s->host ? &c->meta_host : &s->clock) = begin + seconds;
    return begin;
}

double kn_meta_clock(const kn_stream *s)
{
    return s && s->device == KN_META ? clock_of((const meta_stream *)s) : 0;
}

/* ---- memory ------------------------------------------------------------------------------ */

/* Addresses start beyond the memory of any process of today's machines, and are never reused. */
static _Atomic uint64_t next_address = (uint64_t)1 << 56;

static void *meta_take(kn_memory *self, size_t bytes)
{
    (void)self;
    return (void *)(uintptr_t)atomic_fetch_add(&next_address, bytes + KN_ALIGN);
}

static void meta_give(kn_memory *self, void *p, size_t bytes)
{
    (void)self, (void)p, (void)bytes;
}

static kn_memory memory = {
    .name = "meta memory", .device = KN_META, .take = meta_take, .give = meta_give
};

static kn_memory *meta_memory(void)
{
    return &memory;
}

static kn_memory pinned = { .name = "memory of meta's host",
                            .device = KN_META,
                            .take = meta_take,
                            .give = meta_give,
                            .pinned = true };

static kn_memory *meta_pinned(void)
{
    return &pinned;
}

static void meta_trim(void)
{
}

/* ---- streams ----------------------------------------------------------------------------- */

static bool meta_open(void)
{
    return true;
}

static kn_stream *stream_create(const char *name, kn_stream_kind kind)
{
    kn_context *c = kn_context_get();
    meta_stream *s = kn_host_calloc(1, sizeof *s);
    if (!s)
        return NULL;
    s->base = (kn_stream){ .table = &kn_meta_table, .device = KN_META, .context = c };
    snprintf(s->base.name, sizeof s->base.name, "%s", name);
    s->clock = c->meta_host;
    s->host = kind == KN_STREAM_HOST; /* else a clock is neither inline nor a thread */
    return &s->base;
}

static void stream_destroy(kn_stream *s)
{
    kn_host_free(s);
}

/* Time passes on it beside the other streams, as on a worker. */
static bool stream_is_inline(const kn_stream *s)
{
    (void)s;
    return false;
}

/* who: the stream that waits; NULL: the host. */
static void trace_wait(const kn_stream *who, const char *for_whom, double from, double until)
{
    if (until > from)
        kn_trace_put(who,
                     (kn_trace_event){
                         .kind = KN_TRACE_WAIT, .what = for_whom, .begin = from, .end = until });
}

static void host_waits_until(double time, const char *for_whom)
{
    kn_context *c = kn_context_get();
    trace_wait(NULL, for_whom, c->meta_host, time);
    c->meta_host = fmax(c->meta_host, time);
}

static bool stream_sync(kn_stream *s)
{
    host_waits_until(clock_of((meta_stream *)s), s->name);
    return kn_ok();
}

/* Host functions run at once and cost nothing. */
static bool stream_host(kn_stream *s, const char *what, kn_host_fn fn, const void *arg, size_t size)
{
    _Alignas(max_align_t) char copy[4096];
    if (size > sizeof copy)
        return kn_fail("%s: an argument of %zu bytes, a stream copies at most %zu", what, size,
                       sizeof copy);
    if (size > 0)
        memcpy(copy, arg, size);
    fn(copy);
    double now = clock_of((meta_stream *)s);
    if (kn_tracing())
        kn_trace_add(what, "host", s, now, now, 0, 0);
    return kn_ok();
}

static double compute(meta_stream *s, kn_cost cost)
{
    kn_context_get()->meta_flops += cost.flops;
    double seconds = launch_cost + fmax(cost.flops / flops_rate, cost.bytes / bytes_rate);
    return pass(s, s->host ? cost.bytes / host_rate : seconds);
}

void kn_meta_compute(kn_stream *stream, const char *what, kn_cost cost)
{
    meta_stream *s = (meta_stream *)stream;
    const double begin = compute(s, cost);
    if (kn_tracing())
        kn_trace_add(what, "meta", stream, begin, clock_of(s), cost.flops, cost.bytes);
}

static bool launch(kn_stream *stream, kn_kernel k, const void *args, size_t size)
{
    (void)size;
    const kn_cost cost = kn_kernel_cost(k, args);
    const double begin = compute((meta_stream *)stream, cost);
    if (kn_tracing())
        kn_trace_kernel("meta", stream, k, args, cost, begin, clock_of((meta_stream *)stream));
    return true;
}

static bool transfer(kn_stream *stream, void *dst, const void *src, size_t bytes, kn_way way,
                     bool held)
{
    static const char *const what[] = { [KN_TO_DEVICE] = "copy to device",
                                        [KN_TO_HOST] = "copy to host",
                                        [KN_WITHIN] = "copy within" };
    meta_stream *s = (meta_stream *)stream;
    (void)dst, (void)src, (void)held;
    double begin = pass(s, (double)bytes / (way == KN_WITHIN ? bytes_rate / 2 : link_rate));
    if (kn_tracing())
        kn_trace_add(what[way], "meta", stream, begin, clock_of(s), 0, (double)bytes);
    return true;
}

void kn_meta_advance(kn_stream *stream, const char *what, double seconds)
{
    if (!kn_given(stream, "kn_meta_advance", "the stream"))
        return;
    meta_stream *s = (meta_stream *)stream;
    double begin = pass(s, seconds);
    if (kn_tracing())
        kn_trace_add(what, "meta", stream, begin, clock_of(s), 0, 0);
}

/* ---- events ------------------------------------------------------------------------------ */

static kn_event *event_create(void)
{
    meta_event *e = kn_host_calloc(1, sizeof *e);
    if (!e)
        return NULL;
    e->base.table = &kn_meta_table;
    return &e->base;
}

static void event_destroy(kn_event *e)
{
    kn_host_free(e);
}

static bool event_record(kn_event *e, kn_stream *s)
{
    meta_event *event = (meta_event *)e;
    event->time = fmax(clock_of((meta_stream *)s), kn_context_get()->meta_host);
    memcpy(event->of, s->name, sizeof event->of);
    return true;
}

static bool event_wait(kn_event *e, kn_stream *s)
{
    meta_stream *stream = (meta_stream *)s;
    const meta_event *event = (const meta_event *)e;
    if (stream->host)
        host_waits_until(event->time, event->of);
    else
        trace_wait(s, event->of, fmax(stream->clock, kn_context_get()->meta_host), event->time);
    stream->clock = fmax(stream->clock, event->time);
    return true;
}

static bool event_sync(kn_event *e)
{
    host_waits_until(((meta_event *)e)->time, ((meta_event *)e)->of);
    return true;
}

static bool event_done(kn_event *e)
{
    (void)e; /* on meta every event counts as done */
    return true;
}

/* ---- the provider and the table ------------------------------------------------------------- */

static kn_status done(const void *args)
{
    (void)args;
    return KN_DONE;
}

static const kn_provider provider = { .name = "meta", .run = { [0 ... KN_K_COUNT - 1] = done } };

static int providers(const kn_provider *out[KN_MAX_PROVIDERS])
{
    out[0] = &provider;
    return 1;
}

const kn_device_table kn_meta_table = {
    .device = KN_META,
    .name = "meta",
    .open = meta_open,
    .memory = meta_memory,
    .trim = meta_trim,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_is_inline = stream_is_inline,
    .stream_sync = stream_sync,
    .stream_host = stream_host,
    .launch = launch,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .event_wait = event_wait,
    .event_sync = event_sync,
    .event_done = event_done,
    .providers = providers,
    .transfer = transfer,
    .pinned = meta_pinned,
};
