/* tests/gpu/cuda_runtime_test.c: the CUDA device over fake CUDA (tests/gpu/fake_cuda/fake.h):
 * choosing a GPU, streams, tables, scratch, flags, errors, the trace; and whole training steps
 * against the CPU's. */
#include "knap.h"
#include "kernels/cuda/kernels/cuda.cuh"
#include "kernels/cuda/runtime/runtime.h"
#include "tests/gpu/fake_cuda/fake.h"
#include "tests/kn_test.h"

/* ---- which GPU ------------------------------------------------------------------------------- */

KN_TEST(cuda_runtime, no_gpu_is_a_sentence)
{
    fake.devices = 0;
    KN_CHECK(!kn_cuda_available() && kn_ok());
    KN_CHECK(!kn_device_memory(KN_CUDA));
    KN_CHECK_ERROR("device cuda: ");
}

KN_TEST(cuda_runtime, wrong_index_names_how_many_there_are)
{
    fake.devices = 2;
    kn_cuda_choose(7);
    KN_CHECK(!kn_compute_stream(KN_CUDA));
    KN_CHECK_ERROR("no GPU 7: this machine has 2");
}

KN_TEST(cuda_runtime, index_of_the_environment)
{
    fake.devices = 2;
    setenv("KNAP_CUDA_DEVICE", "first", 1);
    KN_CHECK(!kn_compute_stream(KN_CUDA));
    KN_CHECK_ERROR("KNAP_CUDA_DEVICE=first: not the index of a GPU; this machine has 2");
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
    KN_CHECK(!kn_take(m, (size_t)2 << 30, KN_MEM_ACTIVATION));
    KN_CHECK_ERROR("out of memory");
    KN_CHECK(!kn_take(m, (size_t)2 << 30, KN_MEM_ACTIVATION) && strstr(kn_error(), "cuda memory"));
    kn_clear_error();
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
    KN_CHECK(launch_inside(s, many_tables) && launch_inside(side, many_tables), "%s", kn_error());
    KN_CHECK(kn_graph_begin(KN_CUDA) && launch_inside(s, tables_of_a_graph), "%s", kn_error());
    kn_graph *g = kn_graph_end();
    KN_CHECK(g && launch_inside(s, many_tables) && kn_graph_launch(g), "%s", kn_error());
    for (int i = 0; i < 50; i++)
        KN_CHECK(*graph_table[i] == i, "table %d of the graph is %d", i, *graph_table[i]);
    kn_graph_free(g);
    KN_CHECK(launch_inside(s, many_tables), "%s", kn_error());
    KN_CHECK(!kn_cuda_table("x", 1));
    KN_CHECK_ERROR("outside of a launch");
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
        KN_CHECK(launch_inside(s, scratch_grows) && launch_inside(side, scratch_grows), "%s",
                 kn_error());
    scratch_bytes = (size_t)2 << 30;
    KN_CHECK(!launch_inside(s, scratch_grows));
    KN_CHECK_ERROR("out of memory");
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
    KN_CHECK(!kn_stream_sync(s));
    KN_CHECK_ERROR("value 5 came late");
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
    KN_CHECK(w && i && y && kn_ok(), "%s", kn_error());
    KN_CHECK(!kn_stream_sync(kn_compute_stream(KN_CUDA)));
    KN_CHECK_ERROR("index 9 at position 1");
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
    KN_CHECK(x != NULL, "%s", kn_error());
    kn_trace_start(100);
    kn_tensor *y = kn_mul(x, x);
    size_t waits = 0, kernels = 0;
    KN_CHECK(kn_item(kn_sum(y, 0, NULL, false)) == 256.0, "%s", kn_error());
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

/* ---- training -------------------------------------------------------------------------------- */

enum { STEPS = 4 };

/* Losses of a small GPT; false with an error. */
static bool trained(kn_device device, kn_dtype dtype, const char *offload, int layers, int embd,
                    int steps, double *loss)
{
    kn_gpt g = { 0 };
    kn_gpt_config c = {
        .layers = layers, .heads = 2, .embd = embd, .ctx = 8, .vocab = 50, .dropout = 0.1
    };
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .device = device, .param_dtype = dtype,
                 .offload_dir = offload);
    kn_optim *opt = kn_adamw(&g, .lr = 1e-3);
    for (int step = 0; kn_ok() && step < steps; step++) {
        kn_scope scope = kn_scope_begin();
        int64_t ids[16], next[16];
        for (int i = 0; i < 16; i++) {
            ids[i] = (i * 7 + step) % 50;
            next[i] = (i * 7 + 7 + step) % 50;
        }
        kn_tensor *l = kn_gpt_loss(&g, kn_from(KN_I64, device, ids, KN_SHAPE(2, 8)),
                                   kn_from(KN_I64, device, next, KN_SHAPE(2, 8)));
        kn_backward(l);
        if (step % 2)
            kn_clip_grad_norm(&g, 1.0);
        kn_step(opt);
        loss[step] = kn_ok() ? kn_item(l) : 0;
        kn_scope_end(scope);
    }
    kn_optim_free(opt);
    kn_module_free(&g);
    return kn_ok();
}

