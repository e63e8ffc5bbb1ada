/* tests/gpu/cuda_runtime_test.c: the CUDA device over fake CUDA (tests/gpu/fake_cuda/fake.h):
 * choosing a GPU, memory, streams, tables, scratch, flags, errors, the trace. */
#include "knap.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

#include <sys/wait.h>
#include <unistd.h>

/* ---- which GPU ------------------------------------------------------------------------------- */

KN_TEST(cuda_runtime, no_gpu_is_a_sentence)
{
    fake.devices = 0;
    KN_CHECK(!kn_cuda_available() && kn_ok());
    REFUSED(kn_device_memory(KN_CUDA), "device cuda: ");
}

KN_TEST(cuda_runtime, a_driver_that_does_not_start_says_what_to_do)
{
    static const struct {
        cudaError_t error;
        const char *says;
    } cases[] = { { cudaErrorSystemNotReady, "nvidia-fabricmanager must run" },
                  { cudaErrorSystemDriverMismatch, "are of two versions (803)" },
                  { cudaErrorCompatNotSupportedOnDevice, "forward-compatibility package" } };
    int status = 0;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        pid_t child = fork(); /* a process looks once */
        if (child == 0) {
            fake.devices = 0;
            fake.missing = cases[i].error;
            bool failed = !kn_device_memory(KN_CUDA);
            _exit(failed && kn_error() && strstr(kn_error(), cases[i].says) ? 0 : 1);
        }
        KN_CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0, "%s",
                 cases[i].says);
    }
}

KN_TEST(cuda_runtime, wrong_index_names_how_many_there_are)
{
    fake.devices = 2;
    kn_cuda_choose(7);
    REFUSED(kn_compute_stream(KN_CUDA), "no GPU 7: this machine has 2");
}

KN_TEST(cuda_runtime, index_of_the_environment)
{
    fake.devices = 2;
    setenv("KNAP_CUDA_DEVICE", "first", 1);
    REFUSED(kn_compute_stream(KN_CUDA),
            "KNAP_CUDA_DEVICE=first: not the index of a GPU; this machine has 2");
}

KN_TEST(cuda_runtime, local_ranks_share_the_gpus)
{
    fake.devices = 2;
    setenv("LOCAL_RANK", "5", 1);
    KN_CHECK(kn_compute_stream(KN_CUDA) && kn_cuda_index() == 1 && fake.device == 1);
    KN_CHECK(strstr(kn_cuda_describe(), "Pretended GPU (sm_90"), "%s", kn_cuda_describe());
    KN_CHECK_OK();
}

/* ---- memory ---------------------------------------------------------------------------------- */

KN_TEST(cuda_runtime, memory_is_in_the_ledger)
{
    kn_memory *m = kn_device_memory(KN_CUDA);
    int64_t before = kn_ledger_read().live_total;
    void *p = kn_take(m, 5 << 20, KN_MEM_PARAM);
    KN_CHECK(p && kn_ledger_read().live[KN_MEM_PARAM] == 5 << 20);
    kn_cuda_memory_stats s = kn_cuda_memory_read();
    KN_CHECK(s.reserved == 22 << 20 && s.live >= 5 << 20 && s.device_total == (int64_t)fake.memory);
    REFUSED(kn_take(m, (size_t)2 << 30, KN_MEM_ACTIVATION), "out of memory");
    REFUSED(kn_take(m, (size_t)2 << 30, KN_MEM_ACTIVATION), "cuda memory");
    kn_give(m, p, 5 << 20, KN_MEM_PARAM);
    kn_memory_trim(KN_CUDA);
    KN_CHECK(kn_cuda_memory_read().reserved == 2 << 20, "the flag stays");
    KN_CHECK(kn_ledger_read().live_total == before);
    kn_context_end();
    KN_CHECK(fake.live == 0 && fake.streams == 0 && fake.mallocs == fake.frees,
             "all was given back");
}

KN_TEST(cuda_runtime, memory_outlives_its_context)
{
    kn_memory *m = kn_device_memory(KN_CUDA);
    void *p = kn_take(m, 100, KN_MEM_PARAM);
    kn_context_end();
    KN_CHECK(fake.live > 0);
    kn_give(m, p, 100, KN_MEM_PARAM);
    KN_CHECK(fake.live == 0, "the last block ends the pool");
}

