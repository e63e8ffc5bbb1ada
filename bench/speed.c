/* bench/speed.c: a training step of a model (forward, backward, update; one rank, masters and
 * gradients in f32, as in the trainers) beside the ceilings of this machine, its product and its
 * copy, measured in the same run.
 *
 *   bench_speed [--model NAME] [--batch N] [--ctx N] [--size N] [--layers N] [--steps N]
 *               [--dtype f32|bf16|f16] [--device cpu|cuda] [--threads N] [--trace FILE] [--serve]
 *
 * NAME: gpt2 (the default, 4 x 64 tokens), stories110m, both with AdamW and clipping; char,
 * nanoGPT's CPU setting (4 layers of 128 channels, 12 x 64 characters); vit_small_patch16_224 and
 * the other names of models/vit.h, with AdamW and clipping; resnet50 (8 x 224 x 224), resnet18,
 * resnet20 (64 x 32 x 32) and the other names of models/resnet.h, with momentum, channels-last.
 *
 * Prints the step's median, a line a kernel of one more, traced step, and the floor: the operations
 * of its products, convolutions and attention at the product's rate, and at the copy's rate the
 * bytes that an update must move: with AdamW 28 a parameter (it reads and writes the parameter and
 * two states and reads the gradient), with momentum 20. Exit status 1 if a kind of kernel of the
 * reference takes more than 0.5 % of a step of 20 ms or more.
 *
 * --serve: takes --steps steps at each line "steps" of stdin and measures the rates at each
 * "rates"; answers by a line, "SECONDS PROCESSOR-SECONDS" (the median step) or "PRODUCT COPY" (a
 * second); at "end" by "OPERATIONS BYTES PEAK": of the floor, and the most memory in bytes. So
 * scripts/peers speed makes it take turns with PyTorch. */
#include "bench/args.h"
#include "bench/kernel_rows.h"
#include "bench/times.h"
#include "knap.h"
#include "kernels/kernels.h"

#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

enum { WARM = 2, TRACE_EVENTS = 200000 };

#define LIMIT      0.005 /* of a step: a kind of kernel of the reference */
#define LONG_STEPS 0.02  /* seconds from which LIMIT counts */

typedef struct work {
    kn_dtype dtype;
    kn_device device;
    int64_t batch, steps;
    union {
        kn_module base;
        kn_gpt gpt;
        kn_llama llama;
        kn_vit vit;
        kn_resnet resnet;
    } net;
    kn_tensor *(*loss)(struct work *w);
    kn_optim *opt;
    double bytes; /* that the update of one parameter must move */
    bool clip;
    kn_tensor *x, *y;
} work;

/* ---- models ---------------------------------------------------------------------------------- */

static kn_tensor *gpt_loss(work *w)
{
    return kn_gpt_loss(&w->net.gpt, w->x, w->y);
}

static kn_tensor *llama_loss(work *w)
{
    return kn_llama_loss(&w->net.llama, w->x, w->y);
}

static kn_tensor *image_loss(work *w)
{
    return kn_cross_entropy(kn_call(&w->net.base, w->x), w->y);
}

/* Tokens and their successors. */
static void language(work *w, int64_t batch, int64_t ctx, int64_t vocab)
{
    w->batch = w->batch ? w->batch : batch;
    w->x = kn_randint(KN_I64, w->device, 0, vocab, 1, 1, KN_SHAPE(w->batch, ctx));
    w->y = kn_randint(KN_I64, w->device, 0, vocab, 1, 2, KN_SHAPE(w->batch, ctx));
    w->clip = true;
}

static void images(work *w, int64_t batch, int64_t size, int64_t classes)
{
    w->batch = w->batch ? w->batch : batch;
    kn_tensor *x = kn_randn(KN_F32, w->device, 1, 1, KN_SHAPE(w->batch, 3, size, size));
    w->x = kn_channels_last(x);
    w->y = kn_randint(KN_I64, w->device, 0, classes, 1, 2, KN_SHAPE(w->batch));
    w->loss = image_loss;
}

