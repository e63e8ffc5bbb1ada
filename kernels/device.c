/* kernels/device.c: finds the device's table and calls it; launches kernels through its
 * providers. */
#include "kernels/device.h"
#include "kernels/graph_internal.h"
#include "kernels/kernels_internal.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* ---- devices ----------------------------------------------------------------------------- */

static const kn_device_table *devices[KN_MAX_DEVICES] = {
    [KN_CPU] = &kn_cpu_table,
    [KN_META] = &kn_meta_table,
#ifdef KN_HAVE_CUDA
    [KN_CUDA] = &kn_cuda_device_table,
#endif
};

kn_device kn_default_device = KN_CPU;

kn_device kn_device_register(const kn_device_table *t)
{
    for (int d = KN_OTHER_DEVICE; d < KN_MAX_DEVICES; d++) {
        if (!devices[d]) {
            devices[d] = t;
            return (kn_device)d;
        }
    }
    kn_fail("device %s: %d devices are registered already, the most there can be", t->name,
            KN_MAX_DEVICES - KN_OTHER_DEVICE);
    return KN_DEVICE_DEFAULT;
}

void kn_device_unregister(kn_device d)
{
    if (d >= KN_OTHER_DEVICE && d < KN_MAX_DEVICES)
        devices[d] = NULL;
}

const kn_device_table *kn_device_table_of(kn_device d)
{
    if (d == KN_DEVICE_DEFAULT)
        d = kn_default_device;
    return (unsigned)d < KN_MAX_DEVICES ? devices[d] : NULL;
}

const char *kn_device_name(kn_device d)
{
    const kn_device_table *t = d == KN_DEVICE_DEFAULT ? NULL : kn_device_table_of(d);
    return t ? t->name : d == KN_CUDA ? "cuda" : d == KN_DEVICE_DEFAULT ? "default" : "unknown";
}

bool kn_device_is_apart(kn_device d)
{
    const kn_device_table *t = kn_device_table_of(d);
    return t && t->transfer;
}

/* The table of a device that can be used, or NULL with an error. */
static const kn_device_table *usable(kn_device d)
{
    const kn_device_table *t = kn_device_table_of(d);
    if (!t && d != KN_CUDA)
        kn_fail("no device has the number %d; supported: cpu, meta, cuda", (int)d);
    else if (!t)
        kn_fail("device %s: this build has none; supported: cpu, meta%s", kn_device_name(d),
                d == KN_CUDA ? "; building with -Dcuda=enabled where nvcc is installed adds it"
                             : "");
    else if (!t->open())
        return NULL;
    return t;
}

kn_memory *kn_device_memory(kn_device d)
{
    const kn_device_table *t = usable(d);
    return t ? t->memory() : NULL;
}

kn_memory *kn_pinned_memory(kn_device d)
{
    const kn_device_table *t = kn_device_table_of(d);
    return t && t->pinned ? t->pinned() : kn_device_memory(KN_CPU);
}

void kn_memory_trim(kn_device d)
{
    const kn_device_table *t = kn_device_table_of(d);
    if (t)
        t->trim();
}

/* ---- products of f32 --------------------------------------------------------------------- */

static const char *const products[] = { "exact", "tf32", "bf16" };
enum { PRODUCTS = sizeof products / sizeof *products };
static _Atomic int most; /* allowed, a kn_products */
static pthread_once_t most_once = PTHREAD_ONCE_INIT;

/* The number of KNAP_F32_PRODUCTS; PRODUCTS where it is none of them. */
static int products_asked(void)
{
    const char *text = getenv("KNAP_F32_PRODUCTS");
    int p = 0;
    while (p < PRODUCTS && text && *text && strcmp(text, products[p]) != 0)
        p++;
    return p;
}

bool kn_f32_products_known(void)
{
    return products_asked() < PRODUCTS ||
           kn_fail("KNAP_F32_PRODUCTS=%s: must be exact, tf32 or bf16",
                   getenv("KNAP_F32_PRODUCTS"));
}

static void read_products(void)
{
    const int p = products_asked();
    atomic_store(&most, p < PRODUCTS ? p : KN_PRODUCTS_EXACT);
}

bool kn_set_f32_products(kn_products p)
{
    pthread_once(&most_once, read_products);
    if ((unsigned)p >= PRODUCTS)
        return kn_fail("kn_set_f32_products: %d is none of KN_PRODUCTS_*", (int)p);
    atomic_store(&most, (int)p);
    kn_changed();
    return true;
}

kn_products kn_f32_products_allowed(void)
{
    pthread_once(&most_once, read_products);
    return (kn_products)atomic_load_explicit(&most, memory_order_relaxed);
}

kn_products kn_f32_products(kn_device d)
{
    const kn_device_table *t = kn_device_table_of(d);
    const kn_products fastest = t && t->f32_products ? t->f32_products() : KN_PRODUCTS_EXACT;
    return fastest <= kn_f32_products_allowed() ? fastest : KN_PRODUCTS_EXACT;
}

const char *kn_products_name(kn_products p)
{
    return (unsigned)p < PRODUCTS ? products[p] : "unknown";
}

/* ---- streams and events ------------------------------------------------------------------ */

kn_stream *kn_stream_create(kn_device d, const char *name, kn_stream_kind kind)
{
    kn_context *c = kn_context_get();
    const kn_device_table *t = usable(d);
    kn_stream *s = t ? t->stream_create(name ? name : "side", kind) : NULL;
    if (!s)
        return NULL;
    pthread_mutex_lock(&c->lock);
    s->next = c->streams;
    c->streams = s;
    pthread_mutex_unlock(&c->lock);
    return s;
}

