/* tests/kernels/meta_test.c: the meta device: addresses without bytes, virtual clocks. */
#include "kernels/device.h"
#include "kernels/trace.h"
#include "kernels/context.h"
#include "kernels/kernels_internal.h"
#include "tests/kn_test.h"

static bool near(double a, double b)
{
    return fabs(a - b) <= 1e-9 * fmax(fabs(a), fabs(b));
}

/* A copy of n f32: moves 8 n bytes. */
static bool copy(kn_stream *s, int64_t n)
{
    return KN_LAUNCH(s, KN_K_COPY,
                     (kn_copy_args){ .dst = kn_array_make(NULL, KN_F32, 1, &n),
                                     .src = kn_array_make(NULL, KN_F32, 1, &n) });
}

KN_TEST(meta, memory_has_addresses_only)
{
    kn_memory *m = kn_device_memory(KN_META);
    size_t huge = (size_t)1 << 44;
    kn_ledger_reset_peaks();
    char *a = kn_take(m, huge, KN_MEM_PARAM), *b = kn_take(m, 100, KN_MEM_GRAD);
    KN_CHECK(a && b && (b >= a + huge || a >= b + 100));
    KN_CHECK((uintptr_t)a % KN_ALIGN == 0 && (uintptr_t)b % KN_ALIGN == 0);
    KN_CHECK(kn_ledger_read().live[KN_MEM_PARAM] == (int64_t)huge);
    kn_give(m, a, huge, KN_MEM_PARAM);
    kn_give(m, b, 100, KN_MEM_GRAD);
    KN_CHECK(kn_ledger_read().live_total == 0);
    KN_CHECK(kn_ledger_read().peak_total == (int64_t)huge + 128);
}

KN_TEST(meta, clock_advances_by_cost)
{
    kn_meta_rates(1e9, 8e6, 0.001);
    kn_stream *s = kn_stream_create(KN_META, "s", KN_STREAM_AUTO);
    KN_CHECK(kn_meta_clock(s) == 0);
    KN_CHECK(copy(s, 1000000)); /* 8e6 bytes: 1 s */
    KN_CHECK(near(kn_meta_clock(s), 1.001), "%.17g", kn_meta_clock(s));
    int64_t n = 1000;
    kn_array square = kn_array_make(NULL, KN_F32, 2, (int64_t[]){ n, n });
    KN_CHECK(
        KN_LAUNCH(s, KN_K_MATMUL, (kn_matmul_args){ .dst = square, .a = square, .b = square }));
    KN_CHECK(near(kn_meta_clock(s), 1.001 + 2.001), "2 n^3 = 2e9 flops: %.17g", kn_meta_clock(s));
    KN_CHECK(kn_stream_sync(s));
    kn_stream_destroy(s);
    kn_meta_rates(0, 1, 1);
    KN_CHECK_ERROR("must be positive");
}

KN_TEST(meta, events_carry_time)
{
    kn_context_end(); /* virtual time starts at 0 */
    kn_meta_rates(1e9, 8e6, 0);
    kn_stream *a = kn_stream_create(KN_META, "a", KN_STREAM_AUTO);
    kn_stream *b = kn_stream_create(KN_META, "b", KN_STREAM_AUTO);
    kn_event *e = kn_event_create(KN_META);
    copy(a, 1000000);
    copy(b, 500000);
    KN_CHECK(near(kn_meta_clock(a), 1) && near(kn_meta_clock(b), 0.5), "they overlap");
    kn_event_record(e, a);
    copy(a, 1000000);
    kn_event_wait(e, b);
    copy(b, 500000);
    KN_CHECK(near(kn_meta_clock(b), 1.5), "%g", kn_meta_clock(b));
    kn_event_record(e, b);
    kn_event_wait(e, a);
    KN_CHECK(near(kn_meta_clock(a), 2), "the past costs nothing");

    kn_stream_sync(a); /* the host's clock is 2 now, so nothing starts before */
    copy(b, 500000);
    KN_CHECK(near(kn_meta_clock(b), 2.5), "%g", kn_meta_clock(b));
    KN_CHECK(kn_event_done(e) && kn_event_sync(e));
    kn_event_destroy(e);
    kn_stream_destroy(a);
    kn_stream_destroy(b);
}