static bool init(work *w, int argc, char **argv)
{
    const char *name = word(argc, argv, "--model", "gpt2");
    const int64_t layers = number(argc, argv, "--layers", 0), ctx = number(argc, argv, "--ctx", 64);
    w->batch = number(argc, argv, "--batch", 0);
    if (strcmp(name, "char") == 0 || strncmp(name, "gpt2", 4) == 0) {
        kn_gpt_config c = { .layers = 4, .heads = 4, .embd = 128, .vocab = 65, .no_bias = true };
        const bool small = strcmp(name, "char") == 0;
        if (!small && !kn_gpt_preset(name, &c))
            return false;
        c.ctx = c.ctx > ctx ? c.ctx : ctx;
        c.layers = layers ? (int)layers : c.layers;
        language(w, small ? 12 : 4, ctx, c.vocab);
        w->loss = gpt_loss;
        return kn_gpt_init(&w->net.gpt, c, KN_F32, KN_META);
    }
    if (strncmp(name, "stories", 7) == 0 || strncmp(name, "llama", 5) == 0) {
        kn_llama_config c;
        if (!kn_llama_preset(name, &c))
            return false;
        c.layers = layers ? (int)layers : c.layers;
        language(w, 4, ctx, c.vocab);
        w->loss = llama_loss;
        return kn_llama_init(&w->net.llama, c, KN_F32, KN_META);
    }
    if (strncmp(name, "vit", 3) == 0) {
        kn_vit_config c;
        if (!kn_vit_preset(name, &c))
            return false;
        c.layers = layers ? (int)layers : c.layers;
        images(w, 8, c.image, c.classes);
        w->clip = true;
        return kn_vit_init(&w->net.vit, c, KN_F32, KN_META);
    }
    if (strncmp(name, "resnet", 6) != 0)
        return kn_fail("--model %s: there is no such model; --help lists some names", name);
    kn_resnet_config c;
    if (!kn_resnet_preset(name, &c))
        return false;
    const int64_t size = number(argc, argv, "--size", c.bottleneck ? 224 : 32);
    c.small_images = size < 64;
    images(w, c.bottleneck ? 8 : 64, size, c.classes);
    return kn_resnet_init(&w->net.resnet, c, KN_F32, KN_META);
}

static bool work_begin(work *w, int argc, char **argv)
{
    const kn_dtype dtype = w->dtype == KN_F32 ? KN_DTYPE_DEFAULT : w->dtype;
    const kn_scope scope = kn_scope_begin();
    const bool good = init(w, argc, argv);
    w->x = kn_keep(w->x);
    w->y = kn_keep(w->y);
    kn_scope_end(scope);
    if (!good || !kn_fsdp_wrap(&w->net, NULL, .device = w->device, .param_dtype = dtype,
                               .reduce_dtype = KN_F32, .seed = 42))
        return false;
    w->opt = w->clip ? kn_adamw(&w->net, .lr = 1e-4, .weight_decay = 0.1)
                     : kn_sgd(&w->net, .lr = 1e-3, .momentum = 0.9);
    w->bytes = (w->clip ? 28.0 : 20.0) * (double)kn_param_count(&w->net);
    return kn_ok();
}

static void work_end(work *w)
{
    kn_tensor_free(w->x);
    kn_tensor_free(w->y);
    kn_optim_free(w->opt);
    kn_module_free(&w->net);
}

/* ---- steps ----------------------------------------------------------------------------------- */

/* Returns its seconds. */
static double step(work *w)
{
    const double begin = kn_now();
    const kn_scope scope = kn_scope_begin();
    kn_backward(w->loss(w));
    if (w->clip)
        kn_clip_grad_norm(&w->net, 1.0);
    kn_step(w->opt);
    kn_scope_end(scope);
    kn_stream_sync(kn_compute_stream(w->device));
    return kn_now() - begin;
}

/* The median of w->steps steps, the fastest, and the processors' seconds of a step. */
static bool measure(work *w, double *median, double *best, double *processors)
{
    double *seconds = kn_host_alloc((size_t)w->steps * sizeof *seconds);
    const double before = processor_seconds();
    for (int64_t i = 0; seconds && i < w->steps && kn_ok(); i++)
        seconds[i] = step(w);
    if (!seconds || !kn_ok()) {
        kn_host_free(seconds);
        return false;
    }
    *processors = (processor_seconds() - before) / (double)w->steps;
    *median = median_of(seconds, w->steps);
    *best = seconds[0];
    kn_host_free(seconds);
    return true;
}