kn_stream *kn_compute_stream(kn_device d)
{
    kn_context *c = kn_context_get();
    if (d == KN_DEVICE_DEFAULT)
        d = kn_default_device;
    if ((unsigned)d >= KN_MAX_DEVICES || kn_context_is_worker())
        return kn_fail_null("kn_compute_stream: %s",
                            kn_context_is_worker()
                                ? "a stream worker has none; use the stream it works for"
                                : "unknown device; supported: cpu, meta, cuda");
    if (!c->compute[d])
        c->compute[d] = kn_stream_create(d, "compute", KN_STREAM_INLINE);
    return c->compute[d];
}

void kn_stream_destroy(kn_stream *s)
{
    if (!s)
        return;
    kn_context *c = s->context;
    if (kn_unrecordable(s->device, "kn_stream_destroy: the end of stream '%s'", s->name))
        kn_graph_cancel(); /* a stream that records can't end */
    pthread_mutex_lock(&c->lock);
    for (kn_stream **at = &c->streams; *at; at = &(*at)->next) {
        if (*at == s) {
            *at = s->next;
            break;
        }
    }
    if (c->compute[s->device] == s)
        c->compute[s->device] = NULL;
    pthread_mutex_unlock(&c->lock);
    s->table->stream_destroy(s);
}

kn_device kn_stream_device(const kn_stream *s)
{
    if (!kn_given(s, "kn_stream_device", "the stream"))
        return KN_DEVICE_DEFAULT;
    return s->device;
}

bool kn_stream_is_inline(const kn_stream *s)
{
    if (!kn_given(s, "kn_stream_is_inline", "the stream"))
        return true;
    return s->table->stream_is_inline(s);
}

const char *kn_stream_name(const kn_stream *s)
{
    return kn_given(s, "kn_stream_name", "the stream") ? s->name : "";
}

bool kn_stream_sync(kn_stream *s)
{
    if (!s)
        return kn_fail("kn_stream_sync: no stream");
    return !kn_unrecordable(s->device, "kn_stream_sync: the host waits for stream '%s'", s->name) &&
           s->table->stream_sync(s);
}

bool kn_streams_look(void)
{
    kn_context *c = kn_context_get();
    for (int d = KN_CPU; d < KN_MAX_DEVICES && kn_ok(); d++)
        if (c->compute[d] && c->compute[d]->table->stream_look)
            c->compute[d]->table->stream_look(c->compute[d]);
    return kn_ok();
}

bool kn_stream_host(kn_stream *s, const char *what, kn_host_fn fn, const void *arg, size_t size)
{
    if (!s || !fn)
        return kn_fail("%s: no stream or no function to run on it", what);
    return kn_ok() && s->table->stream_host(s, what, fn, arg, size);
}

kn_event *kn_event_create(kn_device d)
{
    const kn_device_table *t = usable(d);
    return t ? t->event_create() : NULL;
}

void kn_event_destroy(kn_event *e)
{
    if (e)
        e->table->event_destroy(e);
}

/* Events work while an error stands, so that no wait is endless. */
static bool match(const kn_event *e, const kn_stream *s, const char *what)
{
    if (!e || !s)
        return kn_fail("%s: no event or no stream", what);
    if (e->table != s->table)
        return kn_fail("%s: an event of device %s on stream %s of device %s", what,
                       kn_device_name(e->table->device), s->name, kn_device_name(s->device));
    return true;
}

bool kn_event_record(kn_event *e, kn_stream *s)
{
    return match(e, s, "kn_event_record") && e->table->event_record(e, s);
}

bool kn_event_wait(kn_event *e, kn_stream *s)
{
    return match(e, s, "kn_event_wait") && e->table->event_wait(e, s);
}

bool kn_event_sync(kn_event *e)
{
    if (!e)
        return kn_fail("kn_event_sync: no event");
    return !kn_unrecordable(e->table->device, "kn_event_sync: the host waits for an event") &&
           e->table->event_sync(e);
}

bool kn_event_done(kn_event *e)
{
    return !e || kn_unrecordable(e->table->device, "kn_event_done: the host looks at an event") ||
           e->table->event_done(e);
}

/* ---- runs of elements ------------------------------------------------------------------------ */

bool kn_copy_run(kn_stream *s, void *dst, kn_dtype to, const void *src, kn_dtype from, int64_t n)
{
    kn_copy_args args = { kn_array_make(dst, to, 1, &n),
                          kn_array_make((void *)(uintptr_t)src, from, 1, &n) };
    return n <= 0 || KN_LAUNCH(s, KN_K_COPY, args);
}

bool kn_fill_run(kn_stream *s, void *dst, kn_dtype t, int64_t n, double value)
{
    kn_fill_args args = { kn_array_make(dst, t, 1, &n), value, 0 };
    return n <= 0 || KN_LAUNCH(s, KN_K_FILL, args);
}

/* ---- bytes between host and device ------------------------------------------------------- */

bool kn_transfer(kn_stream *s, void *dst, const void *src, size_t bytes, kn_way way, bool held)
{
    if (!kn_ok())
        return false;
    if (!s)
        return kn_fail("kn_transfer: no stream");
    if (bytes == 0)
        return true;
    if (!dst || !src)
        return kn_fail("kn_transfer: the %s of %zu bytes is NULL", dst ? "source" : "target",
                       bytes);
    if (s->table->transfer)
        return s->table->transfer(s, dst, src, bytes, way, held);
    return kn_copy_run(s, dst, KN_U8, src, KN_U8, (int64_t)bytes);
}
