/* tests/gpu/cuda_graph_test.c: recording launches (kernels/graph.c, kernels/cuda/runtime/graph.c,
 * arena.c) over fake CUDA, which keeps captured work with its dependencies and runs a graph in any
 * order that these allow. */
#include "knap.h"
#include "kernels/context.h"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

static kn_stream *compute(void)
{
    return kn_compute_stream(KN_CUDA);
}

static bool fill(kn_stream *s, void *p, int64_t n, double value)
{
    kn_fill_args a = { kn_array_make(p, KN_F32, 1, &n), value, 0 };
    return KN_LAUNCH(s, KN_K_FILL, a);
}

static bool add(kn_stream *s, float *sum, float *x, int64_t n)
{
    kn_binary_args a = { kn_array_make(sum, KN_F32, 1, &n), kn_array_make(sum, KN_F32, 1, &n),
                         kn_array_make(x, KN_F32, 1, &n), KN_ADD };
    return KN_LAUNCH(s, KN_K_BINARY, a);
}

/* ---- recording ------------------------------------------------------------------------------- */

KN_TEST(cuda_graph, what_is_recorded_runs_when_it_is_launched)
{
    fake_begin();
    kn_memory *m = kn_device_memory(KN_CUDA);
    float *x = kn_take(m, 4096, KN_MEM_DATA), *y = kn_take(m, 4096, KN_MEM_DATA);
    KN_CHECK(fill(compute(), x, 1024, 1) && fill(compute(), y, 1024, 0) && x[5] == 1);
    KN_CHECK(!kn_recording() && kn_graph_begin(KN_CUDA) && kn_recording());
    KN_CHECK(add(compute(), y, x, 1024) && y[5] == 0);
    kn_graph *g = kn_graph_end();
    KN_CHECK(g && !kn_recording() && y[5] == 0);
    for (int i = 1; i < 5; i++)
        KN_CHECK(kn_graph_launch(g) && y[5] == (float)i && y[1023] == (float)i);
    KN_CHECK(fill(compute(), x, 1024, 0.5) && kn_graph_launch(g) && y[5] == 4.5f);
    kn_graph_free(g);
    KN_CHECK(fake.graphs == 0);
    kn_give(m, x, 4096, KN_MEM_DATA);
    kn_give(m, y, 4096, KN_MEM_DATA);
    KN_CHECK_OK();
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

static void count_up(void *arg)
{
    ++**(int **)arg;
}

KN_TEST(cuda_graph, side_streams_take_part)
{
    fake_begin();
    kn_stream *side = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    kn_memory *m = kn_device_memory(KN_CUDA);
    float *x = kn_take(m, 64, KN_MEM_DATA), *y = kn_take(m, 64, KN_MEM_DATA);
    int calls = 0, *counter = &calls;
    kn_event *before = kn_event_create(KN_CUDA), *there = kn_event_create(KN_CUDA),
             *back = kn_event_create(KN_CUDA);
    KN_CHECK(fill(compute(), y, 16, 0) && kn_event_record(before, compute()));
    KN_CHECK(kn_graph_begin(KN_CUDA) && kn_event_wait(before, side), "over by then");
    KN_CHECK(fill(compute(), x, 16, 3) && kn_event_record(there, compute()));
    KN_CHECK(kn_event_wait(there, side) && add(side, y, x, 16) &&
             kn_stream_host(side, "count", count_up, &counter, sizeof counter));
    KN_CHECK(kn_event_record(back, side) && kn_event_wait(back, compute()) &&
             fill(compute(), x, 16, 100));
    kn_stream *late = kn_stream_create(KN_CUDA, "late", KN_STREAM_AUTO);
    KN_CHECK(late && fill(late, x + 8, 8, 7), "joined by the end, without an event");
    kn_graph *g = kn_graph_end();
    KN_CHECK(g != NULL);
    KN_CHECK(kn_graph_launch(g) && y[3] == 3 && calls == 1 && x[3] == 100);
    fake.backwards = true;
    KN_CHECK(kn_graph_launch(g) && y[3] == 6 && calls == 2 && x[3] == 100, "y %g", (double)y[3]);
    KN_CHECK(kn_event_wait(back, compute()) && kn_event_sync(there) && kn_event_done(back),
             "events of a recording have a meaning outside");
    KN_CHECK_OK();
    kn_graph_free(g);
    kn_event_destroy(before);
    kn_event_destroy(there);
    kn_event_destroy(back);
    kn_give(m, x, 64, KN_MEM_DATA);
    kn_give(m, y, 64, KN_MEM_DATA);
    kn_context_end();
    KN_CHECK(fake.live == 0 && fake.streams == 0);
}

KN_TEST(cuda_graph, wrong_uses_are_sentences)
{
    fake_begin();
    kn_memory *m = kn_device_memory(KN_CUDA);
    float *x = kn_take(m, 64, KN_MEM_DATA), host[16] = { 0 };
    kn_event *e = kn_event_create(KN_CUDA);
    KN_CHECK(!kn_graph_begin(KN_CPU) && !kn_graph_supported(KN_CPU) && kn_graph_supported(KN_CUDA));
    KN_CHECK_ERROR("kn_graph_begin: device cpu records no steps; supported: cuda");
    REFUSED(kn_graph_end(), "no step is being recorded");
    REFUSED(kn_graph_launch(NULL), "the graph is NULL");
    REFUSED(kn_graph_on_launch((kn_graph_hook){ .arg = x }), "no step is being recorded");
#define REFUSES(call, text)                                                                        \
    KN_CHECK(kn_graph_begin(KN_CUDA) && fill(compute(), x, 16, 1));                                \
    KN_CHECK(!(call));                                                                             \
    KN_CHECK(kn_error() && strstr(kn_error(), text));                                              \
    kn_graph_cancel();                                                                             \
    kn_clear_error();                                                                              \
    KN_CHECK(!kn_recording() && fill(compute(), x, 16, 2) && x[0] == 2 &&                          \
             kn_stream_sync(compute()));
    REFUSES(kn_graph_begin(KN_CUDA), "recorded already; end it first");
    REFUSES(kn_stream_sync(compute()),
            "the host waits for stream 'compute': not while a step is recorded");
    REFUSES(kn_event_sync(e), "the host waits for an event");
    REFUSES(kn_transfer(compute(), host, x, 64, KN_TO_HOST, true), "are not page-locked");
    REFUSES(kn_transfer(compute(), x, host, 64, KN_TO_DEVICE, false), "used for something else");
    REFUSES(fill(kn_compute_stream(KN_CPU), host, 16, 1), "fill: a kernel on the cpu");
    REFUSES(kn_item(kn_full(KN_F32, KN_CUDA, 1, 0, NULL)) != 0, "kn_item, kn_to_host");
    /* a stream's end ends the recording */
    kn_stream *side = kn_stream_create(KN_CUDA, "side", KN_STREAM_AUTO);
    KN_CHECK(kn_graph_begin(KN_CUDA));
    kn_stream_destroy(side);
    REFUSED(kn_recording(), "the end of stream 'side'");
    kn_event_destroy(e);
    kn_give(m, x, 64, KN_MEM_DATA);
    kn_context_end();
    KN_CHECK(fake.live == 0 && fake.streams == 0);
}

KN_TEST(cuda_graph, a_foreign_stream_must_come_back)
{
    fake_begin();
    kn_memory *m = kn_device_memory(KN_CUDA);
    float *x = kn_take(m, 64, KN_MEM_DATA);
    cudaStream_t foreign;
    cudaEvent_t e;
    cudaStreamCreateWithPriority(&foreign, 0, 0);
    cudaEventCreateWithFlags(&e, 0);
    KN_CHECK(kn_graph_begin(KN_CUDA) && fill(compute(), x, 16, 1));
    cudaEventRecord(e, ((kn_gpu_stream *)compute())->handle);
    KN_CHECK(cudaStreamWaitEvent(foreign, e, 0) == cudaSuccess &&
             cudaMemsetAsync(x, 0, 64, foreign) == cudaSuccess);
    REFUSED(kn_graph_end(), "let the compute stream wait for it at the end");
    KN_CHECK(fill(compute(), x, 16, 2) && x[0] == 2);
    cudaStreamDestroy(foreign);
    cudaEventDestroy(e);
    /* errors of CUDA itself are reported, too */
    KN_CHECK(kn_graph_begin(KN_CUDA));
    void *p;
    cudaMalloc(&p, 64);
    REFUSED(kn_graph_end(), "recording a step: CUDA says");
    kn_give(m, x, 64, KN_MEM_DATA);
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

/* ---- memory ---------------------------------------------------------------------------------- */

static int64_t of_graphs(void)
{
    return kn_ledger_read().live[KN_MEM_GRAPH];
}

KN_TEST(cuda_graph, memory_of_a_recording_is_nobody_elses)
{
    enum { N = 4096, BYTES = 4 * N };
    fake_begin();
    kn_memory *m = kn_device_memory(KN_CUDA);
    int64_t begin = kn_ledger_read().live_total;
    float *x = kn_take(m, BYTES, KN_MEM_DATA), *old = kn_take(m, BYTES, KN_MEM_PARAM);
    KN_CHECK(fill(compute(), x, N, 0) && fill(compute(), old, N, 5));
    KN_CHECK(kn_graph_begin(KN_CUDA));
    float *a = kn_take(m, BYTES, KN_MEM_ACTIVATION);
    KN_CHECK(fill(compute(), a, N, 1) && add(compute(), a, old, N) && add(compute(), x, a, N));
    kn_give(m, a, BYTES, KN_MEM_ACTIVATION);
    float *b = kn_take(m, BYTES, KN_MEM_ACTIVATION), *out = kn_take(m, BYTES, KN_MEM_GRAD);
    KN_CHECK(b == a && out != a, "within the recording memory is used again");
    KN_CHECK(fill(compute(), b, N, 10) && add(compute(), x, b, N) && fill(compute(), out, N, 7));
    kn_give(m, b, BYTES, KN_MEM_ACTIVATION);
    kn_give(m, old, BYTES, KN_MEM_PARAM); /* replays still read it */
    KN_CHECK(of_graphs() == 0);
    kn_graph *g = kn_graph_end();
    KN_CHECK(g && of_graphs() >= (2 << 20) - BYTES + BYTES, "%lld", (long long)of_graphs());
    int64_t held = of_graphs();
    for (int i = 1; i < 4; i++) {
        float *fresh[200];
        for (int k = 0; k < 200; k++) { /* later owners may write to their memory */
            fresh[k] = kn_take(m, BYTES, KN_MEM_DATA);
            KN_CHECK(fresh[k] && fresh[k] != a && fresh[k] != old && fresh[k] != out);
            KN_CHECK(fill(compute(), fresh[k], N, -1));
        }
        KN_CHECK(kn_graph_launch(g) && x[7] == 16.0f * (float)i && out[3] == 7 &&
                 fresh[9][9] == -1);
        for (int k = 0; k < 200; k++)
            kn_give(m, fresh[k], BYTES, KN_MEM_DATA);
    }
    KN_CHECK(of_graphs() == held);
    kn_give(m, out, BYTES, KN_MEM_GRAD);
    KN_CHECK(of_graphs() == held + BYTES, "nobody but the graph has it now");
    kn_give(m, x, BYTES, KN_MEM_DATA);
    KN_CHECK(of_graphs() == held + 2 * BYTES, "the graph may have seen it");
    float *y = kn_take(m, BYTES, KN_MEM_DATA);
    KN_CHECK(y != x && kn_graph_launch(g));
    kn_give(m, y, BYTES, KN_MEM_DATA);
    KN_CHECK(of_graphs() == held + 2 * BYTES, "taken after the recording: given back at once");
    kn_graph_free(g);
    KN_CHECK(of_graphs() == 0 && kn_ledger_read().live_total == begin, "%lld bytes stayed",
             (long long)(kn_ledger_read().live_total - begin));
    kn_context_end();
    KN_CHECK(fake.live == 0);
}

KN_TEST(cuda_graph, tensors_outlive_the_graph_they_lie_in)
{
    fake_begin();
    kn_memory *m = kn_device_memory(KN_CUDA);
    float *before = kn_take(m, 1 << 20, KN_MEM_DATA);
    KN_CHECK(kn_graph_begin(KN_CUDA));
    float *a = kn_take(m, 1 << 20, KN_MEM_ACTIVATION);
    KN_CHECK(fill(compute(), a, 100, 4));
    kn_graph *g = kn_graph_end(), *second;
    KN_CHECK(g && kn_graph_launch(g) && a[99] == 4);
    KN_CHECK(kn_graph_begin(KN_CUDA) && fill(compute(), before, 100, 1));
    second = kn_graph_end();
    kn_give(m, before, 1 << 20, KN_MEM_DATA); /* seen by both */
    kn_graph_free(second);
    KN_CHECK(of_graphs() >= 1 << 20 && kn_take(m, 1 << 20, KN_MEM_DATA) != before);
    kn_graph_free(g);
    KN_CHECK(a[99] == 4 && fill(compute(), a, 100, 5) && a[99] == 5 && of_graphs() == (1 << 20),
             "the rest of its segment: %lld", (long long)of_graphs());
    kn_give(m, a, 1 << 20, KN_MEM_ACTIVATION);
    KN_CHECK(of_graphs() == 0);
    KN_CHECK_OK();
}
