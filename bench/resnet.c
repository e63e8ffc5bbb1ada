/* bench/resnet.c: images/s of training a ResNet (models/resnet.h): forward, cross-entropy,
 * backward, SGD with momentum; one rank, masters in f32, channels-last.
 *
 *   resnet [--model NAME] [--batch N] [--size N] [--dtype f32|bf16|f16] [--device cpu|cuda]
 *          [--steps N] [--trace FILE]
 *
 * Default: resnet50 of 8 images of 224 x 224, resnet18 and the nets for CIFAR of 64 of 32 x 32,
 * f32. Images below 64 x 64 get the stem usual for them: a 3 x 3 convolution, no pooling.
 *
 * Prints the median step, images/s, the processor time of a step, and where the time of two more,
 * traced steps went: a line for each kind of kernel and provider, the share of convolutions, that
 * of the reference's kernels.
 * --trace: writes these two steps for Chrome's viewer. Exit status 1 if a kind of kernel of the
 * reference takes more than 0.5 % of a step. */
#include "bench/args.h"
#include "knap.h"

#include <stdio.h>
#include <time.h>

enum { WARM = 2, TRACED = 2, KINDS = 64 };

#define LIMIT 0.005 /* of a step: a kind of kernel of the reference */

/* ---- steps ----------------------------------------------------------------------------------- */

typedef struct work {
    const char *name;
    kn_device device;
    kn_dtype dtype;
    int64_t batch, size, steps;
    const char *trace; /* a file, or NULL */
    kn_resnet_config config;
    kn_resnet net;
    kn_optim *opt;
    kn_tensor *x, *y;
} work;

static bool work_begin(work *w)
{
    const kn_dtype dtype = w->dtype == KN_F32 ? KN_DTYPE_DEFAULT : w->dtype;
    if (!kn_resnet_init(&w->net, w->config, KN_F32, KN_META) ||
        !kn_fsdp_wrap(&w->net, NULL, .device = w->device, .param_dtype = dtype, .seed = 42))
        return false;
    kn_scope scope = kn_scope_begin();
    kn_tensor *x = kn_randn(KN_F32, w->device, 1, 1, KN_SHAPE(w->batch, 3, w->size, w->size));
    w->x = kn_keep(kn_channels_last(x));
    w->y = kn_keep(kn_randint(KN_I64, w->device, 0, w->config.classes, 1, 2, KN_SHAPE(w->batch)));
    kn_scope_end(scope);
    w->opt = kn_sgd(&w->net, .lr = 1e-3, .momentum = 0.9);
    return kn_ok();
}

static void work_end(work *w)
{
    kn_tensor_free(w->x);
    kn_tensor_free(w->y);
    kn_optim_free(w->opt);
    kn_module_free(&w->net);
}