static void train(kn_device device, kn_dtype dtype, const char *offload, double loss[STEPS])
{
    KN_CHECK(trained(device, dtype, offload, 2, 16, STEPS, loss), "%s", kn_error());
    kn_context_end(); /* the next one draws the same numbers */
}

KN_TEST(cuda_runtime, a_gpt_trains_as_on_the_cpu)
{
    static const kn_dtype types[] = { KN_F32, KN_BF16 };
    fake_begin();
    for (int t = 0; t < 2; t++) {
        double cpu[STEPS], cuda[2][STEPS], most = types[t] == KN_F32 ? 1e-5 : 1e-2;
        train(KN_CPU, types[t], NULL, cpu);
        train(KN_CUDA, types[t], NULL, cuda[0]);
        train(KN_CUDA, types[t], "memory", cuda[1]);
        for (int away = 0; away < 2; away++)
            for (int i = 0; i < STEPS; i++)
                KN_CHECK(fabs(cpu[i] - cuda[away][i]) < most * cpu[i],
                         "%s%s step %d: %.8f on the CPU, %.8f", kn_dtype_name(types[t]),
                         away ? ", offloaded," : "", i, cpu[i], cuda[away][i]);
    }
}

/* ---- the host doesn't wait ------------------------------------------------------------------- */

typedef struct steady {
    const char *what;
    kn_dtype dtype;
    bool sgd, scaler, clip, offload, recompute, traced;
    int accum, late;
} steady;

enum { WARM = 3, LONG = 5 };

/* The gradients of a step; its last loss. */
static kn_tensor *steady_backwards(kn_gpt *g, const steady *s, kn_scaler *scaler, int step)
{
    kn_tensor *l = NULL;
    for (int a = 0; a < s->accum; a++) {
        int64_t ids[16], next[16];
        for (int i = 0; i < 16; i++) {
            ids[i] = (i * 7 + step) % 50;
            next[i] = (i * 7 + 7 + step + a) % 50;
        }
        l = kn_gpt_loss(g, kn_from(KN_I64, KN_CUDA, ids, KN_SHAPE(2, 8)),
                        kn_from(KN_I64, KN_CUDA, next, KN_SHAPE(2, 8)));
        kn_backward(scaler ? kn_scale_loss(scaler, l) : l);
    }
    return l;
}

/* Counts the waits in a trace. Synchronising the GPU's clock with the host's is a wait outside the
 * step. */
static void check_trace(const steady *s)
{
    kn_trace_event *events;
    size_t n = kn_trace_stop(&events), waits = 0, kernels = 0;
    for (size_t i = 0; i < n; i++) {
        waits += strcmp(events[i].provider, "host") == 0;
        kernels += strcmp(events[i].provider, "cuda") == 0;
    }
    kn_host_free(events);
    KN_CHECK(waits == 0 && kernels > 50, "%s: %zu waits, %zu kernels", s->what, waits, kernels);
    fake.waits = 0;
}

/* Reads losses as a printing loop does: those of the previous step. */
static void steady_steps(const steady *s)
{
    kn_gpt g = { 0 };
    kn_gpt_config c = {
        .layers = 2, .heads = 2, .embd = 16, .ctx = 8, .vocab = 50, .dropout = 0.1
    };
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_gpt_recompute(&g, s->recompute);
    kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .device = KN_CUDA, .param_dtype = s->dtype,
                 .offload_dir = s->offload ? "memory" : NULL);
    kn_optim *opt = s->sgd ? kn_sgd(&g, .lr = 1e-2, .momentum = 0.9) : kn_adamw(&g, .lr = 1e-3);
    kn_scaler *scaler = s->scaler ? kn_scaler_new(&g) : NULL;
    kn_fetch *loss = NULL, *norm = NULL;
    fake.late = s->late;
    for (int step = 0; step < WARM + LONG; step++) {
        kn_scope scope = kn_scope_begin();
        float x[2] = { 1, 1 };
        if (step == WARM)
            fake.waits = fake.pageable = 0;
        if (step == WARM + LONG - 1 && s->traced)
            kn_trace_start(4096);
        kn_tensor *l = steady_backwards(&g, s, scaler, step);
        kn_tensor *n = s->clip ? kn_clip_grad_norm(&g, 0.5) : l;
        kn_set_lr(opt, 1e-3 / (step + 1));
        if (loss)
            KN_CHECK(kn_fetch_end(loss, x, sizeof *x) && kn_fetch_end(norm, x + 1, sizeof *x) &&
                         x[0] > 3 && x[0] < 5 && x[1] > 0,
                     "%s step %d: %g %g", s->what, step, x[0], x[1]);
        loss = kn_fetch_begin(l);
        norm = kn_fetch_begin(n);
        int before = fake.waits;
        KN_CHECK(scaler ? kn_scaler_step(scaler, opt) : kn_step(opt), "%s", kn_error());
        if (s->offload) /* only the host's step waits for gradients, bucket by bucket */
            fake.waits = before;
        kn_scope_end(scope);
        if (kn_tracing())
            check_trace(s);
        KN_CHECK(step < WARM || (fake.waits == 0 && fake.pageable == 0),
                 "%s: the host waited %d times until step %d, and %d copies may wait", s->what,
                 fake.waits, step, fake.pageable);
    }
    KN_CHECK(kn_fetch_end(loss, NULL, 0) && kn_fetch_end(norm, NULL, 0));
    KN_CHECK(kn_optim_steps(opt) <= WARM + LONG && kn_optim_steps(opt) > LONG, "%s", s->what);
    kn_scaler_free(scaler);
    kn_optim_free(opt);
    kn_module_free(&g);
    KN_CHECK_OK();
    kn_context_end();
    fake.late = 0;
}