static void count(void *arg)
{
    ++**(int **)arg;
}

KN_TEST(meta, host_functions_run_at_once)
{
    int n = 0, *p = &n;
    kn_stream *s = kn_compute_stream(KN_META);
    KN_CHECK(kn_stream_device(s) == KN_META && kn_compute_stream(KN_META) == s);
    double before = kn_meta_clock(s);
    KN_CHECK(kn_stream_host(s, "count", count, &p, sizeof p) && n == 1);
    KN_CHECK(kn_meta_clock(s) == before);
}

KN_TEST(meta, trace_is_virtual)
{
    kn_context_end();
    kn_meta_rates(1e9, 8e6, 0);
    OWNED_HOST kn_trace_event *events = NULL;
    kn_stream *s = kn_compute_stream(KN_META);
    kn_trace_start(8);
    copy(s, 1000000);
    copy(s, 2000000);
    KN_CHECK(kn_trace_stop(&events) == 2);
    KN_CHECK(strcmp(events[1].provider, "meta") == 0 && strcmp(events[1].what, "copy") == 0);
    KN_CHECK(near(events[1].begin, 1) && near(events[1].end, 3) && near(events[1].bytes, 16e6));
}

KN_TEST(meta, one_layer_that_takes_all)
{
    const kn_provider *providers[KN_MAX_PROVIDERS];
    KN_CHECK(kn_providers(KN_META, providers) == 1);
    for (int k = 0; k < KN_K_COUNT; k++)
        KN_CHECK(providers[0]->run[k] && providers[0]->run[k](NULL) == KN_DONE);
}

/* Copies take time by the link's rate. The host's computing advances its own clock, from the end of
 * its last wait. */
KN_TEST(meta, the_host_beside)
{
    kn_context_end();
    kn_meta_rates(1e9, 8e6, 0);
    kn_meta_host_rates(1e6, 4e6);
    kn_stream *up = kn_stream_create(KN_META, "upload", KN_STREAM_AUTO);
    kn_stream *host = kn_stream_create(KN_META, "host", KN_STREAM_HOST);
    kn_event *e = kn_event_create(KN_META);
    kn_memory *m = kn_pinned_memory(KN_META);
    void *there = kn_take(kn_device_memory(KN_META), 2000000, KN_MEM_PARAM);
    void *here = kn_take(m, 2000000, KN_MEM_PARAM);
    kn_ledger l = kn_ledger_read();
    KN_CHECK(l.live[KN_MEM_PARAM] == 4000000 && l.live_total == 2000000 &&
             l.live_pinned == 2000000 && l.peak_pinned == 2000000);
    KN_CHECK(kn_transfer(up, there, here, 2000000, KN_TO_DEVICE, true));
    KN_CHECK(near(kn_meta_clock(up), 2) && kn_meta_clock(host) == 0);
    copy(host, 500000); /* 4 MB: a second, while the copy goes on */
    KN_CHECK(near(kn_meta_clock(host), 1));
    KN_CHECK(kn_event_record(e, up) && kn_event_sync(e) && near(kn_meta_clock(host), 2));
    copy(host, 500000);
    KN_CHECK(near(kn_meta_clock(host), 3));
    KN_CHECK(
        kn_transfer(up, here, there, 1000000, KN_TO_HOST, true)); /* not before it is launched */
    KN_CHECK(near(kn_meta_clock(up), 4));
    kn_meta_host_rates(0, 1);
    KN_CHECK_ERROR("rates must be positive");
    kn_clear_error();
    kn_give(m, here, 2000000, KN_MEM_PARAM);
    kn_give(kn_device_memory(KN_META), there, 2000000, KN_MEM_PARAM);
    KN_CHECK(kn_ledger_read().live_pinned == 0);
    kn_event_destroy(e);
}
