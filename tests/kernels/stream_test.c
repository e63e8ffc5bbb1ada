/* tests/kernels/stream_test.c: CPU streams and events. */
#include "kernels/faults.h"
#include "kernels/context.h"
#include "kernels/kernels_internal.h"
#include "kernels/team.h"
#include "tests/kn_test.h"

#include <stdatomic.h>
#include <sys/resource.h>
#include <time.h>

static kn_stream *worker(const char *name)
{
    return kn_stream_create(KN_CPU, name, KN_STREAM_WORKER);
}

static void nap(double seconds)
{
    struct timespec t = { (time_t)seconds, (long)(1e9 * (seconds - (double)(time_t)seconds)) };
    nanosleep(&t, NULL);
}

typedef struct append_args {
    int *list, *count, value; /* plain ints: only the stream's order makes this safe */
    double seconds;
} append_args;

static void append(void *arg)
{
    append_args *a = arg;
    if (a->seconds > 0)
        nap(a->seconds);
    a->list[(*a->count)++] = a->value;
}

static bool push(kn_stream *s, int *list, int *count, int value, double seconds)
{
    append_args a = { list, count, value, seconds };
    return kn_stream_host(s, "append", append, &a, sizeof a);
}

static void check_ascending(const int *list, int count, int expected)
{
    KN_CHECK(count == expected, "%d of %d", count, expected);
    for (int i = 0; i < count; i++)
        KN_CHECK(list[i] == i, "place %d holds %d", i, list[i]);
}

/* ---- order ------------------------------------------------------------------------------- */

KN_TEST(stream, runs_in_order)
{
    for (int kind = KN_STREAM_AUTO; kind <= KN_STREAM_WORKER; kind++) {
        enum { N = 500 }; /* more than the queue holds */
        int list[N], count = 0;
        kn_stream *s = kn_stream_create(KN_CPU, "side", kind);
        KN_CHECK(s && kn_stream_device(s) == KN_CPU && strcmp(kn_stream_name(s), "side") == 0);
        KN_CHECK(kn_stream_is_inline(s) == (kind != KN_STREAM_WORKER), "no core is free");
        for (int i = 0; i < N; i++)
            KN_CHECK(push(s, list, &count, i, i == 3 ? 0.01 : 0));
        KN_CHECK(kn_stream_sync(s));
        check_ascending(list, count, N);
        kn_stream_destroy(s);
    }
}

KN_TEST(stream, auto_takes_a_free_core)
{
    kn_set_free_cores(1);
    kn_stream *a = kn_stream_create(KN_CPU, "a", KN_STREAM_AUTO);
    kn_stream *b = kn_stream_create(KN_CPU, "b", KN_STREAM_AUTO);
    KN_CHECK(!kn_stream_is_inline(a) && kn_stream_is_inline(b));
    kn_stream_destroy(a);
    kn_stream *c = kn_stream_create(KN_CPU, "c", KN_STREAM_AUTO);
    KN_CHECK(!kn_stream_is_inline(c), "the core came back");
    kn_stream_destroy(b);
    kn_stream_destroy(c);
    kn_set_free_cores(0);
}

KN_TEST(stream, destroy_drains)
{
    int list[100], count = 0;
    kn_stream *s = worker("drained");
    for (int i = 0; i < 100; i++)
        push(s, list, &count, i, i == 0 ? 0.02 : 0);
    kn_stream_destroy(s);
    check_ascending(list, count, 100);
    s = worker("ended with its context");
    count = 0;
    for (int i = 0; i < 100; i++)
        push(s, list, &count, i, i == 0 ? 0.02 : 0);
    kn_context_end();
    check_ascending(list, count, 100);
}

/* ---- events ------------------------------------------------------------------------------ */

static void wait_for_gate(void *arg)
{
    while (!**(atomic_bool **)arg)
        nap(0.001);
}