KN_TEST(cuda_runtime, transfers)
{
    kn_stream *s = kn_compute_stream(KN_CUDA);
    kn_memory *m = kn_device_memory(KN_CUDA), *pinned = kn_pinned_memory(KN_CUDA);
    int a[100], b[100];
    for (int i = 0; i < 100; i++)
        a[i] = i;
    void *d = kn_take(m, sizeof a, KN_MEM_DATA), *e = kn_take(m, sizeof a, KN_MEM_DATA);
    int *h = kn_take(pinned, sizeof a, KN_MEM_DATA);
    KN_CHECK(d && e && h && pinned->device == KN_CPU && pinned != kn_device_memory(KN_CPU));
    KN_CHECK(kn_transfer(s, d, a, sizeof a, KN_TO_DEVICE, false), "makes its ring");
    fake.waits = fake.pageable = 0;
    KN_CHECK(kn_transfer(s, d, a, sizeof a, KN_TO_DEVICE, false) &&
             kn_transfer(s, e, d, sizeof a, KN_WITHIN, true));
    KN_CHECK(kn_transfer(s, h, e, sizeof a, KN_TO_HOST, true) &&
             kn_transfer(s, d, h, sizeof a, KN_TO_DEVICE, true));
    KN_CHECK(kn_transfer(s, d, h, sizeof a, KN_TO_DEVICE, false), "bytes that aren't held");
    h[0] = -1;
    KN_CHECK(fake.waits == 0 && fake.pageable == 0, "nobody waited");
    KN_CHECK(kn_transfer(s, b, d, sizeof b, KN_TO_HOST, false) && kn_stream_sync(s));
    KN_CHECK(memcmp(a, b, sizeof a) == 0);
    enum { MUCH = 3 << 20 };
    void *big = kn_take(m, MUCH, KN_MEM_DATA), *from = kn_take(pinned, MUCH, KN_MEM_DATA);
    fake.waits = 0;
    KN_CHECK(big && from && kn_transfer(s, big, from, MUCH, KN_TO_DEVICE, false));
    KN_CHECK(fake.waits == 1, "page-locked bytes that aren't held, too many to set aside");
    kn_give(m, big, MUCH, KN_MEM_DATA);
    kn_give(pinned, from, MUCH, KN_MEM_DATA);
    kn_give(m, d, sizeof a, KN_MEM_DATA);
    kn_give(m, e, sizeof a, KN_MEM_DATA);
    kn_give(pinned, h, sizeof a, KN_MEM_DATA);
    KN_CHECK_OK();
}

static void big_copy(int waits)
{
    enum { MUCH = 3 << 20 };
    static char from[MUCH];
    kn_memory *m = kn_device_memory(KN_CUDA);
    void *big = kn_take(m, MUCH, KN_MEM_DATA);
    fake.waits = 0;
    KN_CHECK(big && kn_transfer(kn_compute_stream(KN_CUDA), big, from, MUCH, KN_TO_DEVICE, false));
    KN_CHECK(fake.waits == waits, "%d waits", fake.waits);
    KN_CHECK(kn_transfer(kn_compute_stream(KN_CUDA), big, from, MUCH, KN_TO_DEVICE, true));
    KN_CHECK(fake.waits == waits, "who holds its bytes doesn't wait");
    kn_give(m, big, MUCH, KN_MEM_DATA);
    kn_context_end();
}

KN_TEST(cuda_runtime, pageable_bytes_are_staged_by_cuda)
{
    big_copy(0);
}

KN_TEST(cuda_runtime, pageable_bytes_that_the_gpu_reads_itself)
{
    fake.reads_pageable = true;
    big_copy(1);
}

/* ---- what kernels need ----------------------------------------------------------------------- */

static bool (*inside)(void); /* runs as a kernel */

static kn_status run_inside(const void *args)
{
    (void)args;
    return inside() ? KN_DONE : KN_FAILED;
}

/* Runs fn in a launch on s. */
static bool launch_inside(kn_stream *s, bool (*fn)(void))
{
    static const kn_provider provider = { .name = "cuda", .run = { [KN_K_FILL] = run_inside } };
    const kn_provider *before = kn_cuda_own_provider;
    float x;
    int64_t one = 1;
    kn_fill_args a = { .dst = kn_array_make(&x, KN_F32, 1, &one) };
    inside = fn;
    kn_cuda_own_provider = &provider;
    bool ok = KN_LAUNCH(s, KN_K_FILL, a);
    kn_cuda_own_provider = before;
    return ok;
}

static bool many_tables(void)
{
    static unsigned char host[300 << 10];
    const unsigned char *last = NULL;
    unsigned char last_byte = 0;
    for (int i = 0; i < 500; i++) {
        size_t n = i == 250 ? sizeof host : (size_t)(1 + i * 7919 % 5000);
        memset(host, i & 255, n);
        const unsigned char *d = kn_cuda_table(host, n);
        if (!d || (uintptr_t)d % 64 || d[0] != (i & 255) || d[n - 1] != (i & 255))
            return kn_fail("table %d is wrong", i);
        if (last && i != 250 && *last != last_byte)
            return kn_fail("table %d overwrote the one before it", i);
        last = d;
        last_byte = d[0];
    }
    return true;
}

static const int *graph_table[50];

static bool tables_of_a_graph(void)
{
    for (int i = 0; i < 50; i++)
        if (!(graph_table[i] = kn_cuda_table(&i, sizeof i)))
            return false;
    return true;
}