KN_TEST(cuda_runtime, a_steady_step_waits_for_nothing)
{
    static const steady all[] = {
        { "f32", KN_F32, .clip = true, .traced = true, .accum = 1 },
        { "recompute", KN_BF16, .clip = true, .recompute = true, .traced = true, .accum = 1 },
        { "f32, two micro-batches, late", KN_F32, .clip = true, .accum = 2, .late = 6 },
        { "sgd", KN_F32, .sgd = true, .accum = 1, .late = 3 },
        { "bf16", KN_BF16, .clip = true, .accum = 1, .late = 3 },
        { "f16 scaled", KN_F16, .clip = true, .scaler = true, .accum = 1, .late = 3 },
        { "offloaded", KN_BF16, .offload = true, .accum = 2, .late = 3 },
        { "f16 scaled, not clipped", KN_F16, .scaler = true, .accum = 2 },
    };
    fake_begin();
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        steady_steps(&all[i]);
}

/* A loop that never reads its loss. */
KN_TEST(cuda_runtime, a_bad_target_is_told_by_the_next_step)
{
    fake_begin();
    kn_linear net = { 0 };
    KN_CHECK(kn_linear_init(&net, NULL, NULL, 4, 3, .device = KN_CUDA));
    kn_optim *opt = kn_sgd(&net, .lr = 0.1);
    int told = -1;
    for (int step = 0; step < 12 && told < 0; step++) {
        kn_scope scope = kn_scope_begin();
        int64_t y[2] = { 1, step == 4 ? 7 : 2 };
        kn_tensor *x = kn_full(KN_F32, KN_CUDA, 1, KN_SHAPE(2, 4));
        kn_backward(kn_cross_entropy(kn_call(&net, x), kn_from(KN_I64, KN_CUDA, y, KN_SHAPE(2))));
        if (!kn_step(opt))
            told = step;
        kn_scope_end(scope);
    }
    KN_CHECK(told == 5, "told by step %d", told);
    KN_CHECK_ERROR("cross_entropy: target 7 in row 1 is outside the classes");
    kn_optim_free(opt);
    kn_module_free(&net);
}

/* A limit of GPU memory below the size of parameters, gradients and states. */
KN_TEST(cuda_runtime, a_gpt_larger_than_the_gpu_trains_offloaded)
{
    enum { LAYERS = 6, EMBD = 64, ELEMENTS = LAYERS * 12 * EMBD * EMBD };
    double unlimited[2], limited[2];
    char limit[32];
    fake_begin();
    KN_CHECK(trained(KN_CUDA, KN_F32, "memory", LAYERS, EMBD, 2, unlimited), "%s", kn_error());
    kn_ledger l = kn_ledger_read();
    KN_CHECK(l.peak_pinned > 16 * ELEMENTS && l.peak_total < 16 * ELEMENTS,
             "%lld bytes on the host, %lld on the GPU, %d of states", (long long)l.peak_pinned,
             (long long)l.peak_total, 16 * ELEMENTS);
    kn_context_end();
    snprintf(limit, sizeof limit, "%lld", (long long)l.peak_total);
    setenv("KNAP_MEMORY_LIMIT", limit, 1);
    KN_CHECK(!trained(KN_CUDA, KN_F32, NULL, LAYERS, EMBD, 2, limited));
    KN_CHECK_ERROR("out of memory");
    kn_context_end();
    KN_CHECK(trained(KN_CUDA, KN_F32, "memory", LAYERS, EMBD, 2, limited), "%s", kn_error());
    kn_context_end();
    unsetenv("KNAP_MEMORY_LIMIT");
    KN_CHECK(memcmp(unlimited, limited, sizeof limited) == 0, "losses %.9g and %.9g", unlimited[1],
             limited[1]);
}