KN_TEST(stream, events)
{
    int list[8], count = 0;
    kn_stream *a = worker("a"), *b = worker("b");
    kn_event *e = kn_event_create(KN_CPU);
    KN_CHECK(a && b && e);
    KN_CHECK(kn_event_done(e) && kn_event_sync(e) && kn_event_wait(e, a), "never recorded");

    atomic_bool open = false, *gate = &open;
    kn_stream_host(a, "gate", wait_for_gate, &gate, sizeof gate);
    push(a, list, &count, 0, 0);
    kn_event_record(e, a);
    KN_CHECK(!kn_event_done(e));
    kn_event_wait(e, b); /* does not block the caller, who opens the gate */
    open = true;
    push(b, list, &count, 1, 0);
    KN_CHECK(kn_event_sync(e) && kn_event_done(e));
    kn_stream_sync(b);
    check_ascending(list, count, 2);

    push(b, list, &count, 2, 0.02); /* recorded again, on another stream */
    kn_event_record(e, b);
    kn_event_wait(e, kn_compute_stream(KN_CPU)); /* inline: the caller waits */
    check_ascending(list, count, 3);
    kn_event_record(e, kn_compute_stream(KN_CPU));
    KN_CHECK(kn_event_done(e));

    push(a, list, &count, 3, 0.02);
    kn_event_record(e, a);
    kn_stream_destroy(a); /* an event outlives its stream */
    KN_CHECK(kn_event_done(e) && kn_event_sync(e) && kn_event_wait(e, b));
    check_ascending(list, count, 4);
    push(b, list, &count, 4, 0.02);
    kn_event_record(e, b);
    kn_event_destroy(e); /* and may be freed before it has happened */
    kn_stream_destroy(b);
    check_ascending(list, count, 5);
    KN_CHECK_OK();
}

KN_TEST(stream, events_belong_to_a_device)
{
    kn_event *e = kn_event_create(KN_META);
    REFUSED(kn_event_record(e, kn_compute_stream(KN_CPU)),
            "event of device meta on stream compute of device cpu");
    REFUSED(kn_event_wait(NULL, kn_compute_stream(KN_CPU)), "no event");
    kn_event_destroy(e);
    kn_event_destroy(NULL);
}

/* Two workers increment a counter in turn, ordered by events alone, so that ThreadSanitizer finds
 * any gap. */
typedef struct bump_args {
    int64_t *counter, expected;
    bool *wrong;
} bump_args;

static void bump(void *arg)
{
    bump_args *b = arg;
    if (*b->counter != b->expected)
        *b->wrong = true;
    *b->counter += 1;
}

KN_TEST(stream, two_workers_cross_wait)
{
    enum { N = 4000 };
    int64_t counter = 0;
    bool wrong = false;
    kn_stream *s[2] = { worker("left"), worker("right") };
    kn_event *e[2] = { kn_event_create(KN_CPU), kn_event_create(KN_CPU) };
    for (int64_t i = 0; i < N; i++) {
        int me = (int)(i % 3 == 0);
        kn_event_wait(e[!me], s[me]);
        kn_event_wait(e[me], s[me]);
        bump_args b = { &counter, i, &wrong };
        KN_CHECK(kn_stream_host(s[me], "bump", bump, &b, sizeof b));
        kn_event_record(e[me], s[me]);
        if (i % 500 == 0)
            kn_event_sync(e[me]);
    }
    KN_CHECK(kn_stream_sync(s[0]) && kn_stream_sync(s[1]));
    KN_CHECK(counter == N && !wrong, "%lld", (long long)counter);
    for (int i = 0; i < 2; i++) {
        kn_stream_destroy(s[i]);
        kn_event_destroy(e[i]);
    }
}

KN_TEST(stream, waiting_sleeps)
{
    int list[2], count = 0;
    struct rusage before, after;
    kn_stream *a = worker("a"), *b = worker("b");
    kn_event *e = kn_event_create(KN_CPU);
    getrusage(RUSAGE_SELF, &before);
    push(a, list, &count, 0, 0.3);
    kn_event_record(e, a);
    kn_event_wait(e, b);
    push(b, list, &count, 1, 0);
    kn_stream_sync(b);
    getrusage(RUSAGE_SELF, &after);
    double cpu = (double)(after.ru_utime.tv_sec - before.ru_utime.tv_sec) +
                 1e-6 * (double)(after.ru_utime.tv_usec - before.ru_utime.tv_usec);
    KN_CHECK(cpu < 0.1, "%g s of processor time while everyone waited", cpu);
    check_ascending(list, count, 2);
    kn_stream_destroy(a);
    kn_stream_destroy(b);
    kn_event_destroy(e);
}

/* ---- errors ------------------------------------------------------------------------------ */

