/* tests/gpu/cuda_steps_test.c: whole training steps on the CUDA device over fake CUDA
 * (tests/gpu/fake_cuda/fake.h): against the CPU's, the host's waits in them, a limit of the GPU's
 * memory. */
#include "kernels/context.h"
#include "knap.h"
#include "tests/owned.h"
#include "tests/gpu/fake_cuda/fake.h"

/* ---- training -------------------------------------------------------------------------------- */

enum { STEPS = 4 };

/* Losses of a small GPT; false with an error. */
static bool trained(kn_device device, kn_dtype dtype, const char *offload, int layers, int embd,
                    int steps, double *loss)
{
    OWNED_MODULE kn_gpt g = { 0 };
    kn_gpt_config c = {
        .layers = layers, .heads = 2, .embd = embd, .ctx = 8, .vocab = 50, .dropout = 0.1
    };
    kn_gpt_init(&g, c, KN_F32, KN_META);
    kn_fsdp_wrap(&g, NULL, .wrap_class = "gpt_block", .device = device, .param_dtype = dtype,
                 .offload_dir = offload);
    OWNED_OPTIM kn_optim *opt = kn_adamw(&g, .lr = 1e-3);
    for (int step = 0; kn_ok() && step < steps; step++) {
        IN_SCOPE;
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
    }
    return kn_ok();
}

static void train(kn_device device, kn_dtype dtype, const char *offload, double loss[STEPS])
{
    KN_CHECK(trained(device, dtype, offload, 2, 16, STEPS, loss));
    kn_context_end(); /* the next one draws the same numbers */
}

KN_TEST(cuda_steps, a_gpt_trains_as_on_the_cpu)
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

enum { WARM = 3, LONG = 3 };

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
        KN_CHECK(scaler ? kn_scaler_step(scaler, opt) : kn_step(opt));
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

KN_TEST(cuda_steps, a_steady_step_waits_for_nothing)
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
KN_TEST(cuda_steps, a_bad_target_is_told_by_the_next_step)
{
    fake_begin();
    OWNED_MODULE kn_linear net = { 0 };
    KN_CHECK(kn_linear_init(&net, NULL, NULL, 4, 3, .device = KN_CUDA));
    OWNED_OPTIM kn_optim *opt = kn_sgd(&net, .lr = 0.1);
    int told = -1;
    for (int step = 0; step < 12 && told < 0; step++) {
        IN_SCOPE;
        int64_t y[2] = { 1, step == 4 ? 7 : 2 };
        kn_tensor *x = kn_full(KN_F32, KN_CUDA, 1, KN_SHAPE(2, 4));
        kn_backward(kn_cross_entropy(kn_call(&net, x), kn_from(KN_I64, KN_CUDA, y, KN_SHAPE(2))));
        if (!kn_step(opt))
            told = step;
    }
    KN_CHECK(told == 5, "told by step %d", told);
    KN_CHECK_ERROR("cross_entropy: target 7 in row 1 is outside the classes");
}

/* A limit of GPU memory below the size of parameters, gradients and states. */
KN_TEST(cuda_steps, a_gpt_larger_than_the_gpu_trains_offloaded)
{
    enum { LAYERS = 6, EMBD = 64, ELEMENTS = LAYERS * 12 * EMBD * EMBD };
    double unlimited[2], limited[2];
    char limit[32];
    fake_begin();
    KN_CHECK(trained(KN_CUDA, KN_F32, "memory", LAYERS, EMBD, 2, unlimited));
    kn_ledger l = kn_ledger_read();
    KN_CHECK(l.peak_pinned > 16 * ELEMENTS && l.peak_total < 16 * ELEMENTS,
             "%lld bytes on the host, %lld on the GPU, %d of states", (long long)l.peak_pinned,
             (long long)l.peak_total, 16 * ELEMENTS);
    kn_context_end();
    snprintf(limit, sizeof limit, "%lld", (long long)l.peak_total);
    setenv("KNAP_MEMORY_LIMIT", limit, 1);
    REFUSED(trained(KN_CUDA, KN_F32, NULL, LAYERS, EMBD, 2, limited), "out of memory");
    kn_context_end();
    KN_CHECK(trained(KN_CUDA, KN_F32, "memory", LAYERS, EMBD, 2, limited));
    kn_context_end();
    unsetenv("KNAP_MEMORY_LIMIT");
    KN_CHECK(memcmp(unlimited, limited, sizeof limited) == 0, "losses %.9g and %.9g", unlimited[1],
             limited[1]);
}