KN_TEST(cuda_runtime, tables)
{
    kn_stream *s = kn_compute_stream(KN_CUDA),
              *side = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    KN_CHECK(launch_inside(s, many_tables) && launch_inside(side, many_tables));
    KN_CHECK(kn_graph_begin(KN_CUDA) && launch_inside(s, tables_of_a_graph));
    kn_graph *g = kn_graph_end();
    KN_CHECK(g && launch_inside(s, many_tables) && kn_graph_launch(g));
    for (int i = 0; i < 50; i++)
        KN_CHECK(*graph_table[i] == i, "table %d of the graph is %d", i, *graph_table[i]);
    kn_graph_free(g);
    KN_CHECK(launch_inside(s, many_tables));
    REFUSED(kn_cuda_table("x", 1), "outside of a launch");
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

static void *scratch_before;
static size_t scratch_bytes;

static bool scratch_grows(void)
{
    scratch_before = kn_cuda_scratch(scratch_bytes);
    if (scratch_before && !kn_recording())
        memset(scratch_before, 1, scratch_bytes);
    return scratch_before && kn_cuda_scratch(1) == scratch_before;
}

KN_TEST(cuda_runtime, scratch)
{
    kn_stream *s = kn_compute_stream(KN_CUDA),
              *side = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    for (scratch_bytes = 1; scratch_bytes < (size_t)100 << 20; scratch_bytes *= 7)
        KN_CHECK(launch_inside(s, scratch_grows) && launch_inside(side, scratch_grows));
    scratch_bytes = (size_t)2 << 30;
    REFUSED(launch_inside(s, scratch_grows), "out of memory");
    kn_context_end();
    KN_CHECK(fake.live == 0, "scratch goes with the stream");
}

/* ---- errors and host functions --------------------------------------------------------------- */

static void fails_on(void *arg)
{
    kn_fail("value %d came late", *(int *)arg);
}

KN_TEST(cuda_runtime, host_functions_report_to_the_creator)
{
    kn_stream *s = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    int x = 5;
    KN_CHECK(!kn_stream_is_inline(s) && kn_stream_host(s, "check", fails_on, &x, sizeof x));
    REFUSED(kn_stream_sync(s), "value 5 came late");
    kn_stream_destroy(s);
}

KN_TEST(cuda_runtime, a_bad_index_is_an_error_of_the_sync)
{
    fake_begin();
    int64_t bad[3] = { 0, 9, 1 };
    kn_scope scope = kn_scope_begin();
    kn_tensor *w = kn_full(KN_F32, KN_CUDA, 1.0, KN_SHAPE(4, 8)),
              *i = kn_from(KN_I64, KN_CUDA, bad, KN_SHAPE(3));
    kn_tensor *y = kn_index_select(w, 0, i);
    KN_CHECK(w && i && y && kn_ok());
    REFUSED(kn_stream_sync(kn_compute_stream(KN_CUDA)), "index 9 at position 1");
    KN_CHECK(kn_stream_sync(kn_compute_stream(KN_CUDA)), "told once");
    kn_scope_end(scope);
}

KN_TEST(cuda_runtime, a_lost_gpu_is_a_sentence)
{
    fake_begin();
    kn_stream *s = kn_compute_stream(KN_CUDA);
    kn_event *e = kn_event_create(KN_CUDA);
    KN_CHECK(kn_event_done(e) && kn_event_sync(e) && kn_event_record(e, s) && kn_event_wait(e, s) &&
             kn_event_done(e));
    kn_event_destroy(e);
    fake.lost = true;
    KN_CHECK(kn_cuda_launched("gelu_kernel") == KN_FAILED);
    KN_CHECK_ERROR("gelu_kernel: CUDA says an illegal memory access");
}

/* ---- the trace ------------------------------------------------------------------------------- */

KN_TEST(cuda_runtime, trace_has_kernels_and_waits)
{
    fake_begin();
    kn_trace_event *events;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_full(KN_F32, KN_CUDA, 2.0, KN_SHAPE(64));
    KN_CHECK(x != NULL);
    kn_trace_start(100);
    kn_tensor *y = kn_mul(x, x);
    size_t waits = 0, kernels = 0;
    KN_CHECK(kn_item(kn_sum(y, 0, NULL, false)) == 256.0);
    size_t n = kn_trace_stop(&events);
    for (size_t i = 0; i < n; i++) {
        waits += strcmp(events[i].provider, "host") == 0;
        kernels += strcmp(events[i].provider, "cuda") == 0 &&
                   strcmp(events[i].stream, "compute") == 0 && events[i].end >= events[i].begin;
    }
    KN_CHECK(waits == 1 && kernels == 2, "%zu waits, %zu kernels", waits, kernels);
    kn_host_free(events);
    kn_scope_end(scope);
    KN_CHECK_OK();
}