static void fail_here(void *arg)
{
    (void)arg;
    if (!kn_context_is_worker() || kn_threads() != 1 || kn_threads_for(1 << 30) != 1)
        kn_fail("a worker must be single-threaded");
    kn_fail("the job failed");
}

KN_TEST(stream, an_error_ends_launching_but_not_what_was_queued)
{
    int list[4], count = 0;
    kn_stream *a = worker("a"), *b = worker("b");
    kn_event *e = kn_event_create(KN_CPU);
    kn_place_enter("user.c", 7);
    KN_CHECK(kn_stream_host(a, "fails", fail_here, NULL, 0));
    kn_event_record(e, a);
    KN_CHECK(!kn_stream_sync(a) && !kn_ok());
    KN_CHECK(strcmp(kn_error(), "the job failed at user.c:7") == 0);
    KN_CHECK(!push(a, list, &count, 0, 0), "nothing is launched while an error stands");
    kn_event_record(e, a);
    KN_CHECK(kn_event_wait(e, b) && kn_event_sync(e));
    kn_clear_error();
    KN_CHECK(push(b, list, &count, 0, 0) && kn_stream_sync(b), "the streams work on");
    check_ascending(list, count, 1);

    push(a, list, &count, 1, 0.05); /* queued before the error, done after it */
    push(a, list, &count, 2, 0);
    push(a, list, &count, 3, 0);
    nap(0.02);
    kn_fail("meanwhile");
    KN_CHECK(!kn_stream_sync(a));
    kn_clear_error();
    check_ascending(list, count, 4);
    kn_stream_destroy(a);
    kn_stream_destroy(b);
    kn_event_destroy(e);
}

static void allocate(void *arg)
{
    *(void **)arg = NULL;
    void *p = kn_take(kn_device_memory(KN_CPU), 1000, KN_MEM_COMM);
    kn_give(kn_device_memory(KN_CPU), p, 1000, KN_MEM_COMM);
}

KN_TEST(stream, worker_shares_the_ledger)
{
    kn_stream *s = worker("s");
    void *nothing = NULL;
    kn_ledger_reset_peaks();
    kn_stream_host(s, "allocate", allocate, &nothing, sizeof nothing);
    KN_CHECK(kn_stream_sync(s));
    KN_CHECK(kn_ledger_read().peak[KN_MEM_COMM] == 1024 && kn_ledger_read().live_total == 0);
    kn_stream_destroy(s);
}

/* A launch by a job on its own stream runs at once, as part of the job. */
typedef struct nested_args {
    kn_stream *s;
    int *list, *count;
} nested_args;

static void nested(void *arg)
{
    nested_args *n = arg;
    kn_event *e = kn_event_create(KN_CPU);
    push(n->s, n->list, n->count, 0, 0);
    kn_event_record(e, n->s);
    kn_event_wait(e, n->s);
    kn_event_sync(e);
    kn_stream_sync(n->s);
    kn_event_destroy(e);
    push(n->s, n->list, n->count, 1, 0);
    if (kn_compute_stream(KN_CPU))
        kn_fail("a worker has no compute stream");
}

KN_TEST(stream, job_uses_its_own_stream)
{
    int list[4], count = 0;
    kn_stream *s = worker("s");
    nested_args n = { s, list, &count };
    kn_stream_host(s, "nested", nested, &n, sizeof n);
    kn_stream_sync(s);
    KN_CHECK_ERROR("a stream worker has none");
    check_ascending(list, count, 2);
    kn_stream_destroy(s);
}

KN_TEST(stream, too_large_an_argument)
{
    static char large[5000];
    kn_stream *s = worker("s");
    REFUSED(kn_stream_host(s, "large", fail_here, large, sizeof large), "5000 bytes");
    REFUSED(kn_stream_host(kn_compute_stream(KN_CPU), "large", fail_here, large, sizeof large),
            "5000 bytes");
    REFUSED(kn_stream_host(NULL, "nowhere", fail_here, NULL, 0), "no stream");
    kn_stream_destroy(s);
}

KN_TEST(stream, creation_survives_failing_allocations)
{
    for (int n = 1; n <= 2; n++) {
        kn_fail_alloc(n);
        REFUSED(worker("s"), "out of memory");
    }
    kn_fail_alloc(1);
    REFUSED(kn_event_create(KN_CPU), "out of memory");
    kn_fail_alloc(0);
}