/* Seconds that this process's threads computed so far. */
static double busy(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Returns its seconds; 0 after an error. */
static double step(work *w)
{
    const double begin = kn_now();
    kn_scope scope = kn_scope_begin();
    kn_backward(kn_cross_entropy(kn_call(&w->net, w->x), w->y));
    kn_step(w->opt);
    kn_scope_end(scope);
    return kn_stream_sync(kn_compute_stream(w->device)) && kn_ok() ? kn_now() - begin : 0;
}

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* ---- output ---------------------------------------------------------------------------------- */

/* Kernels of a kind that one provider ran. */
typedef struct kind {
    const char *what, *provider;
    int64_t calls;
    double seconds, flops, bytes;
} kind;

static int by_time(const void *a, const void *b)
{
    const kind *x = a, *y = b;
    return x->seconds > y->seconds ? -1 : x->seconds < y->seconds;
}

/* Adds up the kernels in events; what the host and the hooks do isn't one. */
static int add_up(const kn_trace_event *events, size_t count, kind kinds[KINDS])
{
    int n = 0;
    for (size_t i = 0; i < count; i++) {
        const kn_trace_event *e = &events[i];
        int k = 0;
        while (k < n &&
               (strcmp(kinds[k].what, e->what) != 0 || strcmp(kinds[k].provider, e->provider) != 0))
            k++;
        if (!e->stream || strcmp(e->provider, "host") == 0 || k == KINDS)
            continue;
        if (k == n)
            kinds[n++] = (kind){ .what = e->what, .provider = e->provider };
        kinds[k].calls++;
        kinds[k].seconds += (e->end - e->begin) / TRACED;
        kinds[k].flops += e->flops / TRACED;
        kinds[k].bytes += e->bytes / TRACED;
    }
    qsort(kinds, (size_t)n, sizeof *kinds, by_time);
    return n;
}

/* False if a kind of kernel of the reference takes too long. */
static bool print_kinds(const kind *kinds, int n, double seconds)
{
    double convs = 0, reference = 0, most = 0, rest = seconds;
    printf("%-20s %-10s %7s %9s %7s %9s %8s\n", "kernel", "provider", "calls", "ms", "share",
           "GFLOP/s", "GB/s");
    for (int i = 0; i < n; i++) {
        const kind *k = &kinds[i];
        const bool is_reference = strcmp(k->provider, "reference") == 0;
        printf("%-20s %-10s %7.1f %9.2f %5.1f %% %9.1f %8.1f\n", k->what, k->provider,
               (double)k->calls / TRACED, 1e3 * k->seconds, 100 * k->seconds / seconds,
               k->flops / k->seconds / 1e9, k->bytes / k->seconds / 1e9);
        convs += strncmp(k->what, "conv", 4) == 0 ? k->seconds : 0;
        reference += is_reference ? k->seconds : 0;
        most = is_reference && k->seconds > most ? k->seconds : most;
        rest -= k->seconds;
    }
    printf("convolutions %.1f %%, kernels of the reference %.2f %% (largest kind %.2f %%), between "
           "kernels %.1f %%\n",
           100 * convs / seconds, 100 * reference / seconds, 100 * most / seconds,
           100 * rest / seconds);
    return most <= LIMIT * seconds;
}

static bool print_trace(work *w)
{
    kn_trace_event *events = NULL;
    kind kinds[KINDS];
    double seconds = 0;
    kn_trace_start(100000);
    for (int i = 0; i < TRACED; i++)
        seconds += step(w) / TRACED;
    if (w->trace)
        kn_trace_write(w->trace);
    const size_t count = kn_trace_stop(&events);
    const bool good = kn_ok() && print_kinds(kinds, add_up(events, count, kinds), seconds);
    kn_host_free(events);
    return good;
}

static bool measure(work *w)
{
    double *seconds = calloc((size_t)w->steps, sizeof *seconds);
    for (int i = 0; i < WARM; i++)
        step(w);
    const double before = busy();
    for (int64_t i = 0; seconds && i < w->steps; i++)
        seconds[i] = step(w);
    const double used = (busy() - before) / (double)w->steps;
    if (!seconds || !kn_ok()) {
        free(seconds);
        return false;
    }
    qsort(seconds, (size_t)w->steps, sizeof *seconds, by_size);
    const double median = seconds[w->steps / 2];
    printf("%s %s, %lld x %lld x %lld: %.1f ms a step (best %.1f), %.1f ms of processors, %.2f "
           "images/s\n",
           w->name, kn_dtype_name(w->dtype), (long long)w->batch, (long long)w->size,
           (long long)w->size, 1e3 * median, 1e3 * seconds[0], 1e3 * used,
           (double)w->batch / median);
    fflush(stdout);
    free(seconds);
    return print_trace(w);
}

int main(int argc, char **argv)
{
    args_begin(argc, argv,
               "Images/s of training a ResNet.\n"
               "  bench_resnet [--model NAME] [--batch N] [--size N] [--dtype f32|bf16|f16] "
               "[--device cpu|cuda]"
               "\n    [--steps N] [--trace FILE] [--threads N]",
               0);
    kn_init(&argc, &argv);
    work w = { .name = word(argc, argv, "--model", "resnet50") };
    if (!kn_ok() || !kn_resnet_preset(w.name, &w.config))
        return kn_finish();
    const bool large = w.config.bottleneck;
    w.device = strcmp(word(argc, argv, "--device", "cpu"), "cuda") == 0 ? KN_CUDA : KN_CPU;
    w.batch = number(argc, argv, "--batch", large ? 8 : 64);
    w.size = number(argc, argv, "--size", large ? 224 : 32);
    w.steps = number(argc, argv, "--steps", 5);
    w.config.small_images = w.size < 64;
    w.dtype = kn_dtype_parse(word(argc, argv, "--dtype", "f32"));
    w.trace = word(argc, argv, "--trace", NULL);
    if (w.batch < 1 || w.size < 1 || w.steps < 1) {
        fprintf(stderr, "--batch, --size and --steps are at least 1\n");
        return 1;
    }
    bool good = kn_ok() && work_begin(&w) && measure(&w);
    work_end(&w);
    int status = kn_finish();
    return status ? status : !good;
}