/* ---- ceilings -------------------------------------------------------------------------------- */

/* Operations a second of the faster one of two square products, and bytes a second that a copy of
 * 256 MiB reads and writes. */
static void rates(const work *w, double *product, double *copy)
{
    *product = *copy = 0;
    kn_stream *stream = kn_compute_stream(w->device);
    for (int i = 0; i < 12 && kn_ok(); i++) {
        const int64_t n = i < 8 ? 1024 : 2048;
        const kn_scope scope = kn_scope_begin();
        kn_tensor *a = kn_randn(w->dtype, w->device, 1, 1, KN_SHAPE(n, n)),
                  *b = kn_randn(w->dtype, w->device, 1, 2, KN_SHAPE(n, n));
        kn_stream_sync(stream);
        const double begin = kn_now();
        kn_matmul(a, b);
        kn_stream_sync(stream);
        const double rate = 2.0 * (double)(n * n * n) / (kn_now() - begin);
        *product = rate > *product ? rate : *product;
        kn_scope_end(scope);
    }
    const size_t bytes = (size_t)256 << 20;
    const kn_scope scope = kn_scope_begin();
    kn_tensor *a = kn_zeros(KN_F32, w->device, KN_SHAPE((int64_t)(bytes / 4))),
              *b = kn_zeros_like(a);
    for (int i = 0; i < 6 && kn_ok(); i++) {
        kn_stream_sync(stream);
        const double begin = kn_now();
        kn_copy_(b, a);
        kn_stream_sync(stream);
        const double rate = 2.0 * (double)bytes / (kn_now() - begin);
        *copy = rate > *copy ? rate : *copy;
    }
    kn_scope_end(scope);
}

/* ---- a traced step --------------------------------------------------------------------------- */

static int by_time(const void *a, const void *b)
{
    const kernel_row *x = a, *y = b;
    return x->seconds < y->seconds ? 1 : x->seconds > y->seconds ? -1 : 0;
}

/* Takes one step; fills rows with its kernels, the slowest kind first. Returns its seconds. */
static double traced(work *w, kernel_rows *rows, const char *file)
{
    kn_trace_event *events = NULL;
    kn_trace_start(TRACE_EVENTS);
    const double seconds = step(w);
    if (file)
        kn_trace_write(file);
    const size_t count = kn_trace_stop(&events);
    for (size_t i = 0; i < count; i++)
        if (events[i].stream && strcmp(events[i].provider, "host") != 0)
            kernel_rows_add_as(rows, events[i].what, &events[i], events[i].end - events[i].begin);
    kn_host_free(events);
    qsort(rows->row, (size_t)rows->count, sizeof *rows->row, by_time);
    return seconds;
}

static double operations(const kernel_rows *rows)
{
    double sum = 0;
    for (int i = 0; i < rows->count; i++)
        if (is_product(rows->row[i].name) || is_attention(rows->row[i].name))
            sum += rows->row[i].flops;
    return sum;
}

/* False if a kind of kernel of the reference takes too long. */
static bool print_rows(const kernel_rows *rows, double seconds, double product, double copy)
{
    double rest = seconds, most = 0;
    printf("%-22s %-10s %6s %9s %6s %9s %6s %9s %6s\n", "kernel", "provider", "calls", "ms",
           "share", "GFLOP/s", "of it", "GB/s", "of it");
    for (int i = 0; i < rows->count; i++) {
        const kernel_row *r = &rows->row[i];
        printf("%-22s %-10s %6.0f %9.2f %5.1f%% %9.1f %5.0f%% %9.1f %5.0f%%\n", r->name,
               r->provider, r->calls, 1e3 * r->seconds, 100 * r->seconds / seconds,
               r->flops / r->seconds / 1e9, 100 * r->flops / r->seconds / product,
               r->bytes / r->seconds / 1e9, 100 * r->bytes / r->seconds / copy);
        rest -= r->seconds;
        if (strcmp(r->provider, "reference") == 0 && r->seconds > most)
            most = r->seconds;
    }
    printf("between kernels %.2f ms; the slowest kind of the reference %.2f %% of the step\n",
           1e3 * rest, 100 * most / seconds);
    return seconds < LONG_STEPS || most <= LIMIT * seconds;
}

