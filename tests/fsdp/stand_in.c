/* tests/fsdp/stand_in.c: see stand_in.h. */
#include "tests/fsdp/stand_in.h"
#include "kernels/cpu/cpu_internal.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- memory ---------------------------------------------------------------------------------- */

enum { BLOCKS = 4096 };

static struct {
    char *at;
    size_t bytes;
    bool out;
} block[BLOCKS];
static int blocks;
static int64_t live, peak;
static stand_in how;
static atomic_int waits;
static void (*watcher)(const kn_stream *s);
static kn_device_table device;

static void *room_take(kn_memory *self, size_t bytes)
{
    if (how.limit && live + (int64_t)bytes > how.limit)
        return NULL;
    int i = 0;
    while (i < blocks && (block[i].out || block[i].bytes != bytes))
        i++;
    if (i == BLOCKS)
        return NULL;
    if (i == blocks) {
        block[blocks].at = aligned_alloc(KN_ALIGN, bytes);
        block[blocks++].bytes = bytes;
    }
    block[i].out = true;
    live += (int64_t)bytes;
    peak = live > peak ? live : peak;
    return block[i].at;
}

typedef struct span {
    void *at;
    size_t bytes;
} span;

static void spoil(void *arg)
{
    const span *s = arg;
    memset(s->at, 0xff, s->bytes); /* NaN of any float */
}

static void room_give(kn_memory *self, void *p, size_t bytes)
{
    kn_stream *compute = kn_context_get()->compute[STAND_IN];
    int i = 0;
    while (i < blocks && block[i].at != p)
        i++;
    if (i == blocks || !block[i].out)
        abort(); /* not in use */
    block[i].out = false;
    live -= (int64_t)bytes;
    if (compute)
        kn_cpu_stream_host(compute, "spoil", spoil, &(span){ p, bytes }, sizeof(span));
}

static kn_memory memory = {
    .name = "the stand-in's memory", .device = STAND_IN, .take = room_take, .give = room_give
};

static void *pinned_take(kn_memory *self, size_t bytes)
{
    return aligned_alloc(KN_ALIGN, bytes);
}

static void pinned_give(kn_memory *self, void *p, size_t bytes)
{
    free(p);
}

static kn_memory pinned = { .name = "the stand-in's page-locked memory",
                            .device = KN_CPU,
                            .take = pinned_take,
                            .give = pinned_give,
                            .pinned = true };

static kn_memory *device_memory(void)
{
    return &memory;
}

static kn_memory *device_pinned(void)
{
    return &pinned;
}

/* ---- streams --------------------------------------------------------------------------------- */

static bool device_open(void)
{
    return true;
}

static void device_trim(void)
{
}

static kn_stream *device_stream(const char *name, kn_stream_kind kind)
{
    kn_stream *s =
        kn_cpu_stream_create(name, how.inline_streams ? KN_STREAM_INLINE : KN_STREAM_WORKER);
    if (s) {
        s->table = &device;
        s->device = STAND_IN;
    }
    return s;
}

static kn_event *device_event(void)
{
    kn_event *e = kn_cpu_event_create();
    if (e)
        e->table = &device;
    return e;
}

static void about_to_wait(const kn_stream *s)
{
    waits++;
    if (watcher)
        watcher(s);
}

static bool device_stream_sync(kn_stream *s)
{
    about_to_wait(s);
    return kn_cpu_stream_sync(s);
}

static bool device_event_sync(kn_event *e)
{
    about_to_wait(NULL);
    return kn_cpu_event_sync(e);
}

/* Lists of pieces and runs are the host's: a real device copies them as it is launched. */
static bool device_launch(kn_stream *s, kn_kernel k, const void *args, size_t size)
{
    bool lists = k == KN_K_ADAMW || k == KN_K_SGD || k == KN_K_LION || k == KN_K_ABSMAX ||
                 k == KN_K_SQSUM || k == KN_K_POWSUM;
    return (!how.look || how.look(k, args)) && kn_cpu_launch(s, k, args, size) &&
           (!lists || kn_cpu_stream_sync(s));
}

typedef struct crossing {
    void *dst, *copy; /* copy: of the source at the time of the call; to be freed */
    const void *src;
    size_t bytes;
    bool home;
} crossing;

static void cross(void *arg)
{
    crossing *c = arg;
    const int least = c->home ? how.home_us : how.away_us;
    if (least)
        usleep((useconds_t)least);
    memmove(c->dst, c->copy ? c->copy : c->src, c->bytes);
    free(c->copy);
}

static bool device_transfer(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way,
                            bool held)
{
    crossing c = { .dst = dst, .src = src, .bytes = bytes, .home = way == KN_TO_HOST };
    if (way == KN_TO_DEVICE && !held)
        c.copy = memcpy(malloc(bytes), src, bytes);
    return kn_cpu_stream_host(s, "copy", cross, &c, sizeof c);
}

/* ---- life ------------------------------------------------------------------------------------ */

void stand_in_begin(stand_in s)
{
    how = s;
    live = peak = 0;
    waits = 0;
    device = kn_cpu_table;
    device.device = STAND_IN;
    device.name = "stand-in";
    device.open = device_open;
    device.memory = device_memory;
    device.pinned = device_pinned;
    device.trim = device_trim;
    device.stream_create = device_stream;
    device.event_create = device_event;
    device.stream_sync = device_stream_sync;
    device.event_sync = device_event_sync;
    device.launch = device_launch;
    device.transfer = device_transfer;
    if (kn_device_register(&device) == STAND_IN)
        return;
    fprintf(stderr, "stand-in: %s\n", kn_error() ? kn_error() : "registered as another device");
    abort(); /* benchmarks use it, too, without a test to fail */
}

void stand_in_end(void)
{
    kn_context_end(); /* its streams are threads that use the blocks */
    kn_device_unregister(STAND_IN);
    for (int i = 0; i < blocks; i++)
        free(block[i].at);
    blocks = 0;
}

int on_stand_in(stand_in s, int ranks, rank_body body, void *arg)
{
    stand_in_begin(s);
    /* Processes even under TSan: each has blocks of its own. */
    int failed = kn_spawn(ranks, rank_main, &(rank_job){ body, arg });
    stand_in_end();
    return failed;
}

int stand_in_waits(void)
{
    return waits;
}

void stand_in_watch(void (*fn)(const kn_stream *s))
{
    watcher = fn;
}

int64_t stand_in_peak(void)
{
    return peak;
}