static bool print(work *w, const char *trace)
{
    double median, best, processors, product, copy;
    kernel_rows rows = { .count = 0 };
    rates(w, &product, &copy);
    if (!kn_ok() || !measure(w, &median, &best, &processors))
        return false;
    printf("machine: %s, %d threads, %s; product %.0f GFLOP/s, copy %.1f GB/s\n", kn_cpu_isa(),
           kn_threads(), kn_cpu_libraries(), product / 1e9, copy / 1e9);
    const double seconds = traced(w, &rows, trace);
    const bool good = kn_ok() && print_rows(&rows, seconds, product, copy);
    const double floor = operations(&rows) / product + w->bytes / copy;
    printf(
        "step of %lld: median of %lld %.1f ms (best %.1f), %.1f ms of processors; floor %.1f ms: "
        "%.0f %% of the median\n",
        (long long)w->batch, (long long)w->steps, 1e3 * median, 1e3 * best, 1e3 * processors,
        1e3 * floor, 100 * floor / median);
    return good;
}

static double most_memory(void)
{
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return 1024.0 * (double)usage.ru_maxrss;
}

static bool serve(work *w)
{
    char line[16];
    double peak = 0; /* without the arrays of the rates */
    while (kn_ok() && fgets(line, sizeof line, stdin)) {
        double a = 0, b = 0, best;
        if (strcmp(line, "steps\n") == 0) {
            measure(w, &a, &best, &b);
            printf("%.9f %.9f\n", a, b);
        } else if (strcmp(line, "rates\n") == 0) {
            peak = peak > 0 ? peak : most_memory();
            rates(w, &a, &b);
            printf("%.6g %.6g\n", a, b);
        } else if (strcmp(line, "end\n") == 0) {
            kernel_rows rows = { .count = 0 };
            peak = peak > 0 ? peak : most_memory();
            traced(w, &rows, NULL);
            printf("%.9g %.9g %.9g\n", operations(&rows), w->bytes, peak);
            return kn_ok();
        } else {
            fprintf(stderr, "bench_speed: a line of stdin is \"steps\", \"rates\" or \"end\".\n");
            return false;
        }
        fflush(stdout);
    }
    return false;
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "A training step of a model beside the ceilings of this machine.\n"
               "  bench_speed [--model NAME] [--batch N] [--ctx N] [--size N] [--layers N]\n"
               "    [--dtype f32|bf16|f16] [--device cpu|cuda] [--steps N] [--threads N]\n"
               "    [--trace FILE] [--serve]\n"
               "NAME: gpt2, char, stories110m, vit_small_patch16_224, resnet50, resnet18, resnet20",
               0);
    kn_init(&argc, &argv);
    work w = { .dtype = kn_dtype_parse(word(argc, argv, "--dtype", "f32")),
               .device =
                   strcmp(word(argc, argv, "--device", "cpu"), "cuda") == 0 ? KN_CUDA : KN_CPU,
               .steps = number(argc, argv, "--steps", 5) };
    const char *trace = word(argc, argv, "--trace", NULL);
    const char *device = word(argc, argv, "--device", "cpu");
    if ((w.dtype != KN_F32 && w.dtype != KN_BF16 && w.dtype != KN_F16) ||
        (strcmp(device, "cpu") != 0 && strcmp(device, "cuda") != 0)) {
        fprintf(stderr, "--dtype is f32, bf16 or f16, --device cpu or cuda\n");
        return 1;
    }
    if (w.steps < 1 || number(argc, argv, "--batch", 1) < 1 ||
        number(argc, argv, "--ctx", 64) < 1 || number(argc, argv, "--size", 32) < 1 ||
        number(argc, argv, "--layers", 1) < 1) {
        fprintf(stderr, "--batch, --ctx, --size, --layers and --steps are at least 1\n");
        return 1;
    }
    bool good = kn_ok() && work_begin(&w, argc, argv);
    for (int i = 0; good && i < WARM; i++)
        step(&w);
    good = good && (flag(argc, argv, "--serve") ? serve(&w) : print(&w, trace));
    work_end(&w);
    const int status = kn_finish();
    return status ? status : !good;
}
